"""A graph of nodes seen from outside: who is below whom, what they are called, and their state as one flat mapping.

torchdata nests a source's state inside the state of the node above. Ours is flat, ``{"hp_nodes": {name: entry}}``, so
that a checkpoint does not depend on which nodes merely pass things through. A user's torchdata node in between nests as
it always did: what it nested is lifted out when its state is read (:func:`read_state`) and put back when it is restored
(:func:`restore`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchdata.nodes import BaseNode

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
    raw = node.state_dict()
    if _is_flat(raw):
        return dict(raw[NODES_KEY])
    entries: dict[str, Any] = {}
    own = _lift(raw, entries)
    entries[node_names(node)[id(node)]] = own
    return entries


def restore(node: BaseNode[Any], entries: Mapping[str, Any]) -> None:
    """Reset ``node``, and what is below it, to what :func:`read_state` gave.

    Raises:
        ValueError: a stateful node has no entry, or an entry has no node.
    """
    if getattr(node, "keeps_flat_state", False):
        node.reset({NODES_KEY: dict(entries)})
        return
    name = node_names(node)[id(node)]
    if name not in entries:
        if not _is_flat(node.state_dict()):
            raise ValueError(f"the state has no entry for node {name!r}; it has {sorted(entries)}")
        node.reset({NODES_KEY: dict(entries)})  # it passes its source's state through
        return
    used: set[str] = {name}
    lowered = _lower(entries[name], entries, used)
    unknown = sorted(set(entries) - used)
    if unknown:
        raise ValueError(f"the state has entries {unknown}, but the graph has no such node below {name!r}")
    node.reset(lowered)


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {NODES_KEY} and isinstance(value[NODES_KEY], Mapping)


def _lift(value: Any, entries: dict[str, Any]) -> Any:
    """A copy of ``value`` in which each nested flat state is replaced by the names it held."""
    if _is_flat(value):
        for name, entry in value[NODES_KEY].items():
            if name in entries:
                raise ValueError(
                    f"two branches of the graph have a node called {name!r}; give one of them another name"
                )
            entries[name] = entry
        return {NODES_KEY: sorted(value[NODES_KEY])}
    if isinstance(value, dict):
        return {key: _lift(item, entries) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_lift(item, entries) for item in value)
    return value


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
    return value
