"""The promises hold on any number of ranks, with windows that do not divide the step and ranks that differ a lot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import (
    Collator,
    DataPlaneError,
    DistributedDataLoader,
    HostPrefetcher,
    MetadataDeriver,
    Packer,
    Planner,
    Router,
    SampleReader,
    Splitter,
    StepCheckpointer,
    WindowSampler,
)
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.scenes import Documents, Scene, content, count_tokens


@dataclass
class Seen:
    """What one rank was given: of each step its micro-batches' positions and tokens; and the state at the end."""

    positions: dict[int, list[int]] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    micro_batches: int = 0
    state: Any = None


def walk(mesh: Any, scene: Scene, state: Any = None, micro_batches: int | None = None) -> Seen:
    seen = Seen()
    with scene.loader(mesh) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for data in loader:
            seen.positions.setdefault(loader.last.step, []).extend(loader.last.positions)
            for document in (document for packed in content(data) for document in packed):
                seen.tokens.update(document)
            seen.micro_batches += 1
            if seen.micro_batches == micro_batches:
                break
        seen.state = loader.state_dict()
    return seen


@pytest.mark.parametrize(
    ("ranks", "micro", "rounds", "window"),
    [(3, 2, 5, 2), (5, 1, 3, 2), (7, 1, 2, 4), (7, 3, 3, 2), (12, 1, 5, 3), (100, 1, 2, 1)],
)
def test_every_step_is_exactly_its_samples(ranks: int, micro: int, rounds: int, window: int) -> None:
    """Two steps and a rest that fills none; records stay whole or are cut in two."""
    step = ranks * micro * rounds
    scene = Scene(dataset=Documents(2 * step + 3), micro=micro, global_batch=step, window=window, split=ranks < 100)
    if ranks == 100:  # whole records, whose bins are their samples
        scene = replace(scene, collate_fn=lambda bins: [[sample["input_ids"] for sample in one] for one in bins])
    seen = run_ranks({"dp": ranks}, lambda mesh: walk(mesh, scene))
    assert {rank.micro_batches for rank in seen} == {2 * rounds}
    assert len({str(rank.state) for rank in seen}) == 1
    for number in range(2):
        places = {position for rank in seen for position in rank.positions[number]}
        assert places == set(range(number * step, (number + 1) * step))
    sampler = DistributedBatchSampler(len(scene.dataset), 1, step, 0, 1, order="shuffle", seed=7)
    chosen = sampler.indices(np.arange(2 * step))
    expected = Counter({index: int(scene.dataset.lengths[index]) for index in chosen})
    assert sum((rank.tokens for rank in seen), Counter()) == expected


def test_a_step_is_the_same_on_any_number_of_ranks_and_resumes_on_any_other() -> None:
    layouts = [(3, 2, 3), (12, 1, 2), (5, 3, 3), (1, 4, 7), (60, 1, 4)]  # ranks, micro-batch, window
    dataset, step = Documents(60 * len(layouts)), 60
    state, tokens = None, Counter[int]()
    for number, (ranks, micro, window) in enumerate(layouts):
        scene = Scene(dataset=dataset, micro=micro, global_batch=step, window=window)
        rounds = step // (ranks * micro)

        def of_rank(mesh: Any, scene: Scene = scene, state: Any = state, rounds: int = rounds) -> Seen:
            return walk(mesh, scene, state, rounds)

        seen = run_ranks({"dp": ranks}, of_rank)
        assert {tuple(rank.positions) for rank in seen} == {(number,)}
        places = {position for rank in seen for position in rank.positions[number]}
        assert places == set(range(number * step, (number + 1) * step))
        assert len({str(rank.state) for rank in seen}) == 1
        state = seen[0].state
        tokens += sum((rank.tokens for rank in seen), Counter())
    assert tokens == Counter(dict(enumerate(dataset.lengths.tolist())))


class Lopsided:
    """Records of one document each, but for one of 10,000 documents of a token."""

    def __init__(self, size: int, crowded: int) -> None:
        self.size = size
        self.crowded = crowded

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> list[np.ndarray]:
        if index == self.crowded:
            return [np.full(1, index)] * 10_000
        return [np.full(100 + 2_000 * (index % 5), index)]


