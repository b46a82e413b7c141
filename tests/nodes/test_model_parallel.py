"""CONTRACT 7: what the constructor's model peers get, how little is sent for it, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torchdata.nodes import BaseNode

from hp_nodes import DataPlaneError, MicroBatch, ModelParallelBroadcaster, TensorFieldSpec
from hp_nodes.transport import DataTopology, create_transport, run_ranks

PEERS = {"dp": 1, "tp": 3}
HEADER = 1024  # bytes


class Batches(BaseNode[MicroBatch]):
    """A constructor's micro-batches, from a list of their data; two rounds a step."""

    def __init__(self, data: list[Any]) -> None:
        super().__init__()
        self.data = data
        self.given = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.given = 0

    def next(self) -> MicroBatch:
        if self.given == len(self.data):
            raise StopIteration
        self.given += 1
        step, number = divmod(self.given - 1, 2)
        ends = number == 1
        return MicroBatch(self.data[self.given - 1], 0, step, number, True, ends, self.given == len(self.data))

    def get_state(self) -> dict[str, Any]:
        return {"given": self.given}


class Recording:
    """A transport that keeps what is broadcast."""

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.sent: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def broadcast(self, buffer: Any, root: int, where: str) -> None:
        self.transport.broadcast(buffer, root, where)
        self.sent.append(buffer.tobytes())


class Delivered(NamedTuple):
    batches: list[Any]
    first: list[bytes]
    """What went over the group of headers."""
    second: list[bytes]
    """What went over the group of tensors."""


def deliver(data: list[Any], spec: Any = None, shape: dict[str, int] = PEERS) -> list[Delivered]:
    """The micro-batches' data on each rank, and what was sent."""

    def run(mesh: Any) -> Delivered:
        topology = DataTopology.from_mesh(mesh)
        first, second = (Recording(create_transport(topology, "model_parallel", timeout_s=5)) for _ in range(2))
        source = Batches(data) if topology.is_constructor else None
        node = ModelParallelBroadcaster(source, first, spec, tensors=second)  # type: ignore[arg-type]
        node.reset(None)
        return Delivered([batch.data for batch in node], first.sent, second.sent)

    return run_ranks(shape, run)


def failure(data: list[Any], spec: Any) -> list[str]:
    """The error on each rank."""

    def run(mesh: Any) -> str:
        topology = DataTopology.from_mesh(mesh)
        transport = create_transport(topology, "model_parallel", timeout_s=5)
        node = ModelParallelBroadcaster(Batches(data) if topology.is_constructor else None, transport, spec)
        node.reset(None)
        with pytest.raises(DataPlaneError) as caught:
            list(node)
        with pytest.raises(DataPlaneError) as second:
            next(node)
        assert str(second.value) == str(caught.value)
        return str(caught.value)

    return run_ranks(PEERS, run)


