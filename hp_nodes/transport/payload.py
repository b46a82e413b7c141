"""Payload: the samples that change rank, one buffer a peer.

What goes to a peer is a parcel: the keys of some samples, then their frame, each starting on a multiple of 64 bytes.
The sizes are told first (Gloo would accept mismatched splits silently). An exchange that would be larger than a limit
goes in pieces, whose number follows from what was told, so that it is the same on every rank and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.transport.codec import Codec, CodecError, Frame
from hp_nodes.transport.protocol import Bytes, Transport
from hp_nodes.transport.send_buffer import SendBuffer
from hp_nodes.types import SampleKey

__all__ = ["MAX_EXCHANGE_BYTES", "Arrivals", "Parcel", "Payload", "UnsendableSampleError", "pack_parcels"]

MAX_EXCHANGE_BYTES = 1 << 30
_ALIGNMENT = 64
_KEY_BYTES = 24
_OBJECT_BYTES = 4096  # of a sample: below that Python's objects around it count


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
    sizes: NDArray[np.int64]
    """int64[k]: bytes of payload of each sample."""
    frame_nbytes: int
    frame: Frame | None = None
    """Not yet written; None where it was encoded into a buffer at once."""

    @property
    def nbytes(self) -> int:
        return _parcel_nbytes(len(self.keys), self.frame_nbytes)

    def write_into(self, buffer: Bytes) -> None:
        if self.frame is not None:
            start = _padded(self.keys.nbytes)
            _write_keys(self.keys, buffer[:start])
            self.frame.write_into(buffer[start : start + self.frame.nbytes])

    def cut(self, pieces: int) -> Iterator[tuple[NDArray[np.int64], Sequence[Any]]]:
        """Keys and samples in ``pieces`` portions of about equal bytes; some may be empty."""
        shares = self.sizes.sum() * np.arange(1, pieces + 1) / pieces
        ends = np.searchsorted(np.cumsum(self.sizes), shares, side="left") + 1
        begin = 0
        for end in np.minimum(ends, len(self.sizes)).tolist():
            yield self.keys[begin:end], self.samples[begin:end]
            begin = max(begin, end)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Samples that came from other ranks, by sender."""

    keys: NDArray[np.int64]
    """int64[m, 3]: position, index, part of each sample."""
    samples: list[Any]


def pack_parcels(
    keys: NDArray[np.int64],
    samples: Sequence[Any],
    targets: NDArray[np.int32],
    me: int,
    size: int,
    codec: Codec,
    outbox: SendBuffer | None = None,
) -> list[Parcel]:
    """What leaves this rank, by peer.

    Args:
        keys: int64[n, 3].
        samples: of the same length.
        targets: int32[n]: the place that each goes to.
        me, size: this rank's place and the number of places.
        outbox: where parcels are written, one behind the other; None: they are laid out only.

    Raises:
        UnsendableSampleError: a sample that has to travel cannot be encoded.
    """
    parcels = [_EMPTY] * size
    going = np.flatnonzero(targets != me)
    order = going[np.argsort(targets[going], kind="stable")]
    peers, starts = np.unique(targets[order], return_index=True)
    for peer, chosen in zip(peers.tolist(), np.split(order, starts[1:]) if len(peers) else (), strict=True):
        # A third of the time of a comprehension; of one number itemgetter gives the sample itself.
        some = list(itemgetter(*chosen.tolist())(samples)) if len(chosen) > 1 else [samples[int(chosen[0])]]
        try:
            parcels[peer] = _packed(keys[chosen], some, codec, outbox)
        except CodecError as error:
            key = None if error.sample is None else SampleKey(*keys[chosen[error.sample]].tolist())
            raise UnsendableSampleError(str(error), key) from error
    return parcels


def _packed(keys: NDArray[np.int64], samples: Sequence[Any], codec: Codec, outbox: SendBuffer | None) -> Parcel:
    if not samples:
        return _EMPTY
    if outbox is None:
        frame = codec.frame(samples)
        return Parcel(keys, samples, frame.sizes, frame.nbytes, frame)
    begin = outbox.used
    if outbox.add(_padded(keys.nbytes)):
        _write_keys(keys, outbox.view(begin))
    nbytes, sizes = codec.encode(samples, outbox)
    return Parcel(keys, samples, sizes, nbytes)


def _write_keys(keys: NDArray[np.int64], place: Bytes) -> None:
    place[: keys.nbytes] = keys.reshape(-1).view(np.uint8)
    place[keys.nbytes :] = 0


