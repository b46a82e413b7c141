"""What staging to a device promises, as assertions that run on a real device and on a stand-in alike.

Each of ``ASSERTIONS`` takes a function that opens a device whose copies, or whose consumer, run late, and raises
AssertionError where a promise is broken. Two of them break a promise on purpose and assert that it shows, since a rig
that cannot fail proves nothing. Needs torch, numpy and torchdata only: tests and :mod:`graphs.device_check` use it.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torchdata.nodes import BaseNode

from hp_nodes import DevicePrefetcher, MicroBatch
from hp_nodes.nodes.accelerator import Accelerator
from hp_nodes.nodes.device_staging import DeviceStaging

__all__ = ["ASSERTIONS", "DeviceUnderTest", "HostBatches", "Mark", "OpenDevice"]

Mark = Callable[[], float]
"""Seconds on the device's clock, once the consumer's stream has come there."""


class DeviceUnderTest(Accelerator, Protocol):
    """A device whose copies and whose consumer's work run late, and a consumer's means to look."""

    copies: int
    pinned_nbytes: int
    """Asked for, ever."""
    threads_with_device: set[int]

    def read(self, tensor: torch.Tensor) -> Callable[[], bytes]:
        """Queue a late read of the tensor on the consumer's stream; what it found is there after ``synchronize``."""
        ...

    def compute(self, seconds: float) -> None:
        """Queue work of about that long on the consumer's stream."""
        ...

    def mark(self) -> Mark:
        """Note the time when the consumer's stream comes here."""
        ...

    def overwrite_freed(self, nbytes: int) -> None:
        """Fill what the device gives for ``nbytes`` with 0xEE, on every stream."""
        ...

    def synchronize(self) -> None: ...


class OpenDevice(Protocol):
    def __call__(self, copy_delay_s: float = 0.0, compute_delay_s: float = 0.0) -> DeviceUnderTest: ...


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Boxed:
    tensor: torch.Tensor
    label: str


def batch_of(seed: int) -> dict[str, Any]:
    """Small tensors of many kinds, in every container; the entry "host" is to stay."""
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
    """Those that are staged, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for key, item in value.items() if key != "host" for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    return [value.tensor] if isinstance(value, Boxed) else []


class HostBatches(BaseNode[MicroBatch]):
    """Micro-batches made by ``make(number)``, one a step."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = count
        self.make = make
        self.taken = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.taken = 0 if initial_state is None else initial_state["taken"]

    def next(self) -> MicroBatch:
        number = self.taken
        if number == self.count:
            raise StopIteration
        self.taken += 1
        return MicroBatch(self.make(number), 0, number, 0, True, True, self.taken == self.count)

    def get_state(self) -> dict[str, Any]:
        return {"taken": self.taken}


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.nbytes else b""


def _every_byte_is_right(device: DeviceUnderTest, staging: DeviceStaging, count: int, deliver: bool = True) -> bool:
    """Deliver batches one by one, read each late, forget it at once, overwrite what that freed."""
    expected, found = [], []
    for number in range(count):
        host = batch_of(number)
        staged = staging.stage(host)
        data = staged.deliver() if deliver else staged.data
        for tensor, on_device in zip(tensors_of(host), tensors_of(data), strict=True):
            expected.append(_bytes(tensor))
            found.append(device.read(on_device))
        del data, staged, on_device
        device.overwrite_freed(4096)
    device.synchronize()
    return [read() for read in found] == expected


def structure_and_values_are_preserved(open_device: OpenDevice) -> None:
    device = open_device()
    host = batch_of(3)
    staging = DeviceStaging(device, 2, cpu_fields=["host"])
    data = staging.stage(host).deliver()
    device.synchronize()
    _expect(list(data) == list(host) and data["number"] == 3, "other entries")
    _expect(data["host"] is host["host"], "a field of the host was moved")
    _expect(isinstance(data["nested"][1], Pair) and data["nested"][1].second is None, "a named tuple is none")
    _expect(data["nested"][0][1] == "text" and data["boxed"].label == "label", "what is no tensor was changed")
    for tensor, on_device in zip(tensors_of(host), tensors_of(data), strict=True):
        _expect(on_device.device == device.device, f"on {on_device.device}")
        _expect(on_device.dtype == tensor.dtype and torch.equal(on_device.cpu(), tensor), f"{on_device} for {tensor}")


def no_byte_is_wrong_while_copies_are_late(open_device: OpenDevice) -> None:
    device = open_device(copy_delay_s=0.01)
    _expect(_every_byte_is_right(device, DeviceStaging(device, 3), 8), "a consumer read before the copy ran")


def no_byte_is_wrong_while_the_consumer_is_late(open_device: OpenDevice) -> None:
    device = open_device(compute_delay_s=0.002)
    _expect(_every_byte_is_right(device, DeviceStaging(device, 3), 8), "memory was reused before its reader ran")


def a_consumer_that_does_not_wait_is_seen(open_device: OpenDevice) -> None:
    device = open_device(copy_delay_s=0.02)
    _expect(not _every_byte_is_right(device, DeviceStaging(device, 3), 4, deliver=False), "copies are not late here")


def memory_that_is_not_handed_over_is_seen(open_device: OpenDevice) -> None:
    device = open_device(compute_delay_s=0.005)
    vars(device)["hand_over"] = lambda tensor, stream: None
    _expect(not _every_byte_is_right(device, DeviceStaging(device, 3), 8), "freed memory is not overwritten here")


def a_slot_is_not_rewritten_before_its_copy_ran(open_device: OpenDevice) -> None:
    device = open_device(copy_delay_s=0.01)
    _expect(_every_byte_is_right(device, DeviceStaging(device, 1), 5), "the only pinned buffer was rewritten too early")


