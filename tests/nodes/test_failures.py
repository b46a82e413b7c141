"""A failure anywhere on one rank is the same error on every rank at the same micro-batch; nothing is left running."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torchdata.nodes import BaseNode

from hp_nodes import DataPlaneError, SampleMetadata, WorkloadCost
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, Scene, count_tokens, halves, rest

BAD = 21  # this record's step fails


class Broken(Documents):
    """Record 21 cannot be read."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            raise self.error()
        return super().__getitem__(index)


def failing(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """``function``, but it fails on anything made of record 21."""

    def call(sample: Any, *more: Any) -> Any:
        if is_bad(sample):
            raise ValueError("cannot digest this one")
        return function(sample, *more) if not more else tuple(sample)

    return call


def is_bad(sample: Any) -> bool:
    if isinstance(sample, dict):
        return sample["index"] == BAD
    if isinstance(sample, (list, tuple)):
        return any(is_bad(item) for item in sample)
    return bool((sample == BAD).any())


class Unencodable:
    """No type that may travel."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return self.tokens


def objects_in_step_1(record: Any) -> Any:
    parts = halves(record)
    return [Unencodable(len(part)) for part in parts] if 16 <= record["index"] < 32 else parts


class Raising(BaseNode[Any]):
    """A user's node that fails in step 1 on one rank."""

    def __init__(self, source: BaseNode[Any]) -> None:
        super().__init__()
        self.source = source

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(initial_state)

    def next(self) -> Any:
        item = next(self.source)
        if item.step == 1 and threading.current_thread().name != "elsewhere" and only_here(item):
            raise KeyError("user node")
        return item

    def get_state(self) -> dict[str, Any]:
        return self.source.state_dict()


def only_here(item: Any) -> bool:
    """True on the rank whose part of the window starts at an odd place."""
    keys = getattr(item, "keys", None)
    positions = [key.position for key in keys] if keys else list(item.positions)
    return 2 in [position % 16 for position in positions]


def cost(metadata: SampleMetadata) -> WorkloadCost:
    if metadata.pack_tokens == 1_000:
        raise ValueError("no such cost")
    return WorkloadCost(llm=float(metadata.pack_tokens) ** 2)


def huge(sample: Any) -> SampleMetadata:
    return SampleMetadata(1_000) if is_bad(sample) else count_tokens(sample)


FAILURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "read": ({"dataset": Broken(lambda: OSError("disk gone"))}, "SampleReader", "disk gone"),
    "read in a worker": ({"dataset": Broken(lambda: OSError("disk gone")), "workers": 1}, "SampleReader", "disk gone"),
    "exit while reading": ({"dataset": Broken(lambda: SystemExit(3))}, "SampleReader", "SystemExit: 3"),
    "exit in a worker": ({"dataset": Broken(lambda: SystemExit(3)), "workers": 1}, "SampleReader", "SystemExit: 3"),
    "split": ({"split_fn": failing(halves)}, "Splitter", "cannot digest"),
    "metadata": ({"metadata_fn": failing(count_tokens)}, "MetadataDeriver", "cannot digest"),
    "metadata ends": ({"metadata_fn": lambda sample: stopping(sample)}, "MetadataDeriver", "StopIteration"),
    "cost model": ({"metadata_fn": huge, "cost_model": cost}, "MetadataDeriver", "no such cost"),
    "plan": ({"metadata_fn": huge}, "Planner", "1000"),
    "plan on every rank": ({"metadata_fn": huge, "broadcast_plan": False}, "Planner", "1000"),
    "encode": (
        {"split_fn": objects_in_step_1, "metadata_fn": lambda part: SampleMetadata(len(part))},
        "Router",
        "Unencodable",
    ),
    "pack": ({"pack_fn": failing(tuple)}, "Packer", "cannot digest"),
    "collate": ({"collate_fn": failing(tuple)}, "Collator", "cannot digest"),
    "user node below the plan": ({"insert": {"SampleReader": Raising}}, "Raising", "user node"),
    "user node below the route": ({"insert": {"Planner": Raising}}, "Raising", "user node"),
    "user node below the pack": ({"insert": {"Router": Raising}}, "Raising", "user node"),
    "user node above the collate": ({"insert": {"Collator": Raising}}, "Raising", "user node"),
}


def stopping(sample: Any) -> SampleMetadata:
    if is_bad(sample):
        raise StopIteration
    return count_tokens(sample)


