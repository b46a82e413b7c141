"""What a benchmark's record says is what was measured, and whether what is wanted was met."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as driver
from tests.benchmarks.record import Row, interleaved, machine, markdown

OURS, THEIRS = [2.0, 3.0, 40.0], [1.0, 2.0, 10.0]


def row(wanted: str | None = None) -> Row:
    return Row.of("window", "ms", OURS, baseline="by hand", baseline_values=THEIRS, wanted=wanted, command="run me")


def test_a_ratio_is_the_median_of_what_ran_side_by_side() -> None:
    made = row()
    assert (made.value, made.baseline_value) == (3.0, 2.0)
    assert made.ratio == statistics.median([2.0, 1.5, 4.0])
    assert made.spread == (1.5, 4.0)


@pytest.mark.parametrize(
    ("wanted", "met"),
    [
        ("≤ 2", True),
        ("≤ 1.99 times", False),
        ("≥ 2 times", True),
        ("≥ 2.1", False),
        ("≤ 3 ms", True),
        ("≥ 4 ms", False),
    ],
)
def test_what_is_wanted_is_of_the_ratio_or_in_the_rows_unit(wanted: str, met: bool) -> None:
    assert row(wanted).met is met


def test_a_bare_number_is_of_the_value_where_nothing_is_compared() -> None:
    assert Row("slope", 1.04, "", wanted="≤ 1.05").met
    assert Row("slope", 1.04, "").met is None


@pytest.mark.parametrize("wanted", ["fast", "< 3", "≤ 3 s", "≤"])
def test_what_cannot_be_judged_is_refused(wanted: str) -> None:
    with pytest.raises(ValueError, match="accepted: ≤ or ≥"):
        row(wanted)
    with pytest.raises(ValueError, match="accepted: ≤ or ≥"):
        Row("alone", 1.0, "ms", wanted="≤ 2 times")


def test_a_row_is_the_same_out_of_json() -> None:
    made = row("≤ 2")
    plain = json.loads(json.dumps(made.to_plain()))
    assert plain["met"] is True
    assert Row.from_plain(plain) == made


def test_ways_take_turns_in_alternating_order() -> None:
    order: list[str] = []

    def way(name: str) -> float:
        order.append(name)
        return float(len(order))

    figures = interleaved({"a": lambda: way("a"), "b": lambda: way("b")}, 3)
    assert "".join(order) == "abbaab"
    assert figures == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_the_table_says_what_was_missed_and_with_what() -> None:
    text = markdown([row("≤ 1 times")], machine(["no-such-package"]))
    assert "no-such-package not installed" in text
    assert "| window | 3 ms | by hand: 2 ms | 2 | 1.5 to 4 | ≤ 1 times | **no** | `run me` |" in text


BENCHMARKS = {
    "rows": "def measure(arguments):\n    return [Row('taken', 2.0, 's', command=str(arguments))]\n",
    "broken": "def measure(arguments):\n    raise OSError('no disk')\n",
    "silent": "def measure(arguments):\n    return []\n",
    "old": "",
}


def test_the_driver_goes_on_behind_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "tests" / "benchmarks"
    directory.mkdir(parents=True)
    for name in ("__main__", "record", "picture"):
        (directory / f"{name}.py").write_text((driver.HERE / f"{name}.py").read_text(encoding="utf-8"))
    for name, body in BENCHMARKS.items():
        text = f"from tests.benchmarks.record import Row\n{body}\nif __name__ == '__main__':\n    pass\n"
        (directory / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(driver, "HERE", directory)
    monkeypatch.setattr(driver, "ROOT", tmp_path)
    assert driver.names() == sorted(BENCHMARKS)
    assert driver.main(["broken", "old", "silent", "rows", "--quick", "--out", str(tmp_path / "out")]) == 1
    told = "".join(capfd.readouterr())
    assert "failed: broken, old, silent" in told
    assert "no disk" in told
    assert "old offers no rows: it has no measure(arguments)" in told
    assert "silent offers no rows: measure(['--quick']) returned []" in told
    record = json.loads((tmp_path / "out" / "rows.json").read_text(encoding="utf-8"))
    assert record["rows"][0]["command"] == "['--quick']"
    assert {"processor", "cores", "memory_gib", "versions", "date"} <= record["machine"].keys()
    assert "| taken | 2 s |" in (tmp_path / "out" / "rows.md").read_text(encoding="utf-8")
