"""The packed text by each way of loading: what ``--mode`` of the training program chooses. Copy the one that you need.

The same records in the same order, and rows of the same documents until something is planned:

* ``metadata``: rows stay whole. Their lengths and costs are in the record file's index, so a window is planned before
  anything is read, and each row is read by the rank that trains on it.
* ``online``: rows stay whole. They are read first and measured, and those that change ranks travel.
* ``repack``: rows are split into their documents, which are packed anew and evenly over ranks and rounds.
* ``external``: :class:`RowRounds`, a step source of one's own, yields this rank's rounds of rows as documents; those
  change ranks within a round.

The first three have one state, which resumes in each of them and on another number of ranks; that of ``external`` is
its ranks' own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from graphs.arguments import text_batch_spec
from graphs.text_records import RecordFile
from hp_nodes import DistributedDataLoader, SampleMetadata, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.text import collate_text, pack_text, split_packed_text
from hp_nodes.transport import DataTopology

__all__ = ["MODES", "RowRounds", "make_loader", "refusals", "row_metadata", "split_records"]

MODES = ("metadata", "online", "repack", "external")
NEVER = 1 - 1e-9
"""A gain that no plan reaches: every step stays as the sampler laid it out."""


def refusals(mode: str, *, tp: int, window: int | None, workers: int) -> list[str]:
    """What the options ask for that a mode cannot do, each with the reason."""
    if mode != "external":
        return []
    problems = []
    if tp > 1:
        problems.append(f"--tp {tp} with --mode external: a source feeds its own rank, so there are no model peers")
    if window is not None and window > 1:
        problems.append(f"--window {window} with --mode external: each round of a source is planned alone; accepted: 1")
    if workers:
        problems.append(f"--workers {workers} with --mode external: the source reads by itself; accepted: 0")
    return problems


def split_records(count: int, held_out: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Indices to train on and, evenly spread among them, about ``held_out`` to evaluate on."""
    every = max(2, count // max(1, held_out))
    evaluated = np.arange(every - 1, count, every) if held_out else np.arange(0)
    return np.setdiff1d(np.arange(count), evaluated), evaluated


def make_loader(
    records: RecordFile,
    indices: np.ndarray[Any, Any],
    mesh: DeviceMesh,
    options: argparse.Namespace,
    *,
    balance: bool = True,
    order: str = "shuffle",
) -> DistributedDataLoader:
    """The records of ``indices`` in the mode that the options name. Model peers get what their constructor reads."""
    topology = DataTopology.from_mesh(mesh)
    sampler = DistributedBatchSampler(
        len(indices),
        options.local_batch_size,
        options.global_batch_size,
        topology.data_rank,
        topology.data_parallel_size,
        order=order,
        seed=options.seed,
        index_mapping=indices,
    )
    external = options.mode == "external"
    rounds = sampler.global_batch_size // sampler.global_micro_batch_size
    config = DistributedDatasetConfig(
        seq_len=options.seq_len,
        local_batch_size=options.local_batch_size,
        balance_window_size=1 if external else options.window or rounds,
        repack_sequences=options.mode in ("repack", "external"),
        metadata_mode=options.mode == "metadata",
        objective="makespan" if options.no_sync else "lockstep",
        min_balance_gain=0.0 if balance else NEVER,
    )
    if external:
        given: dict[str, Any] = {"external_step_source": RowRounds(records, sampler)}
        # The data and their order, of which the library knows nothing here.
        given["fingerprint"] = {"dataset_length": len(records), "sampler": sampler.fingerprint()}
    else:
        given = {"batch_sampler": sampler, "dataloader_kwargs": {"num_workers": options.workers}, "fingerprint": {}}
    given["fingerprint"]["mode"] = "external" if external else "metadata, online or repack"
    if options.mode in ("metadata", "online"):
        given |= {"collate_fn": RowCollator(options.seq_len), "model_batch_spec": text_batch_spec(config)}
    if options.mode == "metadata" and topology.is_constructor:
        given["metadata"] = records.row_metadata(options.seq_len)
    if options.mode == "online":
        given["metadata_fn"] = RowMetadata(options.seq_len)
    dataset = records if topology.is_constructor and not external else None
    return build_distributed_dataloader(dataset, mesh, config, **given)


# ---- whole rows: what one costs, and how those of a round become a batch


def row_metadata(lengths: Sequence[int], seq_len: int) -> SampleMetadata:
    """What a row of documents of these lengths takes and costs: each document, and the padding behind them, attends to
    itself alone, so the cost is the sum of the squares of their lengths.
    """
    tokens = sum(lengths)
    squares = sum(length**2 for length in lengths) + (seq_len - tokens) ** 2
    return SampleMetadata(tokens, cost=WorkloadCost(llm=float(squares)))


class RowMetadata:
    """The metadata of a row once it is read."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def __call__(self, record: Mapping[str, Tensor]) -> SampleMetadata:
        return row_metadata(record["cu_seq_lens"].diff().tolist(), self.seq_len)


class RowCollator:
    """Whole rows as the batch that the built-in repacking makes, each row padded to ``seq_len``."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len

    def __call__(self, records: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return collate_text([pack_text(split_packed_text(record), self.seq_len) for record in records])


# ---- external steps


class RowRounds:
    """A step source: each item is one round of this rank, a bin of documents for each row that the sampler chose.

    It says where it stands and goes there, so a run can be resumed, on as many data-parallel ranks.

    Raises:
        ValueError: there are fewer samples than a step takes.
    """

    def __init__(self, records: RecordFile, sampler: DistributedBatchSampler) -> None:
        if sampler.total_samples < sampler.global_batch_size:
            raise ValueError(
                f"an epoch has no step: {sampler.total_samples} samples are fewer than one global batch of "
                f"{sampler.global_batch_size}; accepted: at least that many"
            )
        self.records = records
        self.sampler = sampler
        self.rounds_per_step = sampler.global_batch_size // sampler.global_micro_batch_size
        self._epoch = 0
        self._rounds = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._rounds = epoch, 0

    def __iter__(self) -> Iterator[list[list[dict[str, Tensor]]]]:
        consumed = self._rounds * self.sampler.global_micro_batch_size
        self.sampler.load_state_dict({"epoch": self._epoch, "consumed_samples": consumed})
        for indices in self.sampler:
            self._rounds += 1
            yield [split_packed_text(self.records[index]) for index in indices]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._epoch, self._rounds = state["epoch"], state["rounds"]
