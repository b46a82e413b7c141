"""CONTRACT 2: construction: one agreement, the same answer on every rank, nothing read or left behind before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DataPlaneError, DistributedDataLoader, SampleMetadata, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks

SIZE = 12
MESH = {"dp": 2, "tp": 2}
CONSTRUCTORS = (0, 2)


class Counting:
    """Record i is i; counts its reads over all virtual ranks."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def one_token(record: Any) -> SampleMetadata:
    return SampleMetadata(1, cost=WorkloadCost(llm=1.0))


def sampler_for(mesh: Any, **changes: Any) -> DistributedBatchSampler:
    settings = {"total_samples": SIZE, "micro_batch_size": 2, "global_batch_size": 4, "order": "shuffle", **changes}
    rank = settings.pop("dp_rank", mesh.get_local_rank("dp"))
    return DistributedBatchSampler(
        settings.pop("total_samples"),
        settings.pop("micro_batch_size"),
        settings.pop("global_batch_size"),
        rank,
        settings.pop("dp_world_size", mesh.size("dp")),
        **settings,
    )


def build(mesh: Any, dataset: Any, **changes: Any) -> DistributedDataLoader:
    """A loader, with some arguments changed; ``config_...`` goes to the configuration."""
    config = {"seq_len": 8, "local_batch_size": 2, "timeout_s": 10.0}
    config |= {name[7:]: value for name, value in changes.items() if name.startswith("config_")}
    given = {"batch_sampler": sampler_for(mesh), "metadata_fn": one_token, "collate_fn": list}
    given |= {name: value for name, value in changes.items() if not name.startswith("config_")}
    settings = DistributedDatasetConfig(**config)  # type: ignore[arg-type]
    return build_distributed_dataloader(dataset, mesh, settings, **given)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no sampler": ({"batch_sampler": None}, "nothing defines a step; accepted: batch_sampler with metadata_fn"),
    "no metadata_fn": ({"metadata_fn": None}, "metadata_fn is missing; accepted"),
    "two kinds of metadata": ({"metadata": [1] * SIZE}, "both metadata and metadata_fn.*accepted"),
    "metadata of the other mode": (
        {"metadata": [1] * SIZE, "metadata_fn": None},
        "metadata.*metadata_mode=False; accepted",
    ),
    "metadata_mode without metadata": (
        {"config_metadata_mode": True, "metadata_fn": None},
        "metadata_mode=True without metadata; accepted",
    ),
    "metadata_mode with metadata_fn": ({"config_metadata_mode": True}, "metadata.*accepted"),
    "metadata without getitem": (
        {"config_metadata_mode": True, "metadata_fn": None, "metadata": iter(())},
        "metadata is a .*; accepted: .*__getitem__",
    ),
    "metadata of another length": (
        {"config_metadata_mode": True, "metadata_fn": None, "metadata": [one_token(0)] * 5},
        "metadata has 5 entries, the dataset 12 records; accepted: equally many",
    ),
    "split without pack": ({"split_fn": list}, "split_fn without pack_fn; accepted"),
    "pack without split": ({"pack_fn": max}, "pack_fn without split_fn; accepted"),
    "split with metadata_mode": (
        {
            "config_metadata_mode": True,
            "metadata_fn": None,
            "metadata": [one_token(0)] * SIZE,
            "split_fn": list,
            "pack_fn": max,
        },
        "split_fn.*metadata_mode.*accepted",
    ),
    "repack with own split": (
        {"config_repack_sequences": True, "split_fn": list, "pack_fn": max},
        "repack_sequences has its own split and pack; accepted",
    ),
    "group size": ({"config_balance_group_size": 2}, "balance_group_size.*external.*accepted"),
    "algorithm and objective": (
        {"balancing_algorithm": object(), "config_objective": "makespan"},
        "balancing_algorithm has its own objective, but objective='makespan' .*; accepted with it: 'lockstep'",
    ),
    "no algorithm": (
        {"balancing_algorithm": object()},
        "balancing_algorithm is a object without assign and objective; accepted: an object with assign",
    ),
    "no callable": ({"metadata_fn": 3}, "metadata_fn is 3; accepted: a callable"),
    "no callable collate": ({"collate_fn": "list"}, "collate_fn is 'list'; accepted: a callable"),
    "readers": (
        {"config_dataset_reader_ranks": (0, 1)},
        r"dataset_reader_ranks is \(0, 1\); accepted: .*\(0, 2\)",
    ),
    "planner": ({"config_planner_rank": 1}, r"planner_rank is 1; accepted: .*\(0, 2\)"),
    "sharded": ({"config_dataset_already_sharded": True}, "dataset_already_sharded is True; accepted.*False"),
    "model config": ({"model_config": {"hidden_size": 0}}, "model_config field .*; accepted: an int >= 1"),
    "kwargs of the graph": (
        {"dataloader_kwargs": {"shuffle": True, "batch_size": 3}},
        r"dataloader_kwargs \['batch_size', 'shuffle'\] belong to the graph; accepted: .*num_workers",
    ),
    "unknown kwargs": ({"dataloader_kwargs": {"workers": 2}}, r"dataloader_kwargs \['workers'\] are unknown; accepted"),
    "workers": ({"dataloader_kwargs": {"num_workers": -1}}, "num_workers is -1; accepted: an int >= 0"),
    "bool workers": ({"dataloader_kwargs": {"num_workers": True}}, "num_workers is True; accepted: an int >= 0"),
    "timeout without workers": ({"dataloader_kwargs": {"timeout": 3}}, "timeout=3 needs workers; accepted"),
    "prefetch without workers": ({"dataloader_kwargs": {"prefetch_factor": 2}}, "prefetch_factor=2 needs workers"),
    "persistence without workers": (
        {"dataloader_kwargs": {"persistent_workers": True}},
        "persistent_workers=True needs workers",
    ),
    "context without workers": (
        {"dataloader_kwargs": {"multiprocessing_context": "fork"}},
        "multiprocessing_context='fork' needs workers",
    ),
    "unknown context": (
        {"dataloader_kwargs": {"num_workers": 1, "multiprocessing_context": "thread"}},
        "multiprocessing_context is 'thread'; accepted: None, .*'spawn'",
    ),
    "device of pinning": (
        {"dataloader_kwargs": {"pin_memory": True, "pin_memory_device": 0}},
        "pin_memory_device is 0; accepted: a str",
    ),
    "function of workers": (
        {"dataloader_kwargs": {"num_workers": 1, "worker_init_fn": 3}},
        "worker_init_fn is 3; accepted: a callable",
    ),
    "negative timeout": (
        {"dataloader_kwargs": {"num_workers": 1, "timeout": -1}},
        "timeout is -1; accepted: a finite number >= 0",
    ),
    "endless timeout": (
        {"dataloader_kwargs": {"num_workers": 1, "timeout": float("inf")}},
        "timeout is inf; accepted: a finite number >= 0",
    ),
}

