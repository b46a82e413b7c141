"""Transports over a device's own backend. Nothing here has a device: Gloo on the host stands in for NCCL and HCCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hp_nodes import DataPlaneError
from hp_nodes.transport import SingleRankTransport, create_transport, run_ranks
from hp_nodes.transport.device import backend_problem, backend_version, create_device_transport, self_test
from hp_nodes.transport.handed_over import HandedOverTransport
from tests.distributed.ranks import RankPool
from tests.distributed.test_gloo_transport import topology
from tests.distributed.test_graph_on_gloo import Broken, real_mesh
from tests.scenes import Scene, rest
from tests.transport.test_transport import exchange_everything

no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")


def stand_in(transport: Any) -> HandedOverTransport:
    """The same ranks, over another group that is treated as a device's."""
    me = transport.global_ranks[transport.rank]
    return create_device_transport(transport.global_ranks, me, transport.timeout_s, backend="gloo")


def _tested_and_used() -> int:
    for _ in range(2):
        transport = stand_in(create_transport(topology(), timeout_s=10))
        exchange_everything(transport)
        transport.close()
    return transport.exchanges


def test_exchanges_behind_a_self_test(two_ranks: RankPool, four_ranks: RankPool) -> None:
    assert two_ranks.run(_tested_and_used) == [4] * 2
    assert four_ranks.run(_tested_and_used) == [4] * 4


class Lying:
    """Fails as backends have failed."""

    def __init__(self, inner: Any, how: str) -> None:
        self._inner = inner
        self._how = how

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, *arguments: Any) -> Any:
        got = self._inner.all_gather(*arguments)
        return got[::-1] if self._how == "all_gather" else got

    def broadcast(self, buffer: Any, root: int, where: str) -> None:
        mine = buffer.copy()
        self._inner.broadcast(buffer, root, where)
        if self._how == "broadcast":
            buffer[:] = mine

    def all_to_all(self, send: Any, outgoing: Any, incoming: Any, where: str) -> Any:
        got = self._inner.all_to_all(send, outgoing, incoming, where)
        return np.zeros_like(got) if self._how == "all_to_all" else got


@pytest.mark.parametrize("how", ["all_gather", "broadcast", "all_to_all"])
def test_wrong_bytes_name_the_backend_its_version_and_the_exchange(how: str) -> None:
    def run(mesh: Any) -> str:
        from hp_nodes.transport import DataTopology

        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=10)
        with pytest.raises(RuntimeError, match="returns wrong bytes on rank") as caught:
            self_test(Lying(transport, how), "hccl")
        return str(caught.value)

    for rank, text in enumerate(run_ranks({"dp": 3}, run)):
        assert f"'hccl' (torch {torch.__version__}" in text and f"on rank {rank}: " in text
        assert how in text and "communication_backend='gloo'" in text


def test_right_bytes_pass() -> None:
    self_test(SingleRankTransport(), "nccl")
    assert backend_version("hccl").startswith("torch ")


@pytest.mark.parametrize("backend", ["nccl", "hccl"])
@no_device
def test_a_backend_without_its_device_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match=f"'{backend}' needs a .* device, and there is none here; accepted"):
        create_device_transport((0, 1), 0, 1.0, backend=backend)


def test_what_does_not_fit_together() -> None:
    assert "accepted with it: a CUDA device" in str(backend_problem("nccl", "cpu"))
    assert "accepted: ['gloo', 'hccl', 'nccl']" in str(backend_problem("mpi"))
    assert backend_problem("gloo", "cpu") is None


def _deliver(depth: int) -> Any:
    scene = Scene(window=2, depth=depth, device_depth=2, wrap_transport=stand_in)
    with scene.loader(real_mesh({"dp": 2})) as loader:
        return rest(loader)


@pytest.mark.parametrize("depth", [0, 2])
def test_deliveries_are_those_of_gloo(two_ranks: RankPool, depth: int) -> None:
    plain = Scene(window=2, depth=depth)
    assert two_ranks.run(_deliver, depth) == run_ranks({"dp": 2}, lambda mesh: rest(plain.loader(mesh)))


def _fail() -> str:
    scene = Scene(dataset=Broken(OSError, "disk gone"), order="sequential", wrap_transport=stand_in)
    loader = scene.loader(real_mesh({"dp": 2}))
    with pytest.raises(DataPlaneError) as caught:
        list(loader)
    loader.close(caught.value)
    return str(caught.value)


def test_a_failure_is_one_error(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_fail)
    assert first == second and "disk gone" in first
