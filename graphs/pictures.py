"""Pictures of balance reports: who worked how much before and after, and how steps went, as PNG or SVG.

    python -m graphs.pictures runs/demo/uninterrupted.jsonl steps.svg
    python -m graphs.pictures runs/demo/uninterrupted.jsonl step7.png --step 7

Takes the log that ``python -m graphs.pretrain --log-file`` writes, or, from a notebook, the reports that
``loader.last.report`` gives at the end of each step. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.step_report import imbalance
from hp_nodes.types import BalanceReport, PlanReport

__all__ = ["StepPicture", "draw_loads", "draw_steps", "main", "read_log", "save"]

BEFORE, AFTER, BOUND = "#E69F00", "#0072B2", "#000000"


@dataclass(frozen=True, slots=True)
class StepPicture:
    """What is drawn of one step (or window)."""

    step: int
    objective: str
    imbalance: tuple[float, float, float]
    """Before, after and lower bound, as multiples of an even spread of the work."""
    loads_before: NDArray[np.float64]
    """float64[ranks, rounds], in the unit of the costs."""
    loads_after: NDArray[np.float64]
    padding: float
    """Share of all places in bins."""
    bytes_sent: int | None
    """By the rank whose report it is; None where that is not known."""

    @classmethod
    def of(cls, report: BalanceReport | PlanReport, step: int = 0) -> StepPicture:
        plan = report.plan if isinstance(report, BalanceReport) else report
        tokens = float(plan.tokens_after.sum())
        return cls(
            step,
            plan.objective,
            imbalance(plan),
            plan.costs_after if plan.costs_before is None else plan.costs_before,
            plan.costs_after,
            plan.padding / (plan.padding + tokens),
            report.bytes_sent if isinstance(report, BalanceReport) else None,
        )


Drawn = StepPicture | BalanceReport | PlanReport


def read_log(path: str | Path) -> list[StepPicture]:
    """The balanced steps of a log of ``graphs.pretrain``; of a step that was done twice, the later one.

    Raises:
        ValueError: the file has no step with a balance report.
    """
    found: dict[int, StepPicture] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("event") == "step" and "loads_after" in event and event.get("way") != "as sampled":
                found[event["step"]] = _logged_step(event)
    if not found:
        raise ValueError(f"{path} has no step with a balance report; accepted: what graphs.pretrain --log-file wrote")
    return [found[step] for step in sorted(found)]


def _logged_step(event: dict[str, Any]) -> StepPicture:
    before, after, bound = event["imbalance"]
    return StepPicture(
        event["step"],
        event["objective"],
        (before, after, bound),
        np.array(event["loads_before"]),
        np.array(event["loads_after"]),
        event["padding"] / (event["padding"] + event["tokens"]),
        event["bytes_sent"],
    )


def draw_loads(drawn: Drawn, title: str = "") -> Any:
    """Each rank's work before and after, round by round; over each round its slowest rank, for which all wait.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: without matplotlib.
    """
    step = _picture(drawn, 0)
    ranks, rounds = step.loads_after.shape
    mean = float(step.loads_after.mean()) or 1.0
    figure = _figure(max(6.0, 2.0 + 0.09 * ranks * rounds * 2), 3.6)
    axes = figure.subplots(1, 2, sharey=True)
    top = 1.2 * max(step.loads_before.max(), step.loads_after.max()) / mean
    sides = ((axes[0], step.loads_before, "as sampled", BEFORE), (axes[1], step.loads_after, "balanced", AFTER))
    for axis, loads, name, colour in sides:
        for number in range(rounds):
            places = number + (np.arange(ranks) - (ranks - 1) / 2) * 0.84 / ranks
            axis.bar(places, loads[:, number] / mean, width=0.78 / ranks, color=colour)
        slowest = loads.max(axis=0) / mean
        axis.hlines(slowest, np.arange(rounds) - 0.44, np.arange(rounds) + 0.44, color=BOUND, label="slowest rank")
        axis.axhline(1.0, color="grey", linestyle=":", linewidth=1)
        axis.set_title(f"{name}: {slowest.mean():.2f} × the mean", fontsize=10)
        axis.set(xlabel=f"round (one bar a rank, {ranks} ranks)", xticks=range(rounds), ylim=(0, top))
    axes[0].set_ylabel("work / mean")
    axes[1].legend(frameon=False, loc="upper right")
    figure.suptitle(title or f"step {step.step}", fontsize=10)
    return figure


def draw_steps(drawn: Sequence[Drawn], title: str = "") -> Any:
    """Over the steps: imbalance before, after and the bound below which no plan is; padding; bytes that moved.

    Returns:
        A matplotlib Figure.

    Raises:
        ValueError: there is no step.
        ImportError: without matplotlib.
    """
    if not drawn:
        raise ValueError("there is no step to draw; accepted: at least one report")
    steps = [_picture(one, number) for number, one in enumerate(drawn)]
    sent = [step.bytes_sent for step in steps if step.bytes_sent is not None]
    figure = _figure(10.0 if sent else 7.5, 3.4)
    panels = figure.subplots(1, 3 if sent else 2, width_ratios=(2, 1, 1) if sent else (2, 1))
    numbers = [step.step for step in steps]
    for place, (name, colour, style) in enumerate(
        (("as sampled", BEFORE, "o-"), ("balanced", AFTER, "o-"), ("bound", BOUND, ":"))
    ):
        values = [100 * (step.imbalance[place] - 1) for step in steps]
        panels[0].plot(numbers, values, style, color=colour, label=name, markersize=4)
    panels[0].set(ylabel=f"{steps[0].objective}, % above even", title="work of the slowest ranks")
    panels[0].legend(frameon=False)
    panels[1].plot(numbers, [100 * step.padding for step in steps], "o-", color=AFTER, markersize=4)
    panels[1].set(ylabel="% of all places", title="padding")
    if sent:
        panels[2].bar(numbers, [size / 2**20 for size in sent], color=AFTER)
        panels[2].set(ylabel="MiB a step", title="sent by this rank")
    for panel in panels:
        panel.set(xlabel="step", ylim=(0, None))
        panel.locator_params(axis="x", integer=True)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def save(figure: Any, *paths: str | Path) -> None:
    """Write a figure to each path; its ending says whether as PNG or SVG.

    Raises:
        ValueError: another ending.
    """
    for path in paths:
        if Path(path).suffix not in (".png", ".svg"):
            raise ValueError(f"{path} ends in {Path(path).suffix!r}; accepted: .png or .svg")
    for path in paths:
        figure.savefig(path, dpi=120)


def _picture(drawn: Drawn, number: int) -> StepPicture:
    return drawn if isinstance(drawn, StepPicture) else StepPicture.of(drawn, number)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'hp-nodes[demo]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m graphs.pictures", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("log", type=Path, help="what graphs.pretrain --log-file wrote")
    parser.add_argument("picture", type=Path, nargs="+", help="FILE.png or FILE.svg, or both")
    parser.add_argument("--step", type=int, help="draw each rank's work in this step instead of all steps")
    options = parser.parse_args(arguments)
    try:
        steps = read_log(options.log)
        chosen = [step for step in steps if step.step == options.step]
        if options.step is not None and not chosen:
            raise ValueError(f"--step is {options.step}; the log has {steps[0].step} to {steps[-1].step}")
        save(draw_loads(chosen[0]) if chosen else draw_steps(steps), *options.picture)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
