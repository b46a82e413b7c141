"""Columns of torch tensors: many tensors of one dtype and rank, written by one ``torch.cat`` and read by one split.

Takes tensors, gives their shapes and bytes as two blocks; the other way round gives tensors that are views of the
received bytes: writable, contiguous, of the same dtype and shape. What makes a tensor more than its numbers (a
device, a gradient, a sparse or quantised layout) does not travel, so a tensor that has it is refused: a sample that
stayed would still have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hp_nodes.transport.codec_frame import Block, Bytes, CodecError

_NATIVE = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 "
_CARRIED = (
    "uint16 uint32 uint64 complex32 bits8 bits16 bits1x8 bits2x4 bits4x2 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7"
)
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (_NATIVE + _CARRIED).split() if hasattr(torch, name)
}
SUPPORTED_DTYPES = tuple(_DTYPES.values())
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Copying some dtypes is not implemented for every layout of memory; integers of the same size carry their bits.
_CARRIERS = {
    _DTYPES[name]: {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[_DTYPES[name].itemsize]
    for name in _CARRIED.split()
    if name in _DTYPES
}

tensor_kind = attrgetter("dtype", "ndim", "is_cpu", "layout", "requires_grad")
"""What the tensors of one column have in common."""
_shape = attrgetter("shape")
# One pass for each, the cheapest call first: it brings the tensors into the cache (a fifth faster than dtype first).
_PROPERTIES = (torch.Tensor.dim, attrgetter("dtype"), attrgetter("is_cpu"), attrgetter("layout"))
_REQUIRES_GRAD = attrgetter("requires_grad")
_DTYPE = attrgetter("dtype")
_VECTOR_DTYPES = frozenset(dtype for name, dtype in _DTYPES.items() if name in _NATIVE.split() and not dtype.is_complex)
_SMALL = 4096  # bytes of a tensor: up to here what is looked at costs more than what is copied
_MANY = 8


def are_alike(tensors: list[torch.Tensor]) -> bool:
    """Whether all have the same ``tensor_kind``."""
    dtype = tensors[0].dtype
    can_require_grad = dtype.is_floating_point or dtype.is_complex
    properties = (*_PROPERTIES, _REQUIRES_GRAD) if can_require_grad else _PROPERTIES
    return all(len(set(map(of, tensors))) == 1 for of in properties)


def tensor_refusal(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot travel; None when it can."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        return f"a tensor of layout {layout}; accepted: dense tensors (torch.strided)"
    if not tensor.is_cpu:
        return f"a tensor on device {str(tensor.device)!r}; accepted: tensors on the CPU"
    if tensor.requires_grad:
        return "a tensor that requires grad; accepted: tensors without (x.detach())"
    if tensor.dtype not in _NAMES:
        return f"a tensor of dtype {tensor.dtype}; accepted: the dtypes that are plain numbers, not quantised ones"
    return None


def encode_vectors(tensors: list[torch.Tensor]) -> tuple[list[Any], list[Block], NDArray[np.int64]] | None:
    """As ``encode_tensors``, of many small vectors; None when that is not what they are, whatever the reason.

    They are put together at once, and device, layout, gradient and dimensions are those of the result: ``torch.cat``
    gives what none of them has only for dtypes, which are compared first. Looking at each property of each tensor
    would take twice as long.
    """
    first = tensors[0]
    if first.ndim != 1 or first.dtype not in _VECTOR_DTYPES or len(tensors) < _MANY:
        return None
    if first.numel() * first.itemsize > _SMALL:
        return None
    if len(set(map(_DTYPE, tensors))) != 1 or torch.is_inference_mode_enabled():
        return None
    elements = np.fromiter(map(torch.Tensor.numel, tensors), np.int64, len(tensors))
    total = int(elements.sum())
    if total * first.itemsize > len(tensors) * _SMALL:
        return None
    try:
        with torch.enable_grad():  # or the result would not tell of a gradient
            flat = torch.cat(tensors)
    except (RuntimeError, TypeError):
        return None
    if flat.ndim != 1 or flat.dtype is not first.dtype or len(flat) != total or tensor_refusal(flat) is not None:
        return None
    content = Block.of_array(flat.view(torch.uint8).numpy())
    return ["tensor", _NAMES[first.dtype], 1], [Block.of_array(elements), content], elements * first.itemsize


def encode_tensors(tensors: list[torch.Tensor]) -> tuple[list[Any], list[Block], NDArray[np.int64]]:
    """Node, blocks and bytes of each of tensors that share their ``tensor_kind`` and have no refusal."""
    dtype, rank = tensors[0].dtype, tensors[0].ndim
    node = ["tensor", _NAMES[dtype], rank]
    elements = np.fromiter(map(torch.Tensor.numel, tensors), np.int64, len(tensors))
    sizes = elements * dtype.itemsize
    shapes = elements[:, None][:, :rank] if rank <= 1 else np.array(list(map(_shape, tensors)), np.int64)
    payload = Block(int(sizes.sum()), lambda target: _gather(tensors, shapes, target))
    return node, [Block.of_array(shapes), payload], sizes


def _gather(tensors: list[torch.Tensor], shapes: NDArray[np.int64], target: Bytes) -> None:
    if target.size == 0:
        return
    dtype = tensors[0].dtype
    if dtype.is_complex and any(map(torch.is_conj, tensors)):
        tensors = [tensor.resolve_conj() for tensor in tensors]
    if dtype in _CARRIERS:
        dtype = _CARRIERS[dtype]
        tensors = [tensor.view(dtype) for tensor in tensors]
    flat = torch.from_numpy(target).view(dtype)
    if shapes.shape[1] == 0:
        torch.stack(tensors, out=flat)
    elif (shapes[:, 1:] == shapes[0, 1:]).all():
        torch.cat(tensors, out=flat.view(-1, *shapes[0, 1:].tolist()))
    else:
        for place, tensor in zip(_split(flat, shapes), tensors, strict=True):
            place.copy_(tensor)


def decode_tensors(node: Sequence[Any], shapes: NDArray[np.int64], payload: Bytes) -> list[torch.Tensor]:
    """The tensors of a column; ``shapes`` is int64[n, rank] and describes the payload (the caller checked)."""
    dtype = _DTYPES.get(node[1])
    if dtype is None:
        raise CodecError(f"the frame has tensors of dtype {node[1]!r}, which this release of torch does not know")
    if payload.size == 0:
        return [torch.empty(shape, dtype=dtype) for shape in shapes.tolist()]
    if payload.ctypes.data % dtype.itemsize:
        payload = payload.copy()
    return _split(torch.from_numpy(payload).view(dtype), shapes)


def tensor_itemsize(node: Sequence[Any]) -> int:
    """Bytes of one element of a column's tensors; 1 for a dtype that is not known."""
    return _DTYPES.get(node[1], torch.uint8).itemsize


def _split(flat: torch.Tensor, shapes: NDArray[np.int64]) -> list[torch.Tensor]:
    # The unsafe splits give tensors that autograd does not see as views of one another: with the safe ones, writing a
    # value that requires grad into one of them raises.
    rank = shapes.shape[1]
    if rank and (shapes[:, 1:] == shapes[0, 1:]).all():
        rows = flat.view(-1, *shapes[0, 1:].tolist())
        return list(torch.unsafe_split_with_sizes(rows, shapes[:, 0].tolist()))
    pieces = torch.unsafe_split_with_sizes(flat, shapes.prod(axis=1).tolist())
    return [piece.view(shape) for piece, shape in zip(pieces, shapes.tolist(), strict=True)]
