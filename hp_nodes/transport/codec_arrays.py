"""Columns of numpy arrays and numpy scalars of one dtype.

Takes arrays, gives their shapes and bytes as two blocks; the other way round gives arrays that are views of the
received bytes: writable, C-contiguous, of the same dtype (byte order and fields included) and shape. Dtypes that hold
Python objects are refused in both directions: their bytes are addresses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.transport.codec_frame import Block, Bytes, CodecError

_PLAIN = re.compile(r"[<>|]([biufcSUV]\d+|[mM]8(\[\d*[A-Za-z]+\])?|[qQ])")

array_kind = attrgetter("dtype", "ndim")
"""What the arrays of one column have in common."""
_nbytes = attrgetter("nbytes")
_shape = attrgetter("shape")


def describe_dtype(dtype: np.dtype[Any]) -> Any | None:
    """A dtype as plain lists and text; None when it cannot travel."""
    if dtype.hasobject or dtype.itemsize == 0:
        return None
    try:
        # C's long long is another type than long, of the same size and the same description.
        exact = dtype.char in "qQ" and np.dtype(dtype.str).char != dtype.char
        described = dtype.str[0] + dtype.char if exact else _to_plain(np.lib.format.dtype_to_descr(dtype))
        found = read_dtype(described)
        return described if found == dtype and found.type is dtype.type else None
    except (CodecError, ValueError, TypeError):
        return None


def _to_plain(description: Any) -> Any:
    if isinstance(description, (list, tuple)):
        return [_to_plain(part) for part in description]
    return description


def read_dtype(described: Any) -> np.dtype[Any]:
    """The dtype that ``describe_dtype`` described.

    Raises:
        CodecError: it is not one of those.
    """
    try:
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_checked(described))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CodecError(f"malformed frame: {described!r} is not a dtype") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise CodecError(f"malformed frame: dtype {dtype} cannot travel")
    return dtype


def _checked(described: Any) -> Any:
    """The description as numpy's own reader takes it, made of nothing but names, plain types and small shapes."""
    if isinstance(described, str) and _PLAIN.fullmatch(described):
        return described
    if isinstance(described, list) and described and all(isinstance(field, list) for field in described):
        return [(_field_name(name), _checked(inner), *map(_sub_shape, shape)) for name, inner, *shape in described]
    raise CodecError(f"malformed frame: {described!r} is not a dtype")


def _field_name(name: Any) -> Any:
    if isinstance(name, str):
        return name
    if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
        return tuple(name)  # title and name
    raise CodecError(f"malformed frame: {name!r} is not the name of a field")


def _sub_shape(shape: Any) -> tuple[int, ...]:
    if isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape):
        return tuple(shape)
    raise CodecError(f"malformed frame: {shape!r} is not the shape of a field")


def encode_arrays(arrays: list[NDArray[Any]], described: Any) -> tuple[list[Any], list[Block], NDArray[np.int64]]:
    """Node, blocks and bytes of each of arrays of one dtype (described) and number of dimensions."""
    rank = arrays[0].ndim
    sizes = np.fromiter(map(_nbytes, arrays), np.int64, len(arrays))
    shapes = np.array(list(map(_shape, arrays)), np.int64).reshape(len(arrays), rank)
    return ["array", described, rank], [Block.of_array(shapes), Block(int(sizes.sum()), _gather(arrays))], sizes


def _gather(arrays: list[NDArray[Any]]) -> Any:
    def write(target: Bytes) -> None:
        np.concatenate(arrays, axis=None, out=target.view(arrays[0].dtype))

    return write


def decode_arrays(node: Sequence[Any], shapes: NDArray[np.int64], payload: Bytes) -> list[NDArray[Any]]:
    """The arrays of a column; ``shapes`` is int64[n, rank] and describes the payload (the caller checked)."""
    dtype = read_dtype(node[1])
    flat = _typed(payload, dtype)
    ends = shapes.prod(axis=1).cumsum()
    starts = [0, *ends[:-1].tolist()]
    pieces = [flat[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]
    if shapes.shape[1] == 1:
        return pieces
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes.tolist(), strict=True)]


def encode_scalars(scalars: list[np.generic], described: Any) -> tuple[list[Any], list[Block], NDArray[np.int64]]:
    """Node, block and bytes of each of numpy scalars of one dtype (described)."""
    dtype = scalars[0].dtype
    column = np.empty(len(scalars), dtype)
    column[:] = scalars
    return ["scalar", described], [Block.of_array(column)], np.full(len(scalars), dtype.itemsize)


def decode_scalars(node: Sequence[Any], payload: Bytes) -> list[np.generic]:
    """The scalars of a column; the payload is whole items (the caller checked)."""
    return list(_typed(payload, read_dtype(node[1])))


def _typed(payload: Bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if payload.ctypes.data % max(dtype.alignment, 1):
        payload = payload.copy()
    return payload.view(dtype)
