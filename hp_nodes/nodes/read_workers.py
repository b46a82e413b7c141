"""Reader worker processes: one torch DataLoader that is fed chunks of keys, window after window.

Takes windows of keys, gives their samples in the order asked for. Workers stay busy across window ends: each window is
cut into as many chunks as there are workers, whatever its size, so torch takes exactly ``prefetch_factor`` windows (2
unless given) beyond the one that is waited for, whatever the number of workers. Who adds them decides when; nothing is
pulled from here. A chunk comes back as one buffer: torch would send each tensor through shared memory of its own (776
ms for 1,000 samples of 1 KiB; 4 ms as one buffer).
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hp_nodes.nodes.replacement import Replacement
from hp_nodes.randomness import occurrence, reseed_global_generators
from hp_nodes.transport.codec import Codec, CodecError
from hp_nodes.types import SampleKey

__all__ = ["ReadError", "ReadWorkers", "WindowRead", "WorkerDiedError", "read_batch"]


_END_S = 1.0


class WorkerDiedError(RuntimeError):
    """A reader worker process ended by itself or was killed."""


class ReadError(NamedTuple):
    """A read that failed in a worker: which key, and what was raised, as text."""

    key: SampleKey
    kind: str
    text: str
    traceback: str


class WindowRead(NamedTuple):
    """What came of one window: its samples up to a read that failed, and what was read in place of something else."""

    samples: list[Any]
    failure: ReadError | None
    replaced: dict[int, tuple[SampleKey, int]]
    """By row: the key that was read, and how many records could not be."""


class _Chunk(NamedTuple):
    epoch: int
    keys: list[SampleKey]


class _Replaced(NamedTuple):
    """A chunk in which some records stand in for others."""

    buffer: torch.Tensor
    rows: dict[int, tuple[SampleKey, int]]


class _ChunkReader(Dataset[Any]):
    """Runs in the workers: reads a chunk of keys, packs it into one buffer."""

    def __init__(self, dataset: Any, seed: int, batched: bool, replacement: Replacement | None) -> None:
        self.dataset = dataset
        self.seed = seed
        self.batched = batched
        self.replacement = replacement
        # What the codec does not know is pickled: it comes from a process of our own, by a pipe of our own.
        self.codec = Codec(allow_pickle=True)

    def __getitem__(self, chunk: _Chunk) -> Any:
        replaced: dict[int, tuple[SampleKey, int]] = {}
        records = self._batch(chunk, replaced) if self.batched else self._records(chunk, replaced)
        if isinstance(records, ReadError):
            return records
        try:
            buffer = torch.from_numpy(self.codec.frame(records).to_array())
        except CodecError as error:
            return self._unsendable(chunk, records, error)
        return _Replaced(buffer, replaced) if replaced else buffer

    def _records(self, chunk: _Chunk, replaced: dict[int, tuple[SampleKey, int]]) -> list[Any] | ReadError:
        records: list[Any] = []
        for row, key in enumerate(chunk.keys):
            try:
                if self.replacement is None:
                    records.append(self._record(chunk.epoch, key))
                    continue
                found, record, failed = self.replacement.read(chunk.epoch, key, partial(self._record, chunk.epoch))
                records.append(record)
                if failed:
                    replaced[row] = found, failed
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # SystemExit included: it would end the worker without a word.
                return _read_error(key, error)
        return records

    def _record(self, epoch: int, key: SampleKey) -> Any:
        if self.batched:
            return read_batch(self.dataset, [key])[0]
        with occurrence(self.seed, epoch, key.position) as rng:
            reseed_global_generators(rng.seed)
            return self.dataset[key.index]

    def _batch(self, chunk: _Chunk, replaced: dict[int, tuple[SampleKey, int]]) -> list[Any] | ReadError:
        try:
            return read_batch(self.dataset, chunk.keys)
        except KeyboardInterrupt:
            raise
        except Exception as error:
            # Which record it was only reading one by one can tell.
            return _read_error(chunk.keys[0], error) if self.replacement is None else self._records(chunk, replaced)
        except BaseException as error:
            return _read_error(chunk.keys[0], error)

    def _unsendable(self, chunk: _Chunk, records: list[Any], error: CodecError) -> ReadError:
        """Which record it is; put into torch's queue it would fail in a thread there, and nobody would hear of it."""
        for key, record in zip(chunk.keys, records, strict=True):
            try:
                self.codec.check(record)
            except CodecError as found:
                return _read_error(key, found)
        return _read_error(chunk.keys[0], error)


def read_batch(dataset: Any, keys: Sequence[SampleKey]) -> list[Any]:
    """The records of ``keys`` by one call of ``dataset.__getitems__``.

    Raises:
        ValueError: it gave another number of records.
    """
    if not keys:
        return []
    indices = [key.index for key in keys]
    try:
        records = list(dataset.__getitems__(indices))
    except Exception as error:
        # Which record it was only the dataset knows.
        with contextlib.suppress(Exception):
            error.args = (f"{error} (in a batched read of indices {indices[:8]}{' ...' * (len(indices) > 8)})",)
        raise
    if len(records) != len(keys):
        raise ValueError(
            f"__getitems__ of {type(dataset).__name__} gave {len(records)} records for {len(keys)} indices; accepted: "
            "one for each, in their order"
        )
    return records


