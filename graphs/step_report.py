"""What a training run tells: a progress line on the terminal and, with ``--log-file FILE``, one JSON object a line.

Only rank 0 writes. The progress line is a bar where tqdm is installed and standard error is a terminal, else plain
lines, at most one a second. Numbers in the log keep all their digits, so equal losses are equal texts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from graphs.optimizer_step import StepResult
from hp_nodes.types import PlanReport

__all__ = ["RunReport", "imbalance"]


def imbalance(plan: PlanReport) -> tuple[float, float, float]:
    """Before, after and lower bound of the objective, as multiples of what an even spread (1.0) of the work would be.

    Even is the work that any plan must carry, divided by the ranks. Lockstep adds up the slowest rank of each round and
    makespan takes the slowest rank's total; with everything even both are that number.
    """
    even = plan.work / len(plan.costs_after)
    if not even:
        return 1.0, 1.0, 1.0
    before = plan.after if plan.before is None else plan.before
    return before / even, plan.after / even, plan.lower_bound / even


class RunReport:
    """Progress line and log of one run; a context manager.

    Args:
        total_steps: of the whole run, for the time left.
        log: appended to, so a resumed run continues the file of the run it resumes.
        enabled: False on all ranks but the first; then nothing is written.
    """

    def __init__(self, total_steps: int, log: Path | None, *, enabled: bool = True) -> None:
        self._total = total_steps
        self._enabled = enabled
        self._log: TextIO | None = None
        self._bar: Any = progress_bar(total_steps) if enabled else None
        self._said = float("-inf")
        self._usual_seconds: float | None = None
        if enabled and log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> RunReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._log is not None:
            self._log.close()

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def event(self, name: str, **values: Any) -> None:
        """A line of the log."""
        if self._log is not None:
            self._log.write(json.dumps({"event": name, **values}, default=str) + "\n")

    def step(self, step: int, result: StepResult, **values: Any) -> None:
        """Show and log a step; ``step`` counts from 1."""
        shown = summary(result)
        self._usual_seconds = moving_mean(self._usual_seconds, result.seconds)
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(shown)
        elif self._enabled and (time.monotonic() - self._said >= 1.0 or step == self._total):
            self._said = time.monotonic()
            left = (self._total - step) * self._usual_seconds
            self.say(f"step {step}/{self._total}  {shown}  {left:.0f} s left")
        self.event("step", step=step, **logged(result), **values)


def moving_mean(mean: float | None, value: float) -> float:
    return value if mean is None else 0.8 * mean + 0.2 * value


def summary(result: StepResult) -> str:
    """The step in one line: what it learned, how fast, how even, and what waiting it cost."""
    parts = [f"loss {result.loss:.4f}", f"{result.tokens / result.seconds:,.0f} tokens/s"]
    if result.report is not None:
        parts.append("imbalance {:.2f} → {:.2f} → {:.2f}".format(*imbalance(result.report.plan)))
    parts.append(f"waited {result.waiting_share:.0%}")
    return "  ".join(parts)


def logged(result: StepResult) -> dict[str, Any]:
    """The step as plain values. Loads are in the unit of the cost model, ``[rank][round]``."""
    values: dict[str, Any] = {
        "loss": result.loss,
        "tokens": result.tokens,
        "label_tokens": result.label_tokens,
        "gradient_norm": result.gradient_norm,
        "seconds": result.seconds,
        "data_seconds": result.data_seconds,
        "waited": list(result.waited),
        "waiting_share": result.waiting_share,
    }
    if result.report is not None:
        plan = result.report.plan
        before, after, bound = imbalance(plan)
        loads_before = plan.costs_after if plan.costs_before is None else plan.costs_before
        values |= {
            "imbalance": [before, after, bound],
            "objective": plan.objective,
            "objective_before": plan.before,
            "objective_after": plan.after,
            "loads_before": loads_before.tolist(),
            "loads_after": plan.costs_after.tolist(),
            "padding": plan.padding,
            "planning_seconds": plan.seconds,
            "bytes_sent": result.report.bytes_sent,
        }
    return values


def progress_bar(total: int) -> Any:
    """tqdm's bar where it can be shown, else None."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=total, unit="step", dynamic_ncols=True)
