"""CONTRACT 2 and 9 in every mode, model peers included: epochs one after another, finished states, set_epoch."""

from __future__ import annotations

from typing import Any

import pytest

from hp_nodes.transport import run_ranks
from tests.graphs.mode_scene import MODES, STEPS, Texts, loader_of
from tests.scenes import content, pickled

SHAPES = {mode: {"dp": 2} if mode == "external" else {"dp": 2, "tp": 2} for mode in MODES}


def loader(mode: str, mesh: Any) -> Any:
    return loader_of(mode, mesh, Texts(), 1 if mode == "external" else 2)


def epoch_of(running: Any) -> tuple[int, list[Any]]:
    """What is left of the epoch that a loop meets, and its number."""
    batches = [content(batch) for batch in running]
    return running.last.epoch, batches


@pytest.mark.parametrize("mode", MODES)
def test_an_exhausted_loader_keeps_stopping_until_a_loop_begins_the_next_epoch(mode: str) -> None:
    def run(mesh: Any) -> None:
        with loader(mode, mesh) as running:
            next(running)
            assert len(epoch_of(running)[1]) == STEPS * 4 - 1  # a loop over an unfinished epoch goes on with it
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(running)
            epoch, second = epoch_of(running)
            assert (epoch, len(second)) == (1, STEPS * 4)

    run_ranks(SHAPES[mode], run)


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_state_stays_finished_until_another_epoch_is_asked_for(mode: str) -> None:
    """As a loop resumed from it may: with the same epoch, with the next one, with none, with an earlier one."""

    def run(mesh: Any) -> None:
        with loader(mode, mesh) as running:
            _, first = epoch_of(running)
            state = pickled(running.state_dict())
            running.set_epoch(0)
            assert list(running) == []
            _, second = epoch_of(running)
        with loader(mode, mesh) as same:
            same.load_state_dict(state)
            assert same.state_dict() == state
            same.set_epoch(0)
            assert list(same) == []
            assert same.state_dict() == state
            same.set_epoch(1)
            assert epoch_of(same) == (1, second)
            same.set_epoch(0)
            assert epoch_of(same) == (0, first)
        with loader(mode, mesh) as none:
            none.load_state_dict(state)
            assert epoch_of(none) == (1, second)

    run_ranks(SHAPES[mode], run)


@pytest.mark.parametrize("mode", MODES)
def test_set_epoch_with_the_current_epoch_keeps_a_restored_position(mode: str) -> None:
    def run(mesh: Any) -> None:
        with loader(mode, mesh) as running:
            whole = []
            for batch in running:
                whole.append(content(batch))
                if running.last.step == 1 and running.last.ends_step:
                    state = pickled(running.state_dict())
        with loader(mode, mesh) as again:
            next(again)
            again.load_state_dict(state)  # in the middle of an epoch
            again.set_epoch(0)
            assert epoch_of(again) == (0, whole[8:])

    run_ranks(SHAPES[mode], run)