def pieces_needed(largest: int, peers: int, limit: int) -> int:
    """Pieces in which no rank sends or receives more than about ``limit`` bytes, if no parcel exceeds ``largest`` and
    no rank has more than ``peers`` to send to, or to receive from.
    """
    return max(1, -(-largest * peers // limit))


class Payload:
    """Carries parcels between the ranks of a transport. Keeps one send buffer, used again for each exchange."""

    def __init__(self, transport: Transport, codec: Codec, limit: int = MAX_EXCHANGE_BYTES) -> None:
        self._transport = transport
        self._codec = codec
        self._limit = limit
        self._outbox = SendBuffer()

    def pack(self, keys: NDArray[np.int64], samples: Sequence[Any], targets: NDArray[np.int32]) -> list[Parcel]:
        """What leaves this rank, by peer, encoded; for :meth:`carry`. See :func:`pack_parcels`.

        Raises:
            UnsendableSampleError: a sample that has to travel cannot be encoded.
        """
        self._outbox.clear(self._limit)  # more than that goes in pieces, each encoded when it is its turn
        place, size = self._transport.rank, self._transport.size
        return pack_parcels(keys, samples, targets, place, size, self._codec, self._outbox)

    def carry(
        self, parcels: list[Parcel], arrivals: list[int], frame_sizes: list[int], largest: int, peers: int, node: str
    ) -> Arrivals:
        """Exchange the parcels that :meth:`pack` returned last.

        Args:
            parcels: by place.
            arrivals, frame_sizes: samples, and bytes of their frame, that come from each place.
            largest: bytes of the largest parcel between any two ranks; the same on all.
            peers: no rank sends to more ranks, nor receives from more; the same on all.

        Returns:
            Keys and samples that arrived, by sender.
        """
        pieces = pieces_needed(largest, peers, self._limit)
        if pieces == 1:
            return self._opened(self._exchange(parcels, arrivals, frame_sizes, node), arrivals, frame_sizes)
        found: list[Arrivals] = []
        failure: Exception | None = None
        for portions in zip(*(parcel.cut(pieces) for parcel in parcels), strict=True):
            self._outbox.clear()
            some = [_packed(keys, samples, self._codec, self._outbox) for keys, samples in portions]
            told = np.array([[len(parcel.keys), parcel.frame_nbytes] for parcel in some], dtype=np.int64)
            each = [16] * self._transport.size
            got = self._transport.all_to_all(told.reshape(-1).view(np.uint8), each, each, f"{node}: piece sizes")
            counts, sizes = got.view(np.int64).reshape(-1, 2).T.tolist()
            received = self._exchange(some, counts, sizes, node)
            try:
                found.append(self._opened(received, counts, sizes))
            except Exception as error:  # the other ranks go on to the next piece, so this one must
                failure = failure or error
        if failure is not None:
            raise failure
        whole = Arrivals(
            np.concatenate([part.keys for part in found]), [sample for part in found for sample in part.samples]
        )
        if len(whole.samples) != sum(arrivals):
            raise ValueError(f"{len(whole.samples)} samples arrived where {sum(arrivals)} were planned")
        return whole

    def _exchange(self, parcels: list[Parcel], arrivals: list[int], frame_sizes: list[int], node: str) -> Bytes:
        outgoing = [parcel.nbytes for parcel in parcels]
        assert sum(outgoing) == self._outbox.used and not self._outbox.overflowed
        incoming = [_parcel_nbytes(*pair) for pair in zip(arrivals, frame_sizes, strict=True)]
        received = self._transport.all_to_all(self._outbox.view(), outgoing, incoming, f"{node}: payload")
        if len(received) < _OBJECT_BYTES * sum(arrivals):
            self._outbox.drop()  # or it would be there beside the objects that are made now, which take as much
        return received

    def _opened(self, received: Bytes, arrivals: list[int], frame_sizes: list[int]) -> Arrivals:
        keys = [np.empty((0, 3), dtype=np.int64)]
        samples: list[Any] = []
        begin = 0
        for place, (count, frame_nbytes) in enumerate(zip(arrivals, frame_sizes, strict=True)):
            size = _parcel_nbytes(count, frame_nbytes)
            if count:
                parcel, start = received[begin : begin + size], _padded(_KEY_BYTES * count)
                keys.append(parcel[: _KEY_BYTES * count].view(np.int64).reshape(-1, 3).copy())
                some = self._codec.decode(parcel[start : start + frame_nbytes])
                if len(some) != count:
                    raise ValueError(f"{len(some)} samples arrived from data rank {place} where {count} were planned")
                samples += some
            begin += size
        return Arrivals(np.concatenate(keys), samples)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _parcel_nbytes(samples: int, frame_nbytes: int) -> int:
    return _padded(_KEY_BYTES * samples) + _padded(frame_nbytes) if samples else 0


_EMPTY = Parcel(np.empty((0, 3), dtype=np.int64), (), np.empty(0, dtype=np.int64), 0)
