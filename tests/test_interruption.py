"""A notebook's stop button ends whatever runs on virtual ranks, at once, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hp_nodes import ExternalStepReader, peek
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, Scene

STOPPED_S = 5.0


def interrupted(function: Callable[[], Any], after_s: float = 0.7) -> float:
    """Call ``function`` in the main thread, interrupt it as Control-C does; how long it takes to stop."""
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, press)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            function()
        return time.monotonic() - pressed[0]
    finally:
        timer.cancel()


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


def endless_training(mesh: Any) -> None:
    with Scene(depth=1).loader(mesh) as loader:
        while True:
            for _ in loader:
                time.sleep(0.001)


def computing(mesh: Any) -> None:
    while True:
        sum(range(1000))


@pytest.mark.parametrize("fn", [endless_training, computing])
@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_end_wherever_they_are(fn: Callable[[Any], None], ranks: int) -> None:
    """Alone, in an exchange, or computing without ever meeting another rank."""
    assert interrupted(lambda: run_ranks({"dp": ranks}, fn)) < STOPPED_S
    assert rank_threads() == []


class SlowDocuments(Documents):
    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.05)
        return super().__getitem__(index)


def test_a_rank_that_is_only_just_starting_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has no identity yet cannot be interrupted."""
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        if thread.name != "rank 1":
            return start(thread)
        threading.Timer(0.1, start, (thread,)).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        run_ranks({"dp": 2}, computing)
    time.sleep(0.5)
    assert rank_threads() == []


def one_rank(**changes: Any) -> Any:
    """The graph of a single rank, to be looked at on the main thread."""
    return run_ranks({"dp": 1}, lambda mesh: Scene(**changes).graph(mesh))[0]


def test_an_interrupted_look_leaves_the_graph_where_it_stood() -> None:
    graph = one_rank(depth=0, dataset=SlowDocuments())
    first = peek(graph, after="WindowSampler").keys
    assert interrupted(lambda: peek(graph, after="Collator"), after_s=0.2) < STOPPED_S
    assert peek(graph, after="Collator").step == 0
    assert peek(graph, after="WindowSampler").keys == first


class StuckDocuments(Documents):
    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(20)
        return super().__getitem__(index)


def test_a_look_does_not_wait_for_a_read_that_is_stuck_in_a_thread() -> None:
    graph = one_rank(depth=1, dataset=StuckDocuments())
    assert interrupted(lambda: peek(graph, after="HostPrefetcher")) < STOPPED_S
    with pytest.raises(RuntimeError, match="reading ahead in a thread"):
        peek(graph, after="Planner")


def test_external_steps_can_be_looked_at() -> None:
    """Their rounds are taken ahead, which is no thread."""
    reader = ExternalStepReader([[[1], [2]], [[3], [4]]], local_batch_size=2)
    first = peek(reader, after="ExternalStepReader")
    assert first.samples == (1, 2)
    assert peek(reader, after="ExternalStepReader").samples == (1, 2)
