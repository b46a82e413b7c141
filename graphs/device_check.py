"""Does staging do on this machine's device what it promises, and what does it cost?

    python -m graphs.device_check --device cuda      (or npu; cpu: the stand-in of the tests, to check this program)

Runs every assertion of the device tests, the transport of the device's own backend on one device, and a benchmark, in
less than three minutes on one device, without network, and prints a table; ends with 1 where something is not as
promised. Needs torch, numpy and torchdata only: from a source checkout, set PYTHONPATH to it. Never run on hardware so
far: what it says of CUDA and NPU devices was written without one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from graphs.device_assertions import ASSERTIONS, OpenDevice
from graphs.device_benchmark import Figure, Sizes, figures
from graphs.slowed_device import SlowedDevice
from graphs.stand_in_device import StandInDevice
from hp_nodes.transport.device import DEVICE_OF, create_device_transport
from hp_nodes.transport.device_tensors import create_tensor_transport

_ON_THE_STAND_IN = Sizes(batch_nbytes=1 << 20, steps=20, step_s=0.02, many=500)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graphs.device_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", required=True, choices=["cuda", "npu", "cpu"], help="cpu: a stand-in")
    device = str(parser.parse_args(arguments).device)
    start = time.monotonic()
    open_device: OpenDevice = StandInDevice if device == "cpu" else partial(SlowedDevice, device)
    try:
        name = _name(device, open_device)
    except (ImportError, RuntimeError) as error:
        print(f"{error}", file=sys.stderr)
        return 2
    print(f"{name}, torch {torch.__version__}\n")
    failed = 0
    for figure in _all_figures(device, open_device):
        failed += figure.good is False
        verdict = {True: "yes", False: "NO", None: ""}[figure.good]
        print(f"{figure.what:<62} {figure.found:<28} {figure.wanted:<8} {verdict}", flush=True)
    print(f"\n{failed} of these are not as promised; {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


def _name(device: str, open_device: OpenDevice) -> str:
    opened = open_device()
    if device == "cpu":
        return "a stand-in for a device: its times say nothing"
    return str(torch.get_device_module(device).get_device_name(opened.device))


def _all_figures(device: str, open_device: OpenDevice) -> Iterator[Figure]:
    for name, check in ASSERTIONS.items():
        try:
            check(open_device)
            yield Figure(name, "holds", "holds", True)
        except Exception as error:  # one that breaks must not hide what the others say
            yield Figure(name, f"{type(error).__name__}: {error}", "holds", False)
    yield from _transport(device)
    try:
        if device == "cpu":
            yield from figures(open_device(), _ON_THE_STAND_IN, real=False)
        else:
            yield from figures(open_device(), Sizes())
    except Exception as error:
        yield Figure("the benchmark", f"{type(error).__name__}: {error}", "a figure", False)


def _transport(device: str) -> Iterator[Figure]:
    """The self-tests of a group of one rank, which is what one device can be asked for."""
    backend = {kind: name for name, kind in DEVICE_OF.items()}[device]
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for what, create in (
            ("data", partial(create_device_transport, backend=backend)),
            ("tensors", create_tensor_transport),
        ):
            name = f"transport of {what} over {backend}, on one device"
            try:
                create((0,), 0, 30.0, device=device).close()
                yield Figure(name, "holds", "holds", True)
            except Exception as error:
                yield Figure(name, f"{type(error).__name__}: {error}", "holds", False)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
