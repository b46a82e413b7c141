"""However a program ends, with a loader that was never closed: it ends within seconds, with its own exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The exit codes, and the most seconds it may take; a thread that is stuck in a read is given up
# after twelve. One at a time they took 1 to 5 s on two busy cores; a hang would be of minutes.
ENDS: dict[str, tuple[list[int], float]] = {
    "never_closed": ([0, 0], 30),
    "broken_off": ([0, 0], 30),
    "in_a_cycle": ([0, 0], 30),
    "raising": ([1, 1], 30),
    "one_rank_raises": ([1, 1], 30),
    "exiting": ([7, 7], 30),
    "group_destroyed_before": ([0, 0], 30),
    "group_destroyed_after": ([0, 0], 30),
    "group_destroyed_in_the_middle": ([0, 0], 30),
    "unequal": ([0, 1], 40),
    "stuck_dataset": ([0, 0], 40),
    "interrupted": ([-2, -2], 30),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, Any]:
    """All programs, some at a time, forked from one process that imports torch once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.programs", *ENDS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["stderr"] = done.stderr
    return found


@pytest.mark.parametrize("name", ENDS)
def test_it_ends(programs: dict[str, Any], name: str) -> None:
    codes, seconds = ENDS[name]
    ended = programs[name]["codes"]
    if name == "interrupted":  # whoever is interrupted later may hear of the other first
        assert -2 in ended and set(ended) <= {-2, 1}, programs["stderr"]
    else:
        assert ended == codes, programs["stderr"]
    assert programs[name]["seconds"] < seconds
    assert programs[name]["left"] == 0


def test_nothing_else_is_said_at_the_end(programs: dict[str, Any]) -> None:
    """No exception of the data plane's own, in a thread, a finalizer or at exit."""
    for text in ("Exception ignored", "Exception in thread", "Fatal Python error", "terminate called"):
        assert text not in programs["stderr"]
