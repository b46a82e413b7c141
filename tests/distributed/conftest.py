"""One set of processes for a test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import RankPool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.stop()
