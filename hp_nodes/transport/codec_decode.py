"""From blocks to samples: the columns of a chunk are read and put together again.

Takes the structure and the blocks that ``codec_encode`` wrote, gives the samples in their order. Tensors and arrays
are views of the blocks; everything else is made new.

Promise: a structure that is not one raises, whoever wrote it. No number in a frame is believed before it is compared
with the bytes that are there, nothing is allocated that the frame's own length does not bound, and a frame runs no
code: classes are checked by ``codec_classes`` and pickles are read only where the receiver allows them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.transport.codec_arrays import decode_arrays, decode_scalars, read_dtype
from hp_nodes.transport.codec_classes import build_objects, find_class
from hp_nodes.transport.codec_frame import Bytes, CodecError
from hp_nodes.transport.codec_tensors import decode_tensors, tensor_itemsize

_MAX_RANK = 64
_SHORT = 1 << 14  # bytes of a structure that is worth remembering


def read_structure(text: bytes) -> Any:
    """Plain lists and text. Shared by chunks of one structure: not to be changed.

    Raises:
        CodecError: it is no JSON.
    """
    return _parse_often(text) if len(text) < _SHORT else _parse(text)


@lru_cache(maxsize=64)
def _parse_often(text: bytes) -> Any:
    return _parse(text)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"malformed frame: its structure cannot be read ({error})") from error


class ColumnDecoder:
    """Reads one chunk. Blocks are taken in the order in which the encoder wrote them."""

    def __init__(self, blocks: list[Bytes], limit: int, allow_pickle: bool) -> None:
        self._blocks = iter(blocks)
        self._limit = limit
        self._allow_pickle = allow_pickle
        self._kinds: dict[str, Callable[[Any, int], list[Any]]] = {
            "none": lambda node, rows: [None] * self._array(np.uint8, rows).size,
            "bool": self._bools,
            "int": lambda node, rows: self._array(np.int64, rows).tolist(),
            "float": lambda node, rows: self._array(np.float64, rows).tolist(),
            "complex": lambda node, rows: self._array(np.complex128, rows).tolist(),
            "long": self._pieces(lambda piece: int.from_bytes(piece, "little", signed=True)),
            "bytes": self._pieces(bytes),
            "bytearray": self._pieces(bytearray),
            "np.bytes": self._pieces(lambda piece: np.bytes_(bytes(piece))),
            "pickle": self._pieces(self._unpickle),
            "str": lambda node, rows: self._strings(rows),
            "np.str": lambda node, rows: list(map(np.str_, self._strings(rows))),
            "tensor": self._tensors,
            "array": self._arrays,
            "scalar": self._scalars,
            "dict": self._dicts,
            "map": self._maps,
            "tuple": lambda node, rows: list(self._rows(node[2], node[1], rows)),
            "list": self._lists,
            "tuples": lambda node, rows: list(map(tuple, self._lists(node, rows))),
            "named": self._records,
            "dataclass": self._records,
            "union": self._union,
        }

    def samples(self, structure: Any, rows: int) -> list[Any]:
        """All samples of the chunk.

        Raises:
            CodecError: the blocks are not what the structure says.
        """
        try:
            values = self._column(structure, rows)
            if next(self._blocks, None) is not None:
                raise CodecError("malformed frame: a block that no column takes")
        finally:
            # This object refers to itself, and would keep the received bytes until the cycle collector comes.
            self._kinds.clear()
            self._blocks = iter(())
        return values

    def _column(self, node: Any, rows: int) -> list[Any]:
        return self._kinds[node[0]](node, rows)

    # ---- numbers that the structure rests on

    def _array(self, dtype: Any, rows: int) -> NDArray[Any]:
        block = next(self._blocks)
        if block.size != rows * np.dtype(dtype).itemsize:
            raise CodecError(f"malformed frame: {block.size} bytes for {rows} values of {np.dtype(dtype)}")
        return block.view(dtype)

    def _lengths(self, rows: int) -> tuple[list[int], int]:
        """Lengths of rows and their sum, which the frame's length bounds."""
        lengths: list[int] = self._array(np.int64, rows).tolist()
        total = sum(lengths)
        if min(lengths, default=0) < 0 or total > self._limit:
            raise CodecError("malformed frame: lengths that do not fit it")
        return lengths, total

    def _shapes(self, rank: Any, rows: int, itemsize: int) -> tuple[NDArray[np.int64], Bytes]:
        """Shapes int64[rows, rank] and the payload, whose length is what the shapes say."""
        if type(rank) is not int or not 0 <= rank <= _MAX_RANK:
            raise CodecError(f"malformed frame: arrays of {rank!r} dimensions")
        shapes = self._array(np.int64, rows * rank).reshape(rows, rank)
        payload = next(self._blocks)
        # In floating point first: a product of integers may wrap around to what is expected.
        elements = shapes.astype(np.float64).prod(axis=1).sum()
        absurd = shapes.size and (shapes.min() < 0 or shapes.max() >= 1 << 48)
        if absurd or elements * itemsize > self._limit:
            raise CodecError("malformed frame: shapes that do not fit it")
        if int(shapes.prod(axis=1).sum()) * itemsize != payload.size:
            raise CodecError(f"malformed frame: {payload.size} bytes for arrays of {int(elements)} elements")
        return shapes, payload

    # ---- leaves

    def _bools(self, node: Any, rows: int) -> list[bool]:
        numbers = self._array(np.uint8, rows)
        if rows and numbers.max() > 1:
            raise CodecError("malformed frame: a bool that is neither true nor false")
        values: list[bool] = numbers.view(np.bool_).tolist()
        return values

    def _pieces(self, make: Callable[[memoryview], Any]) -> Callable[[Any, int], list[Any]]:
        def read(node: Any, rows: int) -> list[Any]:
            lengths, total = self._lengths(rows)
            view = self._array(np.uint8, total).data
            return [make(view[end - length : end]) for length, end in zip(lengths, accumulate(lengths), strict=True)]

        return read

    def _strings(self, rows: int) -> list[str]:
        lengths, total = self._lengths(rows)
        text = next(self._blocks).tobytes().decode("utf-8", "surrogatepass")
        if len(text) != total:
            raise CodecError(f"malformed frame: {len(text)} characters for strings of {total}")
        return [text[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]

    def _unpickle(self, piece: memoryview) -> Any:
        if not self._allow_pickle:
            raise CodecError("the frame holds pickled objects; accepted on this rank only with allow_pickle=True")
        try:
            return pickle.loads(piece)
        except Exception as error:
            raise CodecError(
                f"an object of the frame does not unpickle here: {type(error).__name__}: {error}"
            ) from error

    def _tensors(self, node: Any, rows: int) -> list[Any]:
        return decode_tensors(node, *self._shapes(node[2], rows, tensor_itemsize(node))) if rows else self._skip(2)

    def _arrays(self, node: Any, rows: int) -> list[Any]:
        return (
            decode_arrays(node, *self._shapes(node[2], rows, read_dtype(node[1]).itemsize)) if rows else self._skip(2)
        )

    def _scalars(self, node: Any, rows: int) -> list[Any]:
        return decode_scalars(node, self._array(np.uint8, rows * read_dtype(node[1]).itemsize))

    def _skip(self, blocks: int) -> list[Any]:
        for _ in range(blocks):
            self._array(np.uint8, 0)
        return []

    # ---- containers

    def _rows(self, fields: Any, width: int, rows: int) -> Iterator[tuple[Any, ...]]:
        """The fields of each row: from a column for each field, or from one column that holds them row by row."""
        kind, columns = fields
        if type(width) is not int or not 0 < width <= self._limit:
            raise CodecError(f"malformed frame: a record of {width!r} fields")
        if kind == "woven":
            return zip(*[iter(self._column(columns, rows * width))] * width, strict=True)
        if len(columns) != width:
            raise CodecError("malformed frame: a record without a column for each field")
        return zip(*[self._column(column, rows) for column in columns], strict=True)

    def _dicts(self, node: Any, rows: int) -> list[dict[str, Any]]:
        _, names, fields = node
        if len(set(names)) != len(names) or set(map(type, names)) != {str}:
            raise CodecError("malformed frame: the keys of a dict are not distinct text")
        # Literals take a third of the time of dict(zip(...)), which is half of what a small sample takes.
        if len(names) == 1 and fields[0] == "columns" and len(fields[1]) == 1:
            (a,) = names
            return [{a: x} for x in self._column(fields[1][0], rows)]
        columns = self._rows(fields, len(names), rows)
        if len(names) == 2:
            a, b = names
            return [{a: x, b: y} for x, y in columns]
        if len(names) == 3:
            a, b, c = names
            return [{a: x, b: y, c: z} for x, y, z in columns]
        return [dict(zip(names, values, strict=True)) for values in columns]

    def _maps(self, node: Any, rows: int) -> list[dict[Any, Any]]:
        lengths, total = self._lengths(rows)
        pairs = zip(self._column(node[1], total), self._column(node[2], total), strict=True)
        made = [dict(_take(pairs, length)) for length in lengths]
        if sum(map(len, made)) != total:
            raise CodecError("malformed frame: a key comes twice in one dict")
        return made

    def _lists(self, node: Any, rows: int) -> list[list[Any]]:
        lengths, total = self._lengths(rows)
        items = self._column(node[1], total)
        return [items[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)]

    def _records(self, node: Any, rows: int) -> list[Any]:
        kind, module, qualname, names, fields = node
        record = find_class(module, qualname, tuple(names), kind == "named")
        if not names:
            return build_objects(record, [()] * self._array(np.uint8, rows).size)
        return build_objects(record, self._rows(fields, len(names), rows))

    def _union(self, node: Any, rows: int) -> list[Any]:
        tags = self._array(np.uint32, rows)
        children = node[1]
        if rows == 0 or tags.max() >= len(children):
            raise CodecError("malformed frame: a row of a kind that it does not have")
        counts = np.bincount(tags, minlength=len(children)).tolist()
        columns = [iter(self._column(child, count)) for child, count in zip(children, counts, strict=True)]
        return [next(columns[tag]) for tag in tags.tolist()]


def _take(pairs: Iterator[tuple[Any, Any]], length: int) -> Iterator[tuple[Any, Any]]:
    for _ in range(length):
        yield next(pairs)
