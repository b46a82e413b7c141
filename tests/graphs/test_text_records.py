"""What a user relies on: all text is there once, rows are whole documents, a file is complete or not there."""

from __future__ import annotations

import itertools
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.text_records import RecordFile, find_text_files, open_or_pack, pack_records
from graphs.tokenizer import ByteTokenizer

SEPARATOR = ByteTokenizer.separator


def write_texts(root: Path, texts: list[bytes]) -> list[Path]:
    root.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (root / f"{number:03d}.txt").write_bytes(text)
    return find_text_files(root)


def packed(tmp_path: Path, texts: list[bytes], *, seq_len: int = 16, fill: float = 0.8) -> RecordFile:
    paths = write_texts(tmp_path / "text", texts)
    pack_records(paths, tmp_path / "records", tokenizer=ByteTokenizer(), seq_len=seq_len, fill=fill)
    return RecordFile(tmp_path / "records")


def segments(record: dict[str, torch.Tensor]) -> list[list[int]]:
    ends = record["cu_seq_lens"].tolist()
    return [record["input_ids"][a:b].tolist() for a, b in itertools.pairwise(ends)]


def test_small_documents_share_a_row_and_keep_their_borders(tmp_path: Path) -> None:
    records = packed(tmp_path, [b"abc", b"de", b"fghij"])
    assert [segments(record) for record in (records[i] for i in range(len(records)))] == [
        [[97, 98, 99, SEPARATOR], [100, 101, SEPARATOR], [102, 103, 104, 105, 106, SEPARATOR]]
    ]
    assert records[0]["labels"].tolist() == [
        98,
        99,
        SEPARATOR,
        -100,
        101,
        SEPARATOR,
        -100,
        103,
        104,
        105,
        106,
        SEPARATOR,
        -100,
    ]
    assert records[0]["cu_seq_lens"].tolist() == [0, 4, 7, 13]
    assert [records[0][name].dtype for name in ("input_ids", "labels", "cu_seq_lens")] == [
        torch.int64,
        torch.int64,
        torch.int32,
    ]


def test_a_row_is_closed_when_it_is_filled_enough_or_the_next_document_does_not_fit(tmp_path: Path) -> None:
    records = packed(tmp_path, [b"a" * 8, b"b" * 7, b"c" * 12, b"d"], seq_len=16, fill=0.8)
    assert [[len(s) for s in segments(records[i])] for i in range(len(records))] == [[9], [8], [13], [2]]


def test_a_long_document_is_cut_and_its_rest_is_a_document_too(tmp_path: Path) -> None:
    records = packed(tmp_path, [bytes(range(40)), b"xy"], seq_len=16)
    assert [[len(s) for s in segments(records[i])] for i in range(len(records))] == [[16], [16], [9, 3]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.binary(max_size=50), min_size=1).filter(any),
    st.sampled_from([2, 5, 16]),
    st.sampled_from([0.5, 0.8, 1.0]),
)
def test_no_text_is_lost_and_no_row_is_too_long(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], seq_len: int, fill: float
) -> None:
    records = packed(tmp_path_factory.mktemp("records"), texts, seq_len=seq_len, fill=fill)
    rows = [records[i] for i in range(len(records))]
    assert all(2 <= len(row["input_ids"]) <= seq_len for row in rows)
    assert all((row["cu_seq_lens"].diff() >= 2).all() for row in rows)  # every document has a label
    assert b"".join(bytes(i for i in row["input_ids"].tolist() if i != SEPARATOR) for row in rows) == b"".join(texts)
    assert records.num_tokens == sum(len(row["input_ids"]) for row in rows)


def test_readers_get_the_same_records_from_a_pickled_file(tmp_path: Path) -> None:
    records = packed(tmp_path, [b"hello", b"world" * 9])
    content = pickle.dumps(records)
    assert len(content) < 1000
    assert torch.equal(pickle.loads(content)[1]["input_ids"], records[1]["input_ids"])


def test_an_index_outside_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="record 7 of 1"):
        packed(tmp_path, [b"hello"])[7]


def test_packed_once_and_again_only_when_its_source_changed(tmp_path: Path) -> None:
    paths = write_texts(tmp_path / "text", [b"hello", b"world"])
    told: list[tuple[int, int]] = []

    def open_records(seq_len: int = 16) -> RecordFile:
        told.clear()
        return open_or_pack(
            tmp_path / "made" / "records",
            root=tmp_path / "text",
            tokenizer=ByteTokenizer(),
            seq_len=seq_len,
            progress=lambda done, total: told.append((done, total)),
        )

    assert open_records().num_tokens == 12
    assert told == [(5, 10), (10, 10)]
    open_records()
    assert told == []
    os.utime(paths[0], (1, 1))
    open_records()
    assert told
    paths[0].write_bytes(b"hello there")
    assert open_records().num_tokens == 18
    open_records(seq_len=32)
    assert told


@pytest.mark.parametrize("left", [0, 10, 60])
def test_a_half_written_file_is_packed_anew_and_never_opened(tmp_path: Path, left: int) -> None:
    write_texts(tmp_path / "text", [b"hello", b"world"])
    path = tmp_path / "records"
    whole = open_or_pack(path, root=tmp_path / "text", tokenizer=ByteTokenizer(), seq_len=16)[0]
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match="not a complete record file"):
        RecordFile(path)
    again = open_or_pack(path, root=tmp_path / "text", tokenizer=ByteTokenizer(), seq_len=16)
    assert torch.equal(again[0]["input_ids"], whole["input_ids"])


def test_an_error_while_packing_leaves_nothing_behind(tmp_path: Path) -> None:
    class Failing(ByteTokenizer):
        def encode(self, text: bytes):  # type: ignore[no-untyped-def]
            raise RuntimeError("unreadable")

    paths = write_texts(tmp_path / "text", [b"hello"])
    with pytest.raises(RuntimeError, match="unreadable"):
        pack_records(paths, tmp_path / "made" / "records", tokenizer=Failing(), seq_len=16, fill=0.8)
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.parametrize(
    ("seq_len", "fill", "wrong"), [(1, 0.8, "seq_len is 1"), (16, 0.0, "fill is 0.0"), (16, 1.1, "fill is 1.1")]
)
def test_settings_out_of_range_are_refused(tmp_path: Path, seq_len: int, fill: float, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        packed(tmp_path, [b"hello"], seq_len=seq_len, fill=fill)


def test_a_directory_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text below"):
        find_text_files(tmp_path)
    with pytest.raises(ValueError, match="hold no text"):
        packed(tmp_path, [b""])
