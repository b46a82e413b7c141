"""What every transport promises, on virtual ranks; tests/distributed repeats it on Gloo."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from hp_nodes import DataPlaneError
from hp_nodes.transport import DataTopology, SingleRankTransport, Transport, create_transport, run_ranks


def bytes_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint8)


def exchange_everything(transport: Transport) -> None:
    """Each exchange, with uneven and zero sizes; asserts what this rank must see."""
    rank, size = transport.rank, transport.size
    assert transport.all_gather(bytes_of(rank, 7), "gather").tolist() == [[place, 7] for place in range(size)]
    buffer = bytes_of(1, 2, 3) if rank == size - 1 else bytes_of(0, 0, 0)
    transport.broadcast(buffer, size - 1, "broadcast")
    assert buffer.tolist() == [1, 2, 3]
    # Place i sends (i * 3 + j) % 4 bytes of value 10 i + j to place j: some pieces are empty.
    sizes = [[(i * 3 + j) % 4 for j in range(size)] for i in range(size)]
    send = np.concatenate([np.full(sizes[rank][j], 10 * rank + j, dtype=np.uint8) for j in range(size)])
    got = transport.all_to_all(send, sizes[rank], [sizes[i][rank] for i in range(size)], "route")
    assert got.tolist() == [10 * i + rank for i in range(size) for _ in range(sizes[i][rank])]
    nothing = transport.all_to_all(send[:0], [0] * size, [0] * size, "nothing")
    assert len(nothing) == 0
    assert transport.exchanges == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_exchanges(ranks: int) -> None:
    def run(mesh: Any) -> None:
        exchange_everything(create_transport(DataTopology.from_mesh(mesh)))

    run_ranks({"dp": ranks}, run)


def test_a_single_rank_needs_nobody() -> None:
    exchange_everything(SingleRankTransport())


def test_received_bytes_are_the_receivers_own() -> None:
    def run(mesh: Any) -> None:
        transport = create_transport(DataTopology.from_mesh(mesh))
        mine = bytes_of(5, 5)
        gathered = transport.all_gather(mine, "gather")
        mine[:] = 0
        gathered[transport.rank] += 1
        again = transport.all_gather(gathered.reshape(-1), "again")
        assert again[0].tolist() == [6, 6, 5, 5]
        assert again[1].tolist() == [5, 5, 6, 6]

    run_ranks({"dp": 2}, run)


def test_scopes() -> None:
    def run(mesh: Any) -> tuple[Any, ...]:
        topology = DataTopology.from_mesh(mesh)
        groups = [
            create_transport(topology, "all").global_ranks,
            create_transport(topology, "model_parallel").global_ranks,
        ]
        if topology.is_constructor:
            groups.append(create_transport(topology).global_ranks)
        else:
            with pytest.raises(ValueError, match="no constructor"):
                create_transport(topology)
        with pytest.raises(ValueError, match="scope"):
            create_transport(topology, "tensor")  # type: ignore[arg-type]
        return tuple(groups)

    assert run_ranks({"dp": 2, "tp": 2}, run) == [
        ((0, 1, 2, 3), (0, 1), (0, 2)),
        ((0, 1, 2, 3), (0, 1)),
        ((0, 1, 2, 3), (2, 3), (0, 2)),
        ((0, 1, 2, 3), (2, 3)),
    ]


# ---- waits end


def test_the_time_limit_names_who_did_not_arrive() -> None:
    def run(mesh: Any) -> str:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=0.3)
        if mesh.get_rank() == 2:
            time.sleep(1.0)
            return ""
        with pytest.raises(DataPlaneError, match=r"ranks \[2\] did not arrive within 0.3 s") as caught:
            transport.all_gather(bytes_of(1), "opening")
        return str(caught.value)

    run_ranks({"dp": 3}, run)


def test_the_time_limit_counts_only_while_the_consumer_waits() -> None:
    def run(mesh: Any) -> None:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=0.3)
        transport.clock.in_background()
        if mesh.get_rank() == 1:
            time.sleep(1.0)
        assert len(transport.all_gather(bytes_of(1), "opening")) == 2
        if mesh.get_rank() == 0:
            with transport.clock.waiting(), pytest.raises(DataPlaneError, match="did not arrive"):
                transport.all_gather(bytes_of(1), "opening")
        else:
            time.sleep(0.8)

    run_ranks({"dp": 2}, run)


def test_interrupt_ends_a_wait() -> None:
    def run(mesh: Any) -> None:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=30)
        if mesh.get_rank() == 0:
            threading.Timer(0.2, transport.interrupt).start()
            with pytest.raises(DataPlaneError, match="closed"):
                transport.all_gather(bytes_of(1), "opening")
        else:
            time.sleep(0.5)

    before = time.monotonic()
    run_ranks({"dp": 2}, run)
    assert time.monotonic() - before < 5


def test_different_exchanges_are_an_error_on_both() -> None:
    def run(mesh: Any) -> None:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=5)
        with pytest.raises(DataPlaneError, match="different exchanges"):
            transport.all_gather(bytes_of(1), "opening" if mesh.get_rank() else "closing")

    run_ranks({"dp": 2}, run)


def test_run_ranks_raises_what_a_rank_raised_and_frees_those_who_wait_for_it() -> None:
    def run(mesh: Any) -> None:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=30)
        if mesh.get_rank() == 1:
            raise KeyError("mine")
        transport.all_gather(bytes_of(1), "opening")

    before = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_ranks({"dp": 3}, run)
    assert time.monotonic() - before < 5


def test_a_rank_that_returned_is_named() -> None:
    def run(mesh: Any) -> str:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=30)
        if mesh.get_rank() == 0:
            return ""
        with pytest.raises(DataPlaneError) as caught:
            transport.all_gather(bytes_of(1), "opening")
        return str(caught.value)

    assert "rank 0 has finished" in run_ranks({"dp": 2}, run)[1]


@pytest.mark.parametrize("shape", [{}, {"dp": 0}, {"dp": -1}, {"dp": True}, {"dp": 1.5}])
def test_shapes_that_are_none(shape: Any) -> None:
    with pytest.raises(ValueError, match="accepted"):
        run_ranks(shape, lambda mesh: None)


# ---- topology


def test_topology_of_several_dimensions() -> None:
    def run(mesh: Any) -> DataTopology:
        return DataTopology.from_mesh(mesh)

    found = run_ranks({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "tp": 2}, run)
    assert [t.data_rank for t in found[:8]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [t.data_rank for t in found[8:]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[0].constructor_ranks == (0, 2, 4, 6)
    assert found[13].model_parallel_ranks == (4, 5, 12, 13)
    assert [t.global_rank for t in found if t.is_constructor] == [0, 2, 4, 6]
    assert found[5].data_parallel_size == 4


def test_topology_by_names() -> None:
    def run(mesh: Any) -> tuple[int, tuple[int, ...]]:
        topology = DataTopology.from_mesh(mesh, ("inner", "outer"))
        return topology.data_rank, topology.constructor_ranks

    found = run_ranks({"outer": 2, "inner": 2}, run)
    assert [rank for rank, _ in found] == [0, 2, 1, 3]
    assert found[0][1] == (0, 2, 1, 3)


@pytest.mark.parametrize(
    ("shape", "names", "match"), [({"tp": 2}, None, "include none"), ({"dp": 2}, ("cp",), "has no")]
)
def test_meshes_without_data_parallelism(shape: dict[str, int], names: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run_ranks(shape, lambda mesh: DataTopology.from_mesh(mesh, names))
