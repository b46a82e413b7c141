"""External steps: the user's source decides what is in a step; each of its items is one round of this rank.

Takes a source of local rounds, each exactly ``local_batch_size`` non-empty bins of raw samples; gives a Window for each
of them, with ``samples`` and ``reference``. Communicates: the opening of a window over all data ranks, so that a source
which ends early, brings another number of bins or fails is one error on every rank, which says which and how many. Only
the first window has an exchange for it; the others' openings travel with the closing exchange of the window before,
where a HostPrefetcher makes one. Keeps the cursor; reads a step ahead, each round paired with the state the source had
after it, so that a step is given only when it is whole: rounds at the end that fill no step are counted as dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, exchanging, failing_at
from hp_nodes.nodes.graph import node_names
from hp_nodes.nodes.run_ahead import in_background
from hp_nodes.nodes.stage import Stage
from hp_nodes.nodes.step_source import StepSource
from hp_nodes.nodes.window_sampler import WindowSampler
from hp_nodes.transport import SingleRankTransport, Transport
from hp_nodes.transport.opening import Status, check_statuses
from hp_nodes.types import SampleKey, Window

__all__ = ["ExternalStepReader"]


class _Round(NamedTuple):
    """A round as the source gave it, or the error that came instead, and the source's state after it."""

    bins: Sequence[Sequence[Any]]
    error: Exception | None
    state: dict[str, Any]


