"""What one rank of a large job has to do for each window: processor time and memory from 8 to 4096 ranks.

    python -m tests.benchmarks.scale [--quick]

The other ranks are simulated, see :mod:`tests.benchmarks.scale_job`: what they send is made by the library itself
beforehand, and only what this rank does with it is counted. Every rank has one record of about 8 documents a window.
Figures are processor time, so that other work on the machine does not count; what travelling takes is not in them.

The measured rank is one that does not plan (all but one of them). Planning is what rank 0 takes more than it. Growth is
the slope of the logarithm of a figure over the logarithm of the number of ranks, fitted over all of them in each
repeat: 1 is in proportion to the ranks. A rank looks at 24 bytes of each sample of all ranks, so 1 is the least that is
possible for large numbers, and below it the part that does not depend on the others still counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Mapping, Sequence

import numpy as np

from hp_nodes.transport.opening import check_statuses
from tests.benchmarks.record import Row, run_alone
from tests.benchmarks.scale_job import Job, SimulatedTransport

__all__ = ["measure"]

COMMAND = "python -m tests.benchmarks.scale"
STAGES = {
    "opening": "gather: decode what all ranks sent, check it, wait for the plan",
    "plan": "the plan's meaning for this rank, its digest, encoding what leaves",
    "sizes": "route: what comes from whom",
    "payload": "open what came, pack, collate",
    "closing": "agreement on the window: status and digest of all",
}
"""What a rank does between one exchange and the next, by the exchange before it."""
WHOLE = "gather and route of a window, planning apart"
STATUS = "agreement on status alone"
REACH_RANKS = 4096
Figures = dict[str, float]


class Watched:
    """One rank of a job, run through the same windows again and again."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.transport = SimulatedTransport(job, rank)
        self.graph = job.graph(rank, self.transport)
        self.graph.reset(None)
        self._start = self.graph.get_state()
        self.run()  # makes the answers, and what a first window alone does

    def run(self) -> list[Figures]:
        """Milliseconds of each stage, of each window."""
        self.graph.reset(self._start)
        self.transport.forget_times()
        windows = []
        for _ in range(self.job.windows):
            for _ in range(self.job.rounds):
                next(self.graph)
            windows.append(self._stages(time.process_time()))
        return windows

    def memory(self) -> float:
        """KiB at the highest while a window is built, above what was there before: received buffers included."""
        self.graph.reset(self._start)
        tracemalloc.start()
        try:
            highest = 0
            for _ in range(self.job.windows * self.job.rounds):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                next(self.graph)
                highest = max(highest, tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
        return highest / 1024

    def _stages(self, end: float) -> Figures:
        times = self.transport.forget_times()
        begins = [began for _, began, _ in times[1:]] + [end]
        figures = dict.fromkeys(STAGES, 0.0)
        for (what, _, ended), until in zip(times, begins, strict=True):
            figures["opening" if what == "numbers" else what] += 1e3 * (until - ended)
        return figures | {"whole": sum(figures.values())}


def medians(windows: Sequence[Mapping[str, float]]) -> Figures:
    return {name: statistics.median(window[name] for window in windows) for name in windows[0]}


def status_alone(job: Job) -> float:
    """Milliseconds of looking at every rank's status once."""
    transport, statuses, times = SimulatedTransport(job, 0), np.zeros(job.ranks, dtype=np.int64), 20
    began = time.process_time()
    for _ in range(times):
        check_statuses(transport, statuses, None, "benchmark")
    return 1e3 * (time.process_time() - began) / times


def growth(what: str, figures: Mapping[int, Sequence[float]], command: str) -> Row:
    """The slope of log figure over log ranks: between the two largest, next to the one fitted over all."""

    def slopes(ranks: list[int]) -> list[float]:
        repeats = np.log(np.maximum(np.array([figures[size] for size in ranks]), 1e-9)).T
        return [float(np.polyfit(np.log(ranks), repeat, 1)[0]) for repeat in repeats]

    sizes = list(figures)
    last, overall = slopes(sizes[-2:]), statistics.median(slopes(sizes))
    return Row(
        f"{what}: power of the ranks with which it grows, {sizes[-2]} to {sizes[-1]} ranks",
        statistics.median(last),
        "",
        baseline=f"fitted from {sizes[0]} ranks on",
        baseline_value=overall,
        spread=(min(last), max(last)) if len(last) > 1 else None,
        command=command,
    )


def rows_of(
    what: str, unit: str, figures: Mapping[int, Sequence[float]], command: str, wanted: str | None = None
) -> list[Row]:
    """A row for each number of ranks, next to the smallest, and one for the growth. ``wanted``: of 4096 ranks."""
    fewest, rows = next(iter(figures)), []
    for size, values in figures.items():
        name, limit = f"{what}: {size} ranks", wanted if size == REACH_RANKS else None
        if size == fewest:
            rows.append(Row.of(name, unit, values, command=command))
            continue
        beside = {"baseline": f"{fewest} ranks", "baseline_values": figures[fewest]}
        rows.append(Row.of(name, unit, values, **beside, wanted=limit, command=command))
    return [*rows, growth(what, figures, command)]


def over_ranks(sizes: Sequence[int], repeats: int, command: str) -> list[Row]:
    jobs = [Job(size) for size in sizes]
    planning = {job.ranks: Watched(job, 0) for job in jobs}  # first, since it makes the plans of the others
    watched = {job.ranks: Watched(job, job.ranks // 2) for job in jobs}
    found: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in sizes} for name in (*STAGES, "whole", "planning", "status")
    }
    for repeat in range(repeats):
        for size in sizes[:: -1 if repeat % 2 else 1]:
            own, planner = medians(watched[size].run()), medians(planning[size].run())
            figures = own | {"planning": planner["opening"] - own["opening"], "status": status_alone(watched[size].job)}
            for name, value in figures.items():
                found[name][size].append(max(value, 0.0))
    rows = rows_of(WHOLE, "ms", found["whole"], command, wanted="≤ 20 ms")
    for name, what in STAGES.items():
        rows += rows_of(what, "ms", found[name], command)
    rows += rows_of(STATUS, "ms", found["status"], command)
    rows += rows_of("planning, on the one rank that does it", "ms", found["planning"], command)
    memory = {size: [watched[size].memory()] for size in sizes}
    return rows + rows_of("memory while a window is built, above before", "KiB", memory, command)


def large_window(ranks: int, rounds: int, repeats: int, command: str) -> list[Row]:
    """One window of very many samples: the same figures."""
    job = Job(ranks, rounds, windows=1)
    planning = Watched(job, 0)
    watched = Watched(job, ranks // 2)
    samples = next(iter(job.voices.values())).samples
    what = f"a window of {samples:,} samples on {ranks} ranks"
    own = [medians(watched.run()) for _ in range(repeats)]
    plan = [medians(planning.run())["opening"] - figures["opening"] for figures in own]
    return [
        Row.of(f"{what}: {WHOLE}", "ms", [figures["whole"] for figures in own], command=command),
        Row.of(f"{what}: planning", "ms", plan, command=command),
        Row.of(f"{what}: memory above before", "KiB", [watched.memory()], command=command),
    ]


def measure(arguments: list[str]) -> list[Row]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="up to 512 ranks: half a minute instead of minutes")
    quick = parser.parse_args(arguments).quick
    command = COMMAND + (" --quick" if quick else "")
    sizes = (8, 64, 512) if quick else (8, 64, 512, 4096)
    rows = over_ranks(sizes, 3 if quick else 7, command)
    return rows + large_window(512 if quick else 4096, 4 if quick else 32, 2 if quick else 3, command)


if __name__ == "__main__":
    run_alone(measure)
