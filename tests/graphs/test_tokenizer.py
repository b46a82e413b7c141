"""Text to ids and back to the same text, and files of the tokenizers package."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from graphs.text_records import RecordFile, find_text_files, pack_records
from graphs.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer, train_tokenizer

TEXT = "def f(x):\n    return x  # größer\n" * 20


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("aß".encode()).tolist() == [97, 195, 159]
    assert tokenizer.encode(bytes(range(256))).max() < tokenizer.separator < tokenizer.vocabulary


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    train_tokenizer([tmp_path / "text.txt"], tmp_path / "tokenizer.json", 300)
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_gives_fewer_tokens_and_the_same_text(trained: Path) -> None:
    import tokenizers

    tokenizer = load_tokenizer(trained)
    ids = tokenizer.encode(TEXT.encode())
    assert ids.dtype == np.int64
    assert len(ids) < len(TEXT) / 2
    assert ids.max() < tokenizer.separator < tokenizer.vocabulary <= 301
    assert tokenizers.Tokenizer.from_file(str(trained)).decode(ids.tolist()) == TEXT


def test_records_packed_with_a_tokenizer_file(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    pack_records(
        find_text_files(trained.parent), trained.parent / "records", tokenizer=tokenizer, seq_len=512, fill=0.8
    )
    records = RecordFile(trained.parent / "records")
    assert records.vocabulary == tokenizer.vocabulary
    assert records[0]["input_ids"].tolist() == [*tokenizer.encode(TEXT.encode()), tokenizer.separator]


def test_another_tokenizer_has_another_fingerprint(trained: Path) -> None:
    first = FileTokenizer(trained).fingerprint
    train_tokenizer([trained.parent / "text.txt"], trained, 260)
    assert FileTokenizer(trained).fingerprint != first


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json.*not a tokenizer file"):
        load_tokenizer(tmp_path / "x.json")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"hp-nodes\[demo\]"):
        load_tokenizer(tmp_path / "x.json")
