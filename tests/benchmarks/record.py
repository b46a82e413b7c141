"""What a benchmark says: rows of figures next to their baselines, on which machine, as JSON, Markdown and a picture.

A benchmark is a module of this directory that offers ``measure(arguments: list[str]) -> list[Row]``, where arguments
are what follows its name on the command line (``["--quick"]``), and is runnable by :func:`run_alone`::

    if __name__ == "__main__":
        run_alone(measure)

It may name the packages it compares with: ``COMPARED_WITH = ("grain",)``; their versions go into the record.

Every figure stands beside a baseline that ran in the same process and minute: :func:`interleaved` runs the ways in
turn, in alternating order, and :meth:`Row.of` takes the median of the ratios of the repeats that ran side by side, and
their lowest and highest. So a machine that gets slower for a while moves both.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["Row", "interleaved", "machine", "markdown", "run_alone"]

WANTED = re.compile(r"^(≤|≥) ([0-9][0-9_,]*\.?[0-9]*(?:e-?[0-9]+)?)(?: (.+))?$")
TIMES = "times"
COLUMNS = ("what", "value", "baseline", "ratio", "lowest to highest", "wanted", "met", "command")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    ``wanted`` is ``"≤ 1.3 times"`` or ``"≤ 1.3"`` for the ratio, ``"≤ 20 ms"`` (in the row's own unit) for the value;
    a bare number is about the value where there is no ratio. None: nothing is promised.

    Raises:
        ValueError: ``wanted`` is none of these.
    """

    measured: str
    value: float
    unit: str
    baseline: str | None = None
    """What the value is compared with, by name; None where it stands alone."""
    baseline_value: float | None = None
    """In the same unit."""
    ratio: float | None = None
    """Value / baseline's value: the median over repeats that ran side by side."""
    spread: tuple[float, float] | None = None
    """Lowest and highest of those ratios; of the values where there is no baseline."""
    wanted: str | None = None
    command: str = ""
    """Shows this row, from the root of the checkout."""

    def __post_init__(self) -> None:
        if self.wanted is None:
            return
        found = WANTED.match(self.wanted)
        about = found and found[3]
        if not found or about not in (None, TIMES, self.unit) or (about == TIMES and self.ratio is None):
            raise ValueError(
                f"wanted is {self.wanted!r} of {self.measured!r}; accepted: ≤ or ≥, a space, a number, and behind it "
                f"nothing, 'times' (of a row with a ratio) or the row's unit, {self.unit!r}"
            )

    @classmethod
    def of(
        cls,
        measured: str,
        unit: str,
        values: Sequence[float],
        *,
        baseline: str | None = None,
        baseline_values: Sequence[float] = (),
        wanted: str | None = None,
        command: str = "",
    ) -> Row:
        """The row of interleaved repeats: ``values[i]`` and ``baseline_values[i]`` ran side by side."""
        if baseline is None:
            spread = (min(values), max(values)) if len(values) > 1 else None
            return cls(measured, statistics.median(values), unit, spread=spread, wanted=wanted, command=command)
        ratios = [own / other if other else float("inf") for own, other in zip(values, baseline_values, strict=True)]
        return cls(
            measured,
            statistics.median(values),
            unit,
            baseline,
            statistics.median(baseline_values),
            statistics.median(ratios),
            (min(ratios), max(ratios)) if len(ratios) > 1 else None,
            wanted,
            command,
        )

    @property
    def judged(self) -> float:
        """The number that ``wanted`` is about: the ratio or the value."""
        about = self.limit[1]
        return self.value if self.ratio is None or about == self.unit else self.ratio

    @property
    def limit(self) -> tuple[float | None, str | None]:
        """The wanted number, and what follows it."""
        found = WANTED.match(self.wanted) if self.wanted is not None else None
        return (float(found[2].replace(",", "")), found[3]) if found else (None, None)

    @property
    def met(self) -> bool | None:
        """Whether what is wanted was measured; None where nothing is promised."""
        limit = self.limit[0]
        if self.wanted is None or limit is None:
            return None
        return self.judged <= limit if self.wanted.startswith("≤") else self.judged >= limit

    def to_plain(self) -> dict[str, Any]:
        """For JSON: the fields, and ``met``."""
        return asdict(self) | {"met": self.met}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Row:
        fields = {name: value for name, value in plain.items() if name != "met"}
        spread = fields.get("spread")
        return cls(**fields | {"spread": None if spread is None else (float(spread[0]), float(spread[1]))})


def interleaved(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Each way's figure of each repeat; within a repeat the ways run in turn, in the next one in the opposite order."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways)[:: -1 if repeat % 2 else 1]:
            figures[name].append(ways[name]())
    return figures


def machine(compared_with: Iterable[str] = ()) -> dict[str, Any]:
    """Where and when: processor, cores, memory and load of this machine, versions, date."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "torch", "torchdata", *compared_with):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def number(value: float) -> str:
    """Three digits that count; large ones whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(rows: Sequence[Row], machine_facts: Mapping[str, Any] | None = None) -> str:
    """The table, below a line on the machine where that is given."""
    lines = []
    if machine_facts is not None:
        versions = ", ".join(f"{name} {number}" for name, number in machine_facts["versions"].items())
        lines += [
            f"{machine_facts['processor']}, {machine_facts['cores']} cores, {machine_facts['memory_gib']} GiB, "
            f"load {machine_facts['load_before']} before; {versions}; {machine_facts['date']}",
            "",
        ]
    lines += [table_line(COLUMNS), table_line(["---"] * len(COLUMNS))]
    return "\n".join([*lines, *(table_line(cells(row)) for row in rows)]) + "\n"


def cells(row: Row) -> list[str]:
    baseline = "" if row.baseline is None else row.baseline
    if row.baseline_value is not None:
        baseline += f": {number(row.baseline_value)} {row.unit}"
    spread = "" if row.spread is None else f"{number(row.spread[0])} to {number(row.spread[1])}"
    met = {None: "", True: "yes", False: "**no**"}[row.met]
    ratio = "" if row.ratio is None else number(row.ratio)
    command = f"`{row.command}`" if row.command else ""
    return [row.measured, f"{number(row.value)} {row.unit}", baseline, ratio, spread, row.wanted or "", met, command]


def table_line(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def run_alone(measure: Callable[[list[str]], list[Row]]) -> None:
    """What a benchmark does when it is run by itself: measure, and print the table."""
    print(markdown(measure(sys.argv[1:])))
