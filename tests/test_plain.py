"""State as text: what a node may keep comes back equal and of the same type; what it may not is named."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_nodes.plain import from_text, to_text

VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**70),
    "ünï \U0001f600 \x00",
    1.5,
    math.inf,
    -math.inf,
    b"\x00\xff",
    bytearray(b"ab"),
    [],
    (),
    {},
    [1, (2, [3, (4,)])],
    {"a": {"b": (1, 2)}},
    {1: "a", (2, 3): "b", None: "c", "d": 4},
    {"__hp_nodes__": "tuple", "items": [1]},
    np.int16(-3),
    np.float32(0.1),
    np.bool_(True),
    np.uint64(2**64 - 1),
    np.complex128(1 + 2j),
]
ARRAYS: list[Any] = [
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros((0, 4), dtype=np.float64),
    np.array(3.5),
    np.arange(6)[::2],
    np.arange(3, dtype=">i4"),
    np.array([True, False]),
]
TENSORS: list[Any] = [
    torch.arange(6, dtype=torch.int64).view(2, 3),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor([], dtype=torch.float32),
    torch.arange(6)[::2],
    torch.tensor([True, False]),
    torch.ones(2, requires_grad=True),
]
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value: Any) -> None:
    text = to_text(value)
    json.loads(text)
    assert same(from_text(text), value)


@given(plain)
def test_any_nest_of_plain_values_comes_back(value: Any) -> None:
    assert same(from_text(to_text(value)), value)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(from_text(to_text({"a": math.nan}))["a"])


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
def test_arrays_come_back_and_may_be_written(value: np.ndarray) -> None:
    back = from_text(to_text([value]))[0]
    assert back.dtype == value.dtype and back.shape == value.shape
    assert np.array_equal(back, value)
    assert back.flags.writeable


@pytest.mark.parametrize("value", TENSORS, ids=repr)
def test_tensors_come_back(value: torch.Tensor) -> None:
    back = from_text(to_text({"t": value}))["t"]
    assert back.dtype == value.dtype
    assert torch.equal(back, value)


def test_states_of_generators_come_back() -> None:
    python, numpy, tensor = random.Random(3), np.random.default_rng(3), torch.Generator().manual_seed(3)
    text = to_text([python.getstate(), numpy.bit_generator.state, tensor.get_state()])
    expected = [python.random(), numpy.random(), torch.rand(1, generator=tensor).item()]
    states = from_text(text)
    python, numpy, tensor = random.Random(), np.random.default_rng(), torch.Generator()
    python.setstate(states[0])
    numpy.bit_generator.state = states[1]
    tensor.set_state(states[2])
    assert [python.random(), numpy.random(), torch.rand(1, generator=tensor).item()] == expected


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: None, np.array(["a"]), np.array([object()]), np.str_("a"), torch.float32, range(3)],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(ValueError, match=r"state\['Filter'\]\['seen'\]\[1\] is a .*; a node's state may hold None"):
        to_text({"Filter": {"seen": [0, value]}})


@pytest.mark.parametrize("text", ["", "{", '{"__hp_nodes__": "nonsense"}', "nonsense"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_text(text)
