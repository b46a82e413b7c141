"""The columns of the comparison: each function measures one thing of all ways and gives its rows, ours over theirs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.record import Row, interleaved
from tests.benchmarks.side_by_side import flow
from tests.benchmarks.side_by_side.corpus import SEQ_LEN, Documents, Repeated, prepare
from tests.benchmarks.side_by_side.ranks import Ranks
from tests.benchmarks.side_by_side.ways import OURS, Setting

COMMAND = "python -m tests.benchmarks.side_by_side --only"
ITERABLE = "StatefulDataLoader, iterable"
LONG = 100
"""Times the file, in an epoch that is resumed near its end: 1.2e9 tokens, still a small one."""


@dataclass(frozen=True)
class Options:
    names: tuple[str, ...]
    """The ways that can run here."""
    repeats: int = 5
    steps: int = 20
    quick: bool = False

    def others(self, *left_out: str) -> list[str]:
        return [name for name in self.names if name not in (OURS, *left_out)]


def against(
    figures: dict[str, list[float]], measured: str, unit: str, column: str, wanted: dict[str, str] | None = None
) -> list[Row]:
    """A row of ours next to each of the others."""
    return [
        Row.of(
            measured,
            unit,
            figures[OURS],
            baseline=name,
            baseline_values=values,
            wanted=(wanted or {}).get(name),
            command=f"{COMMAND} {column}",
        )
        for name, values in figures.items()
        if name != OURS
    ]


def say(text: str) -> None:
    print(f"side_by_side: {text}", file=sys.stderr, flush=True)


def processor(options: Options) -> list[Row]:
    """Processor time and speed of delivery, flat out: nobody trains."""
    wanted = {"DataLoader": "≤ 1.3 times", "StatefulDataLoader": "≤ 0.8 times"}
    rows = []
    settings = [("functions", 0), ("files", 0)] if options.quick else [("functions", 0), ("functions", 1), ("files", 0)]
    for corpus, workers in settings:
        setting = Setting(prepare(corpus), workers=workers)
        speeds: dict[str, list[float]] = {name: [] for name in options.names}
        with Ranks() as ranks:

            def seconds_each(
                name: str, ranks: Ranks = ranks, setting: Setting = setting, speeds: Any = speeds
            ) -> float:
                told = ranks.call(flow.deliver, name, setting, options.steps)
                millions = sum(rank["tokens"] for rank in told) / 1e6
                speeds[name].append(millions / max(rank["seconds"] for rank in told))
                return float(sum(rank["processor"] for rank in told) / millions)

            used = interleaved({name: partial(seconds_each, name) for name in options.names}, options.repeats)
        what = f"{corpus}, {workers} workers"
        rows += against(
            used, f"processor time of 10⁶ tokens, {what}", "s", "processor", wanted if not workers else None
        )
        rows += against(speeds, f"10⁶ tokens a second, flat out, {what}", "1/s", "processor")
    return rows


def shape(options: Options) -> list[Row]:
    """What is delivered: padding, and how even the work is."""
    rows = []
    for corpus in ("functions", "files"):
        setting, found = Setting(prepare(corpus)), {}
        with Ranks() as ranks:
            for name in options.names:
                if not name.startswith(f"{ITERABLE},") and name != "StatefulDataLoader":  # which pack as others do
                    told = ranks.call(flow.work, name, setting, options.steps)
                    found[name] = [np.array([rank[kind] for rank in told], np.float64) for kind in (0, 1)]
        places = setting.rows * SEQ_LEN
        pads = {name: [100 * (1 - tokens.mean() / places)] for name, (tokens, _) in found.items()}
        rows += against(pads, f"padding, {corpus}", "%", "shape")
        for kind, what in enumerate(("tokens", "attention (tokens²)")):
            by_round = {name: [float(slowest(each[kind]).mean())] for name, each in found.items()}
            by_rank = {name: [float(slowest(each[kind].sum(axis=2)).mean())] for name, each in found.items()}
            rows += against(by_round, f"slowest rank / mean of a round: {what}, {corpus}", "", "shape")
            rows += against(by_rank, f"slowest rank / mean of a step: {what}, {corpus}", "", "shape")
        lockstep = {name: [float(each[1].max(axis=0).sum() / each[0].sum() / SEQ_LEN)] for name, each in found.items()}
        rows += against(lockstep, f"attention that a step waits for, a token, {corpus}", "row", "shape")
    return rows


def slowest(work: np.ndarray) -> np.ndarray:
    """Over the ranks, axis 0: the most, in parts of the mean."""
    return np.asarray(work.max(axis=0) / work.mean(axis=0))


def start(options: Options) -> list[Row]:
    """From a program that has imported torch to its first micro-batch; memory; each time in fresh processes."""
    path = prepare("functions")
    small, huge = Setting(path), Setting(path, wrap=partial(Repeated, length=10**9))
    held: dict[str, list[float]] = {name: [] for name in options.names}

    def seconds(name: str, setting: Setting) -> float:
        with Ranks() as ranks:
            told = ranks.call(flow.start, name, setting)
        if setting is small:
            held[name].append(max(used for _, used in told) / 2**20)
        return float(max(taken for taken, _ in told))

    repeats = 1 if options.quick else min(3, options.repeats)
    taken = interleaved({name: partial(seconds, name, small) for name in options.names}, repeats)
    rows = against(taken, "start to first micro-batch, torch imported", "s", "start")
    rows += against(held, "peak memory above torch, 8 steps", "MiB", "start")
    rows.append(
        Row.of(
            "start to first micro-batch, torch imported, 10⁹ records",
            "s",
            [seconds(OURS, huge) for _ in range(repeats)],
            wanted="≤ 1 s",
            command=f"{COMMAND} start",
        )
    )
    return rows


def resume(options: Options) -> list[Row]:
    """From a saved state to the micro-batch behind it, in a program that runs; what is saved, and what is read."""
    path, rows = prepare("functions"), []
    repeats = 1 if options.quick else options.repeats
    one = Setting(path, wrap=partial(flow.Counted, length=0))
    with Ranks() as ranks:
        for share in (0.01, 0.99):
            found: dict[str, list[tuple[float, float]]] = {}
            sizes: dict[str, list[float]] = {}
            for name in [*options.others("DataLoader"), OURS]:
                saved = saved_at(ranks, name, one, path, share)
                sizes[name] = [float(len(saved[0][0]))]
                told = [ranks.call(flow.resume, name, one, saved, 0) for _ in range(repeats)]
                found[name] = [(max(taken for taken, _ in each), sum(read for _, read in each)) for each in told]
            at = f"at {share:.0%} of an epoch"
            rows += against({name: [t for t, _ in each] for name, each in found.items()}, f"resume {at}", "s", "resume")
            rows += against({name: [n for _, n in each] for name, each in found.items()}, f"read {at}", "", "resume")
        rows += against(sizes, "saved state of a rank", "bytes", "resume")
        rows += resume_long(options, ranks, path)
    return rows


def resume_long(options: Options, ranks: Ranks, path: Path) -> list[Row]:
    """The same in an epoch of many times the file, where an iterable's state is taken as it is."""
    times = LONG // 10 if options.quick else LONG
    lengths = {OURS: len(Documents(path).records) * times, ITERABLE: len(Documents(path)) * times}
    rows = []
    for share, wanted in ((0.01, None), (0.99, "≤ 0.01 times")):
        seconds: dict[str, list[float]] = {}
        for name, length in lengths.items():
            setting = Setting(path, wrap=partial(flow.Counted, length=length))
            say(f"resume at {share:.0%} of {times} times the file: {name}")
            saved = saved_at(ranks, name, setting, path, share, times)
            seconds[name] = [max(taken for taken, _ in ranks.call(flow.resume, name, setting, saved, 0, limit_s=400.0))]
        measured = f"resume at {share:.0%} of {times} × 12 × 10⁶ tokens"
        rows += against(seconds, measured, "s", "resume", {ITERABLE: wanted} if wanted else None)
    return rows


