"""The external graph: the user's own source defines the steps; samples move between ranks only when that gains enough.

This page is the whole composition; copy it to make your own. Steps are planned, and samples move, within balancing
groups; opening and closing of a window are agreed by all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from graphs.config import DistributedDatasetConfig, staged_ahead
from hp_nodes import (
    Collator,
    DevicePrefetcher,
    ExternalStepReader,
    HostPrefetcher,
    MetadataDeriver,
    ModelParallelBroadcaster,
    Packer,
    Planner,
    Router,
    SampleMetadata,
    StepCheckpointer,
    Window,
    WorkloadCost,
)
from hp_nodes.nodes.group_boundary import GroupBoundary
from hp_nodes.planning import BalancingAlgorithm
from hp_nodes.transport import Transport
from hp_nodes.transport.balance_group import CoupledTransport
from hp_nodes.types import MicroBatch

__all__ = ["ExternalParts", "external_graph"]


@dataclass(frozen=True)
class ExternalParts:
    """What the user brings to an external graph. ``steps`` yields on each rank whole local rounds, each a sequence of
    exactly ``local_batch_size`` non-empty bins of raw samples; ``rounds_per_step`` of them are an optimizer step.
    """

    steps: Iterable[Any] | BaseNode[Any]
    metadata_fn: Callable[[Any], SampleMetadata]
    rounds_per_step: int = 1
    cost_model: Callable[[SampleMetadata], WorkloadCost] | None = None
    padding_cost: NDArray[Any] | None = None
    pack_fn: Callable[[Sequence[Any], int], Any] | None = None
    collate_fn: Callable[[Sequence[Any]], Any] | None = None
    algorithm: BalancingAlgorithm | None = None


def external_graph(
    parts: ExternalParts,
    config: DistributedDatasetConfig,
    data: Transport,
    group: Transport,
    model: Transport,
    *,
    device: Any = "cpu",
) -> BaseNode[MicroBatch]:
    """The graph of a rank, over all data-parallel ranks, its balancing group and its model-parallel group.

    Args:
        group: from :func:`hp_nodes.transport.balance_group.create_balance_group`; ``data`` itself when all are one.
    """
    size = config.local_batch_size
    windows: BaseNode[Window] = ExternalStepReader(
        parts.steps, parts.rounds_per_step, local_batch_size=size, transport=data
    )
    windows = MetadataDeriver(windows, parts.metadata_fn, cost_model=parts.cost_model)
    windows = Planner(
        windows,
        group,
        seq_len=config.seq_len,
        local_batch_size=size,
        objective=config.objective,
        min_balance_gain=config.min_balance_gain,
        algorithm=parts.algorithm,
        allow_oversized=config.oversized_policy == "single",
        packing_budgets=config.packing_budgets,
        padding_cost=parts.padding_cost,
        broadcast_plan=config.broadcast_plan,
    )
    windows = Router(windows, group, allow_pickle=config.allow_pickle)
    if group is not data:
        windows = GroupBoundary(windows, group)
    windows = Packer(windows, parts.pack_fn, seq_len=config.seq_len, local_batch_size=size)
    batches: BaseNode[MicroBatch] = Collator(windows, parts.collate_fn, local_batch_size=size)
    everyone = data if group is data else CoupledTransport(data, group)
    batches = HostPrefetcher(batches, everyone, config.host_prefetch_depth)
    batches = DevicePrefetcher(batches, device, staged_ahead(device, config))
    batches = ModelParallelBroadcaster(batches, model, allow_pickle=config.allow_pickle)
    return StepCheckpointer(batches)
