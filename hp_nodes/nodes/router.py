"""A2A route: carries out the plan. Afterwards each rank holds the samples that the plan gave it, in packing order.

Takes windows with samples and an assignment, gives them with ``keys``, ``samples``, ``bins``, ``tokens`` and ``costs``
of the planned samples. Communicates: a digest of the plan, encoding status and sizes, unless the Planner right below
has told all that nothing moves; the payload, one buffer a peer, when the plan moves anything. Only samples that change
rank are encoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, exchanging, failing_at, some_of
from hp_nodes.nodes.planner import Planner
from hp_nodes.nodes.run_ahead import is_interruption
from hp_nodes.nodes.stage import Stage
from hp_nodes.transport import Transport
from hp_nodes.transport.agreement import own_failure
from hp_nodes.transport.codec import Codec
from hp_nodes.transport.opening import Status, check_statuses
from hp_nodes.transport.payload import MAX_EXCHANGE_BYTES, Arrivals, Parcel, Payload, UnsendableSampleError
from hp_nodes.types import Assignment, BalanceReport, SampleKey, Window

__all__ = ["Router"]


_RECORD = 4  # status, digest of the plan, bytes of the frame for you, bytes of my largest parcel


class Router(Stage[Window]):
    """Windows whose samples are where the plan wants them.

    Args:
        source: gives windows with ``samples`` and ``assignment``.
        transport: of the data-parallel group.
        allow_pickle: let samples travel that the codec does not know.
        max_exchange_bytes: a larger exchange goes in pieces.

    Raises:
        DataPlaneError: (on ``next``) a sample cannot be encoded, ranks have different plans, or something below failed.
    """

    communicates = True

    def __init__(
        self,
        source: BaseNode[Window],
        transport: Transport,
        *,
        allow_pickle: bool = False,
        max_exchange_bytes: int = MAX_EXCHANGE_BYTES,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        if isinstance(max_exchange_bytes, bool) or not isinstance(max_exchange_bytes, int) or max_exchange_bytes < 1:
            raise ValueError(f"max_exchange_bytes is {max_exchange_bytes!r}; accepted: an int >= 1")
        self.transport = transport
        self.codec = Codec(allow_pickle=allow_pickle)
        self.payload = Payload(transport, self.codec, max_exchange_bytes)
        self._checked = False
        self._planner = source if isinstance(source, Planner) and source.transport is transport else None
        """The one whose word counts; with a node in between, that may fail or look ahead, every window is told of."""
        self._first = True

    def next(self) -> Window:
        window: Window | None = None
        parcels: list[Parcel] = []
        error: DataPlaneError | None = None
        status = Status.WINDOW
        try:
            window = self.pull()
            parcels = self._parcels(window)
        except StopIteration:
            status = Status.END
        except BaseException as failure:
            if (isinstance(failure, DataPlaneError) and failure.agreed) or is_interruption(failure):
                raise
            status, error = Status.ERROR, own_failure(self.transport, failure, self.name, window)
        located = exchanging(self.name) if window is None else exchanging(self.name, window.epoch, window.step)
        if self._planner is not None and self._planner.stays and not self._first:
            if error is not None:
                raise error  # the closing tells the others, as of any node above
            frame_sizes, largest = [0] * self.transport.size, 0
        else:
            with located:
                frame_sizes, largest = self._agree(status, error, window, parcels)
        self._first = False
        if window is None:
            raise StopIteration
        assert window.assignment is not None and window.samples is not None
        share = window.assignment
        with located, failing_at(self.name, epoch=window.epoch, step=window.step):
            arrived = (
                self.payload.carry(parcels, self._arrivals(share), frame_sizes, largest, share.peers, self.name)
                if share.moves
                else None
            )
            keys, samples = _in_packing_order(window, share, self.transport.rank, arrived)
        report = self._reported(window, share, parcels, frame_sizes)
        return self.give(window.carried_out(keys, samples, report))

    def _parcels(self, window: Window) -> list[Parcel]:
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
            if not window.assignment.moves:
                return []
            try:
                return self.payload.pack(_as_array(window.keys), samples, targets)
            except UnsendableSampleError as error:
                place.at(error.key)
                raise

    def _agree(
        self,
        status: Status,
        error: DataPlaneError | None,
        window: Window | None,
        parcels: list[Parcel],
    ) -> tuple[list[int], int]:
        """Tell everybody this rank's status and plan, and each peer what it will get.

        Returns:
            Bytes of the frame that comes from each rank, and of the largest parcel between any two.
        """
        records = np.zeros((self.transport.size, _RECORD), dtype=np.int64)
        records[:, 0] = status
        if window is not None and window.plan is not None:
            digest = hashlib.blake2b(window.plan.bins.tobytes(), digest_size=8).digest()
            records[:, 1] = int.from_bytes(digest, "little", signed=True)
        records[:, 2] = [parcel.frame_nbytes for parcel in parcels] or 0
        records[:, 3] = max((parcel.nbytes for parcel in parcels), default=0)
        each = [8 * _RECORD] * self.transport.size
        told = self.transport.all_to_all(records.view(np.uint8).reshape(-1), each, each, f"{self.name}: sizes")
        told_records = told.view(np.int64).reshape(-1, _RECORD)
        check_statuses(self.transport, told_records[:, 0], error, self.name)
        different = np.flatnonzero(told_records[:, 1] != told_records[0, 1])
        if len(different):
            ranks = self.transport.global_ranks
            apart = DataPlaneError(
                f"ranks {some_of([ranks[place] for place in different])} have another plan than rank {ranks[0]}",
                rank=ranks[int(different[0])],
                node=self.name,
            )
            apart.agreed = True
            raise apart
        return told_records[:, 2].tolist(), int(told_records[:, 3].max())

    def _arrivals(self, share: Assignment) -> list[int]:
        """How many samples come from each rank."""
        counts = np.bincount(share.origins, minlength=self.transport.size)
        counts[self.transport.rank] = 0
        arrivals: list[int] = counts.tolist()
        return arrivals

    def _reported(
        self, window: Window, share: Assignment, parcels: list[Parcel], frame_sizes: list[int]
    ) -> BalanceReport | None:
        if window.report is None:
            return None
        return replace(
            window.report,
            samples_sent=sum(len(parcel.keys) for parcel in parcels),
            samples_received=int((share.origins != self.transport.rank).sum()),
            bytes_sent=sum(parcel.frame_nbytes for parcel in parcels),
            bytes_received=sum(frame_sizes),
        )


def _in_packing_order(
    window: Window, share: Assignment, me: int, arrived: Arrivals | None
) -> tuple[tuple[SampleKey, ...], tuple[Any, ...]]:
    """Kept and arrived samples as the plan wants them."""
    assert window.samples is not None
    stay = np.flatnonzero(share.targets == me).tolist()
    keys, samples = [window.keys[number] for number in stay], [window.samples[number] for number in stay]
    held = _as_array(keys)
    if arrived is not None:
        held = np.concatenate([held, arrived.keys])
        # Half the time of SampleKey(*key), and there is one for each small sample.
        keys += map(partial(tuple.__new__, SampleKey), zip(*arrived.keys.T.tolist(), strict=True))
        samples += arrived.samples
    theirs, ours = np.lexsort((share.parts, share.positions)), np.lexsort((held[:, 2], held[:, 0]))
    planned = np.stack([share.positions[theirs], share.parts[theirs]], axis=1)
    if not np.array_equal(planned, held[ours][:, ::2]):
        raise ValueError("the samples that are here after the exchange are not those that the plan gave this rank")
    places = np.empty(len(ours), dtype=np.int64)
    places[theirs] = ours
    order = places.tolist()
    return tuple([keys[place] for place in order]), tuple([samples[place] for place in order])


def _as_array(keys: Sequence[SampleKey]) -> NDArray[np.int64]:
    """int64[n, 3]."""
    return np.fromiter(chain.from_iterable(keys), np.int64, 3 * len(keys)).reshape(-1, 3)
