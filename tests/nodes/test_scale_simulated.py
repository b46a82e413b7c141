"""A rank of a large job, simulated, does what it does among virtual ranks, and gets samples that are nobody else's."""

from __future__ import annotations

from typing import Any

import pytest

from hp_nodes import HostPrefetcher
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.benchmarks.scale_job import Job, SimulatedTransport


def delivered(graph: HostPrefetcher, micro_batches: int) -> list[Any]:
    graph.reset(None)
    found = []
    for _ in range(micro_batches):
        batch = next(graph)
        assert batch.report is not None
        documents = [document.tolist() for packed in batch.data for document in packed]
        found.append((batch.step, batch.round, batch.positions, batch.report.plan_digest, documents))
    return found


@pytest.mark.parametrize(("ranks", "broadcast_plan"), [(8, True), (8, False), (64, True)])
def test_simulated_and_virtual_ranks_have_the_same_plans_and_samples(ranks: int, broadcast_plan: bool) -> None:
    job = Job(ranks, rounds=2, windows=2)
    count = job.rounds * job.windows

    def of_rank(mesh: Any) -> list[Any]:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=60)
        return delivered(job.graph(transport.rank, transport, broadcast_plan=broadcast_plan), count)

    planner, other = (delivered(job.graph(rank, SimulatedTransport(job, rank)), count) for rank in job.watched)
    virtual = run_ranks({"dp": ranks}, of_rank)
    assert planner == virtual[0]
    assert other == virtual[ranks // 2]


def test_each_rank_of_a_large_job_gets_samples_that_nobody_else_gets() -> None:
    job = Job(512, windows=1)
    planner, other = (delivered(job.graph(rank, SimulatedTransport(job, rank)), 1)[0] for rank in job.watched)
    assert planner[3] == other[3]
    assert planner[4] and other[4]
    (place,) = job.voices
    owners = job.bins(place)
    for rank, batch in zip(job.watched, (planner, other), strict=True):
        assert len(batch[4]) == (owners == rank).sum()
