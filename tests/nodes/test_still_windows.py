"""Windows in which nothing moves: three exchanges, and what fails in them is one error all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torchdata.nodes import BaseNode

from hp_nodes import DataPlaneError
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, Passing, Scene


class Alike(Documents):
    """Records of one length: the ranks have equal work as it is."""

    def __init__(self, size: int = 48) -> None:
        super().__init__(size)
        self.lengths = np.full(size, 32)


class Failing(Passing):
    """Fails at one step."""

    def __init__(self, source: BaseNode[Any], step: int | None) -> None:
        super().__init__(source)
        self.step = step

    def next(self) -> Any:
        item = super().next()
        if item.step == self.step:
            raise OSError("disk gone")
        return item


def exchanges_of_windows(mesh: Any, **options: Any) -> list[int]:
    scene = Scene(dataset=Alike(), split=False, depth=0, **options)
    counts, before = [], 0
    with scene.loader(mesh) as loader:
        transport = loader._transports[0]
        for _ in loader:
            if loader.last is not None and loader.last.ends_window:
                assert loader.last.report is not None and loader.last.report.samples_sent == 0
                counts.append(transport.exchanges - before)
                before = transport.exchanges
    return counts


def test_three_exchanges_behind_the_first_window() -> None:
    for counts in run_ranks({"dp": 2}, exchanges_of_windows):
        assert len(counts) == 6
        assert set(counts[1:]) == {3}  # opening, plan, closing
        assert counts[0] <= 5


def test_every_window_is_told_of_where_each_rank_plans_for_itself_or_a_node_stands_between() -> None:
    for counts in run_ranks({"dp": 2}, lambda mesh: exchanges_of_windows(mesh, broadcast_plan=False)):
        assert set(counts[1:]) == {3}  # opening, sizes, closing
    insert = {"Planner": Passing}
    for counts in run_ranks({"dp": 2}, lambda mesh: exchanges_of_windows(mesh, insert=insert)):
        assert set(counts[1:]) == {4}


@pytest.mark.parametrize("node", ["Planner", "Router", "Packer"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_failure_of_one_rank_is_one_error(node: str, depth: int) -> None:
    def run(mesh: Any) -> tuple[int, str]:
        fails_at = 2 if mesh.get_rank() == 1 else None
        insert: dict[str, Any] = {node: lambda source: Failing(source, fails_at)}
        scene = Scene(dataset=Alike(), split=False, depth=depth, insert=insert)
        with scene.loader(mesh) as loader:
            batches = 0
            try:
                for batches, _ in enumerate(loader, start=1):  # noqa: B007
                    pass
            except DataPlaneError as error:
                return batches, str(error).split("\n")[0]
        raise AssertionError("it did not fail")

    first, second = run_ranks({"dp": 2}, run)
    assert first == second
    assert "rank 1" in first[1]
    assert "disk gone" in first[1]


def test_a_sample_that_cannot_travel_is_found_though_none_does() -> None:
    class Unsendable(Alike):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**super().__getitem__(index), "handle": object()}

    def run(mesh: Any) -> str:
        with (
            Scene(dataset=Unsendable(), split=False).loader(mesh) as loader,
            pytest.raises(DataPlaneError, match=r"sample\['handle'\]: builtins.object") as caught,
        ):
            next(iter(loader))
        return str(caught.value).split("\n")[0]

    first, second = run_ranks({"dp": 2}, run)
    assert first == second
