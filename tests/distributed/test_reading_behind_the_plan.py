"""Planned before it is read, over real processes: a reader that fails on one rank is the same error on both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from tests.distributed.ranks import RankPool
from tests.distributed.test_faults import inventory, left_since
from tests.distributed.test_graph_on_gloo import real_mesh
from tests.nodes.test_reading_behind_the_plan import WINDOWS, Case, Ended, check, consume

CASES = [Case(kind, window, workers) for kind in ("killed", "raises") for window in WINDOWS for workers in (1, 2)]


def _at_once(cases: list[Case]) -> tuple[list[Ended], list[str]]:
    """Groups are made one after the other; then each loader has a consumer of its own."""
    before = inventory()
    mesh = real_mesh({"dp": dist.get_world_size()})
    loaders = [case.loader(mesh) for case in cases]
    with ThreadPoolExecutor(len(loaders)) as consumers:
        ended = list(consumers.map(consume, loaders))
    del loaders
    return ended, left_since(before)


def test_one_rank_fails_and_both_say_so(two_ranks: RankPool) -> None:
    told, left = zip(*two_ranks.run(_at_once, CASES, timeout_s=90), strict=True)
    for case, *ended in zip(CASES, *told, strict=True):
        check(case, ended)
    assert left == ([], [])


def _on_the_main_thread(case: Case) -> tuple[Ended, list[str]]:
    before = inventory()
    loader = case.loader(real_mesh({"dp": dist.get_world_size()}))
    ended = consume(loader)
    del loader
    return ended, left_since(before)


def test_readers_started_by_the_main_thread_do_not_raise_in_an_exchange(two_ranks: RankPool) -> None:
    """Nothing is built ahead here, so the main thread reads and exchanges itself when a worker of its own dies."""
    case = Case("killed", "middle", 2, depth=0)
    ended, left = zip(*two_ranks.run(_on_the_main_thread, case), strict=True)
    check(case, list(ended))
    assert left == ([], [])
