"""Corpora as they lie on disks, written by the libraries that define them, drive a graph from end to end."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import SampleMetadata, WorkloadCost
from hp_nodes.datasets import MegatronDataset, TokenDataset, document_record
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import run_ranks

DOCUMENTS = 24
SEQ_LEN = 64


def corpus() -> list[list[int]]:
    """Documents of 3 to 60 tokens, each telling which document it is from."""
    lengths = np.random.default_rng(1).integers(3, 61, size=DOCUMENTS).tolist()
    return [[1000 * number + place for place in range(length)] for number, length in enumerate(lengths)]


# ---- writing them


def write_index(prefix: Path, documents: list[list[int]], dtype: Any = np.int32, code: int = 4) -> Path:
    """By the documented format, each document one sequence."""
    lengths = [len(document) for document in documents]
    offsets = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    prefix.with_name(prefix.name + ".bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    parts = [
        b"MMIDIDX\x00\x00",
        np.array([1], "<u8").tobytes(),
        bytes([code]),
        np.array([len(lengths), len(lengths) + 1], "<u8").tobytes(),
        np.array(lengths, "<i4").tobytes(),
        offsets.astype("<i8").tobytes(),
        np.arange(len(lengths) + 1, dtype="<i8").tobytes(),
    ]
    prefix.with_name(prefix.name + ".idx").write_bytes(b"".join(parts))
    return prefix


def megatron(folder: Path) -> Any:
    return MegatronDataset(write_index(folder / "corpus", corpus()))


def megatron_core(folder: Path) -> Any:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    builder = indexed.IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=np.int32)
    for document in corpus():
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(folder / "corpus.idx"))
    return MegatronDataset(folder / "corpus")


def parquet(folder: Path) -> Any:
    column = pa.array(corpus(), type=pa.list_(pa.int32()))
    pa.parquet.write_table(pa.table({"input_ids": column}), folder / "corpus.parquet", row_group_size=7)
    return TokenDataset(pa.parquet.read_table(folder / "corpus.parquet")["input_ids"])


def hugging_face_arrow(folder: Path) -> Any:
    datasets.Dataset.from_dict({"input_ids": corpus()}).save_to_disk(str(folder / "corpus"), num_shards=3)
    return TokenDataset(datasets.load_from_disk(str(folder / "corpus")).data.column("input_ids"))


def hugging_face_rows(folder: Path) -> Any:
    datasets.Dataset.from_dict({"input_ids": corpus()}).save_to_disk(str(folder / "corpus"))
    return TokenDataset(datasets.load_from_disk(str(folder / "corpus"))["input_ids"])


def plain_lists(folder: Path) -> Any:
    return TokenDataset(corpus())


CORPORA = {
    written.__name__: written
    for written in (megatron, megatron_core, parquet, hugging_face_arrow, hugging_face_rows, plain_lists)
}


# ---- driving a graph


def documents_of(batch: Any) -> list[list[int]]:
    """The documents in a collated text batch; padding has no label."""
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    bounds = batch["cu_seq_lens"].tolist()
    found = [(ids[start:end], labels[start:end]) for start, end in pairwise(bounds)]
    for tokens, own in found:
        if (own != -100).any():
            assert own.tolist() == [*tokens[1:].tolist(), -100]
    return [tokens.tolist() for tokens, own in found if (own != -100).any()]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", CORPORA)
def test_every_document_is_delivered_once_an_epoch(name: str, workers: int, tmp_path: Path) -> None:
    dataset = CORPORA[name](tmp_path)
    config = DistributedDatasetConfig(seq_len=SEQ_LEN, local_batch_size=2, repack_sequences=True, timeout_s=20.0)

    def run(mesh: Any) -> list[list[int]]:
        sampler = DistributedBatchSampler(len(dataset), 2, 8, mesh.get_rank(), 2, order="shuffle")
        options = {"num_workers": workers}
        with build_distributed_dataloader(
            dataset, mesh, config, batch_sampler=sampler, dataloader_kwargs=options
        ) as loader:
            return [document for batch in loader for document in documents_of(batch)]

    delivered = [document for rank in run_ranks({"dp": 2}, run) for document in rank]
    assert sorted(delivered) == corpus()


@pytest.mark.parametrize("name", CORPORA)
def test_lengths_plan_a_window_before_anything_is_read(name: str, tmp_path: Path) -> None:
    dataset = CORPORA[name](tmp_path)
    assert dataset.lengths.dtype == np.int64
    assert dataset.lengths.tolist() == [len(document) for document in corpus()]
    config = DistributedDatasetConfig(seq_len=SEQ_LEN, local_batch_size=1, metadata_mode=True, timeout_s=20.0)

    def run(mesh: Any) -> list[list[list[int]]]:
        sampler = DistributedBatchSampler(len(dataset), 1, 4, mesh.get_rank(), 2)
        with build_distributed_dataloader(
            dataset,
            mesh,
            config,
            batch_sampler=sampler,
            metadata=dataset.lengths,
            cost_model=lambda metadata: WorkloadCost(llm=float(metadata.pack_tokens)),
        ) as loader:
            return [[record["input_ids"].tolist() for record in batch] for batch in loader]

    ranks = run_ranks({"dp": 2}, run)
    assert sorted(document for rank in ranks for batch in rank for document in batch) == corpus()


def test_an_arrow_dataset_of_hugging_face_is_a_dataset_as_it_is(tmp_path: Path) -> None:
    """Its own rows as whole records."""
    datasets.Dataset.from_dict({"input_ids": corpus()}).save_to_disk(str(tmp_path / "rows"))
    rows = datasets.load_from_disk(str(tmp_path / "rows")).with_format("numpy")
    config = DistributedDatasetConfig(seq_len=SEQ_LEN, local_batch_size=2, timeout_s=20.0)

    def run(mesh: Any) -> list[list[int]]:
        sampler = DistributedBatchSampler(len(rows), 2, 4, mesh.get_rank(), 2)
        with build_distributed_dataloader(
            rows,
            mesh,
            config,
            batch_sampler=sampler,
            metadata_fn=lambda row: SampleMetadata(len(row["input_ids"]), WorkloadCost(llm=len(row["input_ids"]))),
        ) as loader:
            return [record["input_ids"].tolist() for batch in loader for record in batch]

    assert sorted(document for rank in run_ranks({"dp": 2}, run) for document in rank) == corpus()


# ---- the Megatron format


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int64, 5), (np.uint8, 1), (np.int16, 3)])
def test_token_dtypes(dtype: Any, code: int, tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5, 6]]
    dataset = MegatronDataset(write_index(tmp_path / "tokens", documents, dtype, code))
    assert [record["input_ids"].tolist() for record in map(dataset.__getitem__, range(len(dataset)))] == documents
    assert dataset.tokens(0).dtype == dtype
    assert dataset[2]["input_ids"].dtype == torch.int64


def test_documents_of_several_sequences_and_of_none(tmp_path: Path) -> None:
    prefix = write_index(tmp_path / "tokens", [[1, 2], [3], [4, 5, 6]])
    index = prefix.with_name("tokens.idx").read_bytes()
    bounds = np.array([0, 2, 2, 3], "<i8").tobytes()
    prefix.with_name("tokens.idx").write_bytes(index[: -len(bounds)] + bounds)
    dataset = MegatronDataset(prefix)
    assert dataset.lengths.tolist() == [3, 0, 3]
    assert dataset[0]["input_ids"].tolist() == [1, 2, 3]
    assert dataset[2]["input_ids"].tolist() == [4, 5, 6]
    with pytest.raises(ValueError, match="at least one"):
        dataset[1]


def test_as_megatron_core_reads_it(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = write_index(tmp_path / "corpus", corpus())
    theirs, ours = indexed.IndexedDataset(str(prefix)), MegatronDataset(prefix)
    assert len(theirs) == len(ours)
    assert [theirs[number].tolist() for number in range(len(ours))] == [
        ours[number]["input_ids"].tolist() for number in range(len(ours))
    ]
    assert theirs.sequence_lengths.tolist() == ours.lengths.tolist()


def test_a_worker_maps_the_files_anew(tmp_path: Path) -> None:
    dataset = MegatronDataset(write_index(tmp_path / "corpus", corpus()))
    text = pickle.dumps(dataset)
    assert len(text) < 300
    assert pickle.loads(text)[5]["input_ids"].tolist() == corpus()[5]


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.idx"):
        MegatronDataset(tmp_path / "nothing")
    prefix = write_index(tmp_path / "corpus", corpus())
    index_path, token_path = prefix.with_name("corpus.idx"), prefix.with_name("corpus.bin")
    index, tokens = index_path.read_bytes(), token_path.read_bytes()
    for changed, text in (
        (b"x" + index[1:], "no Megatron index"),
        (index[:9] + bytes([2]) + index[10:], "version 2"),
        (index[:17] + bytes([6]) + index[18:], "dtype code 6"),
        (index[:-8], "complete index"),
        (index[:-8] + np.array([7], "<i8").tobytes(), "span sequences 0 to 7"),
    ):
        index_path.write_bytes(changed)
        with pytest.raises(ValueError, match=text):
            MegatronDataset(prefix)
    index_path.write_bytes(index)
    token_path.write_bytes(tokens[:-4])
    with pytest.raises(ValueError, match="its index speaks of"):
        MegatronDataset(prefix)
    token_path.write_bytes(tokens)
    dataset = MegatronDataset(prefix)
    with pytest.raises(IndexError, match="24 documents"):
        dataset[DOCUMENTS]


def test_a_column_is_anything_with_lengths_and_items() -> None:
    with pytest.raises(ValueError, match="the column is a list_iterator; accepted: anything with __getitem__, __len__"):
        TokenDataset(iter(corpus()))


@pytest.mark.parametrize("tokens", [[], [[1, 2]], [1.5], "text"])
def test_a_document_is_a_list_of_integers(tokens: Any) -> None:
    with pytest.raises(ValueError, match="1-D integers"):
        document_record(tokens)
