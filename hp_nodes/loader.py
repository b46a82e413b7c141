"""What a training loop iterates: a graph, its fingerprint, and the transports it holds.

``for batch in loader`` gives micro-batch data; ``loader.last`` says where it stands. State is taken and given back as
one short text, see :mod:`hp_nodes.state`.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from torchdata.nodes import BaseNode

from hp_nodes.nodes.graph import all_nodes, node_names, read_state, restore
from hp_nodes.nodes.graph_check import check_graph
from hp_nodes.nodes.neighbours import settle
from hp_nodes.nodes.run_ahead import is_interruption
from hp_nodes.nodes.sample_reader import SampleReader
from hp_nodes.nodes.stats import GraphClock, LoaderStats
from hp_nodes.nodes.window_sampler import WindowSampler, begin_epoch, find_cursor
from hp_nodes.state import (
    RANKS_FIELD,
    STATE_VERSION,
    LoaderState,
    agree,
    another_rank,
    differences,
    leaf_key,
    leaves_of,
    rank_scoped,
    reshard,
)
from hp_nodes.transport import DataTopology, Transport
from hp_nodes.types import BalanceReport, MicroBatch

__all__ = ["STATE_VERSION", "DistributedDataLoader"]

logger = logging.getLogger("hp_nodes")


class DistributedDataLoader:
    """Micro-batch data of this rank, epoch after epoch, with exact state.

    Args:
        graph: the topmost node; gives micro-batches.
        fingerprint: what a checkpoint must agree with beyond what the graph's nodes say of themselves (dataset length,
            global batch size, sampler, seed): plain values by name, such as ``{"dataset_revision": "v3"}``. A model
            peer, whose graph has no such nodes, is given what its constructor's loader has.
        transports: closed with the loader.
        topology: who this rank is; needed when a node's state is rank-scoped, or for ``log_balance``.
        length: micro-batches of an epoch; default: what the graph's sampler says.
        log_balance: one line at INFO for each step, on the first data rank's constructor.
        state_scope: whether the state is the same on all ranks or its data rank's own; default: what the nodes say. A
            model peer of a graph with nodes of rank scope is told here.

    Raises:
        ValueError: a node stands where it would lose items, with the reason; or ``fingerprint`` says something else
            than the graph.
    """

    def __init__(
        self,
        graph: BaseNode[MicroBatch],
        *,
        fingerprint: Mapping[str, Any] | None = None,
        transports: Sequence[Transport] = (),
        topology: DataTopology | None = None,
        length: int | None = None,
        log_balance: bool = False,
        state_scope: Literal["global", "rank"] | None = None,
    ) -> None:
        check_graph(graph)
        self.graph = graph
        samplers = [node for node in all_nodes(graph) if isinstance(node, WindowSampler)]
        self.fingerprint: dict[str, Any] = _fingerprint(graph, fingerprint or {})
        """What a checkpoint must agree with, by name."""
        self.last: MicroBatch | None = None
        """The micro-batch delivered last; None before the first."""
        self._clock = GraphClock(graph)
        self._transports = tuple(transports)
        self._length = length if length is not None else samplers[0].micro_batches_per_epoch if samplers else None
        self._logs = log_balance and topology is not None and topology.is_constructor and topology.data_rank == 0
        self._topology = topology
        self._data_rank = self._scope(state_scope)
        self._exhausted = False
        self._resumed = False
        self._underway = False
        """Whether something was delivered since the loader was last set to a place."""
        self._held = False
        self._closed = False
        self._failure: BaseException | None = None
        self._finalizer = weakref.finalize(self, _close_transports, self._transports)
        self.graph.reset(None)

    # ---- iteration

    def __iter__(self) -> Iterator[Any]:
        """Goes on where the loader stands; after the end of an epoch, with the next one."""
        if self._exhausted:
            self._begin(self._epoch_after())
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise RuntimeError("the loader is closed; build a new one")
        if self._exhausted or self._held:
            self._exhausted, self._held = True, False
            raise StopIteration
        try:
            batch = self._next_batch()
        except StopIteration:
            self._exhausted = True
            raise
        except BaseException as error:
            if not is_interruption(error):
                self._failure = error
            raise
        if not isinstance(batch, MicroBatch):
            raise TypeError(f"the graph gave a {type(batch).__name__}; accepted: MicroBatch, as a Collator makes them")
        self.last = batch
        self._resumed = False
        self._underway = True
        if self._logs and batch.ends_step and batch.report is not None:
            logger.info("epoch %d step %d: %s", batch.epoch, batch.step, balance_line(batch.report))
        return batch.data

    def _next_batch(self) -> Any:
        try:
            return self._clock.next()
        except StopIteration:
            if not self._resumed or find_cursor(read_state(self.graph)) is not None:
                raise
        # A source that does not say in which epoch it stands was saved at its end: what is left of that epoch is
        # nothing, and what was asked for is the next one.
        self._resumed = False
        self.graph.reset(None)
        return self._clock.next()

    def __len__(self) -> int:
        """Micro-batches of an epoch on this rank.

        Raises:
            TypeError: the graph does not know.
        """
        if self._length is None:
            raise TypeError("the graph does not say how many micro-batches an epoch has")
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``; with the current one, stay: a restored position is kept. A source that does
        not say in which epoch it stands goes on with its next one when it has ended.

        Raises:
            ValueError: ``epoch`` is no int >= 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch is {epoch!r}; accepted: an int >= 0")
        cursor = find_cursor(read_state(self.graph))
        if cursor is None:
            if self._exhausted:
                self._begin(None)
            return
        if epoch == self._current_epoch(cursor):
            # A finished epoch stays finished: what is left of it is nothing.
            finished = cursor[WindowSampler.FINISHED_KEY] and cursor[WindowSampler.EPOCH_KEY] == epoch
            self._held = finished or self._exhausted
            self._exhausted = False
            return
        self._begin(epoch)

    def _current_epoch(self, cursor: Mapping[str, Any]) -> int:
        """The epoch being delivered. Within its first step the state may speak of the end of the one before."""
        if self._underway and self.last is not None:
            return self.last.epoch
        return int(cursor[WindowSampler.EPOCH_KEY])

    def _begin(self, epoch: int | None) -> None:
        """Begin ``epoch``; None: whatever the graph says comes next."""
        self._exhausted = self._held = self._underway = False
        self._failure = None
        if epoch is None:
            self.graph.reset(None)
        else:
            restore(self.graph, begin_epoch(read_state(self.graph), epoch))

    def _epoch_after(self) -> int | None:
        cursor = find_cursor(read_state(self.graph))
        return None if cursor is None else int(cursor[WindowSampler.EPOCH_KEY]) + 1

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The state at the last step boundary: one text under a fixed key, small and without payload.

        Raises:
            ValueError: a node's state holds something that is no plain value.
        """
        return {leaf_key(self._data_rank): LoaderState(self.fingerprint, read_state(self.graph)).to_text()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from a state; before iterating or in the middle of it. Reads nothing and replays nothing.

        Args:
            state_dict: what :meth:`state_dict` gave. Where nodes keep state of their own rank, on another number of
                data ranks: the leaves of all ranks in one dict.
            strict: False accepts, with a warning, a fingerprint that differs where no record of the epoch in progress
                is lost or repeated (see :func:`hp_nodes.state.agree`), and drops entries of nodes that are not there.

        Raises:
            ValueError: it is no state, or it belongs to other data: every differing field is named, saved and now. The
                loader then stands where it stood, or at its last step boundary when it was a node that refused.
        """
        state = self._mine(leaves_of(state_dict))
        if not self.fingerprint:  # a model peer that was told nothing takes over what its constructor says
            self.fingerprint = dict(state.fingerprint)
        ranks = None if self._topology is None else self._topology.data_parallel_size
        keepers = rank_scoped(self.graph)
        entries, accepted = agree(state, self.fingerprint, strict=strict, data_ranks=ranks, keepers=keepers)
        if not strict:
            accepted += self._drop_unknown(entries)
        if accepted:
            warnings.warn(f"the state was accepted though it differs: {'; '.join(accepted)}", stacklevel=2)
        before = read_state(self.graph)
        try:
            restore(self.graph, entries)
        except BaseException:
            restore(self.graph, before)
            raise
        self._exhausted = self._held = self._underway = False
        self._failure = None
        self._resumed = True

    def _scope(self, told: str | None) -> int | None:
        """The data rank whose own the state is; None where all ranks share it."""
        scoped = bool(rank_scoped(self.graph)) if told is None else told == "rank"
        if not scoped or self._topology is None:
            return None
        self.fingerprint[RANKS_FIELD] = self._topology.data_parallel_size
        return self._topology.data_rank if self._topology.data_parallel_size > 1 else None

    def _mine(self, leaves: Mapping[int | None, Any]) -> LoaderState:
        """The state for this data rank, made anew from all of them where their number has changed."""
        first = next(iter(leaves))
        mine = leaves.get(self._data_rank, leaves[first])
        state = LoaderState.from_text(mine, leaf_key(self._data_rank if self._data_rank in leaves else first))
        saved_on = state.fingerprint.get(RANKS_FIELD, 1)
        topology = self._topology
        if RANKS_FIELD not in self.fingerprint or topology is None or saved_on == topology.data_parallel_size:
            if self._data_rank not in leaves:
                raise ValueError(another_rank(self.graph, leaves, self._data_rank, state, self.fingerprint))
            return state
        if len(leaves) != saved_on:
            return state  # its fingerprint says on how many ranks it was saved
        if len(topology.model_parallel_ranks) > 1:
            raise ValueError(
                f"the state is from {saved_on} data ranks, not {topology.data_parallel_size}; accepted where nodes "
                "keep state of their own rank and there are model peers: the same number"
            )
        states = [LoaderState.from_text(leaves[rank], leaf_key(rank)) for rank in sorted(leaves, key=lambda r: r or 0)]
        for other in states[1:]:
            if differences(states[0].fingerprint, other.fingerprint):
                raise ValueError("the leaves of the data ranks belong to different data; accepted: those of one save")
        entries = reshard(self.graph, states, topology.data_rank, topology.data_parallel_size)
        return LoaderState({**state.fingerprint, RANKS_FIELD: topology.data_parallel_size}, entries)

    def _drop_unknown(self, entries: dict[str, Any]) -> list[str]:
        """Take out entries of nodes that are not there; a model peer keeps what its constructor's nodes say."""
        if self._topology is not None and not self._topology.is_constructor:
            return []
        unknown = sorted(set(entries) - set(node_names(self.graph).values()))
        for name in unknown:
            del entries[name]
        return [f"there is no node {name!r}, whose entry was dropped" for name in unknown]

    def stats(self) -> LoaderStats:
        """What each node of this rank's graph did so far, and how long the training loop waited for it.

        Printed it is a table; ``stats().bottleneck`` is a sentence; ``stats().since(earlier)`` leaves out the start.
        """
        return self._clock.stats()

    # ---- end

    def close(self, error: BaseException | None = None) -> None:
        """Stop threads and workers and give back process groups. With an error, the other ranks are told of it."""
        if self._closed:
            return
        self._closed = True
        error = error if error is not None else self._failure
        nodes = list(all_nodes(self.graph))
        failures: list[BaseException] = []
        # Orderly from the consumer down; because of an error from below, so that whoever waits above is woken.
        for node in nodes if error is not None else reversed(nodes):
            try:
                _close_node(node, error)
            except BaseException as failure:  # the others are closed all the same
                failures.append(failure)
        self._finalizer()
        if failures:
            raise failures[0]

    def __enter__(self) -> DistributedDataLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close(error)


def balance_line(report: BalanceReport) -> str:
    """A report in one line."""
    plan = report.plan
    before = "" if plan.before is None else f"{plan.before:.4g} → "
    return (
        f"{plan.objective} {before}{plan.after:.4g} (bound {plan.lower_bound:.4g}), gain "
        f"{100 * (plan.gain or 0):.1f} %{'' if plan.accepted else ', reference kept'}; padding {plan.padding} tokens; "
        f"this rank sent {report.samples_sent} samples ({report.bytes_sent} B), received {report.samples_received} "
        f"({report.bytes_received} B); skipped {report.skipped}, dropped {report.dropped}; "
        f"planned in {plan.seconds:.3f} s"
    )


def _fingerprint(graph: BaseNode[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the nodes of a graph say of their data, and what was given besides."""
    found: dict[str, Any] = {}
    for node in all_nodes(graph):
        if isinstance(node, SampleReader):
            if hasattr(node.dataset, "__len__"):
                found["dataset_length"] = len(node.dataset)
            found["seed"] = node.seed
        fingerprint = getattr(node, "fingerprint", None)
        if callable(fingerprint):
            found.update(fingerprint())
    unlike = [name for name in given if name in found and given[name] != found[name]]
    if unlike:
        name = unlike[0]
        raise ValueError(
            f"fingerprint {name!r} is {given[name]!r}, but the graph says {found[name]!r}; accepted: the same, or none"
        )
    return {**found, **given}


def _close_node(node: BaseNode[Any], error: BaseException | None) -> None:
    close = getattr(node, "close", None)
    if close is not None and getattr(node, "communicates", False) and error is not None:
        close(error)
    elif close is not None:
        close()
    settle(node)


def _close_transports(transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.close()
