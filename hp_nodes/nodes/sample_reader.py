"""Read: fetches the records of the keys that this rank owns now.

Takes windows with keys, gives them with samples. Before the Planner it reads what this rank's sampler chose; behind the
Planner it reads what the plan gave this rank, so that nothing has to be exchanged. Each occurrence is read once.
Without workers nothing is read ahead. With them ``prefetch_factor`` windows are taken from the source beyond the one
that is given next, however many workers there are, each paired with the state the source had after it, so a resume is
exact either way.

Behind a Planner to take a window is to exchange. So how many were taken follows from how many were given, and from
nothing else: when a window is given, or a failure to read it raised, ``prefetch_factor`` further ones have been taken.
All ranks must give the same ``prefetch_factor`` there, and all of them workers or none.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, failing_at
from hp_nodes.nodes.graph import all_nodes
from hp_nodes.nodes.read_workers import ReadError, ReadWorkers, WindowRead, read_batch
from hp_nodes.nodes.replacement import Replacement
from hp_nodes.nodes.run_ahead import in_background
from hp_nodes.nodes.stage import Stage
from hp_nodes.randomness import occurrence
from hp_nodes.types import SampleKey, Window

__all__ = ["SampleReader"]


class _Taken(NamedTuple):
    """A window that the workers read, or shall not read, and the state of the source after it."""

    window: Window
    after: dict[str, Any]
    failure: BaseException | None


class SampleReader(Stage[Window]):
    """Windows with the samples of their keys.

    Args:
        source: gives windows with ``keys``.
        dataset: map-style, ``dataset[index] → record``.
        num_workers: reader processes; 0 reads here.
        seed: of per-sample randomness, see :func:`hp_nodes.sample_rng`.
        worker_options: arguments of torch's DataLoader that change how workers read: ``prefetch_factor``,
            ``persistent_workers``, ``multiprocessing_context``, ``timeout``, ``worker_init_fn``, ``pin_memory``.
        batched_reads: read with ``dataset.__getitems__(indices)``, a window at a time here and a chunk in a worker. For
            datasets without randomness: there is no :func:`hp_nodes.sample_rng` in such a read.
        on_error: "raise", or "skip": a record that cannot be read is replaced by another one of the dataset, see
            :class:`hp_nodes.nodes.replacement.Replacement`. Where the plan was made before reading, its tokens and
            costs stay those of the record that was planned.
        max_skipped: with "skip": more records of an epoch that cannot be read, over all ranks, are an error. A
            HostPrefetcher above counts them.

    Raises:
        ValueError: the dataset has no ``__getitem__`` (or no ``__getitems__`` for batched reads, no ``__len__`` for
            "skip"), or an argument is out of range.
        IndexError: (on ``next``) an index outside the dataset, which it names.
        RuntimeError: (on ``next``) a worker process died, which it names, or took longer than ``timeout``.
    """

    def __init__(
        self,
        source: BaseNode[Window],
        dataset: Any,
        *,
        num_workers: int = 0,
        seed: int = 0,
        worker_options: Mapping[str, Any] | None = None,
        batched_reads: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        if not hasattr(dataset, "__getitem__"):
            raise ValueError(f"the dataset is a {type(dataset).__name__}; accepted: anything with __getitem__(index)")
        if batched_reads and not hasattr(dataset, "__getitems__"):
            raise ValueError(
                f"the dataset is a {type(dataset).__name__}; accepted for batched_reads: one with __getitems__(indices)"
            )
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
            raise ValueError(f"num_workers is {num_workers!r}; accepted: an int >= 0")
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {on_error!r}; accepted: 'raise' or 'skip'")
        if isinstance(max_skipped, bool) or not isinstance(max_skipped, int) or max_skipped < 0:
            raise ValueError(f"max_skipped is {max_skipped!r}; accepted: an int >= 0")
        if on_error == "skip" and not hasattr(dataset, "__len__"):
            raise ValueError(
                f"the dataset is a {type(dataset).__name__}; accepted with on_error='skip': one with __len__, from "
                "which a replacement can be drawn"
            )
        self.on_error = on_error
        self.max_skipped = max_skipped
        self.dataset = dataset
        self.num_workers = num_workers
        self.seed = seed
        self.batched_reads = batched_reads
        self._options = dict(worker_options or {})
        self._length = len(dataset) if hasattr(dataset, "__len__") else None
        self._replacement = Replacement(seed, len(dataset)) if on_error == "skip" else None
        self._workers: ReadWorkers | None = None
        self._taken: deque[_Taken] = deque()
        self._pulled = 0
        self._given = 0
        self._paired: dict[str, Any] | None = None
        self._end: BaseException | None = None
        self._untold = False
        """Whether the end is a failure below that only this rank knows of."""

    def restore_own(self, entry: Mapping[str, Any] | None) -> None:
        super().restore_own(entry)
        if self._workers is not None:
            self._workers.stop()
        self._taken.clear()
        self._pulled = self._given = 0
        self._end = None
        self._untold = False
        self._paired = super().source_state() if self.num_workers else None

    def source_state(self) -> dict[str, Any]:
        return dict(self._paired) if self._paired is not None else super().source_state()

    def buffered(self) -> int:
        """Windows that the workers read ahead."""
        return len(self._taken)

    def next(self) -> Window:
        if self.num_workers == 0:
            window = self.pull()
            return self._filled(window, self._read(window))
        return self._from_workers()

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _read(self, window: Window) -> WindowRead:
        keys = _keys_to_read(window)
        read = WindowRead([], None, {})
        with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
            for key in keys:
                place.at(key)
                self._check_index(key)
            if self.batched_reads:
                place.at(None)
                try:
                    read.samples.extend(read_batch(self.dataset, keys))
                    return read
                except Exception:
                    if self._replacement is None:
                        raise
            for row, key in enumerate(keys):
                place.at(key)
                if self._replacement is None:
                    read.samples.append(self._record(window.epoch, key))
                    continue
                found, record, failed = self._replacement.read(window.epoch, key, partial(self._record, window.epoch))
                read.samples.append(record)
                if failed:
                    read.replaced[row] = found, failed
        return read

    def _record(self, epoch: int, key: SampleKey) -> Any:
        if self.batched_reads:
            return read_batch(self.dataset, [key])[0]
        with occurrence(self.seed, epoch, key.position):
            return self.dataset[key.index]

    def _from_workers(self) -> Window:
        if self._workers is None:
            self._workers = ReadWorkers(
                self.dataset, self.num_workers, self.seed, self.batched_reads, self._options, self._replacement
            )
        workers = self._workers
        try:
            self._take_ahead(workers)
            if not self._taken:
                assert self._end is not None
                raise self._end
            taken = self._taken[0]
            read = self._awaited(workers, taken)
        except BaseException as error:
            # Whatever is still on its way belongs to windows that will not be given.
            self._end = error if not _interrupts(error) else RuntimeError(f"{self.name} was interrupted while it read")
            self._taken.clear()
            if isinstance(error, StopIteration):
                workers.stop()
            else:
                workers.close()
            raise
        self._taken.popleft()
        self._given += 1
        self._paired = taken.after
        return self._filled(taken.window, read)

    def _awaited(self, workers: ReadWorkers, taken: _Taken) -> WindowRead:
        window = taken.window
        with failing_at(self.name, epoch=window.epoch, step=window.step):
            read = workers.window()
        if taken.failure is not None:
            raise taken.failure
        if read.failure is not None:
            with failing_at(self.name, epoch=window.epoch, step=window.step, key=read.failure.key):
                raise _raised_again(read.failure)
        return read

    def _take_ahead(self, workers: ReadWorkers) -> None:
        """Take windows up to the place that follows from how many were given, and hand them to the workers."""
        while self._pulled < self._given + 1 + workers.ahead:
            self._pulled += 1
            if self._end is None:
                self._take(workers)
            elif self._untold:
                self._untold = False
                self._tell(self._end)

    def _take(self, workers: ReadWorkers) -> None:
        """One more window. An end, an error or an index that is none waits until everything before it was given."""
        try:
            window = self.pull()
            keys = _keys_to_read(window)
        except BaseException as error:
            if _interrupts(error):
                raise
            self._end = error
            self._untold = not isinstance(error, StopIteration) and not getattr(error, "agreed", False)
            return
        failure = self._misplaced(window, keys)
        workers.add(window.epoch, keys if failure is None else ())
        self._taken.append(_Taken(window, super().source_state(), failure))

    def _tell(self, error: BaseException) -> None:
        """Where others take one more window they exchange once more; from this rank they hear of its failure."""
        opens: Any = next((node for node in all_nodes(self) if hasattr(node, "announcement")), None)
        if opens is not None:
            rank = opens.transport.global_ranks[opens.transport.rank]
            opens.announcement = DataPlaneError.of(error, rank=rank, node=self.name)
            with contextlib.suppress(DataPlaneError, StopIteration):
                next(opens)
            opens.announcement = None

    def _misplaced(self, window: Window, keys: Sequence[SampleKey]) -> BaseException | None:
        try:
            with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
                for key in keys:
                    place.at(key)
                    self._check_index(key)
        except IndexError as error:
            return error
        return None

    def _check_index(self, key: SampleKey) -> None:
        if self._length is not None and not 0 <= key.index < self._length:
            raise IndexError(f"index {key.index} is outside the dataset of {self._length} records")

    def _filled(self, window: Window, read: WindowRead) -> Window:
        samples = tuple(read.samples)
        keys, skipped = _keys_to_read(window), 0
        if read.replaced:
            keys = tuple(read.replaced[row][0] if row in read.replaced else key for row, key in enumerate(keys))
            skipped = sum(failed for _, failed in read.replaced.values())
        if window.assignment is None:
            return self.give(replace(window, keys=keys, samples=samples, skipped=skipped))
        report = None if window.report is None else replace(window.report, skipped=skipped)
        return self.give(window.carried_out(keys, samples, report))


def _keys_to_read(window: Window) -> tuple[SampleKey, ...]:
    share = window.assignment
    if share is None:
        return window.keys
    assert share.indices is not None, "planned before they are read, samples are known by index"
    columns = share.positions.tolist(), share.indices.tolist(), share.parts.tolist()
    return tuple(SampleKey(*key) for key in zip(*columns, strict=True))


def _interrupts(error: BaseException) -> bool:
    """Control-C in the loop's own thread: no failure of a read."""
    return isinstance(error, KeyboardInterrupt) and not in_background()


def _raised_again(failure: ReadError) -> Exception:
    """What a worker raised, as the same type where that is a built-in one."""
    import builtins

    kind = getattr(builtins, failure.kind, None)
    message = f"{failure.text}\n--- in a reader worker ---\n{failure.traceback}"
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
        try:
            return kind(message)
        except TypeError:
            pass  # its constructor wants more than a text
    return RuntimeError(f"{failure.kind}: {message}")
