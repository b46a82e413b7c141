"""What balancing would do for your data, on any number of ranks, without any of them.

    python -m graphs.simulate lengths.csv --seq-len 8192 --dp 512 --window 1 2 4 8

Takes token lengths, packs them in their (shuffled) order into rows as a loader without balancing would, plans every
window of an epoch as the loader would plan it, and prints for each window size: imbalance before, after and the least
possible, padding, bytes moved, planning time, and how much faster a step gets. It plans with
:func:`hp_nodes.planning.plan_packing`, so the figures are those of a training run whose steps take as long as the cost
model says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.lengths import read_lengths
from hp_nodes.planning import (
    BackboneCostModel,
    PackingProblem,
    PlanReport,
    PolynomialCostModel,
    merge_reports,
    plan_packing,
)
from hp_nodes.planning.objectives import OBJECTIVES, evaluate

__all__ = ["Simulation", "main", "pack_rows", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """An epoch with one window size. Imbalances are per cent above perfectly even ranks, by objective."""

    window: int
    steps: int
    before: dict[str, float]
    after: dict[str, float]
    bound: float
    """Of the objective that was planned for."""
    padding: float
    """Per cent of all places in rows."""
    moved: float
    """Per cent of bytes that change rank."""
    moved_bytes: float
    """A step, over all ranks."""
    seconds: float
    """Planning a window: the median."""
    speed_up: float
    """Time of all steps before, by the time after."""
    loads: tuple[NDArray[np.float64], NDArray[np.float64]]
    """Of the first step, [ranks, rounds]: before, after."""


def pack_rows(lengths: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """int64[n]: the row of each sample when rows are filled in order, each until the next sample does not fit."""
    ends = np.cumsum(lengths)
    rows = np.empty(len(lengths), np.int64)
    start, row = 0, 0
    while start < len(lengths):
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + seq_len, side="right"))
        rows[start:stop] = row
        start, row = stop, row + 1
    return rows


def simulate(
    lengths: NDArray[np.int64],
    costs: NDArray[np.float64],
    *,
    seq_len: int,
    dp: int,
    local_batch_size: int = 1,
    rounds: int = 8,
    window: int = 1,
    objective: str = "lockstep",
    padding_cost: NDArray[np.float64] | None = None,
    bytes_per_token: int = 16,
    max_steps: int | None = None,
    progress: bool = False,
) -> Simulation:
    """Plans an epoch of samples (``lengths`` at most ``seq_len``), in the order given.

    Raises:
        ValueError: the samples do not fill one step of ``dp * local_batch_size * rounds`` rows, or an argument is
        wrong.
    """
    if not 1 <= window <= rounds:
        raise ValueError(f"window is {window}; accepted: 1 to {rounds}, the rounds of a step")
    rows = pack_rows(lengths, seq_len)
    per_step = dp * local_batch_size * rounds
    available = int(rows[-1] + 1) // per_step
    if not available:
        raise ValueError(
            f"{len(lengths)} samples fill {rows[-1] + 1} rows of {seq_len} tokens; a step takes {per_step}"
        )
    steps = min(available, max_steps or available)
    reports: list[PlanReport] = []
    seconds: list[float] = []
    moved = total = 0.0
    for step in _progress(range(steps), f"window {window}", progress):
        windows: list[PlanReport] = []
        loads = np.zeros(dp)
        for first in range(0, rounds, window):
            count = min(window, rounds - first)
            low = step * per_step + first * dp * local_batch_size
            here = slice(*np.searchsorted(rows, [low, low + count * dp * local_batch_size]))
            reference = _bins(rows[here] - low, dp, count, local_batch_size)
            plan = plan_packing(
                PackingProblem(
                    lengths[here],
                    costs[here],
                    reference,
                    data_parallel_size=dp,
                    num_rounds=count,
                    local_batch_size=local_batch_size,
                    seq_len=seq_len,
                    initial_loads=loads if objective == "makespan" else None,
                    padding_cost=padding_cost,
                ),
                objective,
            )
            loads = loads + plan.report.costs_after.sum(axis=1)
            size = lengths[here] * bytes_per_token
            per_rank = count * local_batch_size
            moved += float(size[plan.bins // per_rank != reference // per_rank].sum())
            total += float(size.sum())
            windows.append(plan.report)
            seconds.append(plan.report.seconds)
        reports.append(merge_reports(windows))
    return _summary(reports, window, objective, steps, per_step * seq_len, moved, total, seconds)


def _bins(row: NDArray[np.int64], dp: int, rounds: int, local_batch_size: int) -> NDArray[np.int64]:
    """Row i of a round goes to rank ``i // local_batch_size``, as a contiguous batch sampler has it."""
    round_, place = np.divmod(row, dp * local_batch_size)
    rank, slot = np.divmod(place, local_batch_size)
    return (rank * rounds + round_) * local_batch_size + slot


