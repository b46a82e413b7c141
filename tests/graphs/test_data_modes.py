"""The training program in each mode: the same samples in each step, killed or not, balanced or not, split or not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs.data_modes import MODES, RowMetadata, RowRounds, split_records
from graphs.pretrain import main, parse_arguments
from graphs.saved_state import position_of, read_checkpoint, upcoming
from graphs.text_records import RecordFile, open_or_pack
from graphs.tokenizer import load_tokenizer
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.state import LoaderState
from tests.graphs.pretrain_scene import Run, run_all
from tests.graphs.ranks import Ranks

STEPS = 9
EVERY = 3
STEPS_OF_AN_EPOCH = 7
BATCH = ("--global-batch-size", "16", "--local-batch-size", "2", "--eval-records", "150")
SIZES = ("--heads", "2", "--dtype", "float64", "--steps", str(STEPS), *BATCH)
AS_SAMPLED = "as sampled"
Whole = dict[tuple[str, str], Run]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Uninterrupted runs on two ranks in every mode, balanced and as sampled."""
    directory = tmp_path_factory.mktemp("whole")
    ways = {"balanced": (), AS_SAMPLED: ("--no-balance",)}
    runs = {
        (mode, way): Run(text, directory / f"{mode} {way}", 2, *SIZES, "--mode", mode, *options)
        for mode in MODES
        for way, options in ways.items()
    }
    run_all(list(runs.values()))
    return runs


def test_as_sampled_every_mode_has_the_same_losses_bit_by_bit(whole: Whole) -> None:
    """Rows of the same documents in the same order, whatever read, split, packed and moved them."""
    losses = [whole[mode, AS_SAMPLED].losses() for mode in MODES]
    assert len(losses[0]) == STEPS > STEPS_OF_AN_EPOCH
    assert all(other == losses[0] for other in losses[1:])


@pytest.mark.parametrize("mode", MODES)
def test_balancing_evens_the_ranks_out_and_keeps_the_loss(whole: Whole, mode: str) -> None:
    balanced, sampled = whole[mode, "balanced"], whole[mode, AS_SAMPLED]
    assert list(balanced.losses().values()) == pytest.approx(list(sampled.losses().values()), rel=1e-9, abs=0)
    assert balanced.gradient_norms() == pytest.approx(sampled.gradient_norms(), rel=1e-9, abs=0)
    for one, other in zip(balanced.events("step"), sampled.events("step"), strict=True):
        assert one["label_tokens"] == other["label_tokens"]
        assert one["objective_after"] <= one["objective_before"] == other["objective_after"]
    gained = [event["objective_after"] < event["objective_before"] for event in balanced.events("step")]
    assert any(gained)
    moved = sum(event["bytes_sent"] for event in balanced.events("step"))
    assert (moved == 0) == (mode == "metadata")  # there each row is read where it is trained on


def test_costs_known_beforehand_and_costs_of_what_was_read_make_the_same_plans(whole: Whole) -> None:
    known, read = (whole[mode, "balanced"] for mode in ("metadata", "online"))
    assert known.losses() == read.losses()
    plans = [[event["loads_after"] for event in run.events("step")] for run in (known, read)]
    assert plans[0] == plans[1]


def kill(run: Run, moment: random.Random, behind: int = EVERY) -> None:
    """Start it, and send SIGKILL to its ranks one to three steps behind its next ``behind``."""
    with run.start() as running:
        run.await_steps(len(run.events("step")) + behind + moment.randint(1, 3))
        time.sleep(moment.uniform(0, 0.03))
        running.kill()
    assert len(run.losses()) < STEPS, "it was killed too late"


