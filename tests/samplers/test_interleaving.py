"""The interleaving keeps every source at its share at every place, with any weights."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_nodes.samplers.interleaving import Interleaving, integer_weights


def running_counts(sources: np.ndarray, number: int) -> np.ndarray:
    """int64[places + 1, number]: how many of the first p places each source has."""
    counts = np.zeros((len(sources) + 1, number), np.int64)
    np.cumsum(sources[:, None] == np.arange(number), axis=0, out=counts[1:])
    return counts


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_every_source_is_near_its_share_at_every_place(weights: list[int]) -> None:
    sources, earlier = Interleaving(weights)(np.arange(1500))
    counts = running_counts(sources, len(weights))
    share = np.arange(1501)[:, None] * np.array(weights) / sum(weights)
    assert np.abs(counts - share).max() < 2
    assert earlier.tolist() == counts[np.arange(1500), sources].tolist()


@given(st.floats(0.001, 0.999))
@settings(max_examples=60, deadline=None)
def test_two_sources_are_rounded_to_their_share(share: float) -> None:
    sources, _ = Interleaving([share, 1 - share])(np.arange(2000))
    counts = running_counts(sources, 2)[:, 0]
    assert np.abs(counts - np.arange(2001) * share).max() <= 0.5 + 1e-5


def test_many_rare_sources_beside_a_big_one_are_spread_out() -> None:
    weights = [10_000] + [1] * 100
    sources, _ = Interleaving(weights)(np.arange(sum(weights)))
    rare = np.flatnonzero(sources != 0)
    assert len(rare) == 100
    assert np.diff(rare).min() > 90


def test_after_one_period_each_source_has_exactly_its_weight() -> None:
    sources, _ = Interleaving([5, 3, 2])(np.arange(30))
    assert np.bincount(sources[:10]).tolist() == [5, 3, 2]
    assert sources[:10].tolist() == sources[10:20].tolist() == sources[20:].tolist()


@pytest.mark.parametrize("start", [10**12, 2**61])
def test_any_place_is_reached_at_once(start: int) -> None:
    interleaving = Interleaving([0.7, 0.2, 0.1])
    sources, earlier = interleaving(np.arange(start, start + 100))
    before, after = interleaving.counts(start), interleaving.counts(start + 100)
    assert sum(before) == start
    assert [later - first for later, first in zip(after, before, strict=True)] == np.bincount(sources).tolist()
    assert earlier[0] == before[sources[0]]
    assert all(abs(count - start * weight / 10) < 2 for count, weight in zip(before, (7, 2, 1), strict=True))


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([30, 10], [3, 1]),
        ([0.5], [1]),
        ([np.float64(0.25), np.int64(1)], [1, 4]),
        ([1e-5, 1], [1, 100_000]),
    ],
)
def test_weights_are_exact_as_written(weights: list[float], whole: list[int]) -> None:
    assert integer_weights(weights) == whole


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=50))
@settings(max_examples=60, deadline=None)
def test_other_weights_are_within_one_part_in_two_to_the_thirty(weights: list[float]) -> None:
    whole = integer_weights(weights)
    total = sum(Fraction(repr(weight)) for weight in weights)
    assert sum(whole) <= 2**30
    for given_weight, weight in zip(whole, weights, strict=True):
        assert abs(Fraction(given_weight, sum(whole)) - Fraction(repr(weight)) / total) < Fraction(1, 2**30)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "weights is empty"),
        ([1, 0], "weight of dataset 1 is 0; accepted: a finite number above 0"),
        ([1, -2.5], "weight of dataset 1 is -2.5"),
        ([float("nan")], "weight of dataset 0 is nan"),
        ([1, float("inf")], "weight of dataset 1 is inf"),
        ([True], "weight of dataset 0 is True"),
        (["1"], "weight of dataset 0 is '1'"),
        ([1, 1e-10], "weight 1e-10 of dataset 1 is less than"),
    ],
)
def test_a_weight_that_cannot_be_kept_is_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Interleaving(weights)
