"""With numba or without it, compiled or not: the same plan."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hp_nodes.planning import PackingProblem, compiled, plan_packing
from tests.benchmarks.instances import SHAPES, problem
from tests.planning.uncompiled import uncompiled
from tests.planning.windows import windows

OBJECTIVES = ("lockstep", "makespan", "balance")
law = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@law
@given(windows(most_ranks=24), st.sampled_from(OBJECTIVES))
def test_compiled_equals_uncompiled(window: PackingProblem, objective: str) -> None:
    pytest.importorskip("numba")
    found = _plan(window, objective)
    with uncompiled():
        assert _plan(window, objective) == found


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
    found = plan_packing(window).bins.tolist()
    with uncompiled():
        assert plan_packing(window).bins.tolist() == found


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


def test_where_compiled_code_cannot_be_kept_it_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")

    def njit(**options: Any) -> Callable[[Any], Any]:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return cast(Callable[[Any], Any], numba.njit(**options))

    window = problem("azure", "wide", 0.9, 16, 2)
    with uncompiled():
        plain = plan_packing(window).bins.tolist()
    monkeypatch.setattr(compiled, "_compiler", lambda: njit)
    compiled.kernel.cache_clear()
    assert plan_packing(window).bins.tolist() == plain
    compiled.kernel.cache_clear()
