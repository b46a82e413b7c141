"""How close plans are to the bound, and how long they take, next to longest-processing-time in the same run.

    python -m tests.benchmarks.planner [--quick] [--only gaps ...] [--seeds N] [--first-seed N] [--sources azure ...]
                                       [--annealing MOVES]

Gaps are ``objective / lower bound - 1`` in per cent, over problems of each family (:mod:`tests.benchmarks.instances`):
every source of lengths, fills of 60, 80 and 98 %, and seeds. Times are processor time of the one thread that plans.
``--quick`` takes about two minutes; with 20 million moves of annealing (needs numba) about five more for each seed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np

from hp_nodes.planning import PackingProblem, PlanReport, plan_packing
from tests.benchmarks.annealing import anneal
from tests.benchmarks.instances import COSTS, SHAPES, SOURCES, problem
from tests.benchmarks.longest_first import longest_first
from tests.benchmarks.record import Row, interleaved, run_alone
from tests.planning.uncompiled import uncompiled
from tests.planning.windows import rounds_alone

COMPARED_WITH = ("numba",)
FILLS = (0.6, 0.8, 0.98)
COMMAND = "python -m tests.benchmarks.planner"
LPT = "longest-processing-time"
PARTS: dict[str, Callable[[list[float]], float]] = {
    "median": lambda values: float(np.median(values)),
    "90th percentile": lambda values: float(np.percentile(values, 90)),
    "worst": max,
}
GAPS = {
    ("wide", "dense"): {"median": 0.1, "90th percentile": 0.5, "worst": 1.2},
    ("wide", "square"): {"median": 0.3, "worst": 4},
    ("tight", "dense"): {"median": 0.7, "worst": 3},
    ("tight", "square"): {"median": 0.7, "worst": 3},
    ("no-short", "dense"): {"median": 1.6, "worst": 5.5},
    ("no-short", "square"): {"median": 1.6, "worst": 5.5},
}
"""Wanted at 64 ranks and more, in per cent."""
TIMES = {64: (5, 8, 50), 512: (35, 80, 500), 4096: (350, 1200, 3000), 19_400: (2000, 6000, None)}
"""Ranks × 8 rounds: ms wanted with numba, without it, and how many times as fast as LPT with it."""
NEVER_WORSE = 1e-4
Problems = Callable[[str, str, tuple[int, int, int]], Iterator[PackingProblem]]


def measure(arguments: list[str]) -> list[Row]:
    options = parsed(arguments)

    def problems(shape: str, cost: str, size: tuple[int, int, int]) -> Iterator[PackingProblem]:
        seeds = range(options.first_seed, options.first_seed + (1 if options.quick else options.seeds))
        for source, fill, seed in itertools.product(options.sources, FILLS, seeds):
            yield problem(source, shape, fill, *size, cost=cost, seed=seed)

    rows: list[Row] = []
    if "gaps" in options.only:
        sizes = [(64, 8, 1)] if options.quick else [(64, 8, 1), (8, 4, 1), (64, 4, 4), (512, 8, 1)]
        for size in sizes:
            rows += gaps(problems, size)
    if "makespans" in options.only:
        rows += makespans(problems, (64, 8, 1), 99) + makespans(problems, (8, 8, 1), 80)
    if "dead-ends" in options.only:
        for fill in (1.0,) if options.quick else (0.9, 0.98, 1.0):
            rows += dead_ends(options.sources, fill, options.first_seed)
    if "times" in options.only:
        rows += times([64, 512] if options.quick else list(TIMES))
    if options.annealing:
        rows += annealing(problems, options.annealing)
    return rows


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("gaps", "makespans", "dead-ends", "times")
    parser.add_argument("--quick", action="store_true", help="64 * 8 and 512 * 8, one seed")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    parser.add_argument("--seeds", type=int, default=3, help="problems of each kind")
    parser.add_argument("--first-seed", type=int, default=0, help="the planner's constants were chosen with seed 0")
    parser.add_argument("--sources", nargs="*", choices=SOURCES, default=SOURCES, help="of lengths")
    parser.add_argument("--annealing", type=int, default=0, metavar="MOVES", help="compare 8 * 4 with so many moves")
    return parser.parse_args(arguments)


def gaps(problems: Problems, size: tuple[int, int, int]) -> list[Row]:
    """Gaps by family; and how many of all plans are worse than the reference, LPT, and rounds planned alone."""
    rows, worse, plans = [], {"the reference": 0, LPT: 0, "each round alone": 0}, 0
    compared = size[0] * size[1] * size[2] <= 1024
    for shape, cost in itertools.product(SHAPES, COSTS):
        before, lpt, ours = [], [], []
        for packed in problems(shape, cost, size):
            report = plan_packing(packed).report
            assert report.before is not None
            before.append(gap(report.before, report))
            ours.append(gap(report.after, report))
            plans += 1
            worse["the reference"] += report.after > report.before
            if compared:
                found = longest_first(packed)
                lpt.append(gap(report.before if found is None else lockstep(packed, found), report))
                worse[LPT] += ours[-1] > lpt[-1] + 100 * NEVER_WORSE
                worse["each round alone"] += report.after > planned_alone(packed) * (1 + NEVER_WORSE)
        wanted = GAPS[shape, cost] if size[0] >= 64 else {}
        for part, of in PARTS.items():
            rows.append(
                Row(
                    f"{times_signs(size)}, {shape}, {cost}: lockstep above its bound, {part} of {len(ours)} plans "
                    f"(reference {of(before):.3g} %)",
                    of(ours),
                    "%",
                    LPT if lpt else None,
                    of(lpt) if lpt else None,
                    of(ours) / of(lpt) if lpt else None,
                    wanted=f"≤ {wanted[part]} %" if part in wanted else None,
                    command=f"{COMMAND} --only gaps",
                )
            )
    for than, count in worse.items():
        if compared or than == "the reference":
            what = f"{times_signs(size)}: plans of {plans} that are worse than {than} by 0.01 % or more"
            rows.append(Row(what, count, "plans", wanted="≤ 0 plans", command=f"{COMMAND} --only gaps"))
    return rows


def makespans(problems: Problems, size: tuple[int, int, int], wanted: int) -> list[Row]:
    ours, before = [], []
    for shape, cost in itertools.product(SHAPES, COSTS):
        for packed in problems(shape, cost, size):
            report = plan_packing(packed, "makespan").report
            assert report.before is not None
            ours.append(gap(report.after, report))
            before.append(gap(report.before, report))
    what = f"{times_signs(size)}: plans of {len(ours)} whose makespan is within 0.01 % of its bound"
    reached = 100 * float(np.mean(np.array(ours) <= 0.01))
    kept = 100 * float(np.mean(np.array(before) <= 0.01))
    command = f"{COMMAND} --only makespans"
    return [Row(what, reached, "%", "reference", kept, wanted=f"≥ {wanted} %", command=command)]


def dead_ends(sources: list[str], fill: float, seed: int) -> list[Row]:
    """Plans given up: the reference is kept although LPT's or ours could not improve it."""
    rows = []
    for shape in SHAPES:
        given_up = kept = plans = 0
        for source, cost in itertools.product(sources, COSTS):
            packed = problem(source, shape, fill, 64, 8, cost=cost, seed=seed)
            given_up += longest_first(packed) is None
            kept += not plan_packing(packed).report.accepted
            plans += 1
        what = f"64 × 8, {shape}, rows {fill:.0%} full: plans of {plans} that are given up"
        command = f"{COMMAND} --only dead-ends"
        rows.append(Row(what, kept, "plans", LPT, given_up, wanted="≤ 0 plans", command=command))
    return rows


