"""From samples to blocks: samples of one structure are taken apart into columns.

Takes a list of samples, gives a structure (plain lists and text) and a list of blocks. A column is a list of values
of one kind: a column of dicts with the same keys becomes one column for each key, a column of lists one column of all
their items, a column of tensors one block of bytes; where kinds are mixed, tags say which row belongs to which of
several columns. So the cost of a sample is that of looking at its leaves once, and the structure is written once for
many samples.

Promise: whatever cannot be rebuilt exactly is refused here, before anything is written, with its path inside the
sample.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hp_nodes.transport.codec_arrays import array_kind, describe_dtype, encode_arrays, encode_scalars
from hp_nodes.transport.codec_classes import RecordClass, class_refusal, object_flaw, record_class
from hp_nodes.transport.codec_frame import Block, CodecError, Where
from hp_nodes.transport.codec_tensors import are_alike, encode_tensors, encode_vectors, tensor_kind, tensor_refusal

MAX_DEPTH = 64
"""Levels of nesting of one sample."""
_SUSPICIOUS_DEPTH = 12  # here it is worth looking for a container that contains itself
_MAX_COLUMNS = 64
_MAX_TUPLE = 16
_ACCEPTED = (
    "accepted: dict, list, tuple, named tuple, dataclass, dense CPU tensors, numpy arrays and scalars, bytes, "
    "bytearray, str, int, float, complex, bool, None; anything that pickles with allow_pickle=True"
)

_BYTE_STRINGS: dict[type, str] = {bytes: "bytes", bytearray: "bytearray", np.bytes_: "np.bytes"}

Sizes = NDArray[np.int64]
Column = tuple[list[Any], Sizes]
"""The structure of a column and the payload bytes of each of its rows."""


class ColumnEncoder:
    """Takes one list of samples apart. ``blocks`` fills in the order in which the decoder reads."""

    def __init__(self, allow_pickle: bool) -> None:
        self.blocks: list[Block] = []
        self._allow_pickle = allow_pickle
        self._kinds: dict[type, Callable[[list[Any], Where, int], Column]] = {
            type(None): self._nones,
            bool: self._bools,
            int: self._ints,
            float: self._floats,
            complex: self._complexes,
            str: self._strings,
            np.str_: self._strings,
            bytes: self._byte_strings,
            bytearray: self._byte_strings,
            np.bytes_: self._byte_strings,
            dict: self._dicts,
            list: self._sequences,
            tuple: self._sequences,
            torch.Tensor: self._tensors,
            np.ndarray: self._arrays,
        }

    def taken(self) -> list[Block]:
        """The blocks. Neither they nor this encoder are referred to from here any more: they are freed as soon as they
        are dropped, though the cycle collector may pause.
        """
        blocks, self.blocks = self.blocks, []
        self._kinds.clear()
        return blocks

    def column(self, values: list[Any], where: Where, depth: int = 0) -> Column:
        """Encode values of any kinds."""
        kinds = set(map(type, values))
        if len(kinds) > 1:
            return self._union(values, list(map(type, values)), where, depth)
        if not kinds:
            return self._nones(values, where, depth)
        if depth > MAX_DEPTH or (depth == _SUSPICIOUS_DEPTH and any(map(_too_deep, values))):
            raise _refusal(where, 0, f"more than {MAX_DEPTH} levels of nesting (or a container that contains itself)")
        kind = kinds.pop()
        encode = self._kinds.get(kind)
        if encode is not None:
            return encode(values, where, depth)
        record = record_class(kind)
        if record is not None:
            return self._records(record, values, where, depth)
        if issubclass(kind, np.generic):
            return self._scalars(values, where, depth)
        return self._others(values, where)

    # ---- values of one fixed size

    def _block(self, kind: str, array: NDArray[Any]) -> Column:
        self.blocks.append(Block.of_array(array))
        return [kind], np.full(len(array), array.itemsize)

    def _nones(self, values: list[Any], where: Where, depth: int) -> Column:
        # A byte for each, so that the number of values that a frame announces is bounded by its length.
        return self._block("none", np.zeros(len(values), np.uint8))

    def _bools(self, values: list[Any], where: Where, depth: int) -> Column:
        return self._block("bool", np.array(values, np.bool_))

    def _ints(self, values: list[Any], where: Where, depth: int) -> Column:
        try:
            return self._block("int", np.array(values, np.int64))
        except OverflowError:
            pieces = [value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True) for value in values]
            return self._pieces("long", pieces)

    def _floats(self, values: list[Any], where: Where, depth: int) -> Column:
        return self._block("float", np.array(values, np.float64))

    def _complexes(self, values: list[Any], where: Where, depth: int) -> Column:
        return self._block("complex", np.array(values, np.complex128))

    # ---- values of different lengths

    def _lengths(self, values: list[Any]) -> Sizes:
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        self.blocks.append(Block.of_array(lengths))
        return lengths

    def _pieces(self, kind: str, pieces: list[Any]) -> Column:
        lengths = self._lengths(pieces)
        self.blocks.append(Block.of_pieces(pieces, int(lengths.sum())))
        return [kind], lengths

    def _byte_strings(self, values: list[Any], where: Where, depth: int) -> Column:
        return self._pieces(_BYTE_STRINGS[type(values[0])], values)

    def _strings(self, values: list[Any], where: Where, depth: int) -> Column:
        lengths = self._lengths(values)
        # Lengths count characters: the text of the whole column is decoded at once and then cut. surrogatepass because
        # a Python str may hold lone surrogates (file names do).
        text = "".join(values).encode("utf-8", "surrogatepass")
        self.blocks.append(Block.of_pieces([text], len(text)))
        return ["str" if type(values[0]) is str else "np.str"], lengths

    # ---- arrays

    def _tensors(self, values: list[Any], where: Where, depth: int) -> Column:
        column = self._alike(values)
        if column is not None:
            return column
        if not are_alike(values):
            return self._union(values, list(map(tensor_kind, values)), where, depth)
        return self._others(values, where, tensor_refusal(values[0]))

    def _alike(self, tensors: list[torch.Tensor]) -> Column | None:
        """The column of tensors that are all alike and can travel; None of others."""
        encoded = encode_vectors(tensors)
        if encoded is None:
            if not are_alike(tensors) or tensor_refusal(tensors[0]) is not None:
                return None
            encoded = encode_tensors(tensors)
        node, blocks, sizes = encoded
        self.blocks.extend(blocks)
        return node, sizes

    def _arrays(self, values: list[Any], where: Where, depth: int) -> Column:
        if len(set(map(array_kind, values))) > 1:
            return self._union(values, list(map(array_kind, values)), where, depth)
        described = describe_dtype(values[0].dtype)
        if described is None:
            return self._others(values, where, f"a numpy array of dtype {values[0].dtype}")
        node, blocks, sizes = encode_arrays(values, described)
        self.blocks.extend(blocks)
        return node, sizes

    def _scalars(self, values: list[Any], where: Where, depth: int) -> Column:
        dtypes = [value.dtype for value in values]
        if len(set(dtypes)) > 1:
            return self._union(values, dtypes, where, depth)
        described = describe_dtype(dtypes[0])
        if described is None:
            return self._others(values, where, f"a numpy scalar of dtype {dtypes[0]}")
        node, blocks, sizes = encode_scalars(values, described)
        self.blocks.extend(blocks)
        return node, sizes

    # ---- containers

    def _dicts(self, values: list[Any], where: Where, depth: int) -> Column:
        names = list(values[0])
        flat_names = list(chain.from_iterable(values))
        if 0 < len(names) <= _MAX_COLUMNS and flat_names == names * len(values) and set(map(type, flat_names)) == {str}:
            alone = names[0] if len(names) == 1 else None
            items = (
                list(chain.from_iterable(map(dict.values, values)))
                if alone is None
                else [value[alone] for value in values]
            )
            fields, sizes = self._fields(items, names, lambda name: f"[{name!r}]", where, depth)
            return ["dict", names, fields], sizes
        lengths = self._lengths(values)
        flat = list(chain.from_iterable(map(dict.values, values)))
        keys, key_sizes = self.column(flat_names, _of_items(lengths, lambda _: " (a key)", where), depth + 1)
        items_where = _of_items(lengths, lambda row: f"[{flat_names[row]!r}]", where)
        children_node, item_sizes = self.column(flat, items_where, depth + 1)
        return ["map", keys, children_node], _summed(key_sizes + item_sizes, lengths)

    def _sequences(self, values: list[Any], where: Where, depth: int) -> Column:
        kind, width = type(values[0]), len(values[0])
        items = list(chain.from_iterable(values))
        if kind is tuple and 0 < width <= _MAX_TUPLE and set(map(len, values)) == {width}:
            fields, sizes = self._fields(items, list(range(width)), lambda place: f"[{place}]", where, depth)
            return ["tuple", width, fields], sizes
        lengths = self._lengths(values)
        starts = lengths.cumsum() - lengths
        node, sizes = self.column(
            items, _of_items(lengths, lambda row: f"[{row - starts[starts <= row].max()}]", where), depth + 1
        )
        return ["list" if kind is list else "tuples", node], _summed(sizes, lengths)

    def _fields(
        self, items: list[Any], names: list[Any], path: Callable[[Any], str], where: Where, depth: int
    ) -> tuple[list[Any], Sizes]:
        """The columns of rows that all have the same fields; ``items`` holds the rows one behind the other.

        Tensors that are all alike become one column, whatever their fields (token ids beside labels).
        """
        width = len(names)
        woven = self._alike(items) if width > 1 and set(map(type, items)) == {torch.Tensor} else None
        if woven is not None:
            node, sizes = woven
            return ["woven", node], sizes.reshape(-1, width).sum(axis=1)
        children, total = [], np.zeros(len(items) // width, np.int64)
        for place, name in enumerate(names):
            node, sizes = self.column(items[place::width], _below(where, path(name)), depth + 1)
            children.append(node)
            total += sizes
        return ["columns", children], total

    def _records(self, record: RecordClass, values: list[Any], where: Where, depth: int) -> Column:
        cls = record.cls
        reason = class_refusal(record)
        if reason is not None:
            return self._others(values, where, f"{cls.__module__}.{cls.__qualname__}: {reason}")
        items: list[Any] = []
        for row, value in enumerate(values):
            flaw = object_flaw(record, value)
            if flaw is not None:
                return self._others(values, where, f"{cls.__module__}.{cls.__qualname__} {flaw}", row)
            items.extend(value if record.is_tuple else [getattr(value, name) for name in record.fields])
        node = ["named" if record.is_tuple else "dataclass", cls.__module__, cls.__qualname__, list(record.fields)]
        if not record.fields:
            _, sizes = self._nones(values, where, depth)
            return [*node, ["columns", []]], sizes
        fields, sizes = self._fields(items, list(record.fields), lambda name: f".{name}", where, depth)
        return [*node, fields], sizes

    def _union(self, values: list[Any], kinds: list[Hashable], where: Where, depth: int) -> Column:
        """Rows of several kinds: their tags, then a column for each kind."""
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        tags = np.fromiter((numbers[kind] for kind in kinds), np.uint32, len(kinds))
        self.blocks.append(Block.of_array(tags))
        children, total = [], np.zeros(len(values), np.int64)
        for number in range(len(numbers)):
            rows = np.flatnonzero(tags == number)
            node, sizes = self.column([values[row] for row in rows], _of_rows(where, rows), depth)
            children.append(node)
            total[rows] = sizes
        return ["union", children], total

    def _others(self, values: list[Any], where: Where, found: str | None = None, row: int = 0) -> Column:
        if not self._allow_pickle:
            kind = type(values[0])
            raise _refusal(where, row, found or f"{kind.__module__}.{kind.__qualname__}")
        pieces = []
        for place, value in enumerate(values):
            try:
                pieces.append(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
            except Exception as error:
                raise _refusal(where, place, f"{type(value).__qualname__}, which does not pickle ({error})") from error
        return self._pieces("pickle", pieces)


def _refusal(where: Where, row: int, found: str) -> CodecError:
    sample, path = where(row)
    return CodecError(f"cannot encode {path}: {found}; {_ACCEPTED}", sample)


def _too_deep(value: Any, above: tuple[int, ...] = (), seen: set[int] | None = None) -> bool:
    """Whether containers are nested too deeply, or in a circle: taken apart level by level, it might double at each."""
    seen = set() if seen is None else seen
    if id(value) in above or len(above) > MAX_DEPTH:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    inner: Any = value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
    if isinstance(value, (list, tuple)):
        inner = value
    return any(_too_deep(item, (*above, id(value)), seen) for item in inner)


def _below(where: Where, suffix: str) -> Where:
    def inner(row: int) -> tuple[int, str]:
        sample, path = where(row)
        return sample, path + suffix

    return inner


def _of_rows(where: Where, rows: NDArray[np.intp]) -> Where:
    return lambda row: where(int(rows[row]))


def _of_items(lengths: Sizes, suffix: Callable[[int], str], where: Where) -> Where:
    def inner(row: int) -> tuple[int, str]:
        sample, path = where(int(np.searchsorted(lengths.cumsum(), row, side="right")))
        return sample, path + suffix(row)

    return inner


def _summed(sizes: Sizes, lengths: Sizes) -> Sizes:
    """The sizes of items summed for each of the containers that they lie in."""
    ends = np.concatenate([np.zeros(1, np.int64), sizes.cumsum()])
    last = lengths.cumsum()
    summed: Sizes = ends[last] - ends[last - lengths]
    return summed
