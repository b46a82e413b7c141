"""Control-C inside an exchange, in a process that lives on: the other rank hears of it when it comes there."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from hp_nodes import DataPlaneError
from tests.distributed.ranks import RankPool
from tests.distributed.test_faults import inventory as held_here
from tests.distributed.test_faults import left_since, mesh
from tests.distributed.test_graph_on_gloo import SIZE, build
from tests.scenes import Documents

SLOW_S = 3.0


class Slow(Documents):
    """Record 22, which rank 1 reads."""

    def __init__(self) -> None:
        super().__init__(SIZE)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 22:
            assert dist.get_rank() == 1
            time.sleep(SLOW_S)
        return super().__getitem__(index)


def _interrupted(close: bool) -> tuple[str, float, list[str]]:
    """Rank 0 waits in an exchange for rank 1, which reads for seconds; then Control-C is pressed on rank 0 alone.

    Returns:
        What was raised here, the seconds from the window before until then, and what is left.
    """
    before = held_here()
    first = dist.get_rank() == 0
    loader = build(mesh(), Slow(), order="sequential", host_prefetch_depth=0, timeout_s=60.0)
    start, seconds = time.monotonic(), 0.0
    try:
        for batch in loader:
            del batch
            if loader.last.ends_step and loader.last.step == 0:  # record 22 is in the next window
                start = time.monotonic()
                if first:
                    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
                    signal.setitimer(signal.ITIMER_REAL, SLOW_S / 2)
        raised = "nothing"
    except (KeyboardInterrupt, DataPlaneError) as error:
        raised = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        if close or not first:
            loader.close(error)
    if first:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        time.sleep(SLOW_S)  # the process lives on
        if not close:
            with pytest.raises(RuntimeError, match="interrupted"):
                next(loader)
        loader.close()
    del loader
    left = left_since(before)
    with build(mesh()) as again:  # the default group is as good as before
        assert len(list(again)) == 12
    return raised, seconds, left


@pytest.mark.parametrize("close", [True, False], ids=["closed", "left open"])
def test_the_other_rank_gets_an_error_when_it_comes_to_the_exchange(two_ranks: RankPool, close: bool) -> None:
    (first, soon, left), (second, later, left_there) = two_ranks.run(_interrupted, close)
    assert first.startswith("KeyboardInterrupt")
    assert soon < SLOW_S
    assert second.startswith("DataPlaneError")
    assert "broke" in second
    assert later < SLOW_S + 5
    assert left == left_there == []
