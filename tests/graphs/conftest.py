"""A process group of one rank, for what needs one but is not about several; a text to train on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.graphs.pretrain_scene import write_text


@pytest.fixture(scope="module")
def single_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of text files, and of the records that runs make of them."""
    return write_text(tmp_path_factory.mktemp("text"))