def _summary(
    reports: Sequence[PlanReport],
    window: int,
    objective: str,
    steps: int,
    places: int,
    moved: float,
    total: float,
    seconds: list[float],
) -> Simulation:
    before = [report.costs_before for report in reports if report.costs_before is not None]
    after = [report.costs_after for report in reports]
    bound = sum(report.lower_bound for report in reports)
    even = sum(report.work for report in reports) / len(after[0])
    judged = "makespan" if objective == "makespan" else "lockstep"
    return Simulation(
        window=window,
        steps=steps,
        before={name: _imbalance(name, before) for name in OBJECTIVES},
        after={name: _imbalance(name, after) for name in OBJECTIVES},
        bound=100 * (np.sqrt(bound / steps) if objective == "balance" else bound / even - 1),
        padding=100 * sum(report.padding for report in reports) / (steps * places),
        moved=100 * moved / total,
        moved_bytes=moved / steps,
        seconds=float(np.median(seconds)),
        speed_up=sum(evaluate(judged, load) for load in before) / sum(evaluate(judged, load) for load in after),
        loads=(before[0], after[0]),
    )


def _imbalance(name: str, loads: Sequence[NDArray[np.float64]]) -> float:
    """Per cent above even; for ``balance`` the coefficient of variation, in per cent."""
    values = [evaluate(name, load) for load in loads]
    if name == "balance":
        return 100 * float(np.sqrt(np.mean(values)))
    return 100 * (sum(values) / sum(float(load.sum()) / len(load) for load in loads) - 1)


def _progress(steps: Iterable[int], label: str, wanted: bool) -> Iterator[int]:
    if wanted:
        try:
            from tqdm import tqdm
        except ImportError:
            sys.stderr.write("no progress bar: pip install 'hp-nodes[demo]'\n")
        else:
            steps = tqdm(steps, desc=label, unit="step", leave=False)
    yield from steps


def table(results: Sequence[Simulation], objective: str) -> str:
    """The results as a Markdown table."""
    lines = [
        "| window | " + " | ".join(f"{name} before → after" for name in OBJECTIVES) + f" | least {objective} "
        "| padding | moved | a step | planning | faster |",
        "| ---: |" + " ---: |" * (len(OBJECTIVES) + 6),
    ]
    for result in results:
        imbalance = " | ".join(f"{result.before[name]:.2f} → **{result.after[name]:.2f} %**" for name in OBJECTIVES)
        lines.append(
            f"| {result.window} | {imbalance} | {result.bound:.2f} % | {result.padding:.1f} % | {result.moved:.0f} % | "
            f"{result.moved_bytes / 2**20:.1f} MiB | {1e3 * result.seconds:.1f} ms | **{result.speed_up:.3f}×** |"
        )
    return "\n".join(lines)


