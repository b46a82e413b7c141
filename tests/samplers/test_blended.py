"""BlendedBatchSampler: several datasets by weight, one order on any number of ranks, resumed with two numbers."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from hp_nodes.samplers import BlendedBatchSampler, check_batch_sampler


def order(ranks: int, *, epoch: int = 0, start: int = 0, micro: int = 1, step: int = 4, **options: Any) -> list[int]:
    """The order that the ranks of a run read together."""
    options = {"dataset_sizes": [40, 10, 6], "weights": [0.5, 0.3, 0.2], **options}
    sizes, weights = options.pop("dataset_sizes"), options.pop("weights")
    group = [BlendedBatchSampler(sizes, weights, micro, step, rank, ranks, **options) for rank in range(ranks)]
    for sampler in group:
        sampler.load_state_dict({"epoch": epoch, "consumed_samples": start})
    return list(chain.from_iterable(chain.from_iterable(zip(*group, strict=True))))


@pytest.mark.parametrize("options", [{}, {"order": "shuffle"}, {"order": "shuffle", "on_end": "repeat"}])
def test_the_order_depends_on_neither_ranks_nor_where_it_is_resumed(options: dict[str, Any]) -> None:
    whole = order(1, epoch=2, **options)
    for ranks, micro in ((1, 4), (2, 2), (4, 1)):
        for start in range(0, len(whole) + 1, 4):
            assert order(ranks, epoch=2, start=start, micro=micro, **options) == whole[start:]


def test_stop_ends_before_the_first_sample_that_is_not_there() -> None:
    # 30 samples need 15, 9 and 6 records; the next of the third dataset would be its seventh.
    sampler = BlendedBatchSampler([40, 10, 6], [0.5, 0.3, 0.2], 1, 1, 0, 1)
    read = list(chain.from_iterable(sampler))
    counts = Counter(sampler.locate(index)[0] for index in read)
    assert sampler.total_samples == len(read) >= 30
    assert len(set(read)) == len(read)
    assert counts[2] == 6
    assert counts[1] <= 10
    longer = BlendedBatchSampler([40, 10, 7], [0.5, 0.3, 0.2], 1, 1, 0, 1)
    assert list(chain.from_iterable(longer))[len(read)] == 56  # the record that the third dataset does not have


def test_stop_reads_each_dataset_anew_in_each_epoch() -> None:
    first, second = order(1, order="shuffle"), order(1, epoch=1, order="shuffle")
    assert first != second
    assert [index for index in first if index >= 50] != [index for index in second if index >= 50]
    assert {index for index in first if index >= 50} == {index for index in second if index >= 50}
    assert order(1) == order(1, epoch=1)


@pytest.mark.parametrize("kind", ["sequential", "shuffle"])
def test_repeat_gives_every_record_once_before_any_twice_across_epochs_too(kind: str) -> None:
    options: dict[str, Any] = {"order": kind, "on_end": "repeat", "total_samples": 22}
    read = list(chain.from_iterable(order(1, epoch=epoch, **options) for epoch in range(10)))
    assert len(read) == 200  # 22 are five steps of 4
    for first, size in ((0, 40), (40, 10), (50, 6)):
        of_dataset = [index for index in read if first <= index < first + size]
        passes = [of_dataset[i : i + size] for i in range(0, len(of_dataset), size)]
        assert all(len(set(records)) == len(records) for records in passes)
        assert all(sorted(records) == list(range(first, first + size)) for records in passes[:-1])
        if kind == "shuffle" and len(passes) > 2:
            assert passes[0] != passes[1]
    counts = Counter(0 if index < 40 else 1 if index < 50 else 2 for index in read)
    assert [counts[0], counts[1], counts[2]] == [100, 60, 40]


def test_repeat_has_as_many_samples_as_records_unless_told() -> None:
    assert BlendedBatchSampler([3, 5], [1, 1], 1, 2, 0, 1, on_end="repeat").total_samples == 8


def test_an_index_is_one_of_the_concatenated_dataset() -> None:
    parts = [TensorDataset(torch.full((size,), number), torch.arange(size)) for number, size in enumerate((4, 1, 3))]
    together = ConcatDataset(parts)
    sampler = BlendedBatchSampler([4, 1, 3], [1, 1, 1], 1, 1, 0, 1, on_end="repeat")
    assert [sampler.locate(i) for i in range(8)] == [tuple(int(v) for v in together[i]) for i in range(8)]
    for outside in (-1, 8):
        with pytest.raises(IndexError, match=f"index is {outside}; the datasets have 8 records"):
            sampler.locate(outside)


def test_huge_datasets_start_at_once_with_the_same_small_state() -> None:
    sampler = BlendedBatchSampler([10**12, 10**11], [0.9, 0.1], 2, 64, 1, 4, order="shuffle", seed=3)
    sampler.load_state_dict({"epoch": 4, "consumed_samples": 64 * 10**9})
    assert len(next(iter(sampler))) == 2
    assert sampler.state_dict() == {"epoch": 4, "consumed_samples": 64 * 10**9 + 8}


def test_the_fingerprint_tells_blends_apart_and_layouts_not() -> None:
    def fingerprint(sizes: list[int], weights: list[float], micro: int = 1, ranks: int = 1, **options: Any) -> str:
        return json.dumps(BlendedBatchSampler(sizes, weights, micro, 4, 0, ranks, **options).fingerprint())

    base = fingerprint([8, 8], [1, 1])
    assert base == fingerprint([8, 8], [0.5, 0.5], micro=2, ranks=2)
    others = [
        fingerprint([8, 9], [1, 1]),
        fingerprint([8, 8], [1, 2]),
        fingerprint([8, 8], [1, 1], order="shuffle"),
        fingerprint([8, 8], [1, 1], order="shuffle", seed=1),
        fingerprint([8, 8], [1, 1], on_end="repeat"),
    ]
    assert len({base, *others}) == 6
    assert len(fingerprint([8] * 1000, [1.0] * 1000)) < 500


def test_it_keeps_the_contract() -> None:
    sampler = BlendedBatchSampler([8, 8], [1, 1], 2, 4, 1, 2)
    check_batch_sampler(sampler, micro_batch_size=2, dp_rank=1, dp_world_size=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset_sizes": [8, 0]}, "size of dataset 1 is 0; accepted: an int >= 1"),
        ({"weights": [1]}, "1 weights for 2 datasets; accepted: one for each"),
        ({"weights": [1, 0]}, "weight of dataset 1 is 0"),
        ({"order": "random"}, "order is 'random'"),
        ({"on_end": "wrap"}, "on_end is 'wrap'; accepted: 'stop' or 'repeat'"),
        ({"total_samples": 4}, "total_samples is 4, but with on_end='stop'"),
        ({"total_samples": 0, "on_end": "repeat"}, "total_samples is 0; accepted: an int >= 1"),
        ({"seed": True}, "seed is True; accepted: an int >= 0"),
        ({"dp_rank": 2}, "dp_rank is 2; accepted: an int from 0 to 1"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "dataset_sizes": [8, 8],
        "weights": [1, 1],
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "dp_rank": 1,
        "dp_world_size": 2,
    }
    with pytest.raises(ValueError, match=message):
        BlendedBatchSampler(**{**arguments, **changed})
