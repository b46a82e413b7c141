"""The promises of a transport, on real processes over Gloo."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hp_nodes import DataPlaneError
from hp_nodes.transport import DataTopology, create_transport
from hp_nodes.transport.distributed import GroupTransport
from tests.distributed.ranks import RankPool
from tests.transport.test_transport import bytes_of, exchange_everything


def topology() -> DataTopology:
    from torch.distributed.device_mesh import init_device_mesh

    return DataTopology.from_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))


def _exchanges() -> int:
    for _ in range(3):
        transport = create_transport(topology(), timeout_s=10)
        exchange_everything(transport)
        transport.close()
    return transport.exchanges


def test_exchanges(two_ranks: RankPool) -> None:
    assert two_ranks.run(_exchanges) == [4, 4]


def test_exchanges_of_four(four_ranks: RankPool) -> None:
    assert four_ranks.run(_exchanges) == [4] * 4


def _gathered_much(nbytes: int) -> list[list[int]]:
    transport = create_transport(topology(), timeout_s=10)
    got = transport.all_gather(np.full(nbytes, transport.rank + 7, np.uint8), "large")
    transport.close()
    return [np.unique(row).tolist() for row in got]


@pytest.mark.parametrize("nbytes", [1000, 1 << 20])
def test_gathering_little_and_much(four_ranks: RankPool, nbytes: int) -> None:
    assert four_ranks.run(_gathered_much, nbytes) == [[[7], [8], [9], [10]]] * 4


def _places_not_by_rank() -> int:
    me = dist.get_rank()
    transport = GroupTransport((2, 0, 3, 1), me, 10)
    assert transport.rank == (2, 0, 3, 1).index(me)
    exchange_everything(transport)
    transport.close()
    return me


def test_places_that_are_not_in_rank_order(four_ranks: RankPool) -> None:
    assert four_ranks.run(_places_not_by_rank) == [0, 1, 2, 3]


def _beside_the_trainer() -> float:
    """The data plane's group in a thread, the trainer's all-reduce on the default group in this one."""
    transport = create_transport(topology(), timeout_s=20)

    def gather() -> None:
        for number in range(300):
            got = transport.all_gather(bytes_of(number % 256, transport.rank), "opening")
            assert got[:, 0].tolist() == [number % 256] * 2

    thread = threading.Thread(target=gather)
    thread.start()
    total = torch.zeros(1)
    for _ in range(300):
        one = torch.ones(1)
        dist.all_reduce(one)
        total += one
    thread.join(30)
    assert not thread.is_alive()
    transport.close()
    return float(total)


def test_the_trainers_collectives_run_beside(two_ranks: RankPool) -> None:
    assert two_ranks.run(_beside_the_trainer) == [600.0, 600.0]


def _late() -> str:
    transport = create_transport(topology(), timeout_s=0.5)
    if dist.get_rank() == 1:
        time.sleep(3.0)
        transport.close()
        return ""
    before = time.monotonic()
    with pytest.raises(DataPlaneError, match=r"ranks \[1\] did not arrive within 0.5 s") as caught:
        transport.all_gather(bytes_of(1), "opening")
    assert time.monotonic() - before < 4
    transport.close()
    return str(caught.value)


def test_the_time_limit(two_ranks: RankPool) -> None:
    assert "opening" in two_ranks.run(_late)[0]
    assert two_ranks.run(_exchanges) == [4, 4]  # the default group is as good as before


def _interrupted() -> None:
    transport = create_transport(topology(), timeout_s=30)
    if dist.get_rank() == 0:
        threading.Timer(0.2, transport.interrupt).start()
        before = time.monotonic()
        with pytest.raises(DataPlaneError, match="closed"):
            transport.all_gather(bytes_of(1), "opening")
        assert time.monotonic() - before < 2
    dist.barrier()
    transport.close()


def test_interrupt_ends_a_wait(two_ranks: RankPool) -> None:
    two_ranks.run(_interrupted)


def _alone_then_together() -> int:
    """The first attempt fails on one rank because the other does not come; the second works on both."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="not all of ranks"):
            create_transport(topology(), timeout_s=0.5)
    dist.barrier()
    return _exchanges()


def test_a_group_after_an_attempt_that_failed(two_ranks: RankPool) -> None:
    assert two_ranks.run(_alone_then_together) == [4, 4]


def _leave_one_pending() -> None:
    transport = create_transport(topology(), timeout_s=0.3)
    if dist.get_rank() == 0:
        with pytest.raises(DataPlaneError, match="did not arrive"):
            transport.all_gather(bytes_of(1), "opening")
    else:
        time.sleep(2.5)
    transport.close()


def test_a_process_ends_though_an_exchange_is_pending() -> None:
    pool = RankPool(2)
    pool.run(_leave_one_pending)
    before = time.monotonic()
    pool.stop()
    assert time.monotonic() - before < 15


def _many_groups() -> int:
    for _ in range(15):
        transport = create_transport(topology(), timeout_s=10)
        transport.all_gather(np.zeros(100, np.uint8), "opening")
        transport.close()
    return threading.active_count()


def test_groups_are_given_back(two_ranks: RankPool) -> None:
    first = two_ranks.run(_many_groups)
    second = two_ranks.run(_many_groups)
    assert all(after <= before + 2 for before, after in zip(first, second, strict=True))
