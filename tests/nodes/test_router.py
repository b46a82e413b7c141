"""CASES 13 and 17 in a graph: a sample that moved is the sample that stayed, whatever it is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hp_nodes.transport import run_ranks
from tests.graphs.mode_scene import Texts, loader_of
from tests.transport.codec_samples import same

OFFSETS = [8388609, 16777217, 16777219]


class Pair(NamedTuple):
    left: Any
    right: Any


class Rich(Texts):
    """Every kind of payload beside the text, each telling its record."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {
            "short": torch.full((3,), index, dtype=torch.int16),
            "tiny": torch.tensor([index / 4, -0.0]).to(torch.float8_e4m3fn),
            "flags": torch.tensor([index % 2 == 0, True]),
            "half": torch.tensor([index, float("inf")], dtype=torch.bfloat16),
            "bytes": torch.tensor([index % 256], dtype=torch.uint8),
            "scalar": torch.tensor(index),
            "nothing": torch.empty(0, 5),
            "turned": torch.arange(6).reshape(2, 3).T + index,
            "offsets": torch.tensor(OFFSETS) + index,
            "array": np.array(OFFSETS, dtype=np.int32) + index,
            "number": np.float32(index),
            "large": OFFSETS[2] + index,
            "pair": Pair([f"record {index}", None], (torch.tensor([index]), {"of": np.arange(2)})),
        }


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_moved_and_samples_that_stayed_are_what_was_read(workers: int) -> None:
    kwargs = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else None

    def run(mesh: Any) -> tuple[int, int, int]:
        as_read = Rich()
        with loader_of("online", mesh, Rich(), 4, dataloader_kwargs=kwargs) as loader:
            delivered = received = 0
            for batch in loader:
                for record in batch:
                    assert same(record, as_read[int(record["scalar"])])
                    delivered += 1
                received += loader.last.report.samples_received if loader.last.ends_step else 0
        return delivered, received, delivered - received

    for delivered, moved, stayed in run_ranks({"dp": 2}, run):
        assert delivered == 24
        assert moved > 0 and stayed > 0
