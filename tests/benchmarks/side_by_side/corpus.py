"""The real text that all ways read: one packed record file, mapped into memory, and views of it.

Text of the running interpreter's standard library, a token a byte, packed by :mod:`graphs.text_records` into rows of
8192. ``functions`` takes each function, method and head of a class as a document (half of them below 265 tokens, a
hundredth above 5,300, as in instruction data: about ten a row); ``files`` takes each file (about one a row).

:class:`Documents` gives single documents out of the same mapped file, with the same work a token as
:class:`graphs.text_records.RecordFile` gives whole rows: for the ways that pack documents by themselves.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphs.text_records import RecordFile, find_text_files, open_or_pack, standard_library
from graphs.tokenizer import load_tokenizer

DIRECTORY = Path("build/bench/data")
SEQ_LEN = 8192
IGNORED_LABEL = -100
CORPORA = ("functions", "files")
APART = re.compile(r"\n\s*\n(?= {0,4}(?:def|class|@|async))")


def prepare(name: str) -> Path:
    """The record file of a corpus, packed when it is not there yet (about ten seconds)."""
    path = DIRECTORY / f"{name}.records"
    root = standard_library() if name == "files" else functions(DIRECTORY / name)
    open_or_pack(path, root=root, tokenizer=load_tokenizer(None), seq_len=SEQ_LEN)
    return path


def functions(root: Path) -> Path:
    """The directory with one file a function; ``complete`` in its name once it is."""
    done = root.with_name(f"{root.name}.complete")
    if done.exists():
        return done
    for number, path in enumerate(find_text_files(standard_library())):
        directory = root / f"{number:04}"
        directory.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8", errors="replace")
        for part, piece in enumerate(filter(str.strip, APART.split(text))):
            (directory / f"{part:04}.txt").write_text(piece, encoding="utf-8")
    os.replace(root, done)
    return done


class Documents(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The documents of a record file, one an index: ``input_ids`` and ``labels`` int64[n]. Pickled it is its path."""

    def __init__(self, path: Path) -> None:
        self.records = RecordFile(path)
        self._tokens = self.records._tokens
        self._ends = self.records._segment_ends

    def __reduce__(self) -> tuple[type[Documents], tuple[Path]]:
        return Documents, (self.records.path,)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64[documents]: tokens of each."""
        return np.diff(self._ends, prepend=0)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        input_ids = self._tokens[start:end].astype(np.int64)
        labels = np.empty_like(input_ids)
        labels[:-1] = input_ids[1:]
        labels[-1] = IGNORED_LABEL
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


class Failing:
    """A dataset that raises at its ``count``-th read: what a corrupt file does on one rank."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self.left = count

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(f"record {index} cannot be read")
        return self.dataset[index]


class Repeated:
    """A dataset of any length over a small one: item ``i`` is item ``i mod n``."""

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = dataset
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]
