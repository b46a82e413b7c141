"""What every node of the project shares: a name, a source, flat state, and the check that nothing was lost below.

A stage takes items from its source and gives items of its own. Its state is its source's plus, while there is something
to say, one entry of its own. ``reset`` only sets cursors; threads, workers and collectives start at the first ``next``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from torch.autograd import profiler
from torchdata.nodes import BaseNode

from hp_nodes.errors import note_location
from hp_nodes.nodes.graph import NODES_KEY, free_name, node_names, read_state, restore, sources
from hp_nodes.timing import NodeTimes
from hp_nodes.types import MicroBatch, Window

__all__ = ["Edge", "Stage"]

T = TypeVar("T")
Place = tuple[int, int, int]


class Stage(BaseNode[T]):
    """Base of the nodes. A subclass implements ``next`` and, when it has state, ``own_state`` and ``restore_own``.

    Each ``next`` is counted in ``times`` and, while a torch profiler is on, a range with the node's name.

    Args:
        source: the node below, or None for a leaf.
        name: unique in the graph; default: the class name, numbered when repeated.

    Raises:
        ValueError: the name is taken below.
    """

    state_scope = "global"
    keeps_flat_state = True
    communicates = False
    requires_entry = False
    takes_envelopes = True
    """Whether the source gives windows or micro-batches; a reader of a user's own items says False."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "next" in cls.__dict__:
            cls.next = _counted(cls.__dict__["next"])  # type: ignore[method-assign, assignment]

    def __init__(self, source: BaseNode[Any] | None, *, name: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if source is not None and not isinstance(source, BaseNode):
            raise ValueError(f"{type(self).__name__}: the source is {source!r}; accepted: a torchdata BaseNode")
        taken = set(node_names(source).values()) if source is not None else set()
        if name is not None and name in taken:
            raise ValueError(f"two nodes are called {name!r}; give one of them another name")
        self.source = source
        self.name = name if name is not None else free_name(type(self).__name__, taken)
        self.times = NodeTimes()
        self.first_given: Place | None = None
        """Place of the first item since the last reset, for the check in the node above."""
        self.edge = Edge(source, self.name, envelopes=self.takes_envelopes) if source is not None else None

    def own_state(self) -> dict[str, Any] | None:
        """This node's entry; None when there is nothing to say."""
        return None

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        """Set this node's cursors from its entry; None: from the beginning, or nothing was said."""
        if entry is not None:
            raise ValueError(f"the state has an entry for node {self.name!r}, which keeps none")

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        entries = _entries_of(initial_state, self.name)
        own = None if entries is None else entries.pop(self.name, None)
        if self.requires_entry and entries is not None and own is None:
            raise ValueError(f"the state has no entry for node {self.name!r}; it has {sorted(entries)}")
        self.first_given = None
        if self.edge is not None:
            self.edge.restart()
        if self.source is None:
            if entries:
                raise ValueError(f"the state has entries {sorted(entries)}, but this graph has no such node")
        else:
            restore(self.source, entries)
        self.restore_own(own)

    def source_state(self) -> dict[str, Any]:
        """Entries of all nodes below, as of the item given last. A node that buffers returns what it paired."""
        return read_state(self.source) if self.source is not None else {}

    def get_state(self) -> dict[str, Any]:
        entries = self.source_state()
        own = self.own_state()
        if own is not None:
            entries[self.name] = own
        return {NODES_KEY: entries}

    @property
    def own_thread(self) -> bool:
        """Whether the nodes below run in a thread of this node."""
        return False

    def buffered(self) -> int:
        """Items taken from the source, or built of them, that the node above was not given yet."""
        return 0

    def pull(self) -> Any:
        """The source's next item, checked to be the one that follows."""
        assert self.edge is not None
        return self.edge.pull()

    def give(self, item: T) -> T:
        """``item``, remembered as the first when it is."""
        if self.first_given is None:
            self.first_given = _place(item)
        return item


def _counted(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A node's ``next``, which counts what it took."""

    @wraps(function)
    def counted_next(self: Stage[Any]) -> Any:
        if not profiler._is_profiler_enabled:
            return self.times.frame(function, self)
        with profiler.record_function(self.name):
            return self.times.frame(function, self)

    return counted_next


def _entries_of(state: Any, name: str) -> dict[str, Any] | None:
    if state is None:
        return None
    if not isinstance(state, Mapping) or not isinstance(state.get(NODES_KEY), Mapping):
        raise ValueError(f"{name}: {state!r} is not a state; accepted: what state_dict() of such a graph returned")
    return dict(state[NODES_KEY])


def _place(item: Any) -> Place | None:
    if isinstance(item, Window):
        return item.epoch, item.step, item.first_round
    if isinstance(item, MicroBatch):
        return item.epoch, item.step, item.round
    return None


class Edge:
    """From a source to the node that reads it.

    Behind a node that is not ours it checks that windows and micro-batches follow one another without a gap, and says
    which node raised.
    """

    def __init__(self, source: BaseNode[Any], reader: str, *, envelopes: bool = True) -> None:
        self.source = source
        self.reader = reader
        self._envelopes = envelopes
        self.times = None if isinstance(source, Stage) else NodeTimes()
        """Of nodes directly below that are not ours, all together."""
        self._last: Window | MicroBatch | None = None

    def pull(self) -> Any:
        if self.times is None:
            return next(self.source)
        try:
            item = self.times.frame(next, self.source)
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            note_location(error, self._culprit(error))
            raise
        self._follow(item)
        return item

    def restart(self) -> None:
        self._last = None

    def _follow(self, item: Any) -> None:
        place = _place(item)
        if place is None:
            if not self._envelopes:
                return
            raise TypeError(f"{self._between()} gave a {type(item).__name__}; accepted: a Window or a MicroBatch")
        expected = self._expected()
        if expected is not None and place != expected:
            raise RuntimeError(
                f"{self._between()} gave epoch {place[0]}, step {place[1]}, round {place[2]} where "
                f"epoch {expected[0]}, step {expected[1]}, round {expected[2]} follows: a node may change samples, but "
                f"it must pass on every {type(item).__name__} once, in order"
            )
        self._last = item

    def _end(self) -> None:
        if self._last is not None:
            if not self._last.ends_epoch:
                raise RuntimeError(
                    f"{self._between()} ended after epoch {self._last.epoch}, step {self._last.step}, before "
                    f"the epoch's last {type(self._last).__name__}"
                )
        elif (first := self._first_below()) is not None:
            raise RuntimeError(
                f"{self._between()} ended and passed on nothing, though epoch {first[0]} has more to give"
            )

    def _culprit(self, error: BaseException) -> str:
        """The name of the node in whose code ``error`` was raised: the innermost one on its traceback."""
        names, found, tb = node_names(self.source), self._foreign()[0][0], error.__traceback__
        while tb is not None:
            found = names.get(id(tb.tb_frame.f_locals.get("self")), found)
            tb = tb.tb_next
        return found

    def _expected(self) -> Place | None:
        last = self._last
        if last is None:
            return self._first_below()
        if last.ends_step:
            return last.epoch, last.step + 1, 0
        if isinstance(last, Window):
            return last.epoch, last.step, last.first_round + last.num_rounds
        return last.epoch, last.step, last.round + 1

    def _foreign(self) -> tuple[list[str], Stage[Any] | None]:
        """The nodes that are not ours directly below, and the first of ours under them."""
        names, found, node = node_names(self.source), [], self.source
        while not isinstance(node, Stage):
            found.append(names[id(node)])
            below = sources(node)
            if len(below) != 1:
                return found, None
            node = below[0]
        return found, node

    def _first_below(self) -> Place | None:
        stage = self._foreign()[1]
        return stage.first_given if stage is not None else None

    def _between(self) -> str:
        found, stage = self._foreign()
        return (
            f"node {' or '.join(found)} (between {stage.name if stage is not None else 'the source'} and {self.reader})"
        )