def saved_at(ranks: Ranks, name: str, setting: Setting, path: Path, share: float, times: int = 1) -> list[list[Any]]:
    """Each rank's state behind this share of the epoch: by going there, ours by starting there."""
    documents = Documents(path)
    if name == OURS:
        rows = int(share * len(documents.records) * times)
        there = replace(setting, consumed=rows - rows % setting.rows_of_step)
        saved: list[list[Any]] = ranks.call(flow.states, name, there, [0])
        return saved
    packed = int(share * documents.lengths.sum() * times / SEQ_LEN / 0.85 / 2)  # rows are fuller than that
    return ranks.call(flow.states, name, setting, [packed], limit_s=400.0)


def failure(options: Options) -> list[Row]:
    """Rank 1 cannot read a record: when and what rank 0 hears."""
    limit, rows = (5.0 if options.quick else 20.0), []
    setting = Setting(prepare("functions"))
    for stays, what in ((False, "its process ends"), (True, "its process stays")):
        seconds: dict[str, list[float]] = {}
        for name in [*options.others("StatefulDataLoader", f"{ITERABLE}, own state"), OURS]:
            with Ranks() as ranks:
                ranks.start(flow.fail, name, setting, stays)
                first, second = ranks.outcomes(limit)
                assert second is not None, "rank 1 does not fail"
                seconds[name] = [limit if first is None else max(0.01, first[0] - second[0])]
                say(f"rank 1 fails, {what}: {name}: rank 0 {'hangs' if first is None else 'hears: ' + first[1]}")
                for process in ranks.processes:
                    process.kill()
        rows += against(seconds, f"rank 0 hears of rank 1's failure ({what}; {limit:g} s: hangs)", "s", "failure")
    return rows


def consumer(options: Options) -> list[Row]:
    """What the loop's own thread spends in next(), with a step of 200 ms and windows of about 256 samples."""
    steps, setting = (10 if options.quick else 40), Setting(prepare("functions"))
    with Ranks() as ranks:

        def share(name: str) -> float:
            return float(
                np.median([each for rank in ranks.call(flow.consume, name, setting, steps, 0.2) for each in rank])
            )

        names = [name for name in options.names if name in (OURS, "DataLoader")]
        found = interleaved({name: partial(share, name) for name in names}, 1 if options.quick else 3)
    return [replace(row, wanted="≤ 1 %") for row in against(found, "share of a 200 ms step in next()", "%", "consumer")]


COLUMNS: dict[str, Callable[[Options], list[Row]]] = {
    "processor": processor,
    "shape": shape,
    "start": start,
    "resume": resume,
    "failure": failure,
    "consumer": consumer,
}


def available(names: Sequence[str]) -> tuple[str, ...]:
    """The ways whose packages are here; says how to install the others."""
    from importlib.util import find_spec

    here = []
    for name in names:
        package, install = {"Grain": ("grain", "pip install -r tests/benchmarks/requirements.txt")}.get(
            name, ("torch", "")
        )
        if find_spec(package) is None:
            say(f"{name} is left out, its package is not installed: {install}")
        else:
            here.append(name)
    return tuple(here)
