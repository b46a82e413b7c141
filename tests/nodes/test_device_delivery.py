"""Model-parallel delivery of batches that are on a device: device buffers over its own transport, the rest by the host.

Stand-ins for a device: the CPU, where values can be compared, and torch's "meta", which has no values but tells where a
tensor is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hp_nodes import DataPlaneError, DevicePrefetcher, ModelParallelBroadcaster, TensorFieldSpec
from hp_nodes.nodes.batch_layout import names_on_host, unnamed_on_host
from hp_nodes.transport import DataTopology, TensorTransport, create_transport, run_ranks
from tests.nodes.test_model_parallel import PEERS, SPEC, Batches, Recording, rich, same


class DeviceTransport(Recording):
    """Carries tensors of its device; refuses host buffers."""

    def __init__(self, transport: Any, device: str) -> None:
        super().__init__(transport)
        self.device = torch.device(device)
        self.tensors: list[torch.Tensor] = []

    def broadcast(self, buffer: Any, root: int, where: str) -> None:
        raise AssertionError("a host buffer over the device's own backend")

    def broadcast_tensor(self, tensor: torch.Tensor, root: int, where: str) -> None:
        assert tensor.device == self.device and tensor.dtype == torch.uint8 and tensor.dim() == 1
        held = torch.zeros(len(tensor), dtype=torch.uint8) if tensor.is_meta else tensor
        self.transport.broadcast(held.numpy(), root, where)
        self.tensors.append(tensor)


class Delivered(NamedTuple):
    batches: list[Any]
    headers: list[bytes]
    tensors: list[torch.Tensor]


def deliver(data: list[Any], spec: Any = None, device: str = "cpu") -> list[Delivered]:
    def run(mesh: Any) -> Delivered:
        topology = DataTopology.from_mesh(mesh)
        first = Recording(create_transport(topology, "model_parallel", timeout_s=5))
        second = DeviceTransport(create_transport(topology, "model_parallel", timeout_s=5), device)
        assert isinstance(second, TensorTransport) and not isinstance(first, TensorTransport)
        source = Batches(data) if topology.is_constructor else None
        node = ModelParallelBroadcaster(source, first, spec, tensors=second)  # type: ignore[arg-type]
        node.reset(None)
        return Delivered([batch.data for batch in node], first.sent, second.tensors)

    return run_ranks(PEERS, run)


@pytest.mark.parametrize("spec", [None, SPEC], ids=["layout sent", "spec"])
def test_every_peer_gets_the_batch_bit_for_bit(spec: Any) -> None:
    expected = [rich(number) for number in range(4)]
    for got in deliver(expected, spec):
        assert len(got.tensors) == 4  # one buffer a batch
        for batch, wanted in zip(got.batches, expected, strict=True):
            assert same(batch, wanted)


def test_fields_of_the_host_go_with_the_header_and_the_others_as_one_device_buffer() -> None:
    data = [{"ids": torch.arange(6) * number, "lengths": torch.arange(number + 1), "n": number} for number in range(3)]
    spec = {
        "ids": TensorFieldSpec((6,), torch.int64),
        "lengths": TensorFieldSpec((None,), torch.int64, device="cpu"),
        "n": int,
    }
    for got in deliver(data, spec):
        assert same(got.batches, data)
        for number, buffer in enumerate(got.tensors):
            assert buffer[:48].view(torch.int64).tolist() == data[number]["ids"].tolist()
            assert len(buffer) == 64


def mixed(size: int) -> dict[str, Any]:
    return {"ids": torch.zeros(size, 3, device="meta"), "lengths": torch.arange(size), "more": [torch.tensor(size)]}


@pytest.mark.parametrize(
    "spec",
    [
        None,
        {
            "ids": TensorFieldSpec((None, 3), torch.float32),
            "lengths": TensorFieldSpec((None,), torch.int64, device="cpu"),
            "more": [TensorFieldSpec((), torch.int64, device="cpu")],
        },
    ],
    ids=["layout sent", "spec"],
)
def test_peers_get_device_tensors_and_host_tensors_where_the_constructor_has_them(spec: Any) -> None:
    for got in deliver([mixed(2), mixed(0), mixed(5)], spec, "meta"):
        for batch, size in zip(got.batches, (2, 0, 5), strict=True):
            assert batch["ids"].is_meta and batch["ids"].shape == (size, 3)
            assert batch["lengths"].tolist() == list(range(size))
            assert batch["more"][0].item() == size
        assert [len(buffer) for buffer in got.tensors] == [64, 64]  # nothing is sent for nothing


def test_where_tensors_are_is_sent_again_when_it_changes() -> None:
    staged, kept = {"x": torch.zeros(2, device="meta")}, {"x": torch.arange(2.0)}
    for got in deliver([staged, kept, staged], None, "meta"):
        assert [batch["x"].is_meta for batch in got.batches] == [True, False, True]


def failure(data: list[Any], spec: Any) -> list[str]:
    def run(mesh: Any) -> str:
        topology = DataTopology.from_mesh(mesh)
        first, second = (create_transport(topology, "model_parallel", timeout_s=5) for _ in range(2))
        source = Batches(data) if topology.is_constructor else None
        node = ModelParallelBroadcaster(source, first, spec, tensors=DeviceTransport(second, "meta"))  # type: ignore[arg-type]
        node.reset(None)
        with pytest.raises(DataPlaneError) as caught:
            list(node)
        return str(caught.value)

    return run_ranks(PEERS, run)


def test_a_tensor_that_is_not_where_its_spec_says_is_one_error() -> None:
    on_device = {"x": TensorFieldSpec((2,), torch.float32)}
    on_host = {"x": TensorFieldSpec((2,), torch.float32, device="cpu")}
    for batch, spec, text in (
        ({"x": torch.zeros(2)}, on_device, "field batch['x']: expected float32[2] on meta, found float32[2]"),
        ({"x": torch.zeros(2, device="meta")}, on_host, "expected float32[2] on cpu, found float32[2] on meta"),
    ):
        errors = failure([batch], spec)
        assert len(set(errors)) == 1
        assert text in errors[0]


def test_names_of_what_stays_on_the_host() -> None:
    assert names_on_host(SPEC) == {"lengths", "mask"}
    assert names_on_host([{"a": {"b": TensorFieldSpec((1,), torch.int8, device="cpu"), "c": 3}}]) == {"b"}
    assert names_on_host(None) == set()
    host = TensorFieldSpec((1,), torch.int8, device="cpu")
    assert unnamed_on_host({"a": host, "b": [host, {"c": host}], "d": (host, host)}) == [
        "batch['b'][0]",
        "batch['d'][0]",
        "batch['d'][1]",
    ]


class AtOnce:
    """An accelerator without delay: its device is the CPU."""

    device = torch.device("cpu")

    def set_device(self) -> None: ...

    def new_stream(self) -> Any:
        return None

    def current_stream(self) -> Any:
        return None

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def empty(self, nbytes: int, stream: Any) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        target.copy_(source)

    def move(self, value: Any, stream: Any) -> Any:
        return value

    def record(self, stream: Any) -> Any:
        return None

    def wait(self, stream: Any, event: Any) -> None: ...

    def done(self, event: Any) -> bool:
        return True

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None: ...


@pytest.mark.parametrize("depth", [0, 2])
def test_from_the_host_over_the_device_to_the_peers(depth: int) -> None:
    """Staged ahead on the constructor, delivered when consumed; what stays on the host stays there."""
    expected = [rich(number) for number in range(6)]

    def run(mesh: Any) -> list[Any]:
        topology = DataTopology.from_mesh(mesh)
        first, second = (create_transport(topology, "model_parallel", timeout_s=5) for _ in range(2))
        source = None
        if topology.is_constructor:
            names = names_on_host(SPEC)
            source = DevicePrefetcher(Batches(expected), depth=depth, accelerator=AtOnce(), cpu_fields=names)
        node = ModelParallelBroadcaster(source, first, SPEC, tensors=DeviceTransport(second, "cpu"))  # type: ignore[arg-type]
        node.reset(None)
        return [batch.data for batch in node]

    for got in run_ranks(PEERS, run):
        assert all(same(batch, wanted) for batch, wanted in zip(got, expected, strict=True))
        assert len(got) == 6
