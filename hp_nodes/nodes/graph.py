"""A graph of nodes seen from outside: who is below whom, what they are called, and their state as one flat mapping.

torchdata nests a source's state inside the state of the node above. Ours is flat, ``{"hp_nodes": {name: entry}}``, so
that a checkpoint does not depend on which nodes merely pass things through. torchdata's own nodes are taken apart the
same way (see :mod:`hp_nodes.nodes.neighbours`). A user's torchdata node in between nests as it always did: what it
nested is lifted out when its state is read (:func:`read_state`) and put back when it is restored (:func:`restore`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torchdata.nodes import BaseNode

from hp_nodes.nodes.neighbours import is_known, join_state, passes_through, settle, split_state

__all__ = ["NODES_KEY", "all_nodes", "node_names", "read_state", "restore", "sources"]

NODES_KEY = "hp_nodes"


def sources(node: BaseNode[Any]) -> list[BaseNode[Any]]:
    """The nodes directly below: attributes that are nodes, or lists and mappings of nodes."""
    private = type(node).__module__.startswith("torchdata.")
    found: list[BaseNode[Any]] = []
    for name, value in vars(node).items():
        if private and name.startswith("_"):
            continue  # torchdata keeps its own iterators there
        candidates = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
        )
        found.extend(
            item for item in candidates if isinstance(item, BaseNode) and not any(item is one for one in found)
        )
    return found


def all_nodes(root: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    """Every node of the graph once, sources before the nodes above them."""
    seen: set[int] = set()

    def walk(node: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
        if id(node) in seen:
            return
        seen.add(id(node))
        for source in sources(node):
            yield from walk(source)
        yield node

    return walk(root)


def node_names(root: BaseNode[Any]) -> dict[int, str]:
    """``id(node) → name``: its ``name`` if it has one, else its class, numbered from the sources up when repeated.

    Raises:
        ValueError: two nodes were given the same name.
    """
    names: dict[int, str] = {}
    taken: set[str] = set()
    for node in all_nodes(root):
        name = getattr(node, "name", None)
        if isinstance(name, str):
            if name in taken:
                raise ValueError(f"two nodes are called {name!r}; give one of them another name")
        else:
            name = free_name(type(node).__name__, taken)
        names[id(node)] = name
        taken.add(name)
    return names


def free_name(name: str, taken: set[str]) -> str:
    """``name``, or ``name_2``, ``name_3``, ... when it is taken."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def read_state(node: BaseNode[Any]) -> dict[str, Any]:
    """The state of ``node`` and everything below it, as name → entry."""
    return _entries(node, node.state_dict())


def _entries(node: BaseNode[Any], raw: Any, names: Mapping[int, str] | None = None) -> dict[str, Any]:
    if _is_flat(raw):
        return dict(raw[NODES_KEY])
    names = node_names(node) if names is None else names
    entries: dict[str, Any] = {}
    parts = split_state(node, raw)
    if parts is None:
        own: Any = _lift(raw, entries)
    else:
        own = _lift(parts[0], entries)
        for source, state in parts[1]:
            _add(entries, _entries(source, state, names))
    if own is not None:
        _add(entries, {names[id(node)]: own})
    return entries


def _add(entries: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, entry in more.items():
        if name in entries:
            raise ValueError(f"two branches of the graph have a node called {name!r}; give one of them another name")
        entries[name] = entry


def restore(node: BaseNode[Any], entries: Mapping[str, Any] | None) -> None:
    """Reset ``node``, and what is below it, to what :func:`read_state` gave; None: as ``reset(None)``.

    Raises:
        ValueError: a stateful node has no entry, or an entry has no node.
    """
    _settle_down_to_stages(node)
    if entries is None:
        node.reset(None)
        return
    if getattr(node, "keeps_flat_state", False):
        node.reset({NODES_KEY: dict(entries)})
        return
    used: set[str] = set()
    raw = _raw_state(node, entries, node_names(node), used)
    unknown = sorted(set(entries) - used)
    if unknown:
        raise ValueError(
            f"the state has entries {unknown}, but the graph has no such node at or below {type(node).__name__}"
        )
    try:
        node.reset(raw)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"node {node_names(node)[id(node)]!r} cannot be restored from its state, which another arrangement of "
            f"nodes may have left: {type(error).__name__}: {error}"
        ) from error


def _settle_down_to_stages(node: BaseNode[Any]) -> None:
    """Have no torchdata thread in a node that is about to be reset. A stage sees to what is below it by itself, once
    its own thread has run to where it must."""
    if not getattr(node, "keeps_flat_state", False):
        settle(node)
        for source in sources(node):
            _settle_down_to_stages(source)


def _raw_state(node: BaseNode[Any], entries: Mapping[str, Any], names: Mapping[int, str], used: set[str]) -> Any:
    """What ``reset`` of this node takes. The inverse of :func:`_entries`."""
    name = names[id(node)]
    if getattr(node, "keeps_flat_state", False):
        return _flat_state(node, entries, names, used)
    if is_known(node):
        below = [_raw_state(source, entries, names, used) for source in sources(node)]
        if name not in entries and not passes_through(node):
            raise ValueError(f"the state has no entry for node {name!r}; it has {sorted(entries)}")
        used.add(name)
        return join_state(node, _lower(entries.get(name), entries, used), below)
    if name in entries:
        used.add(name)
        return _lower(entries[name], entries, used)
    if not _is_flat(node.state_dict()):
        raise ValueError(f"the state has no entry for node {name!r}; it has {sorted(entries)}")
    return _flat_state(node, entries, names, used)  # it passes its source's state through


def _flat_state(
    node: BaseNode[Any], entries: Mapping[str, Any], names: Mapping[int, str], used: set[str]
) -> dict[str, Any]:
    """The entries of this node and of those below it."""
    mine = {names[id(other)] for other in all_nodes(node)} & set(entries)
    used |= mine
    return {NODES_KEY: {name: entries[name] for name in mine}}


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {NODES_KEY} and isinstance(value[NODES_KEY], Mapping)


def _lift(value: Any, entries: dict[str, Any]) -> Any:
    """A copy of ``value`` in which each nested flat state is replaced by the names it held."""
    if _is_flat(value):
        _add(entries, value[NODES_KEY])
        return {NODES_KEY: sorted(value[NODES_KEY])}
    if isinstance(value, dict):
        return {key: _lift(item, entries) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_lift(item, entries) for item in value)
    # A generator's or a counter's array may be the one that it goes on writing to.
    return copy.deepcopy(value)


def _lower(value: Any, entries: Mapping[str, Any], used: set[str]) -> Any:
    """The inverse of :func:`_lift`."""
    if isinstance(value, dict):
        if set(value) == {NODES_KEY} and isinstance(value[NODES_KEY], list):
            missing = [name for name in value[NODES_KEY] if name not in entries]
            if missing:
                raise ValueError(f"the state has no entries for nodes {missing}")
            used.update(value[NODES_KEY])
            return {NODES_KEY: {name: entries[name] for name in value[NODES_KEY]}}
        return {key: _lower(item, entries, used) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_lower(item, entries, used) for item in value)
    return copy.deepcopy(value)
