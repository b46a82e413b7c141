"""What a loader asks of a batch sampler, the user's own included, and the checks that say where one differs.

A batch sampler yields lists of exactly ``micro_batch_size`` dataset indices for its data-parallel rank. It is restored
with ``{"epoch", "consumed_samples"}`` and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

__all__ = ["BatchSampler", "check_batch_sampler", "int_at_least", "layouts_that_divide", "sampler_fingerprint"]


class BatchSampler(Protocol):
    """The contract. All counts are of samples over all ranks, but for ``micro_batch_size``, which is one rank's.

    Each yield advances ``consumed_samples`` by ``global_micro_batch_size``; ``global_batch_size`` is a multiple of
    that. ``set_epoch`` with another epoch starts it at its beginning. Optionally ``fingerprint() -> dict`` of plain
    values says what the order depends on besides the epoch; it must be the same on every rank and for every number of
    ranks.
    """

    @property
    def total_samples(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def global_micro_batch_size(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_world_size(self) -> int: ...
    @property
    def drop_last(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    @property
    def consumed_samples(self) -> int: ...
    def __iter__(self) -> Iterator[list[int]]: ...
    def set_epoch(self, epoch: int, /) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


# name -> the least value
_COUNTS = {
    "total_samples": 1,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "global_micro_batch_size": 1,
    "dp_rank": 0,
    "dp_world_size": 1,
    "epoch": 0,
    "consumed_samples": 0,
}
_METHODS = ("__iter__", "set_epoch", "state_dict", "load_state_dict")


def int_at_least(name: str, value: object, minimum: int) -> int:
    """``value`` as an int.

    Raises:
        ValueError: it is no int (a bool is none) or below ``minimum``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < minimum:
        raise ValueError(f"{name} is {value!r}; accepted: an int >= {minimum}")
    return int(value)


def layouts_that_divide(global_batch_size: int, micro_batch_size: int | None, dp_world_size: int) -> str:
    """In words: which micro-batch sizes on so many ranks, and which numbers of ranks with that micro-batch size, divide
    a global batch.

    Args:
        micro_batch_size: None says only which would do on ``dp_world_size`` ranks, or which numbers of ranks at all.
    """
    sizes = _divisors(global_batch_size // dp_world_size) if global_batch_size % dp_world_size == 0 else []
    parts = [f"micro_batch_size {_listed(sizes)} on {dp_world_size} ranks"] if sizes else []
    each = 1 if micro_batch_size is None else micro_batch_size
    ranks = _divisors(global_batch_size // each) if global_batch_size % each == 0 else []
    if ranks and (micro_batch_size is not None or not sizes):
        parts.append(f"micro_batch_size {each} on {_listed(ranks)} ranks")
    return (
        f"a global batch of {global_batch_size} can be divided with {' or with '.join(parts)}"
        if parts
        else (
            f"no number of ranks divides a global batch of {global_batch_size} with micro_batch_size {each}, and no "
            f"micro_batch_size divides it on {dp_world_size} ranks"
        )
    )


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _listed(numbers: list[int]) -> str:
    shown = (
        [str(number) for number in numbers]
        if len(numbers) <= 12
        else [*map(str, numbers[:10]), "...", str(numbers[-1])]
    )
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def check_batch_sampler(sampler: BatchSampler, *, micro_batch_size: int, dp_rank: int, dp_world_size: int) -> None:
    """Check that ``sampler`` keeps the contract and fits a loader of this shape, without advancing it.

    Raises:
        ValueError: it does not; the message has everything that differs.
    """
    problems = _incomplete(sampler) or _misfits(sampler, micro_batch_size, dp_rank, dp_world_size)
    if problems:
        raise ValueError(f"batch sampler {type(sampler).__name__} does not fit: {'; '.join(problems)}")


def _incomplete(sampler: BatchSampler) -> list[str]:
    problems = [f"it has no method {name}" for name in _METHODS if not callable(getattr(sampler, name, None))]
    problems += [f"it has no attribute {name}" for name in (*_COUNTS, "drop_last") if not hasattr(sampler, name)]
    for name, minimum in _COUNTS.items():
        if hasattr(sampler, name):
            try:
                int_at_least(name, getattr(sampler, name), minimum)
            except ValueError as error:
                problems.append(str(error))
    return problems


def _misfits(sampler: BatchSampler, micro_batch_size: int, dp_rank: int, dp_world_size: int) -> list[str]:
    expected = {
        "micro_batch_size": (micro_batch_size, "the local batch size"),
        "dp_rank": (dp_rank, "the mesh's"),
        "dp_world_size": (dp_world_size, "the mesh's"),
        "global_micro_batch_size": (
            sampler.micro_batch_size * sampler.dp_world_size,
            "its micro_batch_size * dp_world_size",
        ),
    }
    problems = [
        f"{name} is {getattr(sampler, name)}; accepted: {value}, {whose}"
        for name, (value, whose) in expected.items()
        if getattr(sampler, name) != value
    ]
    if sampler.drop_last is not True:
        problems.append(f"drop_last is {sampler.drop_last!r}; accepted: True")
    for name in ("global_batch_size", "consumed_samples"):
        if getattr(sampler, name) % sampler.global_micro_batch_size:
            layouts = layouts_that_divide(sampler.global_batch_size, sampler.micro_batch_size, sampler.dp_world_size)
            problems.append(
                f"{name} is {getattr(sampler, name)}; accepted: a multiple of its global_micro_batch_size "
                f"{sampler.global_micro_batch_size}{f' ({layouts})' if name == 'global_batch_size' else ''}"
            )
    if sampler.consumed_samples > sampler.total_samples:
        problems.append(
            f"consumed_samples is {sampler.consumed_samples} of total_samples {sampler.total_samples}; accepted: at "
            "most that many"
        )
    return problems


def sampler_fingerprint(sampler: BatchSampler) -> dict[str, Any]:
    """What the sampler's order depends on, as plain values; a checkpoint resumes only where this is equal.

    The sampler's own ``fingerprint()`` where it has one, else its type's name, total_samples, global_batch_size and
    seed.

    Raises:
        ValueError: its ``fingerprint()`` is no mapping of plain values.
    """
    own = getattr(sampler, "fingerprint", None)
    if own is None:
        seed = getattr(sampler, "seed", None)
        return {
            "type": type(sampler).__name__,
            "total_samples": int(sampler.total_samples),
            "global_batch_size": int(sampler.global_batch_size),
            "seed": seed if seed is None else int(seed),
        }
    fingerprint = own()
    try:
        if not isinstance(fingerprint, Mapping):
            raise TypeError
        plain: dict[str, Any] = json.loads(json.dumps(dict(fingerprint)))
    except TypeError:
        raise ValueError(
            f"{type(sampler).__name__}.fingerprint() gave {fingerprint!r}; accepted: a dict of plain values "
            "(str, int, float, bool, None, and lists and dicts of them)"
        ) from None
    return plain
