"""CONTRACT 3: a user's own batch sampler is told what differs from the contract, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hp_nodes.samplers import check_batch_sampler, sampler_fingerprint


class UsersSampler:
    """Every index, in order, on one of two ranks; knows nothing of this library."""

    def __init__(self, **changed: Any) -> None:
        self.total_samples = 12
        self.micro_batch_size = 2
        self.global_batch_size = 8
        self.global_micro_batch_size = 4
        self.dp_rank = 1
        self.dp_world_size = 2
        self.drop_last = True
        self.epoch = 0
        self.consumed_samples = 0
        self.__dict__.update(changed)

    def __iter__(self) -> Iterator[list[int]]:
        raise AssertionError("a check does not advance the sampler")

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def check(sampler: Any) -> None:
    check_batch_sampler(sampler, micro_batch_size=2, dp_rank=1, dp_world_size=2)


@pytest.mark.parametrize(
    "changed", [{}, {"total_samples": np.int64(12)}, {"consumed_samples": 4}, {"consumed_samples": 12, "epoch": 3}]
)
def test_a_sampler_that_keeps_the_contract_passes(changed: dict[str, Any]) -> None:
    check(UsersSampler(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"micro_batch_size": 4}, "micro_batch_size is 4; accepted: 2, the local batch size"),
        ({"dp_rank": 0}, "dp_rank is 0; accepted: 1"),
        ({"dp_world_size": 4, "global_micro_batch_size": 8}, "dp_world_size is 4; accepted: 2"),
        ({"global_micro_batch_size": 2}, "global_micro_batch_size is 2; accepted: 4"),
        ({"global_batch_size": 6}, "global_batch_size is 6; accepted: a multiple of its global_micro_batch_size 4"),
        ({"drop_last": False}, "drop_last is False; accepted: True"),
        ({"total_samples": 0}, "total_samples is 0; accepted: an int >= 1"),
        ({"total_samples": 12.0}, "total_samples is 12.0; accepted: an int >= 1"),
        ({"epoch": True}, "epoch is True; accepted: an int >= 0"),
        ({"consumed_samples": 3}, "consumed_samples is 3; accepted: a multiple"),
        ({"consumed_samples": 16}, "consumed_samples is 16 of total_samples 12"),
        ({"state_dict": None}, "it has no method state_dict"),
    ],
)
def test_what_differs_is_named_with_what_is_accepted(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"batch sampler UsersSampler does not fit: .*{message}"):
        check(UsersSampler(**changed))


def test_everything_that_differs_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="micro_batch_size is 1.*dp_rank is 0.*drop_last is None"):
        check(UsersSampler(micro_batch_size=1, dp_rank=0, drop_last=None))


def test_what_is_missing_is_named() -> None:
    with pytest.raises(
        ValueError, match="batch sampler list does not fit: it has no method set_epoch.*no attribute epoch"
    ):
        check([[0, 1]])


def test_without_a_fingerprint_of_its_own_a_sampler_is_known_by_its_type_sizes_and_seed() -> None:
    expected = {"type": "UsersSampler", "total_samples": 12, "global_batch_size": 8, "seed": None}
    assert sampler_fingerprint(UsersSampler()) == expected
    assert sampler_fingerprint(UsersSampler(seed=np.int64(3))) == {**expected, "seed": 3}


def test_a_samplers_own_fingerprint_is_taken_as_plain_values() -> None:
    sampler = UsersSampler(fingerprint=lambda: {"revision": "a1", "sizes": (1, 2)})
    assert sampler_fingerprint(sampler) == {"revision": "a1", "sizes": [1, 2]}


@pytest.mark.parametrize("fingerprint", ["abc", None, {"a": object()}, {"a": np.int64(1)}])
def test_a_fingerprint_of_anything_else_is_refused(fingerprint: object) -> None:
    with pytest.raises(ValueError, match=r"UsersSampler.fingerprint\(\) gave .*; accepted: a dict of plain values"):
        sampler_fingerprint(UsersSampler(fingerprint=lambda: fingerprint))
