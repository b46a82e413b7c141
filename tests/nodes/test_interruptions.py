"""Control-C, going on after an error, closing badly, and being slow: none of it loses a sample or hangs a rank."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from hp_nodes import DataPlaneError
from hp_nodes.transport import VirtualMesh, VirtualWorld, run_ranks
from tests.nodes.test_failures import no_thread_is_left
from tests.nodes.test_odd_orders import on_one_rank, rest_without_iter, whole_epochs
from tests.scenes import Documents, Passing, Scene, pickled, rest

SMALL = Scene(Documents(24), 1, 4, window=1, depth=2)  # 6 steps; 4 rounds each on one rank


class Gate(Documents):
    """Record 9 waits until it is let through."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.open = threading.Event()

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9:
            self.open.wait(20)
        return super().__getitem__(index)


def test_an_interrupted_wait_goes_on_where_it_was() -> None:
    """Control-C in a notebook, while the background thread reads."""
    scene = replace(SMALL, order="sequential", depth=1)
    whole = on_one_rank(lambda mesh: rest(scene.loader(mesh)))

    def run(mesh: Any) -> None:
        dataset = Gate(24)
        with replace(scene, dataset=dataset).loader(mesh) as loader:
            found = rest(loader, 9)
            for _ in range(2):
                with interruption(), pytest.raises(KeyboardInterrupt):
                    rest(loader)
            dataset.open.set()
            assert found + rest(loader) == whole

    on_main_thread(run)


class Interrupting(Documents):
    """The user presses Control-C while record 9 is read, once."""

    done = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 9 and not self.done:
            self.done = True
            raise KeyboardInterrupt
        return super().__getitem__(index)


def test_an_interruption_inside_the_data_plane_is_told_as_one_and_a_state_brings_it_back() -> None:
    scene = replace(SMALL, order="sequential", depth=0)
    whole = on_one_rank(lambda mesh: rest(scene.loader(mesh)))

    def run(mesh: Any) -> None:
        with replace(scene, dataset=Interrupting(24)).loader(mesh) as loader:
            with pytest.raises(KeyboardInterrupt):
                rest(loader)
            with pytest.raises(RuntimeError, match="interrupted"):
                next(loader)
            loader.load_state_dict(loader.state_dict())
            assert rest(loader) == whole[8:]

    on_main_thread(run)


def on_main_thread(fn: Any) -> None:
    fn(VirtualMesh(VirtualWorld(1), {"dp": 1}, 0))


class interruption:  # noqa: N801
    """SIGINT arrives in the main thread in a moment."""

    def __enter__(self) -> None:
        import _thread

        self._timer = threading.Timer(0.2, _thread.interrupt_main)
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.join()


def test_an_interrupted_rank_ends_the_other() -> None:
    def run(mesh: Any) -> str:
        dataset = Interrupting(24) if mesh.get_rank() == 1 else Documents(24)
        scene = replace(SMALL, dataset=dataset, order="sequential", depth=0, timeout_s=30.0)
        try:
            with scene.loader(mesh) as loader:
                rest(loader)
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    before = time.monotonic()
    texts = run_ranks({"dp": 2}, run)
    assert time.monotonic() - before < 10
    assert texts[1].startswith("KeyboardInterrupt")
    assert texts[0].startswith("DataPlaneError") and "rank 1" in texts[0]


# ---- after an error


@pytest.mark.parametrize("depth", [0, 2])
def test_loading_a_state_after_an_error_goes_on(depth: int) -> None:
    whole = whole_epochs(replace(SMALL, depth=depth), 2, 1)

    def run(mesh: Any) -> None:
        attempts = iter(range(100))

        def collate(bins: Any) -> Any:
            if next(attempts) == 5 and mesh.get_rank() == 1:
                raise OSError("once")
            return tuple(bins)

        with replace(SMALL, collate_fn=collate, depth=depth).loader(mesh) as loader:
            delivered: list[Any] = []
            with pytest.raises(DataPlaneError, match="once"):
                delivered.extend(rest_without_iter(loader, None))
            loader.load_state_dict(pickled(loader.state_dict()))
            found = rest(loader)
            assert found == whole[mesh.get_rank()][0][-len(found) :]
            assert found[0][2] == 0
            loader.set_epoch(0)
            loader.set_epoch(3)
            assert len(rest(loader)) == len(whole[0][0])

    run_ranks({"dp": 2}, run)
    assert no_thread_is_left()


def test_loading_a_state_after_a_batch_that_could_not_be_broadcast() -> None:
    """What was announced to the others is over once all have gone back."""

    class Odd:
        pass

    def run(mesh: Any) -> None:
        bad = [mesh.get_rank() == 0]

        def collate(bins: Any) -> Any:
            return Odd() if bad[0] and any((s == 9).any() for b in bins for s in b) else tuple(bins)

        scene = replace(SMALL, order="sequential", collate_fn=collate, depth=0, timeout_s=10.0)
        with scene.loader(mesh) as loader:
            with pytest.raises(DataPlaneError, match="Odd"):
                rest(loader)
            bad[0] = False
            loader.set_epoch(2)
            assert len(rest(loader)) == 12

    run_ranks({"dp": 2, "tp": 2}, run)


class Clinging(Passing):
    """A user's node that cannot be closed."""

    def close(self) -> None:
        raise OSError("cannot close")


@pytest.mark.parametrize("below", ["SampleReader", "HostPrefetcher"], ids=["below", "above"])
def test_a_node_that_cannot_be_closed_keeps_nobody_else_from_it(below: str) -> None:
    def run(mesh: Any) -> None:
        loader = replace(SMALL, insert={below: Clinging}).loader(mesh)
        rest(loader, 3)
        with pytest.raises(OSError, match="cannot close"):
            loader.close()
        loader.close()

    run_ranks({"dp": 2}, run)
    assert no_thread_is_left()


# ---- time


@pytest.mark.parametrize(("depth", "device_depth"), [(1, 0), (0, 1), (2, 1)])
def test_a_rank_that_evaluates_for_long_is_not_late(depth: int, device_depth: int) -> None:
    """The limit runs only while a consumer waits, whichever thread makes the exchange."""
    scene = replace(SMALL, depth=depth, device_depth=device_depth, timeout_s=0.5)

    def run(mesh: Any) -> int:
        with scene.loader(mesh) as loader:
            rest(loader, 2)
            time.sleep(1.5 if mesh.get_rank() == 1 else 1.2)
            return len(rest(loader))

    assert run_ranks({"dp": 2}, run) == [10, 10]


def test_a_rank_that_closes_early_is_named_at_once() -> None:
    scene = replace(SMALL, timeout_s=30.0)

    def run(mesh: Any) -> str:
        with scene.loader(mesh) as loader:
            if mesh.get_rank() == 1:
                rest(loader, 1)
            else:
                with pytest.raises(DataPlaneError) as caught:
                    rest(loader)
                return str(caught.value)
        time.sleep(3.0)  # it goes on with something else
        return ""

    before = time.monotonic()
    text = run_ranks({"dp": 2}, run)[0]
    assert time.monotonic() - before < 8
    assert "rank 1" in text and "closed" in text


def test_close_waits_for_a_read_that_takes_long() -> None:
    class Slow(Documents):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.1)
            return super().__getitem__(index)

    scene = replace(SMALL, dataset=Slow(24))

    def run(mesh: Any) -> None:
        for _ in range(2):
            loader = scene.loader(mesh)
            rest(loader, 1)
            loader.close()

    run_ranks({"dp": 2}, run)
    assert no_thread_is_left()
