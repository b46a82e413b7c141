"""Batch samplers: which dataset indices a data-parallel rank reads, micro-batch by micro-batch."""

from hp_nodes.samplers.blended import BlendedBatchSampler
from hp_nodes.samplers.contract import BatchSampler, check_batch_sampler, sampler_fingerprint
from hp_nodes.samplers.distributed import DistributedBatchSampler

__all__ = [
    "BatchSampler",
    "BlendedBatchSampler",
    "DistributedBatchSampler",
    "check_batch_sampler",
    "sampler_fingerprint",
]
