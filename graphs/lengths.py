"""Reads the token lengths of a data set from whatever file has them.

Takes CSV, JSON lines, ``.npy``, Parquet, or the ``.idx`` of a Megatron indexed data set; gives int64[n] in file order.
Nothing
but lengths is read: of an ``.idx`` only the index, of Parquet only the one column.
"""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_lengths"]

COLUMNS = ("tokens", "length", "lengths", "num_tokens", "input_ids")
"""Columns that are looked for when none is named; of ``input_ids`` the length counts."""
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"


def read_lengths(path: str | Path, column: str | None = None) -> NDArray[np.int64]:
    """int64[n]: the length of each sample, at least 1.

    Args:
        path: a file ending in .csv, .jsonl, .json, .npy, .parquet or .idx.
        column: where a row has several values, the one to read. Default: the first of ``tokens``, ``length``,
        ``lengths``,
            ``num_tokens``, ``input_ids`` that there is, else the only one.

    Raises:
        ValueError: the file is of another kind, has no such column, or holds something that is not a length.
        ImportError: Parquet without pyarrow.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path.name} ends in {path.suffix!r}; accepted: {', '.join(_READERS)}")
    found = np.asarray(reader(path, column))
    if found.ndim != 1 or found.dtype.kind not in "iuf" or not len(found):
        raise ValueError(
            f"{path} holds an array of shape {found.shape} and dtype {found.dtype}; accepted: a list of lengths"
        )
    lengths = found.astype(np.int64)
    wrong = np.flatnonzero((lengths < 1) | (lengths != found))
    if len(wrong):
        raise ValueError(f"{path}: length number {wrong[0]} is {found[wrong[0]]}; accepted: whole numbers >= 1")
    return lengths


def _chosen(names: Sequence[str], column: str | None, path: Path) -> str:
    if column is None:
        column = next((name for name in COLUMNS if name in names), names[0] if len(names) == 1 else None)
    if column is None or column not in names:
        raise ValueError(f"{path.name} has no column {column!r}; it has {', '.join(names)}")
    return column


def _csv(path: Path, column: str | None) -> NDArray[np.float64]:
    with path.open(newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        try:
            first = [float(header[0])] if len(header) == 1 else []
        except ValueError:
            first = []
        place = 0 if first else header.index(_chosen(header, column, path))
        return np.array(first + [float(row[place]) for row in rows if row])


def _jsonl(path: Path, column: str | None) -> NDArray[np.float64]:
    lengths = []
    with path.open() as file:
        for line in file:
            if not line.strip():
                continue
            value = json.loads(line)
            if isinstance(value, Mapping):
                value = value[_chosen(list(value), column, path)]
            lengths.append(len(value) if isinstance(value, list) else value)
    return np.array(lengths, np.float64)


def _npy(path: Path, column: str | None) -> NDArray[Any]:
    return np.asarray(np.load(path, allow_pickle=False))


def _parquet(path: Path, column: str | None) -> NDArray[Any]:
    try:
        import pyarrow.compute as compute  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.parquet as parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ImportError("reading Parquet needs pyarrow: pip install 'hp-nodes[demo]'") from error
    name = _chosen(parquet.read_schema(path).names, column, path)
    values = parquet.read_table(path, columns=[name]).column(name)
    if "list" in str(values.type):
        values = compute.list_value_length(values)
    return np.asarray(values.to_numpy())


def _megatron(path: Path, column: str | None) -> NDArray[np.int32]:
    """Magic, version (u64), dtype code (u8), sequences (u64), documents (u64); then an int32 for each sequence."""
    header = struct.Struct("<9sQBQQ")
    with path.open("rb") as file:
        start = file.read(header.size)
        if len(start) < header.size or not start.startswith(MEGATRON_MAGIC):
            raise ValueError(f"{path.name} does not begin like the index of a Megatron data set")
        _, version, _, sequences, _ = header.unpack(start)
        if version != 1:
            raise ValueError(f"{path.name} is of version {version}; accepted: 1")
        lengths = np.fromfile(file, "<i4", sequences)
    if len(lengths) != sequences:
        raise ValueError(f"{path.name} announces {sequences} sequences and ends after {len(lengths)}")
    return lengths


_READERS: dict[str, Callable[[Path, str | None], NDArray[Any]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".json": _jsonl,
    ".npy": _npy,
    ".parquet": _parquet,
    ".idx": _megatron,
}
