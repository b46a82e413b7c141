from __future__ import annotations

from tests.benchmarks.record import run_alone
from tests.benchmarks.side_by_side import measure

if __name__ == "__main__":
    run_alone(measure)
