"""Step times of a real model, predicted and measured: the transformer that ``graphs.pretrain`` trains, fed by each way.

On two ranks that reduce gradients in every round. Predicted: seconds fitted to the model's own forward and backward
(:func:`graphs.comparison.measure_costs`), summed over the rounds for the slowest rank. Ways deliver different numbers
of tokens a step, so times are those of 10⁶ tokens. The machine must be quiet: with one core a rank, whatever else runs
is measured.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from graphs.comparison import measure_costs
from graphs.optimizer_step import model_inputs
from graphs.transformer import Transformer, TransformerConfig
from tests.benchmarks.record import Row, interleaved
from tests.benchmarks.side_by_side.columns import Options, against
from tests.benchmarks.side_by_side.corpus import SEQ_LEN, Documents, prepare
from tests.benchmarks.side_by_side.flow import padding, steps_of
from tests.benchmarks.side_by_side.ranks import Ranks
from tests.benchmarks.side_by_side.ways import OURS, WAYS, Setting

TRAINED = (OURS, "DataLoader", "Grain")
"""The others pack as DataLoader does."""


class Trainer:
    """One model on this rank, kept from call to call."""

    costs: Any = None
    model: Any = None
    optimizer: Any = None


def prepare_model(rank: int, size: int, setting: Setting) -> None:
    if Trainer.model is None:
        vocabulary = Documents(setting.path).records.vocabulary
        torch.manual_seed(1234)
        model = Transformer(TransformerConfig(vocabulary))
        Trainer.costs = measure_costs(model, SEQ_LEN, vocabulary)
        Trainer.model = DistributedDataParallel(model)
        Trainer.optimizer = torch.optim.AdamW(Trainer.model.parameters(), lr=1e-4)


def train_steps(rank: int, size: int, name: str, setting: Setting, steps: int) -> dict[str, Any]:
    """Seconds of ``steps`` steps, predicted seconds of each round of this rank, tokens without padding."""
    prepare_model(rank, size, setting)
    opened, rounds = WAYS[name](setting, rank, size), setting.rounds(size)
    predicted, tokens = [], 0
    try:
        batches = steps_of(opened, rounds, steps)
        batch = next(batches)  # built before the clock starts, as in the middle of a run
        dist.barrier()
        began = time.perf_counter()
        for number in range(steps * rounds):
            Trainer.model(**model_inputs(batch)).backward()
            tokens += batch["input_ids"].numel() - padding(batch)
            lengths = np.diff(batch["cu_seq_lens"].numpy()).astype(np.float64)
            cost = Trainer.costs
            predicted.append(float(((cost.per_token + cost.per_token_squared * lengths) * lengths).sum()))
            if (number + 1) % rounds == 0:
                Trainer.optimizer.step()
                Trainer.optimizer.zero_grad()
            if number + 1 < steps * rounds:
                batch = next(batches)
        seconds = time.perf_counter() - began
        dist.barrier()
    finally:
        opened.close()
    return {"seconds": seconds, "predicted": predicted, "tokens": tokens}


def train(options: Options) -> list[Row]:
    setting = Setting(prepare("functions"), rows_of_step=8)
    predicted: dict[str, list[float]] = {name: [] for name in TRAINED if name in options.names}
    steps = 1 if options.quick else 10
    with Ranks() as ranks:

        def seconds(name: str) -> float:
            told = ranks.call(train_steps, name, setting, steps, limit_s=500.0)
            millions = sum(rank["tokens"] for rank in told) / 1e6
            predicted[name].append(float(np.max([rank["predicted"] for rank in told], axis=0).sum() / millions))
            return float(max(rank["seconds"] for rank in told) / millions)

        measured = interleaved({name: partial(seconds, name) for name in predicted}, min(2, options.repeats))
    what = "training of 10⁶ tokens, lockstep"
    return against(measured, f"{what}, measured", "s", "train") + against(predicted, f"{what}, predicted", "s", "train")
