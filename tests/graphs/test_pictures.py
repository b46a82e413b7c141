"""Pictures of reports: drawn from values, from reports and from a training log, as PNG and SVG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from graphs.pictures import StepPicture, draw_loads, draw_steps, main, read_log, save
from hp_nodes.planning import PackingProblem, plan_packing
from hp_nodes.types import BalanceReport, PlanReport

COSTS = np.array([9.0, 9.0, 8.0, 8.0, 1.0, 5.0])


def plan_report() -> PlanReport:
    problem = PackingProblem(
        np.full(6, 5),
        COSTS,
        np.array([0, 1, 0, 1, 2, 3], np.int32),
        data_parallel_size=2,
        num_rounds=2,
        local_batch_size=1,
        seq_len=20,
    )
    return plan_packing(problem).report


def step_event(step: int, **changes: Any) -> dict[str, Any]:
    event = {
        "event": "step",
        "step": step,
        "tokens": 90,
        "objective": "lockstep",
        "imbalance": [1.5, 1.1, 1.0],
        "loads_before": [[3.0, 1.0], [1.0, 1.0]],
        "loads_after": [[2.0, 1.0], [2.0, 1.0]],
        "padding": 10,
        "bytes_sent": 2**20,
    }
    return {**event, **changes}


def write_log(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def bar_heights(axes: Any) -> np.ndarray:
    return np.array([bar.get_height() for bar in axes.patches])


def test_loads_are_drawn_in_units_of_their_mean() -> None:
    report = plan_report()
    before, after = draw_loads(report).axes
    assert report.costs_before is not None
    mean = report.costs_after.mean()
    np.testing.assert_allclose(bar_heights(before), report.costs_before.T.ravel() / mean)
    np.testing.assert_allclose(bar_heights(after), report.costs_after.T.ravel() / mean)


def test_steps_show_before_after_and_the_bound() -> None:
    report = BalanceReport(plan_report(), bytes_sent=3 * 2**20)
    lines, padding, sent = draw_steps([report, report]).axes
    values = {line.get_label(): line.get_ydata() for line in lines.lines}
    plan = report.plan
    even = plan.work / 2
    assert plan.before is not None
    for name, value in (("as sampled", plan.before), ("balanced", plan.after), ("bound", plan.lower_bound)):
        np.testing.assert_allclose(values[name], [100 * (value / even - 1)] * 2)
    np.testing.assert_allclose(padding.lines[0].get_ydata(), [100 * plan.padding / 80] * 2)
    np.testing.assert_allclose(bar_heights(sent), [3, 3])


def test_a_plan_alone_has_no_bytes() -> None:
    assert len(draw_steps([plan_report()]).axes) == 2


def test_the_log_of_a_run_keeps_the_later_of_repeated_steps(tmp_path: Path) -> None:
    """A resumed run does some steps twice; steps as sampled belong to a comparison."""
    log = write_log(
        tmp_path / "log.jsonl",
        {"event": "start"},
        step_event(2, padding=0),
        step_event(1),
        step_event(2, padding=30, tokens=90),
        step_event(3, way="as sampled"),
        step_event(4) | {"loads_after": [[1.0], [1.0]], "loads_before": [[1.5], [0.5]]},
    )
    with open(log, "a") as file:
        file.write('{"event": "step", "step": 5, "lo')  # killed while writing
    steps = read_log(log)
    assert [step.step for step in steps] == [1, 2, 4]
    assert steps[1].padding == 0.25
    assert isinstance(steps[0], StepPicture) and steps[0].bytes_sent == 2**20


@pytest.mark.parametrize("step", [[], ["--step", "1"]])
def test_the_program_writes_png_and_svg(step: list[str], tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", step_event(1), step_event(2))
    assert main([str(log), str(tmp_path / "a.png"), str(tmp_path / "a.svg"), *step]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--step", "9"], "the log has 1 to 1"), (["b.pdf"], "accepted: .png or .svg")]
)
def test_mistakes_are_told(arguments: list[str], told: str, tmp_path: Path, capsys: Any) -> None:
    log = write_log(tmp_path / "log.jsonl", step_event(1))
    assert main([str(log), str(tmp_path / "a.png"), *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_nothing_to_draw_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step with a balance report"):
        read_log(write_log(tmp_path / "log.jsonl", {"event": "start"}))
    with pytest.raises(ValueError, match="no step to draw"):
        draw_steps([])


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'\.pdf'; accepted: \.png or \.svg"):
        save(draw_loads(plan_report()), tmp_path / "a.pdf")
