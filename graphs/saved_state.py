"""What a checkpoint says of its loader: where the run stands, which samples come next, and what must stay the same.

:func:`read_checkpoint` finds the loaders' states in a directory of ``torch.distributed.checkpoint``, a file of
``torch.save`` or a JSON text, without the program that wrote it and without reading weights. :func:`upcoming` computes
the samples of the next steps from the state alone, for any number of ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from hp_nodes.nodes.window_sampler import WindowSampler, find_cursor
from hp_nodes.samplers import BlendedBatchSampler, DistributedBatchSampler
from hp_nodes.state import LoaderState, differences, leaves_of

__all__ = ["Position", "describe_state", "position_of", "read_checkpoint", "state_differences", "upcoming"]

_SHOWN = 16


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, dict[str, str]]:
    """The state dict of each loader in a checkpoint, by the name it was saved under ("" for one saved alone).

    Each is what ``load_state_dict`` takes; of a loader whose state is its ranks' own it has the leaves of all ranks.

    Raises:
        ValueError: it is no checkpoint, or there is no loader's state in it.
    """
    path = Path(path)
    if path.is_dir():
        found = _of_directory(path)
    elif path.is_file():
        found = dict(_states_in(_content(path), ""))
    else:
        raise ValueError(f"{path} does not exist; accepted: a checkpoint's directory or file")
    if not found:
        raise ValueError(f"{path} has no state of a loader; accepted: a checkpoint with loader.state_dict() in it")
    return found


def _of_directory(path: Path) -> dict[str, dict[str, str]]:
    if not (path / ".metadata").is_file():
        inside = sorted(entry.name for entry in path.iterdir())
        raise ValueError(
            f"{path} is no checkpoint of torch.distributed.checkpoint: it has no file .metadata, but {inside[:8]}"
        )
    names = [name for name in FileSystemReader(path).read_metadata().state_dict_metadata if _is_leaf(name)]
    texts: dict[str, Any] = dict.fromkeys(names, "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only is what is wanted
        load(texts, checkpoint_id=path, no_dist=True)
    found: dict[str, dict[str, str]] = {}
    for name, text in texts.items():
        loader, _, key = name.rpartition(".")
        found.setdefault(loader, {})[key] = text
    return found


def _is_leaf(name: str) -> bool:
    try:
        return bool(leaves_of({name.rpartition(".")[2]: ""}))
    except ValueError:
        return False


def _content(path: Path) -> Any:
    with open(path, "rb") as file:
        begins = file.read(64).lstrip()[:1]
    try:
        if begins == b"{":
            return json.loads(path.read_text(encoding="utf-8"))
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (ValueError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} is neither JSON nor a file of torch.save: {error}") from error


def _states_in(value: Any, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every mapping inside ``value`` that is a loader's state dict, with the path that leads to it."""
    if isinstance(value, Mapping):
        if {"version", "fingerprint", "nodes"} <= set(value):  # the text itself
            yield name, {"hp_nodes": json.dumps(value)}
            return
        leaves = {key: text for key, text in value.items() if isinstance(key, str) and _is_leaf(key)}
        if leaves:
            yield name, leaves
        for key, item in value.items():
            if key not in leaves:
                yield from _states_in(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _states_in(item, f"{name}.{place}" if name else str(place))


@dataclass(frozen=True)
class Position:
    """Where a run stands. Counts are of samples over all ranks; None where the state does not say."""

    epoch: int
    consumed: int
    finished: bool
    global_batch_size: int | None
    total_samples: int | None

    @property
    def step(self) -> int | None:
        """Steps of the epoch that are done."""
        return None if self.global_batch_size is None else self.consumed // self.global_batch_size

    @property
    def steps(self) -> int | None:
        """Steps of an epoch."""
        if self.global_batch_size is None or self.total_samples is None:
            return None
        return self.total_samples // self.global_batch_size


def position_of(state: LoaderState) -> Position | None:
    """None for a graph that keeps no cursor of its own."""
    cursor = find_cursor(state.nodes)
    if cursor is None:
        return None
    return Position(
        int(cursor[WindowSampler.EPOCH_KEY]),
        int(cursor[WindowSampler.CONSUMED_KEY]),
        bool(cursor[WindowSampler.FINISHED_KEY]),
        state.fingerprint.get("global_batch_size"),
        state.fingerprint.get("sampler", {}).get("total_samples"),
    )


def upcoming(
    state: LoaderState, ranks: int, *, steps: int = 1, micro_batch_size: int | None = None
) -> list[tuple[int, int, list[list[list[int]]]]]:
    """The next steps as (epoch, step, ``[rank][round]`` → dataset indices), as the sampler chooses them.

    Balancing may give a record to another rank; the step it belongs to stays. With an index mapping, which a
    checkpoint does not hold, they are the places that the mapping is asked for.

    Args:
        micro_batch_size: None: one round, the whole share of a rank.

    Raises:
        ValueError: the state does not hold the order, or the global batch cannot be divided so.
    """
    position = position_of(state)
    order = state.fingerprint.get("sampler", {})
    total = order.get("total_samples")
    if position is None or total is None or position.global_batch_size is None or position.steps is None:
        raise ValueError("the state is not of a graph whose steps come from a batch sampler")
    micro = micro_batch_size or max(1, position.global_batch_size // ranks)
    rounds = max(1, position.global_batch_size // (micro * ranks))
    group = [_sampler(order, total, micro, position.global_batch_size, rank, ranks) for rank in range(ranks)]
    epoch, step = (position.epoch + 1, 0) if position.finished else (position.epoch, position.step or 0)
    found = []
    for _ in range(steps):
        if step == position.steps:
            epoch, step = epoch + 1, 0
        for sampler in group:
            sampler.load_state_dict({"epoch": epoch, "consumed_samples": step * position.global_batch_size})
        shares = [[next(running) for _ in range(rounds)] for running in map(iter, group)]
        found.append((epoch, step, shares))
        step += 1
    return found


def _sampler(
    order: Mapping[str, Any], total: int, micro: int, global_batch: int, rank: int, ranks: int
) -> DistributedBatchSampler | BlendedBatchSampler:
    drawn = {"order": order.get("order", "sequential"), "seed": order.get("seed") or 0}
    if order.get("type") == "DistributedBatchSampler":
        return DistributedBatchSampler(total, micro, global_batch, rank, ranks, **drawn)
    if order.get("type") == "BlendedBatchSampler" and isinstance(order["dataset_sizes"], list):
        ends = {"on_end": order["on_end"], "total_samples": total if order["on_end"] == "repeat" else None}
        return BlendedBatchSampler(
            order["dataset_sizes"], order["weights"], micro, global_batch, rank, ranks, **drawn, **ends
        )
    raise ValueError(
        f"the order of a {order.get('type')} cannot be computed from a checkpoint; accepted: DistributedBatchSampler, "
        "or BlendedBatchSampler of up to 16 datasets"
    )


def describe_state(text: str, *, ranks: int | None = None, steps: int = 2, micro_batch_size: int | None = None) -> str:
    """A loader's leaf as a page for people."""
    state = LoaderState.from_text(text)
    position = position_of(state)
    rows: list[tuple[str, str]] = [("state", f"version {state.version}, {len(text)} bytes")]
    if position is not None:
        of_steps = "" if position.steps is None else f" of {position.steps}"
        of_samples = "" if position.total_samples is None else f" of {position.total_samples}"
        rows += [
            ("epoch", f"{position.epoch}{', finished' if position.finished else ''}"),
            ("steps done", f"{position.consumed} samples" if position.step is None else f"{position.step}{of_steps}"),
            ("samples consumed", f"{position.consumed}{of_samples}, over all ranks"),
        ]
    rows += [(f"fingerprint {name}", json.dumps(one)) for name, (one, _) in differences(state.fingerprint, {}).items()]
    cursor = find_cursor(state.nodes)
    rows += [
        (f"node {name}", json.dumps(entry, default=repr)) for name, entry in state.nodes.items() if entry != cursor
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*lines, *_next_lines(state, ranks, steps, micro_batch_size)])


def _next_lines(state: LoaderState, ranks: int | None, steps: int, micro_batch_size: int | None) -> list[str]:
    size = ranks if ranks is not None else int(state.fingerprint.get("data_parallel_size", 1))
    try:
        found = upcoming(state, size, steps=steps, micro_batch_size=micro_batch_size)
    except ValueError as error:
        return [f"  next: {error}"]
    mapped = state.fingerprint["sampler"].get("index_mapping") is not None
    what = "places, before the index mapping" if mapped else "dataset indices"
    lines = [f"  next on {size} rank{'s' if size > 1 else ''}, as sampled ({what}):"]
    for epoch, step, shares in found:
        for rank, rounds in enumerate(shares):
            shown = "  |  ".join(_listed(indices) for indices in rounds)
            lines.append(f"    epoch {epoch} step {step}  rank {rank}  {shown}")
    return lines


def _listed(indices: list[int]) -> str:
    more = f" ... ({len(indices)} in all)" if len(indices) > _SHOWN else ""
    return " ".join(map(str, indices[:_SHOWN])) + more


def state_differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What differs between two state dicts of a loader, a line each."""
    lines = []
    for key in dict.fromkeys(chain(one, other)):
        if key not in one or key not in other:
            lines.append(f"{key}: only in the {'second' if key not in one else 'first'}")
            continue
        states = [LoaderState.from_text(leaves[key], key) for leaves in (one, other)]
        flat = [{"fingerprint": state.fingerprint, "nodes": state.nodes} for state in states]
        for name, (before, after) in differences(*flat).items():
            shown = [json.dumps(value, default=lambda _: "nothing") for value in (before, after)]
            lines.append(f"{key} {name}: {shown[0]} -> {shown[1]}")
    return lines
