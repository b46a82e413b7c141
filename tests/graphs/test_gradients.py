"""Balancing changes where documents are computed, never what is learned: a step's gradient stays the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from graphs.optimizer_step import model_inputs
from graphs.transformer import Transformer, TransformerConfig
from hp_nodes import SampleMetadata, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.text import IGNORED_LABEL
from hp_nodes.transport import run_ranks

SEQ_LEN = 32
VOCABULARY = 11
GLOBAL_BATCH = 8
RECORDS = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are tiny, and virtual ranks are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Text:
    """Records of several documents; some of their tokens are without a label."""

    def __init__(self, size: int = RECORDS, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.records = [self._record(rng) for _ in range(size)]

    @staticmethod
    def _record(rng: np.random.Generator) -> dict[str, torch.Tensor]:
        lengths = rng.integers(1, 11, size=rng.integers(1, 4))
        total = int(lengths.sum())
        labels = torch.from_numpy(rng.integers(0, VOCABULARY, size=total))
        labels[torch.from_numpy(rng.random(total) < 0.3)] = IGNORED_LABEL
        return {
            "input_ids": torch.from_numpy(rng.integers(0, VOCABULARY, size=total)),
            "labels": labels,
            "cu_seq_lens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        }

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.records[index]


def model() -> Transformer:
    """The same weights each time, without touching the generator that other threads share."""
    made = Transformer(TransformerConfig(VOCABULARY, hidden=16, layers=2, heads=2)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return made


def flat_gradient(trained: Transformer) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trained.parameters() if parameter.grad is not None])


def one_by_one(dataset: Text, records: list[int]) -> tuple[torch.Tensor, int]:
    """Gradient of the sum of losses, and the labels: every document alone, as it is written down."""
    trained, labels = model(), 0
    for index in records:
        record = dataset[index]
        bounds = record["cu_seq_lens"].tolist()
        for start, end in pairwise(bounds):
            document = {
                "input_ids": record["input_ids"][None, start:end],
                "labels": record["labels"][None, start:end],
                "position_ids": torch.arange(end - start)[None],
                "cu_seq_lens": torch.tensor([0, end - start], dtype=torch.int32),
            }
            trained(**document).backward()
            labels += int((document["labels"] != IGNORED_LABEL).sum())
    return flat_gradient(trained), labels


def accumulated(dataset: Text, mesh: Any, window: int) -> list[tuple[torch.Tensor, int, bool]]:
    """This rank's gradient and labels of each step, and whether the plan was used."""
    config = DistributedDatasetConfig(SEQ_LEN, 1, balance_window_size=window, repack_sequences=True, timeout_s=20.0)
    sampler = DistributedBatchSampler(
        len(dataset), 1, GLOBAL_BATCH, mesh.get_local_rank("dp"), mesh.size("dp"), order="shuffle", seed=1
    )
    steps, trained, labels = [], model(), 0
    with build_distributed_dataloader(dataset, mesh, config, batch_sampler=sampler) as loader:
        for batch in loader:
            trained(**model_inputs(batch)).backward()
            assert batch["num_label_tokens"] == loader.last.num_label_tokens
            labels += loader.last.num_label_tokens
            if loader.last.ends_step:
                steps.append((flat_gradient(trained), labels, loader.last.report.plan.accepted))
                trained, labels = model(), 0
    return steps


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_of_a_step(ranks: int, window: int) -> None:
    dataset = Text()
    sampler = DistributedBatchSampler(len(dataset), GLOBAL_BATCH, GLOBAL_BATCH, 0, 1, order="shuffle", seed=1)
    expected = [one_by_one(dataset, records) for records in sampler]
    per_rank = run_ranks({"dp": ranks}, lambda mesh: accumulated(dataset, mesh, window))
    assert len(per_rank[0]) == len(expected) == RECORDS // GLOBAL_BATCH
    for number, (gradient, labels) in enumerate(expected):
        together = torch.stack([steps[number][0] for steps in per_rank]).sum(dim=0)
        assert sum(steps[number][1] for steps in per_rank) == labels
        torch.testing.assert_close(together / labels, gradient / labels, rtol=1e-9, atol=1e-12)
        assert gradient.abs().max() > 1e-3
    if ranks * window > 2:
        assert any(used for steps in per_rank for _, _, used in steps)


def test_the_mean_over_all_labelled_tokens() -> None:
    """CASES 10: a mean of the ranks' means is another number; the micro-batch carries what is needed."""

    class Labelled:
        """Record 0 has one labelled token, record 1 has three."""

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            labels = [5, IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL] if index == 0 else [6, 6, 6, IGNORED_LABEL]
            return {"input_ids": [index] * 4, "labels": labels, "cu_seq_lens": [0, 4]}

    loss_of_label = torch.zeros(7, dtype=torch.float64)
    loss_of_label[5] = 4.0

    def run(mesh: Any) -> tuple[float, int]:
        config = DistributedDatasetConfig(seq_len=4, local_batch_size=1, repack_sequences=True)
        loader = build_distributed_dataloader(
            Labelled(),
            mesh,
            config,
            batch_sampler=DistributedBatchSampler(2, 1, 2, mesh.get_rank(), 2),
            metadata_fn=lambda sample: SampleMetadata(4),
            cost_model=lambda metadata: WorkloadCost(llm=1.0),
        )
        batch = next(loader)
        labels = batch["labels"][batch["labels"] != IGNORED_LABEL]
        return float(loss_of_label[labels].sum()), loader.last.num_label_tokens

    sums, counts = zip(*run_ranks({"dp": 2}, run), strict=True)
    assert (sums, counts) == ((4.0, 0.0), (1, 3))
    assert sum(sums) / sum(counts) == 1.0
    assert np.mean([total / count for total, count in zip(sums, counts, strict=True)]) == 2.0


def test_tensor_peers_get_equal_batches() -> None:
    dataset = Text()
    results = run_ranks({"dp": 2, "tp": 2}, lambda mesh: peers(dataset, mesh))
    for first, second in ((0, 1), (2, 3)):
        assert len(results[first]) == RECORDS // 2
        for mine, theirs in zip(results[first], results[second], strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                assert type(value) is type(theirs[name])
                if isinstance(value, torch.Tensor):
                    assert value.dtype == theirs[name].dtype
                    assert torch.equal(value, theirs[name])
                else:
                    assert value == theirs[name]
    assert not torch.equal(results[0][0]["input_ids"], results[2][0]["input_ids"])


def peers(dataset: Text, mesh: Any) -> list[dict[str, Any]]:
    config = DistributedDatasetConfig(SEQ_LEN, 1, balance_window_size=2, repack_sequences=True, timeout_s=20.0)
    sampler = DistributedBatchSampler(len(dataset), 1, GLOBAL_BATCH, mesh.get_local_rank("dp"), 2)
    constructor = mesh.get_local_rank("tp") == 0
    with build_distributed_dataloader(dataset if constructor else None, mesh, config, batch_sampler=sampler) as loader:
        return list(loader)