@pytest.fixture(scope="module")
def killed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run in each mode that was killed once and has a checkpoint."""
    moment, runs = random.Random(time.time_ns()), {}
    for mode in MODES:
        path = tmp_path_factory.mktemp(mode)
        options = ("--checkpoint", str(path / "checkpoints"), "--checkpoint-every", str(EVERY), "--resume")
        runs[mode] = Run(text, path, 2, *SIZES, "--mode", mode, *options)
        kill(runs[mode], moment)
    return runs


def test_killed_and_resumed_in_each_mode_has_the_same_losses_bit_by_bit(killed: dict[str, Run], whole: Whole) -> None:
    run_all(list(killed.values()))
    for mode, run in killed.items():
        assert run.losses() == whole[mode, "balanced"].losses(), mode


def test_a_checkpoint_says_where_its_run_stands_in_each_mode(killed: dict[str, Run]) -> None:
    coming = {}
    for mode, run in killed.items():
        for checkpoint in (run.directory / "checkpoints").glob("step_*[0-9]"):
            leaves = read_checkpoint(checkpoint)["values.loader"]
            assert len(leaves) == (2 if mode == "external" else 1)
            for text in leaves.values():
                state = LoaderState.from_text(text)
                position = position_of(state)
                assert position is not None and position.step is not None
                step = int(checkpoint.name.removeprefix("step_"))
                assert position.epoch * STEPS_OF_AN_EPOCH + position.step == step
                following = upcoming(state, 2, micro_batch_size=2)
                assert coming.setdefault(step, following) == following  # the same records, in every mode


def refused(programs: list[list[str]]) -> None:
    """Run what cannot be resumed, and print why."""
    for arguments in programs:
        try:
            main(arguments)
        except ValueError as error:
            print(f"refused: {error}", flush=True)


def test_what_cannot_be_resumed_is_refused_with_the_reason(killed: dict[str, Run], tmp_path: Path) -> None:
    """External steps on another number of ranks, and between them and the other modes, either way."""
    programs = [
        [*killed[saved].arguments, "--mode", mode]
        for saved, mode in (("external", "external"), ("external", "repack"), ("online", "external"))
    ]
    with Ranks(1, tmp_path / "output.txt", refused, programs) as ranks:
        ranks.wait()
    ranks_changed, left, entered = (
        line for line in (tmp_path / "output.txt").read_text().splitlines() if line.startswith("refused: ")
    )
    assert "node 'ExternalStepReader' keeps state of its own rank" in ranks_changed
    assert "from 2 data ranks, not 1" in ranks_changed
    assert "mode: saved 'external', now 'metadata, online or repack'" in left
    assert "mode: saved 'metadata, online or repack', now 'external'" in entered


# ---- tensor parallel


def test_model_peers_stopped_killed_and_resumed_have_the_losses_of_ranks_without_peers(
    text: Path, tmp_path: Path, whole: Whole
) -> None:
    """A model split over two peers: close to the whole one, and equal to itself however it was interrupted."""
    split = Run(text, tmp_path / "whole", 4, *SIZES, "--tp", "2").finish()
    alone = whole["repack", "balanced"]
    assert list(split.losses().values()) == pytest.approx(list(alone.losses().values()), rel=1e-9, abs=0)
    assert split.gradient_norms() == pytest.approx(alone.gradient_norms(), rel=1e-9, abs=0)
    assert [e["label_tokens"] for e in split.events("step")] == [e["label_tokens"] for e in alone.events("step")]

    checkpoints = ("--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", str(EVERY), "--resume")
    run = Run(text, tmp_path / "again", 4, *SIZES, "--tp", "2", *checkpoints)
    with run.start() as running:
        run.await_steps(2)
        assert running.processes[3].pid is not None
        os.kill(running.processes[3].pid, signal.SIGTERM)  # a peer, which makes no plan and writes no log
        running.wait()
    stopped = max(run.losses())
    assert [event["step"] for event in run.events("checkpoint")][-1] == stopped < STEPS
    other = Run(text, tmp_path / "other", 2, *SIZES, "--mode", "metadata", *checkpoints)
    other.arguments[other.arguments.index("--checkpoint") + 1] = str(
        shutil.copytree(tmp_path / "checkpoints", tmp_path / "copied")
    )
    kill(run, random.Random(time.time_ns()), behind=0)
    run.finish()
    assert run.losses() == split.losses()

    # From two peers to none, and from repacking to whole rows: the same steps go on.
    losses = other.finish().losses()
    assert sorted(losses) == list(range(stopped + 1, STEPS + 1))
    assert list(losses.values()) == pytest.approx([split.losses()[step] for step in losses], rel=1e-9, abs=0)


# ---- options


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--mode", "external", "--tp", "2"], "there are no model peers"),
        (["--mode", "external", "--window", "2"], "each round of a source is planned alone"),
        (["--mode", "external", "--workers", "1"], "the source reads by itself"),
        (["--tp", "0"], "--tp 0; accepted: a number of ranks, at least 1"),
        (["--tp", "2"], "--tp 2 with 3 processes"),
        (["--tp", "3"], "--tp 3 with heads 2; accepted: a number that divides both"),
        (["--tp", "3", "--heads", "3", "--hidden", "48"], "--tp 3 with feed-forward width 128; accepted"),
        (["--heads", "3"], "hidden is 64; accepted: a multiple of twice the heads (6)"),
        (["--mode", "streaming"], "invalid choice"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert told in capsys.readouterr().err


# ---- the parts


@pytest.fixture(scope="module")
def records(text: Path) -> RecordFile:
    return open_or_pack(text / "records", root=text, tokenizer=load_tokenizer(None), seq_len=256)


def test_the_index_says_what_reading_would_say(records: RecordFile) -> None:
    training, _ = split_records(len(records), 150)
    assert len(training) // 16 == STEPS_OF_AN_EPOCH
    known = records.row_metadata(256)
    measure = RowMetadata(256)
    for index in range(len(records)):
        metadata = measure(records[index])
        assert (metadata.pack_tokens, metadata.cost.llm) == tuple(known[index])
    assert known["pack_tokens"].sum() == records.num_tokens


def documents_of(rounds: Any) -> list[list[list[list[int]]]]:
    return [[[sample["input_ids"].tolist() for sample in row] for row in bins] for bins in rounds]


def test_a_step_source_goes_on_where_it_was_saved(records: RecordFile) -> None:
    def source() -> RowRounds:
        made = RowRounds(records, DistributedBatchSampler(len(records), 2, 8, 1, 2, order="shuffle"))
        made.set_epoch(3)
        return made

    first, states, rounds = source(), [], []
    for bins in first:
        states.append(first.state_dict())
        rounds.append(bins)
    assert first.rounds_per_step == 2
    assert all(len(bins) == 2 for bins in rounds)
    for place in (0, 2, len(states) - 1):
        again = source()
        again.load_state_dict(states[place])
        assert documents_of(again) == documents_of(rounds[place + 1 :])
    assert torch.equal(rounds[0][0][0]["input_ids"], next(iter(source()))[0][0]["input_ids"])


def test_a_step_source_without_a_step_is_refused(records: RecordFile) -> None:
    with pytest.raises(ValueError, match="3 samples are fewer than one global batch of 8"):
        RowRounds(records, DistributedBatchSampler(3, 2, 8, 1, 2))
