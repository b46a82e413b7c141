"""What breaks on one rank ends all of them soon, with a reason; what is merely slow ends nobody; nothing is left.

Ranks are processes over Gloo. Moments are compared across processes: the monotonic clock of Linux is the machine's.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DataPlaneError
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from tests.distributed.ranks import RankPool
from tests.distributed.test_graph_on_gloo import BAD, SIZE, build, real_mesh
from tests.scenes import Documents, count_tokens

LIMIT_S = 4.0
"""Time limit of the loaders that shall meet it; making a group of four takes seconds on a busy machine."""


class Moments:
    """When something happened on some rank: files of one folder, written by any process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, name: str) -> None:
        (self.folder / name).write_text(repr(time.monotonic()))

    def since(self, name: str) -> float:
        return time.monotonic() - float((self.folder / name).read_text())


class Acting(Documents):
    """Record 21 does something first."""

    def __init__(self, act: Callable[..., None], *arguments: Any) -> None:
        super().__init__(SIZE)
        self.act = partial(act, *arguments)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == BAD:
            self.act()
        return super().__getitem__(index)


def fail(moments: Moments) -> None:
    moments.note("failed")
    raise OSError("disk gone")


def die(moments: Moments) -> None:
    moments.note("died")
    os.kill(os.getpid(), signal.SIGKILL)


def mesh() -> Any:
    return real_mesh({"dp": dist.get_world_size()})


def consume_until_it_fails(loader: Any, moments: Moments, name: str) -> tuple[float, str]:
    """Seconds from ``name`` to the error, and its text. The error comes again at every further ``next``."""
    with pytest.raises(DataPlaneError) as caught:  # noqa: PT012
        for batch in loader:
            del batch
    seconds = moments.since(name)
    with pytest.raises(DataPlaneError):
        next(loader)
    loader.close(caught.value)
    return seconds, str(caught.value)


# ---- a rank is lost


def _lose(victim: int, how: int, limit_s: float, moments: Moments) -> tuple[float, str, list[str]]:
    """The victim's process gets a signal in the middle of its loop, while its background thread works."""
    before = inventory()
    loader = build(mesh(), timeout_s=limit_s, host_prefetch_depth=1)
    if dist.get_rank() == victim:
        for count, _ in enumerate(loader):
            if count == 2:
                moments.note("lost")
                os.kill(os.getpid(), how)
    seconds, text = consume_until_it_fails(loader, moments, "lost")
    del loader
    # Gloo waits for a stopped peer even while it is being destroyed: connections to it stay as long as the process.
    return seconds, text, left_since(before, "open files" if how == signal.SIGSTOP else "")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_ends_the_others_at_once(size: int, how: int, tmp_path: Path) -> None:
    pool = RankPool(size)
    results = pool.run(_lose, 1, how, 60.0, Moments(tmp_path), lost=[1])
    others = [result for result in results if result is not None]
    assert len(others) == size - 1
    for seconds, text, left in others:
        assert seconds < 2
        assert "broke" in text and "epoch 0" in text
        assert left == []
    print(f"killed by {signal.Signals(how).name}, {size} ranks: {max(others)[0]:.2f} s")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_ends_the_others_within_the_limit(victim: int, tmp_path: Path) -> None:
    """Rank 0 holds the store of the default group, which then answers nobody."""
    pool = RankPool(4)
    results = pool.run(_lose, victim, signal.SIGSTOP, LIMIT_S, Moments(tmp_path), lost=[victim])
    for seconds, text, left in (result for result in results if result is not None):
        assert seconds < LIMIT_S + 5
        assert f"did not arrive within {LIMIT_S} s" in text
        assert "epoch 0, step" in text and any(name in text for name in ("node Planner", "node Router", "node Host"))
        if victim:
            assert f"ranks [{victim}] did not arrive" in text
            assert left == []
        else:
            assert "the store of torch.distributed does not answer" in text
    print(f"stopped rank {victim}: {max(result[0] for result in results if result):.2f} s, limit {LIMIT_S} s")


