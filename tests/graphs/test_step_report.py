"""What a run tells: numbers that mean what they say, a log of complete lines, and no need for tqdm."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphs.optimizer_step import StepResult
from graphs.step_report import RunReport, imbalance
from hp_nodes.planning import PackingProblem, plan_packing
from hp_nodes.types import BalanceReport, PlanReport

RESULT = StepResult(
    loss=1.25,
    tokens=3000,
    label_tokens=2900,
    gradient_norm=0.5,
    seconds=2.0,
    data_seconds=0.1,
    waited=(0.2, 0.6),
    stop_requested=False,
    report=None,
)


def plan_of(costs: list[float], reference: list[int], objective: str = "lockstep") -> PlanReport:
    problem = PackingProblem(
        np.full(len(costs), 5), costs, reference, data_parallel_size=2, num_rounds=1, local_batch_size=1, seq_len=10
    )
    return plan_packing(problem, objective).report


@pytest.mark.parametrize("objective", ["lockstep", "makespan"])
def test_imbalance_is_a_multiple_of_the_even_share(objective: str) -> None:
    assert imbalance(plan_of([9, 9, 1, 1], [0, 0, 1, 1], objective)) == pytest.approx((1.8, 1.0, 1.0))


def test_a_step_is_one_line_on_the_terminal_and_one_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replace(RESULT, report=BalanceReport(plan_of([9, 9, 1, 1], [0, 0, 1, 1])))
    with RunReport(10, tmp_path / "new" / "log.jsonl") as report:
        report.step(4, result, way="balanced")
        report.event("end")
    (line,) = capsys.readouterr().err.splitlines()
    for part in (
        "step 4/10",
        "loss 1.2500",
        "1,500 tokens/s",
        "imbalance 1.80 → 1.00 → 1.00",
        "waited 20%",
        "12 s left",
    ):
        assert part in line
    step, end = map(json.loads, (tmp_path / "new" / "log.jsonl").read_text().splitlines())
    assert end == {"event": "end"}
    assert (step["event"], step["step"], step["way"], step["loss"]) == ("step", 4, "balanced", 1.25)
    assert step["waited"] == [0.2, 0.6]
    assert step["waiting_share"] == pytest.approx(0.2)
    assert step["loads_before"] == [[18.0], [2.0]]
    assert step["loads_after"] == [[10.0], [10.0]]


def test_a_resumed_run_appends_and_every_digit_is_kept(tmp_path: Path) -> None:
    for loss in (1 / 3, 0.1 + 0.2):
        with RunReport(10, tmp_path / "log.jsonl") as report:
            report.step(1, replace(RESULT, loss=loss))
    assert [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [
        1 / 3,
        0.1 + 0.2,
    ]


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunReport(10, tmp_path / "log.jsonl", enabled=False) as report:
        report.say("hello")
        report.step(1, RESULT)
        report.event("end")
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_on_a_terminal_there_is_a_bar_and_without_tqdm_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_tqdm: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if has_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with RunReport(3, None) as report:
        report.step(3, RESULT)
        report.say("done")
    shown = capsys.readouterr().err
    assert ("3/3 [" in shown) == has_tqdm
    assert "loss 1.2500" in shown
    assert "done" in shown
