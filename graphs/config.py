"""The configuration of a ready-made graph: plain values, checked when they are put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

__all__ = ["DistributedDatasetConfig", "staged_ahead"]


@dataclass(frozen=True)
class DistributedDatasetConfig:
    """How samples are planned, packed and delivered. The same on every rank.

    Args:
        seq_len: tokens of a bin, at least 1.
        local_batch_size: bins of a micro-batch, at least 1; ``seq_len * local_batch_size`` stays below 2**31.
        balance_window_size: rounds planned together, at least 1; a window never crosses an optimizer step.
        host_prefetch_depth: windows built ahead on the host, at least 0.
        device_prefetch_depth: micro-batches staged ahead on the device, at least 0; ignored on CPU.
        dp_dim_names: the mesh's data-parallel dimensions; None: those of dp_replicate, dp_shard, dp that it has.
        dataset_reader_ranks, planner_rank, dataset_already_sharded: kept for compatibility, validated only.
        oversized_policy: "error", or "single": a sample longer than ``seq_len`` alone in its bin.
        drop_last: True.
        seed: of per-sample randomness, at least 0. Order belongs to the sampler.
        min_balance_gain: 0 <= x < 1; a plan is used only when its relative gain is strictly greater.
        objective: "lockstep", "makespan" or "balance".
        packing_budgets: name → additive inclusive limit of each bin.
        communication_backend: "auto", "gloo", "nccl" or "hccl".
        balance_group_size: external steps only: ranks balanced together.
        metadata_mode: True: metadata is precomputed, by dataset index.
        broadcast_plan: False: every rank computes the same plan from the gathered numbers.
        log_balance: True: a balance report at INFO.
        repack_sequences: True: the built-in text split, pack and collate.
        pad_token_id: token of padding, at least 0; None: 0, and no trailing padding is looked for when splitting.
        timeout_s: how long a rank that needs data waits for others.
        on_error, max_skipped: what happens to a record that cannot be read.
        allow_pickle: let values travel between ranks that the wire format does not know.

    Raises:
        ValueError: every field that is out of range, what it was given and what is accepted.
    """

    seq_len: int
    local_batch_size: int
    balance_window_size: int = 1
    host_prefetch_depth: int = 1
    device_prefetch_depth: int = 1
    dp_dim_names: tuple[str, ...] | None = None
    dataset_reader_ranks: tuple[int, ...] | None = None
    planner_rank: int | None = None
    dataset_already_sharded: bool = False
    oversized_policy: Literal["error", "single"] = "error"
    drop_last: bool = True
    seed: int = 1234
    min_balance_gain: float = 0.0
    objective: Literal["lockstep", "makespan", "balance"] = "lockstep"
    packing_budgets: Mapping[str, float] | None = None
    communication_backend: Literal["auto", "gloo", "nccl", "hccl"] = "auto"
    balance_group_size: int | None = None
    metadata_mode: bool = False
    broadcast_plan: bool = True
    log_balance: bool = False
    repack_sequences: bool = False
    pad_token_id: int | None = None
    timeout_s: float = 300.0
    on_error: Literal["raise", "skip"] = "raise"
    max_skipped: int = 0
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{field.name} is {getattr(self, field.name)!r}; accepted: {accepted}"
            for field in fields(self)
            for check, accepted in (_RULES[field.name],)
            if not check(getattr(self, field.name))
        ]
        if not problems and self.seq_len * self.local_batch_size >= 2**31:
            problems.append(
                f"seq_len {self.seq_len} times local_batch_size {self.local_batch_size} is "
                f"{self.seq_len * self.local_batch_size}; accepted: below 2**31"
            )
        if not problems and self.repack_sequences and self.metadata_mode:
            problems.append(
                "repack_sequences with metadata_mode: sequences are known only after reading; accepted: one of them"
            )
        if not problems and self.repack_sequences and self.oversized_policy == "single":
            problems.append(
                "oversized_policy 'single' with repack_sequences: a longer record cannot be packed; accepted: 'error'"
            )
        if problems:
            raise ValueError("DistributedDatasetConfig: " + "; ".join(problems))


def staged_ahead(device: Any, config: DistributedDatasetConfig) -> int:
    """Micro-batches staged ahead on ``device``: on the CPU there is nowhere to stage them to."""
    return 0 if torch.device(device).type == "cpu" else config.device_prefetch_depth


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _at_least(least: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: _is_int(value) and value >= least), f"an int >= {least}"


def _one_of(*names: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: isinstance(value, str) and value in names), " or ".join(repr(name) for name in names)


def _or_none(rule: tuple[Callable[[Any], bool], str]) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value is None or rule[0](value)), f"None, or {rule[1]}"


def _is_names(value: Any) -> bool:
    whole = isinstance(value, tuple) and len(value) > 0 and all(isinstance(name, str) and name for name in value)
    return whole and len(set(value)) == len(value)


def _is_ranks(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(_is_int(rank) and rank >= 0 for rank in value)


def _is_budgets(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_number(limit) and limit >= 0 for name, limit in value.items()
    )


_BOOL: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, bool), "True or False")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seq_len": _at_least(1),
    "local_batch_size": _at_least(1),
    "balance_window_size": _at_least(1),
    "host_prefetch_depth": _at_least(0),
    "device_prefetch_depth": _at_least(0),
    "dp_dim_names": _or_none((_is_names, "a non-empty tuple of distinct non-empty strings")),
    "dataset_reader_ranks": _or_none((_is_ranks, "a non-empty tuple of ranks")),
    "planner_rank": _or_none(_at_least(0)),
    "dataset_already_sharded": _BOOL,
    "oversized_policy": _one_of("error", "single"),
    "drop_last": (lambda value: value is True, "True"),
    "seed": _at_least(0),
    "min_balance_gain": (lambda value: _is_number(value) and 0 <= value < 1, "a finite number, 0 <= x < 1"),
    "objective": _one_of("lockstep", "makespan", "balance"),
    "packing_budgets": _or_none((_is_budgets, "a mapping from name to a finite number >= 0")),
    "communication_backend": _one_of("auto", "gloo", "nccl", "hccl"),
    "balance_group_size": _or_none(_at_least(1)),
    "metadata_mode": _BOOL,
    "broadcast_plan": _BOOL,
    "log_balance": _BOOL,
    "repack_sequences": _BOOL,
    "pad_token_id": _or_none(_at_least(0)),
    "timeout_s": (lambda value: _is_number(value) and value > 0, "a finite number > 0"),
    "on_error": _one_of("raise", "skip"),
    "max_skipped": _at_least(0),
    "allow_pickle": _BOOL,
}
