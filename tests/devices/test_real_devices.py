"""What staging promises, on a real device, with copies and consumers slowed on purpose. Skipped where there is none."""

from __future__ import annotations

from functools import partial

import pytest

from graphs.device_assertions import ASSERTIONS
from graphs.slowed_device import SlowedDevice
from hp_nodes.nodes.accelerator import open_accelerator


@pytest.mark.parametrize("name", ASSERTIONS)
@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("npu", marks=pytest.mark.npu)]
)
def test_what_staging_promises_holds(device: str, name: str) -> None:
    try:
        open_accelerator(device)
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    ASSERTIONS[name](partial(SlowedDevice, device))
