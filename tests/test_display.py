"""What windows, plans, reports and micro-batches look like in a notebook."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from hp_nodes import MicroBatch, Window, peek
from hp_nodes.transport import run_ranks
from tests.scenes import Scene

ROOT = Path(__file__).parent.parent


def shown(after: str, **changes: Any) -> Any:
    return run_ranks({"dp": 2}, lambda mesh: peek(Scene(depth=0, **changes).graph(mesh), after=after))[0]


def parsed(html: str) -> ElementTree.Element:
    """As a browser would read it, only stricter."""
    return ElementTree.fromstring(f"<html>{html.replace('<br>', '<br/>')}</html>")


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("after", ["WindowSampler", "SampleReader", "MetadataDeriver", "Planner", "Router", "Packer"])
def test_a_window_is_shown_behind_every_node(after: str) -> None:
    window = shown(after)
    page = parsed(window._repr_html_())
    text = "".join(page.itertext())
    assert f"epoch 0, step 0, round 0 to {window.num_rounds - 1}" in text
    assert f"{len(window.keys)} samples of this rank" in text


def test_a_planned_window_shows_its_samples_in_their_bins() -> None:
    window: Window = shown("Planner")
    assert window.assignment is not None
    bins, *loads = parsed(window._repr_html_()).iter(f"{SVG}svg")
    tokens = [int(title.text.split()[0]) for title in bins.iter(f"{SVG}title")]  # type: ignore[union-attr]
    assert tokens == window.assignment.tokens.tolist()
    widths = [float(rect.get("width", 0)) for rect in bins.iter(f"{SVG}rect") if len(rect)]
    assert max(widths) == widths[tokens.index(max(tokens))]
    assert len(loads) == 2  # before and after


def test_a_plan_shows_the_work_of_each_rank_in_each_round() -> None:
    plan = shown("Planner").plan
    before, after = parsed(plan._repr_html_()).iter(f"{SVG}svg")
    for picture, costs in ((before, plan.report.costs_before), (after, plan.report.costs_after)):
        says = [title.text for title in picture.iter(f"{SVG}title")]
        assert len(says) == costs.size
        assert f"rank 1, round 0: {costs[1, 0]:.5g}" in says
    text = plan.report._repr_html_()
    assert f"{plan.report.after:.5g}" in text and f"{plan.report.lower_bound:.5g}" in text


def test_a_report_says_what_moved() -> None:
    report = shown("Router").report
    assert f"this rank sent {report.samples_sent} samples ({report.bytes_sent} B)" in report._repr_html_()


def test_a_micro_batch_shows_its_place_and_fields() -> None:
    batch: MicroBatch = shown("StepCheckpointer", collate_fn=lambda bins: {"<ids>": bins[0][0]})
    html = batch._repr_html_()
    text = "".join(parsed(html).itertext())
    assert "epoch 0, step 0, round 0" in text
    assert "<ids>" in text and "ndarray int64" in text
    assert batch.positions is not None and str(batch.positions[0]) in text


def test_values_are_imported_without_what_draws_them() -> None:
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('types_alone', 'hp_nodes/types.py')\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['types_alone'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print([name for name in ('torch', 'matplotlib', 'hp_nodes.display') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("after", ["WindowSampler", "Planner", "Packer", "StepCheckpointer"])
def test_a_terminal_gets_one_line(after: str) -> None:
    """IPython prints no records and no arrays."""
    told: list[str] = []

    class Printer:
        text = staticmethod(told.append)

    shown(after)._repr_pretty_(Printer(), False)
    assert len(told) == 1
    assert "epoch 0, step 0" in told[0] and "array" not in told[0] and len(told[0]) < 200
