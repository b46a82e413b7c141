"""What ranks tell of a window: every number arrives as it was, in few bytes, in one exchange where it fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_nodes.transport import DataTopology, create_transport, run_ranks
from hp_nodes.transport.opening import HEAD_NBYTES, Gathered, Opening, Room, Status, open_window
from hp_nodes.transport.opening_rows import RowFormat, row_dtype

INTS = st.one_of(*(st.integers(0, 2**bits - 1) for bits in (0, 1, 8, 16, 31)))
COSTS = st.one_of(
    INTS.map(float), st.floats(allow_nan=True), st.sampled_from([-0.0, -1.0, 0.5, 2.0**32, 2.0**32 - 1, 2.0**53, 1e300])
)


@st.composite
def rows_of(draw: Any, before_reading: bool, budgets: int, most: int = 6) -> Any:
    rows = np.zeros(draw(st.integers(0, most)), row_dtype(before_reading, budgets))
    for name in rows.dtype.names or ():
        values = COSTS if rows.dtype[name].kind == "f" else INTS
        if name == "index":
            values = st.one_of(INTS, st.integers(0, 2**62))
        rows[name] = draw(st.lists(values, min_size=len(rows), max_size=len(rows)))
    return rows


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans(), st.integers(0, 20))
def test_rows_come_back_bit_by_bit(data: Any, before_reading: bool, budgets: int) -> None:
    dtype = row_dtype(before_reading, budgets)
    ranks = [data.draw(rows_of(before_reading, budgets)) for _ in range(3)]
    least = [RowFormat.least(rows) for rows in ranks]
    common = least[0].wider(least[1]).wider(least[2])
    assert common.row_nbytes <= RowFormat.full(dtype).row_nbytes == 24 + 8 * budgets
    assert all(RowFormat.from_code(dtype, one.code) == one and common.holds(one) for one in least)
    room = max(map(len, ranks)) + 1
    received = np.zeros((3, room * common.row_nbytes), np.uint8)
    for told, rows in zip(received, ranks, strict=True):
        packed = common.pack(rows)
        told[: len(packed)] = packed
    found = common.unpack(received, np.array([len(rows) for rows in ranks]))
    assert found.dtype == dtype
    assert found.tobytes() == np.concatenate(ranks).tobytes()


@pytest.mark.parametrize(
    ("values", "nbytes"),
    [([0, 0], 0), ([255], 1), ([256], 2), ([65536], 4), ([0.5], 8), ([2.0**32], 8), ([-1.0], 8), ([float("nan")], 8)],
)
def test_costs_are_as_wide_as_they_need(values: list[float], nbytes: int) -> None:
    rows = np.zeros(len(values), row_dtype(False, 0))
    rows["cost"] = values
    assert RowFormat.least(rows).row_nbytes == nbytes


def window(rank: int, tokens: list[int], budgets: int = 0) -> Opening:
    rows = np.zeros(len(tokens), row_dtype(False, budgets))
    rows["tokens"], rows["cost"], rows["offset"] = tokens, np.square(tokens), np.arange(len(tokens))
    for budget in range(budgets):
        rows[f"budget_{budget}"] = budget + 0.5
    return Opening(0, 0, 0, 1, True, False, 100 * rank, rows)


def opened(windows: list[list[list[int]]], budgets: int = 0) -> list[tuple[list[list[int]], int, int]]:
    """For each window, given by rank: tokens that rank 0 hears of each rank, exchanges, and bytes of the next room."""

    def run(mesh: Any) -> Any:
        transport = create_transport(DataTopology.from_mesh(mesh), timeout_s=10)
        room, found = Room.first(budgets), []
        for tokens in windows:
            before = transport.exchanges
            gathered = open_window(transport, window(transport.rank, tokens[transport.rank], budgets), room, "Planner")
            assert isinstance(gathered, Gathered)
            heard = np.split(gathered.rows["tokens"], gathered.starts[1:])
            assert gathered.positions.tolist() == [
                100 * r + i for r, some in enumerate(tokens) for i in range(len(some))
            ]
            assert np.array_equal(gathered.rows["cost"], np.square(gathered.rows["tokens"].astype(float)))
            room = gathered.room
            found.append(([some.tolist() for some in heard], transport.exchanges - before, room.nbytes))
        assert open_window(transport, Status.END, room, "Planner") is None
        return found

    results = run_ranks({"dp": 2}, run)
    assert results[0] == results[1]
    first: list[tuple[list[list[int]], int, int]] = results[0]
    return first


def test_one_exchange_once_there_is_room() -> None:
    small, large = [[3, 4, 5], [6, 7]], [[70_000, 4, 5], [6, 7]]
    found = opened([small, small, large, small, large, [[1] * 9, []]])
    assert [heard for heard, _, _ in found] == [small, small, large, small, large, [[1] * 9, []]]
    assert [exchanges for _, exchanges, _ in found] == [2, 1, 2, 1, 1, 2]


def test_few_bytes_a_sample() -> None:
    tokens = [[500 + i for i in range(64)], [900 - i for i in range(60)]]
    (_, _, nbytes), *_ = opened([tokens])
    assert nbytes == HEAD_NBYTES + 64 * (4 + 2 + 1)  # the cost, the tokens, the offset; the reference and part are 0


def test_more_budgets_than_the_head_can_tell_of() -> None:
    tokens = [[3, 4], [5]]
    found = opened([tokens, tokens, [[70_000], [5]]], budgets=12)
    assert [heard for heard, _, _ in found] == [tokens, tokens, [[70_000], [5]]]
