"""One rank of a large job, alone in this process, with the answers that thousands of other ranks would give it.

Nothing of the library is imitated. What another rank would send is made by the library's own nodes: its windows by its
own sampler, reader, splitter and deriver, its opening by a Planner that is overheard, its parcels by the codec. The
plan is the one that rank 0 broadcast when its turn came, so rank 0 runs first. Answers are made once and then kept, so
that what is measured afterwards is this rank's own work: :class:`SimulatedTransport` notes the processor time at which
each exchange begins and ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes import (
    Collator,
    HostPrefetcher,
    MetadataDeriver,
    Packer,
    Planner,
    Router,
    SampleMetadata,
    SampleReader,
    Splitter,
    Window,
    WindowSampler,
)
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport.codec import Codec
from hp_nodes.transport.opening import HEAD_NBYTES, Room
from hp_nodes.transport.opening_rows import RowFormat, row_dtype
from hp_nodes.transport.payload import Parcel, pack_parcels
from hp_nodes.transport.protocol import Bytes, ConsumerClock, Transport
from tests.benchmarks.instances import problem

__all__ = ["Job", "SimulatedTransport", "documents"]

Place = tuple[int, int, int]
ROW = row_dtype(False, 0)


class Records:
    """Text records of real lengths: each is one bin of documents; every token says which record it is of."""

    def __init__(self, source: str, count: int) -> None:
        packed = problem(source, "wide", 0.98, count, 1)
        assert packed.reference is not None
        self.seq_len = packed.seq_len
        self.lengths = np.split(packed.tokens, np.flatnonzero(np.diff(packed.reference)) + 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "lengths": self.lengths[index]}

    def documents(self, index: int) -> list[NDArray[np.int32]]:
        return documents(self[index])


def documents(record: dict[str, Any]) -> list[NDArray[np.int32]]:
    """The sequences of a record."""
    return [np.full(length, record["index"], dtype=np.int32) for length in record["lengths"].tolist()]


def count_tokens(sample: NDArray[np.int32]) -> SampleMetadata:
    return SampleMetadata(len(sample))


class Given(BaseNode[Window]):
    """One window that is already there."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)

    def next(self) -> Window:
        return self._window

    def get_state(self) -> dict[str, Any]:
        return {}


class _OverheardError(Exception):
    """What was to be heard has been said."""