def iterate(scene: Scene, mesh: Any) -> tuple[int, str, DataPlaneError]:
    """Micro-batches delivered, and the error that came instead of the next."""
    loader = scene.loader(mesh)
    count = 0
    with pytest.raises(DataPlaneError) as caught:  # noqa: PT012  the place where it comes is what matters
        for _ in loader:
            count += 1
    with pytest.raises(DataPlaneError) as second:
        next(loader)
    assert str(second.value) == str(caught.value)
    loader.close()
    return count, str(caught.value), caught.value


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", FAILURES)
def test_one_error_everywhere(name: str, depth: int) -> None:
    settings, node, text = FAILURES[name]
    scene = Scene(depth=depth, window=2, micro=2, global_batch=16, order="sequential", timeout_s=10.0, **settings)
    before = time.monotonic()
    results = run_ranks({"dp": 2, "tp": 2}, lambda mesh: iterate(scene, mesh))
    assert time.monotonic() - before < 8
    counts, texts, errors = zip(*results, strict=True)
    assert len(set(counts)) == 1
    assert counts[0] in range(4, 12)  # after the first step, before the third
    assert all(shown == texts[0] for shown in texts)
    assert node in texts[0]
    assert text in texts[0]
    assert all(error.node == node and error.step in (1, None) for error in errors)
    assert no_thread_is_left()


def no_thread_is_left() -> bool:
    """Threads of ours end with the loader."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        gc.collect()
        left = [thread.name for thread in threading.enumerate() if "Prefetcher" in thread.name]
        if not left:
            return True
        time.sleep(0.05)
    raise AssertionError(f"left running: {left}")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_batch_that_cannot_be_broadcast_is_told_by_the_next_exchange(depth: int) -> None:
    """What fails at delivery fails on that coordinate at once; the others hear of it with their next window."""

    def collate(bins: Any) -> Any:
        return Unencodable(1) if is_bad(bins) else bins

    scene = Scene(depth=depth, window=1, collate_fn=collate, timeout_s=10.0)
    results = run_ranks({"dp": 2, "tp": 2}, lambda mesh: iterate(scene, mesh))
    texts = [text for _, text, _ in results]
    assert all("Unencodable" in text and "ModelParallelBroadcaster" in text for text in texts)
    counts = [count for count, _, _ in results]
    assert counts[0] == counts[1]
    assert counts[2] == counts[3]
    assert abs(counts[0] - counts[2]) <= depth + 1
    assert no_thread_is_left()


def test_the_failing_rank_and_sample_are_named() -> None:
    """CASES 15."""
    scene = Scene(dataset=Broken(lambda: OSError("disk gone")), order="sequential", split=False)
    for count, text, error in run_ranks({"dp": 2}, lambda mesh: iterate(scene, mesh)):
        assert error.rank == 0  # record 21 is place 5 of step 1: round 1, the first rank's slice
        assert "index 21" in text
        assert "OSError: disk gone" in text
        assert "in __getitem__" in error.original_traceback
        assert count == 4


class Dropping(Raising):
    """A user's node that loses a window."""

    def next(self) -> Any:
        item = next(self.source)
        return next(self.source) if (item.step, item_round(item)) == (1, 0) else item


class Doubling(Raising):
    """A user's node that gives a window twice."""

    again: Any = None

    def next(self) -> Any:
        if self.again is not None:
            item, self.again = self.again, None
            return item
        item = next(self.source)
        if (item.step, item_round(item)) == (1, 0):
            self.again = item
        return item


class EndingEarly(Raising):
    def next(self) -> Any:
        item = next(self.source)
        if item.step == 1:
            raise StopIteration
        return item


class LosingTheFirst(Raising):
    """It loses what follows a reset."""

    first = True

    def next(self) -> Any:
        if self.first:
            self.first = False
            next(self.source)
        return next(self.source)


def item_round(item: Any) -> int:
    return int(getattr(item, "first_round", getattr(item, "round", 0)))


@pytest.mark.parametrize("below", ["SampleReader", "Planner", "Router", "Collator"])
@pytest.mark.parametrize("culprit", [Dropping, Doubling, EndingEarly, LosingTheFirst])
def test_a_node_that_loses_or_repeats_is_named(culprit: type, below: str) -> None:
    scene = Scene(window=2, insert={below: culprit}, timeout_s=5.0)
    for _, text, _ in run_ranks({"dp": 2}, lambda mesh: iterate(scene, mesh)):
        assert culprit.__name__ in text


class Emptying(Raising):
    """It leaves one sample where two bins need one each."""

    def next(self) -> Any:
        window = next(self.source)
        return window.take([0]) if window.step == 1 else window


def test_too_few_samples_left_says_how_many_are_missing() -> None:
    scene = Scene(window=1, insert={"Router": Emptying})
    for _, text, _ in run_ranks({"dp": 2}, lambda mesh: iterate(scene, mesh)):
        assert "1 samples are left for 2 bins" in text
        assert "at least 1 more" in text


