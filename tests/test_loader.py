"""CONTRACT 2 and 9: epochs, positions and state, as the loops that people write meet them."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchdata.nodes import BaseNode, IterableWrapper, Loader, Prefetcher

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import (
    Collator,
    DistributedDataLoader,
    HostPrefetcher,
    MetadataDeriver,
    Packer,
    Planner,
    Router,
    SampleMetadata,
    SampleReader,
    StepCheckpointer,
    WindowSampler,
    WorkloadCost,
)
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import SingleRankTransport, run_ranks
from tests.scenes import Documents, Scene, pickled, rest


class Numbers:
    """Record i is i; counts its reads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads.append(index)
        return index


def numbers_loader(
    size: int, global_batch: int, mesh: Any, micro: int | None = None, dataset: Any = None, **config: Any
) -> DistributedDataLoader:
    """Whole records, delivered in the sampler's order."""
    ranks = mesh.size()
    micro = micro or global_batch // ranks
    sampler = DistributedBatchSampler(size, micro, global_batch, mesh.get_rank(), ranks)
    settings = DistributedDatasetConfig(seq_len=8, local_batch_size=micro, timeout_s=10.0, **config)
    return build_distributed_dataloader(
        dataset or Numbers(size),
        mesh,
        settings,
        batch_sampler=sampler,
        metadata_fn=lambda record: SampleMetadata(1),
        cost_model=lambda metadata: WorkloadCost(llm=1.0),
        collate_fn=list,
    )


def on_one_rank(fn: Any) -> Any:
    return run_ranks({"dp": 1}, fn)[0]


def test_the_second_resume() -> None:
    """CASES 19."""

    def run(mesh: Any) -> list[Any]:
        first = numbers_loader(20, 2, mesh)
        seen = [next(first) for _ in range(3)]
        second = numbers_loader(20, 2, mesh)
        second.load_state_dict(pickled(first.state_dict()))
        seen += [next(second) for _ in range(2)]
        third = numbers_loader(20, 2, mesh)
        third.load_state_dict(pickled(second.state_dict()))
        return [*seen, next(third)]

    assert on_one_rank(run)[-1] == [10, 11]


@pytest.mark.parametrize("set_epoch", [False, True])
def test_resume_at_and_after_the_end_of_an_epoch(set_epoch: bool) -> None:
    """CASES 20."""

    def run(mesh: Any) -> None:
        first = numbers_loader(4, 1, mesh)
        assert list(first) == [[0], [1], [2], [3]]
        second = numbers_loader(4, 1, mesh)
        second.load_state_dict(pickled(first.state_dict()))
        if set_epoch:
            second.set_epoch(1)
        assert next(iter(second)) == [0]
        third = numbers_loader(4, 1, mesh)
        third.load_state_dict(pickled(second.state_dict()))
        assert next(iter(third)) == [1]
        assert third.last is not None
        assert third.last.epoch == 1

    on_one_rank(run)


def test_load_after_state_dict() -> None:
    """CASES 21, which is what a distributed checkpoint's load does."""

    def run(mesh: Any) -> None:
        source = numbers_loader(20, 2, mesh)
        for _ in range(4):
            next(source)
        loader = numbers_loader(20, 2, mesh)
        loader.state_dict()
        loader.load_state_dict(source.state_dict())
        assert next(iter(loader)) == [8, 9]

    on_one_rank(run)


def test_prefetched_items_are_not_skipped() -> None:
    """CASES 22."""

    def run(mesh: Any) -> None:
        first = numbers_loader(40, 2, mesh, host_prefetch_depth=4)
        for _ in range(3):
            next(first)
        second = numbers_loader(40, 2, mesh, host_prefetch_depth=4)
        second.load_state_dict(pickled(first.state_dict()))
        assert next(second) == [6, 7]

    on_one_rank(run)


