"""The loaders that stand side by side: each opened over the same file, for one rank of a data-parallel group.

* ``hp-nodes``: the ready-made graph, rows repacked, a window as long as the step.
* ``DataLoader``: map-style documents, DistributedSampler, micro-batches packed greedily; as
  https://docs.pytorch.org/docs/stable/data.html sets up batch samplers, collate functions and DistributedSampler.
* ``StatefulDataLoader``: the same; https://meta-pytorch.org/data/main/stateful_dataloader_tutorial.html, "Saving Custom
  State with Map-Style Datasets".
* ``StatefulDataLoader, iterable``: rows packed by an iterable dataset. Its state is what the loader keeps by itself:
  the number of batches, to which it "naively fast-forwards". ``..., own state``: with the place in the stream as state.
* ``Grain``: documents shuffled, sliced by rank, first-fit packed into as many bins as a rank's step has rows, batched;
  https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html, and ReadOptions' advice for data
  in memory: no reading threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.benchmarks.side_by_side.corpus import SEQ_LEN, Documents
from tests.benchmarks.side_by_side.packing import (
    IGNORED_LABEL,
    GreedyBatchSampler,
    GreedyCollate,
    PackedDocuments,
    StatefulPackedDocuments,
    stack,
)

OURS = "hp-nodes"
SEED = 17


@dataclass(frozen=True)
class Setting:
    """What all ways are given."""

    path: Path
    rows_of_step: int = 32
    """Rows of a step over all ranks and rounds."""
    rows: int = 1
    """Of a micro-batch."""
    workers: int = 0
    wrap: Callable[[Any], Any] | None = None
    """Put around the dataset that is read: one that fails, or is longer."""

    consumed: int = 0
    """Rows of the epoch that are over already, of a loader that can be started anywhere (ours)."""

    def wrapped(self, dataset: Any) -> Any:
        return dataset if self.wrap is None else self.wrap(dataset)

    def rounds(self, size: int) -> int:
        return self.rows_of_step // (self.rows * size)


@dataclass
class Opened:
    """A loader of one rank: micro-batches without end, the state to save, and how it is closed."""

    batches: Iterator[dict[str, Any]]
    state: Callable[[], Any]
    close: Callable[[], None] = lambda: None


def open_ours(setting: Setting, rank: int, size: int, state: Any = None) -> Opened:
    from torch.distributed.device_mesh import init_device_mesh

    from graphs import DistributedDatasetConfig, build_distributed_dataloader
    from graphs.text_records import RecordFile
    from hp_nodes.samplers import DistributedBatchSampler

    records = setting.wrapped(RecordFile(setting.path))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    sampler = DistributedBatchSampler(
        len(records), setting.rows, setting.rows_of_step, rank, size, order="shuffle", seed=SEED
    )
    if setting.consumed:
        sampler.consumed_samples = setting.consumed
    config = DistributedDatasetConfig(
        seq_len=SEQ_LEN,
        local_batch_size=setting.rows,
        balance_window_size=setting.rounds(size),
        repack_sequences=True,
    )
    workers = {"num_workers": setting.workers}
    loader = build_distributed_dataloader(records, mesh, config, batch_sampler=sampler, dataloader_kwargs=workers)
    if state is not None:
        loader.load_state_dict(state)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return Opened(batches(), loader.state_dict, loader.close)


def greedy_parts(setting: Setting, rank: int, size: int) -> tuple[Any, DistributedSampler[Any], dict[str, Any]]:
    documents = Documents(setting.path)
    lengths = documents.lengths
    wrapped = setting.wrapped(documents)
    sampler: DistributedSampler[Any] = DistributedSampler(wrapped, size, rank, shuffle=True, seed=SEED)
    if len(wrapped) > len(documents):
        lengths = np.resize(lengths, len(wrapped))
    greedy = {
        "batch_sampler": GreedyBatchSampler(sampler, lengths, SEQ_LEN, setting.rows),
        "collate_fn": GreedyCollate(SEQ_LEN, setting.rows),
        "num_workers": setting.workers,
    }
    return wrapped, sampler, greedy


def epochs(loader: Any, sampler: DistributedSampler[Any], first: int = 0) -> Iterator[Any]:
    epoch = first
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def open_dataloader(setting: Setting, rank: int, size: int, state: Any = None) -> Opened:
    documents, sampler, greedy = greedy_parts(setting, rank, size)
    return Opened(epochs(DataLoader(documents, **greedy), sampler), lambda: None)


def open_stateful(setting: Setting, rank: int, size: int, state: Any = None) -> Opened:
    from torchdata.stateful_dataloader import StatefulDataLoader

    documents, sampler, greedy = greedy_parts(setting, rank, size)
    loader = StatefulDataLoader(documents, **greedy)
    if state is not None:
        loader.load_state_dict(state)
    return Opened(epochs(loader, sampler), loader.state_dict)


def open_iterable(
    setting: Setting, rank: int, size: int, state: Any = None, kind: type[PackedDocuments] = PackedDocuments
) -> Opened:
    from torchdata.stateful_dataloader import StatefulDataLoader

    documents, sampler, _ = greedy_parts(setting, rank, size)
    stream = kind(documents, sampler, SEQ_LEN)
    loader = StatefulDataLoader(stream, batch_size=setting.rows, collate_fn=stack, num_workers=setting.workers)
    if state is not None:
        loader.load_state_dict(state)
    return Opened(epochs(loader, sampler), loader.state_dict)


def open_iterable_with_state(setting: Setting, rank: int, size: int, state: Any = None) -> Opened:
    return open_iterable(setting, rank, size, state, StatefulPackedDocuments)


def as_arrays(document: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What Grain's packing takes."""
    return {name: tensor.numpy() for name, tensor in document.items()}


