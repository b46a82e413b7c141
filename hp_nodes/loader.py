"""What a training loop iterates: a graph, its fingerprint, and the transports it holds.

``for batch in loader`` gives micro-batch data; ``loader.last`` says where it stands. State is taken and given back
towards the outside as one text, ``{"hp_nodes": ...}``, so that a distributed checkpoint neither merges nor drops parts
of it. A loader of rank-scoped nodes has a key for each data rank instead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torchdata.nodes import BaseNode

from hp_nodes.nodes.graph import NODES_KEY, all_nodes, read_state, restore
from hp_nodes.nodes.graph_check import check_graph
from hp_nodes.nodes.window_sampler import WindowSampler, begin_epoch, find_cursor
from hp_nodes.plain import from_text, to_text
from hp_nodes.transport import DataTopology, Transport
from hp_nodes.types import BalanceReport, MicroBatch

__all__ = ["STATE_VERSION", "DistributedDataLoader"]

STATE_VERSION = 1
logger = logging.getLogger("hp_nodes")


class DistributedDataLoader:
    """Micro-batch data of this rank, epoch after epoch, with exact state.

    Args:
        graph: the topmost node; gives micro-batches.
        fingerprint: what a checkpoint must agree with, by name; default: what the graph's sampler says.
        transports: closed with the loader.
        topology: who this rank is; needed when a node's state is rank-scoped, or for ``log_balance``.
        length: micro-batches of an epoch; default: what the graph's sampler says.
        log_balance: one line at INFO for each step, on the first data rank's constructor.

    Raises:
        ValueError: a node stands where it would lose items, with the reason.
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
    ) -> None:
        check_graph(graph)
        self.graph = graph
        samplers = [node for node in all_nodes(graph) if isinstance(node, WindowSampler)]
        if fingerprint is None:
            fingerprint = samplers[0].fingerprint() if samplers else {}
        self.fingerprint: dict[str, Any] = dict(fingerprint)
        self.last: MicroBatch | None = None
        """The micro-batch delivered last; None before the first."""
        self._transports = tuple(transports)
        self._length = length if length is not None else samplers[0].micro_batches_per_epoch if samplers else None
        self._logs = log_balance and topology is not None and topology.is_constructor and topology.data_rank == 0
        self._key = self._scoped_key(topology)
        self._exhausted = False
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
            batch = next(self.graph)
        except StopIteration:
            self._exhausted = True
            raise
        except BaseException as error:
            self._failure = error
            raise
        if not isinstance(batch, MicroBatch):
            raise TypeError(f"the graph gave a {type(batch).__name__}; accepted: MicroBatch, as a Collator makes them")
        self.last = batch
        if self._logs and batch.ends_step and batch.report is not None:
            logger.info("epoch %d step %d: %s", batch.epoch, batch.step, balance_line(batch.report))
        return batch.data

    def __len__(self) -> int:
        """Micro-batches of an epoch on this rank.

        Raises:
            TypeError: the graph does not know.
        """
        if self._length is None:
            raise TypeError("the graph does not say how many micro-batches an epoch has")
        return self._length

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of ``epoch``; with the current one, stay: a restored position is kept.

        Raises:
            ValueError: ``epoch`` is no int >= 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch is {epoch!r}; accepted: an int >= 0")
        cursor = find_cursor(read_state(self.graph))
        if cursor is not None and cursor[WindowSampler.EPOCH_KEY] == epoch:
            # A finished epoch stays finished: what is left of it is nothing.
            self._held = cursor[WindowSampler.FINISHED_KEY] or self._exhausted
            self._exhausted = False
            return
        self._begin(epoch)

    def _begin(self, epoch: int | None) -> None:
        """Begin ``epoch``; None: whatever the graph says comes next."""
        self._exhausted = self._held = False
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
        state = {"version": STATE_VERSION, "fingerprint": self.fingerprint, "nodes": read_state(self.graph)}
        return {self._key: to_text(state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; before iterating or in the middle of it.

        Raises:
            ValueError: it is no state, or it belongs to other data: every differing field is named, old and new.
        """
        state = self._parsed(state_dict)
        self._check_fingerprint(state["fingerprint"])
        restore(self.graph, state["nodes"])
        self._exhausted = self._held = False

    def _scoped_key(self, topology: DataTopology | None) -> str:
        """One key for all ranks; where a node's state is its rank's own, one a data rank."""
        scoped = any(getattr(node, "state_scope", "rank") == "rank" for node in all_nodes(self.graph))
        if not scoped or topology is None or topology.data_parallel_size == 1:
            return NODES_KEY
        self.fingerprint["data_parallel_size"] = topology.data_parallel_size
        return f"{NODES_KEY}_rank_{topology.data_rank}"

    def _parsed(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(state_dict, Mapping) or self._key not in state_dict:
            found = sorted(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
            raise ValueError(
                f"this is no state of the loader: it has {found}; accepted: a dict with the key {self._key!r}"
            )
        text = state_dict[self._key]
        try:
            state = from_text(text) if isinstance(text, str) else text
            complete = {"version", "fingerprint", "nodes"} <= set(state)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the state under {self._key!r} cannot be read: {error}") from error
        if not complete:
            raise ValueError(
                f"the state under {self._key!r} has {sorted(state)}; it needs version, fingerprint and nodes"
            )
        if state["version"] != STATE_VERSION:
            raise ValueError(f"the state has version {state['version']!r}; this release reads version {STATE_VERSION}")
        return dict(state)

    def _check_fingerprint(self, saved: Mapping[str, Any]) -> None:
        names = sorted(set(saved) | set(self.fingerprint))
        apart = [name for name in names if saved.get(name) != self.fingerprint.get(name)]
        if apart:
            lines = "; ".join(
                f"{name}: saved {saved.get(name)!r}, now {self.fingerprint.get(name)!r}" for name in apart
            )
            raise ValueError(f"the state belongs to other data: {lines}")

    # ---- end

    def close(self, error: BaseException | None = None) -> None:
        """Stop threads and workers and give back process groups. With an error, the other ranks are told of it."""
        if self._closed:
            return
        self._closed = True
        error = error if error is not None else self._failure
        nodes = list(all_nodes(self.graph))
        # Orderly from the consumer down; because of an error from below, so that whoever waits above is woken.
        for node in nodes if error is not None else reversed(nodes):
            close = getattr(node, "close", None)
            if close is not None and getattr(node, "communicates", False) and error is not None:
                close(error)
            elif close is not None:
                close()
        self._finalizer()

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


def _close_transports(transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.close()
