"""What most people write in front of a DataLoader: documents packed first-come into rows, per rank.

Two usual forms. A batch sampler that knows the lengths takes documents, in the sampler's order, into a micro-batch
until the next one has no room, and a collate function lays them out (``batch_sampler`` and ``collate_fn`` of
https://docs.pytorch.org/docs/stable/data.html; DistributedSampler and ``set_epoch`` as there). And an iterable dataset
that packs a stream of documents, each rank and worker its share (the same page, "Iterable-style datasets").

A document that has no room ends the row, as in greedy (next-fit) packing. Ranks pack by themselves, so that one may
have more micro-batches than another at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler, get_worker_info

IGNORED_LABEL = -100
Document = dict[str, Tensor]


class GreedyBatchSampler(Sampler[list[int]]):
    """Documents of a micro-batch: those of the sampler, in its order, as long as they fit into ``rows`` rows.

    With ``state_dict`` and ``load_state_dict``, as torchdata's page on StatefulDataLoader advises for map-style
    datasets, so that a resume skips indices and reads nothing.
    """

    def __init__(self, sampler: Any, lengths: NDArray[np.int64], seq_len: int, rows: int) -> None:
        self.sampler = sampler
        self.lengths = lengths.tolist()
        self.seq_len = seq_len
        self.rows = rows
        self.taken = 0
        self._skipped = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.taken, self._skipped = self._skipped, 0
        batch: list[int] = []
        row = used = 0
        for index in islice(iter(self.sampler), self.taken, None):
            length = self.lengths[index]
            if used + length > self.seq_len:
                row, used = row + 1, 0
                if row == self.rows:
                    self.taken += len(batch)
                    yield batch
                    batch, row = [], 0
            batch.append(index)
            used += length
        # what is left fills no micro-batch: drop_last

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped = state["taken"]


class PackedDocuments(IterableDataset[Document]):
    """A stream of rows packed from this rank's documents, each worker its share. Without a state of its own."""

    def __init__(self, documents: Any, sampler: Any, seq_len: int) -> None:
        super().__init__()
        self.documents = documents
        self.sampler = sampler
        self.seq_len = seq_len
        self.taken = 0

    def __iter__(self) -> Iterator[Document]:
        worker = get_worker_info()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        row: list[Document] = []
        used = 0
        for index in islice(iter(self.sampler), first + self.taken * every, None, every):
            document = self.documents[index]
            length = len(document["input_ids"])
            if used + length > self.seq_len:
                self.taken += len(row)
                yield lay_out(row, self.seq_len)
                row, used = [], 0
            row.append(document)
            used += length
        self.taken = 0


class StatefulPackedDocuments(PackedDocuments):
    """The same with its place in the stream as its state, as torchdata's page advises for iterable datasets."""

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def lay_out(documents: Sequence[Document], seq_len: int) -> Document:
    """One row: the documents one behind the other, padded."""
    lengths = [len(document["input_ids"]) for document in documents]
    input_ids = torch.zeros(seq_len, dtype=torch.int64)
    labels = torch.full((seq_len,), IGNORED_LABEL)
    position_ids = torch.empty(seq_len, dtype=torch.int64)
    start = 0
    for document, length in zip(documents, lengths, strict=True):
        input_ids[start : start + length] = document["input_ids"]
        labels[start : start + length] = document["labels"]
        torch.arange(length, out=position_ids[start : start + length])
        start += length
    if start < seq_len:
        torch.arange(seq_len - start, out=position_ids[start:])
        lengths.append(seq_len - start)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def stack(rows: Sequence[Document]) -> dict[str, Any]:
    """Rows as the micro-batch that the model takes: what hp-nodes' text collate gives, field by field."""
    lengths = torch.cat([row["lengths"] for row in rows])
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=bounds[1:])
    labels = torch.stack([row["labels"] for row in rows])
    return {
        "input_ids": torch.stack([row["input_ids"] for row in rows]),
        "labels": labels,
        "cu_seq_lens": bounds,
        "position_ids": torch.stack([row["position_ids"] for row in rows]),
        "max_seq_len": int(lengths.max()),
        "num_label_tokens": int((labels != IGNORED_LABEL).sum()),
    }


class GreedyCollate:
    """A batch of documents as one micro-batch of ``rows`` rows."""

    def __init__(self, seq_len: int, rows: int) -> None:
        self.seq_len = seq_len
        self.rows = rows

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        rows: list[list[Document]] = [[]]
        used = 0
        for document in documents:
            length = len(document["input_ids"])
            if used + length > self.seq_len:
                rows.append([])
                used = 0
            rows[-1].append(document)
            used += length
        return stack([lay_out(row, self.seq_len) for row in rows])