def one_transfer_a_batch(open_device: OpenDevice) -> None:
    device = open_device()
    staging = DeviceStaging(device, 2)
    for number in range(5):
        staging.stage(batch_of(number)).deliver()
    _expect(device.copies == 5, f"{device.copies} transfers for 5 batches")
    _expect(DeviceStaging(device, 2).stage(["text", 3, None]).deliver() == ["text", 3, None], "not the same")
    _expect(device.copies == 5, "a transfer for a batch without tensors")


def large_pinned_tensors_are_right(open_device: OpenDevice) -> None:
    """They are copied from where they are."""
    device = open_device(copy_delay_s=0.01, compute_delay_s=0.002)
    staging = DeviceStaging(device, 2)
    host = [device.pinned(2 << 20).fill_(number) for number in range(1, 4)]
    reads = []
    for tensor in host:
        data = staging.stage({"large": tensor, "small": tensor[:8]}).deliver()
        reads += [device.read(data["large"]), device.read(data["small"])]
        del data
        device.overwrite_freed(2 << 20)
    device.synchronize()
    expected = [_bytes(part) for tensor in host for part in (tensor, tensor[:8])]
    _expect([read() for read in reads] == expected, "other bytes")


def a_pinned_source_is_kept_until_its_copy_ran(open_device: OpenDevice) -> None:
    """Its owner may let go of it at once, and need not have it from torch."""
    device = open_device(copy_delay_s=0.05)
    staging = DeviceStaging(device, 2)
    large = device.pinned(2 << 20)
    source = weakref.ref(large)
    data = staging.stage({"large": large}).deliver()
    del large
    _expect(source() is not None, "nobody keeps what is being copied")
    del data
    device.synchronize()
    for number in range(2):
        staging.stage(batch_of(number)).deliver()
    _expect(source() is None, "it is kept after its copy ran")
    device.synchronize()


def device_memory_is_free_once_let_go_of(open_device: OpenDevice) -> None:
    """At once, and not when Python looks for cycles: a batch may take a large part of the device."""
    staging = DeviceStaging(open_device(), 2)
    gc.disable()
    try:
        data = staging.stage(batch_of(0)).deliver()
        buffer = weakref.ref(data["ids"]._base)
        _expect(buffer() is not None, "the tensors of a batch are no views of one buffer")
        del data
        _expect(buffer() is None, "something still refers to the batch's device memory")
    finally:
        gc.enable()


def pinned_memory_is_reused_and_given_back(open_device: OpenDevice) -> None:
    device = open_device()
    staging = DeviceStaging(device, 3)
    held = []
    for number in range(200):
        staging.stage(batch_of(number)).deliver()
        held.append(staging.pinned_nbytes)
    _expect(len(set(held[3:])) == 1, f"it grew from {held[3]} to {held[-1]} bytes")
    _expect(device.pinned_nbytes == held[-1], f"{device.pinned_nbytes} bytes were asked for, {held[-1]} are held")
    staging.close()
    _expect(staging.pinned_nbytes == 0, "it was not given back")


def the_host_does_not_wait_for_a_copy(open_device: OpenDevice) -> None:
    warm = open_device()
    DeviceStaging(warm, 2).stage(batch_of(0)).deliver()
    warm.synchronize()
    device = open_device(copy_delay_s=0.4)
    before = time.monotonic()
    DeviceStaging(device, 2).stage(batch_of(0)).deliver()
    _expect(time.monotonic() - before < 0.2, "staging took as long as the copy")
    device.synchronize()


def the_staging_thread_sets_its_device(open_device: OpenDevice) -> None:
    device = open_device()
    node = DevicePrefetcher(HostBatches(6, batch_of), depth=2, accelerator=device)
    next(node)
    node.close()
    threads = device.threads_with_device
    _expect(len(threads) == 1 and threading.get_ident() not in threads, f"threads {threads} set it")
    left = [thread.name for thread in threading.enumerate() if "DevicePrefetcher" in thread.name]
    _expect(not left, f"left running: {left}")


def a_graph_delivers_in_order_and_resumes(open_device: OpenDevice) -> None:
    def make(number: int) -> dict[str, Any]:
        return {"ids": torch.full((5,), number), "host": torch.tensor([number])}

    for depth in (0, 1, 3):
        device = open_device(copy_delay_s=0.002)
        first, second = (
            DevicePrefetcher(HostBatches(12, make), depth=depth, accelerator=device, cpu_fields=["host"])
            for _ in range(2)
        )
        reads = []
        for node, count in ((first, 5), (second, 7)):
            if node is second:
                second.reset(first.state_dict())
            for _ in range(count):
                batch = next(node)
                _expect(batch.data["host"].device.type == "cpu", "a field of the host was moved")
                reads.append(device.read(batch.data["ids"]))
        device.synchronize()
        expected = [_bytes(make(number)["ids"]) for number in range(12)]
        _expect([read() for read in reads] == expected, f"depth {depth}: other batches, or in another order")
        first.close()
        second.close()


ASSERTIONS: dict[str, Callable[[OpenDevice], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        structure_and_values_are_preserved,
        no_byte_is_wrong_while_copies_are_late,
        no_byte_is_wrong_while_the_consumer_is_late,
        a_consumer_that_does_not_wait_is_seen,
        memory_that_is_not_handed_over_is_seen,
        a_slot_is_not_rewritten_before_its_copy_ran,
        one_transfer_a_batch,
        large_pinned_tensors_are_right,
        a_pinned_source_is_kept_until_its_copy_ran,
        device_memory_is_free_once_let_go_of,
        pinned_memory_is_reused_and_given_back,
        the_host_does_not_wait_for_a_copy,
        the_staging_thread_sets_its_device,
        a_graph_delivers_in_order_and_resumes,
    )
}
