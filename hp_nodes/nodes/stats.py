"""Statistics of a running graph: who works, who waits, and which node the training loop waits for.

``loader.stats()`` gives a :class:`LoaderStats`: printed it is a table, in a notebook a drawn one, and ``bottleneck`` is
one sentence. How to read it stands in the README beside this file. Rank-local; nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

from torchdata.nodes import BaseNode

from hp_nodes.display import aligned, html_table
from hp_nodes.nodes.graph import all_nodes, node_names, sources
from hp_nodes.nodes.neighbours import runs_ahead
from hp_nodes.nodes.stage import Stage
from hp_nodes.timing import NodeTimes

__all__ = ["GraphClock", "LoaderStats", "NodeStats", "read_stats", "threads_of"]

_KEEPS_UP = 0.02
_IRREGULAR = 0.3
_COLUMNS = ("node", "thread", "items", "busy", "an item", "waits for source", "exchanging", "consumer waited", "ready")
_ADVICE = {
    "SampleReader": "reading takes this long: give it reader workers (num_workers), or more of them",
    "Splitter": "its function is slow: make it cheaper, or do its work in the dataset, where reader workers run it",
    "MetadataDeriver": "its function is slow: make it cheaper, or precompute the metadata",
    "Planner": "planning takes this long: the extra 'fast' compiles it; one large window takes less than several small",
    "Packer": "its function is slow: make it cheaper, or do its work in the dataset, where reader workers run it",
    "Collator": "its function is slow: make it cheaper, or do its work in the dataset, where reader workers run it",
}


@dataclass(frozen=True, slots=True)
class NodeStats:
    """What one node did. Seconds; the names of the fields are those of :class:`hp_nodes.timing.NodeTimes`."""

    name: str
    kind: str
    thread: str
    """Where its work is done: "main", or the node that has the thread."""
    items: int
    busy: float
    """Its own work, without its source and without other ranks."""
    source: float
    """Waiting for the node below."""
    exchanging: float
    """In exchanges, waiting for other ranks included."""
    exchanges: int
    consumer: float
    """For which the node above stood inside this one: everything that it waited for."""
    own_thread: bool = False
    full: float = 0.0
    """For which its thread stood still because its consumer was behind."""
    takes: int = 0
    ready: int = 0
    """Items that were ready when the consumer asked, summed over the takes."""

    @property
    def own(self) -> float:
        """What it adds to the time of an item: its own work and its exchanges."""
        return self.busy + self.exchanging


@dataclass(frozen=True, slots=True, repr=False)
class LoaderStats:
    """A graph's nodes in the order of the flow, and what the training loop had of them. Seconds."""

    nodes: tuple[NodeStats, ...]
    micro_batches: int
    elapsed: float
    """From the first time the loop asked until it last got something."""
    waited: float
    """Of that, inside the loader's ``next``."""
    runs_ahead: bool
    """Whether a node builds ahead in a thread while the loop trains."""

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """What happened after ``earlier`` was taken: without the start, when everything is slower.

        Raises:
            ValueError: ``earlier`` is of another graph.
        """
        if [node.name for node in earlier.nodes] != [node.name for node in self.nodes]:
            raise ValueError("the earlier statistics are of a graph with other nodes; accepted: of the same loader")
        return replace(
            self,
            nodes=tuple(_less(now, then) for now, then in zip(self.nodes, earlier.nodes, strict=True)),
            micro_batches=self.micro_batches - earlier.micro_batches,
            elapsed=self.elapsed - earlier.elapsed,
            waited=self.waited - earlier.waited,
        )

    @property
    def bottleneck(self) -> str:
        """Whether the training loop waits for data, for which node most, and what to do about it."""
        if not self.micro_batches or not self.nodes:
            return "Nothing has been delivered yet."
        slowest = max(self.nodes, key=lambda node: node.own)
        share = self.waited / self.elapsed
        works = f"{_spent(slowest)} {_seconds(slowest.own / max(1, slowest.items))} an item"
        if share < _KEEPS_UP:
            return f"The loader keeps up: the loop waited {share:.1%} of its time. {slowest.name} takes most, {works}."
        waits = f"The loop waited {share:.0%} of its time for data"
        return f"{waits}, most for {slowest.name}, {works}: {self._advice(slowest)}."

    def _advice(self, slowest: NodeStats) -> str:
        stood = max((node.full for node in self.nodes), default=0.0)
        if stood > _IRREGULAR * self.elapsed:
            return "on the whole it is fast enough, but windows differ; a larger host_prefetch_depth evens that out"
        if slowest.exchanging > slowest.busy:
            if slowest.kind == "ModelParallelBroadcaster" and slowest is self.nodes[0]:
                return "it waits for the constructor's micro-batch; look at the constructor's statistics"
            return "it waits for other ranks; look at the statistics of each rank for the one that is busy"
        advice = _ADVICE.get(slowest.kind, "make it cheaper")
        return advice if self.runs_ahead else f"{advice}; HostPrefetcher(depth=1) would build windows while you train"

    def __repr__(self) -> str:
        return f"{aligned(_COLUMNS, list(self._rows()))}\n{self._summary()}\n{self.bottleneck}"

    def _repr_html_(self) -> str:
        return html_table(_COLUMNS, list(self._rows()), caption=self._summary(), note=self.bottleneck)

    def _summary(self) -> str:
        share = f" ({self.waited / self.elapsed:.1%})" if self.elapsed else ""
        waited = f"the loop waited {_seconds(self.waited)}{share}"
        return f"{self.micro_batches} micro-batches in {_seconds(self.elapsed)}; {waited}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for node in self.nodes:
            yield (
                node.name,
                node.thread,
                str(node.items),
                _seconds(node.busy),
                _seconds(node.busy / node.items) if node.items else "",
                _seconds(node.source),
                _seconds(node.exchanging) if node.exchanges else "",
                _seconds(node.consumer),
                f"{node.ready / node.takes:.1f}" if node.takes else "",
            )