@pytest.mark.parametrize("broadcast_plan", [True, False])
def test_one_rank_brings_ten_thousand_samples_where_others_bring_one(broadcast_plan: bool) -> None:
    dataset, ranks, length = Lopsided(20, crowded=7), 5, 12_000

    def of_rank(mesh: Any) -> list[tuple[int, int, tuple[int, ...], bool]]:
        topology = DataTopology.from_mesh(mesh)
        data = create_transport(topology, timeout_s=30)
        sampler = DistributedBatchSampler(len(dataset), 1, ranks, topology.data_rank, ranks)
        node: Any = Splitter(SampleReader(WindowSampler(sampler), dataset), lambda record: record)
        node = MetadataDeriver(node, count_tokens, cost_model=CausalAttentionCostModel())
        node = Planner(node, data, seq_len=length, local_batch_size=1, broadcast_plan=broadcast_plan)
        node = Packer(Router(node, data), seq_len=length, local_batch_size=1)
        node = HostPrefetcher(Collator(node, local_batch_size=1), data, 1)
        found = []
        with DistributedDataLoader(StepCheckpointer(node), topology=topology, transports=[data]) as loader:
            for bins in loader:
                whole = [index for document in bins[0] for index in document.tolist()]
                found.append((loader.last.step, len(whole), tuple(whole), loader.last.report.plan.accepted))
        return found

    by_rank = run_ranks({"dp": ranks}, of_rank)
    for step in range(4):
        tokens = Counter(index for rank in by_rank for index in rank[step][2])
        indices = range(step * ranks, (step + 1) * ranks)
        assert tokens == {index: sum(len(document) for document in dataset[index]) for index in indices}
        assert all(rank[step][1] <= length for rank in by_rank)


class Broken(Documents):
    """One record cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 90:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


@pytest.mark.parametrize("ranks", [7, 12, 50])
def test_one_error_on_many_ranks(ranks: int) -> None:
    scene = Scene(dataset=Broken(6 * 3 * ranks), micro=1, global_batch=3 * ranks, window=2, order="sequential")
    failures: dict[int, tuple[int, str]] = {}

    def of_rank(mesh: Any) -> None:
        loader, delivered = scene.loader(mesh), 0
        try:
            for _ in loader:
                delivered += 1
        except DataPlaneError as failure:
            failures[mesh.get_rank()] = delivered, str(failure)
        loader.close()

    run_ranks({"dp": ranks}, of_rank)
    assert sorted(failures) == list(range(ranks))
    assert len(set(failures.values())) == 1
    assert "OSError: the disk is gone" in failures[0][1]
    assert f"rank {90 % ranks}" in failures[0][1]
    assert "index 90" in failures[0][1]


class Unreadable(Documents):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise OSError("the disk is gone")


def test_an_error_of_many_ranks_names_some_of_them_and_says_how_many_there_are() -> None:
    scene = Scene(dataset=Unreadable(40), micro=1, global_batch=40, window=1)
    with pytest.raises(DataPlaneError, match=r"ranks \[1, 2, .*, 16 and 23 more\] failed at the same point"):
        run_ranks({"dp": 40}, lambda mesh: walk(mesh, scene))


@pytest.mark.parametrize("ranks", [7, 12])
def test_all_ranks_leave_in_the_middle_of_a_step_and_come_back_to_its_beginning(ranks: int) -> None:
    scene = Scene(dataset=Documents(10 * ranks), micro=1, global_batch=5 * ranks, window=2, depth=2)
    left = run_ranks({"dp": ranks}, lambda mesh: walk(mesh, scene, micro_batches=8))
    state = left[0].state
    assert len({str(rank.state) for rank in left}) == 1
    rest = run_ranks({"dp": ranks}, lambda mesh: walk(mesh, scene, state))
    assert {tuple(rank.positions) for rank in rest} == {(1,)}
    places = {position for rank in rest for position in rank.positions[1]}
    assert places == set(range(5 * ranks, 10 * ranks))


def test_one_of_many_ranks_is_configured_differently() -> None:
    dataset = Documents(40)

    def of_rank(mesh: Any) -> None:
        config = DistributedDatasetConfig(seq_len=64, local_batch_size=1, seed=1 if mesh.get_rank() == 5 else 0)
        sampler = DistributedBatchSampler(len(dataset), 1, 40, mesh.get_rank(), 40)
        build_distributed_dataloader(dataset, mesh, config, batch_sampler=sampler, metadata_fn=count_tokens)

    with pytest.raises(
        ValueError, match=r"config.seed differs: 0 on ranks \[0, 1, .* 16 and 23 more\], 1 on ranks \[5\]"
    ):
        run_ranks({"dp": 40}, of_rank)
