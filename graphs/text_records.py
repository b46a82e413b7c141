"""Text files packed once into a file of records that every rank maps into memory.

Takes text files (by default those of the interpreter's standard library) and gives :class:`RecordFile`, a map-style
dataset whose records are what :func:`hp_nodes.text.split_packed_text` takes: ``input_ids``, ``labels`` (already
shifted) and ``cu_seq_lens``. A record is a row of whole documents as a trainer without balancing would pack them, in
the order of the files: the next document is added while the row is filled less than ``fill`` and has room for it. A
document longer than a row is cut into rows of its own, and what remains of it is a document too.

Promises: the same files and settings give the same records, byte for byte; a record file is complete or not there
(written beside its place, then renamed); it is reused as long as names, sizes and times of its files, the tokenizer and
the settings are what they were.

Layout of the file: tokens ``uint16`` or ``uint32``; ``int64`` end of each segment among the tokens; ``int64`` end of
each record among the segments; a JSON text that says where they are; its length; the magic bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from graphs.tokenizer import Tokenizer

__all__ = ["RecordFile", "find_text_files", "open_or_pack", "pack_records", "standard_library"]

IGNORED_LABEL = -100
MAGIC = b"HPNREC01"
SUFFIXES = (".py", ".txt", ".rst")
# Installed packages are not the interpreter's text, and its test suites are part of some distributions only.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""


def standard_library() -> Path:
    """The directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_text_files(root: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The text files below ``root``, sorted by path.

    Raises:
        ValueError: there is none.
    """
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in LEFT_OUT]
        found += [Path(directory, name) for name in names if name.endswith(suffixes)]
    if not found:
        raise ValueError(f"no text below {str(root)!r}; accepted: a directory with files that end in {suffixes}")
    return sorted(found)


class RecordFile(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A packed record file as a map-style dataset. Pickled (for reader workers) it is only its path.

    ``records[i]`` is ``input_ids`` and ``labels`` int64 ``[n]`` with -100 at the end of each segment, and
    ``cu_seq_lens`` int32 ``[segments + 1]``.

    Raises:
        ValueError: the file is not a complete record file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.header = read_header(self.path)
        self._tokens = self._map("tokens")
        self._segment_ends = self._map("segment_ends")
        self._record_ends = self._map("record_ends")

    def _map(self, name: str) -> NDArray[Any]:
        where = self.header["arrays"][name]
        mapped = np.memmap(self.path, where["dtype"], mode="r", offset=where["offset"], shape=(where["length"],))
        return np.asarray(mapped)

    def __reduce__(self) -> tuple[type[RecordFile], tuple[Path]]:
        return RecordFile, (self.path,)

    @property
    def vocabulary(self) -> int:
        """Number of different token ids, the separator included."""
        return int(self.header["vocabulary"])

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._record_ends)

    def row_metadata(self, seq_len: int) -> NDArray[np.void]:
        """Tokens and cost of every record in a row of ``seq_len``, by index, without reading a token.

        The cost is the sum of the squares of its documents' lengths and of the padding's. Fields as precomputed
        metadata has them: ``pack_tokens`` int64, ``llm`` float64.
        """
        lengths = np.diff(self._segment_ends, prepend=0)
        firsts = np.concatenate([[0], self._record_ends[:-1]])
        found = np.zeros(len(self), dtype=[("pack_tokens", np.int64), ("llm", np.float64)])
        found["pack_tokens"] = np.add.reduceat(lengths, firsts)
        found["llm"] = np.add.reduceat(lengths**2, firsts) + (seq_len - found["pack_tokens"]) ** 2
        return found

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} in {self.path}")
        first, last = self._start(self._record_ends, index), int(self._record_ends[index])
        start = self._start(self._segment_ends, first)
        ends = self._segment_ends[first:last] - start
        # in numpy: with torch's indexing, reading takes twice as long
        input_ids = self._tokens[start : start + ends[-1]].astype(np.int64)
        labels = np.empty_like(input_ids)
        labels[:-1] = input_ids[1:]
        labels[ends - 1] = IGNORED_LABEL
        cu_seq_lens = np.zeros(len(ends) + 1, dtype=np.int32)
        cu_seq_lens[1:] = ends
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "cu_seq_lens": torch.from_numpy(cu_seq_lens),
        }

    @staticmethod
    def _start(ends: NDArray[Any], index: int) -> int:
        return int(ends[index - 1]) if index else 0


def read_header(path: Path) -> dict[str, Any]:
    """What a record file says of itself."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        tail = len(MAGIC) + 8
        file.seek(max(0, size - tail))
        length, magic = file.read(8), file.read()
        if size < tail or magic != MAGIC:
            raise ValueError(f"{str(path)!r} is not a complete record file: it does not end in {MAGIC!r}")
        file.seek(size - tail - int.from_bytes(length, "little"))
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(length, "little")))
    return header