def times(sizes: list[int]) -> list[Row]:
    rows, per_pair = [], 0.0
    ways = {"numba": nullcontext} if importlib.util.find_spec("numba") else {}
    for ranks, cost in itertools.product(sizes, COSTS):
        packed = problem("lognormal", "wide", 0.8, ranks, 8, cost=cost)
        planned = {name: seconds_of(plan_packing, packed, way) for name, way in (ways | {"plain": uncompiled}).items()}
        for way in planned.values():
            way()  # compiled now
        found = interleaved(planned, 3 if ranks > 512 else 9)
        pairs = packed.num_samples * packed.num_bins
        if packed.num_bins <= 4096:
            lpt, how = seconds_of(longest_first, packed)(), ""
            per_pair = lpt / pairs
        else:
            lpt, how = per_pair * pairs, ", from samples × bins"
        for name, seconds in found.items():
            what = f"{ranks} × 8, {packed.num_samples:,} samples, {cost}, {name}: a plan"
            limit, plain_limit, faster = TIMES[ranks]
            ms, spread = 1e3 * min(seconds), (1e3 * min(seconds), 1e3 * max(seconds))
            command = f"{COMMAND} --only times"
            wanted = f"≤ {plain_limit if name == 'plain' else limit} ms"
            rows.append(Row(what, ms, "ms", spread=spread, wanted=wanted, command=command))
            ratio = min(seconds) / lpt
            wanted = f"≤ {1 / faster:.6f} times" if faster and name == "numba" else None
            rows.append(
                Row(f"{what}, against LPT{how}", ms, "ms", LPT, 1e3 * lpt, ratio, wanted=wanted, command=command)
            )
        what = f"{ranks} × 8, {packed.num_samples:,} samples, {cost}: memory above the inputs, plain"
        rows.append(Row(what, memory(packed), "bytes a sample", wanted="≤ 130 bytes a sample", command=command))
    return rows


