"""How close plans are to the bound, and how long they take, next to longest-processing-time in the same run.

    python -m tests.benchmarks.planner [--quick] [--annealing MOVES] [--out FILE]

Prints Markdown tables. Gaps are ``objective / lower bound - 1`` in per cent. ``--quick`` takes about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hp_nodes.planning import PackingProblem, PlanReport, plan_packing
from tests.benchmarks.annealing import anneal
from tests.benchmarks.instances import COSTS, SHAPES, SOURCES, problem
from tests.benchmarks.longest_first import longest_first

TABLES = ("gaps", "makespans", "dead-ends", "times")
FILLS = (0.6, 0.8, 0.98)
Line = Callable[[str], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 * 8 and 8 * 4 only, one seed")
    parser.add_argument("--seeds", type=int, default=3, help="problems of each kind")
    parser.add_argument("--only", nargs="*", choices=TABLES, default=TABLES, help="which tables")
    parser.add_argument(
        "--annealing", type=int, default=0, metavar="MOVES", help="compare 8 * 4 with so many moves; needs numba"
    )
    parser.add_argument("--out", type=Path, help="also write the tables there")
    options = parser.parse_args()
    lines: list[str] = []

    def line(text: str) -> None:
        lines.append(text)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    line(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}\n")
    seeds = range(1 if options.quick else options.seeds)
    small, large = [(64, 8, 1), (8, 4, 1)], [(512, 8, 1), (64, 4, 4)]
    if "gaps" in options.only:
        gaps(line, small if options.quick else small + large, seeds)
    if "makespans" in options.only:
        makespans(line, [(64, 8, 1), (8, 8, 1)], seeds)
    if "dead-ends" in options.only:
        dead_ends(line, seeds)
    if "times" in options.only:
        times(
            line, [(64, 8), (512, 8)] if options.quick else [(64, 8), (512, 8), (4096, 8), (19_400, 8)], options.quick
        )
    if options.annealing:
        annealing(line, options.annealing, seeds)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def _instances(shape: str, cost: str, size: tuple[int, int, int], seeds: range) -> Iterator[PackingProblem]:
    for source, fill, seed in itertools.product(SOURCES, FILLS, seeds):
        yield problem(source, shape, fill, *size, cost=cost, seed=seed)


def _spread(values: list[float]) -> str:
    return f"{np.median(values):.3g} / {np.percentile(values, 90):.3g} / {max(values):.3g}"


def _gap(value: float, report: PlanReport) -> float:
    return 100 * (value / report.lower_bound - 1)


def _lockstep(packed: PackingProblem, bins: np.ndarray) -> float:
    loads = np.bincount(bins // packed.local_batch_size, weights=packed.costs)
    return float(loads.reshape(packed.data_parallel_size, packed.num_rounds).max(axis=0).sum())


def _round_by_round(packed: PackingProblem) -> float:
    """The sum of plans that see one round each."""
    assert packed.reference is not None
    slots = packed.local_batch_size
    unit = packed.reference // slots
    total = 0.0
    for round_ in range(packed.num_rounds):
        here = np.flatnonzero(unit % packed.num_rounds == round_)
        alone = PackingProblem(
            packed.tokens[here],
            packed.costs[here],
            unit[here] // packed.num_rounds * slots + packed.reference[here] % slots,
            data_parallel_size=packed.data_parallel_size,
            num_rounds=1,
            local_batch_size=slots,
            seq_len=packed.seq_len,
        )
        total += plan_packing(alone).report.after
    return total


def gaps(line: Line, sizes: list[tuple[int, int, int]], seeds: range) -> None:
    line("## Lockstep gap in per cent: median / 90th percentile / worst\n")
    line(
        "| ranks × rounds × slots | samples | cost | reference | LPT | this planner | plans "
        "| worse (by 0.01 % and more) than reference, LPT, round by round |"
    )
    line("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size, shape, cost in itertools.product(sizes, SHAPES, COSTS):
        reference, lpt, ours, worse = [], [], [], [0, 0, 0]
        for packed in _instances(shape, cost, size, seeds):
            report = plan_packing(packed).report
            assert report.before is not None
            reference.append(_gap(report.before, report))
            ours.append(_gap(report.after, report))
            baseline = longest_first(packed) if packed.num_bins <= 512 else None
            if packed.num_bins <= 512:
                lpt.append(_gap(report.before if baseline is None else _lockstep(packed, baseline), report))
                worse[1] += ours[-1] > lpt[-1] + 0.01
                worse[2] += report.after > _round_by_round(packed) * (1 + 1e-4)
            worse[0] += report.after > report.before
        shown = _spread(lpt) if lpt else "not run"
        line(
            f"| {' × '.join(map(str, size))} | {shape} | {cost} | {_spread(reference)} "
            f"| {shown} | **{_spread(ours)}** | {len(ours)} | "
            f"{', '.join(map(str, worse))} |"
        )
    line("")


def makespans(line: Line, sizes: list[tuple[int, int, int]], seeds: range) -> None:
    line("## Makespan: plans within 0.01 % of the bound, and the gap in per cent: median / 90th percentile / worst\n")
    line("| ranks × rounds × slots | samples | within 0.01 % | this planner | reference |")
    line("| --- | --- | --- | --- | --- |")
    for size, shape in itertools.product(sizes, SHAPES):
        ours, reference = [], []
        for cost in COSTS:
            for packed in _instances(shape, cost, size, seeds):
                report = plan_packing(packed, "makespan").report
                assert report.before is not None
                ours.append(_gap(report.after, report))
                reference.append(_gap(report.before, report))
        close = 100 * np.mean(np.array(ours) <= 0.01)
        line(f"| {' × '.join(map(str, size))} | {shape} | {close:.0f} % | **{_spread(ours)}** | {_spread(reference)} |")
    line("")


def dead_ends(line: Line, seeds: range) -> None:
    line("## Dead ends at 64 × 8: plans given up, and the lockstep gap (median / worst) of those found\n")
    line("| fill | samples | LPT gives up | this planner gives up | reference | this planner |")
    line("| --- | --- | --- | --- | --- | --- |")
    for fill, shape in itertools.product((0.9, 0.98, 1.0), SHAPES):
        given_up = kept = plans = 0
        before, after = [], []
        for source, cost, seed in itertools.product(SOURCES, COSTS, seeds):
            packed = problem(source, shape, fill, 64, 8, cost=cost, seed=seed)
            given_up += longest_first(packed) is None
            report = plan_packing(packed).report
            assert report.before is not None
            kept += not report.accepted
            plans += 1
            before.append(_gap(report.before, report))
            after.append(_gap(report.after, report))
        line(
            f"| {fill:.0%} | {shape} | {given_up} of {plans} | {kept} of {plans} "
            f"| {np.median(before):.3g} / {max(before):.3g} | "
            f"{np.median(after):.3g} / {max(after):.3g} |"
        )
    line("")


def times(line: Line, sizes: list[tuple[int, int]], quick: bool) -> None:
    line("## Planning: processor time of its one thread, best of three, and memory above the inputs\n")
    line("| ranks × rounds | samples | cost | this planner | LPT | ratio | bytes a sample | gap |")
    line("| --- | --- | --- | --- | --- | --- | --- | --- |")
    per_pair = 0.0
    for ranks, rounds in sizes:
        for cost in COSTS:
            packed = problem("lognormal", "wide", 0.8, ranks, rounds, cost=cost)
            seconds, plan = min((_timed(plan_packing, packed) for _ in range(3)), key=lambda result: result[0])
            pairs = packed.num_samples * packed.num_bins
            if packed.num_bins <= (512 if quick else 4096):
                baseline, how = _timed(longest_first, packed)[0], ""
                per_pair = baseline / pairs
            else:
                baseline, how = per_pair * pairs, " (from samples × bins)"
            line(
                f"| {ranks} × {rounds} | {packed.num_samples:,} | {cost} | **{1e3 * seconds:,.1f} ms** "
                f"| {baseline:,.2f} s{how} | "
                f"1/{baseline / seconds:,.0f} | {_memory(packed):.0f} | {_gap(plan.report.after, plan.report):.3g} % |"
            )
    line("")


def _timed(function: Callable[[PackingProblem], Any], packed: PackingProblem) -> tuple[float, Any]:
    started = time.process_time()
    result = function(packed)
    return time.process_time() - started, result


def _memory(packed: PackingProblem) -> float:
    tracemalloc.start()
    plan_packing(packed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / packed.num_samples


def annealing(line: Line, moves: int, seeds: range) -> None:
    line(f"## Lockstep at 8 × 4 against {moves:,} moves of annealing, from the reference and from the plan\n")
    line(
        "| samples | cost | above the better of the two, per cent: median / 90th percentile / worst "
        "| bound is below it by, median / worst |"
    )
    line("| --- | --- | --- | --- |")
    everything = []
    for shape, cost in itertools.product(SHAPES, COSTS):
        above, slack = [], []
        for packed in _instances(shape, cost, (8, 4, 1), seeds):
            plan = plan_packing(packed)
            assert packed.reference is not None
            found = min(anneal(packed, packed.reference, moves), anneal(packed, plan.bins, moves))
            above.append(100 * (plan.report.after / found - 1))
            slack.append(_gap(found, plan.report))
        everything += above
        line(f"| {shape} | {cost} | {_spread(above)} | {np.median(slack):.3g} / {max(slack):.3g} |")
    line(f"| all | | {_spread(everything)} | |\n")


if __name__ == "__main__":
    main()
