"""What stands side by side is alike: the same documents and fields, each document once, and states that resume."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from graphs.text_records import pack_records
from graphs.tokenizer import ByteTokenizer
from hp_nodes.text import collate_text, pack_text
from tests.benchmarks.side_by_side import ways
from tests.benchmarks.side_by_side.corpus import SEQ_LEN, Documents
from tests.benchmarks.side_by_side.flow import padding
from tests.benchmarks.side_by_side.packing import GreedyBatchSampler, GreedyCollate

BASELINES = [name for name in ways.WAYS if name != ways.OURS]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    texts = []
    for number, length in enumerate(np.random.default_rng(0).integers(20, 4000, 60).tolist()):
        texts.append(directory / f"{number:03}.txt")
        texts[-1].write_text(f"{number:03} ".ljust(length, "."), encoding="utf-8")
    pack_records(texts, directory / "text.records", tokenizer=ByteTokenizer(), seq_len=SEQ_LEN, fill=0.8)
    return directory / "text.records"


def opened(name: str, path: Path, state: Any = None) -> ways.Opened:
    if name == "Grain":
        pytest.importorskip("grain")
    return ways.WAYS[name](ways.Setting(path, rows_of_step=4), 0, 1, state)


def numbers(batch: dict[str, Any]) -> list[int]:
    """Which documents are in a micro-batch."""
    ids = batch["input_ids"].flatten()
    starts = [start for start, end in pairwise(batch["cu_seq_lens"].tolist()) if end - start > 4]
    texts = [bytes(ids[start : start + 3].tolist()).decode() for start in starts]
    return [int(text) for text in texts if text.isdigit()]


def test_a_greedily_packed_micro_batch_is_the_one_that_our_own_functions_make(path: Path) -> None:
    documents = [Documents(path)[index] for index in (3, 14, 15)]
    theirs, ours = GreedyCollate(SEQ_LEN, 1)(documents), collate_text([pack_text(documents, SEQ_LEN)])
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        found = theirs[name]
        assert type(found) is type(value)
        if isinstance(value, torch.Tensor):
            assert found.dtype == value.dtype and torch.equal(found, value)
        else:
            assert found == value


@pytest.mark.parametrize("name", BASELINES)
def test_every_way_delivers_such_micro_batches(name: str, path: Path) -> None:
    batch = next(opened(name, path).batches)
    inside = {number: Documents(path)[number] for number in numbers(batch)}
    again = collate_text([pack_text([inside[number] for number in numbers(batch)], SEQ_LEN)])
    assert batch.keys() == again.keys()
    for field in again:
        assert torch.equal(torch.as_tensor(batch[field]), torch.as_tensor(again[field])), field
    assert padding(batch) == SEQ_LEN - sum(len(document["input_ids"]) for document in inside.values())


@pytest.mark.parametrize("name", BASELINES)
def test_no_document_comes_twice_in_an_epoch(name: str, path: Path) -> None:
    batches = opened(name, path).batches
    seen = [number for _ in range(10) for number in numbers(next(batches))]
    assert len(seen) == len(set(seen)) > 20


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "DataLoader"])
def test_a_state_resumes_at_the_next_micro_batch(name: str, path: Path) -> None:
    first = opened(name, path)
    for _ in range(3):
        next(first.batches)
    again = opened(name, path, first.state())
    assert numbers(next(again.batches)) == numbers(next(first.batches))


def test_documents_are_taken_while_they_fit() -> None:
    lengths = np.array([5, 5, 5, 9, 1, 10])
    sampler: DistributedSampler[Any] = DistributedSampler(range(6), 1, 0, shuffle=False)
    assert list(GreedyBatchSampler(sampler, lengths, 10, 1)) == [[0, 1], [2], [3, 4]]
    assert list(GreedyBatchSampler(sampler, lengths, 10, 2)) == [[0, 1, 2]]
