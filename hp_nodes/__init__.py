"""hp-nodes: every data-parallel rank gets the same amount of work in every step, and training resumes exactly."""

from hp_nodes.errors import DataPlaneError
from hp_nodes.loader import DistributedDataLoader
from hp_nodes.nodes import (
    Collator,
    DevicePrefetcher,
    ExternalStepReader,
    HostPrefetcher,
    MetadataDeriver,
    ModelParallelBroadcaster,
    Packer,
    Planner,
    Router,
    SampleReader,
    Splitter,
    StepCheckpointer,
    WindowSampler,
    describe,
    peek,
)
from hp_nodes.randomness import sample_rng
from hp_nodes.types import MicroBatch, SampleKey, SampleMetadata, TensorFieldSpec, Window, WorkloadCost

__all__ = [
    "Collator",
    "DataPlaneError",
    "DevicePrefetcher",
    "DistributedDataLoader",
    "ExternalStepReader",
    "HostPrefetcher",
    "MetadataDeriver",
    "MicroBatch",
    "ModelParallelBroadcaster",
    "Packer",
    "Planner",
    "Router",
    "SampleKey",
    "SampleMetadata",
    "SampleReader",
    "Splitter",
    "StepCheckpointer",
    "TensorFieldSpec",
    "Window",
    "WindowSampler",
    "WorkloadCost",
    "describe",
    "peek",
    "sample_rng",
]
