"""The ready-made graph on real processes: the same as on virtual ranks, and nothing hangs when something goes wrong."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DataPlaneError, DistributedDataLoader, SampleMetadata
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import run_ranks
from tests.distributed.ranks import RankPool
from tests.scenes import Documents, halves, pickled, rest

DP2 = {"dp": 2}
DP2_TP2 = {"dp": 2, "tp": 2}
SIZE = 48
BAD = 21


class Broken(Documents):
    """Record 21 cannot be read."""

    def __init__(self, kind: type[BaseException], *arguments: Any) -> None:
        super().__init__(SIZE)
        self.kind = kind
        self.arguments = arguments

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == BAD:
            raise self.kind(*self.arguments)
        return super().__getitem__(index)


def count_tokens(sample: Any) -> SampleMetadata:
    return SampleMetadata(len(sample))


def pack(samples: Any, seq_len: int) -> tuple[Any, ...]:
    return tuple(samples)


def real_mesh(shape: dict[str, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def build(mesh: Any, dataset: Any = None, order: str = "shuffle", workers: int = 0, **given: Any) -> Any:
    """A loader of split documents: 3 steps of 4 or 8 rounds."""
    arguments = {name: given.pop(name) for name in ("collate_fn",) if name in given}
    config = DistributedDatasetConfig(64, 2, **{"balance_window_size": 2, "timeout_s": 20.0, **given})
    dataset = dataset if dataset is not None else Documents(SIZE)
    return build_distributed_dataloader(
        dataset,
        mesh,
        config,
        batch_sampler=DistributedBatchSampler(
            len(dataset), 2, 16, mesh.get_local_rank("dp"), mesh.size(0), order=order, seed=7
        ),
        metadata_fn=count_tokens,
        cost_model=CausalAttentionCostModel(),
        split_fn=halves,
        pack_fn=pack,
        dataloader_kwargs={"num_workers": workers},
        **arguments,
    )


def our_threads() -> list[str]:
    """Threads of the data plane that are still there after a moment."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        gc.collect()
        left = [thread.name for thread in threading.enumerate() if "Prefetcher" in thread.name]
        if not left:
            return []
        time.sleep(0.05)
    return left


# ---- the same as virtual ranks


def deliver(mesh: Any) -> list[Any]:
    """Two epochs, positions and a state in the middle included."""
    with build(mesh) as loader:
        first = rest(loader, 5)
        state = loader.state_dict()
        first += rest(loader)
        return [first, state, rest(loader), loader.state_dict(), loader.last.positions]


def _deliver(shape: dict[str, int]) -> list[Any]:
    return deliver(real_mesh(shape))


def test_delivery_on_two_ranks_is_that_of_virtual_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(_deliver, DP2) == run_ranks(DP2, deliver)


def test_delivery_on_two_by_two_ranks_is_that_of_virtual_ranks(four_ranks: RankPool) -> None:
    assert four_ranks.run(_deliver, DP2_TP2) == run_ranks(DP2_TP2, deliver)


# ---- resume


def _resume(shape: dict[str, int], positions: tuple[int, ...]) -> None:
    mesh = real_mesh(shape)
    with build(mesh) as loader:
        states, whole = [pickled(loader.state_dict())], []
        for batch in loader:
            whole.append((loader.last.epoch, loader.last.step, loader.last.round, [list(map(list, b)) for b in batch]))
            states.append(pickled(loader.state_dict()))
    for position in positions:
        with build(mesh, host_prefetch_depth=position % 3) as loader:
            loader.load_state_dict(states[position])
            assert loader.state_dict() == states[position]
            steps_done = sum(1 for place in whole[:position] if place[1] < whole[min(position, len(whole) - 1)][1])
            if position == len(whole):
                steps_done = len(whole)
            found = [(place[0], place[1], place[2]) for place in rest(loader)]
            if position < len(whole):
                assert found == [place[:3] for place in whole[steps_done:]]
            else:
                assert found[0] == (1, 0, 0)


def test_resume_on_two_ranks(two_ranks: RankPool) -> None:
    two_ranks.run(_resume, DP2, (0, 6, 12))


def test_resume_on_two_by_two_ranks(four_ranks: RankPool) -> None:
    four_ranks.run(_resume, DP2_TP2, (3, 8))


# ---- one error everywhere


def bad_collate(bins: Any) -> Any:
    if any((sequence == BAD).any() for packed in bins for sequence in packed):
        raise ValueError("cannot collate this")
    return tuple(bins)


FAILURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "read": ({"dataset": Broken(OSError, "disk gone")}, "SampleReader", "OSError: disk gone"),
    "read in a worker": ({"dataset": Broken(OSError, "disk gone"), "workers": 1}, "SampleReader", "disk gone"),
    "exit": ({"dataset": Broken(SystemExit, 3)}, "SampleReader", "SystemExit: 3"),
    "collate": ({"collate_fn": bad_collate}, "Collator", "cannot collate this"),
}


