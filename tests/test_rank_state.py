"""State that is a rank's own: one leaf a data rank, resumed on as many, or dealt anew by a node that can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torchdata.nodes import BaseNode

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DistributedDataLoader, SampleMetadata, WorkloadCost
from hp_nodes.state import LoaderState
from hp_nodes.transport import run_ranks
from tests.scenes import Scene, pickled


class Counter(BaseNode[Any]):
    """A user's node that counts the micro-batches of its own rank."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__()
        self.source, self.count = source, 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(None if initial_state is None else initial_state["source"])
        self.count = 0 if initial_state is None else initial_state["count"]

    def next(self) -> Any:
        item = next(self.source)
        self.count += 1
        return item

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "count": self.count}


class Shared(Counter):
    """The same, dealt anew among another number of ranks."""

    def reshard(self, states: Sequence[Any], rank: int, size: int) -> dict[str, Any]:
        total = sum(state["count"] for state in states)
        return {**states[0], "count": total // size + (rank < total % size)}


class Everywhere(Counter):
    state_scope = "global"


def counting(mesh: Any, kind: type[Counter]) -> DistributedDataLoader:
    return Scene(insert={"Collator": kind}).loader(mesh)


def saved_by(kind: type[Counter], ranks: int) -> dict[str, Any]:
    def run(mesh: Any) -> Any:
        with counting(mesh, kind) as loader:
            while not (next(loader) and loader.last.ends_step):
                pass
            return loader.state_dict()

    leaves = run_ranks({"dp": ranks}, run)
    return {key: text for state in leaves for key, text in state.items()}


def counts_after(state: dict[str, Any], kind: type[Counter], ranks: int, whole: bool = True) -> list[int]:
    def run(mesh: Any) -> int:
        with counting(mesh, kind) as loader:
            own = {key: text for key, text in state.items() if whole or key in loader.state_dict()}
            loader.load_state_dict(own)
            parsed = LoaderState.from_text(next(iter(loader.state_dict().values())))
            assert len(list(loader)) == 2 * 16 // (2 * ranks)
            return int(parsed.nodes[kind.__name__]["count"])

    return run_ranks({"dp": ranks}, run)


def test_state_of_a_ranks_own_has_one_leaf_a_rank_and_resumes_on_as_many() -> None:
    state = saved_by(Counter, 2)
    assert sorted(state) == ["hp_nodes_rank_0", "hp_nodes_rank_1"]
    assert counts_after(state, Counter, 2) == [4, 4]
    assert counts_after(state, Counter, 2, whole=False) == [4, 4]
    with pytest.raises(ValueError, match="node 'Counter' keeps state of its own rank.* from 2 data ranks, not 4"):
        counts_after(state, Counter, 4)
    with pytest.raises(
        ValueError, match="data_parallel_size: saved 2, now 1; node 'Counter' keeps state of its own rank"
    ):
        counts_after({"hp_nodes_rank_0": state["hp_nodes_rank_0"]}, Counter, 1)


def test_the_state_of_another_rank_is_refused_and_the_node_named() -> None:
    state = saved_by(Counter, 2)

    def run(mesh: Any) -> str:
        other = f"hp_nodes_rank_{1 - mesh.get_rank()}"
        with counting(mesh, Counter) as loader, pytest.raises(ValueError, match="own rank") as caught:
            loader.load_state_dict({other: state[other]})
        return str(caught.value)

    assert run_ranks({"dp": 2}, run)[1] == (
        "the state has ['hp_nodes_rank_0'], but node 'Counter' keeps state of its own rank; accepted: a dict with the "
        "key 'hp_nodes_rank_1'"
    )

    def without(mesh: Any) -> str:
        with Scene().loader(mesh) as loader, pytest.raises(ValueError, match="no node here keeps") as caught:
            loader.load_state_dict(state)
        return str(caught.value)

    for text in run_ranks({"dp": 2}, without):
        assert "the state has ['hp_nodes_rank_0', 'hp_nodes_rank_1'], each a rank's own" in text
        assert "data_parallel_size: saved 2, now nothing" in text


@pytest.mark.parametrize(
    ("saved", "wanted", "counts"), [(2, 4, [2, 2, 2, 2]), (2, 1, [8]), (4, 2, [4, 4]), (1, 2, [4, 4])]
)
def test_reshard_deals_it_among_another_number(saved: int, wanted: int, counts: list[int]) -> None:
    state = saved_by(Shared, saved)
    assert len(state) == saved
    assert counts_after(state, Shared, wanted) == counts


def test_a_node_may_say_that_its_state_is_the_same_on_all_ranks() -> None:
    state = saved_by(Everywhere, 2)
    assert sorted(state) == ["hp_nodes"]
    assert counts_after(state, Everywhere, 4) == [4] * 4


class Rounds:
    """A source of external steps that says where it stands."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[list[list[int]]]:
        while self.at < 10:
            first = (2 * self.at + self.rank) * 2
            self.at += 1
            yield [[first], [first + 1]]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("depth", [0, 2])
def test_external_steps_resume_at_every_position_on_as_many_ranks(depth: int) -> None:
    def run(mesh: Any) -> None:
        def fresh() -> DistributedDataLoader:
            return build_distributed_dataloader(
                None,
                mesh,
                DistributedDatasetConfig(seq_len=8, local_batch_size=2, host_prefetch_depth=depth, timeout_s=20.0),
                external_step_source=Rounds(mesh.get_rank()),
                metadata_fn=lambda record: SampleMetadata(1 + record % 3),
                cost_model=lambda metadata: WorkloadCost(llm=float(metadata.pack_tokens)),
            )

        with fresh() as loader:
            states = [pickled(loader.state_dict())]
            whole = []
            for batch in loader:
                whole.append(batch)
                states.append(pickled(loader.state_dict()))
        assert len(whole) == 10
        for position, state in enumerate(states[:-1]):
            with fresh() as loader:
                loader.load_state_dict(state)
                assert list(loader) == whole[position:], position

    run_ranks({"dp": 2}, run)


class TwoRounds(Rounds):
    """The same rounds, of which two are a step."""

    rounds_per_step = 2


def test_steps_that_are_cut_otherwise_are_refused_within_an_epoch() -> None:
    """Not even ``strict=False`` accepts them: a source counts rounds, which may hold other records then."""

    def run(mesh: Any) -> None:
        def loader(source: Rounds) -> DistributedDataLoader:
            return build_distributed_dataloader(
                None,
                mesh,
                DistributedDatasetConfig(seq_len=8, local_batch_size=2, timeout_s=20.0),
                external_step_source=source,
                metadata_fn=lambda record: SampleMetadata(1, WorkloadCost(llm=1.0)),
            )

        with loader(Rounds(mesh.get_rank())) as saved:
            next(saved)
            state = saved.state_dict()
        for strict in (True, False):
            with (
                loader(TwoRounds(mesh.get_rank())) as other,
                pytest.raises(ValueError, match="rounds_per_step: saved 1, now 2") as caught,
            ):
                other.load_state_dict(state, strict=strict)
            assert "strict=False" not in str(caught.value)

    run_ranks({"dp": 2}, run)