class GraphClock:
    """How long a training loop waits for a graph, and over what time. Belongs to a loader."""

    def __init__(self, graph: BaseNode[Any]) -> None:
        self._graph = graph
        self._first: float | None = None
        self._last = 0.0
        self._times = NodeTimes()
        """Of the whole graph, as its consumer sees it."""

    def next(self) -> Any:
        """The graph's next item."""
        if self._first is None:
            self._first = perf_counter()
        try:
            return self._times.frame(next, self._graph)
        finally:
            self._last = perf_counter()

    def stats(self) -> LoaderStats:
        """What the nodes and this clock counted so far."""
        nodes = read_stats(self._graph, self._times)
        elapsed = 0.0 if self._first is None else self._last - self._first
        ahead = any(node.own_thread for node in nodes)
        return LoaderStats(nodes, self._times.items, elapsed, self._times.consumer, ahead)


def read_stats(graph: BaseNode[Any], consumed: NodeTimes | None = None) -> tuple[NodeStats, ...]:
    """What each node of a graph counted, sources first. Nodes that are not ours and follow one another are one line.

    Args:
        consumed: what the graph's consumer counted; tells of nodes at the top that are not ours.
    """
    names, threads = node_names(graph), threads_of(graph)
    found: list[NodeStats] = []
    for node in all_nodes(graph):
        if isinstance(node, Stage):
            if node.edge is not None and node.edge.times is not None:
                found += _foreign(node.edge.source, node.edge.times, names, threads)
            found.append(_stats(names[id(node)], type(node).__name__, threads[id(node)], node.times, node.own_thread))
    if consumed is not None and not isinstance(graph, Stage):
        found += _foreign(graph, consumed, names, threads)
    return tuple(found)


def _foreign(top: BaseNode[Any], times: NodeTimes, names: dict[int, str], threads: dict[int, str]) -> list[NodeStats]:
    """The nodes that are not ours from ``top`` down to the next that is, as one."""
    below: list[BaseNode[Any]] = []
    waiting = [top]
    while waiting:
        node = waiting.pop()
        below.append(node)
        waiting += [source for source in sources(node) if not isinstance(source, Stage)]
    name = " + ".join(names[id(node)] for node in reversed(below))
    return [_stats(name, type(top).__name__, threads[id(top)], times, any(map(runs_ahead, below)))]


def _stats(name: str, kind: str, thread: str, times: NodeTimes, own_thread: bool) -> NodeStats:
    return NodeStats(
        name,
        kind,
        thread,
        times.items,
        times.busy,
        times.source,
        times.exchanging,
        times.exchanges,
        times.consumer,
        own_thread,
        times.full,
        times.takes,
        times.ready,
    )


def threads_of(graph: BaseNode[Any]) -> dict[int, str]:
    """In whose thread each node works."""
    names, found = node_names(graph), {}

    def walk(node: BaseNode[Any], thread: str) -> None:
        own = node.own_thread if isinstance(node, Stage) else runs_ahead(node)
        found[id(node)] = thread = names[id(node)] if own else thread
        for source in sources(node):
            walk(source, thread)

    walk(graph, "main")
    return found


def _less(now: NodeStats, then: NodeStats) -> NodeStats:
    numbers = {
        field.name: getattr(now, field.name) - getattr(then, field.name)
        for field in fields(now)
        if field.name not in ("name", "kind", "thread", "own_thread")
    }
    return replace(now, **numbers)


def _spent(node: NodeStats) -> str:
    return "exchanging" if node.exchanging > node.busy else "busy"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
