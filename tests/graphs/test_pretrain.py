"""The training program: a killed run that resumed has the losses of one that was not, on any number of ranks."""

from __future__ import annotations

import functools
import itertools
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs.data_modes import split_records
from graphs.pretrain import learning_rate_at, main, parse_arguments
from graphs.transformer import Transformer
from tests.graphs.pretrain_scene import EVERY, STEPS, Run
from tests.graphs.ranks import Ranks

ROUNDS = 2


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, float]]:
    """The losses of a whole run with these ranks and options; each is trained once."""

    @functools.cache
    def losses(ranks: int, *options: str) -> dict[int, float]:
        return Run(text, tmp_path_factory.mktemp("whole"), ranks, *options).finish().losses()

    return losses


@pytest.mark.parametrize("options", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_twice_and_resumed_has_the_same_losses_bit_by_bit(
    text: Path, tmp_path: Path, uninterrupted: Callable[..., dict[int, float]], ranks: int, options: tuple[str, ...]
) -> None:
    run = Run(text, tmp_path, ranks, *options, "--checkpoint", str(tmp_path / "checkpoints"), "--resume")
    seed = random.randrange(10**6)
    moment = random.Random(seed)
    for _ in range(2):
        with run.start() as running:
            run.await_steps(len(run.events("step")) + moment.randint(1, 2 * EVERY))
            time.sleep(moment.uniform(0, 0.03))
            running.kill()
    before = len(run.losses())
    run.finish()
    assert before < STEPS, f"both kills came too late (seed {seed})"
    assert run.losses() == uninterrupted(ranks, *options), f"seed {seed}"


def terminated_in_the_last_round(arguments: list[str], step: int, rank: int) -> None:
    """Run the program; one rank gets a SIGTERM while it computes the last round of ``step``."""
    forward, calls = Transformer.forward, 0

    def counted(self: Transformer, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == step * ROUNDS and torch.distributed.get_rank() == rank:
            signal.raise_signal(signal.SIGTERM)
        return forward(self, *args, **kwargs)

    Transformer.forward = counted  # type: ignore[method-assign]
    main(arguments)


def test_a_signal_in_the_last_round_stops_all_ranks_behind_that_step_and_saves_it(
    text: Path, tmp_path: Path, uninterrupted: Callable[..., dict[int, float]]
) -> None:
    run = Run(text, tmp_path, 2, "--checkpoint", str(tmp_path / "checkpoints"))
    with Ranks(2, tmp_path / "output.txt", terminated_in_the_last_round, run.arguments, 5, 1) as ranks:
        ranks.wait()
    assert sorted(run.losses()) == [1, 2, 3, 4, 5]
    assert [event["step"] for event in run.events("checkpoint")] == [3, 5]
    run.finish("--resume")
    assert run.events("resumed")[0]["step"] == 5
    assert len(run.events("step")) == STEPS
    assert run.losses() == uninterrupted(2)


def test_a_half_written_checkpoint_does_not_stop_a_resume(
    text: Path, tmp_path: Path, uninterrupted: Callable[..., dict[int, float]]
) -> None:
    run = Run(text, tmp_path, 2, "--checkpoint", str(tmp_path / "checkpoints")).finish()
    data = next((tmp_path / "checkpoints" / f"step_{STEPS:08d}").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    run.finish("--resume")
    assert run.events("resumed")[0]["step"] == STEPS - EVERY
    assert f"step_{STEPS:08d} is passed over" in run.output()
    assert len(run.events("step")) == STEPS + EVERY
    assert run.losses() == uninterrupted(2)


@pytest.mark.parametrize("options", [(), ("--no-sync",), ("--fsdp",)], ids=["ddp", "no-sync", "fsdp"])
def test_loss_and_gradient_do_not_depend_on_the_number_of_ranks(
    text: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    one = Run(text, tmp_path / "1", 1, "--dtype", "float64", "--no-balance", "--steps", "6").finish()
    for ranks in (2, 4):
        other = Run(text, tmp_path / f"{ranks}", ranks, "--dtype", "float64", "--steps", "6", *options).finish()
        assert list(other.losses().values()) == pytest.approx(list(one.losses().values()), rel=1e-6, abs=0)
        assert other.gradient_norms() == pytest.approx(one.gradient_norms(), rel=1e-6, abs=0)
        assert {event["objective"] for event in other.events("step")} == {
            "makespan" if "--no-sync" in options else "lockstep"
        }


def test_evaluation_is_told_and_changes_nothing(
    text: Path, tmp_path: Path, uninterrupted: Callable[..., dict[int, float]]
) -> None:
    run = Run(text, tmp_path, 2, "--eval-every", "10").finish()
    assert run.losses() == uninterrupted(2)
    events = run.events("evaluation")
    assert [event["step"] for event in events] == [10, 20]
    assert 0 < events[1]["loss"] < events[0]["loss"]


def test_training_goes_on_into_the_next_epoch(text: Path, tmp_path: Path) -> None:
    run = Run(text, tmp_path, 1, "--steps", "70").finish()
    assert sorted(run.losses()) == list(range(1, 71))
    assert run.losses()[70] < run.losses()[1] / 2


def test_comparing_runs_the_same_steps_both_ways(text: Path, tmp_path: Path) -> None:
    run = Run(text, tmp_path, 2, "--compare", "2", "--block-steps", "2").finish()
    ways = {way: [e for e in run.events("step") if e["way"] == way] for way in ("as sampled", "balanced")}
    assert [[e["step"] for e in steps] for steps in ways.values()] == [[1, 2, 3, 4]] * 2
    for sampled, balanced in zip(*ways.values(), strict=True):
        assert sampled["label_tokens"] == balanced["label_tokens"]
        assert sampled["loss"] == pytest.approx(balanced["loss"], rel=1e-5)
        assert sampled["objective_after"] == sampled["objective_before"] == balanced["objective_before"]
        assert balanced["objective_after"] <= sampled["objective_after"]
    assert sum(e["objective_after"] for e in ways["balanced"]) < sum(e["objective_after"] for e in ways["as sampled"])
    (told,) = run.events("comparison")
    assert told["steps"] == 4
    assert told["predicted_speedup"] >= 1
    assert "as sampled" in run.output()


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    options = parse_arguments(["--steps", "100", "--warm-up", "10", "--learning-rate", "1.0"])
    rates = [learning_rate_at(step, options) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1)
    assert all(earlier >= later for earlier, later in itertools.pairwise(rates[10:]))


def test_records_are_for_training_or_for_evaluation() -> None:
    training, evaluation = split_records(100, 10)
    assert sorted([*training, *evaluation]) == list(range(100))
    assert len(evaluation) == 10
    assert len(split_records(100, 0)[1]) == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--resume"], "--resume needs --checkpoint DIR"), (["--fsdp", "--no-sync"], "gathered in every round")],
)
def test_options_that_do_not_go_together_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert told in capsys.readouterr().err
