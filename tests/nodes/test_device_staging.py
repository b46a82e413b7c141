"""CONTRACT 8, on a stand-in: no wrong byte, whatever is late; no host that waits; nothing that grows."""

from __future__ import annotations

import pytest
import torch

from graphs.device_assertions import ASSERTIONS
from graphs.stand_in_device import StandInDevice
from hp_nodes.nodes.accelerator import open_accelerator


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
