"""Exchanges that the consuming thread must launch, as NCCL and HCCL want it: shown on transports of this machine."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from hp_nodes import DataPlaneError
from hp_nodes.transport import Transport, run_ranks
from hp_nodes.transport.handed_over import HandedOverTransport
from tests.nodes.test_failures import Broken, no_thread_is_left
from tests.nodes.test_resume import resume_everywhere
from tests.scenes import Documents, Scene, rest


class ConsumersOnly:
    """Refuses exchanges from any thread but the rank's own, and logs where in the delivery each was launched."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.owner = threading.current_thread()
        self.delivered = 0
        self.log: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name not in ("all_gather", "broadcast", "all_to_all"):
            return value

        def exchange(*arguments: Any) -> Any:
            assert threading.current_thread() is self.owner, f"{name} on {threading.current_thread().name}"
            self.log.append((self.delivered, arguments[-1]))
            return value(*arguments)

        return exchange


def wrapped(transport: Transport) -> HandedOverTransport:
    return HandedOverTransport(ConsumersOnly(transport))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_deliveries_are_what_they_were(window: int, depth: int) -> None:
    plain = Scene(window=window, depth=depth)
    handed = Scene(window=window, depth=depth, wrap_transport=wrapped)
    expected = run_ranks({"dp": 2}, lambda mesh: rest(plain.loader(mesh)))
    assert run_ranks({"dp": 2}, lambda mesh: rest(handed.loader(mesh))) == expected


def test_resume_everywhere() -> None:
    resume_everywhere(Scene(window=2, depth=1, wrap_transport=wrapped), {"dp": 2})


def test_launches_stand_at_the_same_places_on_every_rank() -> None:
    """However late a rank's background thread is, its exchanges are launched at the same deliveries."""

    class Slow(Documents):
        def __getitem__(self, index: int) -> Any:
            if threading.get_ident() % 2:
                time.sleep(0.002)
            return super().__getitem__(index)

    def run(mesh: Any) -> list[tuple[int, str]]:
        checkers: list[ConsumersOnly] = []

        def wrap(transport: Transport) -> HandedOverTransport:
            checkers.append(ConsumersOnly(transport))
            return HandedOverTransport(checkers[0])

        with Scene(dataset=Slow(), window=2, wrap_transport=wrap).loader(mesh) as loader:
            for _ in loader:
                checkers[0].delivered += 1
                time.sleep(0.003 * mesh.get_rank())
        return checkers[0].log

    logs = run_ranks({"dp": 2}, run)
    assert logs[0] == logs[1]
    # The first window is launched before anything is delivered; the plan of window k + 1 with the first micro-batch of
    # window k (two micro-batches a window), its exchange with the last.
    at = [place for place, what in logs[0] if "opening" in what]
    assert at[:4] == [0, 0, 2, 4]
    assert [place for place, what in logs[0] if "closing" in what][:4] == [0, 1, 3, 5]


def test_errors_and_close() -> None:
    scene = Scene(dataset=Broken(lambda: OSError("disk gone")), order="sequential", wrap_transport=wrapped)

    def run(mesh: Any) -> str:
        loader = scene.loader(mesh)
        with pytest.raises(DataPlaneError, match="disk gone") as caught:
            list(loader)
        loader.close()
        return str(caught.value)

    texts = run_ranks({"dp": 2}, run)
    assert texts[0] == texts[1]
    assert no_thread_is_left()


def test_close_after_equal_consumption() -> None:
    scene = Scene(dataset=Documents(96), micro=1, global_batch=4, window=2, depth=1, wrap_transport=wrapped)

    def run(mesh: Any) -> None:
        for number in range(30):
            with scene.loader(mesh) as loader:
                for _ in range(number % 6):
                    next(loader)

    before = time.monotonic()
    run_ranks({"dp": 2}, run)
    assert time.monotonic() - before < 30
    assert no_thread_is_left()