SAMPLERS: dict[str, tuple[dict[str, Any], str]] = {
    "micro-batch": ({"micro_batch_size": 1}, "micro_batch_size is 1; accepted: 2"),
    "world": ({"dp_rank": 0, "dp_world_size": 1}, "dp_world_size is 1; accepted: 2"),
    "rank": ({"dp_rank": 0}, "dp_rank is 0; accepted: 1"),
    "no step": ({"total_samples": 3}, "an epoch has no step: 3 samples"),
}


def meet(mesh: Any) -> None:
    transport = create_transport(DataTopology.from_mesh(mesh), "all", timeout_s=5.0)
    transport.all_gather(np.zeros(1, np.uint8), "the test")


def refused_everywhere(attempt: Callable[[Any, Any], Any], shape: dict[str, int], pattern: str) -> str:
    """``attempt(mesh, dataset)`` is refused with one text on all ranks, reads nothing, and leaves room for another."""
    dataset = Counting()

    def run(mesh: Any) -> str:
        with pytest.raises(ValueError, match=f"(?s){pattern}") as caught:
            attempt(mesh, dataset)
        assert dataset.reads == 0
        assert not [thread.name for thread in threading.enumerate() if "Prefetcher" in thread.name]
        meet(mesh)  # so that nobody goes on before all have looked
        good = Counting()
        with build(mesh, good if mesh.get_rank() in CONSTRUCTORS else None) as loader:
            assert len(list(loader)) == len(loader) == SIZE // 4
        assert (good.reads > 0) == (mesh.get_rank() in CONSTRUCTORS)
        return str(caught.value)

    before = time.monotonic()
    texts = run_ranks(shape, run)
    assert time.monotonic() - before < 5
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """CASES 18, and sections 1 and 2 of the contract."""
    changes, pattern = REFUSED[name]
    refused_everywhere(lambda mesh, dataset: build(mesh, dataset, **changes), MESH, pattern)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_does_not_fit(name: str) -> None:
    changes, pattern = SAMPLERS[name]
    refused_everywhere(
        lambda mesh, dataset: build(mesh, dataset, batch_sampler=sampler_for(mesh, **changes)), MESH, pattern
    )


