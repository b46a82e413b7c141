"""Each step holds the samples that the order by definition says, whatever the layout and wherever it was resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hp_nodes.samplers.permutation import KeyedPermutation
from tests import reference_order
from tests.reference_order import record_at
from tests.soak_resume import check, configurations


def test_three_hundred_random_configurations() -> None:
    steps = sum(map(check, configurations(300)))
    assert steps > 800


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_ten_thousand_random_configurations() -> None:
    assert sum(map(check, configurations(10_000, seed=1))) > 25_000


def test_the_reference_uses_nothing_of_the_library() -> None:
    assert "hp_nodes" not in Path(reference_order.__file__).read_text(encoding="utf-8")


def test_the_definition_and_the_library_permute_alike() -> None:
    for size in (1, 2, 3, 10, 97, 4096, 10**6 + 3, 10**12, 2**61 + 1):
        places = np.unique(np.linspace(0, size - 1, 20).astype(np.int64))
        assert KeyedPermutation(size, 5, 2)(places).tolist() == [record_at(p, size, 5, 2) for p in places.tolist()]
    assert sorted(record_at(place, 50, 0, 0) for place in range(50)) == list(range(50))