def annealing(problems: Problems, moves: int) -> list[Row]:
    above, slack = [], []
    for shape, cost in itertools.product(SHAPES, COSTS):
        for packed in problems(shape, cost, (8, 4, 1)):
            plan = plan_packing(packed)
            assert packed.reference is not None
            found = min(anneal(packed, packed.reference, moves), anneal(packed, plan.bins, moves))
            above.append(100 * (plan.report.after / found - 1))
            slack.append(gap(found, plan.report))
    wanted = {"median": "≤ 0.5 %", "90th percentile": "≤ 2 %"}
    what = f"8 × 4: lockstep above the better of two annealings of {moves:,} moves"
    bound = f"of {len(above)} (its own distance from the bound: {np.median(slack):.2g} / {max(slack):.2g} %)"
    command = f"{COMMAND} --only --annealing {moves}"
    return [
        Row(f"{what}, {part} {bound}", of(above), "%", wanted=wanted.get(part), command=command)
        for part, of in PARTS.items()
    ]


def times_signs(size: tuple[int, int, int]) -> str:
    """Ranks × rounds, and × slots where there are several."""
    return " × ".join(map(str, size if size[2] > 1 else size[:2]))


def gap(value: float, report: PlanReport) -> float:
    return 100 * (value / report.lower_bound - 1)


def lockstep(packed: PackingProblem, bins: np.ndarray) -> float:
    loads = np.bincount(bins // packed.local_batch_size, weights=packed.costs)
    return float(loads.reshape(packed.data_parallel_size, packed.num_rounds).max(axis=0).sum())


def planned_alone(packed: PackingProblem) -> float:
    """The sum of plans that see one round each."""
    return sum(plan_packing(PackingProblem(**arguments)).report.after for _, arguments in rounds_alone(packed))


def seconds_of(
    function: Callable[[PackingProblem], object], packed: PackingProblem, way: Callable[[], object] = nullcontext
) -> Callable[[], float]:
    def timed() -> float:
        with way():  # type: ignore[attr-defined]
            started = time.process_time()
            function(packed)
            return time.process_time() - started

    return timed


def memory(packed: PackingProblem) -> float:
    with uncompiled():
        tracemalloc.start()
        plan_packing(packed)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak / packed.num_samples


if __name__ == "__main__":
    run_alone(measure)
