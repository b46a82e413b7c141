"""The driver of the benchmarks: one after another, each in a process of its own, and a record of each.

    python -m tests.benchmarks [NAME ...] [--quick] [--out build/bench] [--list]

Writes ``NAME.json`` (machine, versions, date, rows), ``NAME.md`` (a table) and ``NAME.png`` (ratios next to what is
wanted), and prints the tables. One that fails, or offers no rows, is named, and the others still run; the exit status
is then 1. A row that misses what is wanted is no failure: it is in the table, and named again at the end.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import record
from tests.benchmarks.picture import draw

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def names() -> list[str]:
    """The benchmarks: the programs of this directory, and its packages that can be run."""
    programs = [path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_") and is_program(path)]
    return sorted([*programs, *(path.parent.name for path in HERE.glob("*/__main__.py"))])


def is_program(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(part, ast.If) and "__name__" in ast.unparse(part.test) for part in tree.body)


def record_here(name: str, destination: Path, arguments: list[str]) -> int:
    """In a process of its own: measure, and write the rows. 0, or 1 where there is none."""
    module = importlib.import_module(f"tests.benchmarks.{name}")
    measure = getattr(module, "measure", None)
    if measure is None:
        print(f"{name} offers no rows: it has no measure(arguments)", file=sys.stderr)
        return 1
    facts = record.machine(getattr(module, "COMPARED_WITH", ()))
    start = time.monotonic()
    rows = measure(arguments)
    if not rows:
        print(f"{name} offers no rows: measure({arguments}) returned {rows!r}", file=sys.stderr)
        return 1
    text = {
        "name": name,
        "machine": facts,
        "arguments": arguments,
        "seconds": round(time.monotonic() - start, 1),
        "rows": [row.to_plain() for row in rows],
    }
    destination.write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def run(name: str, out: Path, arguments: list[str]) -> list[record.Row] | None:
    """Measure one benchmark and write its record; None when it failed."""
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory, "rows.json")
        command = [sys.executable, "-m", "tests.benchmarks", name, "--record", str(written), *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status:
            print(f"{name} failed: exit status {status}\n", flush=True)
            return None
        text: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    rows = [record.Row.from_plain(row) for row in text["rows"]]
    table = record.markdown(rows, text["machine"])
    (out / f"{name}.json").write_text(json.dumps(text, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(f"# {name}\n\n{table}", encoding="utf-8")
    print(f"{table}\n{name}: {text['seconds']} s; {out / name}.json, .md, .png\n", flush=True)
    try:
        draw(rows, out / f"{name}.png", name)
    except ModuleNotFoundError as missing:
        print(f"no picture: {missing}; pip install 'hp-nodes[demo]'", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Further options, behind the names, are the benchmark's own.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="about a minute each: to see that it runs, not to quote")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--list", action="store_true", help="print their names, and end")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    options, further = parser.parse_known_args(arguments)
    known = names()
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    passed_on = [*(["--quick"] if options.quick else []), *further]
    if options.record is not None:
        return record_here(options.names[0], options.record, passed_on)
    options.out.mkdir(parents=True, exist_ok=True)
    results = {name: run(name, options.out, passed_on) for name in options.names or known}
    for name, rows in results.items():
        for row in rows or ():
            if row.met is False:
                print(f"missed: {name}: {row.measured}: {record.number(row.judged)}, wanted {row.wanted}")
    failed = [name for name, rows in results.items() if rows is None]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
