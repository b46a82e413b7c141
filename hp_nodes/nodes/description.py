"""A graph as a person reads it: a tree in text, a Mermaid drawing, boxes in a notebook.

Takes any graph, user nodes included, and looks only: nothing starts, waits or communicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from torchdata.nodes import BaseNode

from hp_nodes.nodes.graph import all_nodes, node_names, read_state, sources
from hp_nodes.nodes.stage import Stage
from hp_nodes.nodes.stats import threads_of
from hp_nodes.plain import to_text

__all__ = ["GraphDescription", "NodeDescription", "describe"]

_HIDDEN = ("first_given", "name")
_FORMATS = ("text", "mermaid")


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """One node of a graph."""

    name: str
    kind: str
    settings: Mapping[str, Any]
    """Its public attributes that are plain values, and what its functions and datasets are."""
    thread: str
    """In whose thread it works: "main", or the node that has the thread."""
    communicates: bool
    ranks: int
    """That it exchanges with; 1 where it is alone."""
    exchanges: int
    """Made so far."""
    buffered: int
    """Items it holds that the node above was not given yet."""
    state_bytes: int | None
    """Of its own entry in a checkpoint, as text; None where it has none."""
    sources: tuple[str, ...]


class GraphDescription(str):
    """The text of a graph, the topmost node first, each source indented below its reader.

    In a notebook it is displayed as boxes in the order of the flow.
    """

    nodes: tuple[NodeDescription, ...]
    """Sources before the nodes above them."""

    __slots__ = ("nodes",)

    @property
    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart, for Markdown pages that draw them."""
        numbers = {node.name: number for number, node in enumerate(self.nodes)}
        lines = ["flowchart LR"]
        for thread, members in self._by_thread().items():
            drawn = [f'n{numbers[node.name]}["{_label(node)}"]' for node in members]
            if thread == "main":
                lines += [f"    {node}" for node in drawn]
            else:
                lines.append(f'    subgraph t{numbers[thread]}["thread of {thread}"]')
                lines += [f"        {node}" for node in drawn]
                lines.append("    end")
        for node in self.nodes:
            lines += [f"    n{numbers[source]} --> n{numbers[node.name]}" for source in node.sources]
        return "\n".join(lines)

    def _by_thread(self) -> dict[str, list[NodeDescription]]:
        found: dict[str, list[NodeDescription]] = {}
        for node in self.nodes:
            found.setdefault(node.thread, []).append(node)
        return found

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        boxes = "<span>→</span>".join(_box(node) for node in self.nodes)
        return f'<div style="display:flex;flex-wrap:wrap;gap:6px;align-items:center">{boxes}</div>'


def describe(graph: BaseNode[Any], format: Literal["text", "mermaid"] = "text") -> GraphDescription:  # noqa: A002
    """What a graph is made of: each node with its settings, thread, exchanges, buffered items and size of state.

    Args:
        graph: any node; user nodes and torchdata's own included.
        format: "text": a tree, displayed as boxes in a notebook. "mermaid": the text of a Mermaid flowchart.

    Raises:
        ValueError: another format, or two nodes of one name.
    """
    if format not in _FORMATS:
        raise ValueError(f"format is {format!r}; accepted: {' or '.join(map(repr, _FORMATS))}")
    names, threads, sizes = node_names(graph), threads_of(graph), _state_sizes(graph)
    nodes = {id(node): _described(node, names, threads, sizes) for node in all_nodes(graph)}

    def lines(node: BaseNode[Any], depth: int) -> list[str]:
        below = sources(node)
        return [f"{'  ' * depth}{_line(nodes[id(node)])}", *(line for one in below for line in lines(one, depth + 1))]

    text = GraphDescription("\n".join(lines(graph, 0)))
    text.nodes = tuple(nodes.values())
    if format == "text":
        return text
    drawn = GraphDescription(text.mermaid)
    drawn.nodes = text.nodes
    return drawn


def _described(
    node: BaseNode[Any], names: Mapping[int, str], threads: Mapping[int, str], sizes: Mapping[str, int]
) -> NodeDescription:
    ours = node if isinstance(node, Stage) else None
    name = names[id(node)]
    return NodeDescription(
        name=name,
        kind=type(node).__name__,
        settings={key: told for key, value in vars(node).items() if (told := _setting(key, value)) is not None},
        thread=threads[id(node)],
        communicates=bool(getattr(node, "communicates", False)),
        ranks=int(getattr(getattr(node, "transport", None), "size", 1)),
        exchanges=0 if ours is None else ours.times.exchanges,
        buffered=0 if ours is None else ours.buffered(),
        state_bytes=sizes.get(name),
        sources=tuple(names[id(source)] for source in sources(node)),
    )


def _state_sizes(graph: BaseNode[Any]) -> dict[str, int]:
    """Bytes of each node's entry. A graph that cannot tell its state now is described all the same."""
    try:
        return {name: len(to_text(entry)) for name, entry in read_state(graph).items()}
    except Exception:
        return {}


def _setting(key: str, value: Any) -> Any:
    """A public attribute as it is shown; None: not shown."""
    if key.startswith("_") or key in _HIDDEN:
        return None
    if isinstance(value, (bool, int, float, str)):
        return value
    if callable(value) and key.endswith(("_fn", "_model")):
        return _Named(getattr(value, "__name__", type(value).__name__))
    if key in ("dataset", "batch_sampler"):
        return _Named(type(value).__name__)
    return None


class _Named(str):
    """A name, shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _line(node: NodeDescription) -> str:
    named = node.name if node.name == node.kind else f"{node.name} ({node.kind})"
    settings = ", ".join(f"{key}={value!r}" for key, value in node.settings.items())
    facts = _facts(node)
    return f"{named}({settings})" + (f"  [{'; '.join(facts)}]" if facts else "")


def _facts(node: NodeDescription) -> list[str]:
    facts = [] if node.thread == "main" else [f"thread: {node.thread}"]
    if node.communicates:
        facts.append(f"exchanges with {node.ranks} ranks" if node.ranks > 1 else "exchanges, alone")
    if node.exchanges:
        facts.append(f"{node.exchanges} exchanges so far")
    if node.buffered:
        facts.append(f"{node.buffered} buffered")
    if node.state_bytes is not None:
        facts.append(f"state {node.state_bytes} B")
    return facts


def _label(node: NodeDescription) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in node.settings.items())
    facts = [fact for fact in _facts(node) if not fact.startswith("thread:")]
    parts = [f"<b>{node.name}</b>", *([settings] if settings else []), *facts]
    return "<br/>".join(part.replace('"', "'") for part in parts)


def _box(node: NodeDescription) -> str:
    """Dashed where a thread of its own works, a heavier left edge where ranks meet."""
    border = "solid" if node.thread == "main" else "dashed"
    edge = "border-left:5px solid #D55E00;" if node.communicates else ""
    settings = "<br>".join(f"{escape(key)} = {escape(repr(value))}" for key, value in node.settings.items())
    facts = "<br>".join(escape(fact) for fact in _facts(node))
    return (
        f'<div style="border:1px {border} currentColor;border-radius:4px;padding:4px 8px;font-size:11px;{edge}">'
        f'<b>{escape(node.name)}</b><br>{settings}<div style="opacity:.7">{facts}</div></div>'
    )
