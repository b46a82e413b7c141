"""External steps and precomputed metadata on odd and large numbers of ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DataPlaneError, SampleMetadata, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import run_ranks
from tests.graphs.external_scene import ExternalScene, samples_of
from tests.scenes import Documents


def lopsided_rounds(rank: int, rounds: int = 4) -> list[Any]:
    """Two bins a round; those of rank 0 hold eight cheap samples each, those of the others one, dearer by rank."""
    if rank == 0:
        return [
            [[(0, 16 * number + 8 * slot + k, 1) for k in range(8)] for slot in range(2)] for number in range(rounds)
        ]
    return [[[(rank, 2 * number + slot, 10 * rank)] for slot in range(2)] for number in range(rounds)]


@pytest.mark.parametrize(
    ("ranks", "group", "rounds_per_step"), [(12, 4, 2), (12, 1, 1), (12, 12, 4), (15, 3, 2), (7, 7, 1)]
)
def test_external_steps_stay_within_their_groups(ranks: int, group: int, rounds_per_step: int) -> None:
    scene = ExternalScene(lopsided_rounds, group=group, rounds_per_step=rounds_per_step)

    def of_rank(mesh: Any) -> list[tuple[int, Any]]:
        with scene.loader(mesh) as loader:
            return [(loader.last.step, samples_of(batch)) for batch in loader]

    by_rank = run_ranks({"dp": ranks}, of_rank)
    assert {len(batches) for batches in by_rank} == {4}
    for first in range(0, ranks, group):
        members = range(first, first + group)
        for step in range(4 // rounds_per_step):
            got = Counter(s for rank in members for at, batch in by_rank[rank] if at == step for s in batch)
            chosen = slice(step * rounds_per_step, (step + 1) * rounds_per_step)
            brought = (lopsided_rounds(rank)[chosen] for rank in members)
            assert got == Counter(sample for some in brought for one in some for packed in one for sample in packed)


def test_one_of_many_external_sources_ends_early() -> None:
    scene = ExternalScene(lambda rank: lopsided_rounds(rank, 3 if rank == 7 else 4), group=4)

    def of_rank(mesh: Any) -> tuple[int, str]:
        count = 0
        with scene.loader(mesh) as loader:
            try:
                for _ in loader:
                    count += 1
            except DataPlaneError as failure:
                return count, str(failure)
        return count, ""

    told = run_ranks({"dp": 12}, of_rank)
    assert len(set(told)) == 1
    assert told[0][0] == 3
    assert "rank 7" in told[0][1]


class Counting(Documents):
    """Counts reads by index, over all ranks."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("objective", ["lockstep", "makespan"])
@pytest.mark.parametrize(("ranks", "rounds", "window"), [(7, 3, 2), (100, 2, 2)])
def test_what_was_planned_before_reading_is_read_once(ranks: int, rounds: int, window: int, objective: Any) -> None:
    dataset = Counting(2 * ranks * rounds)
    metadata = [SampleMetadata(int(n), WorkloadCost(llm=float(n) ** 2)) for n in dataset.lengths]
    config = DistributedDatasetConfig(
        seq_len=64, local_batch_size=1, balance_window_size=window, metadata_mode=True, objective=objective
    )

    def of_rank(mesh: Any) -> list[tuple[int, ...]]:
        rank = mesh.get_rank()
        sampler = DistributedBatchSampler(len(dataset), 1, ranks * rounds, rank, ranks, order="shuffle")
        loader = build_distributed_dataloader(dataset, mesh, config, batch_sampler=sampler, metadata=metadata)
        with loader:
            return [(loader.last.step, *(record["index"] for record in bins)) for bins in loader]

    by_rank = run_ranks({"dp": ranks}, of_rank)
    assert {len(batches) for batches in by_rank} == {2 * rounds}
    assert sorted(dataset.reads) == list(range(len(dataset)))
    assert sorted(index for batches in by_rank for _, index in batches) == list(range(len(dataset)))
