"""Groups that balance external steps among themselves, over exchanges that the consuming thread must launch."""

from __future__ import annotations

import time
from typing import Any

import pytest

from graphs.config import DistributedDatasetConfig
from graphs.external import ExternalParts, external_graph
from hp_nodes import DataPlaneError, DistributedDataLoader
from hp_nodes.transport import DataTopology, Transport, create_transport, run_ranks
from hp_nodes.transport.balance_group import create_balance_group
from hp_nodes.transport.handed_over import HandedOverTransport
from tests.graphs.external_scene import Sample, rounds, samples_of, weigh
from tests.nodes.test_failures import no_thread_is_left
from tests.nodes.test_hand_over import ConsumersOnly

COSTS = {0: [9, 1, 9, 2, 1, 7], 1: [1, 1, 1, 2, 8, 1], 2: [9, 5, 1, 1, 1, 1], 3: [1, 1, 1, 9, 1, 1]}


def loader_of(
    mesh: Any, handed_over: bool, checkers: list[ConsumersOnly], depth: int = 1, weigh_with: Any = weigh
) -> DistributedDataLoader:
    topology = DataTopology.from_mesh(mesh)
    config = DistributedDatasetConfig(
        seq_len=64, local_batch_size=2, balance_group_size=2, timeout_s=10.0, host_prefetch_depth=depth
    )
    data: Transport = create_transport(topology, timeout_s=10.0)
    if handed_over:
        checkers.append(ConsumersOnly(data))
        data = HandedOverTransport(checkers[-1])
    group = create_balance_group(topology, data, 2)
    if handed_over:
        of_group = group._transport
        assert isinstance(of_group, HandedOverTransport)
        checkers.append(ConsumersOnly(of_group.inner))
        of_group.inner = checkers[-1]
    model = create_transport(topology, "model_parallel", timeout_s=10.0)
    parts = ExternalParts(rounds(topology.data_rank, COSTS[topology.data_rank]), weigh_with, 1)
    graph = external_graph(parts, config, data, group, model)
    return DistributedDataLoader(graph, transports=(data, group, model), topology=topology)


def delivered(mesh: Any, handed_over: bool, depth: int) -> list[list[Sample]]:
    checkers: list[ConsumersOnly] = []
    with loader_of(mesh, handed_over, checkers, depth) as loader:
        found = [samples_of(batch) for batch in loader]
    if handed_over:
        of_data, of_group = ([what.split(": ")[-1] for _, what in checker.log] for checker in checkers)
        assert {"opening", "plan", "sizes", "payload"} <= set(of_group)
        assert of_data.count("closing") >= len(found)
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_delivered_is_what_it_was(depth: int) -> None:
    expected = run_ranks({"dp": 4}, lambda mesh: delivered(mesh, False, depth))
    assert run_ranks({"dp": 4}, lambda mesh: delivered(mesh, True, depth)) == expected
    assert no_thread_is_left()


def test_launches_stand_at_the_same_places_on_every_rank() -> None:
    def run(mesh: Any) -> list[list[tuple[int, str]]]:
        checkers: list[ConsumersOnly] = []
        with loader_of(mesh, True, checkers) as loader:
            for _ in loader:
                for checker in checkers:
                    checker.delivered += 1
                time.sleep(0.003 * mesh.get_rank())
        return [checker.log for checker in checkers]

    logs = run_ranks({"dp": 4}, run)
    assert all(of_data == logs[0][0] for of_data, _ in logs)
    # Of groups too, up to what moves: that is each group's own.
    steady = [[entry for entry in of_group if not entry[1].endswith(("sizes", "payload"))] for _, of_group in logs]
    assert all(of_group == steady[0] for of_group in steady)


def test_a_failure_in_one_group_is_one_error_in_all() -> None:
    def failing(sample: Any) -> Any:
        if sample[:2] == (2, 5):
            raise OSError("no such price")
        return weigh(sample)

    def run(mesh: Any) -> tuple[int, str]:
        count = 0
        loader = loader_of(mesh, True, [], weigh_with=failing)
        with pytest.raises(DataPlaneError, match="no such price") as caught:  # noqa: PT012  where it comes matters
            for _ in loader:
                count += 1
        loader.close()
        return count, str(caught.value).split("\n")[0]

    results = run_ranks({"dp": 4}, run)
    assert len(set(results)) == 1
    assert results[0][0] == 2
    assert "rank 2" in results[0][1]
    assert no_thread_is_left()
