"""Samples of every supported kind, an equality that misses nothing, and frames broken in every way: for the
codec's tests.
"""

from __future__ import annotations

import dataclasses
import struct
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st

from hp_nodes.transport.codec_tensors import SUPPORTED_DTYPES

NUMPY_DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    *(">i4", ">f8", ">c16", "S5", "U3", ">U3", "V7", "M8[ns]", "m8[3D]", "M8"),
    [("a", "<i4"), ("b", ">f8", (2, 3)), ("c", "S2")],
    {"names": ["x", "y"], "formats": ["u1", "<i8"], "offsets": [2, 8], "itemsize": 24},
]


class Point(NamedTuple):
    x: Any
    y: Any = None


T = TypeVar("T")


@dataclasses.dataclass
class Plain:
    """Counts how often its initialiser ran, to show that arriving does not run it."""

    a: Any
    b: Any = 0
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1

    @cached_property
    def twice(self) -> Any:
        return self.a * 2


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen(Generic[T]):
    first: T
    second: Any


@dataclasses.dataclass
class Empty:
    pass


class Outer:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        value: Any


def same(a: Any, b: Any) -> bool:
    """Equal in type, container, key order, dtype, shape and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, (np.ndarray, np.generic)) and not isinstance(a, (np.str_, np.bytes_)):
        # Padding, between the fields of a structure or behind an 80-bit float, is nobody's value.
        padded = a.dtype.names is not None or a.dtype.char in "gG"
        equal = a.tobytes() == b.tobytes() or (padded and a.tolist() == b.tolist())
        return a.dtype == b.dtype and a.dtype.type is b.dtype.type and a.shape == b.shape and equal
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    return bool(a == b)


def bits(tensor: torch.Tensor) -> bytes:
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.itemsize]
    plain = tensor.resolve_conj().resolve_neg().view(carrier)
    return plain.contiguous().numpy().tobytes()


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of any bits (for bool: zeros and ones)."""
    count = int(np.prod(shape)) * dtype.itemsize
    numbers = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    return torch.from_numpy(numbers).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def array_of(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """A contiguous array of small numbers in any dtype."""
    made = np.zeros(shape, dtype)
    if made.dtype.names is None:
        numbers = np.random.default_rng(seed).integers(0, 2, shape)
        made[...] = numbers.astype(made.dtype) if made.dtype.kind != "V" else np.void(b"\1" * made.dtype.itemsize)
    else:
        made[made.dtype.names[0]] = seed % 100
    return made


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = st.builds(tensor_of, st.sampled_from(SUPPORTED_DTYPES), SHAPES, st.integers(0, 99)).flatmap(
    lambda tensor: st.sampled_from(
        [tensor, tensor.transpose(0, -1), tensor[..., None][..., :1]] if tensor.ndim else [tensor]
    )
)
ARRAYS = st.builds(array_of, st.sampled_from(NUMPY_DTYPES), SHAPES, st.integers(0, 99)).flatmap(
    lambda array: st.sampled_from([array, array.T, array[..., ::-1]] if array.ndim else [array])
)
SCALARS = ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])
TEXT = st.text(st.characters(codec=None), max_size=5)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**30), 10**30), st.floats(), st.complex_numbers(), TEXT,
    st.binary(max_size=5), st.binary(max_size=5).map(bytearray),
    TEXT.map(np.str_), st.binary(max_size=5).map(np.bytes_),
)  # fmt: skip
LEAVES = st.one_of(PLAIN, TENSORS, ARRAYS, SCALARS)
KEYS = st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.binary(max_size=3), st.tuples(st.integers(), TEXT))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXT, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner, inner),
        st.just(Empty()),
        st.builds(Outer.Inner, inner),
    )


SAMPLES = st.recursive(LEAVES, containers, max_leaves=12)
# Real samples are alike: the same few structures, over and over.
BATCHES = st.lists(SAMPLES, max_size=4).flatmap(
    lambda some: st.lists(st.sampled_from(some), max_size=12) if some else st.just([])
)


def mutate(frame: np.ndarray[Any, Any], generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """One of the things that can happen to bytes on their way; the result may happen to be the same frame."""
    made, size = frame.copy(), frame.size
    start, length = int(generator.integers(size)), int(generator.integers(1, 200))
    end = min(start + length, size)
    match int(generator.integers(9)):
        case 0:
            made[start] ^= 1 << int(generator.integers(8))
        case 1:
            made[start] = generator.integers(256)
        case 2:
            made[start:end] = generator.integers(0, 256, end - start)
        case 3:
            made[start:end] = 0
        case 4:
            made = made[:start].copy()
        case 5:
            made = np.concatenate([made, generator.integers(0, 256, length, dtype=np.uint8)])
        case 6:
            made = np.concatenate([made[:start], made[end:]])
        case 7:
            words, (i, j) = made.view(np.uint64), generator.integers(0, size // 8, 2)
            words[i], words[j] = words[j], words[i]
        case _:
            number = generator.choice(np.array([0, 1, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1], np.uint64))
            made.view(np.uint64)[start // 8] = number
    return made
