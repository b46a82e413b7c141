"""What a checkpoint says of itself: where the run stands and which samples come next, without the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import graphs.inspect as program
from graphs.saved_state import position_of, read_checkpoint, upcoming
from hp_nodes.samplers import BlendedBatchSampler, DistributedBatchSampler
from hp_nodes.state import LoaderState
from hp_nodes.transport import run_ranks
from tests.saved_states import blended, deliver, path_of, shuffled, whole_records

ROOT = Path(__file__).parents[2]
Output = pytest.CaptureFixture[str]


def state_after(micro_batches: int, make: Any = shuffled, ranks: int = 2) -> tuple[dict[str, str], list[Any]]:
    """A state, and the records of each later step of two as (epoch, step, sorted records)."""

    def run(mesh: Any) -> tuple[Any, list[Any]]:
        with make(mesh) as loader:
            deliver(loader, micro_batches)
            state, found = loader.state_dict(), []
            while len(found) < 8:
                for batch in loader:
                    found.append((loader.last.epoch, loader.last.step, batch))
            return state, found[:8]

    results = run_ranks({"dp": ranks}, run)
    steps: dict[tuple[int, int], list[int]] = {}
    for _, found in results:
        for epoch, step, batch in found:
            steps.setdefault((epoch, step), []).extend(batch)
    return results[0][0], [(*place, sorted(records)) for place, records in steps.items()]


def pages(capsys: Output, *arguments: str | Path) -> tuple[int, str]:
    code = program.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize("make", [shuffled, blended])
@pytest.mark.parametrize("micro_batches", [0, 4, 12, 14])
def test_what_comes_next_is_what_comes_next(make: Any, micro_batches: int) -> None:
    """For any number of ranks, over the end of an epoch too."""
    state, following = state_after(micro_batches, make)
    told = LoaderState.from_text(state["hp_nodes"])
    for ranks, micro in ((1, None), (2, 2), (4, 1), (8, None)):
        steps = upcoming(told, ranks, steps=len(following), micro_batch_size=micro)
        shares = [(e, s, sorted(i for rank in held for part in rank for i in part)) for e, s, held in steps]
        assert shares == following
    exact = upcoming(told, 2, micro_batch_size=2)[0]
    sampler = DistributedBatchSampler(50, 2, 8, 1, 2, order="shuffle")
    if make is shuffled:
        sampler.load_state_dict({"epoch": exact[0], "consumed_samples": 8 * exact[1]})
        running = iter(sampler)
        assert exact[2][1] == [next(running), next(running)]


def test_a_layout_that_cannot_divide_the_global_batch_says_which_could() -> None:
    state, _ = state_after(4)
    with pytest.raises(ValueError, match="8 can be divided with .*ranks"):
        upcoming(LoaderState.from_text(state["hp_nodes"]), 3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run in every form, and a later one."""
    directory = tmp_path_factory.mktemp("checkpoints")
    state, _ = state_after(4)
    later, _ = state_after(6)
    found = {name: directory / name for name in ("dcp", "torch.pt", "text.json", "inner.json", "later.pt")}
    weights = {"weight": torch.ones(3)}
    dcp.save({"model": weights, "values": {"loader": state}}, checkpoint_id=found["dcp"], no_dist=True)
    torch.save({"model": weights, "values": {"loader": state}}, found["torch.pt"])
    found["text.json"].write_text(json.dumps(state))
    found["inner.json"].write_text(state["hp_nodes"])
    torch.save({"model": weights, "values": {"loader": later}}, found["later.pt"])
    return found


@pytest.mark.parametrize("form", ["dcp", "torch.pt", "text.json", "inner.json"])
def test_every_form_of_a_checkpoint(form: str, checkpoints: dict[str, Path], capsys: Output) -> None:
    named = "values.loader" if form in ("dcp", "torch.pt") else ""
    (leaves,) = read_checkpoint(checkpoints[form]).values()
    assert list(read_checkpoint(checkpoints[form])) == [named]
    position = position_of(LoaderState.from_text(leaves["hp_nodes"]))
    assert position is not None
    assert (position.epoch, position.step, position.steps, position.consumed) == (0, 2, 6, 16)
    code, text = pages(capsys, checkpoints[form], "--ranks", "2", "--micro-batch-size", "2", "--steps", "1")
    assert code == 0
    for line in ("epoch ", "2 of 6", "16 of 50", "dataset_length ", "sampler.order ", "epoch 0 step 2  rank 1"):
        assert line in text


def test_a_loader_can_be_restored_from_what_was_read(checkpoints: dict[str, Path]) -> None:
    state = read_checkpoint(checkpoints["dcp"])["values.loader"]

    def run(mesh: Any) -> int:
        with shuffled(mesh) as loader:
            loader.load_state_dict(state)
            next(loader)
            return loader.last.step

    assert run_ranks({"dp": 4}, run) == [2] * 4


def test_difference(checkpoints: dict[str, Path], capsys: Output) -> None:
    assert pages(capsys, "--diff", checkpoints["dcp"], checkpoints["torch.pt"]) == (0, "no difference\n")
    code, text = pages(capsys, "--diff", checkpoints["dcp"], checkpoints["later.pt"])
    assert code == 1
    assert text == "values.loader.hp_nodes nodes.WindowSampler.consumed_samples: 16 -> 24\n"


def test_a_mapped_order_shows_places_and_other_orders_say_why_not(capsys: Output, tmp_path: Path) -> None:
    def saved(sampler: Any, size: int) -> Path:
        def run(mesh: Any) -> Any:
            with whole_records(mesh, sampler, size) as loader:
                return loader.state_dict()

        path = tmp_path / f"{type(sampler).__name__}.json"
        path.write_text(json.dumps(run_ranks({"dp": 1}, run)[0]))
        return path

    mapped = saved(DistributedBatchSampler(6, 2, 2, 0, 1, index_mapping=lambda place: 5 - place), 6)
    assert "places, before the index mapping" in pages(capsys, mapped)[1]
    many = saved(BlendedBatchSampler([4] * 20, [1] * 20, 2, 2, 0, 1), 80)
    assert "BlendedBatchSampler cannot be computed from a checkpoint" in pages(capsys, many)[1]


def test_states_of_ranks_are_shown_one_by_one(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(json.loads(path_of("users_nodes", 1).read_text())["state"]))
    code, text = pages(capsys, path)
    assert code == 0
    assert "hp_nodes_rank_0" in text
    assert "hp_nodes_rank_1" in text
    assert "next on 2 ranks" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"not a checkpoint", "neither JSON nor a file of torch.save"),
        (b'{"model": 1}', "has no state of a loader"),
        (b'{"hp_nodes": "{}"}', "it needs version, fingerprint and nodes"),
    ],
)
def test_what_is_no_checkpoint(content: bytes | None, message: str, capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    code, text = pages(capsys, path)
    assert code == 2
    assert message in text
    code, text = pages(capsys, tmp_path if content is not None else tmp_path / "nowhere")
    assert code == 2


def test_the_module_does_not_stand_in_for_pythons_own() -> None:
    """A program of this directory that is started as a file has the directory first on its path."""
    code = "import inspect, sys; print(inspect.signature(lambda a: 0), inspect.__name__, 'graphs' in inspect.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "graphs")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["(a)", "inspect", "False"]
