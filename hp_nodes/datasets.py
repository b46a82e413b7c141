"""Map-style datasets over corpora that exist: each record is one document of tokens, for the built-in text functions.

* :class:`MegatronDataset`: a ``.bin``/``.idx`` pair as Megatron-LM's preprocessing writes it, memory-mapped.
* :class:`TokenDataset`: a column of token lists: of an Arrow table, of a Parquet file read as one, of a Hugging Face
  dataset, or plain lists.

Both have ``lengths``, the tokens of each document, which is known without reading a token: given as ``metadata`` it
lets a window be planned before anything is read. Nothing of the tokens is kept; workers map the files anew.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hp_nodes.text import IGNORED_LABEL

__all__ = ["MegatronDataset", "TokenDataset", "document_record"]

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_TOKEN_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Codes 6 and 7 are floats, which are no tokens."""


def document_record(tokens: ArrayLike) -> dict[str, torch.Tensor]:
    """A document as a text record: ``input_ids`` int64[n]; ``labels`` int64[n], the next token each, -100 for the last;
    ``cu_seq_lens`` int32[2].

    Raises:
        ValueError: there is no token, or they are no 1-D integers.
    """
    values = np.asarray(tokens)
    if values.ndim != 1 or values.dtype.kind not in "iu" or not values.size:
        raise ValueError(f"a document is {values.dtype}{list(values.shape)}; accepted: 1-D integers, at least one")
    ids = torch.from_numpy(values.astype(np.int64))
    labels = torch.full_like(ids, IGNORED_LABEL)
    labels[:-1] = ids[1:]
    return {"input_ids": ids, "labels": labels, "cu_seq_lens": torch.tensor([0, len(ids)], dtype=torch.int32)}


class MegatronDataset:
    """The documents of a Megatron corpus.

    The index is 9 bytes of magic, version (u64), token dtype (u8), numbers of sequences and of document bounds (u64),
    then int32 tokens and int64 byte offset of each sequence, and int64 bounds of the documents, in sequences
    (Megatron-LM, megatron/core/datasets/indexed_dataset.py). The modes of multimodal corpora may follow; they are not
    read.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.

    Raises:
        FileNotFoundError: one of the files is missing.
        ValueError: the index is no such index, its tokens are no integers, or a file is shorter than it says.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = Path(prefix)
        index_path, token_path = self._path(".idx"), self._path(".bin")
        index = np.memmap(index_path, dtype=np.uint8, mode="r")
        header = _header(index, index_path)
        count, bounds = int(header["sequences"]), int(header["documents"])
        end = _HEADER.itemsize + count * 12 + bounds * 8
        if bounds < 2 or len(index) < end:
            raise ValueError(
                f"{index_path} has {len(index)} bytes, its {count} sequences and {bounds} document bounds need {end}; "
                "accepted: a complete index of at least one document"
            )
        self._lengths = np.frombuffer(index, "<i4", count, _HEADER.itemsize)
        self._offsets = np.frombuffer(index, "<i8", count, _HEADER.itemsize + 4 * count)
        self._bounds = np.frombuffer(index, "<i8", bounds, _HEADER.itemsize + 12 * count)
        self._tokens = np.memmap(token_path, dtype=_TOKEN_DTYPES[int(header["code"])], mode="r")
        if self._bounds[0] != 0 or self._bounds[-1] != count:
            raise ValueError(
                f"{index_path}: documents span sequences {self._bounds[0]} to {self._bounds[-1]}; accepted: 0 to "
                f"{count}"
            )
        needed = int(self._offsets[-1]) // self._tokens.itemsize + int(self._lengths[-1]) if count else 0
        if len(self._tokens) < needed:
            raise ValueError(f"{token_path} has {len(self._tokens)} tokens, its index speaks of {needed}")

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64[documents]: tokens of each document, from the index alone."""
        starts, ends = self._bounds[:-1], self._bounds[1:]
        lengths = np.zeros(len(starts), dtype=np.int64)
        filled = starts < ends
        if filled.any():
            lengths[filled] = np.add.reduceat(self._lengths, starts[filled], dtype=np.int64)
        return lengths

    def tokens(self, index: int) -> NDArray[Any]:
        """The tokens of one document in the file's dtype: a view of the file where it is one sequence."""
        pieces = []
        for sequence in range(int(self._bounds[index]), int(self._bounds[index + 1])):
            start = int(self._offsets[sequence]) // self._tokens.itemsize
            pieces.append(self._tokens[start : start + int(self._lengths[sequence])])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [self._tokens[:0]])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is outside the {len(self)} documents of {self.prefix}")
        return document_record(self.tokens(index))

    def __reduce__(self) -> tuple[type[MegatronDataset], tuple[Path]]:
        return type(self), (self.prefix,)

    def _path(self, suffix: str) -> Path:
        path = self.prefix.with_name(self.prefix.name + suffix)
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}; accepted: a prefix that has both .bin and .idx")
        return path


def _header(index: NDArray[np.uint8], path: Path) -> np.void:
    if len(index) < _HEADER.itemsize or index[: len(_MAGIC)].tobytes() != _MAGIC:
        raise ValueError(f"{path} is no Megatron index: it begins with {index[: len(_MAGIC)].tobytes()!r}")
    header: np.void = np.frombuffer(index, _HEADER, 1)[0]
    if header["version"] != _VERSION:
        raise ValueError(f"{path} has version {header['version']}; accepted: {_VERSION}")
    if int(header["code"]) not in _TOKEN_DTYPES:
        raise ValueError(
            f"{path} says that tokens are of dtype code {header['code']}; accepted: {sorted(_TOKEN_DTYPES)} (integers)"
        )
    return header


class TokenDataset:
    """The documents of a column of token lists.

    Args:
        column: document → its tokens. An Arrow array of lists (``table.column("input_ids")`` of a Parquet file or of a
            Hugging Face dataset's ``data``) is read without a copy of the whole; any sequence of 1-D integers will do.

    Raises:
        ValueError: it has no ``__len__`` and ``__getitem__``.
    """

    def __init__(self, column: Any) -> None:
        if not (hasattr(column, "__getitem__") and hasattr(column, "__len__")):
            raise ValueError(f"the column is a {type(column).__name__}; accepted: anything with __getitem__, __len__")
        self.column = column
        self._arrow = type(column).__module__.partition(".")[0] == "pyarrow"

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64[documents]: tokens of each document; of an Arrow column from its offsets alone."""
        if self._arrow:
            import pyarrow.compute

            counted = pyarrow.compute.list_value_length(self.column).to_numpy()
        else:
            counted = np.fromiter((len(tokens) for tokens in self.column), dtype=np.int64, count=len(self.column))
        lengths: NDArray[np.int64] = np.asarray(counted).astype(np.int64)
        return lengths

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self.column[index]
        return document_record(item.values.to_numpy(zero_copy_only=False) if self._arrow else item)
