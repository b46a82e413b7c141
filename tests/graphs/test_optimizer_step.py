"""A step's loss and gradient are those of all its labelled tokens; the clock sees who waited for whom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from graphs.optimizer_step import OptimizerStep, StepResult, WaitingClock, evaluate
from tests.graphs.ranks import Ranks


class Scaled(nn.Module):
    """Its loss is ``weight * sum(input_ids)``, so the gradient of a mean loss is that sum over the labelled tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.embedding.weight)
        self.seconds = 0.0

    def forward(self, input_ids: Tensor, **_: Tensor) -> Tensor:
        time.sleep(self.seconds)
        result: Tensor = self.embedding(input_ids.sum()[None]).sum()
        return result


class Rounds:
    """A loader of given micro-batches: the sum of losses and the labelled tokens of each."""

    def __init__(self, steps: list[list[tuple[float, int]]]) -> None:
        self.steps = steps
        self.last: Any = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for rounds in self.steps:
            for number, (loss, labels) in enumerate(rounds):
                self.last = SimpleNamespace(ends_step=number == len(rounds) - 1, num_tokens=labels, report=None)
                nothing = torch.zeros(1)
                inputs = dict.fromkeys(("labels", "position_ids", "cu_seq_lens"), nothing)
                yield {"input_ids": torch.tensor([loss]), "num_label_tokens": labels, **inputs}


def step_over(rounds: list[tuple[float, int]], *, clip: float = 1e9, stop: bool = False, **options: Any) -> StepResult:
    model = Scaled()
    clock = WaitingClock(model.embedding)
    model.seconds = options.pop("seconds", 0.0)
    wrapped = DistributedDataParallel(model)
    step = OptimizerStep(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1.0), clock, clip=clip, **options)
    loader: Any = Rounds([rounds])
    batches = iter(loader)
    result = step(batches, loader, 0.5, lambda: stop)
    assert result is not None
    assert step(batches, loader, 0.5) is None  # the epoch is over
    return result


@pytest.mark.usefixtures("single_rank")
class TestOneRank:
    def test_the_loss_is_the_mean_over_the_labelled_tokens_of_all_rounds(self) -> None:
        result = step_over([(4.0, 1), (0.0, 3)])
        assert (result.loss, result.gradient_norm, result.label_tokens) == (1.0, 1.0, 4)
        assert not result.stop_requested

    def test_the_norm_is_told_before_clipping(self) -> None:
        assert step_over([(12.0, 4)], clip=0.1).gradient_norm == pytest.approx(3.0)

    def test_evaluation_weighs_by_labelled_tokens(self) -> None:
        loader: Any = Rounds([[(4.0, 1)], [(0.0, 3)]])
        assert evaluate(Scaled(), loader) == 1.0


def two_ranks(directory: Path) -> None:
    """Rank 0: 1 labelled token, loss sum 4, quick. Rank 1: 3 labelled tokens, loss sum 0, slow, told to stop."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rounds = [(4.0, 1), (0.0, 0)] if rank == 0 else [(0.0, 2), (0.0, 1)]
    for name, every in (("each", True), ("last", False)):
        result = step_over(rounds, seconds=0.1 * rank, stop=rank == 1, reduce_every_round=every)
        told = {
            name: getattr(result, name)
            for name in ("loss", "gradient_norm", "label_tokens", "waited", "stop_requested")
        }
        (directory / f"{name}{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


@pytest.mark.parametrize("reduced", ["each", "last"])
def test_two_ranks_have_one_loss_one_gradient_and_one_decision(tmp_path: Path, reduced: str) -> None:
    with Ranks(2, tmp_path / "output.txt", two_ranks, tmp_path) as ranks:
        ranks.wait()
    first, second = (json.loads((tmp_path / f"{reduced}{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert (first["loss"], first["gradient_norm"], first["label_tokens"]) == (1.0, 1.0, 4)
    assert first["stop_requested"]
    quick, slow = first["waited"]
    assert quick > 0.15  # two rounds of 0.1 s, however gradients are reduced
    assert slow < quick / 2
