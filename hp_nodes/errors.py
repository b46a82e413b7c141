"""One error for every rank: what failed, where, and the original traceback as text.

Inside a node, :class:`failing_at` notes on any exception which node and sample it belongs to, without changing its
type, so a node that is used alone raises what the user's function raised. Where ranks communicate, the exception
becomes a :class:`DataPlaneError`, travels as text, and is raised on every rank.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from hp_nodes.timing import exchange_begins, exchange_ended
from hp_nodes.types import SampleKey

__all__ = ["DataPlaneError", "exchanging", "failing_at", "note_location", "some_of"]

_LOCATION = "_hp_nodes_location"
_NAMED = 16


def some_of(ranks: Sequence[int]) -> str:
    """Ranks for a message: all of them, or, of many, the first and how many more there are."""
    if len(ranks) <= _NAMED:
        return str(ranks)
    return f"[{', '.join(str(rank) for rank in ranks[:_NAMED])} and {len(ranks) - _NAMED} more]"


class DataPlaneError(RuntimeError):
    """A failure somewhere in the data plane, raised at the same micro-batch on every rank.

    Attributes:
        rank: global rank on which it happened; None when it is nobody's alone.
        node: name of the node that failed.
        epoch, step: where in the run.
        sample: what is known of the sample, as text.
        message: type and text of the original exception.
        original_traceback: its traceback as text, from the rank where it happened.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: str | None = None,
        epoch: int | None = None,
        step: int | None = None,
        sample: str | None = None,
        original_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.node = node
        self.epoch = epoch
        self.step = step
        self.sample = sample
        self.original_traceback = original_traceback
        self.agreed = False
        """True once every rank knows of it, so that nobody announces it again."""

    def __str__(self) -> str:
        places = [
            f"{label} {value}"
            for label, value in (
                ("rank", self.rank),
                ("node", self.node),
                ("epoch", self.epoch),
                ("step", self.step),
                ("sample", self.sample),
            )
            if value is not None
        ]
        head = f"[{', '.join(places)}] {self.message}" if places else self.message
        return (
            f"{head}\n--- traceback on rank {self.rank} ---\n{self.original_traceback}"
            if self.original_traceback
            else head
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_fields, (self.to_fields(), self.agreed)

    def to_fields(self) -> dict[str, Any]:
        """Plain values, enough for :meth:`from_fields` on another rank."""
        return {
            "message": self.message,
            "rank": self.rank,
            "node": self.node,
            "epoch": self.epoch,
            "step": self.step,
            "sample": self.sample,
            "original_traceback": self.original_traceback,
        }

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_fields()).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> DataPlaneError:
        return _from_fields(json.loads(data.decode()), False)

    def copy(self) -> DataPlaneError:
        """A fresh exception with the same content: raising one object twice would chain its tracebacks."""
        return _from_fields(self.to_fields(), self.agreed)

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        rank: int | None,
        node: str | None = None,
        epoch: int | None = None,
        step: int | None = None,
    ) -> DataPlaneError:
        """What ``error`` says, located as precisely as is known; the arguments fill what nobody noted on it."""
        if isinstance(error, DataPlaneError):
            return error
        noted = error.__dict__.get(_LOCATION, {})
        return cls(
            f"{type(error).__name__}: {_told_by(error)}",
            rank=rank,
            node=noted.get("node", node),
            epoch=noted.get("epoch", epoch),
            step=noted.get("step", step),
            sample=noted.get("sample"),
            original_traceback=_traceback_of(error),
        )


def _told_by(error: BaseException) -> str:
    """Its text. An exception that cannot say it must not break the exchange that tells of it."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text cannot be had: {type(second).__name__})"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except Exception:
        return "".join(traceback.format_tb(error.__traceback__))


def _from_fields(fields: dict[str, Any], agreed: bool) -> DataPlaneError:
    message = fields.pop("message")
    error = DataPlaneError(message, **fields)
    error.agreed = agreed
    return error


class exchanging:  # noqa: N801  a context, read as a verb
    """Context: a transport's own failure inside (a time limit, a broken connection) happened at this node and step.

    Its time counts as exchanging.
    """

    __slots__ = ("_began", "_epoch", "_node", "_step")

    def __init__(self, node: str, epoch: int | None = None, step: int | None = None) -> None:
        self._node = node
        self._epoch = epoch
        self._step = step

    def __enter__(self) -> None:
        self._began = exchange_begins()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        exchange_ended(self._began)
        if isinstance(error, DataPlaneError) and error.node is None:
            error.node, error.epoch, error.step = self._node, self._epoch, self._step


def note_location(
    error: BaseException,
    node: str,
    *,
    epoch: int | None = None,
    step: int | None = None,
    key: SampleKey | None = None,
) -> None:
    """Write on ``error`` where it happened, unless somebody closer to it already did."""
    kept = error.__dict__  # not getattr and setattr, which a user's exception may have its own idea of
    if isinstance(error, DataPlaneError) or _LOCATION in kept:
        return
    noted: dict[str, Any] = {"node": node}
    if epoch is not None:
        noted["epoch"] = epoch
    if step is not None:
        noted["step"] = step
    if key is not None:
        noted["sample"] = f"position {key.position}, index {key.index}, part {key.part}"
    kept[_LOCATION] = noted


class failing_at:  # noqa: N801  a context, read as a verb
    """Context: an exception from inside belongs to ``node`` and, when given, to a step and a sample.

    The innermost context wins. A StopIteration from a user's function would end the epoch silently, so it becomes a
    RuntimeError here.
    """

    __slots__ = ("_epoch", "_key", "_node", "_step")

    def __init__(self, node: str, *, epoch: int | None = None, step: int | None = None, key: SampleKey | None = None):
        self._node = node
        self._epoch = epoch
        self._step = step
        self._key = key

    def at(self, key: SampleKey | None) -> None:
        """The sample that is worked on from here, so that one context serves a loop."""
        self._key = key

    def __enter__(self) -> failing_at:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None or isinstance(error, DataPlaneError):
            return
        if isinstance(error, StopIteration):
            stopped = RuntimeError(f"{self._node}: the user's function raised StopIteration, which would end the epoch")
            self._note(stopped)
            raise stopped from error
        self._note(error)

    def _note(self, error: BaseException) -> None:
        note_location(error, self._node, epoch=self._epoch, step=self._step, key=self._key)
