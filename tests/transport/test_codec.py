"""What a user relies on: a sample that moved is the sample that stayed; what cannot be is refused with its path."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hp_nodes.transport.codec import Codec, CodecError
from hp_nodes.transport.codec_tensors import SUPPORTED_DTYPES
from hp_nodes.transport.send_buffer import SendBuffer
from tests.transport.codec_samples import (
    BATCHES,
    NUMPY_DTYPES,
    Empty,
    Frozen,
    Outer,
    Plain,
    Point,
    array_of,
    bits,
    same,
    tensor_of,
)


def moved(samples: list[Any], **options: Any) -> list[Any]:
    codec = Codec(**options)
    return codec.decode(codec.frame(samples).to_array())


@settings(max_examples=300, deadline=None)
@given(BATCHES)
def test_samples_come_back_as_they_were(samples: list[Any]) -> None:
    assert same(moved(samples), samples)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (0, 4), (4, 0, 2)], ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = [tensor_of(dtype, shape, seed) for seed in range(3)]
    tensors += [tensor.transpose(0, -1) for tensor in tensors if tensor.ndim]
    tensors += [tensor_of(dtype, (9, 2), 7)[::2, 1], tensor_of(dtype, (1,), 8).expand(3, 2)]
    found = moved(tensors)
    assert same(found, tensors)
    assert all(tensor.is_contiguous() for tensor in found)


def test_tensors_of_all_dtypes_side_by_side() -> None:
    sample = {"all": [tensor_of(dtype, (3, 2)) for dtype in SUPPORTED_DTYPES], "n": np.arange(3)}
    assert same(moved([sample, sample]), [sample, sample])


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_arrays_and_scalars_of_every_dtype(dtype: Any) -> None:
    arrays = [array_of(dtype, shape, 3) for shape in [(), (0,), (4,), (2, 3), (0, 2)]]
    arrays += [array_of(dtype, (6, 2), 1)[::-2, 1], array_of(dtype, (2, 3), 1).T]
    scalars = [array_of(dtype, (2,), seed)[seed] for seed in range(2)]
    assert same(moved([arrays, scalars]), [arrays, scalars])


def test_integers_never_travel_as_floats() -> None:
    offsets = [8388609, 16777217, 16777219]
    sample = {
        "t": torch.tensor(offsets),
        "i32": torch.tensor(offsets, dtype=torch.int32),
        "n": offsets,
        "a": np.array(offsets),
    }
    assert same(moved([sample]), [sample])


def test_lazy_conjugates_and_negatives_are_their_values() -> None:
    z = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    sample = [z.conj(), z, z.conj()[1], z.conj().imag, z.to(torch.complex32).conj()]
    assert same(moved([sample]), [sample])
    assert bits(moved(sample)[3]) == struct.pack("3f", -1, -2, -3)


@pytest.mark.parametrize("number", [0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0x8000000000000000, 0x0000000000000001])
def test_floats_keep_every_bit(number: int) -> None:
    value = struct.unpack("d", struct.pack("Q", number))[0]
    assert same(moved([value, complex(value, value)]), [value, complex(value, value)])


def test_large_integers_and_text() -> None:
    values = [
        2**63 - 1,
        -(2**63),
        2**63,
        -(2**64),
        10**5000,
        -1,
        0,
        "\ud83d",
        "\ude00",
        "a\0b",
        "",
        "日本語" * 1000,
        b"\0",
        b"",
    ]
    assert same(moved(values), values)
    assert same(moved([np.str_("a\0"), np.bytes_(b"b\0"), np.longlong(3), np.ulonglong(4)]), [
        np.str_("a\0"), np.bytes_(b"b\0"), np.longlong(3), np.ulonglong(4)
    ])  # fmt: skip


def test_keys_keep_their_type_and_order() -> None:
    samples = [
        {"b": 1, "a": 2},
        {"a": 2, "b": 1},
        {1: "x"},
        {True: "x"},
        {1.0: "x"},
        {np.str_("b"): 1, "a": 2},
        {("k", 0): None},
        {},
    ]
    assert same(moved(samples), samples)
    wide = {f"key {i}": i for i in range(500)}
    assert same(moved([wide] * 2), [wide] * 2)


def test_named_tuples_and_dataclasses_are_rebuilt_without_running_their_code() -> None:
    plain = Plain(torch.arange(3))
    plain.made = 41
    assert plain.twice[1] == 2
    samples = [plain, Point(1, [Point(2)]), Frozen("a", np.arange(2)), Empty(), Outer.Inner({"x": Frozen(1, 2)})]
    found = moved(samples)
    assert same(found, samples)
    assert found[0].made == 41
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[2].first = 0
    assert torch.equal(found[0].twice, torch.tensor([0, 2, 4]))


def test_order_is_kept_across_kinds_and_chunks() -> None:
    samples = [
        (torch.full((i % 7,), i), {"i": i}, [i] * (i % 3), str(i), np.float32(i), None)[i % 6] for i in range(5000)
    ]
    assert same(moved(samples), samples)


def test_decoded_tensors_and_arrays_are_writable_aligned_views_of_the_buffer() -> None:
    codec = Codec()
    samples = [
        {"t": torch.arange(5 + i), "u": torch.zeros(3, dtype=torch.uint8), "a": np.arange(3.0)} for i in range(3)
    ]
    storage = np.zeros(codec.frame(samples).nbytes + 64, np.uint8)
    start = -storage.ctypes.data % 64
    buffer = storage[start : start + storage.size - 64]
    codec.frame(samples).write_into(buffer)
    found = codec.decode(torch.from_numpy(buffer))
    first, behind = buffer.ctypes.data, buffer.ctypes.data + buffer.size
    for sample in found:
        assert first <= sample["t"].data_ptr() < behind
        assert first <= sample["a"].ctypes.data < behind
        assert sample["t"].data_ptr() % 8 == 0 and sample["a"].flags.aligned and sample["a"].flags.writeable
    found[0]["t"][:] = -1
    found[0]["a"][:] = -1
    assert same(found[1], samples[1])


def test_a_decoded_tensor_takes_part_in_autograd() -> None:
    for sample in moved([torch.zeros(3), torch.zeros(3), torch.zeros(()), torch.zeros(2, 3), torch.zeros(3, 2)]):
        weight = torch.ones(sample.shape, requires_grad=True)
        sample.mul_(2).add_(weight)
        sample.sum().backward()
        assert torch.equal(weight.grad, torch.ones(sample.shape))


@pytest.mark.parametrize("shift", [1, 4, 8])
def test_a_buffer_at_an_odd_address(shift: int) -> None:
    samples = [
        {"t": torch.arange(9.0), "c": tensor_of(torch.complex128, (3,)), "a": np.arange(4), "i": [1, 2**70], "s": "é"}
    ] * 2
    codec = Codec()
    frame = codec.frame(samples)
    buffer = np.zeros(frame.nbytes + shift, np.uint8)[shift:]
    frame.write_into(buffer)
    found = codec.decode(buffer)
    assert same(found, samples)
    assert found[0]["t"].data_ptr() % 4 == 0 and found[0]["a"].flags.aligned


def test_a_read_only_buffer_gives_writable_samples() -> None:
    codec = Codec()
    buffer = codec.frame([np.arange(3), torch.arange(3)]).to_array()
    buffer.flags.writeable = False
    array, tensor = codec.decode(buffer)
    array[0] = tensor[0] = 7
    assert same(codec.decode(buffer), [np.arange(3), torch.arange(3)])


def test_payload_is_copied_once_on_each_side() -> None:
    mib = 1 << 20
    samples = [
        {"a": np.full(mib, i, np.uint8), "b": b"x" * mib, "c": np.zeros((mib // 8, 2), np.int64)[:, 0]}
        for i in range(8)
    ]
    codec = Codec()
    buffer = np.zeros(codec.frame(samples).nbytes, np.uint8)
    tracemalloc.start()
    try:
        codec.frame(samples).write_into(buffer)
        assert tracemalloc.get_traced_memory()[1] < mib / 4
        tracemalloc.reset_peak()
        found = codec.decode(buffer)
        assert tracemalloc.get_traced_memory()[1] < 8.5 * mib  # bytes objects must be made; arrays are views
    finally:
        tracemalloc.stop()
    assert same(found, samples)


def test_frames_know_their_size_and_that_of_each_sample() -> None:
    codec = Codec()
    samples = [{"x": torch.zeros(10), "y": [np.zeros(4), "abc"]}, {"x": torch.zeros(2, 2), "y": []}, b"12345"]
    frame = codec.frame(samples)
    assert frame.sizes.tolist() == [40 + 32 + 3, 16, 5] or frame.sizes.tolist() == [40 + 32 + 3 + 2, 16 + 2, 5]
    assert frame.nbytes == frame.to_array().size and frame.nbytes % 64 == 0
    assert [codec.nbytes(sample) for sample in samples] == [75, 16, 5]
    assert codec.nbytes(object()) > 0
    tokens = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (3, 0, 5)]
    assert codec.frame(tokens).sizes.tolist() == [48, 0, 80]
    assert codec.nbytes({"ids": [1, 2, 3]}) == 24
    empty = codec.frame([])
    assert empty.sizes.shape == (0,) and codec.decode(empty.to_array()) == []


@dataclasses.dataclass
class Widened:
    a: int

    def __post_init__(self) -> None:
        self.hidden = 1


class Tagged(Point):
    """A named tuple whose objects hold more than its fields."""


def local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int

    return Local(1)


def tagged() -> Any:
    value = Tagged(1)
    value.tag = "x"  # type: ignore[attr-defined]
    return value


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({1, 2}, "builtins.set"),
        (object(), "builtins.object"),
        (pathlib.PurePosixPath("a"), "PurePosixPath"),
        (collections.OrderedDict(a=1), "OrderedDict"),
        (torch.ones(2, requires_grad=True), "requires grad"),
        (torch.ones(2, device="meta"), "device 'meta'"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.eye(2).to_sparse_csr(), "torch.sparse_csr"),
        (torch.nn.Parameter(torch.ones(2)), "torch.nn.parameter.Parameter"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, "V0"), "dtype |V0"),
        (np.ma.masked_array([1], [True]), "MaskedArray"),
        (torch.float32, "torch.dtype"),
        (torch.Size([1]), "torch.Size"),
        (local_class(), "accepted: classes defined at the top level"),
        (Widened(1), "attributes that are not fields: ['hidden']"),
        (tagged(), "attributes that are not fields: ['tag']"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_travel_is_refused_with_its_path(value: Any, found: str) -> None:
    good = {"image": [1, 2, Point(3)], "n": 1}
    bad = {"image": [1, 2, Point(value)], "n": 1}
    for samples, place in (([bad], 0), ([good, good, bad], 2), ([good, [1], bad, {"other": 1}], 2)):
        with pytest.raises(CodecError) as caught:
            Codec().frame(samples)
        assert "sample['image'][2].x" in str(caught.value)
        assert found in str(caught.value)
        assert "allow_pickle=True" in str(caught.value)
        assert caught.value.sample == place
    with pytest.raises(CodecError, match=re.escape(found)):
        Codec().check(bad)
    Codec().check(good)


def test_quantised_tensors_are_refused() -> None:
    with pytest.warns(UserWarning, match="quantize"):
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(CodecError, match="qint8"):
        Codec().check([quantised])


def test_paths_through_every_container() -> None:
    for sample, path in (
        ([[0], [1, {2}]], "sample[1][1]"),
        ((1, ({2},)), "sample[1][0]"),
        ({"a": {5: {2}}}, "sample['a'][5]"),
        (Plain(1, {2}), "sample.b"),
        ([[], [], [[], [{2}]]], "sample[2][1][0]"),
        ({frozenset(): 1}, "sample (a key)"),
        ({"a": torch.ones(2), "b": torch.ones(2, requires_grad=True)}, "sample['b']"),
        ({"a": torch.ones(2, requires_grad=True), "b": torch.ones(2, requires_grad=True)}, "sample['a']"),
        ({"a": torch.ones(2), "b": [torch.ones(2), torch.ones(2, device="meta")]}, "sample['b'][1]"),
    ):
        with pytest.raises(CodecError, match=re.escape(f"cannot encode {path}: ")):
            Codec().check(sample)


def test_a_sample_that_contains_itself_is_refused() -> None:
    for count in (1, 2):
        loop: list[Any] = []
        loop.extend([loop] * count)
        with pytest.raises(CodecError, match="contains itself"):
            Codec().check({"a": loop})


def test_pickle_only_where_it_is_allowed() -> None:
    samples = [{"a": {1, 2}, "t": torch.arange(3)}, {"a": pathlib.PurePosixPath("x"), "t": torch.arange(2)}, Widened(1)]
    found = moved(samples, allow_pickle=True)
    assert same(found[0], samples[0]) and found[1]["a"] == samples[1]["a"]
    buffer = Codec(allow_pickle=True).frame(samples).to_array()
    with pytest.raises(CodecError, match="allow_pickle=True"):
        Codec().decode(buffer)
    with pytest.raises(CodecError, match="does not pickle"):
        Codec(allow_pickle=True).check([lambda: None])


def test_a_wrong_buffer_is_refused() -> None:
    frame = Codec().frame([1])
    for buffer in (
        np.zeros(frame.nbytes + 1, np.uint8),
        np.zeros(frame.nbytes, np.int8),
        np.zeros(2 * frame.nbytes, np.uint8)[::2],
    ):
        with pytest.raises(ValueError, match="accepted: contiguous uint8"):
            frame.write_into(buffer)


MANY = [torch.arange(float(n % 5)) for n in range(40)]


@pytest.mark.parametrize(
    "odd",
    [
        torch.arange(3),
        torch.zeros(3, dtype=torch.float64),
        torch.ones(2, 2),
        torch.tensor(1.0),
        torch.zeros(0, 7),
        torch.arange(6.0)[::2],
        torch.zeros(100_000),
    ],
    ids=lambda odd: f"{odd.dtype} {tuple(odd.shape)}",
)
def test_one_tensor_unlike_many_small_ones_comes_back_as_it_was(odd: Any) -> None:
    for samples in ([*MANY, odd, *MANY], [odd, *MANY], [{"x": vector, "y": odd} for vector in MANY]):
        assert same(moved(samples), samples)


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        (torch.ones(2, requires_grad=True), "requires grad"),
        (torch.ones(2, device="meta"), "device 'meta'"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
    ],
    ids=str,
)
def test_one_that_cannot_travel_among_many_small_ones_is_named(odd: Any, found: str) -> None:
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(CodecError, match=found) as caught:
            Codec().frame([{"x": vector} for vector in [*MANY, odd, *MANY]])
        assert caught.value.sample == len(MANY)
    with torch.inference_mode(), pytest.raises(CodecError, match=found):
        Codec().frame([*MANY, odd])


def test_many_small_vectors_of_a_negated_view_keep_their_values() -> None:
    samples = [torch.complex(torch.zeros(2), vector[:2] + 1).conj().imag for vector in MANY if len(vector) > 1]
    assert all(sample.is_neg() for sample in samples)
    assert all(torch.equal(one, other) for one, other in zip(moved(samples), samples, strict=True))


@settings(max_examples=100, deadline=None)
@given(BATCHES, BATCHES)
def test_frames_appended_to_a_send_buffer_follow_one_another(first: list[Any], second: list[Any]) -> None:
    codec, buffer = Codec(), SendBuffer()
    for _ in range(2):  # the second time in the memory of the first
        buffer.clear()
        ends = [codec.encode(samples, buffer)[0] for samples in (first, second)]
        assert buffer.used == sum(ends)
        assert ends[0] == codec.frame(first).nbytes and same(codec.decode(buffer.view(0, ends[0]).copy()), first)
        assert same(codec.decode(buffer.view(ends[0]).copy()), second)


def test_a_send_buffer_holds_no_more_than_it_may() -> None:
    codec, buffer = Codec(), SendBuffer()
    samples = [torch.arange(1000) for _ in range(5000)]
    nbytes, sizes = codec.encode(samples, buffer)
    assert not buffer.overflowed and sizes.tolist() == [8000] * 5000
    buffer.clear(limit=1 << 20)
    assert codec.encode(samples, buffer)[0] == nbytes
    assert buffer.overflowed and buffer.used <= 1 << 20
    buffer.clear()
    assert codec.encode(samples[:10], buffer)[0] == buffer.used and not buffer.overflowed
    assert same(codec.decode(buffer.view().copy()), samples[:10])


def test_a_send_buffer_gives_back_what_one_large_exchange_took() -> None:
    codec, buffer = Codec(), SendBuffer()
    codec.encode([torch.zeros(10_000_000)], buffer)
    for _ in range(8):
        buffer.clear()
        codec.encode([torch.zeros(100_000)], buffer)
    assert buffer.nbytes < 4_000_000