def _stopped_for_a_while(moments: Moments) -> str:
    loader = build(mesh(), timeout_s=LIMIT_S)
    if dist.get_rank() == 1:
        next(loader)
        pid = os.getpid()
        multiprocessing.get_context("fork").Process(target=_continue, args=(pid, 2 * LIMIT_S), daemon=True).start()
        moments.note("lost")
        os.kill(pid, signal.SIGSTOP)
    return consume_until_it_fails(loader, moments, "lost")[1]


def _continue(pid: int, after_s: float) -> None:
    time.sleep(after_s)
    os.kill(pid, signal.SIGCONT)


def test_a_rank_that_comes_back_too_late_gets_an_error_too(tmp_path: Path) -> None:
    texts = RankPool(2).run(_stopped_for_a_while, Moments(tmp_path))
    assert "ranks [1] did not arrive" in texts[0]
    assert "rank" in texts[1]  # it finds the connection closed, or that its own consumer has waited too long


# ---- a rank is slow


def _evaluate_for_long(alone: bool) -> int:
    """Longer than the limit, on all ranks or on one for which the others wait in a collective of the trainer."""
    limit_s = LIMIT_S
    with build(mesh(), timeout_s=limit_s, host_prefetch_depth=2) as loader:
        for count, _ in enumerate(loader):
            if count == 1 and (dist.get_rank() == 1 or not alone):
                time.sleep(1.5 * limit_s)
            dist.barrier()
        return count + 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_rank_that_evaluates_for_long_ends_nobody(two_ranks: RankPool, alone: bool) -> None:
    assert two_ranks.run(_evaluate_for_long, alone) == [12, 12]


# ---- something on a rank fails


def _fail_at_a_read(moments: Moments) -> tuple[float, str]:
    loader = build(mesh(), Acting(fail, moments), order="sequential")
    return consume_until_it_fails(loader, moments, "failed")


def check_failure(results: list[tuple[float, str]], limit_s: float) -> None:
    times, texts = zip(*results, strict=True)
    print(f"{len(results)} ranks: {max(times):.3f} s from the failure to the same error on all")
    assert max(times) <= limit_s
    assert set(texts) == {texts[0]}


def test_a_failure_is_the_same_error_on_two_ranks_within_a_second(two_ranks: RankPool, tmp_path: Path) -> None:
    """CASES 15."""
    results = two_ranks.run(_fail_at_a_read, Moments(tmp_path))
    check_failure(results, 1.0)
    assert "OSError: disk gone" in results[0][1] and "index 21" in results[0][1]


def test_a_failure_is_the_same_error_on_four_ranks_within_a_second(four_ranks: RankPool, tmp_path: Path) -> None:
    check_failure(four_ranks.run(_fail_at_a_read, Moments(tmp_path)), 1.0)


def _kill_a_worker(moments: Moments) -> tuple[float, str, list[str]]:
    before = inventory()
    loader = build(mesh(), Acting(die, moments), order="sequential", workers=2)
    seconds, text = consume_until_it_fails(loader, moments, "died")
    del loader
    return seconds, text, left_since(before)


def test_a_killed_reader_worker_is_named_on_all_ranks_within_six_seconds(two_ranks: RankPool, tmp_path: Path) -> None:
    """CASES 16."""
    results = two_ranks.run(_kill_a_worker, Moments(tmp_path))
    check_failure([result[:2] for result in results], 6.0)
    assert "WorkerDiedError" in results[0][1] and "SIGKILL" in results[0][1]
    assert [left for _, _, left in results] == [[], []]


# ---- the program is told to end


class ToldToEndError(Exception):
    """What a handler for SIGTERM raises."""


def _raise_told_to_end(*_: Any) -> None:
    raise ToldToEndError


