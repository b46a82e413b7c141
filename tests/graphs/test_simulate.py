"""What balancing would do for given lengths: read from any file, planned like training would."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from graphs.lengths import read_lengths
from graphs.simulate import cost_model, main, pack_rows, priced, simulate

LENGTHS = Path(__file__).parents[1] / "benchmarks" / "lengths" / "azure_code.csv"
VALUES = [5, 3, 900, 7]


def write(path: Path) -> Path:
    if path.suffix == ".csv":
        path.write_text("name,tokens\n" + "".join(f"a,{value}\n" for value in VALUES))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": "x", "length": value}) + "\n" for value in VALUES))
    elif path.suffix == ".npy":
        np.save(path, np.array(VALUES))
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"tokens": VALUES, "other": [1.0] * 4}), path)
    else:
        header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(VALUES), 2)
        lengths = np.array(VALUES, "<i4").tobytes()
        path.write_bytes(header + lengths + np.zeros(len(VALUES), "<i8").tobytes() + np.zeros(3, "<i8").tobytes())
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "npy", "parquet", "idx"])
def test_lengths_are_read_from_any_file(kind: str, tmp_path: Path) -> None:
    assert read_lengths(write(tmp_path / f"data.{kind}")).tolist() == VALUES


def test_records_count_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}\n\n{"input_ids": [1], "labels": [1]}\n')
    assert read_lengths(path).tolist() == [3, 1]


def test_a_column_without_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.csv"
    path.write_text("4\n5\n")
    assert read_lengths(path).tolist() == [4, 5]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"1", r"ends in '.txt'; accepted: .csv, .jsonl"),
        ("a.csv", b"x,y\n1,2\n", r"no column None; it has x, y"),
        ("a.csv", b"tokens\n3\n0\n", r"length number 1 is 0.0; accepted: whole numbers >= 1"),
        ("a.csv", b"tokens\n3.5\n", r"length number 0 is 3.5"),
        ("a.csv", b"tokens\n", r"holds an array of shape \(0,\)"),
        ("a.idx", b"something else entirely, but long enough", r"does not begin like the index of a Megatron"),
        ("a.idx", struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 9, 1), r"announces 9 sequences and ends after 0"),
    ],
)
def test_what_cannot_be_lengths_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_lengths(tmp_path / name)


def test_rows_are_filled_in_order() -> None:
    assert pack_rows(np.array([4, 4, 4, 10, 1, 1]), 10).tolist() == [0, 0, 1, 2, 3, 3]


def test_wider_windows_balance_better_and_the_bound_holds() -> None:
    lengths = np.minimum(read_lengths(LENGTHS), 4096)
    results = [
        simulate(lengths, lengths**2.0, seq_len=8192, dp=8, rounds=8, window=window, max_steps=3)
        for window in (1, 4, 8)
    ]
    after = [result.after["lockstep"] for result in results]
    assert after == sorted(after, reverse=True)
    assert after[-1] < 0.2 * results[-1].before["lockstep"]
    assert len({result.before["lockstep"] for result in results}) == 1
    for result in results:
        assert -1e-9 <= result.bound <= result.after["lockstep"] + 1e-9
        expected = (1 + result.before["lockstep"] / 100) / (1 + result.after["lockstep"] / 100)
        assert result.speed_up == pytest.approx(expected)
        assert 0 < result.moved < 100


def test_the_planned_objective_is_the_one_that_improves() -> None:
    lengths = np.minimum(read_lengths(LENGTHS), 4096)
    for objective in ("makespan", "balance"):
        result = simulate(
            lengths, lengths**2.0, seq_len=8192, dp=8, rounds=4, window=2, objective=objective, max_steps=3
        )
        assert result.after[objective] < 0.5 * result.before[objective]


def test_too_little_data_says_how_much_a_step_takes() -> None:
    with pytest.raises(ValueError, match=r"3 samples fill 2 rows of 10 tokens; a step takes 16"):
        simulate(np.array([5, 5, 5]), np.ones(3), seq_len=10, dp=2)
    with pytest.raises(ValueError, match="window is 9; accepted: 1 to 8"):
        simulate(np.array([5, 5, 5]), np.ones(3), seq_len=10, dp=2, window=9)


def test_costs_are_named_in_every_way(tmp_path: Path) -> None:
    tokens = np.array([3, 1, 3])
    assert priced(cost_model("square")[0], tokens).tolist() == [9, 1, 9]
    assert priced(cost_model("tokens")[0], tokens).tolist() == [3, 1, 3]
    assert priced(cost_model("2:1")[0], tokens).tolist() == [15, 3, 15]
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, name = cost_model(str(tmp_path / "config.json"))
    assert priced(model, tokens)[0] > 0
    assert "config.json" in name
    with pytest.raises(ValueError, match="--cost is 'cubic'; accepted: square, tokens, A:B"):
        cost_model("cubic")


def test_the_program_prints_the_windows_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(LENGTHS), "--seq-len", "4096", "--dp", "4", "--rounds", "4", "--window", "1", "4", "--max-steps", "2"])
    printed = capsys.readouterr().out
    assert "2 steps of 4 rounds on 4 ranks" in printed
    assert [line.split("|")[1].strip() for line in printed.splitlines() if line[:3] in ("| w", "| 1", "| 4")] == [
        "window",
        "1",
        "4",
    ]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = [
        "--dp",
        "4",
        "--rounds",
        "2",
        "--window",
        "1",
        "2",
        "--max-steps",
        "1",
        "--price-padding",
        "--no-progress",
    ]
    main([str(LENGTHS), "--seq-len", "4096", *options, "--plot", str(tmp_path / "out.png")])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.compute", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ImportError, match=r"hp-nodes\[demo\]"):
        read_lengths(tmp_path / "a.parquet")
    options = ["--dp", "4", "--rounds", "1", "--window", "1", "--max-steps", "1", "--no-progress"]
    with pytest.raises(ImportError, match=r"hp-nodes\[demo\]"):
        main([str(LENGTHS), "--seq-len", "8192", *options, "--plot", str(tmp_path / "out.png")])