def _read_error(key: SampleKey, error: BaseException) -> ReadError:
    return ReadError(key, type(error).__name__, str(error), traceback.format_exc())


class _Feed(Sampler[_Chunk]):
    """Gives the DataLoader its next chunk whenever it has room for one."""

    def __init__(self) -> None:
        self.chunks: deque[_Chunk] = deque()

    def __iter__(self) -> Iterator[_Chunk]:
        while self.chunks:
            yield self.chunks.popleft()


def _unchanged(value: Any) -> Any:
    return value


class ReadWorkers:
    """Workers that read the windows which :meth:`add` is given.

    Args:
        dataset: map-style; copied into each worker.
        num_workers: processes, at least 1.
        seed: of per-sample randomness.
        batched: read a chunk by one call of ``__getitems__``.
        replacement: chooses what stands in for a record that cannot be read; None: that is an error.
        options: further arguments of torch's DataLoader. ``in_order`` is of no account: samples are given in order.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int,
        seed: int,
        batched: bool,
        options: Mapping[str, Any],
        replacement: Replacement | None = None,
    ) -> None:
        self._num_workers = num_workers
        self._feed = _Feed()
        self._codec = Codec(allow_pickle=True)
        self._loader: DataLoader[Any] = DataLoader(
            _ChunkReader(dataset, seed, batched, replacement),
            sampler=self._feed,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_unchanged,
            generator=torch.Generator(),
            **{name: value for name, value in options.items() if name != "in_order"},
        )
        self._waiting = False
        self._running: list[Any] = []
        """torch's iterator while there is one. A finalizer holds it too: collected in a cycle together with its queues
        it could no longer tell its workers to end, and would wait 5 s for each."""
        weakref.finalize(self, self._running.clear).atexit = False

    @property
    def ahead(self) -> int:
        """Windows that are to be added beyond the one that is waited for, as long as there are any."""
        factor = self._loader.prefetch_factor
        assert factor is not None
        return factor

    def add(self, epoch: int, keys: Sequence[SampleKey]) -> None:
        """The window after those that were added: one chunk for each worker."""
        size = -(-len(keys) // self._num_workers)
        self._feed.chunks.extend(_Chunk(epoch, list(keys[k * size : (k + 1) * size])) for k in range(self._num_workers))

    def window(self) -> WindowRead:
        """What came of the window added first, which is forgotten.

        Raises:
            WorkerDiedError: a worker process is gone; found within torch's poll of 5 s.
            RuntimeError: a chunk took longer than the ``timeout`` among the options.
        """
        if not self._running:
            self._running.append(_off_the_main_thread(self._loader))
        running = self._running[0]
        read = WindowRead([], None, {})
        for _ in range(self._num_workers):
            chunk = self._next_result(running)
            if isinstance(chunk, ReadError):
                return read._replace(failure=chunk)
            if isinstance(chunk, _Replaced):
                read.replaced.update({len(read.samples) + row: found for row, found in chunk.rows.items()})
                chunk = chunk.buffer
            read.samples.extend(self._codec.decode(chunk))
        return read

    def _next_result(self, running: Iterator[Any]) -> Any:
        processes = _processes(running)
        self._waiting = True
        try:
            return next(running)
        except (RuntimeError, OSError, EOFError) as error:
            if not isinstance(error, RuntimeError):
                # Its shared memory is asked for over a connection to it, which broke a moment before it has ended.
                multiprocessing.connection.wait([process.sentinel for process in processes], _END_S)
            died = [
                f"worker {number} (pid {process.pid}) {_how_it_ended(process.exitcode)}"
                for number, process in enumerate(processes)
                if process.exitcode is not None
            ]
            if not died:
                raise
            raise WorkerDiedError(f"reader {', '.join(died)} while records were read") from error
        finally:
            self._waiting = False

    def stop(self) -> None:
        """Forget what is on its way. Workers end, or wait for the next window when they are persistent."""
        self._feed.chunks.clear()
        if not self._loader.persistent_workers:
            self._end()
        self._running.clear()

    def close(self) -> None:
        """End the workers. Those that another thread is waiting for are terminated, which that thread is told."""
        if sys.is_finalizing():
            return
        if self._waiting:
            for process in [process for running in self._running for process in _processes(running)]:
                process.terminate()
        else:
            self._end()
        self._running.clear()
        self._loader._iterator = None  # where torch keeps persistent workers

    def _end(self) -> None:
        # An iterator that is only let go of may live on in a traceback, and its workers with it.
        for running in [*self._running, self._loader._iterator]:
            shutdown = getattr(running, "_shutdown_workers", None)
            if shutdown is not None:
                shutdown()


def _off_the_main_thread(loader: DataLoader[Any]) -> Iterator[Any]:
    """torch's iterator, its workers started. Started on the main thread, one that dies would raise wherever that thread
    is: in the middle of an exchange, or in the trainer's own code.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    started: list[Iterator[Any]] = []
    failures: list[BaseException] = []

    def start() -> None:
        try:
            started.append(iter(loader))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=start, name="start of reader workers", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return started[0]


def _processes(running: Any) -> list[Any]:
    return list(getattr(running, "_workers", ()))


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")