def _fail(name: str, shape: dict[str, int], depth: int) -> tuple[int, str, str | None]:
    count = 0
    loader = build(real_mesh(shape), order="sequential", host_prefetch_depth=depth, **FAILURES[name][0])
    before = time.monotonic()
    with pytest.raises(DataPlaneError) as caught:  # noqa: PT012  the place where it comes is what matters
        for _ in loader:
            count += 1
    with pytest.raises(DataPlaneError) as second:
        next(loader)
    assert str(second.value) == str(caught.value)
    loader.close(caught.value)
    assert time.monotonic() - before < 10
    assert our_threads() == []
    return count, str(caught.value), caught.value.node


@pytest.mark.parametrize("name", FAILURES)
def test_one_error_on_two_ranks(two_ranks: RankPool, name: str) -> None:
    results = two_ranks.run(_fail, name, DP2, 1)
    check_failure(results, name)


@pytest.mark.parametrize("name", ["read", "collate"])
def test_one_error_on_two_by_two_ranks(four_ranks: RankPool, name: str) -> None:
    check_failure(four_ranks.run(_fail, name, DP2_TP2, 0), name)


def check_failure(results: list[Any], name: str) -> None:
    counts, texts, nodes = zip(*results, strict=True)
    assert len(set(counts)) == 1
    assert len(set(texts)) == 1
    assert set(nodes) == {FAILURES[name][1]}
    assert FAILURES[name][2] in texts[0]


# ---- ends


def _close_often(times: int, size: int) -> float:
    mesh = real_mesh({"dp": size})
    before = time.monotonic()
    for number in range(times):
        loader = build(mesh, host_prefetch_depth=number % 4)
        for _ in range(number % 6):
            next(loader)
        loader.close()
        assert not [thread.name for thread in threading.enumerate() if "Prefetcher" in thread.name]
    return time.monotonic() - before


def test_close_after_equal_consumption(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_close_often, 50, 2)) < 30


def _break(shape: dict[str, int]) -> list[str]:
    mesh = real_mesh(shape)
    for _ in range(5):
        for batch in build(mesh, host_prefetch_depth=2):
            del batch
            break
        gc.collect()
    return our_threads()


def test_break_and_collect(two_ranks: RankPool) -> None:
    assert two_ranks.run(_break, DP2) == [[], []]


def _raise_in_the_loop(shape: dict[str, int], culprit: int) -> tuple[str, float]:
    before = time.monotonic()
    try:
        with build(real_mesh(shape), host_prefetch_depth=1, timeout_s=60.0) as loader:
            for count, _ in enumerate(loader):
                if dist.get_rank() == culprit and count == 3:
                    raise FloatingPointError("loss is NaN")
    except (FloatingPointError, DataPlaneError) as error:
        assert our_threads() == []
        return f"{type(error).__name__}: {error}", time.monotonic() - before
    return "no error", 0.0


def test_an_error_in_one_ranks_loop_reaches_the_other(two_ranks: RankPool) -> None:
    results = two_ranks.run(_raise_in_the_loop, DP2, 1)
    assert results[1][0] == "FloatingPointError: loss is NaN"
    assert "rank 1" in results[0][0] and "closed" in results[0][0]
    assert max(seconds for _, seconds in results) < 12


@pytest.mark.parametrize("culprit", [0, 3])
def test_an_error_in_one_ranks_loop_reaches_constructors_and_peers(four_ranks: RankPool, culprit: int) -> None:
    results = four_ranks.run(_raise_in_the_loop, DP2_TP2, culprit)
    for rank, (text, seconds) in enumerate(results):
        assert text.startswith("FloatingPointError" if rank == culprit else "DataPlaneError")
        assert seconds < 12


# ---- beside the trainer


def _train(shape: dict[str, int]) -> list[int]:
    """The trainer all-reduces in each round on the default group while the data plane works on its own."""
    mesh = real_mesh(shape)
    totals = []
    with build(mesh, host_prefetch_depth=2, workers=1) as train, build(mesh) as evaluation:
        for _ in train:
            tokens = torch.tensor([train.last.num_tokens])
            dist.all_reduce(tokens)
            totals.append(int(tokens))
            if train.last.ends_step:
                for _ in evaluation:
                    seen = torch.tensor([evaluation.last.num_tokens])
                    dist.all_reduce(seen)
    return totals


def test_trainer_and_two_loaders_side_by_side(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_train, DP2)
    assert first == second
    assert sum(first) == int(Documents(SIZE).lengths.sum())


def _rebuild_while_the_first_is_abandoned() -> list[Any]:
    mesh = real_mesh(DP2)
    abandoned: list[DistributedDataLoader] = []
    for count in range(3):
        loader = build(mesh, host_prefetch_depth=2)
        rest(loader, count)
        abandoned.append(loader)
    with build(mesh) as loader:
        found = rest(loader)
    del abandoned
    gc.collect()
    assert our_threads() == []
    return found


def test_a_loader_beside_abandoned_ones(two_ranks: RankPool) -> None:
    expected = run_ranks(DP2, lambda mesh: rest(build(mesh)))
    assert two_ranks.run(_rebuild_while_the_first_is_abandoned) == expected
