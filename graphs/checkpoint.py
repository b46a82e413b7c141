"""Checkpoints of a training run: saved whole or not at all, kept a few deep, and a broken one is passed over.

Takes what :func:`torch.distributed.checkpoint.save` takes: the model (plain, DistributedDataParallel or
``fully_shard``, split over model peers or not), its optimizer, and values that are no tensors; among these the loader's
state, which is one string and the same on every rank, or one for each data rank. Every rank writes its own part into
``step_00000012.partial``; then rank 0 adds a list of the files with their sizes and checksums and renames the
directory. So ``step_00000012`` exists only when it is complete, and damage done later is noticed by the list.

Requires a directory that all ranks see. A checkpoint resumes on another number of ranks, as far as the loader's does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["CheckpointDirectory"]

CONTENTS = "contents.json"
NAME = re.compile(r"step_(\d{8,})")


class CheckpointDirectory:
    """The newest ``keep`` checkpoints of one run. Every method is called by every rank, in the same order.

    Args:
        path: made when missing.
        keep: how many complete checkpoints stay; at least 1.
        say: told, on rank 0, what was passed over and why.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3, say: Callable[[str], None] = print) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; accepted: an int >= 1")
        self.path = Path(path)
        self._keep = keep
        self._say = say
        self._leads = dist.get_rank() == 0

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> None:
        """Save after the update of ``step``. ``values`` are plain data by name, nested or not; what stands under the
        same name is the same on every rank that has it.
        """
        final = self._of(step)
        partial = final.with_suffix(".partial")
        if self._leads:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        save(training_state(model, optimizer, values), checkpoint_id=partial)
        if self._leads:
            write_contents(partial)
            shutil.rmtree(final, ignore_errors=True)  # there only when it was passed over as broken
            os.replace(partial, final)
            flush(self.path)
            for old in self._steps()[self._keep :]:
                shutil.rmtree(self._of(old), ignore_errors=True)
        dist.barrier()

    def load_latest(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]] | None:
        """Load the newest complete checkpoint into ``model`` and ``optimizer``, on any number of ranks.

        Returns the step and the values of all ranks that saved, or None when there is no complete checkpoint. Rank 0
        chooses, so all ranks load the same.
        """
        chosen = torch.tensor([self._newest_complete() if self._leads else -1], dtype=torch.int64)
        dist.broadcast(chosen, src=0)
        step = int(chosen.item())
        if step < 0:
            return None
        state = training_state(model, optimizer, names_of_values(self._of(step)))
        load(state, checkpoint_id=self._of(step))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return step, state["values"]

    def _newest_complete(self) -> int:
        for step in self._steps():
            fault = fault_of(self._of(step))
            if fault is None:
                return step
            self._say(f"checkpoint {self._of(step)} is passed over: {fault}")
        return -1

    def _steps(self) -> list[int]:
        """Steps of the checkpoints, the newest first. What a killed save left does not bear a checkpoint's name."""
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        return sorted((int(found[1]) for name in names if (found := NAME.fullmatch(name))), reverse=True)

    def _of(self, step: int) -> Path:
        return self.path / f"step_{step:08d}"


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> dict[str, Any]:
    """Everything a checkpoint holds, by parameter names that do not depend on how the model is wrapped."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "values": values}


def names_of_values(directory: Path) -> dict[str, Any]:
    """The values in a checkpoint by name, nested as they were saved, with nothing in their place."""
    found: dict[str, Any] = {}
    for place in FileSystemReader(directory).read_metadata().planner_data.values():
        if place[0] == "values":
            holder = found
            for name in place[1:-1]:
                holder = holder.setdefault(name, {})
            holder[place[-1]] = None
    return found


def write_contents(directory: Path) -> None:
    """List the files with size and CRC-32, and have all of it on the disk before the directory gets its name."""
    files = {entry.name: [entry.stat().st_size, checksum(entry)] for entry in sorted(directory.iterdir())}
    with open(directory / CONTENTS, "w", encoding="utf-8") as file:
        json.dump(files, file)
        file.flush()
        os.fsync(file.fileno())
    flush(directory)


def fault_of(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None when it is complete."""
    try:
        files = json.loads((directory / CONTENTS).read_text(encoding="utf-8"))
        for name, (size, crc) in files.items():
            found = (directory / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, {size} were written"
            if checksum(directory / name) != crc:
                return f"the content of {name} is not what was written"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def checksum(path: Path) -> int:
    """CRC-32 of a file, read in pieces of 1 MiB."""
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return crc


def flush(directory: Path) -> None:
    """Have the names in a directory on the disk, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(directory, os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
