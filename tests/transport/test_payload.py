"""Parcels: every sample arrives at its place, whole or in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_nodes.transport import DataTopology, create_transport, run_ranks
from hp_nodes.transport.codec import Codec
from hp_nodes.transport.payload import Payload, UnsendableSampleError, pack_parcels, pieces_needed
from hp_nodes.types import SampleKey


def route(mesh: Any, limit: int, seed: int) -> tuple[list[Any], int]:
    """Send random samples to random places; what arrived, and the exchanges it took."""
    transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=10)
    codec, size, me = Codec(), transport.size, transport.rank
    rng = np.random.default_rng(seed)  # the same on every rank: all know who sends what
    counts = rng.integers(0, 12, size)
    targets = [rng.integers(0, size, count).astype(np.int32) for count in counts]
    lengths = [rng.integers(0, 2000, count) for count in counts]
    mine = [{"ids": np.full(n, me), "place": i} for i, n in enumerate(lengths[me].tolist())]
    keys = np.array([[1000 * me + i, 7, 0] for i in range(len(mine))], dtype=np.int64).reshape(-1, 3)
    payload = Payload(transport, codec, limit)
    parcels = payload.pack(keys, mine, targets[me])
    sizes = np.array([[parcel.frame_nbytes, parcel.nbytes] for parcel in parcels], dtype=np.int64)
    told = transport.all_gather(sizes.view(np.uint8).reshape(-1), "sizes").view(np.int64).reshape(size, size, 2)
    arrivals = [int((targets[place] == me).sum()) if place != me else 0 for place in range(size)]
    before = transport.exchanges
    arrived = payload.carry(parcels, arrivals, told[:, me, 0].tolist(), int(told[..., 1].max()), size - 1, "node")
    for (position, index, part), sample in zip(arrived.keys.tolist(), arrived.samples, strict=True):
        sender, place = divmod(position, 1000)
        assert (index, part) == (7, 0)
        assert sample["place"] == place
        assert sample["ids"].tolist() == [sender] * lengths[sender][place]
    expected = [1000 * s + i for s in range(size) if s != me for i, to in enumerate(targets[s]) if to == me]
    assert sorted(arrived.keys[:, 0].tolist()) == expected
    return expected, transport.exchanges - before


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [3_000, 50_000, 1 << 30])
def test_everything_arrives(limit: int, seed: int) -> None:
    results = run_ranks({"dp": 3}, lambda mesh: route(mesh, limit, seed))
    exchanges = {count for _, count in results}
    assert len(exchanges) == 1
    assert (exchanges == {1}) == (limit == 1 << 30) or limit == 50_000


def test_number_of_pieces() -> None:
    assert pieces_needed(0, 8, 100) == 1
    assert pieces_needed(100, 4, 400) == 1
    assert pieces_needed(101, 4, 400) == 2
    assert pieces_needed(100, 0, 400) == 1


def test_the_sample_that_cannot_travel_is_named() -> None:
    keys = np.array([[0, 5, 0], [1, 6, 0], [2, 7, 1]], dtype=np.int64)
    samples: list[Any] = [1, 2, object()]
    pack_parcels(keys, samples, np.array([1, 0, 0], dtype=np.int32), 0, 2, Codec())  # it stays: nothing to refuse
    with pytest.raises(UnsendableSampleError, match="object") as caught:
        pack_parcels(keys, samples, np.array([1, 0, 1], dtype=np.int32), 0, 2, Codec())
    assert caught.value.key == SampleKey(2, 7, 1)