class Overhearing:
    """A group of one that keeps what a Planner says in its opening, and goes no further."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.global_ranks = (0,)
        self.timeout_s = 1.0
        self.clock = ConsumerClock()
        self.exchanges = 0
        self.head = np.empty(0, dtype=np.uint8)
        self.rows = np.empty(0, dtype=ROW)

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        if where.endswith("opening"):
            self.head = local[:HEAD_NBYTES].copy()
            return local[None].copy()  # there is no room for samples yet: it tells them next
        heads = self.head.view(np.int64)[None]
        told = Room.first(0).after(heads, ROW)[0]
        assert told is not None
        self.rows = told.unpack(local[None], heads[:, 6])
        raise _OverheardError


@dataclass(frozen=True)
class Voices:
    """What all ranks bring to one window: int64[ranks, 8] heads, the rows of each, and their windows, by rank."""

    heads: Bytes
    rows: list[NDArray[np.void]]
    windows: list[Window]

    @property
    def samples(self) -> int:
        return sum(len(window.keys) for window in self.windows)


@dataclass
class Job:
    """A job of ``ranks`` data-parallel ranks, each of them with ``rounds`` records a window, and ``windows`` windows.

    A record holds about 8 documents; a step is one window. Of the ranks two are watched: the first, which plans, and
    the one in the middle.
    """

    ranks: int
    rounds: int = 1
    windows: int = 3
    source: str = "azure"
    plans: dict[Place, Bytes] = field(default_factory=dict)
    """What rank 0 broadcast, by window."""
    _parcels: dict[Place, tuple[dict[int, list[Parcel]], list[int]]] = field(default_factory=dict)

    @property
    def watched(self) -> tuple[int, int]:
        return 0, self.ranks // 2

    @cached_property
    def records(self) -> Records:
        return Records(self.source, self.ranks * self.rounds * self.windows)

    def window_source(self, rank: int) -> BaseNode[Window]:
        """The nodes below the Planner of one rank."""
        step = self.ranks * self.rounds
        sampler = DistributedBatchSampler(len(self.records), 1, step, rank, self.ranks, order="shuffle", seed=7)
        node: BaseNode[Window] = WindowSampler(sampler, self.rounds)
        node = Splitter(SampleReader(node, self.records), documents)
        return MetadataDeriver(node, count_tokens, cost_model=CausalAttentionCostModel())

    def graph(self, rank: int, transport: Transport, *, depth: int = 0, **planning: Any) -> HostPrefetcher:
        """The whole graph of one rank. ``planning``: further arguments of the Planner."""
        length = self.records.seq_len
        planner = Planner(self.window_source(rank), transport, seq_len=length, local_batch_size=1, **planning)
        packer = Packer(Router(planner, transport), seq_len=length, local_batch_size=1)
        return HostPrefetcher(Collator(packer, local_batch_size=1), transport, depth)

    @cached_property
    def voices(self) -> dict[Place, Voices]:
        """By window, what every rank says in its opening."""
        told: dict[Place, Voices] = {}
        sources = [self.window_source(rank) for rank in range(self.ranks)]
        for source in sources:
            source.reset(None)
        for _ in range(self.windows):
            heads, rows, windows = [], [], []
            for source in sources:
                window = next(source)
                heard = self._overheard(window)
                heads.append(heard.head)
                rows.append(heard.rows)
                windows.append(replace(window, samples=None, metadata=None))
            place = (windows[0].epoch, windows[0].step, windows[0].first_round)
            told[place] = Voices(np.stack(heads), rows, windows)
        return told

    def _overheard(self, window: Window) -> Overhearing:
        transport = Overhearing()
        planner = Planner(Given(window), transport, seq_len=self.records.seq_len, local_batch_size=1)
        planner.reset(None)
        try:
            next(planner)
        except _OverheardError:
            return transport
        raise AssertionError("the Planner did not open the window")

    def bins(self, place: Place) -> NDArray[np.int32]:
        """int32[samples of all ranks]: the plan that rank 0 broadcast."""
        found: NDArray[np.int32] = self.plans[place][-4 * self.voices[place].samples :].view(np.int32)
        return found

    def parcels_to(self, rank: int, place: Place) -> tuple[list[Parcel], list[int]]:
        """What each rank sends to ``rank`` in one window, and the bytes of each sender's largest parcel."""
        if place not in self._parcels:
            self._parcels[place] = self._parcels_of(place)
        sent, largest = self._parcels[place]
        return sent[rank], largest

    def _parcels_of(self, place: Place) -> tuple[dict[int, list[Parcel]], list[int]]:
        """To each watched rank, from all; and the bytes of each sender's largest parcel."""
        owners, codec = self.bins(place) // self.rounds, Codec()
        sent: dict[int, list[Parcel]] = {rank: [] for rank in self.watched}
        largest, start = [], 0
        for sender, window in enumerate(self.voices[place].windows):
            targets = owners[start : start + len(window.keys)].astype(np.int32)
            start += len(window.keys)
            samples = [self.records.documents(key.index)[key.part] for key in window.keys]
            keys = np.array(window.keys, dtype=np.int64).reshape(-1, 3)
            going = pack_parcels(keys, samples, targets, sender, self.ranks, codec)
            largest.append(max(parcel.nbytes for parcel in going))
            for rank, parcels in sent.items():
                parcels.append(going[rank])
        return sent, largest


