"""Batches from device to device between processes. Gloo, with the host in the place of a device, stands in for NCCL."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hp_nodes import DevicePrefetcher, ModelParallelBroadcaster
from hp_nodes.nodes.batch_layout import names_on_host
from hp_nodes.transport import DataTopology, TensorTransport, create_transport
from hp_nodes.transport.device_tensors import DeviceTensorTransport, create_tensor_transport
from tests.distributed.ranks import RankPool
from tests.distributed.test_graph_on_gloo import real_mesh
from tests.graphs.test_device import build
from tests.nodes.test_device_delivery import AtOnce
from tests.nodes.test_model_parallel import SPEC, Batches, rich, same

BROADCAST = DeviceTensorTransport.broadcast_tensor


def _opened() -> DeviceTensorTransport:
    ranks = tuple(range(dist.get_world_size()))
    return create_tensor_transport(ranks, dist.get_rank(), 20.0, device="cpu")


def _broadcast_where_tensors_are() -> tuple[bool, list[int], int]:
    transport = _opened()
    before = transport.exchanges
    tensor = torch.arange(100, dtype=torch.uint8) if transport.rank == 1 else torch.zeros(100, dtype=torch.uint8)
    transport.broadcast_tensor(tensor, 1, "test")
    kinds = isinstance(transport, TensorTransport), tensor.tolist(), transport.exchanges - before
    transport.close()
    return kinds


def test_a_tensor_is_broadcast_where_it_is(two_ranks: RankPool) -> None:
    assert two_ranks.run(_broadcast_where_tensors_are) == [(True, list(range(100)), 1)] * 2


def _wrong_bytes() -> str:
    def nothing_arrives(self: Any, tensor: torch.Tensor, root: int, where: str) -> None:
        BROADCAST(self, tensor, root, where)
        tensor.zero_()

    silent = patch.object(DeviceTensorTransport, "broadcast_tensor", nothing_arrives)
    with silent, pytest.raises(RuntimeError) as caught:
        _opened()
    return str(caught.value)


def test_a_backend_that_delivers_zeros_is_found_out_at_the_start(two_ranks: RankPool) -> None:
    for rank, text in enumerate(two_ranks.run(_wrong_bytes)):
        assert f"broadcasts wrong bytes to rank {rank}" in text
        assert f"torch {torch.__version__}" in text


def _delivered() -> list[bool]:
    topology = DataTopology.from_mesh(real_mesh({"dp": 1, "tp": dist.get_world_size()}))
    expected = [rich(number) for number in range(5)]
    header, tensors = create_transport(topology, "model_parallel", timeout_s=20.0), _opened()
    source = None
    if topology.is_constructor:
        names = names_on_host(SPEC)
        source = DevicePrefetcher(Batches(expected), depth=1, accelerator=AtOnce(), cpu_fields=names)
    node = ModelParallelBroadcaster(source, header, SPEC, tensors=tensors)
    node.reset(None)
    found = [same(batch.data, wanted) for batch, wanted in zip(node, expected, strict=True)]
    for transport in (header, tensors):
        transport.close()
    return found


def test_peers_get_what_was_staged_bit_for_bit(two_ranks: RankPool) -> None:
    assert two_ranks.run(_delivered) == [[True] * 5] * 2


def _loaded(device: Any) -> list[Any]:
    """What the ready-made loader gives on a mesh of model-parallel ranks, with its state after each step."""

    def over_the_host(*group: Any, device: Any) -> DeviceTensorTransport:
        return create_tensor_transport(*group, device="cpu")

    def opened(device: Any) -> AtOnce:
        return AtOnce()

    found = []
    with (
        patch("graphs.builder.create_tensor_transport", over_the_host),
        patch("graphs.arguments.open_accelerator", opened),
        patch("hp_nodes.nodes.device_prefetcher.open_accelerator", opened),
        build(real_mesh({"dp": 1, "tp": dist.get_world_size()}), device) as loader,
    ):
        for batch in loader:
            found.append({name: tensor.tolist() for name, tensor in batch.items()})
            if loader.last.ends_step:
                found.append(loader.state_dict())
    return found


def test_the_ready_made_loader_delivers_over_the_device_what_it_delivers_over_the_host(two_ranks: RankPool) -> None:
    staged = two_ranks.run(_loaded, "cuda")
    assert staged == two_ranks.run(_loaded, None)
    assert len(staged[0]) == 16 + 4
    assert staged[0] == staged[1]


def _made_or_not() -> str:
    def broken(self: Any, tensor: torch.Tensor, root: int, where: str) -> None:
        BROADCAST(self, tensor, root, where)
        if self.rank == 1:
            tensor.zero_()

    with patch.object(DeviceTensorTransport, "broadcast_tensor", broken):
        try:
            _loaded("cuda")
        except RuntimeError as error:
            return str(error)
    return "made"


def test_a_backend_that_fails_its_test_on_one_rank_is_an_error_on_all(two_ranks: RankPool) -> None:
    texts = two_ranks.run(_made_or_not)
    assert texts[0] == texts[1]
    assert "broadcasts wrong bytes to rank 1" in texts[0]
