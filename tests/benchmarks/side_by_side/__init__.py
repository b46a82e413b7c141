"""hp-nodes next to what a user would pick instead, on the same real text, in the same two processes over Gloo.

    python -m tests.benchmarks.side_by_side [--quick] [--only COLUMN ...] [--train] [--repeats 5]

The ways and how each is set up: :mod:`.ways`; the text: :mod:`.corpus`; what is measured: :mod:`.columns`. A way whose
package is missing is left out, and it says how to install it.
"""

from __future__ import annotations

import argparse

from tests.benchmarks.record import Row

COMPARED_WITH = ("grain", "torchdata")


def measure(arguments: list[str]) -> list[Row]:
    from tests.benchmarks.side_by_side.columns import COLUMNS, Options, available, say
    from tests.benchmarks.side_by_side.ranks import RankError
    from tests.benchmarks.side_by_side.training import train
    from tests.benchmarks.side_by_side.ways import WAYS

    columns = {**COLUMNS, "train": train}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=columns, help="default: all but train")
    parser.add_argument("--train", action="store_true", help="step times of a real model: on a quiet machine only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a repeat, each of 32 rows of 8192 tokens")
    chosen = parser.parse_args(arguments)
    options = Options(
        available(list(WAYS)), 1 if chosen.quick else chosen.repeats, 5 if chosen.quick else chosen.steps, chosen.quick
    )
    rows: list[Row] = []
    failed = []
    for name in chosen.only or [*COLUMNS, *(["train"] if chosen.train else [])]:
        say(name)
        try:
            rows += columns[name](options)
        except RankError as error:
            say(f"{name} failed: {error}")
            failed.append(name)
    if failed and not rows:
        raise SystemExit(f"no column could be measured: {', '.join(failed)}")
    return rows
