"""CONTRACT 2: what each mode refuses, on all ranks alike and before anything is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DistributedDataLoader, SampleMetadata, TensorFieldSpec, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.graphs.mode_scene import SPEC, Divergent, Rows, Texts, loader_of, rows_loader


def external(mesh: Any, steps: Any = ((),), config: Any = None, **given: Any) -> DistributedDataLoader:
    return build_distributed_dataloader(
        None,
        mesh,
        DistributedDatasetConfig(seq_len=8, local_batch_size=1, timeout_s=10.0, **(config or {})),
        **{
            "external_step_source": steps,
            "metadata_fn": lambda record: SampleMetadata(1, WorkloadCost(llm=1.0)),
            **given,
        },
    )


class RaisingSource:
    """Raises when it is touched."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read before the refusal")


class OddRounds(RaisingSource):
    rounds_per_step = 0


EXTERNAL: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "spec": ({"model_batch_spec": {}}, {"dp": 2}, "model_batch_spec with external_step_source.*accepted: None"),
    "split": ({"split_fn": list}, {"dp": 2}, "split_fn with external_step_source"),
    "metadata mode": ({"config": {"metadata_mode": True}}, {"dp": 2}, "metadata_mode=True with external_step_source"),
    "sampler": ({"batch_sampler": object()}, {"dp": 2}, "batch_sampler with external_step_source"),
    "metadata": ({"metadata": [1]}, {"dp": 2}, "metadata with external_step_source"),
    "workers": (
        {"dataloader_kwargs": {"num_workers": 2}},
        {"dp": 2},
        r"dataloader_kwargs \['num_workers'\] with external",
    ),
    "window": (
        {"config": {"balance_window_size": 2}},
        {"dp": 2},
        "balance_window_size is 2 with external.*accepted: 1",
    ),
    "mesh": ({}, {"dp": 2, "tp": 2}, "2 ranks a data-parallel coordinate; accepted.*pure data-parallel"),
    "group": (
        {"config": {"balance_group_size": 2}},
        {"dp": 3},
        "balance_group_size is 2; accepted: .*divides the 3 ranks",
    ),
    "no metadata_fn": ({"metadata_fn": None}, {"dp": 2}, "metadata_fn is missing; accepted"),
    "no source": ({"steps": 7}, {"dp": 2}, "external_step_source is a int; accepted: an iterable"),
    "rounds": ({"steps": OddRounds()}, {"dp": 2}, "rounds_per_step is 0; accepted: an int >= 1"),
    "repacking": (
        {"pack_fn": max, "config": {"repack_sequences": True}},
        {"dp": 2},
        "repack_sequences has its own pack; accepted with it: no pack_fn",
    ),
    "objective": (
        {"balancing_algorithm": Divergent(False), "config": {"objective": "balance"}},
        {"dp": 2},
        "balancing_algorithm has its own objective",
    ),
}


@pytest.mark.parametrize("name", EXTERNAL)
def test_refused_with_an_external_source(name: str) -> None:
    changes, shape, pattern = EXTERNAL[name]
    changes = {"steps": RaisingSource(), **changes}

    def run(mesh: Any) -> str:
        with pytest.raises(ValueError, match=f"(?s){pattern}") as caught:
            external(mesh, **changes)
        create_transport(DataTopology.from_mesh(mesh), "all").all_gather(np.zeros(1, np.uint8), "the test")
        if len(mesh.shape) == 1:
            steps = [[[[mesh.get_rank()]]]]
            with external(mesh, steps) as loader:
                assert list(loader) == [((([mesh.get_rank()],),))]
        return str(caught.value)

    assert len(set(run_ranks(shape, run))) == 1


def test_an_empty_set_of_dataloader_kwargs_is_fine_with_an_external_source() -> None:
    run_ranks({"dp": 1}, lambda mesh: external(mesh, dataloader_kwargs={}).close())


LATER: dict[str, tuple[dict[str, Any], str]] = {
    "skip": ({"config": {"on_error": "skip"}}, "the source reads by itself; accepted: 'raise'"),
    "nccl": (
        {"config": {"communication_backend": "nccl"}},
        "communication_backend: backend 'nccl' needs a CUDA device, and there is none here; accepted here: 'gloo'",
    ),
    "hccl": ({"config": {"communication_backend": "hccl"}}, "needs a NPU device, and there is none here; accepted"),
    "device": ({"device": "cuda:0"}, "device 'cuda:0'.*finds no device here; accepted here: 'cpu'"),
    "no device": ({"device": "gpu"}, "device is 'gpu'.*accepted: a torch device"),
}


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_says_so(name: str) -> None:
    changes, pattern = LATER[name]

    def run(mesh: Any) -> None:
        with pytest.raises(ValueError, match=f"(?s){pattern}"):
            external(mesh, RaisingSource(), **changes)

    run_ranks({"dp": 2}, run)