class ExternalStepReader(Stage[Window]):
    """Windows of one round each, from the user's source.

    Args:
        steps: on each rank an iterable of local rounds, iterated once an epoch, or a torchdata node. ``set_epoch`` is
            called where it has it. ``state_dict``/``load_state_dict`` make it resumable on as many data ranks.
        rounds_per_step: rounds of an optimizer step, at least 1.
        local_batch_size: bins of a round on one rank, at least 1.
        transport: of all data-parallel ranks; None: one rank.

    Raises:
        ValueError: a size is no int >= 1, or the source is neither an iterable nor a node.
        DataPlaneError: (on ``next``, on every rank) a round has another number of bins or an empty one, the source
            failed, or ranks yield different numbers of rounds.
    """

    EPOCH_KEY = WindowSampler.EPOCH_KEY
    CONSUMED_KEY = WindowSampler.CONSUMED_KEY
    FINISHED_KEY = WindowSampler.FINISHED_KEY
    OPENING_FIELDS = 6
    state_scope = "rank"
    takes_envelopes = False
    requires_entry = True
    communicates = True

    def __init__(
        self,
        steps: Iterable[Any] | BaseNode[Any],
        rounds_per_step: int = 1,
        *,
        local_batch_size: int,
        transport: Transport | None = None,
        name: str | None = None,
    ) -> None:
        for label, size in (("rounds_per_step", rounds_per_step), ("local_batch_size", local_batch_size)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{label} is {size!r}; accepted: an int >= 1")
        self.transport: Transport = transport if transport is not None else SingleRankTransport()
        self.steps = StepSource(steps, self.transport.size)
        super().__init__(self.steps, name=name)
        self.rounds_per_step = rounds_per_step
        self.local_batch_size = local_batch_size
        self.announcement: DataPlaneError | Status | None = None
        """Set from another thread: what the next opening brings in place of a window: "closed", or an error."""
        self._epoch = 0
        self._rounds = 0
        self._finished = False
        self._next_epoch_first = False
        self._ahead: deque[_Round] = deque()
        self._brought: tuple[Status, DataPlaneError | None] = (Status.WINDOW, None)
        self._told: NDArray[np.int64] | None = None
        self._paired: dict[str, Any] | None = None
        self._ended = False
        self._running = False
        self._started = False
        self._delivered = False

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        size = self._bins_of_a_round * self.rounds_per_step
        return {"global_batch_size": size, "rounds_per_step": self.rounds_per_step}

    @property
    def _bins_of_a_round(self) -> int:
        """Over all data ranks, as a sampler counts too."""
        return self.local_batch_size * self.transport.size

    # ---- state

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        self.announcement = self._told = None
        self._ahead.clear()
        self._ended = self._running = False
        if entry is not None:
            self._epoch = int(entry[self.EPOCH_KEY])
            self._rounds, rest = divmod(int(entry[self.CONSUMED_KEY]), self._bins_of_a_round)
            self._finished = bool(entry[self.FINISHED_KEY])
            if rest or self._rounds < 0:
                raise ValueError(
                    f"{self.name}: the state has consumed {entry[self.CONSUMED_KEY]} bins, no whole number of rounds "
                    f"of {self._bins_of_a_round}"
                )
            # Restored at its end, an epoch has nothing left, and what is asked for next is the next epoch.
            self._next_epoch_first = self._finished
        elif self._started and self._delivered:
            self._begin_next_epoch()
        self._started = True
        self._delivered = False
        self._paired = super().source_state()

    def own_state(self) -> dict[str, Any]:
        return {
            self.EPOCH_KEY: self._epoch,
            self.CONSUMED_KEY: self._rounds * self._bins_of_a_round,
            self.FINISHED_KEY: self._finished,
        }

    def source_state(self) -> dict[str, Any]:
        assert self._paired is not None
        return dict(self._paired)

    def buffered(self) -> int:
        """Rounds read ahead."""
        return len(self._ahead)

    def close(self, error: BaseException | None = None) -> None:
        """Let go of the source's running iteration."""
        self.steps.close()

    # ---- windows

    def next(self) -> Window:
        if self._next_epoch_first:
            self._begin_next_epoch()
        step, number = divmod(self._rounds, self.rounds_per_step)
        last = self._open()
        if last is None:
            raise StopIteration
        read = self._ahead.popleft()
        ends_step = number == self.rounds_per_step - 1
        self._rounds += 1
        self._delivered = True
        self._finished = ends_step and last
        self._paired = self._ended_state(read.state) if self._finished else read.state
        return self.give(self._window(read.bins, step, number, ends_step))

    def _begin_next_epoch(self) -> None:
        self._epoch, self._rounds, self._finished, self._next_epoch_first = self._epoch + 1, 0, False, False

    def next_opening(self) -> NDArray[np.int64]:
        """int64[6]: what this rank brings to its next window, for an exchange over all data ranks that is made anyway.

        Reads the rounds that are needed to tell. What every rank brought is handed back to :meth:`hear_opening`.
        """
        self._brought = self._bring()
        step, number = divmod(self._rounds, self.rounds_per_step)
        yielded = self._rounds + len(self._ahead)
        is_last = self._ended and not self._fails_ahead() and len(self._ahead) <= self.rounds_per_step
        return np.array([self._brought[0], self._epoch, step, number, yielded, is_last], dtype=np.int64)

    def hear_opening(self, told: NDArray[np.int64]) -> None:
        """int64[size, 6]: everybody's :meth:`next_opening`. The next window has no exchange of its own for it."""
        self._told = told

    def _open(self) -> bool | None:
        """Agree with the other ranks that each has this round; returns whether it is the last. None: all ended.

        Raises:
            DataPlaneError: not all have it.
        """
        told, self._told = self._told, None
        opened_before = told is not None
        located = exchanging(self.name, self._epoch, self._rounds // self.rounds_per_step)
        if told is None:
            record = self.next_opening().view(np.uint8)
            with located:
                told = self.transport.all_gather(record, f"{self.name}: opening").view(np.int64)
        mine, error = self._brought
        statuses = told[:, 0]
        if (statuses > Status.END).any():
            with located:
                check_statuses(self.transport, statuses, error, self.name)
        if (statuses == Status.END).any() and (statuses == Status.WINDOW).any():
            self._raise_uneven(told)
        self._check_places(told)
        if opened_before and self.announcement is not None:
            raise self._since_opened(self.announcement)
        if mine == Status.WINDOW:
            return bool(told[:, 5].all())
        if self._rounds == 0:
            self._raise_empty(told)
        return None

    def _since_opened(self, announced: DataPlaneError | Status) -> DataPlaneError:
        """What was announced when the ranks had agreed on this window, as an error for the next exchange to tell."""
        if isinstance(announced, DataPlaneError):
            return announced
        rank = self.transport.global_ranks[self.transport.rank]
        told = f"rank {rank} closed its loader because of an error of its own"
        return DataPlaneError(told, rank=rank, node=self.name)

    def _bring(self) -> tuple[Status, DataPlaneError | None]:
        announced = self.announcement
        if announced is not None:
            return (Status.ERROR, announced) if isinstance(announced, DataPlaneError) else (announced, None)
        error: BaseException | None = None
        try:
            self._read_ahead()
            error = self._ahead[0].error if self._ahead else None
        except BaseException as failure:
            if isinstance(failure, KeyboardInterrupt) and not in_background():
                raise  # Control-C in the loop's own thread is no failure of the source
            error = failure
        if error is not None:
            step = self._rounds // self.rounds_per_step
            rank = self.transport.global_ranks[self.transport.rank]
            failed = DataPlaneError.of(error, rank=rank, node=self.name, epoch=self._epoch, step=step)
            failed.__cause__ = error
            return Status.ERROR, failed
        begins_step = self._rounds % self.rounds_per_step == 0
        whole = len(self._ahead) >= (self.rounds_per_step if begins_step else 1)
        return (Status.WINDOW if whole or self._fails_ahead() else Status.END), None

    def _fails_ahead(self) -> bool:
        """Whether what ends the rounds ahead is an error: then this is no end of the epoch, whole steps or not."""
        return bool(self._ahead) and self._ahead[-1].error is not None

    def _read_ahead(self) -> None:
        if self._finished:
            return
        if not self._running:
            # A state from an epoch's beginning says nothing of the source but its epoch.
            with failing_at(self.name, epoch=self._epoch):
                self.steps.begin(self._epoch) if self._rounds == 0 else self.steps.resume()
            self._running = True
        while not self._ended and len(self._ahead) <= self.rounds_per_step:
            self._draw()

    def _draw(self) -> None:
        """One more round. An error takes its place in the order: what came before it is given first."""
        try:
            item = self.pull()
        except StopIteration:
            self._ended = True
            return
        except Exception as error:
            self._ended = True
            self._ahead.append(_Round((), error, {}))
            return
        number = self._rounds + len(self._ahead)
        try:
            with failing_at(self.name, epoch=self._epoch, step=number // self.rounds_per_step):
                self._ahead.append(_Round(self._checked(item), None, super().source_state()))
        except Exception as error:
            self._ended = True
            self._ahead.append(_Round((), error, {}))

    def _checked(self, item: Any) -> Sequence[Sequence[Any]]:
        size, rank = self.local_batch_size, self.transport.global_ranks[self.transport.rank]
        accepted = f"accepted: a sequence of exactly {size} bins, each a non-empty sequence of samples"
        if not _is_sequence(item):
            raise ValueError(f"the step source of rank {rank} yielded a {type(item).__name__}; {accepted}")
        if len(item) != size:
            raise ValueError(f"the step source of rank {rank} yielded {len(item)} bins, {size} are needed; {accepted}")
        for number, samples in enumerate(item):
            if not _is_sequence(samples):
                raise ValueError(
                    f"bin {number} of the step source of rank {rank} is a {type(samples).__name__}; {accepted}"
                )
            if len(samples) == 0:
                raise ValueError(f"bin {number} of the step source of rank {rank} is empty; {accepted}")
        return tuple(tuple(samples) for samples in item)

    def _window(self, bins: Sequence[Sequence[Any]], step: int, number: int, ends_step: bool) -> Window:
        size = self.local_batch_size
        first = ((step * self.rounds_per_step + number) * self.transport.size + self.transport.rank) * size
        sizes = [len(samples) for samples in bins]
        # Samples of the source have no dataset index: the bin's place in the epoch's global order stands for it too.
        keys = tuple(
            SampleKey(first + slot, first + slot, part) for slot, count in enumerate(sizes) for part in range(count)
        )
        return Window(
            epoch=self._epoch,
            step=step,
            first_round=number,
            num_rounds=1,
            ends_step=ends_step,
            ends_epoch=self._finished,
            keys=keys,
            samples=tuple(sample for samples in bins for sample in samples),
            reference=np.repeat(np.arange(size, dtype=np.int32), sizes),
            dropped=len(self._ahead) * size * self.transport.size if self._finished else 0,
        )

    def _ended_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        name = node_names(self.steps)[id(self.steps)]
        return {**state, name: StepSource.ended(state[name])}

    # ---- what ranks disagree about

    def _raise_uneven(self, told: NDArray[np.int64]) -> NoReturn:
        ranks = np.asarray(self.transport.global_ranks)
        ended = told[:, 0] == Status.END
        early = ", ".join(
            f"rank {rank} after {count} rounds" for rank, count in zip(ranks[ended], told[ended, 4], strict=True)
        )
        self._raise_agreed(
            f"the step source ended on {early}, while ranks {ranks[~ended].tolist()} have at least "
            f"{int(told[~ended, 4].min())}; all ranks must yield the same number of rounds",
            int(ranks[ended][0]),
        )

    def _check_places(self, told: NDArray[np.int64]) -> None:
        different = np.flatnonzero((told[:, 1:4] != told[0, 1:4]).any(axis=1))
        if len(different):
            ranks = self.transport.global_ranks
            here, there = (
                f"rank {ranks[place]} is at epoch {told[place, 1]}, step {told[place, 2]}, round {told[place, 3]}"
                for place in (0, int(different[0]))
            )
            self._raise_agreed(f"{here}; {there}", ranks[int(different[0])])

    def _raise_empty(self, told: NDArray[np.int64]) -> NoReturn:
        error = DataPlaneError(
            f"the step source yielded {int(told[:, 4].max())} rounds in epoch {self._epoch}, fewer than one step of "
            f"{self.rounds_per_step}; accepted: at least one step an epoch (an iterator can be gone through once only)",
            rank=None,
            node=self.name,
            epoch=self._epoch,
        )
        error.agreed = True
        raise error

    def _raise_agreed(self, message: str, rank: int) -> NoReturn:
        step = self._rounds // self.rounds_per_step
        error = DataPlaneError(message, rank=rank, node=self.name, epoch=self._epoch, step=step)
        error.agreed = True
        raise error


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
