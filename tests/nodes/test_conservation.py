"""Whatever the settings: each step delivers exactly what the sampler chose, in bins that fit, no worse than unbalanced.

What is expected is computed here from the sampler alone, as one rank would see it; nothing is taken from the loader.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import run_ranks
from tests.scenes import SEQ_LEN, Documents, Scene, halves

MICRO = 2
GLOBAL_BATCH = 16
SIZE = 39  # two steps, and seven records that fill no third
WHOLE_STEP = GLOBAL_BATCH

Step = list[list[list[list[np.ndarray]]]]  # [rank][round][bin][sequence], tokens


def chosen(dataset: Documents, order: str) -> list[list[int]]:
    """The records of each step of epoch 0, in the sampler's order."""
    sampler = DistributedBatchSampler(len(dataset), GLOBAL_BATCH, GLOBAL_BATCH, 0, 1, order=order, seed=7)
    return [list(indices) for indices in sampler]


def sequences(record: dict[str, Any], split: bool) -> list[np.ndarray]:
    return halves(record) if split else [record["input_ids"]]


def tokens_of(sample: Any) -> np.ndarray:
    return sample["input_ids"] if isinstance(sample, dict) else sample


def unbalanced(dataset: Documents, step: list[int], ranks: int, split: bool) -> Step:
    """Each record in the bin that the sampler meant it for."""
    rounds = np.asarray(step).reshape(-1, ranks, MICRO)
    return [[[sequences(dataset[index], split) for index in of[rank]] for of in rounds] for rank in range(ranks)]


def deliver(scene: Scene, mesh: Any) -> list[tuple[list[Any], Any]]:
    """This rank's micro-batches of each step, and the step's report."""
    steps: list[tuple[list[Any], Any]] = []
    with scene.loader(mesh) as loader:
        rounds: list[Any] = []
        for batch in loader:
            rounds.append([[tokens_of(sample) for sample in packed] for packed in batch])
            if loader.last.ends_step:
                steps.append((rounds, loader.last.report))
                rounds = []
        assert rounds == []
    return steps


def counted(step: Step) -> Counter[tuple[int, int]]:
    """How often each (record, length) occurs. All tokens of a sequence are its record's number."""
    found: Counter[tuple[int, int]] = Counter()
    for rank in step:
        for bins in rank:
            for packed in bins:
                for sequence in packed:
                    assert (sequence == sequence[0]).all()
                    found[int(sequence[0]), len(sequence)] += 1
    return found


def lockstep(step: Step) -> float:
    """The sum over rounds of the slowest rank, where a sequence costs the square of its length."""
    costs = np.array([[sum(len(s) ** 2 for b in bins for s in b) for bins in rank] for rank in step], dtype=float)
    return float(costs.max(axis=0).sum())


def check(scene: Scene, ranks: int) -> None:
    per_rank = run_ranks({"dp": ranks}, lambda mesh: deliver(scene, mesh))
    steps = chosen(scene.dataset, scene.order)
    assert [len(found) for found in per_rank] == [len(steps)] * ranks
    for number, records in enumerate(steps):
        delivered: Step = [found[number][0] for found in per_rank]
        reference = unbalanced(scene.dataset, records, ranks, scene.split)
        assert counted(delivered) == counted(reference)
        assert [len(rank) for rank in delivered] == [GLOBAL_BATCH // MICRO // ranks] * ranks
        assert all(len(bins) == MICRO for rank in delivered for bins in rank)
        assert all(0 < sum(map(len, b)) <= SEQ_LEN for rank in delivered for bins in rank for b in bins)
        assert lockstep(delivered) <= lockstep(reference)
        report = per_rank[0][number][1]
        assert np.isclose(report.plan.before, lockstep(reference))
        assert np.isclose(report.plan.after, lockstep(delivered))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("order", ["sequential", "shuffle"])
@pytest.mark.parametrize("window", [1, 2, WHOLE_STEP])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_is_what_the_sampler_chose(ranks: int, window: int, order: str, split: bool) -> None:
    scene = Scene(Documents(SIZE), MICRO, GLOBAL_BATCH, window=window, order=order, split=split)
    check(scene, ranks)


@pytest.mark.parametrize(("ranks", "window", "split"), [(1, 2, True), (2, 1, False), (2, WHOLE_STEP, True)])
def test_the_same_with_reader_workers(ranks: int, window: int, split: bool) -> None:
    check(Scene(Documents(SIZE), MICRO, GLOBAL_BATCH, window=window, split=split, workers=2), ranks)


def test_balancing_does_something() -> None:
    """The laws above hold for a loader that never balances as well; this one does."""
    scene = Scene(Documents(SIZE), MICRO, GLOBAL_BATCH, window=WHOLE_STEP)
    for found in run_ranks({"dp": 2}, lambda mesh: deliver(scene, mesh)):
        for _, report in found:
            assert report.plan.accepted
            assert report.plan.after < 0.9 * report.plan.before


@pytest.mark.parametrize(
    ("ranks", "micro", "global_batch", "size", "window"),
    [
        (3, 1, 3, 9, 5),  # one round a step, a window larger than that
        (3, 2, 6, 11, 1),  # an epoch of one step, and a tail
        (2, 1, 2, 2, 1),  # an epoch of one round
        (4, 1, 12, 29, 2),  # windows that do not divide the step
        (1, 5, 5, 5, 3),
    ],
)
def test_odd_sizes(ranks: int, micro: int, global_batch: int, size: int, window: int) -> None:
    scene = Scene(Documents(size), micro, global_batch, window=window, depth=2)

    def run(mesh: Any) -> tuple[list[Any], list[Any]]:
        epochs = []
        with scene.loader(mesh) as loader:
            for _ in range(2):
                places, tokens = [], []
                for batch in loader:
                    places.append((loader.last.step, loader.last.round))
                    tokens += [int(t) for packed in batch for sequence in packed for t in sequence]
                epochs.append((places, tokens))
        return epochs[0], epochs[1]

    results = run_ranks({"dp": ranks}, run)
    steps, rounds = size // global_batch, global_batch // (micro * ranks)
    for epoch in range(2):
        sampler = DistributedBatchSampler(size, global_batch, global_batch, 0, 1, order="shuffle", seed=7)
        sampler.set_epoch(epoch)
        expected = Counter({index: int(scene.dataset.lengths[index]) for batch in sampler for index in batch})
        found: Counter[int] = Counter()
        for result in results:
            places, tokens = result[epoch]
            assert places == [(step, round_) for step in range(steps) for round_ in range(rounds)]
            found.update(tokens)
        assert found == expected