NATIVE: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "specs differ": (
        lambda mesh: {"model_batch_spec": SPEC if mesh.get_rank() else TensorFieldSpec((2, None), torch.int64)},
        "model_batch_spec differs.*int64.2, any.*on ranks .0.*int64.2, 3.* on ranks .1, 2, 3.",
    ),
    "spec is none": (lambda mesh: {"model_batch_spec": {"x": float}}, "model_batch_spec: .*is the type float"),
    "spec of the collate function": (
        lambda mesh: {"collate_fn": type("C", (), {"model_batch_spec": [torch.zeros(1)], "__call__": None})},
        "model_batch_spec: .* is a Tensor; accepted",
    ),
    "kwargs": (lambda mesh: {"dataloader_kwargs": 3}, "dataloader_kwargs is 3; accepted: a mapping"),
    "pin": (lambda mesh: {"dataloader_kwargs": {"pin_memory": 1}}, "pin_memory is 1; accepted: True or False"),
    "prefetch": (
        lambda mesh: {"dataloader_kwargs": {"num_workers": 1, "prefetch_factor": 0}},
        "prefetch_factor is 0; accepted: None, or an int >= 1",
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_refusals_on_every_rank(name: str) -> None:
    changes, pattern = NATIVE[name]

    def run(mesh: Any) -> str:
        dataset = Rows()
        with pytest.raises(ValueError, match=f"(?s){pattern}") as caught:
            rows_loader(mesh, dataset, **changes(mesh))
        with rows_loader(mesh, Rows()) as loader:
            assert len(list(loader)) == 4
        assert dataset.reads == 0
        return str(caught.value)

    assert len(set(run_ranks({"dp": 2, "tp": 2}, run))) == 1


@pytest.mark.parametrize("table", [np.zeros(48), np.zeros(48, dtype=[("tokens", int)])])
def test_a_table_of_something_else_is_refused_before_a_read(table: Any) -> None:
    dataset = Texts()

    def run(mesh: Any) -> None:
        with pytest.raises(ValueError, match="metadata .*accepted"):
            loader_of("precomputed", mesh, dataset, metadata=table)

    run_ranks({"dp": 2, "tp": 2}, run)
    assert not dataset.reads


def test_names_of_dimensions_that_one_rank_has_wrong_are_told_to_all() -> None:
    """Nobody waits for a rank that cannot tell who it is."""

    def run(mesh: Any) -> str:
        names = ("data",) if mesh.get_rank() == 3 else None
        with pytest.raises(ValueError, match="the mesh has no") as caught:
            build_distributed_dataloader(
                Rows(),
                mesh,
                DistributedDatasetConfig(seq_len=8, local_batch_size=2, dp_dim_names=names, timeout_s=10.0),
                batch_sampler=DistributedBatchSampler(18, 2, 8, mesh.get_local_rank("dp"), 2),
                metadata_fn=lambda record: SampleMetadata(3),
            )
        return str(caught.value)

    before = time.monotonic()
    texts = run_ranks({"dp": 2, "tp": 2}, run)
    assert time.monotonic() - before < 5
    assert set(texts) == {texts[0]}
    assert texts[0].startswith("rank 3: dp_dim_names ('data',)")


def test_modes_that_differ_are_told() -> None:
    def run(mesh: Any) -> str:
        with pytest.raises(ValueError, match="mode differs") as caught:
            external(mesh) if mesh.get_rank() else rows_loader(mesh, Rows())
        return str(caught.value)

    assert '"native" on ranks [0], "external" on ranks [1]' in run_ranks({"dp": 2}, run)[0]


def test_worker_settings_that_differ_matter_behind_the_plan_only() -> None:
    def run(mesh: Any, mode: str) -> None:
        kwargs = {"num_workers": mesh.get_rank(), "multiprocessing_context": "fork"} if mesh.get_rank() else None
        loader_of(mode, mesh, Texts(), dataloader_kwargs=kwargs).close()

    run_ranks({"dp": 2}, lambda mesh: run(mesh, "online"))
    with pytest.raises(ValueError, match="num_workers differs: 0 on ranks .0., 1 on ranks .1."):
        run_ranks({"dp": 2}, lambda mesh: run(mesh, "precomputed"))


def test_readers_and_planner_may_be_named() -> None:
    settings = {"dataset_reader_ranks": (2, 0), "planner_rank": 2}
    run_ranks({"dp": 2, "tp": 2}, lambda mesh: loader_of("online", mesh, Texts(), settings=settings).close())


@pytest.mark.parametrize("wrong", [{}, None])
def test_a_config_that_is_none_on_one_rank_is_told_to_all(wrong: Any) -> None:
    def run(mesh: Any) -> str:
        config = wrong if mesh.get_rank() == 1 else DistributedDatasetConfig(8, 2, timeout_s=10.0)
        with pytest.raises(ValueError, match="config is a .*; accepted: a DistributedDatasetConfig") as caught:
            build_distributed_dataloader(Rows(), mesh, config)
        return str(caught.value)

    texts = run_ranks({"dp": 2, "tp": 2}, run)
    assert set(texts) == {texts[0]}
    assert texts[0].startswith("ranks [0, 2, 3]: nothing defines a step") and "rank 1: config is a" in texts[0]


@pytest.mark.parametrize("mesh", [None, "dp"])
def test_a_mesh_that_is_none(mesh: Any) -> None:
    with pytest.raises(ValueError, match="the mesh has no dimension names"):
        build_distributed_dataloader(Rows(), mesh, DistributedDatasetConfig(8, 2))
