"""Small datasets, and a loader of each mode over them, as several test modules use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DistributedDataLoader, SampleMetadata, TensorFieldSpec, WorkloadCost
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology

SEQ_LEN = 16
STEPS = 3


class Texts:
    """Records of one to three documents, 16 tokens at most; every token of record i is i. Counts reads by index."""

    def __init__(self, size: int = 48, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = [rng.integers(1, 6, size=rng.integers(1, 4)).tolist() for _ in range(size)]
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        total = sum(self.lengths[index])
        return {
            "input_ids": np.full(total, index + 1),
            "labels": np.full(total, index + 1),
            "cu_seq_lens": np.cumsum([0, *self.lengths[index]]),
        }

    def tokens(self) -> Any:
        """int64[records]: what a record takes of a bin, unsplit."""
        return np.array([sum(lengths) for lengths in self.lengths])


def documents(record: dict[str, Any]) -> list[Any]:
    return [part for part in np.split(record["input_ids"], record["cu_seq_lens"][1:-1]) if len(part)]


def padded(samples: Any, seq_len: int) -> Any:
    packed = torch.zeros(seq_len, dtype=torch.int64)
    joined = torch.from_numpy(np.concatenate(samples))
    packed[: len(joined)] = joined
    return packed


def records_of_rows(batch: Any) -> Counter[int]:
    """Record → its tokens in the batch."""
    rows = batch["input_ids"] if isinstance(batch, dict) else batch
    found = Counter(rows.reshape(-1).tolist())
    found.pop(0, None)
    return Counter({token - 1: number for token, number in found.items()})


def records_whole(batch: Any) -> Counter[int]:
    return Counter({int(record["input_ids"][0]) - 1: len(record["input_ids"]) for record in batch})


class LocalRounds:
    """An external source over the same order: rank r of a round takes its slice; bins of one record."""

    def __init__(self, dataset: Texts, sampler: DistributedBatchSampler) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.rounds_per_step = sampler.global_batch_size // sampler.global_micro_batch_size
        self.epoch = self.given = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.sampler.load_state_dict({"epoch": self.epoch, "consumed_samples": self.given})
        for indices in self.sampler:
            self.given += self.sampler.global_micro_batch_size
            yield [[self.dataset[index]] for index in indices]
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


MODES: dict[str, tuple[dict[str, Any], Callable[[Texts], dict[str, Any]], Callable[[Any], Counter[int]]]] = {
    "online": (
        {},
        lambda dataset: {"metadata_fn": lambda record: SampleMetadata(len(record["input_ids"])), "collate_fn": list},
        records_whole,
    ),
    "precomputed": (
        {"metadata_mode": True},
        lambda dataset: {"metadata": dataset.tokens(), "collate_fn": list},
        records_whole,
    ),
    "split": (
        {},
        lambda dataset: {
            "metadata_fn": lambda document: SampleMetadata(len(document)),
            "split_fn": documents,
            "pack_fn": padded,
            "collate_fn": torch.stack,
        },
        records_of_rows,
    ),
    "repack": ({"repack_sequences": True}, lambda dataset: {}, records_of_rows),
    "external": (
        {},
        lambda dataset: {
            "metadata_fn": lambda record: SampleMetadata(len(record["input_ids"])),
            "pack_fn": lambda records, seq_len: padded([record["input_ids"] for record in records], seq_len),
            "collate_fn": torch.stack,
        },
        records_of_rows,
    ),
}


def loader_of(
    mode: str, mesh: Any, dataset: Any, window: int = 1, settings: Any = None, **given: Any
) -> DistributedDataLoader:
    """A loader whose steps hold 16 records, 2 a rank and round, in a shuffled order."""
    config, arguments, _ = MODES[mode]
    topology = DataTopology.from_mesh(mesh)
    sampler = DistributedBatchSampler(
        48, 2, 16, topology.data_rank, topology.data_parallel_size, order="shuffle", seed=3
    )
    functions = arguments(dataset if dataset is not None else Texts()) | given
    if mode == "external":
        functions["external_step_source"] = LocalRounds(dataset, sampler)
    else:
        functions["batch_sampler"] = sampler
        functions["metadata"] = functions.get("metadata") if topology.is_constructor else None
    functions.setdefault("cost_model", None if mode == "repack" else CausalAttentionCostModel())
    return build_distributed_dataloader(
        dataset if topology.is_constructor else None,
        mesh,
        DistributedDatasetConfig(
            seq_len=SEQ_LEN,
            local_batch_size=2,
            balance_window_size=window,
            **{"timeout_s": 20.0, **config, **(settings or {})},
        ),
        **functions,
    )


def chosen(step: int) -> list[int]:
    sampler = DistributedBatchSampler(48, 16, 16, 0, 1, order="shuffle", seed=3)
    sampler.load_state_dict({"epoch": 0, "consumed_samples": 16 * step})
    return list(next(iter(sampler)))


class Divergent:
    """An algorithm that plans otherwise on one rank."""

    def __init__(self, turned: bool) -> None:
        self.turned = turned

    def assign(self, problem: Any) -> Any:
        bins = np.arange(problem.num_samples, dtype=np.int32)
        return bins[::-1].copy() if self.turned else bins

    def objective(self, loads: Any) -> float:
        return float(-loads[0].max() if self.turned else loads.max())


class Rows:
    """Record i is a tensor of i; counts reads."""

    def __init__(self, size: int = 18) -> None:
        self.size = size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.full((3,), index)


def rows_loader(mesh: Any, dataset: Any, collate_fn: Any = torch.stack, **given: Any) -> DistributedDataLoader:
    """18 records, 2 a micro-batch, 8 a step, in order."""
    topology = DataTopology.from_mesh(mesh)
    sampler = DistributedBatchSampler(18, 2, 8, topology.data_rank, topology.data_parallel_size)
    return build_distributed_dataloader(
        dataset,
        mesh,
        DistributedDatasetConfig(seq_len=8, local_batch_size=2, timeout_s=10.0),
        batch_sampler=sampler,
        metadata_fn=lambda record: SampleMetadata(3, WorkloadCost(llm=1.0)),
        collate_fn=collate_fn,
        **given,
    )


SPEC = TensorFieldSpec((2, 3), torch.int64)
