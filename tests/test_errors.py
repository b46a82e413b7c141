"""An error says where and what, travels as text and by pickle, and survives whatever an exception may do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from hp_nodes import DataPlaneError, SampleKey
from hp_nodes.errors import exchanging, failing_at, note_location


def located() -> DataPlaneError:
    return DataPlaneError(
        "OSError: disk gone",
        rank=3,
        node="SampleReader",
        epoch=1,
        step=20,
        sample="position 5, index 8, part 0",
        original_traceback="Traceback ...",
    )


FIELDS = ("message", "rank", "node", "epoch", "step", "sample", "original_traceback")


def same(one: DataPlaneError, other: DataPlaneError) -> bool:
    return str(one) == str(other) and all(getattr(one, name) == getattr(other, name) for name in FIELDS)


def test_text() -> None:
    assert str(located()) == (
        "[rank 3, node SampleReader, epoch 1, step 20, sample position 5, index 8, part 0] OSError: disk gone\n"
        "--- traceback on rank 3 ---\nTraceback ..."
    )
    assert str(DataPlaneError("late", rank=0)) == "[rank 0] late"
    assert str(DataPlaneError("late")) == "late"


@pytest.mark.parametrize("agreed", [False, True])
def test_pickle_and_copies_keep_everything(agreed: bool) -> None:
    error = located()
    error.agreed = agreed
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error), error.copy()):
        assert type(again) is DataPlaneError
        assert again is not error
        assert same(again, error)
        assert again.agreed is agreed
        assert same(pickle.loads(pickle.dumps(again)), error)  # a copy is as good as the first


@pytest.mark.parametrize(
    "message", ["plain", "ünï \U0001f600", "lone \udcff surrogate", "\x00", "", "line\nline", "x" * 100_000]
)
def test_bytes(message: str) -> None:
    error = DataPlaneError(message, rank=1)
    again = DataPlaneError.from_bytes(error.to_bytes())
    assert same(again, error)
    assert not again.agreed


def fail(error: BaseException, key: SampleKey | None = None, **place: Any) -> BaseException:
    with pytest.raises(type(error)) as caught, failing_at("Reader", key=key, **place):
        raise error
    assert caught.value is error
    return error


def test_the_original_type_leaves_a_node_that_is_used_alone() -> None:
    error = fail(KeyError("a"), SampleKey(5, 8, 1), epoch=2, step=3)
    told = DataPlaneError.of(error, rank=7, node="Planner", epoch=0, step=0)
    assert (told.rank, told.node, told.epoch, told.step) == (7, "Reader", 2, 3)
    assert told.sample == "position 5, index 8, part 1"
    assert told.message == "KeyError: 'a'"
    assert "in fail" in told.original_traceback


def test_the_innermost_place_wins() -> None:
    error = ValueError("x")
    with pytest.raises(ValueError, match="x"), failing_at("Outer", epoch=1), failing_at("Inner", epoch=1, step=2):
        raise error
    assert DataPlaneError.of(error, rank=0).node == "Inner"
    note_location(error, "Later")
    assert DataPlaneError.of(error, rank=0).node == "Inner"


def test_what_nobody_noted_is_filled_in() -> None:
    told = DataPlaneError.of(ValueError("x"), rank=4, node="Planner", epoch=1, step=2)
    assert (told.rank, told.node, told.epoch, told.step, told.sample) == (4, "Planner", 1, 2, None)


def test_an_error_that_is_one_already_stays_itself() -> None:
    error = located()
    assert DataPlaneError.of(error, rank=0, node="Other") is error
    with pytest.raises(DataPlaneError), failing_at("Other"):
        raise error
    assert error.node == "SampleReader"


def test_stop_iteration_becomes_an_error() -> None:
    expected = pytest.raises(RuntimeError, match="Reader: the user's function raised StopIteration")
    with expected as caught, failing_at("Reader", key=SampleKey(1, 2)):
        raise StopIteration
    assert isinstance(caught.value.__cause__, StopIteration)
    assert DataPlaneError.of(caught.value, rank=0).sample == "position 1, index 2, part 0"


def test_an_exchange_that_broke_is_located() -> None:
    error = DataPlaneError("broke")
    with pytest.raises(DataPlaneError), exchanging("Planner", 1, 2):
        raise error
    assert (error.node, error.epoch, error.step) == ("Planner", 1, 2)


class Unprintable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise TypeError("not even this")


class Slotted(Exception):  # noqa: N818
    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Strange(Exception):  # noqa: N818
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __str__(self) -> int:  # type: ignore[override]
        return 3


@pytest.mark.parametrize("kind", [Unprintable, Slotted, Strange])
def test_exceptions_that_misbehave_are_told_all_the_same(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, failing_at("Reader"):
        raise kind("x")
    error = caught.value
    told = DataPlaneError.of(error, rank=1, node="Reader")
    assert kind.__name__ in str(told)
    assert told.node == "Reader"
    assert same(DataPlaneError.from_bytes(told.to_bytes()), told)
