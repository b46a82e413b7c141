"""A loader's state as the outside sees it: one text under a fixed key, and what it must agree with to be restored.

``{"hp_nodes": text}`` is the same on every rank. Where a node's state is its rank's own there is one such leaf a data
rank, ``{"hp_nodes_rank_3": text}``, so that a distributed checkpoint neither merges nor drops any. A text holds the
version, the fingerprint (which data, and how they are cut into steps) and the entry of each node that has state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchdata.nodes import BaseNode

from hp_nodes.nodes.graph import NODES_KEY, all_nodes, node_names
from hp_nodes.nodes.neighbours import passes_through
from hp_nodes.nodes.window_sampler import WindowSampler, begin_epoch, find_cursor
from hp_nodes.plain import from_text, to_text
from hp_nodes.samplers.contract import layouts_that_divide

__all__ = [
    "STATE_VERSION",
    "LoaderState",
    "agree",
    "another_rank",
    "differences",
    "leaf_key",
    "leaves_of",
    "rank_scoped",
    "reshard",
    "scope_of",
]

STATE_VERSION = 1
RANKS_FIELD = "data_parallel_size"
_LEAF = re.compile(rf"{NODES_KEY}(?:_rank_(\d+))?")
_ORDER_FIELDS = ("dataset_length", "global_batch_size", "rounds_per_step", "sampler")
_ABSENT = object()


@dataclass(frozen=True)
class LoaderState:
    """What one leaf says: fingerprint and entries by name, plain values all."""

    fingerprint: dict[str, Any]
    nodes: dict[str, Any]
    version: int = STATE_VERSION

    def to_text(self) -> str:
        """One line of JSON, the same on every rank that has the same state: names are in order.

        Raises:
            ValueError: a node's state holds something that is no plain value.
        """
        fingerprint, nodes = dict(sorted(self.fingerprint.items())), dict(sorted(self.nodes.items()))
        return to_text({"version": self.version, "fingerprint": fingerprint, "nodes": nodes})

    @classmethod
    def from_text(cls, text: Any, where: str = NODES_KEY) -> LoaderState:
        """What :meth:`to_text` wrote, in this release or an earlier one.

        Raises:
            ValueError: it is no such text, or a later release wrote it.
        """
        try:
            state = from_text(text) if isinstance(text, str) else text
            present = set(state)
        except (ValueError, TypeError) as error:
            raise ValueError(f"the state under {where!r} cannot be read: {error}") from error
        if not {"version", "fingerprint", "nodes"} <= present:
            raise ValueError(f"the state under {where!r} has {sorted(state)}; it needs version, fingerprint and nodes")
        if state["version"] not in range(1, STATE_VERSION + 1):
            raise ValueError(
                f"the state has version {state['version']!r}; this release reads versions 1 to {STATE_VERSION}"
            )
        return cls(dict(state["fingerprint"]), dict(state["nodes"]), STATE_VERSION)


# ---- leaves


def leaf_key(data_rank: int | None) -> str:
    """The key of the state of one data rank; None: of the state that all ranks share."""
    return NODES_KEY if data_rank is None else f"{NODES_KEY}_rank_{data_rank}"


def leaves_of(state_dict: Any) -> dict[int | None, Any]:
    """The texts in a state dict by data rank; under None the one that all ranks share.

    Raises:
        ValueError: there is none.
    """
    found: dict[int | None, Any] = {}
    if isinstance(state_dict, Mapping):
        for key, value in state_dict.items():
            match = _LEAF.fullmatch(key) if isinstance(key, str) else None
            if match is not None:
                found[None if match[1] is None else int(match[1])] = value
    if not found:
        shown = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(
            f"this is no state of the loader: it has {shown}; accepted: a dict with the key {NODES_KEY!r}, or "
            f"{leaf_key(0)!r} and so on for each data rank"
        )
    return found


# ---- whose state it is


def scope_of(node: BaseNode[Any]) -> str:
    """ "global": the same on all ranks; "rank": its rank's own, which is assumed of any node that does not say."""
    return "global" if passes_through(node) else str(getattr(node, "state_scope", "rank"))


def rank_scoped(graph: BaseNode[Any]) -> list[str]:
    """Names of the nodes whose state is their rank's own, the lowest first."""
    names = node_names(graph)
    return [names[id(node)] for node in all_nodes(graph) if scope_of(node) == "rank"]


def another_rank(
    graph: BaseNode[Any], leaves: Iterable[int | None], wanted: int | None, state: LoaderState, now: Mapping[str, Any]
) -> str:
    """Why none of ``leaves`` is the state of data rank ``wanted``; None: one that all ranks share is wanted.

    Args:
        state: of one of the leaves.
        now: this loader's fingerprint.
    """
    keepers = rank_scoped(graph)
    given = [leaf_key(rank) for rank in sorted(leaves, key=lambda rank: -1 if rank is None else rank)]
    if keepers:
        return f"the state has {given}, but {_kept_by(keepers)}; accepted: a dict with the key {leaf_key(wanted)!r}"
    apart = differences(state.fingerprint, now)
    return (
        f"the state has {given}, each a rank's own, but no node here keeps state of its own rank; accepted: a dict "
        f"with the key {leaf_key(wanted)!r}. The state belongs to other data: {_lines(list(apart), apart)}"
    )


