"""With numba or without it, compiled or not: the same plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_nodes.planning import PackingProblem, plan_packing
from tests.benchmarks.instances import SHAPES, problem
from tests.planning.uncompiled import uncompiled
from tests.planning.windows import windows

OBJECTIVES = ("lockstep", "makespan", "balance")
law = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@law
@given(windows(most_ranks=24), st.sampled_from(OBJECTIVES))
def test_compiled_equals_uncompiled(window: PackingProblem, objective: str) -> None:
    pytest.importorskip("numba")
    compiled = _plan(window, objective)
    with uncompiled():
        assert _plan(window, objective) == compiled


def _plan(window: PackingProblem, objective: str) -> list[int] | str:
    try:
        return plan_packing(window, objective).bins.tolist()
    except ValueError as error:  # full rows and budgets, without a reference
        return str(error)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_equals_uncompiled_on_real_lengths(shape: str, slots: int) -> None:
    pytest.importorskip("numba")
    window = problem("python", shape, 0.9, 64, 4, slots, cost="square")
    compiled = plan_packing(window).bins.tolist()
    with uncompiled():
        assert plan_packing(window).bins.tolist() == compiled


def test_a_numba_that_cannot_be_imported_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.0 or less')\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from hp_nodes.planning import PackingProblem, plan_packing\n"
        "shape = dict(data_parallel_size=2, num_rounds=1, local_batch_size=1, seq_len=10)\n"
        "print(sorted(plan_packing(PackingProblem([8, 8], [1.0, 2.0], **shape)).bins.tolist()))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == "[0, 1]\n", run.stderr
