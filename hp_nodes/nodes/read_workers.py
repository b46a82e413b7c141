"""Reader worker processes: one torch DataLoader that is fed chunks of keys lazily, window after window.

Takes windows of keys from a callable, gives their samples in the order asked for. Workers stay busy across window ends:
each window is cut into as many chunks as there are workers, whatever its size, so how far the feed runs ahead depends
on the number of chunks taken alone. A chunk comes back as one buffer where its samples allow it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hp_nodes.randomness import occurrence, reseed_global_generators
from hp_nodes.transport.codec import Codec, CodecError
from hp_nodes.types import SampleKey

__all__ = ["ReadError", "ReadWorkers"]


class ReadError(NamedTuple):
    """A read that failed in a worker: which key, and what was raised, as text."""

    key: SampleKey
    kind: str
    text: str
    traceback: str


class _Chunk(NamedTuple):
    epoch: int
    keys: list[SampleKey]


class _ChunkReader(Dataset[Any]):
    """Runs in the workers: reads a chunk of keys, packs it into one buffer."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.codec = Codec()

    def __getitem__(self, chunk: _Chunk) -> Any:
        records: list[Any] = []
        for key in chunk.keys:
            try:
                with occurrence(self.seed, chunk.epoch, key.position) as rng:
                    reseed_global_generators(rng.seed)
                    records.append(self.dataset[key.index])
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # SystemExit included: it would end the worker without a word.
                return ReadError(key, type(error).__name__, str(error), traceback.format_exc())
        try:
            return torch.from_numpy(self.codec.frame(records).to_array())
        except CodecError:
            return records  # what the codec does not know travels as torch sends it


class _Feed(Sampler[_Chunk]):
    """Gives the DataLoader its next chunk whenever it has room for one."""

    def __init__(self, next_chunks: Callable[[], Sequence[_Chunk] | None]) -> None:
        self._next_chunks = next_chunks

    def __iter__(self) -> Iterator[_Chunk]:
        while (chunks := self._next_chunks()) is not None:
            yield from chunks


def _unchanged(value: Any) -> Any:
    return value


class ReadWorkers:
    """Workers that read the keys which ``next_keys`` gives.

    Args:
        dataset: map-style; copied into each worker.
        next_keys: ``() → (epoch, keys)`` of the next window, or None when there is none; called as workers have room.
        num_workers: processes, at least 1.
        seed: of per-sample randomness.
        options: further arguments of torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        next_keys: Callable[[], tuple[int, Sequence[SampleKey]] | None],
        num_workers: int,
        seed: int,
        options: Mapping[str, Any],
    ) -> None:
        self._next_keys = next_keys
        self._num_workers = num_workers
        self._codec = Codec()
        self._loader: DataLoader[Any] = DataLoader(
            _ChunkReader(dataset, seed),
            sampler=_Feed(self._next_chunks),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_unchanged,
            generator=torch.Generator(),
            **options,
        )
        self._running: Iterator[Any] | None = None

    def window(self) -> tuple[list[Any], ReadError | None] | None:
        """Samples of the next window, up to a read that failed; None when ``next_keys`` has no more.

        Raises:
            RuntimeError: a worker process died.
        """
        if self._running is None:
            self._running = iter(self._loader)
        samples: list[Any] = []
        for number in range(self._num_workers):
            chunk = next(self._running, None)
            if chunk is None:
                self._running = None
                assert number == 0
                return None
            if isinstance(chunk, ReadError):
                return samples, chunk
            samples.extend(self._codec.decode(chunk) if isinstance(chunk, torch.Tensor) else chunk)
        return samples, None

    def stop(self) -> None:
        """Forget what is on its way. Workers end, or wait for the next window when they are persistent."""
        self._running = None

    def close(self) -> None:
        """End the workers."""
        self._running = None
        iterator = getattr(self._loader, "_iterator", None)  # where torch keeps persistent workers
        if iterator is not None and not sys.is_finalizing():
            self._loader._iterator = None

    def _next_chunks(self) -> list[_Chunk] | None:
        following = self._next_keys()
        if following is None:
            return None
        epoch, keys = following
        size = -(-len(keys) // self._num_workers)
        return [_Chunk(epoch, list(keys[k * size : (k + 1) * size])) for k in range(self._num_workers)]
