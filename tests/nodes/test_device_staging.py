"""Staging to a device: no wrong byte, whatever is late; no wait on the host; pinned memory that does not grow."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from hp_nodes.nodes.accelerator import open_accelerator
from hp_nodes.nodes.device_staging import DeviceStaging
from tests.nodes.stand_in_device import StandInDevice


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Boxed:
    tensor: torch.Tensor
    label: str


def batch_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(-100, 100, (7, 5), generator=generator)
    return {
        "ids": draw,
        "mask": draw > 0,
        "half": draw.to(torch.bfloat16),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "strided": draw.t(),
        "nested": [(draw[0], "text"), Pair(draw[1].to(torch.int16), None)],
        "boxed": Boxed(draw[2].to(torch.uint8), "label"),
        "number": seed,
        "host": draw[3],
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for key, item in value.items() if key != "host" for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return [value.tensor] if isinstance(value, Boxed) else []


def run_batches(device: StandInDevice, staging: DeviceStaging, count: int, deliver: bool = True) -> bool:
    """Deliver batches one by one, read each late, forget it at once; whether every byte was right."""
    expected, found = [], []
    for number in range(count):
        host = batch_of(number)
        staged = staging.stage(host)
        data = staged.deliver() if deliver else staged.data
        for tensor, on_device in zip(tensors_of(host), tensors_of(data), strict=True):
            assert on_device.dtype == tensor.dtype
            assert on_device.shape == tensor.shape
            expected.append(
                tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.nbytes else b""
            )
            found.append(device.read(on_device))
        del data, staged, on_device
        gc.collect(0)
    device.synchronize()
    return [read() for read in found] == expected


def test_structure_is_preserved() -> None:
    device = StandInDevice()
    host = batch_of(3)
    staged = DeviceStaging(device, 2, cpu_fields=["host"]).stage(host)
    data = staged.deliver()
    device.synchronize()
    assert list(data) == list(host)
    assert data["host"] is host["host"]
    assert data["number"] == 3
    assert isinstance(data["nested"][1], Pair)
    assert data["nested"][1].second is None
    assert data["nested"][0][1] == "text"
    assert data["boxed"].label == "label"
    for tensor, on_device in zip(tensors_of(host), tensors_of(data), strict=True):
        assert torch.equal(on_device, tensor)
        assert on_device.dtype == tensor.dtype


@pytest.mark.parametrize(("copy_delay", "compute_delay"), [(0.0, 0.0), (0.004, 0.0), (0.0, 0.001), (0.003, 0.0005)])
def test_no_wrong_byte_however_late(copy_delay: float, compute_delay: float) -> None:
    device = StandInDevice(8_192, copy_delay, compute_delay)
    assert run_batches(device, DeviceStaging(device, 3), 8)


def test_the_stand_in_shows_a_consumer_that_does_not_wait() -> None:
    device = StandInDevice(1 << 16, copy_delay_s=0.02)
    assert not run_batches(device, DeviceStaging(device, 3), 4, deliver=False)


def test_the_stand_in_shows_memory_that_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    device = StandInDevice(8_192, compute_delay_s=0.005)
    monkeypatch.setattr(device, "hand_over", lambda tensor, stream: None)
    assert not run_batches(device, DeviceStaging(device, 3), 8)


def test_one_transfer_a_batch() -> None:
    device = StandInDevice()
    staging = DeviceStaging(device, 2)
    for number in range(5):
        staging.stage(batch_of(number)).deliver()
    assert device.copies == 5


def test_pinned_memory_is_reused() -> None:
    device = StandInDevice()
    staging = DeviceStaging(device, 3)
    held = []
    for number in range(200):
        staging.stage(batch_of(number)).deliver()
        held.append(staging.pinned_nbytes)
    assert len(set(held[3:])) == 1
    assert device.pinned_nbytes == held[-1]
    staging.close()
    assert staging.pinned_nbytes == 0


def test_a_slot_is_not_rewritten_before_its_copy_ran() -> None:
    device = StandInDevice(1 << 16, copy_delay_s=0.01)
    assert run_batches(device, DeviceStaging(device, 1), 5)


def test_the_host_does_not_wait_for_a_copy() -> None:
    device = StandInDevice(copy_delay_s=0.2)
    staging = DeviceStaging(device, 2)
    before = time.monotonic()
    staging.stage(batch_of(0)).deliver()
    assert time.monotonic() - before < 0.1


def test_the_staging_thread_sets_its_device() -> None:
    device = StandInDevice()
    staging = DeviceStaging(device, 2)
    thread = threading.Thread(target=lambda: staging.stage(batch_of(0)))
    thread.start()
    thread.join()
    assert device.threads_with_device == {thread.ident}


def test_batches_without_tensors() -> None:
    device = StandInDevice()
    assert DeviceStaging(device, 2).stage(["text", 3, None]).deliver() == ["text", 3, None]
    assert device.copies == 0


@pytest.mark.parametrize("device", ["tpu", "meta", ""])
def test_devices_that_are_none_of_ours(device: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match="accepted"):
        open_accelerator(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here() -> None:
    with pytest.raises(RuntimeError, match="finds no device"):
        open_accelerator("cuda")


def test_npu_without_its_package_names_the_extra() -> None:
    if hasattr(torch, "npu"):
        pytest.skip("torch_npu is here")
    with pytest.raises(ImportError, match=r"hp-nodes\[npu\]"):
        open_accelerator("npu:0")