def test_a_rank_that_ends_early_is_named() -> None:
    class Short(Documents):
        pass

    def run(mesh: Any) -> str:
        scene = Scene(dataset=Short(48 if mesh.get_rank() == 0 else 32), timeout_s=5.0)
        return iterate(scene, mesh)[1]

    for text in run_ranks({"dp": 2}, run):
        assert "ranks [1] have no more data while ranks [0] have" in text or "rank 1 is at" in text


# ---- closing


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_close_after_equal_consumption_many_times(depth: int) -> None:
    scene = Scene(dataset=Documents(96), micro=1, global_batch=4, window=1, depth=depth, device_depth=depth // 2)

    def run(mesh: Any) -> None:
        for number in range(70):
            loader = scene.loader(mesh)
            for _ in range(number % 5):
                next(loader)
            loader.close()
            loader.close()

    before = time.monotonic()
    run_ranks({"dp": 2}, run)
    assert time.monotonic() - before < 40
    assert no_thread_is_left()


def test_break_and_garbage_collection_leave_no_thread() -> None:
    scene = Scene(dataset=Documents(96), micro=1, global_batch=4, depth=2, device_depth=1)

    def run(mesh: Any) -> None:
        for batch in scene.loader(mesh):
            del batch
            break
        gc.collect()

    for _ in range(10):
        run_ranks({"dp": 2}, run)
    assert no_thread_is_left()


def test_an_error_in_one_ranks_loop_reaches_the_others_soon() -> None:
    scene = Scene(dataset=Documents(96), micro=1, global_batch=4, timeout_s=60.0)

    def run(mesh: Any) -> str:
        try:
            with scene.loader(mesh) as loader:
                for count, _ in enumerate(loader):
                    if mesh.get_rank() == 1 and count == 3:
                        raise FloatingPointError("loss is NaN")
        except (FloatingPointError, DataPlaneError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    before = time.monotonic()
    texts = run_ranks({"dp": 2}, run)
    assert time.monotonic() - before < 10
    assert texts[1] == "FloatingPointError: loss is NaN"
    assert "rank 1" in texts[0]
    assert "closed" in texts[0]
    assert no_thread_is_left()


def test_reset_in_the_middle_keeps_ranks_together() -> None:
    scene = Scene(depth=2, device_depth=1)

    def run(mesh: Any) -> list[Any]:
        with scene.loader(mesh) as loader:
            start = loader.state_dict()
            rest(loader, 3)
            loader.set_epoch(4)
            rest(loader, 2)
            loader.load_state_dict(start)
            return rest(loader)

    expected = run_ranks({"dp": 2}, lambda mesh: rest(scene.loader(mesh)))
    assert run_ranks({"dp": 2}, run) == expected


class Overfilling(Raising):
    """It gives every sample three times, at its own bin."""

    def next(self) -> Any:
        window = next(self.source)
        places = [place for place in range(len(window.keys)) for _ in range(3)]
        return window.take(places) if window.step == 1 else window


def test_a_node_behind_the_plan_that_overfills_a_bin_is_an_error() -> None:
    scene = Scene(window=1, insert={"Router": Overfilling})
    for _, text, _ in run_ranks({"dp": 2}, lambda mesh: iterate(scene, mesh)):
        assert "seq_len is 64" in text
        assert "a node behind the plan keeps each bin within it" in text


class Listing(Raising):
    """It gives a list where a window is expected."""

    def next(self) -> Any:
        item = next(self.source)
        return list(item.keys) if item.step == 1 else item


@pytest.mark.parametrize("below", ["SampleReader", "Router"])
def test_a_node_that_gives_something_else_is_named(below: str) -> None:
    scene = Scene(window=1, insert={below: Listing})
    for _, text, _ in run_ranks({"dp": 2}, lambda mesh: iterate(scene, mesh)):
        assert "node Listing" in text
        assert "gave a list; accepted: a Window or a MicroBatch" in text


class ShortReading(Raising):
    """It forgets a sample but keeps its key."""

    def next(self) -> Any:
        window = next(self.source)
        return replace(window, samples=window.samples[1:]) if window.step == 1 else window


@pytest.mark.parametrize("split", [False, True])
def test_samples_without_keys_are_counted(split: bool) -> None:
    scene = Scene(window=1, split=split, insert={"SampleReader": ShortReading})
    for _, text, _ in run_ranks({"dp": 2}, lambda mesh: iterate(scene, mesh)):
        assert "1 samples for 2 keys" in text