class SimulatedTransport:
    """The place of ``rank`` in a job whose other ranks are not there.

    ``times`` has an entry for each exchange: what it was for, and this process's processor time at its begin and end.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.rank, self.size = rank, job.ranks
        self.global_ranks = tuple(range(job.ranks))
        self.timeout_s = 60.0
        self.clock = ConsumerClock()
        self.exchanges = 0
        self.times: list[tuple[str, float, float]] = []
        self._job = job
        self._place: Place = (-1, -1, -1)
        self._kept: dict[tuple[Place, str, int, RowFormat], Bytes] = {}
        self._room = Room.first(0)
        """Of the opening that is next."""
        self._rows = self._room.rows
        """How rows are told in the exchange that is next."""

    def all_gather(self, local: Bytes, where: str) -> Bytes:
        began, what = time.process_time(), where.split(": ")[-1]
        if what == "opening":
            status, *place = local[:HEAD_NBYTES].view(np.int64)[:4].tolist()
            assert status & 0xFF == 0, "the simulated ranks have windows only"
            self._place = (place[0], place[1], place[2])
            if len(local) != self._room.nbytes:  # a graph from the beginning
                self._room = Room.first(0)
            self._rows = self._room.rows
        answer = self._answer(what, local)
        if what == "opening":
            second, self._room = self._room.after(self._job.voices[self._place].heads.view(np.int64), ROW)
            self._rows = second or self._rows
        answer[self.rank] = local
        return self._told(what, began, answer)

    def broadcast(self, buffer: Bytes, root: int, where: str) -> None:
        began = time.process_time()
        if self.rank == root:
            self._job.plans[self._place] = buffer.copy()
        else:
            buffer[:] = self._job.plans[self._place]
        self._told("plan", began, buffer)

    def all_to_all(self, send: Bytes, send_sizes: Sequence[int], receive_sizes: Sequence[int], where: str) -> Bytes:
        began, what = time.process_time(), where.split(": ")[-1]
        assert sum(send_sizes) == len(send)
        answer = self._answer(what, send)
        if what == "sizes":
            answer.reshape(self.size, -1)[self.rank] = send.reshape(self.size, -1)[self.rank]
        else:
            sizes = [parcel.nbytes for parcel in self._coming()[0]]
            assert sizes == list(receive_sizes), "what was agreed is not what the other ranks send"
        return self._told(what, began, answer)

    def mark(self, name: str) -> None:
        """Nobody waits for marks here."""

    def interrupt(self) -> None:
        """Nothing ever waits."""

    def close(self) -> None:
        """Nothing is held."""

    def forget_times(self) -> list[tuple[str, float, float]]:
        """The exchanges since the last call."""
        times, self.times = self.times, []
        return times

    def _told(self, what: str, began: float, answer: Bytes) -> Bytes:
        self.exchanges += 1
        self.times.append((what, began, time.process_time()))
        return answer

    def _answer(self, what: str, mine: Bytes) -> Bytes:
        """A copy, as a receive buffer would be, of what was worked out once."""
        key = (self._place, what, len(mine), self._rows)
        if key not in self._kept:
            self._kept[key] = getattr(self, f"_{what}")(mine)
        return self._kept[key].copy()

    def _opening(self, mine: Bytes) -> Bytes:
        voices = self._job.voices[self._place]
        answer = np.zeros((self.size, len(mine)), dtype=np.uint8)
        answer[:, :HEAD_NBYTES] = voices.heads
        return self._with_rows(answer, HEAD_NBYTES)

    def _numbers(self, mine: Bytes) -> Bytes:
        return self._with_rows(np.zeros((self.size, len(mine)), dtype=np.uint8), 0)

    def _with_rows(self, answer: Bytes, begin: int) -> Bytes:
        for told, rows in zip(answer, self._job.voices[self._place].rows, strict=True):
            if self._rows.holds(RowFormat.least(rows)) and begin + len(rows) * self._rows.row_nbytes <= len(told):
                packed = self._rows.pack(rows)
                told[begin : begin + len(packed)] = packed
        return answer

    def _closing(self, mine: Bytes) -> Bytes:
        return np.repeat(mine[None], self.size, axis=0)

    def _sizes(self, mine: Bytes) -> Bytes:
        parcels, largest = self._coming()
        records = mine.view(np.int64).reshape(self.size, -1).copy()
        records[:, 2] = [parcel.frame_nbytes for parcel in parcels]
        records[:, 3] = largest
        return records.view(np.uint8).reshape(-1)

    def _payload(self, mine: Bytes) -> Bytes:
        parcels = self._coming()[0]
        answer = np.zeros(sum(parcel.nbytes for parcel in parcels), dtype=np.uint8)
        end = 0
        for parcel in parcels:
            parcel.write_into(answer[end : end + parcel.nbytes])
            end += parcel.nbytes
        return answer

    def _coming(self) -> tuple[list[Parcel], list[int]]:
        return self._job.parcels_to(self.rank, self._place)
