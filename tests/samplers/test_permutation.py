"""The keyed permutation is a permutation for every size, the same everywhere, and as good as a random one."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_nodes.samplers.permutation import KeyedPermutation

FIRST_ORDER = [3, 5, 1, 4, 6, 7, 0, 8, 2, 9]
FIRST_OF_A_TRILLION = [828194640540, 755487161757, 358980776565]


def z_score(observed: np.ndarray, expected: float) -> float:
    """How many standard deviations the chi-square of equally likely cells is from its mean."""
    freedom = observed.size - 1
    return (((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 2**70))
@settings(max_examples=60, deadline=None)
def test_every_place_is_sent_to_a_place_of_its_own(size: int, seed: int, epoch: int) -> None:
    sent = KeyedPermutation(size, seed, epoch)(np.arange(size))
    assert sent.dtype == np.int64
    assert sorted(sent.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**31 - 1, 10**12, 2**53 + 1, 2**61 - 1, 2**62])
def test_places_of_a_huge_dataset_stay_inside_and_differ(size: int) -> None:
    permutation = KeyedPermutation(size, 1)
    places = np.unique(np.concatenate([np.arange(10_000), size - 1 - np.arange(10_000), np.arange(7) * (size // 7)]))
    sent = permutation(places)
    assert sent.min() >= 0
    assert sent.max() < size
    assert len(np.unique(sent)) == len(places)


def test_a_place_does_not_depend_on_the_others_asked_with_it() -> None:
    permutation = KeyedPermutation(10**12, 5, 6)
    places = np.array([0, 10**12 - 1, 17, 10**9], np.int64)
    assert permutation(places).tolist() == [int(permutation(places[i : i + 1])[0]) for i in range(4)]
    assert permutation(places[:0]).tolist() == []


def test_the_order_is_fixed_for_ever() -> None:
    # A checkpoint resumes in the order that it was made with, on any machine and under any later version.
    assert KeyedPermutation(10, 0, 0)(np.arange(10)).tolist() == FIRST_ORDER
    assert KeyedPermutation(10**12, 1234, 7)(np.arange(3)).tolist() == FIRST_OF_A_TRILLION


def test_each_part_of_the_key_changes_the_order() -> None:
    orders = {tuple(KeyedPermutation(50, *key)(np.arange(50))) for key in [(0,), (1,), (0, 0), (0, 1), (1, 0), (10,)]}
    assert len(orders) == 6


@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_order_of_a_few_records_is_as_frequent_as_any_other(size: int) -> None:
    orders = math.factorial(size)
    found = Counter(tuple(KeyedPermutation(size, seed)(np.arange(size))) for seed in range(60 * orders))
    assert len(found) == orders
    assert abs(z_score(np.array(list(found.values())), 60)) < 4


def test_neighbours_are_sent_anywhere_over_the_seeds() -> None:
    size, seeds = 9, 5000
    sent = np.stack([KeyedPermutation(size, seed)(np.arange(size)) for seed in range(seeds)])
    for first, second in ((0, 1), (0, 3), (4, 8)):
        pairs = np.bincount(sent[:, first] * size + sent[:, second], minlength=size * size).reshape(size, size)
        assert not pairs.diagonal().any()
        assert abs(z_score(pairs[~np.eye(size, dtype=bool)], seeds / (size * (size - 1)))) < 4


@pytest.mark.parametrize("size", [1000, 100_003, 10**12])
def test_one_order_looks_random(size: int) -> None:
    count = min(size, 100_000)
    places = np.arange(count)
    sent = KeyedPermutation(size, 99)(places)
    # Where places are sent is uniform: as many to each of 50 equal parts (exactly so where all places are looked at).
    parts = np.bincount(sent * 50 // size, minlength=50)
    assert z_score(parts, count / 50) < 4
    # No correlation with the place, nor of neighbours, nor at a distance of the network's two factors.
    factor = math.isqrt(size - 1) + 1
    limit = 4.5 / math.sqrt(count)
    assert abs(np.corrcoef(places, sent)[0, 1]) < limit
    for lag in {1, 2, min(factor, count // 2)}:
        assert abs(np.corrcoef(sent[:-lag], sent[lag:])[0, 1]) < limit * math.sqrt(count / (count - lag))
    # A uniform order has one fixed place and one kept neighbour on average.
    assert (sent == places).sum() <= 8
    assert (np.diff(sent) == 1).sum() <= 8


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_a_size_without_places_or_beyond_63_bits_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="size is .*; accepted"):
        KeyedPermutation(size, 0)
