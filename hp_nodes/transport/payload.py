"""Payload: the samples that change rank, one buffer a peer.

What goes to a peer is a parcel: the keys of some samples, then their frame, each starting on a multiple of 64 bytes.
The sizes are told first (Gloo would accept mismatched splits silently). An exchange that would be larger than a limit
goes in pieces, whose number follows from what was told, so that it is the same on every rank and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.transport.codec import Codec, CodecError, Frame
from hp_nodes.transport.codec_pause import collector_paused
from hp_nodes.transport.protocol import Bytes, Transport
from hp_nodes.types import SampleKey

__all__ = ["MAX_EXCHANGE_BYTES", "Parcel", "Payload", "UnsendableSampleError", "pack_parcels", "pieces_needed"]

MAX_EXCHANGE_BYTES = 1 << 30
_ALIGNMENT = 64
_KEY_BYTES = 24


class UnsendableSampleError(ValueError):
    """The sample ``key`` has to travel and cannot be encoded."""

    def __init__(self, message: str, key: SampleKey | None) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class Parcel:
    """Samples on their way to one peer."""

    keys: NDArray[np.int64]
    """int64[k, 3]: position, index, part of each sample."""
    samples: Sequence[Any]
    frame: Frame | None

    @property
    def frame_nbytes(self) -> int:
        return 0 if self.frame is None else self.frame.nbytes

    @property
    def nbytes(self) -> int:
        return _parcel_nbytes(len(self.keys), self.frame_nbytes)

    def write_into(self, buffer: Bytes) -> None:
        if self.frame is None:
            return
        start = _padded(self.keys.nbytes)
        buffer[: self.keys.nbytes] = self.keys.reshape(-1).view(np.uint8)
        self.frame.write_into(buffer[start : start + self.frame.nbytes])

    def cut(self, pieces: int, codec: Codec) -> Iterator[Parcel]:
        """The parcel as ``pieces`` smaller ones of about equal bytes; some may be empty."""
        sizes = np.zeros(0) if self.frame is None else self.frame.sizes
        ends = np.searchsorted(np.cumsum(sizes), sizes.sum() * np.arange(1, pieces + 1) / pieces, side="left") + 1
        begin = 0
        for end in np.minimum(ends, len(sizes)).tolist():
            some = self.samples[begin:end]
            yield Parcel(self.keys[begin:end], some, codec.frame(some) if some else None)
            begin = max(begin, end)


def pack_parcels(
    keys: NDArray[np.int64], samples: Sequence[Any], targets: NDArray[np.int32], me: int, size: int, codec: Codec
) -> list[Parcel]:
    """What leaves this rank, by peer; laid out, not yet written.

    Args:
        keys: int64[n, 3].
        samples: of the same length.
        targets: int32[n]: the place that each goes to.
        me, size: this rank's place and the number of places.

    Raises:
        UnsendableSampleError: a sample that has to travel cannot be encoded.
    """
    empty = Parcel(np.empty((0, 3), dtype=np.int64), (), None)
    parcels = [empty] * size
    going = np.flatnonzero(targets != me)
    order = going[np.argsort(targets[going], kind="stable")]
    peers, starts = np.unique(targets[order], return_index=True)
    for peer, chosen in zip(peers.tolist(), np.split(order, starts[1:]) if len(peers) else (), strict=True):
        some = [samples[number] for number in chosen.tolist()]
        try:
            parcels[peer] = Parcel(keys[chosen], some, codec.frame(some))
        except CodecError as error:
            key = None if error.sample is None else SampleKey(*keys[chosen[error.sample]].tolist())
            raise UnsendableSampleError(str(error), key) from error
    return parcels


def pieces_needed(largest: int, size: int, limit: int) -> int:
    """Pieces in which no rank sends or receives more than about ``limit`` bytes, if no parcel exceeds ``largest``."""
    return max(1, -(-largest * size // limit))


class Payload:
    """Carries parcels between the ranks of a transport."""

    def __init__(self, transport: Transport, codec: Codec, limit: int = MAX_EXCHANGE_BYTES) -> None:
        self._transport = transport
        self._codec = codec
        self._limit = limit

    def carry(
        self, parcels: list[Parcel], arrivals: list[int], frame_sizes: list[int], largest: int, node: str
    ) -> list[tuple[SampleKey, Any]]:
        """Exchange parcels.

        Args:
            parcels: by place.
            arrivals, frame_sizes: samples, and bytes of their frame, that come from each place.
            largest: bytes of the largest frame between any two ranks; the same on all.

        Returns:
            Keys and samples that arrived, by sender.
        """
        pieces = pieces_needed(largest, self._transport.size, self._limit)
        if pieces == 1:
            return self._opened(self._exchange(parcels, arrivals, frame_sizes, node), arrivals, frame_sizes)
        found: list[tuple[SampleKey, Any]] = []
        failure: Exception | None = None
        for some in zip(*(parcel.cut(pieces, self._codec) for parcel in parcels), strict=True):
            told = np.array([[len(parcel.keys), parcel.frame_nbytes] for parcel in some], dtype=np.int64)
            each = [16] * self._transport.size
            got = self._transport.all_to_all(told.reshape(-1).view(np.uint8), each, each, f"{node}: piece sizes")
            counts, sizes = got.view(np.int64).reshape(-1, 2).T.tolist()
            received = self._exchange(list(some), counts, sizes, node)
            try:
                found.extend(self._opened(received, counts, sizes))
            except Exception as error:  # the other ranks go on to the next piece, so this one must
                failure = failure or error
        if failure is not None:
            raise failure
        if len(found) != sum(arrivals):
            raise ValueError(f"{len(found)} samples arrived where {sum(arrivals)} were planned")
        return found

    def _exchange(self, parcels: list[Parcel], arrivals: list[int], frame_sizes: list[int], node: str) -> Bytes:
        outgoing = [parcel.nbytes for parcel in parcels]
        buffer = np.empty(sum(outgoing), dtype=np.uint8)
        end = 0
        for parcel, size in zip(parcels, outgoing, strict=True):
            parcel.write_into(buffer[end : end + size])
            end += size
        incoming = [_parcel_nbytes(*pair) for pair in zip(arrivals, frame_sizes, strict=True)]
        return self._transport.all_to_all(buffer, outgoing, incoming, f"{node}: payload")

    def _opened(self, received: Bytes, arrivals: list[int], frame_sizes: list[int]) -> list[tuple[SampleKey, Any]]:
        found: list[tuple[SampleKey, Any]] = []
        begin = 0
        with collector_paused():  # keys and pairs are as many objects as the samples
            for place, (count, frame_nbytes) in enumerate(zip(arrivals, frame_sizes, strict=True)):
                size = _parcel_nbytes(count, frame_nbytes)
                if count:
                    found.extend(self._read(received[begin : begin + size], count, frame_nbytes, place))
                begin += size
        return found

    def _read(self, parcel: Bytes, count: int, frame_nbytes: int, place: int) -> Iterator[tuple[SampleKey, Any]]:
        columns = parcel[: _KEY_BYTES * count].view(np.int64).reshape(-1, 3).T.tolist()
        start = _padded(_KEY_BYTES * count)
        samples = self._codec.decode(parcel[start : start + frame_nbytes])
        if len(samples) != count:
            raise ValueError(f"{len(samples)} samples arrived from data rank {place} where {count} were planned")
        # Half the time of SampleKey(*key), and there is one for each small sample.
        return zip(map(partial(tuple.__new__, SampleKey), zip(*columns, strict=True)), samples, strict=True)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _parcel_nbytes(samples: int, frame_nbytes: int) -> int:
    return _padded(_KEY_BYTES * samples) + _padded(frame_nbytes) if samples else 0