def same(a: Any, b: Any) -> bool:
    """Equal in types, containers, dtypes and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        bits = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Rows(NamedTuple):
    ids: Any
    extra: Any


def rich(number: int) -> dict[str, Any]:
    """A micro-batch of everything; sizes and host values change with ``number``."""
    return {
        "ids": torch.arange(10).reshape(2, 5) + (1 << 53) + number,
        "lengths": torch.arange(number + 1, dtype=torch.int32),
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(number, dtype=torch.int16),
        "mask": torch.tensor([True, False]),
        "half": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
        "tiny": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "pair": (Rows(torch.ones(2) * number, ["text", None]), 7.5),
        "many": [torch.zeros(1), 16777217 + number, -number],
    }


SPEC = {
    "ids": TensorFieldSpec((2, 5), torch.int64),
    "lengths": TensorFieldSpec((None,), torch.int32, device="cpu"),
    "nothing": TensorFieldSpec((None, 3), torch.float32),
    "scalar": TensorFieldSpec((), torch.int16),
    "mask": TensorFieldSpec((2,), torch.bool, device="cpu"),
    "half": TensorFieldSpec((3,), torch.bfloat16),
    "tiny": TensorFieldSpec((2,), torch.float8_e4m3fn),
    "turned": TensorFieldSpec((3, None), torch.float32),
    "conjugate": TensorFieldSpec((1,), torch.complex64),
    "pair": (Rows(TensorFieldSpec((2,), torch.float32), ["text", None]), 7.5),
    "many": [TensorFieldSpec((1,), torch.float32), int, int],
}


@pytest.mark.parametrize("spec", [None, SPEC], ids=["layout sent", "spec"])
def test_every_peer_gets_the_batch_bit_for_bit(spec: Any) -> None:
    """CASES 13, 17."""
    expected = [rich(number) for number in range(4)]
    for got in deliver(expected, spec):
        assert len(got.batches) == 4
        for batch, wanted in zip(got.batches, expected, strict=True):
            assert same(batch, wanted)


def test_peers_may_write_into_what_they_get() -> None:
    """Nothing is shared between fields, batches or ranks."""
    constant = {"table": np.arange(3), "notes": ["a"], "x": torch.zeros(3), "y": torch.zeros(3)}
    for got in deliver([constant] * 3)[1:]:
        for batch in got.batches:
            assert batch["table"].tolist() == [0, 1, 2]
            assert batch["notes"] == ["a"]
            assert batch["x"].tolist() == batch["y"].tolist() == [0, 0, 0]
            batch["table"] += 1
            batch["notes"].append("b")
            batch["x"] += 1


def test_all_tensors_of_a_batch_are_one_broadcast() -> None:
    """Header on the first group, tensors on the second; what stays on the host goes with the header."""
    data = [{f"field {place}": torch.full((4,), place) for place in range(20)} for _ in range(5)]
    spec = {name: TensorFieldSpec((4,), torch.int64) for name in data[0]}
    for got in deliver(data, spec):
        assert len(got.first) == 5 + 1  # and the end
        assert len(got.second) == 5
    on_host = {name: TensorFieldSpec((4,), torch.int64, device="cpu") for name in data[0]}
    for got in deliver(data, on_host):
        assert got.second == []
        assert same(got.batches, data)


def test_with_a_spec_no_names_are_sent() -> None:
    data = [{"input_ids": torch.arange(4) * number, "longest": number} for number in range(3)]
    spec = {"input_ids": TensorFieldSpec((4,), torch.int64), "longest": int}
    for got in deliver(data, spec):
        assert not any(b"input_ids" in sent or b"longest" in sent for sent in got.first + got.second)
        assert same(got.batches, data)


def test_without_a_spec_the_layout_is_sent_again_only_when_it_changes() -> None:
    def batch(size: int, name: str = "input_ids", dtype: Any = torch.int64, note: Any = "same") -> Any:
        return {name: torch.zeros(size, dtype=dtype), "longest": size, "note": note}

    data = [
        batch(4),
        batch(7),  # sizes and host values are no change
        batch(7, dtype=torch.int32),
        batch(5, dtype=torch.int32),
        batch(5, dtype=torch.int32, note="another"),
        batch(3, name="tokens"),
        batch(3, name="tokens"),
    ]
    described = [True, False, True, False, True, True, False]
    for got in deliver(data):
        assert same(got.batches, data)
        messages: list[bytes] = []
        for sent in got.first:
            if len(sent) == HEADER:
                messages.append(sent)
            else:
                messages[-1] += sent
        assert [b"longest" in message for message in messages] == [*described, False]


def test_a_batch_larger_than_the_header_in_every_respect() -> None:
    data = [{"numbers": list(range(number, number + 300)), "text": "x" * 5000, "t": torch.ones(2)} for number in (0, 9)]
    for got in deliver(data):
        assert same(got.batches, data)


def test_batches_without_tensors_and_empty_ones() -> None:
    data = [[None], [0], [{}], [[]], (), {}, "text"]
    for got in deliver(data):
        assert same(got.batches, data)


def test_one_rank_sends_nothing() -> None:
    (got,) = deliver([rich(1)], None, {"dp": 1, "tp": 1})
    assert got.first == got.second == []
    assert same(got.batches, [rich(1)])


# ---- what does not fit


def good() -> dict[str, Any]:
    return {"ids": torch.zeros(2, 5, dtype=torch.int64), "longest": 3, "kind": "text", "pair": [torch.zeros(1), None]}


FITS = {
    "ids": TensorFieldSpec((2, None), torch.int64),
    "longest": int,
    "kind": "text",
    "pair": [TensorFieldSpec((1,), torch.float32, device="cpu"), None],
}
MISFITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "dtype": (lambda b: b | {"ids": b["ids"].int()}, "field batch['ids']: expected int64[2, any], found int32[2, 5]"),
    "size": (lambda b: b | {"ids": b["ids"][:1]}, "field batch['ids']: expected int64[2, any], found int64[1, 5]"),
    "dimensions": (lambda b: b | {"ids": b["ids"][0]}, "expected int64[2, any], found int64[5]"),
    "numpy": (lambda b: b | {"ids": b["ids"].numpy()}, "expected int64[2, any], found numpy int64[2, 5]"),
    "no tensor": (lambda b: b | {"ids": None}, "field batch['ids']: expected int64[2, any], found None"),
    "host value": (lambda b: b | {"longest": 3.0}, "field batch['longest']: expected an int of 64 bits, found 3.0"),
    "bool": (lambda b: b | {"longest": True}, "field batch['longest']: expected an int of 64 bits, found True"),
    "large": (lambda b: b | {"longest": 2**63}, "expected an int of 64 bits, found 9223372036854775808"),
    "static": (lambda b: b | {"kind": "image"}, "field batch['kind']: expected 'text', found 'image'"),
    "missing": (
        lambda b: {key: value for key, value in b.items() if key != "kind"},
        "expected keys ['ids', 'longest', 'kind', 'pair'], found ['ids', 'longest', 'pair'] (missing ['kind']",
    ),
    "more": (lambda b: b | {"new": 1}, "not in the spec ['new']"),
    "list": (lambda b: b | {"pair": tuple(b["pair"])}, "field batch['pair']: expected a list, found a tuple"),
    "length": (lambda b: b | {"pair": b["pair"][:1]}, "field batch['pair']: expected 2 items, found 1"),
    "inside": (
        lambda b: b | {"pair": [torch.zeros(2), None]},
        "field batch['pair'][0]: expected float32[1] on cpu, found float32[2]",
    ),
    "whole": (lambda b: [b], "field batch: expected a dict, found a list"),
    "device": (
        lambda b: b | {"pair": [torch.zeros(1, device="meta"), None]},
        "expected float32[1] on cpu, found float32[1] on meta",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_batch_that_does_not_fit_is_one_error(name: str) -> None:
    change, text = MISFITS[name]
    errors = failure([good(), change(good())], FITS)
    assert len(set(errors)) == 1
    assert text in errors[0]
    assert "ModelParallelBroadcaster" in errors[0]


def test_what_fits_arrives() -> None:
    for got in deliver([good(), good() | {"ids": torch.ones(2, 0, dtype=torch.int64)}], FITS):
        assert [batch["ids"].shape[1] for batch in got.batches] == [5, 0]


def test_without_a_spec_what_cannot_travel_is_one_error() -> None:
    errors = failure([{"x": torch.zeros(1)}, {"x": object()}], None)
    assert len(set(errors)) == 1
    assert "object" in errors[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"x": float}, r"batch\['x'\] is the type float; accepted: int"),
        ({"x": [torch.zeros(1)]}, r"batch\['x'\]\[0\] is a Tensor; accepted: a TensorFieldSpec"),
        ({"x": np.zeros(1)}, "is a ndarray; accepted"),
        ({"x": TensorFieldSpec((1,), "int64")}, "has dtype 'int64'; accepted: a torch.dtype"),
    ],
)
def test_a_malformed_spec_is_refused(spec: Any, message: str) -> None:
    from hp_nodes.transport import SingleRankTransport

    with pytest.raises(ValueError, match=message):
        ModelParallelBroadcaster(Batches([]), SingleRankTransport(), spec)


@pytest.mark.parametrize("shape", [(-1,), (1.5,), (True,), 4, None])
def test_a_size_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="accepted: a tuple of ints >= 0, None for a size that may change"):
        TensorFieldSpec(shape, torch.int64)


def test_a_device_other_than_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'cuda'; accepted: None"):
        TensorFieldSpec((1,), torch.int64, device="cuda")


def test_a_peer_has_no_source_and_a_constructor_has_one() -> None:
    def run(mesh: Any) -> None:
        topology = DataTopology.from_mesh(mesh)
        transport = create_transport(topology, "model_parallel")
        with pytest.raises(ValueError, match="needs a source|has no source"):
            ModelParallelBroadcaster(None if topology.is_constructor else Batches([]), transport)

    run_ranks(PEERS, run)


def test_the_constructors_state_is_the_peers() -> None:
    """After each step, and at once where a peer was told before the first."""

    def run(mesh: Any) -> list[Any]:
        topology = DataTopology.from_mesh(mesh)
        transport = create_transport(topology, "model_parallel", timeout_s=5)
        start = {"Batches": {"given": 0}}
        source = Batches([0, 1, 2, 3]) if topology.is_constructor else None
        node = ModelParallelBroadcaster(source, transport, initial_state=None if source else start)
        node.reset(None)
        states = [node.state_dict()]
        states += [node.state_dict() for batch in node if batch.ends_step]
        return states

    results = run_ranks(PEERS, run)
    assert results[1:] == results[:1] * 2
    assert [state["hp_nodes"]["Batches"]["given"] for state in results[0]] == [0, 2, 4]
