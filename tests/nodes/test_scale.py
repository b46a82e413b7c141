"""Many ranks, odd numbers of them, and very different ranks: the same samples, whole, and as few exchanges as few."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_nodes import MetadataDeriver, Planner, Router, SampleReader, WindowSampler
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.scenes import Documents, count_tokens


def routed(mesh: Any, dataset: Documents, limit: int) -> tuple[list[tuple[int, list[int]]], int]:
    """What the Router gives for one window of whole records, and the exchanges it took."""
    transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=20)
    sampler = DistributedBatchSampler(len(dataset), 2, len(dataset), transport.rank, transport.size, order="shuffle")
    windows = MetadataDeriver(
        SampleReader(WindowSampler(sampler, 1), dataset), count_tokens, cost_model=CausalAttentionCostModel()
    )
    planner = Planner(windows, transport, seq_len=64, local_batch_size=2)
    router = Router(planner, transport, max_exchange_bytes=limit)
    router.reset(None)
    window = next(router)
    transport.close()
    assert window.samples is not None and window.assignment is not None and window.assignment.moves
    given = [(key.index, sample["input_ids"].tolist()) for key, sample in zip(window.keys, window.samples, strict=True)]
    return given, transport.exchanges


@pytest.mark.parametrize("ranks", [12, 48])
def test_an_exchange_is_cut_by_what_a_rank_sends_and_not_by_how_many_ranks_there_are(ranks: int) -> None:
    """A rank has two samples, so no rank sends or receives more than two, whose 400 bytes fit 2 KiB."""
    dataset = Documents(2 * ranks)
    results = run_ranks({"dp": ranks}, lambda mesh: routed(mesh, dataset, limit=2048))
    assert {exchanges for _, exchanges in results} == {5}  # opening, numbers (the first time), plan, sizes, payload
    given = sorted(sample for samples, _ in results for sample in samples)
    assert given == [(index, [index] * length) for index, length in enumerate(dataset.lengths.tolist())]


@pytest.mark.parametrize("ranks", [3, 12])
def test_an_exchange_that_is_too_large_still_goes_in_pieces(ranks: int) -> None:
    dataset = Documents(2 * ranks)
    results = run_ranks({"dp": ranks}, lambda mesh: routed(mesh, dataset, limit=300))
    assert len({exchanges for _, exchanges in results}) == 1
    assert results[0][1] > 5
    given = sorted(sample for samples, _ in results for sample in samples)
    assert given == [(index, [index] * length) for index, length in enumerate(dataset.lengths.tolist())]


def test_numbers_of_ranks_that_fill_no_power_of_two() -> None:
    dataset = Documents(2 * 7)
    results = run_ranks({"dp": 7}, lambda mesh: routed(mesh, dataset, limit=1 << 20))
    assert np.unique([exchanges for _, exchanges in results]).size == 1
