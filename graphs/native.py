"""The native graphs: a batch sampler defines the steps, everything else is nodes put together.

This page is the whole composition; copy it to make your own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from graphs.config import DistributedDatasetConfig, staged_ahead
from hp_nodes import (
    Collator,
    DevicePrefetcher,
    HostPrefetcher,
    MetadataDeriver,
    ModelParallelBroadcaster,
    Packer,
    Planner,
    Router,
    SampleMetadata,
    SampleReader,
    Splitter,
    StepCheckpointer,
    Window,
    WindowSampler,
    WorkloadCost,
)
from hp_nodes.nodes.batch_layout import BatchLayout, names_on_host
from hp_nodes.planning import BalancingAlgorithm
from hp_nodes.samplers import BatchSampler
from hp_nodes.transport import Transport
from hp_nodes.types import MicroBatch

__all__ = ["NativeParts", "native_graph", "peer_graph"]


@dataclass(frozen=True)
class NativeParts:
    """What the user brings to a native graph: the functions of each stage, None where the stage has a default."""

    dataset: Any
    batch_sampler: BatchSampler
    metadata_fn: Callable[[Any], SampleMetadata] | None = None
    metadata: Any = None
    cost_model: Callable[[SampleMetadata], WorkloadCost] | None = None
    padding_cost: NDArray[Any] | None = None
    split_fn: Callable[[Any], Sequence[Any]] | None = None
    pack_fn: Callable[[Sequence[Any], int], Any] | None = None
    collate_fn: Callable[[Sequence[Any]], Any] | None = None
    algorithm: BalancingAlgorithm | None = None
    nothing_to_plan: bool = False
    batch_spec: Any = None
    num_workers: int = 0
    worker_options: Mapping[str, Any] | None = None
    device: Any = "cpu"


def native_graph(
    parts: NativeParts,
    config: DistributedDatasetConfig,
    data: Transport,
    model: Transport,
    tensors: Transport | None = None,
) -> BaseNode[MicroBatch]:
    """The graph of a constructor, over its data-parallel and its model-parallel group.

    Args:
        tensors: of the model-parallel group, for the tensors of a micro-batch; None: ``model`` carries them too.
    """
    windows: BaseNode[Window] = WindowSampler(parts.batch_sampler, config.balance_window_size)
    if parts.metadata is None:
        windows = _reader(windows, parts, config)
        if parts.split_fn is not None:
            windows = Splitter(windows, parts.split_fn, seed=config.seed)
        windows = MetadataDeriver(windows, parts.metadata_fn, cost_model=parts.cost_model)
        windows = _planner(windows, parts, config, data)
        windows = Router(windows, data, allow_pickle=config.allow_pickle)
    else:
        windows = MetadataDeriver(windows, metadata=parts.metadata, cost_model=parts.cost_model)
        windows = _planner(windows, parts, config, data)
        windows = _reader(windows, parts, config)
    size = config.local_batch_size
    windows = Packer(windows, parts.pack_fn, seq_len=config.seq_len, local_batch_size=size)
    collate_fn = parts.collate_fn if parts.batch_spec is None else _Fitting(parts.collate_fn, parts.batch_spec)
    batches: BaseNode[MicroBatch] = Collator(windows, collate_fn, local_batch_size=size)
    batches = HostPrefetcher(batches, data, config.host_prefetch_depth)
    on_host = names_on_host(parts.batch_spec)
    batches = DevicePrefetcher(batches, parts.device, staged_ahead(parts.device, config), cpu_fields=on_host)
    batches = ModelParallelBroadcaster(
        batches, model, parts.batch_spec, tensors=tensors, allow_pickle=config.allow_pickle
    )
    return StepCheckpointer(batches)


def peer_graph(
    initial_state: Mapping[str, Any],
    config: DistributedDatasetConfig,
    model: Transport,
    tensors: Transport | None = None,
    batch_spec: Any = None,
) -> BaseNode[MicroBatch]:
    """The graph of a model peer."""
    received = ModelParallelBroadcaster(
        None,
        model,
        batch_spec,
        tensors=tensors,
        allow_pickle=config.allow_pickle,
        initial_state=initial_state,
    )
    return StepCheckpointer(received)


class _Fitting:
    """A collate function whose batches fit their spec, so that one which does not is an error of the window: the same
    on every rank, before any of it is delivered.
    """

    def __init__(self, collate_fn: Callable[[Sequence[Any]], Any] | None, spec: Any) -> None:
        self._collate_fn = collate_fn
        self._layout = BatchLayout(spec)

    def __call__(self, bins: Sequence[Any]) -> Any:
        data = tuple(bins) if self._collate_fn is None else self._collate_fn(bins)
        if not self._layout.fits(data):
            self._layout.take_apart(data)
        return data


def _reader(windows: BaseNode[Window], parts: NativeParts, config: DistributedDatasetConfig) -> SampleReader:
    return SampleReader(
        windows,
        parts.dataset,
        num_workers=parts.num_workers,
        seed=config.seed,
        worker_options=parts.worker_options,
        on_error=config.on_error,
        max_skipped=config.max_skipped,
    )


def _planner(
    windows: BaseNode[Window], parts: NativeParts, config: DistributedDatasetConfig, data: Transport
) -> Planner:
    return Planner(
        windows,
        data,
        seq_len=config.seq_len,
        local_batch_size=config.local_batch_size,
        objective=config.objective,
        min_balance_gain=config.min_balance_gain,
        algorithm=parts.algorithm,
        allow_oversized=config.oversized_policy == "single",
        packing_budgets=config.packing_budgets,
        padding_cost=parts.padding_cost,
        broadcast_plan=config.broadcast_plan,
        keep_reference=parts.nothing_to_plan,
    )