def test_items_that_look_empty_are_items() -> None:
    """CASES 22."""

    class Odd(Numbers):
        def __getitem__(self, index: int) -> Any:
            return [None, 0, {}, []][index]

    def run(mesh: Any) -> list[Any]:
        return list(numbers_loader(4, 1, mesh, dataset=Odd(4)))

    assert on_one_rank(run) == [[None], [0], [{}], [[]]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tail_that_fills_no_step_is_dropped_and_counted(ranks: int) -> None:
    """CASES 7."""

    def run(mesh: Any) -> tuple[list[int], int, int, Any]:
        loader = numbers_loader(10, 4, mesh)
        found = [record for batch in loader for record in batch]
        assert loader.last is not None
        return found, len(loader), len(found) // (4 // ranks), loader.last.report

    results = run_ranks({"dp": ranks}, run)
    assert sorted(record for found, *_ in results for record in found) == list(range(8))
    for _, length, delivered, report in results:
        assert length == delivered
        assert report.dropped == 2


def test_three_ranks_and_a_tail() -> None:
    """CASES 14."""

    def run(mesh: Any) -> tuple[list[Any], int]:
        loader = numbers_loader(10, 6, mesh)
        return list(loader), loader.last.report.dropped

    results = run_ranks({"dp": 3}, run)
    assert [(len(batches), dropped) for batches, dropped in results] == [(1, 4)] * 3
    assert sorted(record for batches, _ in results for batch in batches for record in batch) == list(range(6))


def test_restoring_reads_nothing_before_the_cursor() -> None:
    """CASES 23."""

    def run(mesh: Any) -> None:
        size = 2_000_000
        state = numbers_loader(size, 4, mesh, host_prefetch_depth=0).state_dict()
        parsed = json.loads(state["hp_nodes"])
        parsed["nodes"]["WindowSampler"]["consumed_samples"] = 1_000_000
        dataset = Numbers(size)
        loader = numbers_loader(size, 4, mesh, micro=2, dataset=dataset, host_prefetch_depth=0, balance_window_size=2)
        loader.load_state_dict({"hp_nodes": json.dumps(parsed)})
        assert sorted(next(loader) + next(loader)) == list(range(1_000_000, 1_000_004))
        assert sorted(dataset.reads) == list(range(1_000_000, 1_000_004))

    on_one_rank(run)


def test_another_number_of_ranks() -> None:
    """CASES 24."""

    def first_step(mesh: Any) -> tuple[list[int], Any]:
        loader = numbers_loader(12, 4, mesh)
        seen = next(loader)
        state = loader.state_dict()
        loader.close()
        return seen, state

    saved = run_ranks({"dp": 2}, first_step)
    assert saved[0][1] == saved[1][1]
    assert sorted(saved[0][0] + saved[1][0]) == [0, 1, 2, 3]
    for ranks in (4, 1):

        def go_on(mesh: Any) -> tuple[list[Any], Any]:
            loader = numbers_loader(12, 4, mesh)
            loader.load_state_dict(saved[0][1])
            return rest(loader), loader.state_dict()

        results = run_ranks({"dp": ranks}, go_on)
        for step, expected in ((1, [4, 5, 6, 7]), (2, [8, 9, 10, 11])):
            assert sorted(r for found, _ in results for _, s, _, data in found if s == step for r in data) == expected
        assert len({json.dumps(state) for _, state in results}) == 1


def test_one_record_four_times() -> None:
    """CASES 28."""

    def run(mesh: Any) -> list[Any]:
        sampler = DistributedBatchSampler(4, 2, 4, mesh.get_rank(), 2, index_mapping=[3, 3, 3, 3])
        loader = build_distributed_dataloader(
            Numbers(4),
            mesh,
            DistributedDatasetConfig(seq_len=8, local_batch_size=2),
            batch_sampler=sampler,
            metadata_fn=lambda record: SampleMetadata(record + 1, cost=WorkloadCost(llm=1)),
        )
        return [(batch, loader.last.positions) for batch in loader]

    results = run_ranks({"dp": 2}, run)
    assert [batch for found in results for batch, _ in found] == [(3, 3), (3, 3)]
    assert sorted(position for found in results for _, positions in found for position in positions) == [0, 1, 2, 3]


def test_loops_over_epochs() -> None:
    def run(mesh: Any) -> None:
        expected = [[[0], [1], [2]]] * 3
        loader = numbers_loader(3, 1, mesh)
        found = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            found.append(list(loader))
        assert found == expected
        again = numbers_loader(3, 1, mesh)
        epochs = []
        for _ in range(3):
            epochs.append([again.last.epoch for _ in again])
        assert epochs == [[0] * 3, [1] * 3, [2] * 3]

    on_one_rank(run)


def test_a_finished_epoch_stays_finished() -> None:
    """CONTRACT 9: set_epoch with it gives an empty rest, the next one starts that epoch."""

    def run(mesh: Any) -> None:
        first = numbers_loader(3, 1, mesh)
        list(first)
        state = pickled(first.state_dict())
        second = numbers_loader(3, 1, mesh)
        second.load_state_dict(state)
        second.set_epoch(0)
        assert list(second) == []
        assert second.state_dict() == state
        second.set_epoch(1)
        assert list(second) == [[0], [1], [2]]
        first.set_epoch(0)
        assert list(first) == []
        assert list(first) == [[0], [1], [2]]
        assert first.last.epoch == 1

    on_one_rank(run)


def test_iter_continues_an_unfinished_epoch_and_next_keeps_stopping() -> None:
    def run(mesh: Any) -> None:
        loader = numbers_loader(4, 1, mesh)
        assert next(iter(loader)) == [0]
        assert next(iter(loader)) == [1]
        loader.set_epoch(0)
        assert list(loader) == [[2], [3]]
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(loader)
        assert next(iter(loader)) == [0]
        assert loader.last.epoch == 1

    on_one_rank(run)


def test_load_in_the_middle_of_iterating() -> None:
    def run(mesh: Any) -> None:
        loader = numbers_loader(8, 1, mesh, host_prefetch_depth=2)
        state = loader.state_dict()
        running = iter(loader)
        assert [next(running) for _ in range(3)] == [[0], [1], [2]]
        loader.load_state_dict(state)
        assert next(running) == [0]

    on_one_rank(run)


def test_a_sampler_that_starts_in_the_middle() -> None:
    def run(mesh: Any) -> None:
        sampler = DistributedBatchSampler(8, 1, 2, 0, 1)
        sampler.load_state_dict({"epoch": 3, "consumed_samples": 4})
        loader = build_distributed_dataloader(
            Numbers(8),
            mesh,
            DistributedDatasetConfig(seq_len=8, local_batch_size=1),
            batch_sampler=sampler,
            metadata_fn=lambda record: SampleMetadata(1, cost=WorkloadCost(llm=1)),
            collate_fn=list,
        )
        assert list(loader) == [[4], [5], [6], [7]]
        assert loader.last.epoch == 3

    on_one_rank(run)


def test_a_state_of_other_data_is_refused_by_every_differing_field() -> None:
    def run(mesh: Any) -> None:
        state = numbers_loader(8, 2, mesh).state_dict()
        other = numbers_loader(12, 4, mesh, seed=5)
        with pytest.raises(ValueError, match="dataset_length: saved 8, now 12") as caught:
            other.load_state_dict(state)
        assert "global_batch_size: saved 2, now 4" in str(caught.value)
        assert "seed: saved 1234, now 5" in str(caught.value)
        for wrong in ({}, {"hp_nodes": "nonsense"}, {"hp_nodes": "{}"}, None, {"model": 1}):
            with pytest.raises(ValueError, match="state"):
                other.load_state_dict(wrong)
        assert next(other) == [0, 1, 2, 3]

    on_one_rank(run)


def test_an_entry_without_its_node_and_a_node_without_its_entry() -> None:
    def run(mesh: Any) -> None:
        loader = numbers_loader(8, 2, mesh)
        parsed = json.loads(loader.state_dict()["hp_nodes"])
        parsed["nodes"]["Filter"] = {"count": 3}
        with pytest.raises(ValueError, match=r"entries \['Filter'\]"):
            loader.load_state_dict({"hp_nodes": json.dumps(parsed)})
        del parsed["nodes"]["Filter"], parsed["nodes"]["WindowSampler"]
        with pytest.raises(ValueError, match="no entry for node 'WindowSampler'"):
            loader.load_state_dict({"hp_nodes": json.dumps(parsed)})

    on_one_rank(run)


def test_torch_save_and_distributed_checkpoint(tmp_path: Any) -> None:
    def run(mesh: Any) -> None:
        source = numbers_loader(20, 2, mesh)
        for _ in range(3):
            next(source)
        buffer = io.BytesIO()
        torch.save(source.state_dict(), buffer)
        buffer.seek(0)
        loader = numbers_loader(20, 2, mesh)
        loader.load_state_dict(torch.load(buffer, weights_only=True))
        assert next(loader) == [6, 7]

        dcp.save({"loader": source}, checkpoint_id=tmp_path, no_dist=True)
        loader = numbers_loader(20, 2, mesh)
        dcp.load({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)
        assert next(loader) == [6, 7]

    on_one_rank(run)


# ---- inside torchdata's own Loader


def alone(size: int = 8) -> BaseNode[Any]:
    transport = SingleRankTransport()
    node: Any = WindowSampler(DistributedBatchSampler(size, 2, 4, 0, 1), 2)
    node = SampleReader(node, Numbers(size))
    node = MetadataDeriver(node, lambda record: SampleMetadata(1, cost=WorkloadCost(llm=1)))
    node = Planner(node, transport, seq_len=8, local_batch_size=2)
    node = Packer(Router(node, transport), seq_len=8, local_batch_size=2)
    node = HostPrefetcher(Collator(node, local_batch_size=2), transport)
    return StepCheckpointer(node)


def test_torchdatas_loader_meets_no_stale_end_of_epoch() -> None:
    loader = Loader(alone())
    assert len(list(loader)) == 4
    state = pickled(loader.state_dict())
    resumed = Loader(alone())
    resumed.load_state_dict(state)
    epochs = [batch.epoch for batch in resumed]
    assert epochs == [1] * 4
    assert resumed.state_dict() != state


def test_torchdatas_loader_ignores_a_load_after_state_dict_once() -> None:
    """torchdata's own defect, named in README: our loader has none of it (test_load_after_state_dict)."""
    first = Loader(alone())
    it = iter(first)
    for _ in range(2):
        next(it)
    loader = Loader(alone())
    loader.state_dict()
    loader.load_state_dict(first.state_dict())
    assert next(iter(loader)).step == 0
    assert next(iter(loader)).step == 1


def test_threaded_torchdata_nodes_above_a_communicating_node_are_refused() -> None:
    with pytest.raises(ValueError, match="Prefetcher.*stands above.*loses items"):
        DistributedDataLoader(Prefetcher(alone(), 2))


def test_a_graph_that_gives_something_else() -> None:
    with pytest.raises(TypeError, match="accepted: MicroBatch"):
        next(DistributedDataLoader(IterableWrapper([1, 2])))


def test_len_is_exact_or_a_type_error() -> None:
    assert len(DistributedDataLoader(alone())) == 4
    with pytest.raises(TypeError, match="how many"):
        len(DistributedDataLoader(IterableWrapper([1, 2])))


def test_report_of_a_step_covers_its_windows() -> None:
    scene = Scene(dataset=Documents(32), window=1, micro=2, global_batch=16)

    def run(mesh: Any) -> None:
        with scene.loader(mesh) as loader:
            windows = []
            for _ in loader:
                report = loader.last.report
                if not loader.last.ends_step:
                    windows.append(report)
                else:
                    assert report.plan.costs_after.shape == (2, 4)
                    assert report.plan.after <= report.plan.before
                    assert report.plan.lower_bound <= report.plan.after + 1e-9
                    assert np.isclose(report.plan.costs_before.sum(), report.plan.costs_after.sum())
                    assert report.bytes_sent >= sum(window.bytes_sent for window in windows[-3:])

    run_ranks({"dp": 2}, run)
