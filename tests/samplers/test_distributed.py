"""CONTRACT 3: each rank's slice of one global order, from any cursor, on any number of ranks."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_nodes.samplers import DistributedBatchSampler, check_batch_sampler


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def samplers(ranks: int, total: int, micro: int, step: int, **options: Any) -> list[DistributedBatchSampler]:
    return [DistributedBatchSampler(total, micro, step, rank, ranks, **options) for rank in range(ranks)]


def steps(ranks: int, total: int, micro: int, step: int, epoch: int = 0, start: int = 0, **options: Any) -> list[Any]:
    """What the ranks together read in each step, in the global order: rank by rank within a round, round by round."""
    group = samplers(ranks, total, micro, step, **options)
    for sampler in group:
        sampler.load_state_dict({"epoch": epoch, "consumed_samples": start})
    rounds = [flat(batches) for batches in zip(*group, strict=True)]
    per_step = step // (micro * ranks)
    return [flat(rounds[i : i + per_step]) for i in range(0, len(rounds), per_step)]


def test_a_round_is_cut_into_contiguous_slices() -> None:
    first, second = samplers(2, total=16, micro=2, step=8)
    assert list(first) == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert list(second) == [[2, 3], [6, 7], [10, 11], [14, 15]]


@pytest.mark.parametrize("order", ["sequential", "shuffle"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_tail_that_fills_no_step_is_left_out_on_any_number_of_ranks(order: str, ranks: int) -> None:
    whole = steps(1, 10, 1, 4, order=order)
    assert [len(step) for step in whole] == [4, 4]
    assert steps(ranks, 10, 2, 4, order=order) == whole
    assert len(DistributedBatchSampler(10, 2, 4, 0, ranks, order=order)) == 4 // ranks


def test_every_rank_has_as_many_micro_batches() -> None:
    group = samplers(3, total=10, micro=2, step=6)
    assert [len(list(sampler)) for sampler in group] == [1, 1, 1]
    assert sorted(flat(steps(3, 10, 2, 6))) == [0, 1, 2, 3, 4, 5]


def test_fewer_samples_than_a_step_are_an_empty_epoch() -> None:
    sampler = DistributedBatchSampler(3, 2, 4, 0, 2)
    assert len(sampler) == 0
    assert list(sampler) == []


def test_shuffled_epochs_hold_every_sample_once_each_in_an_order_of_its_own() -> None:
    epochs = [flat(steps(2, 60, 3, 12, epoch, order="shuffle", seed=5)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(60)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert flat(steps(2, 60, 3, 12, 0, order="shuffle", seed=6)) not in epochs


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_order_depends_on_neither_ranks_nor_micro_batch_nor_where_it_is_resumed(data: st.DataObject) -> None:
    total, step = data.draw(st.integers(24, 200)), 24
    epoch, seed = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9))
    order = data.draw(st.sampled_from(["sequential", "shuffle"]))
    ranks, micro = data.draw(st.sampled_from([(1, 1), (1, 24), (2, 3), (3, 4), (4, 6), (8, 1), (24, 1)]))
    start = step * data.draw(st.integers(0, total // step))
    whole = steps(1, total, 24, step, epoch, order=order, seed=seed)
    assert steps(ranks, total, micro, step, epoch, start, order=order, seed=seed) == whole[start // step :]


@pytest.mark.parametrize("order", ["sequential", "shuffle"])
def test_from_every_position_a_new_sampler_goes_on_where_the_state_was_taken(order: str) -> None:
    sampler = DistributedBatchSampler(26, 2, 8, 1, 2, order=order)
    sampler.set_epoch(3)
    whole = list(sampler)
    sampler.load_state_dict({"epoch": 3, "consumed_samples": 0})
    for position, _ in enumerate(whole):
        state = pickle.loads(pickle.dumps(sampler.state_dict()))
        assert state == {"epoch": 3, "consumed_samples": 4 * position}
        restored = DistributedBatchSampler(26, 2, 8, 1, 2, order=order)
        restored.load_state_dict(state)
        assert list(restored) == whole[position:]
        next(iter(sampler))
    assert list(sampler) == []


def test_a_resumed_run_is_resumed_again() -> None:
    state = {"epoch": 0, "consumed_samples": 0}
    for count in (3, 2):
        sampler = DistributedBatchSampler(20, 2, 2, 0, 1)
        sampler.load_state_dict(state)
        list(islice(sampler, count))
        state = sampler.state_dict()
    sampler = DistributedBatchSampler(20, 2, 2, 0, 1)
    sampler.load_state_dict(state)
    assert next(iter(sampler)) == [10, 11]


def test_consumed_samples_counts_what_was_just_yielded() -> None:
    sampler = DistributedBatchSampler(8, 2, 4, 0, 2)
    assert [sampler.consumed_samples for _ in sampler] == [4, 8]
    assert {type(value) for value in sampler.state_dict().values()} == {int}


def test_an_iteration_follows_a_state_loaded_in_the_middle_of_it() -> None:
    sampler = DistributedBatchSampler(24, 2, 4, 0, 1, order="shuffle")
    whole = list(sampler)
    sampler.load_state_dict({"epoch": 0, "consumed_samples": 0})
    batches = iter(sampler)
    assert [next(batches) for _ in range(3)] == whole[:3]
    sampler.load_state_dict({"epoch": 0, "consumed_samples": 16})
    assert next(batches) == whole[8]
    sampler.set_epoch(1)
    other = DistributedBatchSampler(24, 2, 4, 0, 1, order="shuffle")
    other.set_epoch(1)
    assert list(batches) == list(other)


def test_set_epoch_keeps_the_cursor_of_the_current_epoch_only() -> None:
    sampler = DistributedBatchSampler(12, 2, 4, 0, 1)
    sampler.load_state_dict({"epoch": 2, "consumed_samples": 6})
    sampler.set_epoch(2)
    assert (sampler.epoch, sampler.consumed_samples) == (2, 6)
    sampler.set_epoch(3)
    assert (sampler.epoch, sampler.consumed_samples) == (3, 0)
    list(sampler)
    sampler.set_epoch(3)
    assert list(sampler) == []


def test_consumed_samples_may_be_set_to_start_elsewhere() -> None:
    sampler = DistributedBatchSampler(12, 2, 4, 0, 1)
    sampler.consumed_samples = 10
    assert list(sampler) == [[10, 11]]


def test_a_trillion_records_start_at_once_anywhere() -> None:
    sampler = DistributedBatchSampler(10**12, 4, 1024, 3, 8, order="shuffle", seed=1)
    began = time.perf_counter()
    sampler.load_state_dict({"epoch": 9, "consumed_samples": 1024 * 9 * 10**8})
    first = next(iter(sampler))
    assert time.perf_counter() - began < 0.5
    assert len(set(first)) == 4
    assert all(0 <= index < 10**12 for index in first)
    assert len(sampler) == 10**12 // 1024 * 32


MAPPINGS: dict[str, Callable[[], Any]] = {
    "list": lambda: [7 * place % 30 for place in range(30)],
    "array": lambda: np.array([7 * place % 30 for place in range(30)], np.uint16),
    "tensor": lambda: torch.tensor([7 * place % 30 for place in range(30)]),
    "function": lambda: lambda place: 7 * place % 30,
}


@pytest.mark.parametrize("kind", MAPPINGS)
@pytest.mark.parametrize("order", ["sequential", "shuffle"])
def test_the_mapping_is_applied_after_the_permutation(kind: str, order: str) -> None:
    plain = list(DistributedBatchSampler(30, 3, 6, 1, 2, order=order))
    mapped = list(DistributedBatchSampler(30, 3, 6, 1, 2, order=order, index_mapping=MAPPINGS[kind]()))
    assert mapped == [[7 * place % 30 for place in batch] for batch in plain]
    assert {type(index) for batch in mapped for index in batch} == {int}


def test_a_mapping_may_repeat_an_index() -> None:
    assert list(DistributedBatchSampler(4, 2, 4, 0, 1, index_mapping=[5, 5, 5, 5])) == [[5, 5], [5, 5]]


@pytest.mark.parametrize("value", [None, 1.5, True, -1, "3", np.bool_(True)])
def test_what_a_mapping_gives_is_an_index_or_is_named_and_the_cursor_stays(value: object) -> None:
    sampler = DistributedBatchSampler(4, 2, 2, 0, 1, index_mapping=lambda place: value if place == 3 else place)
    batches = iter(sampler)
    assert next(batches) == [0, 1]
    with pytest.raises(ValueError, match="index_mapping of place 3 is .*; accepted: an int >= 0"):
        next(batches)
    assert sampler.consumed_samples == 2


def test_the_fingerprint_tells_orders_apart_and_layouts_not() -> None:
    def fingerprint(total: int = 24, micro: int = 2, step: int = 12, rank: int = 0, ranks: int = 1, **o: Any) -> str:
        return json.dumps(DistributedBatchSampler(total, micro, step, rank, ranks, **o).fingerprint())

    base = fingerprint(order="shuffle")
    assert base == fingerprint(micro=3, rank=1, ranks=2, order="shuffle")
    others = [
        fingerprint(),
        fingerprint(total=25, order="shuffle"),
        fingerprint(step=6, order="shuffle"),
        fingerprint(seed=1, order="shuffle"),
        fingerprint(order="shuffle", index_mapping=list(range(24))),
        fingerprint(order="shuffle", index_mapping=lambda place: place + 1),
    ]
    assert len({base, *others}) == 7
    assert fingerprint(seed=1) == fingerprint(seed=2)
    assert others[4] == fingerprint(order="shuffle", index_mapping=lambda place: place)


def test_it_keeps_the_contract() -> None:
    check_batch_sampler(DistributedBatchSampler(12, 2, 8, 1, 2), micro_batch_size=2, dp_rank=1, dp_world_size=2)


ARGUMENTS: dict[str, Any] = {
    "total_samples": 12,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "dp_rank": 1,
    "dp_world_size": 2,
}


@pytest.mark.parametrize("name", [*ARGUMENTS, "seed"])
@pytest.mark.parametrize("value", [-1, True, 1.0, None, "2"])
def test_numbers_are_ints_in_range(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}; accepted: an int"):
        DistributedBatchSampler(**{**ARGUMENTS, name: value})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0; accepted: an int >= 1"),
        ({"global_batch_size": 0}, "global_batch_size is 0; accepted: an int >= 1"),
        ({"dp_rank": 2}, "dp_rank is 2; accepted: an int from 0 to 1"),
        ({"global_batch_size": 6}, "global_batch_size is 6; accepted: a multiple of 4"),
        ({"order": "random"}, "order is 'random'; accepted: 'sequential' or 'shuffle'"),
        ({"index_mapping": [0] * 11}, "index_mapping has 11 entries; accepted: at least total_samples 12"),
        ({"index_mapping": 3}, "index_mapping is a int; accepted: a sequence or a callable"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedBatchSampler(**{**ARGUMENTS, **changed})


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"epoch": 0}, "accepted: exactly epoch and consumed_samples"),
        ({"epoch": 0, "consumed_samples": 0, "rng": 1}, "accepted: exactly epoch and consumed_samples"),
        ({"epoch": -1, "consumed_samples": 0}, "epoch is -1"),
        ({"epoch": 1, "consumed_samples": True}, "consumed_samples is True"),
        ({"epoch": 1, "consumed_samples": 6}, "consumed_samples is 6; accepted: a multiple of .* 4, up to .* 8"),
        ({"epoch": 1, "consumed_samples": 12}, "consumed_samples is 12; accepted: a multiple of .* 4, up to .* 8"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state: dict[str, Any], message: str) -> None:
    sampler = DistributedBatchSampler(**ARGUMENTS)
    sampler.load_state_dict({"epoch": 5, "consumed_samples": 4})
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == {"epoch": 5, "consumed_samples": 4}


@pytest.mark.parametrize("epoch", [-1, True, 1.0, None])
def test_an_epoch_is_an_int(epoch: object) -> None:
    with pytest.raises(ValueError, match="epoch is .*; accepted: an int >= 0"):
        DistributedBatchSampler(**ARGUMENTS).set_epoch(epoch)  # type: ignore[arg-type]
