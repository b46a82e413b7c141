"""CONTRACT 8, on a stand-in for CUDA: the same batches, staged, and what stays on the host."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from graphs.stand_in_device import StandInDevice
from hp_nodes import TensorFieldSpec, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, count_tokens

SPEC = {
    "tokens": TensorFieldSpec((None,), torch.int64),
    "lengths": TensorFieldSpec((2,), torch.int64, device="cpu"),
}


def collate(bins: Any) -> dict[str, torch.Tensor]:
    records = [torch.from_numpy(np.array(record["input_ids"])) for record in bins]
    return {"tokens": torch.cat(records), "lengths": torch.tensor([len(record) for record in records])}


def build(mesh: Any, device: Any, spec: Any = SPEC) -> Any:
    rank, size = mesh.get_local_rank("dp"), mesh.size(0)
    return build_distributed_dataloader(
        Documents(32),
        mesh,
        DistributedDatasetConfig(64, 2, device_prefetch_depth=2, timeout_s=10.0),
        batch_sampler=DistributedBatchSampler(32, 2, 8, rank, size, order="shuffle"),
        metadata_fn=count_tokens,
        cost_model=lambda metadata: WorkloadCost(llm=metadata.pack_tokens),
        collate_fn=collate,
        model_batch_spec=spec,
        device=device,
    )


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[int, StandInDevice]:
    """By the thread that opened it: that of a virtual rank."""
    found: dict[int, StandInDevice] = {}

    def opened(device: Any) -> StandInDevice:
        return found.setdefault(threading.get_ident(), StandInDevice(copy_delay_s=0.001))

    monkeypatch.setattr("graphs.arguments.open_accelerator", opened)
    monkeypatch.setattr("hp_nodes.nodes.device_prefetcher.open_accelerator", opened)
    return found


def test_the_same_batches_on_the_device_and_what_stays_on_the_host(devices: dict[int, StandInDevice]) -> None:
    def on_the_host(mesh: Any) -> list[Any]:
        with build(mesh, None) as loader:
            return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader]

    def on_the_device(mesh: Any) -> list[Any]:
        found = []
        with build(mesh, "cuda") as loader:
            device = devices[threading.get_ident()]
            for batch in loader:
                read = device.read(batch["tokens"])  # asserts that it is device memory
                with pytest.raises(AssertionError, match="not device memory"):
                    device.read(batch["lengths"])
                device.synchronize()
                found.append({"tokens": np.frombuffer(read(), np.int64).tolist(), "lengths": batch["lengths"].tolist()})
        return found

    assert run_ranks({"dp": 2}, on_the_device) == run_ranks({"dp": 2}, on_the_host)


@pytest.mark.usefixtures("devices")
def test_what_cannot_be_left_on_the_host_is_refused() -> None:
    spec = [SPEC["tokens"], SPEC["lengths"]]
    with pytest.raises(ValueError, match=r"batch\[1\].* stay on the host"):
        run_ranks({"dp": 2}, lambda mesh: build(mesh, "cuda", spec))


@pytest.mark.usefixtures("devices")
def test_devices_of_different_types_are_refused() -> None:
    with pytest.raises(ValueError, match="type of device"):
        run_ranks({"dp": 2}, lambda mesh: build(mesh, "cuda" if mesh.get_rank() else None))


@pytest.mark.usefixtures("devices")
def test_virtual_model_parallel_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="virtual model-parallel ranks, which have no device's backend"):
        run_ranks({"dp": 1, "tp": 2}, lambda mesh: build(mesh, "cuda"))
