"""Small graphs and datasets that several test modules use, each put together from the public parts only."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from hp_nodes import (
    Collator,
    DevicePrefetcher,
    DistributedDataLoader,
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
    WindowSampler,
)
from hp_nodes.nodes.graph import all_nodes
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport

SEQ_LEN = 64


class Documents:
    """Records of 1 to 48 tokens; every token of record i is i, so each token says where it came from."""

    def __init__(self, size: int = 48, seed: int = 0, longest: int = 48) -> None:
        self.lengths = np.random.default_rng(seed).integers(1, longest + 1, size=size)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": np.full(self.lengths[index], index, dtype=np.int64), "index": int(index)}


def halves(record: dict[str, Any]) -> list[np.ndarray]:
    """One or two sequences of a record."""
    tokens = record["input_ids"]
    cut = len(tokens) // 3
    return [tokens[:cut], tokens[cut:]] if cut else [tokens]


def count_tokens(sample: Any) -> SampleMetadata:
    return SampleMetadata(len(sample["input_ids"] if isinstance(sample, dict) else sample))


@dataclass
class Scene:
    """How a graph is put together. ``insert[name]`` wraps the node of that name in a user's node."""

    dataset: Any = field(default_factory=Documents)
    micro: int = 2
    global_batch: int = 16
    window: int = 2
    depth: int = 1
    device_depth: int = 0
    workers: int = 0
    order: str = "shuffle"
    split: bool = True
    objective: Any = "lockstep"
    broadcast_plan: bool = True
    metadata_fn: Callable[[Any], SampleMetadata] = count_tokens
    cost_model: Any = field(default_factory=CausalAttentionCostModel)
    split_fn: Callable[[Any], Any] = halves
    pack_fn: Any = None
    collate_fn: Any = None
    timeout_s: float = 20.0
    checkpointer: bool = True
    on_error: Any = "raise"
    max_skipped: int = 0
    wrap_transport: Callable[[Any], Any] = lambda transport: transport
    insert: dict[str, Callable[[BaseNode[Any]], BaseNode[Any]]] = field(default_factory=dict)

    def graph(self, mesh: Any) -> BaseNode[Any]:
        topology = DataTopology.from_mesh(mesh)
        model = create_transport(topology, "model_parallel", timeout_s=self.timeout_s)
        if not topology.is_constructor:
            start = {"WindowSampler": {"epoch": 0, "consumed_samples": 0, "finished": False}}
            node: BaseNode[Any] = ModelParallelBroadcaster(None, model, initial_state=start)
            return StepCheckpointer(node) if self.checkpointer else node
        data = self.wrap_transport(create_transport(topology, timeout_s=self.timeout_s))
        sampler = DistributedBatchSampler(
            len(self.dataset),
            self.micro,
            self.global_batch,
            topology.data_rank,
            topology.data_parallel_size,
            order=self.order,
            seed=7,
        )
        node = self._put(WindowSampler(sampler, self.window))
        reading = {"on_error": self.on_error, "max_skipped": self.max_skipped}
        node = self._put(SampleReader(node, self.dataset, num_workers=self.workers, seed=5, **reading))
        if self.split:
            node = self._put(Splitter(node, self.split_fn))
        node = self._put(MetadataDeriver(node, self.metadata_fn, cost_model=self.cost_model))
        node = self._put(
            Planner(
                node,
                data,
                seq_len=SEQ_LEN,
                local_batch_size=self.micro,
                objective=self.objective,
                broadcast_plan=self.broadcast_plan,
            )
        )
        node = self._put(Router(node, data))
        node = self._put(Packer(node, self.pack_fn, seq_len=SEQ_LEN, local_batch_size=self.micro))
        node = self._put(Collator(node, self.collate_fn, local_batch_size=self.micro))
        node = self._put(HostPrefetcher(node, data, self.depth))
        node = self._put(DevicePrefetcher(node, depth=self.device_depth))
        node = self._put(ModelParallelBroadcaster(node, model))
        return StepCheckpointer(node) if self.checkpointer else node

    def loader(self, mesh: Any) -> DistributedDataLoader:
        graph = self.graph(mesh)
        held = {id(node.transport): node.transport for node in all_nodes(graph) if hasattr(node, "transport")}
        return DistributedDataLoader(graph, topology=DataTopology.from_mesh(mesh), transports=list(held.values()))

    def _put(self, node: BaseNode[Any]) -> BaseNode[Any]:
        wrap = self.insert.get(type(node).__name__)
        return node if wrap is None else wrap(node)


class Passing(BaseNode[Any]):
    """A user's node that hands on what it gets, and its source's state."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(initial_state)

    def next(self) -> Any:
        return next(self.source)

    def get_state(self) -> dict[str, Any]:
        return self.source.state_dict()


def content(batch: Any) -> Any:
    """A micro-batch's data as plain, comparable values."""
    if isinstance(batch, dict):
        return {key: content(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [content(item) for item in batch]
    return batch.tolist() if hasattr(batch, "tolist") else batch


def rest(loader: Any, limit: int | None = None) -> list[Any]:
    """What is left of the epoch, or its next ``limit`` micro-batches, with their place."""
    found = []
    for batch in loader:
        found.append((loader.last.epoch, loader.last.step, loader.last.round, content(batch)))
        if limit is not None and len(found) == limit:
            break
    return found


def pickled(state: Any) -> Any:
    """As a checkpoint would bring it back."""
    return pickle.loads(pickle.dumps(state))