def _kept_by(keepers: Sequence[str]) -> str:
    if len(keepers) == 1:
        return f"node {keepers[0]!r} keeps state of its own rank"
    return f"nodes {list(keepers)} keep state of their own rank"


def reshard(graph: BaseNode[Any], states: Sequence[LoaderState], rank: int, size: int) -> dict[str, Any]:
    """Entries for data rank ``rank`` of ``size``, from those of another number of ranks, in rank order.

    A node whose state is its rank's own makes its new entry with ``reshard(entries, rank, size)``; an entry that a rank
    did not have is None.

    Raises:
        ValueError: such a node has no ``reshard``, or entries differ that should be the same on all ranks.
    """
    names = node_names(graph)
    by_name = {names[id(node)]: node for node in all_nodes(graph)}
    entries: dict[str, Any] = {}
    for name in sorted({name for state in states for name in state.nodes}):
        given = [state.nodes.get(name) for state in states]
        node = by_name.get(name)
        if node is None or scope_of(node) == "global":
            if any(entry != given[0] for entry in given):
                raise ValueError(f"the entries of node {name!r} differ between ranks, though its state is global")
            entries[name] = given[0]
            continue
        remake = getattr(node, "reshard", None)
        if remake is None:
            raise ValueError(
                f"node {name!r} keeps state of its own rank, and the state is from {len(states)} data ranks, not "
                f"{size}; accepted: the same number, or a node with reshard(states, rank, size)"
            )
        entries[name] = remake(given, rank, size)
    return entries


# ---- fingerprint


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every field in which two fingerprints differ, nested ones by dotted name, as (saved, now)."""
    one, other = _flat(saved), _flat(now)
    names = [*one, *(name for name in other if name not in one)]
    apart = {name: (one.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names}
    return {name: pair for name, pair in apart.items() if pair[0] != pair[1]}


def agree(
    state: LoaderState,
    now: Mapping[str, Any],
    *,
    strict: bool,
    data_ranks: int | None,
    keepers: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The entries to restore, and what differs but was accepted.

    With ``strict=False`` a difference is accepted when no record of the epoch in progress is lost or repeated by it:
    the seed of per-sample randomness and a user's own fields always; a dataset that only grew, under an unchanged
    sampler; and at an epoch's beginning or end, where no part of it remains, any sampler, dataset and global batch
    size.

    Args:
        now: this loader's fingerprint.
        data_ranks: this loader's data-parallel size, for saying which layouts would do.
        keepers: nodes whose state is their rank's own, to be named.

    Raises:
        ValueError: it belongs to other data: each differing field, saved and now.
    """
    apart = differences(state.fingerprint, now)
    cursor = find_cursor(state.nodes)
    between = cursor is not None and (cursor[WindowSampler.FINISHED_KEY] or not cursor[WindowSampler.CONSUMED_KEY])
    of_order = [name for name in apart if name.partition(".")[0] in _ORDER_FIELDS]
    unsafe = [name for name in of_order if not between and not _only_grew(name, of_order, apart)]
    unsafe += [name for name in apart if name == RANKS_FIELD]
    refused = list(apart) if strict else unsafe
    if refused:
        hint = _hint(state, apart, data_ranks, keepers)
        if not unsafe:
            hint += "; with strict=False it is accepted, since no record of the epoch in progress is lost or repeated"
        raise ValueError(f"the state belongs to other data: {_lines(refused, apart)}{hint}")
    accepted = [_lines([name], apart) for name in apart]
    if of_order and between and cursor is not None:
        # Counts of another order mean nothing: what is left of the state is which epoch comes next.
        epoch = int(cursor[WindowSampler.EPOCH_KEY]) + int(bool(cursor[WindowSampler.FINISHED_KEY]))
        return begin_epoch(state.nodes, epoch), accepted
    return dict(state.nodes), accepted


def _only_grew(name: str, of_order: Sequence[str], apart: Mapping[str, tuple[Any, Any]]) -> bool:
    if name != "dataset_length" or len(of_order) > 1:
        return False
    saved, now = apart[name]
    return isinstance(saved, int) and isinstance(now, int) and now > saved


def _hint(
    state: LoaderState, apart: Mapping[str, tuple[Any, Any]], data_ranks: int | None, keepers: Sequence[str]
) -> str:
    if RANKS_FIELD in apart and keepers:
        return (
            f"; {_kept_by(keepers)}: resume on as many data ranks, or give load_state_dict the leaves of all of them, "
            "if such a node has reshard(states, rank, size)"
        )
    saved = state.fingerprint.get("global_batch_size")
    if "global_batch_size" in apart and isinstance(saved, int) and data_ranks is not None:
        return f"; {layouts_that_divide(saved, None, data_ranks)}"
    return ""


def _flat(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _lines(names: Sequence[str], apart: Mapping[str, tuple[Any, Any]]) -> str:
    def shown(value: Any) -> str:
        return "nothing" if value is _ABSENT else repr(value)

    return "; ".join(f"{name}: saved {shown(apart[name][0])}, now {shown(apart[name][1])}" for name in names)
