"""External steps over real processes: groups of their own, errors and closes that reach the other group."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hp_nodes import DataPlaneError
from tests.distributed.ranks import RankPool
from tests.graphs.external_scene import ExternalScene, Sample, rounds, samples_of, weigh


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def _deliver(group: int | None) -> list[list[Sample]]:
    scene = ExternalScene(lambda rank: rounds(rank, [9 if rank in (0, 2) else 1, 1]), group=group)
    with scene.loader(mesh()) as loader:
        return [samples_of(batch) for batch in loader]


def test_groups_of_two(four_ranks: RankPool) -> None:
    results = four_ranks.run(_deliver, 2)
    for first in (0, 2):
        step_0 = [results[first][0], results[first + 1][0]]
        assert {sample[0] for samples in step_0 for sample in samples} == {first, first + 1}
        assert [sum(sample[2] for sample in samples) for samples in step_0] == [10, 10]
    assert [step_1 for _, step_1 in results] == [[(rank, 2, 1), (rank, 3, 1)] for rank in range(4)]


def test_without_a_size_the_ranks_of_a_node_are_a_group(four_ranks: RankPool) -> None:
    assert [sum(sample[2] for sample in steps[0]) for steps in four_ranks.run(_deliver, None)] == [10] * 4


def _deliver_on_two_nodes() -> list[list[Sample]]:
    named, rank = socket.gethostname, dist.get_rank()
    socket.gethostname = lambda: f"node-{rank % 2}"
    try:
        return _deliver(None)
    finally:
        socket.gethostname = named


def test_without_a_size_ranks_of_other_nodes_are_other_groups(four_ranks: RankPool) -> None:
    """Ranks 0 and 2 bring 9s and share a node, where nothing can be gained; so do 1 and 3 with their 1s."""
    for rank, steps in enumerate(four_ranks.run(_deliver_on_two_nodes)):
        assert steps == [samples_of(step) for step in rounds(rank, [9 if rank in (0, 2) else 1, 1])]


def _heavy(sample: Sample) -> Any:
    if sample[:2] == (1, 4):
        raise KeyError("no such length")
    return weigh(sample)


def _fail(what: str) -> tuple[int, str, float]:
    start, count = time.monotonic(), 0
    scene = ExternalScene(
        lambda rank: rounds(rank, [1] * (2 if what == "ends" and rank == 1 else 30)),
        group=2,
        metadata_fn=_heavy if what == "metadata" else weigh,
    )
    try:
        with scene.loader(mesh()) as loader:
            for _ in loader:
                count += 1
                if what == "closes" and dist.get_rank() == 3 and count == 2:
                    raise FloatingPointError("loss is NaN")
    except (DataPlaneError, FloatingPointError) as error:
        return count, str(error).splitlines()[0], time.monotonic() - start
    return count, "no error", time.monotonic() - start


@pytest.mark.parametrize("what", ["metadata", "ends", "closes"])
def test_a_failure_in_one_group_reaches_the_other(what: str, four_ranks: RankPool) -> None:
    results = four_ranks.run(_fail, what)
    assert all(seconds < 9 for *_, seconds in results)
    texts = [text for _, text, _ in results]
    if what == "closes":
        assert texts[3] == "loss is NaN"
        assert all("rank 3" in text and "closed" in text for text in texts[:3])
        return
    assert {count for count, *_ in results} == {2}
    assert len(set(texts)) == 1
    assert ("no such length" if what == "metadata" else "rank 1 after 2 rounds") in texts[0]
    assert _deliver_again(four_ranks)


def _deliver_again(pool: RankPool) -> bool:
    """The groups of before are gone; new ones are made and work."""
    return len(pool.run(_deliver, 2)) == 4
