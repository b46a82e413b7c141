"""torchdata's own nodes as neighbours: what their states hold, when they can be reset, and which are refused.

A torchdata node nests the state of its source in its own. Here that state is taken apart: what the node adds itself is
its entry, and what only passes items on (Mapper, ParallelMapper, Prefetcher, PinMemory, Batcher) has none, so its
depth, its workers and whether it is there at all may change between save and resume. Nodes that would lose or repeat
items are refused with the reason. Everything that knows torchdata 0.11 from inside is in this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.nodes import (
    BaseNode,
    Batcher,
    IterableWrapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
    Stateful,
    Unbatcher,
)

__all__ = ["is_known", "join_state", "passes_through", "refusal", "runs_ahead", "settle", "split_state"]

_SOURCE_KEY = "source"
_SNAPSHOT_KEY = "snapshot"
_SKIP_KEY = "steps_since_snapshot"
_SETTLE_S = 300.0
_UNREPEATABLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

_KNOWN = (
    Batcher,
    IterableWrapper,
    MultiNodeWeightedSampler,
    ParallelMapper,
    PinMemory,
    Prefetcher,
    SamplerWrapper,
    Unbatcher,
)

Parts = tuple[dict[str, Any] | None, list[tuple[BaseNode[Any], Any]]]
"""What a node's state holds of its own (None: nothing), and the state of each of its sources."""


def is_known(node: BaseNode[Any]) -> bool:
    """Whether :func:`split_state` and :func:`join_state` know this node."""
    return isinstance(node, _KNOWN)


def passes_through(node: BaseNode[Any]) -> bool:
    """Whether this is a torchdata node whose position is its source's."""
    if isinstance(node, ParallelMapper):
        return node.prebatch is None
    return isinstance(node, (Prefetcher, PinMemory, Batcher))


def runs_ahead(node: BaseNode[Any]) -> bool:
    """Whether this torchdata node has a thread that reads its source, or reads it while it is reset."""
    if isinstance(node, ParallelMapper):
        return node.num_workers > 0 or node.prebatch is not None
    return isinstance(node, (Prefetcher, PinMemory, Unbatcher))


def refusal(node: BaseNode[Any]) -> str | None:
    """Why this torchdata node cannot be resumed exactly; None when it can, or when it is not torchdata's."""
    kind = type(node).__name__
    if isinstance(node, ParallelMapper) and node.num_workers > 0 and not node.in_order:
        return (
            f"{kind}(in_order=False) gives items in the order in which its workers finish, so a resume loses some and "
            "repeats others; accepted: in_order=True"
        )
    every = getattr(node, "snapshot_frequency", 1)
    if isinstance(node, (ParallelMapper, Prefetcher, PinMemory)) and every != 1:
        return (
            f"{kind}(snapshot_frequency={every}) knows its source's place every {every} items only, so a resume reads "
            "records again; accepted: 1"
        )
    if isinstance(node, IterableWrapper) and not isinstance(node.iterable, Stateful):
        if isinstance(node.iterable, Iterator):
            return (
                f"{kind} of a {type(node.iterable).__name__}, which can be iterated once only and does not say where "
                "it stands; accepted: an iterable that starts anew with each iter(), or has state_dict and "
                "load_state_dict"
            )
        if isinstance(node.iterable, (set, frozenset)):
            return f"{kind} of a set, whose order another process does not repeat; accepted: a list or a sorted set"
    if isinstance(node, SamplerWrapper):
        drawing = _unrepeatable(node.sampler)
        if drawing is not None:
            return (
                f"{kind} of a {drawing}, which draws another order in another process; accepted: a sampler whose "
                "order follows from set_epoch (DistributedSampler), or one with state_dict and load_state_dict"
            )
    return None


def _unrepeatable(sampler: Any) -> str | None:
    """The type of a sampler, or of the one inside it, that takes its order from a generator."""
    seen = 0
    while sampler is not None and seen < 8:
        if isinstance(sampler, Stateful):
            return None
        if isinstance(sampler, _UNREPEATABLE):
            return type(sampler).__name__
        sampler, seen = getattr(sampler, "sampler", None), seen + 1
    return None