def as_micro_batch(packed: dict[str, Any]) -> dict[str, Any]:
    """Grain's packed rows as the micro-batch that the model takes; padding is a segment of its own, as with all."""
    positions = packed["input_ids_positions"]
    segments = packed["input_ids_segment_ids"]
    starts = np.flatnonzero(np.diff(segments, prepend=-1).ravel())
    bounds = np.append(starts, segments.size).astype(np.int32)
    lengths = np.diff(bounds)
    position_ids = positions.astype(np.int64)
    for row, used in enumerate((segments > 0).sum(axis=1).tolist()):
        position_ids[row, used:] = np.arange(segments.shape[1] - used)
    labels = packed["labels"]
    return {
        "input_ids": packed["input_ids"],
        "labels": labels,
        "cu_seq_lens": bounds,
        "position_ids": position_ids,
        "max_seq_len": int(lengths.max()),
        "num_label_tokens": int((labels != IGNORED_LABEL).sum()),
    }


def as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in batch.items()}


def open_grain(setting: Setting, rank: int, size: int, state: Any = None) -> Opened:
    import grain
    from grain.experimental import FirstFitPackIterDataset

    documents = setting.wrapped(Documents(setting.path))
    shuffled = grain.MapDataset.source(documents).seed(SEED).shuffle()[rank::size].map(as_arrays).repeat()
    packed = FirstFitPackIterDataset(
        shuffled.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"input_ids": SEQ_LEN, "labels": SEQ_LEN},
        num_packing_bins=setting.rounds(size) * setting.rows,
        meta_features=("labels",),
        padding_struct={"input_ids": 0, "labels": IGNORED_LABEL},
        seed=SEED,
    )
    batched = packed.batch(setting.rows, drop_remainder=True).map(as_micro_batch)
    if setting.workers:  # which send numpy arrays through shared memory
        batched = batched.mp_prefetch(grain.MultiprocessingOptions(num_workers=setting.workers))
    iterator = iter(batched.map(as_tensors))
    if state is not None:
        iterator.set_state(state)
    return Opened(iterator, iterator.get_state, getattr(iterator, "close", lambda: None))


WAYS: dict[str, Callable[..., Opened]] = {
    OURS: open_ours,
    "DataLoader": open_dataloader,
    "StatefulDataLoader": open_stateful,
    "StatefulDataLoader, iterable": open_iterable,
    "StatefulDataLoader, iterable, own state": open_iterable_with_state,
    "Grain": open_grain,
}
INSTALL = {"Grain": ("grain", "pip install -r tests/benchmarks/requirements.txt")}