@dataclass
class Rows:
    """Puts documents into rows, one after the other, and keeps where segments and rows end."""

    seq_len: int
    fill: float

    def __post_init__(self) -> None:
        self.segment_ends = array("q")
        self.record_ends = array("q")
        self._row_tokens = 0

    def add(self, length: int) -> None:
        for start in range(0, length, self.seq_len):
            self._add_piece(min(self.seq_len, length - start))

    def _add_piece(self, length: int) -> None:
        full = self._row_tokens >= self.fill * self.seq_len or self._row_tokens + length > self.seq_len
        if self._row_tokens and full:
            self.end_row()
        self.segment_ends.append((self.segment_ends[-1] if self.segment_ends else 0) + length)
        self._row_tokens += length

    def end_row(self) -> None:
        if self._row_tokens:
            self.record_ends.append(len(self.segment_ends))
        self._row_tokens = 0


def documents(
    paths: list[Path], tokenizer: Tokenizer, seq_len: int, progress: Progress | None
) -> Iterator[NDArray[np.int64]]:
    """The token ids of each file, followed by the separator. Files without text are left out: they have no label."""
    sizes = [path.stat().st_size for path in paths]
    done = 0
    for path, size in zip(paths, sizes, strict=True):
        ids = tokenizer.encode(path.read_bytes())
        if len(ids) % seq_len:
            yield np.append(ids, tokenizer.separator)
        elif len(ids):  # the separator would be a document of its own, with nothing to predict
            yield ids
        done += size
        if progress is not None:
            progress(done, sum(sizes))


def pack_records(
    paths: list[Path],
    destination: Path,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    fill: float,
    fingerprint: str = "",
    progress: Progress | None = None,
) -> None:
    """Write the record file of ``paths``, whole or not at all."""
    if seq_len < 2:
        raise ValueError(f"seq_len is {seq_len}; accepted: an int >= 2, a token and the one it predicts")
    if not 0 < fill <= 1:
        raise ValueError(f"fill is {fill}; accepted: 0 < fill <= 1")
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f"{destination.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            rows, dtype = Rows(seq_len, fill), np.dtype("<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4")
            for ids in documents(paths, tokenizer, seq_len, progress):
                rows.add(len(ids))
                file.write(ids.astype(dtype).tobytes())
            rows.end_row()
            if not rows.record_ends:
                raise ValueError(f"the {len(paths)} text files hold no text; accepted: at least one that is not empty")
            arrays = {"tokens": {"dtype": dtype.str, "offset": 0, "length": rows.segment_ends[-1]}}
            for name in ("segment_ends", "record_ends"):
                arrays[name] = append_array(file, np.asarray(getattr(rows, name), dtype="<i8"))
            header = {"arrays": arrays, "vocabulary": tokenizer.vocabulary, "fingerprint": fingerprint}
            text = json.dumps(header | {"seq_len": seq_len, "fill": fill}).encode()
            file.write(text + len(text).to_bytes(8, "little") + MAGIC)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, destination)
    finally:
        partial.unlink(missing_ok=True)


def append_array(file: BinaryIO, values: NDArray[np.int64]) -> dict[str, Any]:
    """Write ``values`` at the next multiple of their size, and say where."""
    file.write(bytes(-file.tell() % values.itemsize))
    offset = file.tell()
    file.write(values.tobytes())
    return {"dtype": values.dtype.str, "offset": offset, "length": len(values)}


def fingerprint_of(root: Path, paths: list[Path], settings: Mapping[str, Any]) -> str:
    """Changes with the name, size or time of any file, and with the settings."""
    files = [(str(p.relative_to(root)), s.st_size, s.st_mtime_ns) for p in paths for s in (p.stat(),)]
    return hashlib.sha256(json.dumps([files, settings], sort_keys=True).encode()).hexdigest()


def open_or_pack(
    destination: Path,
    *,
    root: Path | None = None,
    tokenizer: Tokenizer,
    seq_len: int,
    fill: float = 0.8,
    progress: Progress | None = None,
) -> RecordFile:
    """The record file of the text below ``root`` (None: the standard library), packed when it is not there yet."""
    root = standard_library() if root is None else root
    paths = find_text_files(root)
    fingerprint = fingerprint_of(root, paths, {"seq_len": seq_len, "fill": fill, "tokenizer": tokenizer.fingerprint})
    try:
        if read_header(destination)["fingerprint"] == fingerprint:
            return RecordFile(destination)
    except (OSError, ValueError, KeyError):
        pass  # not there, or not a record file: it is packed anew
    pack_records(
        paths, destination, tokenizer=tokenizer, seq_len=seq_len, fill=fill, fingerprint=fingerprint, progress=progress
    )
    return RecordFile(destination)
