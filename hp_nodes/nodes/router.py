"""A2A route: carries out the plan. Afterwards each rank holds the samples that the plan gave it, in packing order.

Takes windows with samples and an assignment, gives them with ``keys``, ``samples``, ``bins``, ``tokens`` and ``costs``
of the planned samples. Communicates: a digest of the plan, encoding status and sizes, always; the payload, one buffer a
peer, when the plan moves anything. Only samples that change rank are encoded.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, exchanging, failing_at
from hp_nodes.nodes.stage import Stage
from hp_nodes.transport import Transport
from hp_nodes.transport.codec import Codec, Frame
from hp_nodes.transport.opening import Status, check_statuses
from hp_nodes.types import Assignment, BalanceReport, SampleKey, Window

__all__ = ["Router"]


_ALIGNMENT = 64
_RECORD = 3  # status, digest of the plan, bytes of the frame


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What goes to one peer: the keys of some samples, then their frame; each starts on a multiple of 64 bytes."""

    keys: NDArray[np.int64]
    frame: Frame | None

    @property
    def frame_nbytes(self) -> int:
        return 0 if self.frame is None else self.frame.nbytes

    @property
    def nbytes(self) -> int:
        return _parcel_nbytes(len(self.keys), self.frame_nbytes)

    def write_into(self, buffer: NDArray[np.uint8]) -> None:
        if self.frame is None:
            return
        start = _padded(self.keys.nbytes)
        buffer[: self.keys.nbytes] = self.keys.view(np.uint8).reshape(-1)
        self.frame.write_into(buffer[start : start + self.frame.nbytes])


def _parcel_nbytes(samples: int, frame_nbytes: int) -> int:
    return _padded(24 * samples) + _padded(frame_nbytes) if samples else 0


