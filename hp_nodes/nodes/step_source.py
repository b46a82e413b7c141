"""The user's source of external steps, whatever it is, as one node.

Takes any iterable of local rounds: a list, a torch DataLoader, a streaming loader, a Hugging Face iterable, or a
torchdata node. Gives its items unchanged. Keeps the source's own state under one entry where it has
``state_dict``/``load_state_dict`` or is a node. Nothing of the source is touched before the first ``next``.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torchdata.nodes import BaseNode

from hp_nodes.plain import Unsaveable

__all__ = ["StepSource"]


class StepSource(BaseNode[Any]):
    """Items of ``steps``, epoch after epoch.

    Args:
        steps: an iterable that can be iterated once an epoch, or a BaseNode.
        data_parallel_size: for sources whose ``state_dict(num_samples, from_beginning)`` counts samples over all ranks,
            as Mosaic Streaming's datasets do: every rank is taken to have got as many samples as this one.

    Raises:
        ValueError: ``steps`` is neither.
    """

    EPOCH_KEY = "epoch"
    ITEMS_KEY = "items"
    """Rounds given; samples, for a source that counts those."""
    ENDED_KEY = "ended"
    SOURCE_KEY = "source"
    state_scope = "rank"

    def __init__(self, steps: Iterable[Any] | BaseNode[Any], data_parallel_size: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if not isinstance(steps, Iterable):
            raise ValueError(f"the step source is a {type(steps).__name__}; accepted: an iterable or a torchdata node")
        self.steps = steps
        self._size = data_parallel_size
        self._is_node = isinstance(steps, BaseNode)
        self._counts_samples = not self._is_node and _counts_samples(steps)
        self._given: dict[str, Any] | None = None
        self._running: Iterator[Any] | None = None
        self._exhausted = False
        self._epoch = 0
        self._items = 0

    @property
    def resumable(self) -> bool:
        """Whether the source can say where it stands and go there."""
        return self._is_node or (hasattr(self.steps, "state_dict") and hasattr(self.steps, "load_state_dict"))

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._given = copy.deepcopy(initial_state)
        self._running = None

    def begin(self, epoch: int) -> None:
        """The next item is the first of ``epoch``. A state from the end of an epoch is gone through first: what a
        source carries from epoch to epoch (an order of its own, a generator) goes on from there.

        A state from before the first item says nothing of the source. A source that is under way then begins an epoch
        as it would by itself; only one with ``set_epoch``, or a node, is sure to begin the same one again.
        """
        given = self._given
        if given is not None and given[self.ENDED_KEY] and self.resumable and not self._stands_at_the_end_of(given):
            deque(self._resumed(given), maxlen=0)
        self._given = None
        self._epoch, self._items, self._exhausted = epoch, 0, False
        self._set_epoch(epoch)
        if isinstance(self.steps, BaseNode):
            self.steps.reset(None)
        elif type(self.steps).__module__.partition(".")[0] == "datasets" and self.resumable:
            self.steps.load_state_dict(None)  # type: ignore[attr-defined]  # it keeps a loaded state for every iteration
        self._running = iter(self.steps)

    def resume(self) -> None:
        """The next item is the one after the state given to :meth:`reset`.

        Raises:
            ValueError: the source cannot go there.
        """
        given, self._given = self._given, None
        self._running = self._resumed(given)

    def _resumed(self, given: Mapping[str, Any] | None) -> Iterator[Any]:
        if given is None or not self.resumable:
            raise ValueError(self._not_resumable())
        self._epoch, self._items, self._exhausted = int(given[self.EPOCH_KEY]), int(given[self.ITEMS_KEY]), False
        self._set_epoch(self._epoch)
        if isinstance(self.steps, BaseNode):
            self.steps.reset(given[self.SOURCE_KEY])
        else:
            self.steps.load_state_dict(copy.deepcopy(given[self.SOURCE_KEY]))  # type: ignore[attr-defined]
        return iter(self.steps)

    def next(self) -> Any:
        if self._running is None:
            self.begin(self._epoch)
        assert self._running is not None
        try:
            item = next(self._running)
        except StopIteration:
            self._exhausted = True
            raise
        self._items += _samples_in(item) if self._counts_samples else 1
        return item

    def get_state(self) -> dict[str, Any]:
        if self._given is not None:
            return copy.deepcopy(self._given)
        state: Any = None
        if not self.resumable:
            state = Unsaveable(self._not_resumable())
        elif self._running is not None:
            state = self._state_of_source()
        return {
            self.EPOCH_KEY: self._epoch,
            self.ITEMS_KEY: self._items,
            self.ENDED_KEY: False,
            self.SOURCE_KEY: state,
        }

    @classmethod
    def ended(cls, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state``, known to be the end of its epoch."""
        return {**state, cls.ENDED_KEY: True}

    def close(self) -> None:
        """Let go of the running iteration, and with it of the workers it may have."""
        self._running = None

    def _not_resumable(self) -> str:
        return (
            f"the step source, a {type(self.steps).__name__}, cannot say where it stands, so the loader has no state; "
            "accepted for resuming: a source with state_dict and load_state_dict, or a torchdata node"
        )

    def _stands_at_the_end_of(self, given: Mapping[str, Any]) -> bool:
        return self._exhausted and self._epoch == given[self.EPOCH_KEY]

    def _state_of_source(self) -> Any:
        steps: Any = self.steps
        if self._counts_samples:
            return copy.deepcopy(steps.state_dict(num_samples=self._items * self._size, from_beginning=True))
        return copy.deepcopy(steps.state_dict())

    def _set_epoch(self, epoch: int) -> None:
        """Tell the source, or, since a torch DataLoader has no ``set_epoch``, what it draws from."""
        for owner in (self.steps, *(getattr(self.steps, name, None) for name in _OF_A_DATALOADER)):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
                return


_OF_A_DATALOADER = ("batch_sampler", "sampler", "dataset")


def _samples_in(item: Any) -> int:
    """Samples of a round; of what is none, which the reader above will name, one."""
    try:
        return sum(len(samples) for samples in item)
    except TypeError:
        return 1


def _counts_samples(steps: Any) -> bool:
    try:
        return {"num_samples", "from_beginning"} <= set(inspect.signature(steps.state_dict).parameters)
    except (AttributeError, TypeError, ValueError):
        return False
