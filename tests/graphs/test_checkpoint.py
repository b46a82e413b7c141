"""A checkpoint holds everything, is complete or not there, and a broken one does not stop a resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphs.checkpoint import CheckpointDirectory

pytestmark = pytest.mark.usefixtures("single_rank")

Training = tuple[nn.Module, torch.optim.Optimizer]


def training(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(torch.arange(6.0).view(2, 3)) - 1).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(path: Path, steps: list[int], keep: int = 9) -> Training:
    """A run that saves at each of ``steps``."""
    model, optimizer = training()
    checkpoints = CheckpointDirectory(path, keep=keep)
    for step in range(1, max(steps) + 1):
        advance(model, optimizer)
        if step in steps:
            checkpoints.save(step, model, optimizer, {"loader": {"hp_nodes": f"state {step}"}})
    return model, optimizer


def load(path: Path, into: Training, say: Callable[[str], None] = print) -> tuple[int, dict[str, Any]] | None:
    return CheckpointDirectory(path, say=say).load_latest(*into)


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_everything_comes_back_and_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer = save(tmp_path / "new" / "run", [3])
    resumed = training(seed=1)
    assert load(tmp_path / "new" / "run", resumed) == (3, {"loader": {"hp_nodes": "state 3"}})
    assert advance(*resumed, steps=3) == advance(model, optimizer, steps=3)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    save(tmp_path, [1, 2, 3, 4], keep=2)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]


def test_nothing_to_load_is_told_as_none(tmp_path: Path) -> None:
    assert load(tmp_path / "missing", training()) is None
    assert load(tmp_path, training()) is None


def cut_a_file(checkpoint: Path) -> str:
    data = next(checkpoint.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    return "bytes"


def change_a_byte(checkpoint: Path) -> str:
    data = next(checkpoint.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    return "not what was written"


def lose_a_file(checkpoint: Path) -> str:
    (checkpoint / ".metadata").unlink()
    return r"FileNotFoundError"


def lose_the_list(checkpoint: Path) -> str:
    (checkpoint / "contents.json").unlink()
    return r"FileNotFoundError"


def cut_the_list(checkpoint: Path) -> str:
    contents = checkpoint / "contents.json"
    contents.write_bytes(contents.read_bytes()[:-5])
    return "JSONDecodeError"


@pytest.mark.parametrize("damage", [cut_a_file, change_a_byte, lose_a_file, lose_the_list, cut_the_list])
def test_a_broken_checkpoint_is_passed_over_with_a_message(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    save(tmp_path, [1, 2, 3])
    reason = damage(tmp_path / "step_00000003")
    said: list[str] = []
    found = load(tmp_path, training(), said.append)
    assert found == (2, {"loader": {"hp_nodes": "state 2"}})
    assert len(said) == 1
    assert "step_00000003" in said[0]
    assert reason in said[0]


def test_when_all_are_broken_there_is_none(tmp_path: Path) -> None:
    save(tmp_path, [1])
    cut_a_file(tmp_path / "step_00000001")
    assert load(tmp_path, training()) is None


def test_what_a_killed_save_left_is_no_checkpoint_and_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, [1, 2])
    shutil.move(tmp_path / "step_00000002", tmp_path / "step_00000002.partial")
    resumed = training(seed=1)
    found = load(tmp_path, resumed)
    assert found is not None
    assert found[0] == 1
    advance(*resumed)
    CheckpointDirectory(tmp_path).save(2, *resumed, {"loader": {"hp_nodes": "again"}})
    assert load(tmp_path, training()) == (2, {"loader": {"hp_nodes": "again"}})
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_broken_one_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    model, optimizer = save(tmp_path, [1, 2])
    cut_a_file(tmp_path / "step_00000002")
    CheckpointDirectory(tmp_path).save(2, model, optimizer, {"loader": {"hp_nodes": "again"}})
    assert load(tmp_path, training()) == (2, {"loader": {"hp_nodes": "again"}})


def test_keep_must_be_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointDirectory(tmp_path, keep=0)
