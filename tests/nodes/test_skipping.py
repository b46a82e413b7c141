"""CONTRACT 4: what cannot be read is replaced, the same on any number of ranks, counted by all, not too often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hp_nodes import DataPlaneError, SampleKey, SampleReader, WindowSampler
from hp_nodes.nodes.replacement import MAX_ATTEMPTS, Replacement
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.state import LoaderState
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, Scene, pickled

BAD = {5, 21, 22, 40}


class Holes(Documents):
    """Some records cannot be read, one by one or many at a time."""

    def __init__(self, size: int = 48, bad: frozenset[int] = frozenset(BAD)) -> None:
        super().__init__(size)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"record {index} is damaged")
        return super().__getitem__(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def read_all(dataset: Any, **given: Any) -> tuple[list[Any], list[Any], list[int]]:
    """Keys, the index in each record, and what was skipped, window by window."""
    reader = SampleReader(
        WindowSampler(DistributedBatchSampler(48, 2, 8, 0, 1), 2), dataset, seed=5, on_error="skip", **given
    )
    windows = list(reader)
    reader.close()
    keys = [tuple(key) for window in windows for key in window.keys]
    return keys, [sample["index"] for window in windows for sample in window.samples], [w.skipped for w in windows]


def expected(bad: frozenset[int], length: int = 48) -> tuple[list[int], int]:
    """What is read at each position, and how many reads fail: said once more, independently of the code."""
    found, failed = [], 0
    for position in range(48):
        tried = [position] + [
            Replacement(5, length).key(0, _key(position), attempt).index for attempt in range(1, MAX_ATTEMPTS + 1)
        ]
        good = next(number for number, index in enumerate(tried) if index not in bad)
        found.append(tried[good])
        failed += good
    return found, failed


def _key(position: int) -> SampleKey:
    return SampleKey(position, position)


@pytest.mark.parametrize("given", [{}, {"batched_reads": True}, {"num_workers": 2}], ids=["here", "batched", "workers"])
def test_a_record_that_cannot_be_read_is_replaced_at_its_position(given: dict[str, Any]) -> None:
    bad = frozenset(range(0, 48, 3))
    keys, records, skipped = read_all(Holes(bad=bad), **given)
    indices, failed = expected(bad)
    assert [position for position, _, _ in keys] == list(range(48))
    assert records == indices == [index for _, index, _ in keys]
    assert sum(skipped) == failed > 16  # replacements fail too


def test_nothing_is_skipped_where_everything_can_be_read() -> None:
    _, records, skipped = read_all(Holes(bad=frozenset()))
    assert records == list(range(48)) and sum(skipped) == 0


def test_what_has_no_readable_replacement_is_an_error_that_names_them() -> None:
    """After three attempts."""
    with pytest.raises(
        RuntimeError, match=r"record 0 cannot be read .*damaged.* nor any of the records \[\d+, \d+, \d+\] in its place"
    ):
        read_all(Holes(bad=frozenset(range(48))))


def test_what_comes_in_a_records_place_follows_from_seed_epoch_position_and_attempt() -> None:
    def drawn(seed: int = 5, epoch: int = 0, position: int = 7, index: int = 7, attempt: int = 1) -> Any:
        return Replacement(seed, 10**9).key(epoch, SampleKey(position, index), attempt)

    assert drawn() == drawn(index=8)  # not from the record that cannot be read
    assert drawn().position == 7
    others = [drawn(seed=6), drawn(epoch=1), drawn(position=8), drawn(attempt=2)]
    assert len({key.index for key in [drawn(), *others]}) == 5
    assert {Replacement(5, 3).key(0, SampleKey(place, 0), 1).index for place in range(50)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"max_skipped": -1}, "max_skipped is -1"),
        ({"max_skipped": True}, "max_skipped is True"),
    ],
)
def test_what_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SampleReader(WindowSampler(DistributedBatchSampler(48, 2, 8, 0, 1), 2), Holes(), **given)


# ---- in a graph, on ranks


def run(ranks: int, limit: int, **given: Any) -> Any:
    scene = Scene(dataset=Holes(), order="sequential", on_error="skip", max_skipped=limit, **given)

    def one(mesh: Any) -> Any:
        found, counts, states = [], [], []
        with scene.loader(mesh) as loader:
            for batch in loader:
                found += [int(token) for packed in batch for sequence in packed for token in sequence]
                if loader.last.ends_step:
                    report = loader.last.report
                    counts.append(None if report is None else report.skipped)
                    states.append(loader.state_dict())
        return found, counts, states

    return run_ranks({"dp": ranks}, one)


@pytest.mark.parametrize("given", [{}, {"depth": 0, "window": 1}, {"workers": 1}], ids=["ahead", "no thread", "worker"])
def test_the_same_records_and_counts_on_any_number_of_ranks(given: dict[str, Any]) -> None:
    tokens, counts, states = [], [], []
    for ranks in (1, 2, 4):
        results = run(ranks, 20, **given)
        tokens.append(sorted(token for found, _, _ in results for token in found))
        assert all(result[1:] == results[0][1:] for result in results)
        counts.append(results[0][1])
        states.append(results[0][2])
    assert tokens[0] == tokens[1] == tokens[2]
    assert not BAD & set(tokens[0])
    assert counts[0] == counts[1] == counts[2]
    assert sum(counts[0]) >= len(BAD) and len(counts[0]) == 3
    assert states[0] == states[1] == states[2]
    assert "skipped" in str(states[0][-1])


def test_peers_have_the_same_state() -> None:
    scene = Scene(dataset=Holes(), order="sequential", on_error="skip", max_skipped=20)

    def one(mesh: Any) -> list[Any]:
        with scene.loader(mesh) as loader:
            states = [loader.state_dict() for _ in loader]
            loader.set_epoch(1)
            states.append(loader.state_dict())
        # A peer that was built by hand knows no fingerprint; what is of the nodes is the same.
        return [LoaderState.from_text(*state.values()).nodes for state in states]

    results = run_ranks({"dp": 2, "tp": 2}, one)
    assert all(result == results[0] for result in results)
    assert "skipped" in str(results[0][-2]) and "skipped" not in str(results[0][-1])


@pytest.mark.parametrize("depth", [0, 1])
def test_too_many_over_all_ranks_is_one_error(depth: int) -> None:
    total = sum(run(1, 100)[0][1])
    assert sum(run(2, total, depth=depth)[0][1]) == total
    scene = Scene(dataset=Holes(), order="sequential", on_error="skip", max_skipped=total - 1, depth=depth)

    def one(mesh: Any) -> str:
        loader = scene.loader(mesh)
        with pytest.raises(DataPlaneError, match=f"{total} records of epoch 0 could not be read") as caught:
            list(loader)
        loader.close()
        return str(caught.value)

    texts = run_ranks({"dp": 2}, one)
    assert texts[0] == texts[1]
    assert f"max_skipped={total - 1}" in texts[0]


def test_the_count_survives_a_resume_and_ends_with_the_epoch() -> None:
    scene = Scene(dataset=Holes(), order="sequential", on_error="skip", max_skipped=20)

    def one(mesh: Any) -> list[Any]:
        with scene.loader(mesh) as loader:
            states = [loader.state_dict() for _ in loader]
        for position in range(0, len(states) - 1, 3):
            with replace(scene, depth=position % 2).loader(mesh) as loader:
                loader.load_state_dict(pickled(states[position]))
                again = [loader.state_dict() for _ in loader]
                assert again[-1] == states[-1]
                assert loader.last.report.skipped == 0 or position < len(states)
        return states

    first, second = run_ranks({"dp": 2}, one)
    assert first == second


def test_arrays_of_positions_stay_what_the_sampler_chose() -> None:
    scene = Scene(dataset=Holes(), order="shuffle", on_error="skip", max_skipped=20, split=False)
    plain = replace(scene, dataset=Documents(), on_error="raise")

    def positions(scene: Scene) -> Any:
        def one(mesh: Any) -> list[int]:
            with scene.loader(mesh) as loader:
                return [position for _ in loader for position in loader.last.positions]

        return np.sort(np.concatenate(run_ranks({"dp": 2}, one)))

    np.testing.assert_array_equal(positions(scene), positions(plain))
