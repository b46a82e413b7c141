"""CONTRACT 8: device prefetch in a graph: staged ahead, in order, resumed exactly, given back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torchdata.nodes import BaseNode

from graphs.stand_in_device import StandInDevice
from hp_nodes import DevicePrefetcher, MicroBatch
from hp_nodes.transport import SingleRankTransport, run_ranks
from hp_nodes.transport.handed_over import HandedOverTransport
from tests.scenes import Scene, rest


class Batches(BaseNode[MicroBatch]):
    """Micro-batches of two tensors, and how many were taken."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        super().__init__()
        self.count = count
        self.bad = bad
        self.taken = 0

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.taken = 0 if initial_state is None else initial_state["taken"]

    def next(self) -> MicroBatch:
        number = self.taken
        if number == self.count:
            raise StopIteration
        self.taken += 1
        data: Any = {"ids": torch.full((5,), number), "host": torch.tensor([number]), "n": number}
        if number == self.bad:
            data["bad"] = Unmovable()
        last = number == self.count - 1
        return MicroBatch(data, 0, number, 0, True, True, last)

    def get_state(self) -> dict[str, Any]:
        return {"taken": self.taken}


class Unmovable:
    def to(self, device: Any, non_blocking: bool = False) -> Any:
        raise RuntimeError("no room on the device")


def staged(source: BaseNode[MicroBatch], depth: int, device: StandInDevice, **more: Any) -> DevicePrefetcher:
    return DevicePrefetcher(source, depth=depth, accelerator=device, **more)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_batches_arrive_on_the_device_in_order(depth: int) -> None:
    device = StandInDevice(copy_delay_s=0.002)
    node = staged(Batches(12), depth, device, cpu_fields=["host"])
    reads = []
    for number, batch in enumerate(node):
        assert batch.data["n"] == number
        assert batch.data["host"].tolist() == [number]
        reads.append(device.read(batch.data["ids"]))
    device.synchronize()
    assert [read()[0] for read in reads] == list(range(12))
    assert device.copies == 12
    node.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_state_is_that_of_the_batch_delivered(depth: int) -> None:
    device = StandInDevice()
    node = staged(Batches(8), depth, device)
    for _ in range(3):
        next(node)
    state = node.state_dict()
    node.close()
    resumed = staged(Batches(8), depth, device)
    resumed.reset(state)
    assert [batch.data["n"] for batch in resumed] == [3, 4, 5, 6, 7]


def test_a_copy_that_fails_raises_when_its_batch_is_delivered() -> None:
    node = staged(Batches(8, bad=4), 3, StandInDevice())
    assert [next(node).data["n"] for _ in range(4)] == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room on the device"):
            next(node)


def test_the_thread_sets_its_device_and_close_gives_everything_back() -> None:
    device = StandInDevice()
    node = staged(Batches(8), 2, device)
    next(node)
    assert threading.get_ident() not in device.threads_with_device
    assert len(device.threads_with_device) == 1
    node.close()
    assert node._stage._staging is not None
    assert node._stage._staging.pinned_nbytes == 0
    assert not [thread for thread in threading.enumerate() if "DevicePrefetcher" in thread.name]


class HandedOver(Batches):
    """A node whose exchanges the consumer launches; refuses to run elsewhere."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.transport = HandedOverTransport(SingleRankTransport())
        self.owner = threading.get_ident()

    def next(self) -> MicroBatch:
        assert threading.get_ident() == self.owner
        return super().next()


def test_above_handed_over_exchanges_the_consumer_stages_itself() -> None:
    source = HandedOver(6)
    node = staged(source, 2, StandInDevice())
    seen = []
    for batch in node:
        seen.append((batch.data["n"], source.taken))
    assert seen == [(0, 3), (1, 4), (2, 5), (3, 6), (4, 6), (5, 6)]
    assert node.state_dict()["hp_nodes"]["HandedOver"] == {"taken": 6}


def test_in_a_graph_over_two_ranks() -> None:
    plain, with_device = Scene(depth=1), Scene(depth=1, device_depth=2)
    expected = run_ranks({"dp": 2}, lambda mesh: rest(plain.loader(mesh)))
    assert run_ranks({"dp": 2}, lambda mesh: rest(with_device.loader(mesh))) == expected


def test_depth_and_device_are_checked() -> None:
    with pytest.raises(ValueError, match="depth"):
        DevicePrefetcher(Batches(1), depth=-1)
    with pytest.raises(ValueError, match="accepted"):
        DevicePrefetcher(Batches(1), "meta")
