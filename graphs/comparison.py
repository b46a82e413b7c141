"""The same steps with and without balancing, measured in one run.

Blocks of steps alternate: from the same weights a block is trained twice, once as planned and once as the sampler
laid it out, and the order changes from block to block. So both see the same samples, the same machine and the same
moments, and their losses can be compared step by step.

What to expect is said beforehand: a cost model is fitted to this model on this machine, all ranks working at the same
time, and turns each plan's objective into seconds. Fitted seconds depend on the moment, so plans are not made from
them: resuming needs the same plan twice.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphs.optimizer_step import OptimizerStep, StepResult, model_inputs
from hp_nodes import DistributedDataLoader
from hp_nodes.planning import PolynomialCostModel, fit_cost_model
from hp_nodes.types import PlanReport

__all__ = ["BALANCED", "SAMPLED", "Comparison", "compare", "measure_costs"]

BALANCED = "balanced"
SAMPLED = "as sampled"


@dataclass(frozen=True)
class Comparison:
    """Both ways of running the same steps; every pair is (as sampled, balanced)."""

    steps: int
    step_seconds: tuple[float, float]
    """Median over the steps."""
    speedup: float
    """Median over the steps of seconds as sampled / seconds balanced: each step is compared with itself."""
    predicted_seconds: tuple[float, float]
    """Median over the steps, from plans and fitted costs alone."""
    predicted_speedup: float
    waiting_share: tuple[float, float]
    """Of all ranks' time."""
    loss: tuple[float, float]
    """Mean over the steps."""
    largest_loss_difference: float

    def table(self) -> str:
        rows = [
            ("", SAMPLED, BALANCED, ""),
            ("step, predicted (s)", *(f"{s:.3f}" for s in self.predicted_seconds), f"{self.predicted_speedup:.3f} x"),
            ("step, measured (s)", *(f"{s:.3f}" for s in self.step_seconds), f"{self.speedup:.3f} x"),
            ("waiting for other ranks", *(f"{s:.1%}" for s in self.waiting_share), ""),
            ("loss", *(f"{s:.6f}" for s in self.loss), f"differs by {self.largest_loss_difference:.1e} at most"),
        ]
        return "\n".join(f"{a:<26}{b:>12}{c:>12}  {d}".rstrip() for a, b, c, d in rows)


def compare(
    train: OptimizerStep,
    loaders: Mapping[str, DistributedDataLoader],
    costs: PolynomialCostModel,
    *,
    blocks: int,
    block_steps: int,
    learning_rate: float,
    record: Callable[[int, str, StepResult], None],
) -> Comparison | None:
    """Train ``blocks * block_steps`` steps both ways; ``loaders`` are named BALANCED and SAMPLED, at the same position.

    ``record`` is told each step, how it was run and what it gave. None on a model peer, which is told of no plan.
    """
    batches = {name: endless(loader) for name, loader in loaders.items()}
    results: dict[str, list[StepResult]] = {BALANCED: [], SAMPLED: []}
    for block in range(blocks):
        start = weights_of(train)
        for name in (SAMPLED, BALANCED) if block % 2 else (BALANCED, SAMPLED):
            restore(train, start)
            for step in range(block * block_steps, (block + 1) * block_steps):
                result = train(batches[name], loaders[name], learning_rate)
                assert result is not None  # endless
                results[name].append(result)
                record(step + 1, name, result)
    planned = all(result.report is not None for result in results[BALANCED])
    return summarise(results[SAMPLED], results[BALANCED], costs) if planned else None


def summarise(sampled: list[StepResult], balanced: list[StepResult], costs: PolynomialCostModel) -> Comparison:
    both = (sampled, balanced)
    plans = [result.report.plan for result in balanced if result.report is not None]
    seconds = [[result.seconds for result in way] for way in both]
    predictions = [[predicted(plan, costs, way) for plan in plans] for way in (0, 1)]
    return Comparison(
        steps=len(balanced),
        step_seconds=pair([statistics.median(way) for way in seconds]),
        speedup=median_ratio(*seconds),
        predicted_seconds=pair([statistics.median(way) for way in predictions]),
        predicted_speedup=median_ratio(*predictions),
        waiting_share=pair(
            [sum(sum(r.waited) for r in way) / sum(len(r.waited) * r.seconds for r in way) for way in both]
        ),
        loss=pair([statistics.mean(result.loss for result in way) for way in both]),
        largest_loss_difference=max(abs(a.loss - b.loss) for a, b in zip(*both, strict=True)),
    )


def median_ratio(sampled: list[float], balanced: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(sampled, balanced, strict=True))


def predicted(plan: PlanReport, costs: PolynomialCostModel, way: int) -> float:
    """Seconds of a step, from its plan in tokens squared: 0 as sampled, 1 balanced."""
    objective = plan.after if way or plan.before is None else plan.before
    row_tokens = (float(plan.tokens_after.sum()) + plan.padding) / len(plan.tokens_after)
    return costs.per_token_squared * objective + costs.per_token * row_tokens


def pair(values: list[float]) -> tuple[float, float]:
    first, second = values
    return first, second


def endless(loader: DistributedDataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def weights_of(train: OptimizerStep) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy(train.model.state_dict()), copy.deepcopy(train.optimizer.state_dict())


def restore(train: OptimizerStep, weights: tuple[dict[str, Any], dict[str, Any]]) -> None:
    train.model.load_state_dict(weights[0])
    train.optimizer.load_state_dict(copy.deepcopy(weights[1]))


def measure_costs(model: nn.Module, seq_len: int, vocabulary: int, *, repeats: int = 2) -> PolynomialCostModel:
    """Fit seconds per token and per token squared to forward and backward of ``model``, which is not wrapped, though it
    may be split over model peers.

    Rows of ``seq_len`` in equal documents of several lengths, and a half row. Every rank measures at the same time, as
    they will work; the shortest time counts, and the mean over the ranks.
    """
    layouts = [
        [seq_len],
        [seq_len // 2] * 2,
        [seq_len // 4] * 4,
        [seq_len // 16] * 16,
        [seq_len // 2],
        [seq_len // 8] * 2,
    ]
    seconds = torch.tensor([min(timed(model, lengths, vocabulary) for _ in range(repeats)) for lengths in layouts])
    dist.all_reduce(seconds)
    model.zero_grad()
    return fit_cost_model(layouts, (seconds / dist.get_world_size()).tolist())


def timed(model: nn.Module, lengths: list[int], vocabulary: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    model(**model_inputs(row_of(lengths, vocabulary))).backward()
    return time.perf_counter() - started


def row_of(lengths: list[int], vocabulary: int) -> dict[str, Tensor]:
    """One row of documents of these lengths."""
    tokens = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0)
    return {
        "input_ids": (torch.arange(tokens) % vocabulary)[None],
        "labels": (torch.arange(1, tokens + 1) % vocabulary)[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens": torch.cat((torch.zeros(1, dtype=torch.int32), ends.to(torch.int32))),
    }