def _signalled(number: int, everyone: bool) -> tuple[str, float, list[str]]:
    """A signal while ``next`` waits for a slow dataset."""
    before = inventory()
    if number == signal.SIGTERM:
        signal.signal(number, _raise_told_to_end)
    loader = build(mesh(), Acting(time.sleep, 4), order="sequential", host_prefetch_depth=2, workers=1)
    if everyone or dist.get_rank() == 0:
        # Not a thread: it would be one more to be missed in the inventory.
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), number))
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    start = time.monotonic()
    try:
        with loader:
            for batch in loader:
                del batch  # its tensors are views of shared memory, as long as somebody holds them
        ended = "the end"
    except (KeyboardInterrupt, ToldToEndError, DataPlaneError) as error:
        ended = type(error).__name__
    seconds = time.monotonic() - start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    del loader
    assert left_since(before, "open files") == []
    with build(mesh()) as loader:  # the default group is as good as before; what was left in a hurry is given back now
        assert len(list(loader)) == 12
    del loader
    return ended, seconds, left_since(before)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "ToldToEndError")], ids=["int", "term"]
)
@pytest.mark.parametrize("everyone", [True, False], ids=["all ranks", "one rank"])
def test_a_signal_to_the_program_leaves_nothing(two_ranks: RankPool, number: int, name: str, everyone: bool) -> None:
    results = two_ranks.run(_signalled, number, everyone)
    assert [ended for ended, _, _ in results] == [name, name if everyone else "DataPlaneError"]
    assert max(seconds for _, seconds, _ in results) < 12
    assert [left for _, _, left in results] == [[], []]


def _whole_epoch() -> list[str]:
    before = inventory()
    with build(mesh(), host_prefetch_depth=2, workers=1) as loader:
        assert len(list(loader)) == 12
    del loader
    return left_since(before)


def _destroy_after_an_error(moments: Moments) -> list[str]:
    before = inventory()
    _fail_at_a_read(moments)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return left_since(before)


def test_groups_can_be_destroyed_after_an_error(tmp_path: Path) -> None:
    pool = RankPool(2)
    assert pool.run(_destroy_after_an_error, Moments(tmp_path)) == [[], []]
    pool.kill()


def test_an_epoch_leaves_nothing(two_ranks: RankPool) -> None:
    for _ in range(2):
        assert two_ranks.run(_whole_epoch) == [[], []]


# ---- what is left


def inventory() -> dict[str, set[str]]:
    """What this process holds, as text: threads, child processes, files in shared memory, open files."""
    gc.collect()
    resource_tracker.ensure_running()  # Python's own, one of each for a process that makes others
    forkserver.ensure_running()
    shared = {path.name for path in Path("/dev/shm").iterdir()} if Path("/dev/shm").exists() else set()
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "processes": set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "shared memory": {name for name in shared if f"_{os.getpid()}_" in name},
        "open files": set(_open_files()),
    }


def _open_files() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            yield f"{link.name} {os.readlink(link)}"
        except OSError:
            continue  # the one that lists them


def left_since(before: dict[str, set[str]], but: str = "") -> list[str]:
    """What is here that was not before, ``but`` one kind. What ends in a moment is given a moment."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        now = inventory()
        left = [f"{kind}: {name}" for kind in now if kind != but for name in sorted(now[kind] - before[kind])]
        if not left:
            return []
        time.sleep(0.05)
    return left


# ---- beside the trainer


def _beside_the_trainer(steps: int) -> tuple[int, list[str]]:
    before = inventory()
    total = torch.zeros(1)
    size = dist.get_world_size()
    sampler = DistributedBatchSampler(steps * size, 1, size, dist.get_rank(), size, order="shuffle")
    config = DistributedDatasetConfig(64, 1, host_prefetch_depth=2, timeout_s=60.0)
    with build_distributed_dataloader(
        Documents(steps * size),
        mesh(),
        config,
        batch_sampler=sampler,
        metadata_fn=count_tokens,
        cost_model=CausalAttentionCostModel(),
    ) as loader:
        for _ in loader:
            one = torch.ones(1)
            dist.all_reduce(one)
            total += one
    del loader
    return int(total), left_since(before)


@pytest.mark.parametrize("steps", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_the_trainers_collectives_beside_ours(two_ranks: RankPool, steps: int) -> None:
    assert two_ranks.run(_beside_the_trainer, steps, timeout_s=110) == [(2 * steps, [])] * 2