class Router(Stage[Window]):
    """Windows whose samples are where the plan wants them.

    Args:
        source: gives windows with ``samples`` and ``assignment``.
        transport: of the data-parallel group.
        allow_pickle: let samples travel that the codec does not know.

    Raises:
        DataPlaneError: (on ``next``) a sample cannot be encoded, ranks have different plans, or something below failed.
    """

    communicates = True

    def __init__(
        self, source: BaseNode[Window], transport: Transport, *, allow_pickle: bool = False, name: str | None = None
    ) -> None:
        super().__init__(source, name=name)
        self.transport = transport
        self.codec = Codec(allow_pickle=allow_pickle)
        self._checked = False

    def next(self) -> Window:
        window: Window | None = None
        parcels: list[_Parcel] = []
        error: DataPlaneError | None = None
        status = Status.WINDOW
        try:
            window = self.pull()
            parcels = self._parcels(window)
        except StopIteration:
            status = Status.END
        except BaseException as failure:
            if isinstance(failure, DataPlaneError) and failure.agreed:
                raise
            status, error = Status.ERROR, self._failure(failure, window)
        located = exchanging(self.name) if window is None else exchanging(self.name, window.epoch, window.step)
        with located:
            frame_sizes = self._agree(status, error, window, parcels)
        if window is None:
            raise StopIteration
        assert window.assignment is not None and window.samples is not None
        share = window.assignment
        with located:
            received = self._exchange(parcels, share, frame_sizes) if share.moves else []
        with failing_at(self.name, epoch=window.epoch, step=window.step):
            keys, samples = self._assembled(window, share, received, frame_sizes)
        return self.give(
            replace(
                window,
                keys=keys,
                samples=samples,
                bins=share.bins,
                tokens=share.tokens,
                costs=share.costs,
                metadata=None,
                reference=None,
                report=self._reported(window, share, parcels, frame_sizes),
            )
        )

    def _failure(self, error: BaseException, window: Window | None) -> DataPlaneError:
        rank = self.transport.global_ranks[self.transport.rank]
        place = {} if window is None else {"epoch": window.epoch, "step": window.step}
        failed = DataPlaneError.of(error, rank=rank, node=self.name, **place)
        failed.__cause__ = error
        return failed

    def _parcels(self, window: Window) -> list[_Parcel]:
        """Encode what leaves this rank; check one sample of the first window, so that what cannot travel is found."""
        with failing_at(self.name, epoch=window.epoch, step=window.step) as place:
            if window.assignment is None or window.samples is None:
                raise ValueError(
                    "the window has no plan or no samples; a SampleReader and a Planner below the Router fill them"
                )
            targets, samples = window.assignment.targets, window.samples
            if len(samples) != len(targets):
                raise ValueError(f"the window has {len(samples)} samples, but {len(targets)} were planned")
            if not self._checked and samples:
                place.at(window.keys[0])
                self.codec.check(samples[0])
                self._checked = True
                place.at(None)
            keys = np.array(window.keys, dtype=np.int64).reshape(-1, 3)
            parcels = []
            for peer in range(self.transport.size):
                going = np.flatnonzero(targets == peer) if peer != self.transport.rank else np.empty(0, np.intp)
                frame = self.codec.frame([samples[number] for number in going.tolist()]) if len(going) else None
                parcels.append(_Parcel(keys[going], frame))
        return parcels

    def _agree(
        self,
        status: Status,
        error: DataPlaneError | None,
        window: Window | None,
        parcels: list[_Parcel],
    ) -> NDArray[np.int64]:
        """Tell everybody this rank's status and plan, and each peer what it will get; returns each frame's bytes."""
        records = np.zeros((self.transport.size, _RECORD), dtype=np.int64)
        records[:, 0] = status
        if window is not None and window.plan is not None:
            digest = hashlib.blake2b(window.plan.bins.tobytes(), digest_size=8).digest()
            records[:, 1] = int.from_bytes(digest, "little", signed=True)
        records[:, 2] = [parcel.frame_nbytes for parcel in parcels] or 0
        each = [8 * _RECORD] * self.transport.size
        told = self.transport.all_to_all(records.view(np.uint8).reshape(-1), each, each, f"{self.name}: sizes")
        told_records = told.view(np.int64).reshape(-1, _RECORD)
        check_statuses(self.transport, told_records[:, 0], error, self.name)
        different = np.flatnonzero(told_records[:, 1] != told_records[0, 1])
        if len(different):
            ranks = self.transport.global_ranks
            apart = DataPlaneError(
                f"ranks {[ranks[place] for place in different]} have another plan than rank {ranks[0]}",
                rank=ranks[int(different[0])],
                node=self.name,
            )
            apart.agreed = True
            raise apart
        return told_records[:, 2]

    def _exchange(
        self, parcels: list[_Parcel], share: Assignment, frame_sizes: NDArray[np.int64]
    ) -> list[NDArray[np.uint8]]:
        outgoing = [parcel.nbytes for parcel in parcels]
        buffer = np.zeros(sum(outgoing), dtype=np.uint8)
        end = 0
        for parcel, size in zip(parcels, outgoing, strict=True):
            parcel.write_into(buffer[end : end + size])
            end += size
        incoming = [_parcel_nbytes(*pair) for pair in zip(self._arrivals(share), frame_sizes.tolist(), strict=True)]
        received = self.transport.all_to_all(buffer, outgoing, incoming, f"{self.name}: payload")
        return np.split(received, np.cumsum(incoming)[:-1])

    def _arrivals(self, share: Assignment) -> list[int]:
        """How many samples come from each rank."""
        counts = np.bincount(share.origins, minlength=self.transport.size)
        counts[self.transport.rank] = 0
        return [int(count) for count in counts]

    def _assembled(
        self, window: Window, share: Assignment, received: list[NDArray[np.uint8]], frame_sizes: NDArray[np.int64]
    ) -> tuple[tuple[SampleKey, ...], tuple[Any, ...]]:
        """Kept and arrived samples in packing order."""
        assert window.samples is not None
        by_place = {
            (key.position, key.part): (key, sample) for key, sample in zip(window.keys, window.samples, strict=True)
        }
        for place, count in enumerate(self._arrivals(share)):
            if count:
                piece = received[place]
                keys = piece[: 24 * count].view(np.int64).reshape(-1, 3).tolist()
                start = _padded(24 * count)
                samples = self.codec.decode(piece[start : start + int(frame_sizes[place])])
                if len(samples) != count:
                    raise ValueError(
                        f"{len(samples)} samples arrived from data rank {place} where {count} were planned"
                    )
                by_place.update(
                    {(key[0], key[2]): (SampleKey(*key), sample) for key, sample in zip(keys, samples, strict=True)}
                )
        planned = [by_place[place] for place in zip(share.positions.tolist(), share.parts.tolist(), strict=True)]
        return tuple(key for key, _ in planned), tuple(sample for _, sample in planned)

    def _reported(
        self, window: Window, share: Assignment, parcels: list[_Parcel], frame_sizes: NDArray[np.int64]
    ) -> BalanceReport | None:
        if window.report is None:
            return None
        return replace(
            window.report,
            samples_sent=sum(len(parcel.keys) for parcel in parcels),
            samples_received=sum(self._arrivals(share)),
            bytes_sent=sum(parcel.frame_nbytes for parcel in parcels),
            bytes_received=int(frame_sizes.sum()),
        )
