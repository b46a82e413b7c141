"""Looking at a graph: what may not stand where, and what flows behind a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchdata.nodes import BaseNode

from hp_nodes.nodes.graph import all_nodes, node_names, read_state, restore
from hp_nodes.nodes.neighbours import refusal, runs_ahead
from hp_nodes.nodes.run_ahead import RunAhead

__all__ = ["check_graph", "peek"]


def check_graph(root: BaseNode[Any]) -> None:
    """Refuse torchdata's own nodes where a resume would not be exact: threaded ones above a node that communicates, and
    those that do so anywhere.

    Raises:
        ValueError: with the node and the reason; or ``root`` is no node.
    """
    if not isinstance(root, BaseNode):
        raise ValueError(
            f"the graph is a {type(root).__name__}; accepted: a torchdata BaseNode, the topmost of a graph"
        )
    names = node_names(root)
    for node in all_nodes(root):
        reason = refusal(node)
        if reason is not None:
            raise ValueError(f"node {names[id(node)]}: torchdata's {reason}")
        if not runs_ahead(node):
            continue
        below = [names[id(other)] for other in all_nodes(node) if getattr(other, "communicates", False)]
        if below:
            raise ValueError(
                f"torchdata's {type(node).__name__} ({names[id(node)]}) stands above {below[0]}, which communicates "
                "with other ranks: its reset can put two threads into one source, which loses items. Put it below the "
                "Planner, or use HostPrefetcher"
            )


def peek(graph: BaseNode[Any], after: str) -> Any:
    """What flows behind a node: its next item. The graph stands afterwards where it stood before.

    On several ranks all call it, since nodes below may communicate. A graph whose background thread is running has to
    be closed first. Interrupted (a notebook's stop button), it does not wait for a thread that it started: the graph is
    then to be built anew.

    Args:
        graph: any node of a graph.
        after: name of the node.

    Raises:
        ValueError: no node has that name; the names are listed.
        RuntimeError: a background thread is reading from the graph.
    """
    names = node_names(graph)
    found = [node for node in all_nodes(graph) if names[id(node)] == after]
    if not found:
        raise ValueError(f"no node is called {after!r}; the graph has {list(names.values())}")
    busy = _reading_ahead(graph, names)
    if busy:
        raise RuntimeError(f"{busy[0]} is reading ahead in a thread; close it, or peek before iterating")
    node = found[0]
    entries = read_state(node)
    try:
        item = next(node)
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt) and _reading_ahead(node, names)):
            restore(node, entries)
        raise
    restore(node, entries)
    return item


def _reading_ahead(graph: BaseNode[Any], names: Mapping[int, str]) -> list[str]:
    """The nodes whose own thread is running."""
    return [names[id(node)] for node in all_nodes(graph) if isinstance(getattr(node, "_ahead", None), RunAhead)]
