"""What counting costs: a frame of a node, and the frames of a window next to the window itself.

    python -m tests.benchmarks.node_times

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
from tests.scenes import Documents, Scene

CALLS = 200_000


def frame_seconds() -> float:
    """What a ``next`` takes more with a frame around it: the median of several loops."""

    class Counted(Stage[int]):
        def next(self) -> int:
            return 1

    counted = Counted(None)
    plain = Counted.next.__wrapped__  # type: ignore[attr-defined]

    def loop(function: Any) -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            function(counted)
        return (time.perf_counter() - start) / CALLS

    return statistics.median(loop(Counted.next) - loop(plain) for _ in range(7))


def window_seconds(mesh: Any) -> tuple[float, float]:
    """Seconds and frames of a window, in the thread that builds it."""
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
        return stats.elapsed / windows, frames / windows


def main() -> None:
    frame = frame_seconds()
    seconds, frames = run_ranks({"dp": 2}, window_seconds)[0]
    share = frames * frame / seconds
    print(f"a frame takes {frame * 1e6:.2f} µs; a window of {seconds * 1e3:.2f} ms has {frames:.0f}: {share:.3%} of it")


if __name__ == "__main__":
    main()
