"""CONTRACT 8, on a stand-in: no wrong byte, whatever is late; no host that waits; nothing that grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs.device_assertions import ASSERTIONS
from graphs.stand_in_device import StandInDevice
from hp_nodes.nodes.accelerator import open_accelerator
from hp_nodes.nodes.device_staging import DeviceStaging


@pytest.mark.parametrize("name", ASSERTIONS)
def test_what_staging_promises_holds_on_the_stand_in(name: str) -> None:
    ASSERTIONS[name](StandInDevice)


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


class Movable:
    """A batch class of somebody's, which knows how to move itself."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, bool]] = []

    def to(self, device: Any, non_blocking: bool = False) -> str:
        self.asked.append((device, non_blocking))
        return "moved"


def test_what_can_move_itself_is_asked_to_without_waiting() -> None:
    """Wherever it stands; and not where it stays on the host."""
    device = StandInDevice()
    alone, inside, stays = Movable(), Movable(), Movable()
    staging = DeviceStaging(device, 2, cpu_fields=["host"])
    assert staging.stage(alone).deliver() == "moved"
    batch = {"list": [inside, "text", 3], "host": stays, "class": Movable}
    assert staging.stage(batch).deliver() == {"list": ["moved", "text", 3], "host": stays, "class": Movable}
    assert alone.asked == inside.asked == [(device.device, True)]
    assert stays.asked == []
    staging.close()
