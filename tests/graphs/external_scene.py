"""External graphs of small sources, as several test modules use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from graphs.config import DistributedDatasetConfig
from graphs.external import ExternalParts, external_graph
from hp_nodes import DistributedDataLoader, SampleMetadata, WorkloadCost
from hp_nodes.transport import DataTopology, create_transport
from hp_nodes.transport.balance_group import create_balance_group

Sample = tuple[int, int, int]  # (rank that brought it, its number there, what it costs)


def weigh(sample: Any) -> SampleMetadata:
    return SampleMetadata(4, WorkloadCost(llm=float(sample[2])))


@dataclass
class ExternalScene:
    """``steps(rank)`` is the source of a rank."""

    steps: Callable[[int], Any]
    bins: int = 2
    group: int | None = None
    rounds_per_step: int = 1
    metadata_fn: Callable[[Any], SampleMetadata] = weigh
    pack_fn: Any = None
    collate_fn: Any = None
    settings: dict[str, Any] = field(default_factory=dict)

    def loader(self, mesh: Any) -> DistributedDataLoader:
        topology = DataTopology.from_mesh(mesh)
        config = DistributedDatasetConfig(
            seq_len=64, local_batch_size=self.bins, balance_group_size=self.group, timeout_s=10.0, **self.settings
        )
        data = create_transport(topology, timeout_s=config.timeout_s)
        group = create_balance_group(topology, data, self.group)
        model = create_transport(topology, "model_parallel", timeout_s=config.timeout_s)
        parts = ExternalParts(
            self.steps(topology.data_rank),
            self.metadata_fn,
            self.rounds_per_step,
            pack_fn=self.pack_fn,
            collate_fn=self.collate_fn,
        )
        graph = external_graph(parts, config, data, group, model)
        return DistributedDataLoader(graph, transports=(data, group, model), topology=topology)


def rounds(rank: int, costs: list[int], bins: int = 2) -> list[list[list[Sample]]]:
    """A round for each cost: ``bins`` bins of one sample."""
    return [[[(rank, number * bins + slot, cost)] for slot in range(bins)] for number, cost in enumerate(costs)]


def samples_of(batch: Any) -> list[Sample]:
    """The samples in a micro-batch of unpacked, uncollated bins."""
    return [tuple(sample) for packed in batch for sample in packed]
