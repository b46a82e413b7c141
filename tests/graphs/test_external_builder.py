"""CONTRACT 10 through the builder: groups, the gate, what a loader of external steps can and cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DataPlaneError, DistributedDataLoader
from hp_nodes.transport import run_ranks
from tests.graphs.external_scene import rounds, samples_of, weigh
from tests.scenes import pickled


def build(mesh: Any, steps: Any, **settings: Any) -> DistributedDataLoader:
    config = DistributedDatasetConfig(**{"seq_len": 64, "local_batch_size": 2, "timeout_s": 10.0, **settings})
    return build_distributed_dataloader(None, mesh, config, external_step_source=steps, metadata_fn=weigh)


def heavy_and_light(rank: int) -> list[Any]:
    """Costs 9 on ranks 0 and 2 and 1 elsewhere in step 0; in step 1 all are equal."""
    return rounds(rank, [9 if rank in (0, 2) else 1, 1])


@pytest.mark.parametrize("size", [2, 4, 1])
def test_samples_move_within_groups_of_consecutive_ranks(size: int) -> None:
    def run(mesh: Any) -> list[Any]:
        with build(mesh, heavy_and_light(mesh.get_rank()), balance_group_size=size) as loader:
            return [(samples_of(batch), loader.last.report) for batch in loader]

    results = run_ranks({"dp": 4}, run)
    for rank, ((step_0, report_0), (step_1, report_1)) in enumerate(results):
        group = range(rank // size * size, rank // size * size + size)
        assert {brought_by for brought_by, _, _ in step_0} <= set(group)
        assert sum(cost for *_, cost in step_0) == (10 if size > 1 else (18 if rank in (0, 2) else 2))
        assert step_1 == samples_of(heavy_and_light(rank)[1])
        assert report_1.samples_sent == report_1.samples_received == 0
        assert len(report_0.plan.costs_after) == size  # a report is the group's
    for first in range(0, 4, size):
        held = sorted(sample for steps in results[first : first + size] for sample in steps[0][0])
        assert held == sorted(s for rank in range(first, first + size) for s in samples_of(heavy_and_light(rank)[0]))


@pytest.mark.parametrize("gain", [0.4, 0.5])
def test_samples_move_only_when_the_gain_is_enough(gain: float) -> None:
    """18 to 10 is a gain of 0.444."""

    def run(mesh: Any) -> list[Any]:
        steps = heavy_and_light(mesh.get_rank())[:1]
        with build(mesh, steps, balance_group_size=2, min_balance_gain=gain) as loader:
            return [samples_of(batch) == samples_of(steps[0]) for batch in loader]

    assert run_ranks({"dp": 4}, run) == [[gain > 0.444]] * 4


class TwoRounds:
    """A step is two rounds; it can say where it stands."""

    rounds_per_step = 2

    def __init__(self, rank: int) -> None:
        self.rank, self.place = rank, 0

    def __iter__(self) -> Iterator[Any]:
        for item in rounds(self.rank, [1 + self.rank, 9, 1, 5 - self.rank, 2, 2, 7])[self.place :]:
            self.place += 1
            yield item
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("size", [1, 2])
def test_steps_of_several_rounds_resume_at_their_beginning_on_as_many_ranks(size: int) -> None:
    def run(mesh: Any) -> Any:
        with build(mesh, TwoRounds(mesh.get_rank()), balance_group_size=size) as loader:
            found, states = [], [pickled(loader.state_dict())]
            for batch in loader:
                found.append((loader.last.step, loader.last.round, samples_of(batch)))
                states.append(pickled(loader.state_dict()))
            assert loader.last.report.dropped == 4  # the last round, two bins on each of two ranks
        assert [place for *place, _ in found] == [[step, number] for step in range(3) for number in range(2)]
        for place, state in enumerate(states[:-1]):
            with build(mesh, TwoRounds(mesh.get_rank()), balance_group_size=size) as again:
                again.load_state_dict(state)
                rest = [(again.last.step, again.last.round, samples_of(batch)) for batch in again]
                assert rest == found[place // 2 * 2 :]
        return states[2]

    state = run_ranks({"dp": 2}, run)[0]
    with pytest.raises(ValueError, match="data_parallel_size: saved 2, now 1|2 data ranks"):
        run_ranks({"dp": 1}, lambda mesh: build(mesh, TwoRounds(0)).load_state_dict(state))


class Failing(TwoRounds):
    """Fails instead of its round ``at``, on ranks ``where``."""

    def __init__(self, rank: int, at: int, where: tuple[int, ...], rounds_per_step: int) -> None:
        super().__init__(rank)
        self.at, self.where, self.rounds_per_step = at, where, rounds_per_step

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(super().__iter__()):
            if number == self.at and self.rank in self.where:
                raise OSError("stream lost")
            yield item


@pytest.mark.parametrize("where", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("rounds_per_step", [1, 2, 3])
def test_a_source_that_fails_within_a_step_is_an_error_and_no_end(rounds_per_step: int, where: tuple[int, ...]) -> None:
    """At its place, behind all that came before it."""

    def run(mesh: Any, at: int) -> tuple[int, str, bool]:
        count = 0
        loader = build(mesh, Failing(mesh.get_rank(), at, where, rounds_per_step))
        with loader, pytest.raises(DataPlaneError) as caught:  # noqa: PT012  where it comes is what matters
            for _ in loader:
                count += 1
        ended = loader.last is not None and loader.last.ends_epoch
        return count, str(caught.value).split("\n")[0], ended

    for at in range(6):
        results = run_ranks({"dp": 2}, lambda mesh, at=at: run(mesh, at))
        assert len(set(results)) == 1
        count, text, ended = results[0]
        assert (count, ended) == (at, False)
        assert text.startswith(
            f"[rank {where[0]}, node StepSource, epoch 0, step {at // rounds_per_step}] OSError: stream lost"
        )


class Ending(TwoRounds):
    """Ends after so many rounds: at its end, with an error, or with something that is no round."""

    def __init__(self, rank: int, count: int, how: str, rounds_per_step: int) -> None:
        super().__init__(rank)
        self.count, self.how, self.rounds_per_step = count, how, rounds_per_step

    def __iter__(self) -> Iterator[Any]:
        yield from rounds(self.rank, [1 + number * (1 + self.rank) % 5 for number in range(self.count)])
        if self.how == "error":
            raise OSError("stream lost")
        if self.how == "no round":
            yield [[(0, 0, 1)]]


endings = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from(["end", "end", "error", "no round"])), min_size=1, max_size=3
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(endings, st.integers(1, 3), st.integers(0, 2), st.booleans())
def test_however_sources_end_all_ranks_end_alike(ends: Any, rounds_per_step: int, depth: int, apart: bool) -> None:
    """An end of the epoch only where every rank has as many whole steps and no rank failed; else one error for all."""

    def run(mesh: Any) -> tuple[int, str]:
        count, how = ends[mesh.get_rank()]
        source = Ending(mesh.get_rank(), count, how, rounds_per_step)
        size = 1 if apart else len(ends)
        delivered = 0
        try:
            with build(mesh, source, balance_group_size=size, host_prefetch_depth=depth) as loader:
                for _ in loader:
                    delivered += 1
        except DataPlaneError as error:
            return delivered, str(error).split("\n")[0]
        return delivered, "the end"

    results = run_ranks({"dp": len(ends)}, run)
    assert len(set(results)) == 1
    delivered, text = results[0]
    whole = [count - count % rounds_per_step for count, _ in ends]
    assert delivered <= min(count for count, _ in ends)
    if any(how != "end" for _, how in ends):
        assert text != "the end"
    elif len(set(whole)) > 1 or whole[0] == 0:
        assert delivered == min(whole) and "rounds" in text
    else:
        assert (delivered, text) == (whole[0], "the end")


def test_what_a_loader_of_external_steps_does_not_know_it_says() -> None:
    def run(mesh: Any) -> None:
        with build(mesh, heavy_and_light(mesh.get_rank()), dataset_already_sharded=True) as loader:
            with pytest.raises(TypeError, match="how many micro-batches"):
                len(loader)
            with pytest.raises(ValueError, match="the step source, a list, cannot say where it stands.*accepted"):
                loader.state_dict()
            assert len(list(loader)) == len(list(loader)) == 2  # a list can be gone through once more

    run_ranks({"dp": 2}, run)


@pytest.mark.parametrize("size", [None, 2])
def test_another_number_of_bins_is_named_on_every_rank_of_every_group(size: int | None) -> None:
    """CASES 6."""

    def run(mesh: Any) -> str:
        rank = mesh.get_rank()
        steps = rounds(rank, [1], 2 if rank == 1 else 3)
        with build(mesh, steps, local_batch_size=3, balance_group_size=size) as loader:
            with pytest.raises(DataPlaneError) as caught:
                list(loader)
            return str(caught.value)

    texts = run_ranks({"dp": 4}, run)
    assert len(set(texts)) == 1
    assert "rank 1 yielded 2 bins, 3 are needed" in texts[0]
