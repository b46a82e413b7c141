"""CONTRACT 5: the values on the edges refuse what no stage could use, and say what they accept."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from hp_nodes.types import MicroBatch, SampleKey, SampleMetadata, Window, WorkloadCost

COST_COMPONENTS = ("io", "transform", "encoder", "llm", "memory", "communication")


@pytest.mark.parametrize("component", COST_COMPONENTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, -1e-300, None, "3", 1j, [1.0]])
def test_a_cost_component_is_finite_and_not_negative(component: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"'{component}' is .*; accepted: a finite number >= 0"):
        WorkloadCost(**{component: value})


def test_a_cost_of_nothing_is_allowed_and_is_the_default() -> None:
    assert WorkloadCost() == WorkloadCost(**dict.fromkeys(COST_COMPONENTS, 0.0))


@pytest.mark.parametrize("tokens", [0, -1, 1.0, True, None, "3", np.float64(3), np.bool_(True)])
def test_pack_tokens_is_a_positive_int(tokens: object) -> None:
    with pytest.raises(ValueError, match="pack_tokens is .*; accepted: an int >= 1"):
        SampleMetadata(pack_tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [1, 2**40, np.int32(7), np.uint8(7)])
def test_pack_tokens_may_be_any_integer_type(tokens: int) -> None:
    assert SampleMetadata(pack_tokens=tokens).pack_tokens == tokens


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, None, "3"])
def test_a_packing_cost_is_finite_and_not_negative_and_is_named(value: float) -> None:
    with pytest.raises(ValueError, match="packing cost 'images' is .*; accepted: a finite number >= 0"):
        SampleMetadata(pack_tokens=1, packing_costs={"videos": 1.0, "images": value})


def test_metadata_defaults_are_not_shared_between_samples() -> None:
    first, second = SampleMetadata(1), SampleMetadata(1)
    assert first.features is not second.features
    assert first.packing_costs is not second.packing_costs


def test_keys_are_ordered_as_the_sampler_chose_and_then_by_part() -> None:
    keys = [SampleKey(1, 4), SampleKey(0, 9, 1), SampleKey(0, 9, 0)]
    assert sorted(keys) == [SampleKey(0, 9, 0), SampleKey(0, 9, 1), SampleKey(1, 4, 0)]


def test_a_repeated_index_has_keys_of_its_own() -> None:
    assert len({SampleKey(position, 3) for position in range(4)}) == 4


ENVELOPES = [
    Window(epoch=0, step=0, first_round=0, num_rounds=1, ends_step=True, ends_epoch=False, keys=(SampleKey(0, 0),)),
    MicroBatch(data=None, epoch=0, step=0, round=0, ends_window=True, ends_step=True, ends_epoch=False),
    SampleMetadata(pack_tokens=1),
    WorkloadCost(),
]


@pytest.mark.parametrize("value", ENVELOPES, ids=lambda value: type(value).__name__)
def test_values_are_frozen_slotted_and_can_be_copied_and_pickled(value: object) -> None:
    name = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, 1)
    assert not hasattr(value, "__dict__")
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_types_import_neither_torch_nor_torchdata() -> None:
    program = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='alone'); sys.exit('torch' in sys.modules)"
    path = sys.modules["hp_nodes.types"].__file__
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
