"""CONTRACT 1: every field of the configuration: its default, what it accepts, and a refusal that says so."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from graphs import DistributedDatasetConfig

DEFAULTS = {
    "balance_window_size": 1,
    "host_prefetch_depth": 1,
    "device_prefetch_depth": 1,
    "dp_dim_names": None,
    "dataset_reader_ranks": None,
    "planner_rank": None,
    "dataset_already_sharded": False,
    "oversized_policy": "error",
    "drop_last": True,
    "seed": 1234,
    "min_balance_gain": 0.0,
    "objective": "lockstep",
    "packing_budgets": None,
    "communication_backend": "auto",
    "balance_group_size": None,
    "metadata_mode": False,
    "broadcast_plan": True,
    "log_balance": False,
    "repack_sequences": False,
    "pad_token_id": None,
    "timeout_s": 300.0,
    "on_error": "raise",
    "max_skipped": 0,
    "allow_pickle": False,
}
NO_COUNT = [-1, True, False, 1.0, "1", None, math.nan]
NO_BOOL = [0, 1, None, "yes"]
ACCEPTED: dict[str, list[Any]] = {
    "seq_len": [1, 131072],
    "local_batch_size": [1, 64],
    "balance_window_size": [1, 64],
    "host_prefetch_depth": [0, 8],
    "device_prefetch_depth": [0, 8],
    "dp_dim_names": [None, ("x",), ("replicate", "shard")],
    "dataset_reader_ranks": [None, (0,), (0, 4)],
    "planner_rank": [None, 0, 4],
    "oversized_policy": ["error", "single"],
    "seed": [0, 2**40],
    "min_balance_gain": [0, 0.0, 0.999],
    "objective": ["lockstep", "makespan", "balance"],
    "packing_budgets": [None, {}, {"images": 0, "pixels": 3.5}],
    "communication_backend": ["auto", "gloo", "nccl", "hccl"],
    "balance_group_size": [None, 1, 8],
    "timeout_s": [1, 0.5, 3600.0],
    "pad_token_id": [None, 0, 50256],
    "on_error": ["raise", "skip"],
    "max_skipped": [0, 10],
}
REFUSED: dict[str, list[Any]] = {
    "seq_len": [0, *NO_COUNT],
    "local_batch_size": [0, *NO_COUNT],
    "balance_window_size": [0, *NO_COUNT],
    "host_prefetch_depth": NO_COUNT,
    "device_prefetch_depth": NO_COUNT,
    "dp_dim_names": [(), ("",), ("a", "a"), (1,), "dp", ["dp"]],
    "dataset_reader_ranks": [(), (-1,), (True,), ("0",), 0],
    "planner_rank": [-1, True, 1.0, "0"],
    "dataset_already_sharded": NO_BOOL,
    "oversized_policy": ["drop", None, 1],
    "drop_last": [False, None, 1],
    "seed": [-1, True, 1.0, None],
    "min_balance_gain": [-0.1, 1, 1.0, math.nan, math.inf, True, "0", None],
    "objective": ["", "mean", None, 1],
    "packing_budgets": [{"a": -1}, {"a": math.nan}, {"a": math.inf}, {"a": True}, {1: 1}, [("a", 1)], 3],
    "communication_backend": ["mpi", "", None, 1],
    "balance_group_size": [0, -1, True, 1.0],
    "metadata_mode": NO_BOOL,
    "broadcast_plan": NO_BOOL,
    "log_balance": NO_BOOL,
    "repack_sequences": NO_BOOL,
    "pad_token_id": [-1, True, 1.0, "0"],
    "timeout_s": [0, -1.0, math.inf, math.nan, True, None],
    "on_error": ["ignore", None],
    "max_skipped": NO_COUNT,
    "allow_pickle": NO_BOOL,
}


def config(**given: Any) -> DistributedDatasetConfig:
    return DistributedDatasetConfig(**{"seq_len": 8, "local_batch_size": 2, **given})


def test_defaults() -> None:
    values = dataclasses.asdict(config())
    assert values == {"seq_len": 8, "local_batch_size": 2, **DEFAULTS}
    for name in ("seq_len", "local_batch_size"):
        with pytest.raises(TypeError, match=name):
            DistributedDatasetConfig(**{key: 1 for key in ("seq_len", "local_batch_size") if key != name})


def test_every_field_is_covered_here() -> None:
    fields = {field.name for field in dataclasses.fields(DistributedDatasetConfig)}
    assert fields == set(REFUSED)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().seq_len = 3  # type: ignore[misc]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ACCEPTED.items() for value in values])
def test_accepted(name: str, value: Any) -> None:
    assert getattr(config(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"DistributedDatasetConfig: {name} is .*; accepted: .+") as caught:
        config(**{name: value})
    assert repr(value) in str(caught.value)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="seq_len is 0.*balance_window_size is -1.*seed is True"):
        config(seq_len=0, balance_window_size=-1, seed=True)


def test_the_product_of_length_and_batch() -> None:
    config(seq_len=2**30, local_batch_size=1)
    with pytest.raises(ValueError, match=r"2147483648; accepted: below 2\*\*31"):
        config(seq_len=2**30, local_batch_size=2)


@pytest.mark.parametrize("other", [{"metadata_mode": True}, {"oversized_policy": "single"}])
def test_what_repacking_excludes(other: dict[str, Any]) -> None:
    config(repack_sequences=True)
    config(**other)
    with pytest.raises(ValueError, match=f"{next(iter(other))}.*accepted"):
        config(repack_sequences=True, **other)
