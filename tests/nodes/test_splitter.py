"""CONTRACT 6: a record becomes its sequences, in order, and stays together in the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_nodes import SampleReader, Splitter, Window, WindowSampler, sample_rng
from hp_nodes.samplers import DistributedBatchSampler

RECORDS = ["one two three", "four", "five six", "seven eight nine ten"]


def window_of(split_fn: Callable[[Any], Any], **given: Any) -> Window:
    """The window of all four records, two rounds of two."""
    node = Splitter(SampleReader(WindowSampler(DistributedBatchSampler(4, 2, 4, 0, 1), 2), RECORDS), split_fn, **given)
    node.reset(None)
    return next(node)


@pytest.mark.parametrize("kind", [list, tuple, iter], ids=["list", "tuple", "generator"])
def test_a_record_becomes_its_sequences_in_order(kind: Any) -> None:
    window = window_of(lambda record: kind(record.split()))
    assert window.samples == tuple(word for record in RECORDS for word in record.split())
    assert [tuple(key) for key in window.keys] == [
        (position, position, part) for position, record in enumerate(RECORDS) for part in range(len(record.split()))
    ]
    assert window.reference is not None and window.reference.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]


def test_a_record_that_gives_nothing_is_named() -> None:
    with pytest.raises(ValueError, match="split_fn gave no sequence; accepted: at least one") as caught:
        window_of(lambda record: record.split()[1:])
    assert caught.value._hp_nodes_location["sample"] == "position 1, index 1, part 0"  # type: ignore[attr-defined]


def test_a_function_that_raises_names_its_record_and_one_that_stops_is_an_error() -> None:
    def failing(record: str) -> list[str]:
        if record == "five six":
            raise LookupError("no such word")
        return [record]

    with pytest.raises(LookupError, match="no such word") as caught:
        window_of(failing)
    assert "index 2" in caught.value._hp_nodes_location["sample"]  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="raised StopIteration, which would end the epoch"):
        window_of(lambda record: [next(iter(()))])


def test_what_it_draws_belongs_to_the_occurrence() -> None:
    def drawn(seed: int) -> Any:
        return window_of(lambda record: [sample_rng().python.random()], seed=seed).samples

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 4


def test_without_a_reader_below_it_says_which_node_fills_samples() -> None:
    node = Splitter(WindowSampler(DistributedBatchSampler(4, 2, 4, 0, 1)), list)
    node.reset(None)
    with pytest.raises(ValueError, match="the window has no samples; a SampleReader below the Splitter fills them"):
        next(node)
