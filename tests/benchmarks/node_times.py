"""What counting costs: a frame of a node, and the frames of a window next to the window itself.

    python -m tests.benchmarks.node_times [--quick]

Windows are as small as they get in practice (8 rounds of short records, nothing to read from), so the share is the
largest one that a user meets.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from hp_nodes.nodes.graph import all_nodes
from hp_nodes.nodes.stage import Stage
from hp_nodes.transport import run_ranks
from tests.benchmarks.record import Row, interleaved, run_alone
from tests.scenes import Documents, Scene

CALLS = 200_000
COMMAND = "python -m tests.benchmarks.node_times"


def calls_microseconds(calls: int, repeats: int) -> tuple[list[float], list[float]]:
    """Of a ``next`` with a frame around it, and of the same one without."""

    class Counted(Stage[int]):
        def next(self) -> int:
            return 1

    counted = Counted(None)
    plain = Counted.next.__wrapped__  # type: ignore[attr-defined]

    def loop(function: Any) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function(counted)
        return 1e6 * (time.perf_counter() - start) / calls

    taken = interleaved({"framed": lambda: loop(Counted.next), "plain": lambda: loop(plain)}, repeats)
    return taken["framed"], taken["plain"]


def window_milliseconds(mesh: Any) -> tuple[float, float]:
    """Milliseconds and frames of a window, in the thread that builds it."""
    scene = Scene(dataset=Documents(40 * 64), global_batch=64, window=8, micro=4, depth=1, split=True)
    with scene.loader(mesh) as loader:
        batches = iter(loader)
        for _ in range(16):
            next(batches)
        nodes = [node for node in all_nodes(loader.graph) if isinstance(node, Stage)]
        frames = sum(node.times.items for node in nodes)
        start = loader.stats()
        for _ in range(160):
            next(batches)
        stats = loader.stats().since(start)
        frames = sum(node.times.items for node in nodes) - frames
        windows = stats.nodes[0].items
        return 1e3 * stats.elapsed / windows, frames / windows


def measure(arguments: list[str]) -> list[Row]:
    quick = "--quick" in arguments
    framed, plain = calls_microseconds(CALLS // 10 if quick else CALLS, 3 if quick else 7)
    frame = statistics.median(one - other for one, other in zip(framed, plain, strict=True))
    windows = [run_ranks({"dp": 2}, window_milliseconds)[0] for _ in range(1 if quick else 3)]
    shares = [100 * frames * frame / (1e3 * milliseconds) for milliseconds, frames in windows]
    return [
        Row.of(
            "a node's next, counted",
            "µs",
            framed,
            baseline="the same next, not counted",
            baseline_values=plain,
            command=COMMAND,
        ),
        Row.of("share of a small window that is counting", "%", shares, command=COMMAND),
    ]


if __name__ == "__main__":
    run_alone(measure)