def plot(results: Sequence[Simulation], objective: str, path: Path) -> None:
    """Imbalance by window size, and the first step's micro-batches before and after with the last one.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'hp-nodes[demo]'") from error
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [str(result.window) for result in results]
    left.plot(names, [result.before[objective] for result in results], "o--", label="before")
    left.plot(names, [result.after[objective] for result in results], "o-", label="after")
    left.plot(names, [result.bound for result in results], ":", label="least possible")
    left.set(xlabel="window (rounds)", ylabel=f"{objective} imbalance (%)", ylim=(0, None))
    left.legend()
    for loads, label in zip(results[-1].loads, ("before", "after"), strict=True):
        right.plot(np.sort(loads.ravel())[::-1] / loads.mean(), label=label)
    right.set(xlabel="micro-batches of a step, heaviest first", ylabel="cost / mean", ylim=(0, None))
    right.legend()
    figure.savefig(path)


def cost_model(name: str) -> tuple[Any, str]:
    """The model that ``--cost`` names, and what it is called.

    Raises:
        ValueError: it is neither a known name, nor ``A:B``, nor a file with a model's configuration.
    """
    if name == "square":
        return PolynomialCostModel(0.0, 1.0), "tokens²"
    if name == "tokens":
        return PolynomialCostModel(1.0, 0.0), "tokens"
    try:
        linear, square = (float(part) for part in name.split(":"))
    except ValueError:
        if not Path(name).is_file():
            raise ValueError(
                f"--cost is {name!r}; accepted: square, tokens, A:B (A per token, B per token squared), or the path of "
                "a model's config.json"
            ) from None
        return BackboneCostModel(json.loads(Path(name).read_text())), f"FLOPs of {name}"
    return PolynomialCostModel(linear, square), f"{linear:g} tokens + {square:g} tokens²"


def priced(model: Any, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The cost of each number of tokens; each number is asked for once."""
    values, inverse = np.unique(tokens, return_inverse=True)
    return np.array([model.padding_cost(int(value)) for value in values], np.float64)[inverse]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m graphs.simulate", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("lengths", metavar="LENGTHS", help=".csv, .jsonl, .npy, .parquet, or a Megatron .idx")
    parser.add_argument("--column", help="the column that holds the lengths")
    parser.add_argument("--seq-len", type=int, required=True, help="tokens of a row")
    parser.add_argument(
        "--long", choices=("chunk", "clip"), default="chunk", help="samples above --seq-len are cut into pieces or off"
    )
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--local-batch-size", type=int, default=1, help="rows of a micro-batch")
    parser.add_argument("--rounds", type=int, default=8, help="micro-batches of a rank in a step")
    parser.add_argument("--window", type=int, nargs="+", default=[1, 2, 4, 8], help="rounds planned together")
    parser.add_argument("--cost", default="square", help="square, tokens, A:B, or a model's config.json")
    parser.add_argument("--price-padding", action="store_true", help="a row's padding costs as a segment of its length")
    parser.add_argument("--objective", choices=OBJECTIVES, default="lockstep", help="what is planned for")
    parser.add_argument("--bytes-per-token", type=int, default=16, help="ids and labels as int64: 16")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle; -1 keeps the file's order")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw imbalance and loads")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments().parse_args(argv)
    lengths = read_lengths(options.lengths, options.column)
    if options.seq_len < 1:
        raise ValueError(f"--seq-len is {options.seq_len}; accepted: an int >= 1")
    lengths = _cut(lengths, options.seq_len, options.long)
    if options.seed >= 0:
        lengths = np.random.default_rng(options.seed).permutation(lengths)
    model, name = cost_model(options.cost)
    costs = priced(model, lengths)
    padding = priced(model, np.arange(options.seq_len + 1)) if options.price_padding else None
    windows = [window for window in options.window if window <= options.rounds]
    results = [
        simulate(
            lengths,
            costs,
            seq_len=options.seq_len,
            dp=options.dp,
            local_batch_size=options.local_batch_size,
            rounds=options.rounds,
            window=window,
            objective=options.objective,
            padding_cost=padding,
            bytes_per_token=options.bytes_per_token,
            max_steps=options.max_steps,
            progress=not options.no_progress,
        )
        for window in windows
    ]
    sys.stdout.write(
        f"{len(lengths):,} samples of {lengths.mean():,.0f} tokens on average, cost {name}; "
        f"{results[0].steps:,} steps of {options.rounds} rounds on {options.dp} ranks, "
        f"{options.local_batch_size} rows of {options.seq_len} each\n\n"
        f"{table(results, options.objective)}\n\n"
        "Imbalance: how much longer the slowest rank takes than the mean (balance: coefficient of variation). "
        "Lockstep waits in every round (FSDP), makespan once a step (DDP with no_sync).\n"
    )
    if options.plot:
        plot(results, options.objective, options.plot)


def _cut(lengths: NDArray[np.int64], seq_len: int, how: str) -> NDArray[np.int64]:
    """Samples above ``seq_len``: cut off, or into pieces of ``seq_len`` and a rest."""
    if how == "clip":
        return np.minimum(lengths, seq_len)
    whole, rest = np.divmod(lengths, seq_len)
    pieces = np.repeat(seq_len, int(whole.sum()))
    return np.concatenate([pieces, rest[rest > 0]]) if (whole > 0).any() else lengths


if __name__ == "__main__":
    main()