def split_state(node: BaseNode[Any], raw: Any) -> Parts | None:
    """Take apart what ``state_dict()`` of a torchdata node gave; None when the node is none of those known here."""
    if isinstance(node, ParallelMapper):
        inner, own = raw[ParallelMapper.IT_STATE_KEY], {}
        if node.prebatch is not None:
            own[Unbatcher.BATCH_IDX_KEY] = inner[Unbatcher.BATCH_IDX_KEY]
            inner = inner[Unbatcher.SOURCE_KEY]
        return _without_skip(own, node.source, inner)
    if isinstance(node, (Prefetcher, PinMemory)):
        return _without_skip({}, node.source, raw)
    if isinstance(node, Batcher):
        return None, [(node.source, raw[Batcher.SOURCE_KEY])]
    if isinstance(node, Unbatcher):
        own = {Unbatcher.BATCH_IDX_KEY: raw[Unbatcher.BATCH_IDX_KEY]}
        return own, [(node.source, raw[Unbatcher.SOURCE_KEY])]
    if isinstance(node, MultiNodeWeightedSampler):
        below = raw[MultiNodeWeightedSampler.DATASET_NODE_STATES_KEY]
        own = {key: value for key, value in raw.items() if value is not below}
        return own, [(source, below[name]) for name, source in node.source_nodes.items()]
    if isinstance(node, (IterableWrapper, SamplerWrapper)):
        return dict(raw), []
    return None


def _without_skip(own: dict[str, Any], source: BaseNode[Any], inner: Mapping[str, Any]) -> Parts:
    """Of an iterator of torchdata's: with a thread it has a snapshot and how many items it gave since, else neither.

    It has given some only where the source's state is empty: such a snapshot torchdata takes for none.
    """
    if _SOURCE_KEY in inner:
        return own or None, [(source, inner[_SOURCE_KEY])]
    if inner[_SKIP_KEY]:
        own[_SKIP_KEY] = inner[_SKIP_KEY]
    return own or None, [(source, inner[_SNAPSHOT_KEY])]


def join_state(node: BaseNode[Any], own: Mapping[str, Any] | None, below: list[Any]) -> Any:
    """The inverse of :func:`split_state`, for the node as it is now: with or without a thread.

    Raises:
        ValueError: the state speaks of items since a snapshot, and this node has no thread that could skip them.
        KeyError: the entry lacks something.
    """
    entry = dict(own or {})
    if isinstance(node, ParallelMapper):
        inner = _with_skip(entry, below[0], node.num_workers > 0, type(node).__name__)
        if node.prebatch is not None:
            inner = {Unbatcher.SOURCE_KEY: inner, Unbatcher.BATCH_IDX_KEY: entry[Unbatcher.BATCH_IDX_KEY]}
        return {ParallelMapper.IT_STATE_KEY: inner}
    if isinstance(node, (Prefetcher, PinMemory)):
        return _with_skip(entry, below[0], True, type(node).__name__)
    if isinstance(node, Batcher):
        return {Batcher.SOURCE_KEY: below[0]}
    if isinstance(node, Unbatcher):
        return {Unbatcher.SOURCE_KEY: below[0], Unbatcher.BATCH_IDX_KEY: entry[Unbatcher.BATCH_IDX_KEY]}
    if isinstance(node, MultiNodeWeightedSampler):
        names = list(node.source_nodes)
        return {**entry, MultiNodeWeightedSampler.DATASET_NODE_STATES_KEY: dict(zip(names, below, strict=True))}
    return entry


def _with_skip(entry: Mapping[str, Any], below: Any, threaded: bool, kind: str) -> dict[str, Any]:
    skip = entry.get(_SKIP_KEY, 0)
    if threaded:
        return {_SNAPSHOT_KEY: below, _SKIP_KEY: skip}
    if skip:
        raise ValueError(
            f"the state is {skip} items from the beginning of the source of {kind}, which has no state, and {kind} now "
            "has no thread that would skip them; accepted: as many workers as before, or at least one"
        )
    return {_SOURCE_KEY: below}


def settle(node: BaseNode[Any]) -> None:
    """Wait until the thread with which a torchdata node reads its source is gone, so that the source can be reset.

    torchdata itself waits half a second and then lets a second thread into the source, which loses items.

    Raises:
        RuntimeError: the thread did not come back from the source.
    """
    if not isinstance(node, (ParallelMapper, Prefetcher, PinMemory)):
        return
    owner: BaseNode[Any] = node
    while isinstance(inner := getattr(owner, "_it", None), BaseNode):  # ParallelMapper keeps its iterator in a node,
        owner = inner.source if isinstance(inner, Unbatcher) else inner  # with prebatch one node further down
    if inner is None:
        owner._it = None  # type: ignore[attr-defined]  # a reset that failed has deleted it, and every later one fails
        return
    threads = [thread for name in ("_thread", "_read_thread") if (thread := getattr(inner, name, None)) is not None]
    for name in ("_stop_event", "_stop", "_mp_stop"):
        stop = getattr(inner, name, None)
        if threads and stop is not None:
            stop.set()
    for thread in threads:
        thread.join(_SETTLE_S)
        if thread.is_alive():
            raise RuntimeError(
                f"the thread of {type(node).__name__} did not come back from its source within {_SETTLE_S} s"
            )
