"""CONTRACT 3: windows of keys from a batch sampler: where they end, which occurrence is where, when an epoch ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_nodes import SampleReader, Window, WindowSampler
from hp_nodes.samplers import DistributedBatchSampler
from tests.nodes.test_users_parts import Listed


def windows(
    window: int, total: int = 26, micro: int = 2, batch: int = 12, rank: int = 0, ranks: int = 2
) -> list[Window]:
    return list(WindowSampler(DistributedBatchSampler(total, micro, batch, rank, ranks), window))


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_a_window_never_crosses_a_step_and_a_step_ends_with_one(window: int) -> None:
    found = windows(window)  # two steps of three rounds
    places = [(w.step, w.first_round + number) for w in found for number in range(w.num_rounds)]
    assert places == [(step, number) for step in range(2) for number in range(3)]
    assert all(w.num_rounds <= window for w in found)
    assert [w.ends_step for w in found] == [w.first_round + w.num_rounds == 3 for w in found]
    assert [w.ends_epoch for w in found] == [w is found[-1] for w in found]
    assert [w.dropped for w in found] == [2 * w.ends_epoch for w in found]


def test_positions_are_places_in_the_epochs_global_order_on_any_number_of_ranks() -> None:
    for ranks in (1, 2, 3, 6):
        keys = sorted(key for rank in range(ranks) for w in windows(2, rank=rank, ranks=ranks) for key in w.keys)
        assert [tuple(key) for key in keys] == [(place, place, 0) for place in range(24)]


def test_the_reference_is_one_bin_a_record_in_the_samplers_order() -> None:
    assert [w.reference.tolist() for w in windows(2)] == [[0, 1, 2, 3], [0, 1]] * 2


def test_an_epoch_ends_with_its_last_whole_step_though_the_sampler_would_go_on() -> None:
    """A sampler of the user's that yields every whole round: the rest is dropped, and counted."""
    sampler = Listed(list(range(100, 111)), 1, 4, 0, 2)  # 11 records: 5 rounds, 2 steps of 2
    found = list(WindowSampler(sampler, 4))
    assert [key.index for w in found for key in w.keys] == [100, 102, 104, 106]
    assert [(w.ends_epoch, w.dropped) for w in found] == [(False, 0), (True, 3)]


def test_it_starts_where_the_sampler_stands_and_only_its_own_cursor_counts_from_there() -> None:
    sampler = DistributedBatchSampler(24, 2, 4, 0, 1)
    sampler.load_state_dict({"epoch": 2, "consumed_samples": 8})
    node = WindowSampler(sampler)
    node.reset(None)
    sampler.load_state_dict({"epoch": 5, "consumed_samples": 0})  # someone else plays with it
    window = next(node)
    assert (window.epoch, window.step, [key.position for key in window.keys]) == (2, 2, [8, 9])


@pytest.mark.parametrize("size", [0, -1, True, 1.0, None])
def test_a_window_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match=f"window_size is {size}; accepted: an int >= 1"):
        WindowSampler(DistributedBatchSampler(24, 2, 4, 0, 1), size)


def test_a_sampler_whose_step_is_no_whole_number_of_rounds_is_told_what_divides_it() -> None:
    with pytest.raises(
        ValueError, match=r"global_batch_size 6 is no multiple of its global_micro_batch_size 4; .*micro"
    ):
        WindowSampler(Listed(list(range(24)), 2, 6, 0, 2))
    with pytest.raises(ValueError, match="an epoch has no step: 5 samples are fewer than one global batch of 8"):
        WindowSampler(Listed(list(range(5)), 2, 8, 0, 2))


@pytest.mark.parametrize(
    ("consumed", "text"),
    [
        (28, "the state has consumed 28 of 24 samples"),
        (-4, "has consumed -4 of 24"),
        (6, "6 samples consumed end no round"),
    ],
)
def test_a_cursor_that_stands_nowhere_is_refused(consumed: int, text: str) -> None:
    node = WindowSampler(DistributedBatchSampler(24, 2, 8, 0, 2))
    node.reset(None)
    state = node.state_dict()
    state["hp_nodes"]["WindowSampler"]["consumed_samples"] = consumed
    with pytest.raises(ValueError, match=text):  # noqa: PT012  at once, or when the window is asked for
        node.reset(state)
        next(node)


class Backwards(Listed):
    """Python's own datasets would take the last record for index -1."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield [index - 3 for index in batch]


def test_a_negative_index_is_outside_the_dataset() -> None:
    reader = SampleReader(WindowSampler(Backwards(list(range(8)), 2, 4, 0, 1)), np.arange(8))
    reader.reset(None)
    with pytest.raises(IndexError, match="index -3 is outside the dataset of 8 records"):
        next(reader)
