"""Real ranks: checkpoints of torch.distributed, and runs that are killed and lose nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from graphs.saved_state import read_checkpoint
from hp_nodes.transport import DataTopology, create_transport, rendezvous, run_ranks
from tests.distributed.ranks import RankPool
from tests.distributed.training import GLOBAL_BATCH, SIZE, train
from tests.graphs.ranks import Ranks
from tests.reference_order import step_records
from tests.scenes import Scene, rest
from tests.test_rank_state import Counter, Shared
from tests.test_state import contents, loader_of

STEPS_OF_EPOCH = SIZE // GLOBAL_BATCH


def mesh_of(**shape: int) -> Any:
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def _rest_of(loader: Any) -> list[tuple[int, int, list[int]]]:
    found = []
    for batch in loader:
        found.append((loader.last.epoch, loader.last.step, contents(batch)))
    return found


def _save(path: Path, shape: dict[str, int]) -> list[Any]:
    """Save by both ways behind the first step, the second while the loader goes on."""
    with loader_of(mesh_of(**shape)) as loader:
        while not (next(loader) and loader.last.ends_step):
            pass
        dcp.save({"model": {"weight": torch.arange(4)}, "loader": loader}, checkpoint_id=path / "sync")
        saving = dcp.async_save({"model": {"weight": torch.arange(4)}, "loader": loader}, checkpoint_id=path / "async")
        going_on = next(loader)
        saving.result()
        return going_on


def _load(path: Path, shape: dict[str, int]) -> Any:
    with loader_of(mesh_of(**shape)) as loader:
        weight = torch.zeros(4, dtype=torch.int64)
        dcp.load({"model": {"weight": weight}, "loader": loader}, checkpoint_id=path)
        assert weight.tolist() == [0, 1, 2, 3]
        return loader.state_dict(), loader.last, _rest_of(loader)


@pytest.mark.parametrize("saved", [{"dp": 2}, {"dp": 1, "tp": 2}])
def test_distributed_checkpoints_on_another_number_of_data_ranks(
    two_ranks: RankPool, tmp_path: Path, saved: dict[str, int]
) -> None:
    two_ranks.run(_save, tmp_path, saved)
    assert read_checkpoint(tmp_path / "sync") == read_checkpoint(tmp_path / "async")
    for way in ("sync", "async"):
        for wanted in ({"dp": 2}, {"dp": 1, "tp": 2}):
            results = two_ranks.run(_load, tmp_path / way, wanted)
            assert results[0][0] == results[1][0]
            of_data_ranks = results if "tp" not in wanted else results[:1]
            for step in (1, 2):
                held = [r for _, _, found in of_data_ranks for _, s, records in found if s == step for r in records]
                assert sorted(held) == sorted(step_records(step, 16, 52, 3, 0))
            if "tp" in wanted:
                assert results[0][2] == results[1][2]


def _save_own(path: Path, kind: type[Counter]) -> dict[str, str]:
    with Scene(insert={"Collator": kind}).loader(mesh_of(dp=2)) as loader:
        for _ in range(4):
            next(loader)
        dcp.save({"loader": loader}, checkpoint_id=path)
        return loader.state_dict()


def _load_own(path: Path, kind: type[Counter]) -> list[Any]:
    with Scene(insert={"Collator": kind}).loader(mesh_of(dp=2)) as loader:
        dcp.load({"loader": loader}, checkpoint_id=path)
        return [loader.state_dict(), len(rest(loader))]


def test_state_of_a_ranks_own_has_a_leaf_each_and_can_be_dealt_anew(two_ranks: RankPool, tmp_path: Path) -> None:
    states = two_ranks.run(_save_own, tmp_path, Shared)
    leaves = {key: text for state in states for key, text in state.items()}
    assert read_checkpoint(tmp_path) == {"loader": leaves}
    assert sorted(leaves) == ["hp_nodes_rank_0", "hp_nodes_rank_1"]
    for state, (restored, left) in zip(states, two_ranks.run(_load_own, tmp_path, Shared), strict=True):
        assert restored == state
        assert left == 8

    def alone(mesh: Any) -> int:
        with Scene(insert={"Collator": Shared}).loader(mesh) as loader:
            loader.load_state_dict(read_checkpoint(tmp_path)["loader"])
            assert json.loads(loader.state_dict()["hp_nodes"])["nodes"]["Shared"]["count"] == 8
            return len(rest(loader))

    assert run_ranks({"dp": 1}, alone) == [16]


def _as_a_new_process() -> list[list[int]]:
    """Groups made where processes of the past made the same ones, one of which died while it did."""
    topology = DataTopology.from_mesh(mesh_of(dp=2))
    store = rendezvous.c10d._get_default_store()
    found = []
    for left_behind in (False, True, True):
        rendezvous._made.clear()  # a process that torchrun started anew counts from the beginning
        if left_behind and topology.data_rank == 0:
            store.set("hp_nodes/0-1/0/1", "a token of a process that is gone")
        torch.distributed.barrier()
        transport = create_transport(topology, timeout_s=10)
        found.append(transport.all_gather(np.array([topology.data_rank], np.uint8), "test").ravel().tolist())
        transport.close()
    return found


def test_groups_in_a_store_that_outlived_its_processes(two_ranks: RankPool) -> None:
    assert two_ranks.run(_as_a_new_process) == [[[0, 1]] * 3] * 2


# ---- killed


def given(directory: Path) -> dict[int, list[list[int]]]:
    """step → what each attempt of each rank was given; the last line of a killed one may be broken."""
    found: dict[int, list[list[int]]] = {}
    for path in directory.glob("given_*.jsonl"):
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            step, records = json.loads(line)
            found.setdefault(step, []).append(records)
    return found


def check_run(directory: Path, steps: int) -> None:
    """The run's result, and that every step, however often it was begun, was made of the records it must have."""
    wanted = [
        step_records(step % STEPS_OF_EPOCH, GLOBAL_BATCH, SIZE, 0, step // STEPS_OF_EPOCH) for step in range(steps)
    ]
    assert int((directory / "result").read_text()) == sum(record for records in wanted for record in records)
    found = given(directory)
    assert sorted(found) == list(range(steps))
    for step, shares in found.items():
        assert {record for share in shares for record in share} == set(wanted[step]), step


def wait_for_step(directory: Path, step: int, attempts: int, alive: Any) -> list[int]:
    """Process ids of the newest attempt, once ``attempts`` of two ranks each have begun and a step is done."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pids = sorted(directory.glob("pid_*"))
        if len(pids) >= 2 * attempts and max(given(directory), default=-1) >= step:
            newest = [int(path.read_text() or 0) for path in pids[-2:]]
            if all(newest):
                return newest
        assert alive() is None, "the run ended before it was killed"
        time.sleep(0.01)
    raise AssertionError("the run did not get so far within 60 s")


def test_torchrun_restarts_a_job_whose_rank_was_killed(tmp_path: Path) -> None:
    steps, generator = 26, random.Random()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", "-m", "tests.distributed.training"]
    with open(tmp_path / "output", "wb") as output:
        # torchrun keeps its store over restarts, and torch 2.13 then meets addresses of dead processes in it, so that
        # connecting its own groups may fail. With a store of its own each attempt is as good as new.
        ours = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = {**os.environ, **ours, "PYTHONPATH": os.pathsep.join(sys.path)}
        job = subprocess.Popen([*command, str(tmp_path), str(steps)], stdout=output, stderr=output, env=environment)
        try:
            pids = wait_for_step(tmp_path, generator.randint(2, 18), 1, job.poll)
            time.sleep(generator.uniform(0, 0.05))
            os.kill(generator.choice(pids), signal.SIGKILL)
            assert job.wait(60) == 0, (tmp_path / "output").read_text()
        finally:
            job.terminate()
            job.wait(20)
    assert len(list(tmp_path.glob("pid_*"))) >= 4
    check_run(tmp_path, steps)


def test_a_rank_killed_at_a_random_moment_and_resumed_on_another_number(tmp_path: Path) -> None:
    steps, generator = 20, random.Random()
    with Ranks(2, tmp_path / "output", train, tmp_path, steps) as ranks:
        wait_for_step(tmp_path, generator.randint(2, 14), 1, lambda: None)
        time.sleep(generator.uniform(0, 0.05))
        ranks.processes[generator.randint(0, 1)].kill()
    assert not (tmp_path / "result").exists()
    with Ranks(1, tmp_path / "output", train, tmp_path, steps) as ranks:
        ranks.wait()
    check_run(tmp_path, steps)