def test_an_object_that_is_no_sampler() -> None:
    refused_everywhere(
        lambda mesh, dataset: build(mesh, dataset, batch_sampler=[[0, 1]]), MESH, "batch sampler list does not fit"
    )


def test_a_dataset_that_is_no_dataset() -> None:
    text = refused_everywhere(
        lambda mesh, dataset: build(mesh, iter(()) if mesh.get_rank() == 2 else dataset), MESH, "dataset is a"
    )
    assert "rank 2" in text
    assert "accepted: map-style" in text


def test_the_error_of_one_rank_names_it_on_all() -> None:
    text = refused_everywhere(
        lambda mesh, dataset: build(
            mesh, dataset, dataloader_kwargs={"num_workers": -2} if mesh.get_rank() == 2 else None
        ),
        MESH,
        "num_workers is -2",
    )
    assert text.startswith("rank 2: ")


def test_a_user_object_that_raises_is_an_error_not_a_wait() -> None:
    class Sizeless(Counting):
        def __len__(self) -> int:
            raise OSError("no index file")

    text = refused_everywhere(
        lambda mesh, dataset: build(mesh, Sizeless() if mesh.get_rank() == 2 else dataset), MESH, "no index file"
    )
    assert "rank 2" in text


# ---- what ranks must share

DIFFERENT: dict[str, tuple[Callable[[Any], dict[str, Any]], list[str]]] = {
    "configuration": (
        lambda mesh: {"config_balance_window_size": 1 + mesh.get_local_rank("dp")},
        ["config.balance_window_size", "1 on ranks [0, 1]", "2 on ranks [2, 3]"],
    ),
    "configuration of a peer": (
        lambda mesh: {"config_objective": "balance" if mesh.get_rank() == 3 else "lockstep"},
        ["config.objective", '"balance" on ranks [3]', '"lockstep" on ranks [0, 1, 2]'],
    ),
    "order": (
        lambda mesh: {"batch_sampler": sampler_for(mesh, seed=mesh.get_local_rank("dp"))},
        ["sampler seed differs: 0 on ranks [0, 1], 1 on ranks [2, 3]; accepted"],
    ),
    "global batch": (
        lambda mesh: {"batch_sampler": sampler_for(mesh, global_batch_size=4 + 4 * mesh.get_local_rank("dp"))},
        ["global_batch_size", "4 on ranks [0, 1]", "8 on ranks [2, 3]"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_told_the_values(name: str) -> None:
    changes, texts = DIFFERENT[name]
    found = refused_everywhere(lambda mesh, dataset: build(mesh, dataset, **changes(mesh)), MESH, "differs")
    for text in texts:
        assert text in found


def test_datasets_of_different_length() -> None:
    text = refused_everywhere(lambda mesh, dataset: build(mesh, Counting(12 + mesh.get_rank())), MESH, "dataset_length")
    assert "12 on ranks [0]" in text
    assert "14 on ranks [2]" in text


def test_samplers_that_start_at_different_places() -> None:
    def attempt(mesh: Any, dataset: Any) -> Any:
        sampler = sampler_for(mesh)
        sampler.load_state_dict({"epoch": 0, "consumed_samples": 4 * mesh.get_local_rank("dp")})
        return build(mesh, dataset, batch_sampler=sampler)

    text = refused_everywhere(attempt, MESH, "start differs")
    assert "'consumed_samples': 4" in text.replace('"', "'")


# ---- what is accepted


def test_peers_need_no_data_and_get_equal_batches() -> None:
    def run(mesh: Any) -> list[Any]:
        dataset, sampler = Counting() if mesh.get_rank() in CONSTRUCTORS else None, sampler_for(mesh)
        with build(mesh, dataset, batch_sampler=sampler, config_balance_window_size=1) as loader:
            found = [(batch, loader.last.epoch, loader.last.step, loader.last.ends_step) for batch in loader]
        assert sampler.consumed_samples == (SIZE if mesh.get_rank() in CONSTRUCTORS else 0)  # only they advance it
        return found

    results = run_ranks(MESH, run)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert sorted(record for rank in CONSTRUCTORS for batch, *_ in results[rank] for record in batch) == list(range(12))


def test_whole_records_reach_collate_untouched() -> None:
    class Objects(Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"text": f"{index}", "image": torch.full((2, 3), index, dtype=torch.int16)}

    def run(mesh: Any) -> list[Any]:
        return [(type(batch), [dict(record) for record in batch]) for batch in build(mesh, Objects(), collate_fn=None)]

    found = [record for batches in run_ranks({"dp": 2, "tp": 1}, run) for _, batch in batches for record in batch]
    assert sorted(int(record["text"]) for record in found) == list(range(SIZE))
    for record in found:
        assert torch.equal(record["image"], torch.full((2, 3), int(record["text"]), dtype=torch.int16))


@pytest.mark.parametrize("rank", [0, 1])
def test_oversized_is_an_error_on_every_rank(rank: int) -> None:
    """CASES 3."""

    def run(mesh: Any) -> str:
        lengths = [4, 12, 3, 4] if rank == 0 else [4, 3, 12, 4]
        loader = build(
            mesh,
            Counting(4),
            config_seq_len=10,
            batch_sampler=DistributedBatchSampler(4, 2, 4, mesh.get_rank(), 2),
            metadata_fn=lambda record: SampleMetadata(lengths[record], cost=WorkloadCost(llm=1.0)),
        )
        with pytest.raises(DataPlaneError) as caught:
            next(loader)
        loader.close()
        return str(caught.value)

    texts = run_ranks({"dp": 2}, run)
    assert texts[0].split("\n")[0] == texts[1].split("\n")[0]
    for text in ("12", "10", "Planner", f"sample (position {1 + rank}, part 0)"):
        assert text in texts[0]


def test_oversized_alone_in_its_bin() -> None:
    """CASES 3."""

    def run(mesh: Any) -> Any:
        lengths = [4, 12, 3]
        loader = build(
            mesh,
            Counting(3),
            config_seq_len=10,
            config_local_batch_size=3,
            config_oversized_policy="single",
            batch_sampler=DistributedBatchSampler(3, 3, 3, 0, 1),
            metadata_fn=lambda record: SampleMetadata(lengths[record], cost=WorkloadCost(llm=1.0)),
        )
        return next(loader)

    assert sorted(run_ranks({"dp": 1}, run)[0]) == [0, 1, 2]


@pytest.mark.parametrize("depth", [0, 1])
def test_metadata_that_ends_is_an_error(depth: int) -> None:
    """CASES 29."""

    def ending(record: int) -> SampleMetadata:
        if record == 6:
            raise StopIteration
        return one_token(record)

    def run(mesh: Any) -> str:
        dataset = Counting() if mesh.get_rank() in CONSTRUCTORS else None
        with (
            build(
                mesh,
                dataset,
                metadata_fn=ending,
                config_host_prefetch_depth=depth,
                batch_sampler=sampler_for(mesh, order="sequential"),
            ) as loader,
            pytest.raises(DataPlaneError) as caught,
        ):
            list(loader)
        return str(caught.value)

    texts = run_ranks(MESH, run)
    assert len(set(texts)) == 1
    for text in ("StopIteration", "MetadataDeriver", "index 6", "rank 2"):
        assert text in texts[0]


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf")])
def test_a_cost_that_is_no_cost_names_the_sample(value: float) -> None:
    """CASES 18."""

    def run(mesh: Any) -> str:
        def costly(metadata: SampleMetadata) -> WorkloadCost:
            return WorkloadCost(llm=value)

        with build(mesh, Counting(), cost_model=costly) as loader, pytest.raises(DataPlaneError) as caught:
            next(loader)
        return str(caught.value)

    texts = run_ranks({"dp": 2, "tp": 1}, run)
    assert len(set(texts)) == 1
    assert "index" in texts[0]
    assert "accepted: a finite number >= 0" in texts[0]


@pytest.mark.parametrize("cost", [WorkloadCost(), WorkloadCost(io=3.0, encoder=2.0, memory=1.0)])
def test_costs_of_nothing_name_the_ways_to_give_some(cost: WorkloadCost) -> None:
    """What is balanced is ``llm``; the other components are the user's own."""

    def run(mesh: Any) -> str:
        loader = build(mesh, Counting(), metadata_fn=lambda record: SampleMetadata(1, cost))
        with loader, pytest.raises(DataPlaneError) as caught:
            next(loader)
        return str(caught.value)

    for text in run_ranks({"dp": 2, "tp": 1}, run):
        for way in ("cost_model", "model_config", "SampleMetadata with a cost whose llm component is positive"):
            assert way in text


def test_an_index_outside_the_dataset_is_named() -> None:
    def run(mesh: Any) -> str:
        sampler = sampler_for(mesh, total_samples=16, order="sequential")
        with build(mesh, Counting(), batch_sampler=sampler) as loader, pytest.raises(DataPlaneError) as caught:
            list(loader)
        return str(caught.value)

    for text in run_ranks({"dp": 2, "tp": 1}, run):
        assert "index 12 is outside the dataset of 12 records" in text


def test_precomputed_metadata_reads_only_what_this_rank_packs() -> None:
    lengths = np.random.default_rng(0).integers(1, 9, size=SIZE)
    table = [SampleMetadata(int(n), cost=WorkloadCost(llm=float(n) ** 2)) for n in lengths]

    def run(mesh: Any) -> tuple[list[Any], int]:
        dataset = Counting()
        loader = build(
            mesh,
            dataset,
            metadata_fn=None,
            metadata=table,
            config_metadata_mode=True,
            batch_sampler=sampler_for(mesh, global_batch_size=12),
            config_balance_window_size=3,
        )
        with loader:
            return [record for batch in loader for record in batch], dataset.reads

    results = run_ranks({"dp": 2, "tp": 1}, run)
    assert sorted(record for found, _ in results for record in found) == list(range(SIZE))
    assert [reads for _, reads in results] == [6, 6]


def test_the_same_fingerprint_and_length_on_every_rank() -> None:
    def run(mesh: Any) -> tuple[dict[str, Any], int, Any]:
        dataset = Counting() if mesh.get_rank() in CONSTRUCTORS else None
        with build(mesh, dataset) as loader:
            return loader.fingerprint, len(loader), loader.state_dict()

    results = run_ranks(MESH, run)
    assert all(result == results[0] for result in results)
    assert results[0][0]["dataset_length"] == SIZE
    assert results[0][0]["global_batch_size"] == 4
    assert results[0][0]["seed"] == 1234


def test_a_fingerprint_of_ones_own_goes_with_the_state() -> None:
    def run(mesh: Any) -> str:
        saved = build(mesh, Counting(), fingerprint={"revision": "a"})
        state = saved.state_dict()
        saved.close()
        with build(mesh, Counting(), fingerprint={"revision": "b"}) as other:
            with pytest.raises(ValueError, match="revision.*'a'.*'b'"):
                other.load_state_dict(state)
            with pytest.warns(UserWarning, match="revision"):
                other.load_state_dict(state, strict=False)
        return str(state["hp_nodes"])

    states = run_ranks(MESH, run)
    assert len(set(states)) == 1


def test_fingerprints_that_differ_between_ranks_are_refused() -> None:
    def run(mesh: Any) -> str:
        with pytest.raises(ValueError, match="fingerprint differs") as caught:
            build(mesh, Counting(), fingerprint={"revision": mesh.get_rank()})
        return str(caught.value)

    assert len(set(run_ranks(MESH, run))) == 1
