"""Statistics say where time goes: in which node, in waiting, in other ranks, and in the training loop."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.profiler import profile
from torchdata.nodes import BaseNode, Mapper

from hp_nodes.nodes import describe
from hp_nodes.nodes.stage import Stage
from hp_nodes.nodes.stats import LoaderStats, NodeStats
from hp_nodes.transport import run_ranks
from tests.scenes import Documents, Scene, count_tokens

SLOW_S = 0.02


def slow(window: Any) -> Any:
    time.sleep(SLOW_S)
    return window


def slow_pack(samples: Any, seq_len: int) -> Any:
    return slow(tuple(samples))


def measured(scene: Scene, ranks: int = 1, train_s: float = 0.0, batches: int = 8) -> list[LoaderStats]:
    """The statistics of each rank of a run, without its first two micro-batches."""

    def body(mesh: Any) -> LoaderStats:
        with scene.loader(mesh) as loader:
            for number, _ in enumerate(loader):
                if number == 1:
                    start = loader.stats()
                if number == batches + 1:
                    break
                time.sleep(train_s)
            return loader.stats().since(start)

    return run_ranks({"dp": ranks}, body)


def scene(**changes: Any) -> Scene:
    return Scene(**{"dataset": Documents(160), "window": 1, "micro": 2, "global_batch": 8, "depth": 0, **changes})


def node(stats: LoaderStats, name: str) -> NodeStats:
    return next(node for node in stats.nodes if node.name == name)


def test_time_adds_up() -> None:
    """A node's time is its own, its source's and that of exchanges; the loop's waiting is the topmost node's."""
    (stats,) = measured(scene(pack_fn=slow_pack))
    for name in ("Collator", "Router", "Planner"):
        one = node(stats, name)
        assert one.busy + one.source + one.exchanging == pytest.approx(one.consumer, rel=0.01, abs=1e-4)
    assert node(stats, "Collator").source == pytest.approx(node(stats, "Packer").consumer, rel=0.01)
    assert node(stats, "StepCheckpointer").consumer == pytest.approx(stats.waited, rel=0.05)
    assert {node(stats, name).items for name in ("WindowSampler", "StepCheckpointer")} == {8}
    assert stats.micro_batches == 8


@pytest.mark.parametrize("depth", [0, 1])
def test_the_slow_node_is_the_bottleneck(depth: int) -> None:
    (stats,) = measured(scene(pack_fn=slow_pack, depth=depth))
    packer = node(stats, "Packer")
    assert packer.busy / packer.items == pytest.approx(2 * SLOW_S, rel=0.5)
    assert "most for Packer, busy" in stats.bottleneck
    assert ("HostPrefetcher(depth=1)" in stats.bottleneck) == (depth == 0)


def test_a_loop_that_trains_longer_does_not_wait() -> None:
    (stats,) = measured(scene(depth=2), train_s=0.03)
    prefetcher = node(stats, "HostPrefetcher")
    assert stats.waited < 0.3 * stats.elapsed
    assert prefetcher.ready / prefetcher.takes > 1
    assert prefetcher.full > 0.5 * stats.elapsed
    assert prefetcher.thread == "HostPrefetcher" and node(stats, "Planner").thread == "HostPrefetcher"
    assert node(stats, "StepCheckpointer").thread == "main"


def test_waiting_for_another_rank_is_exchanging() -> None:
    """What one rank works, the other one waits in an exchange, and the sentence says so."""

    def metadata(sample: Any) -> Any:
        time.sleep(5 * SLOW_S)
        return count_tokens(sample)

    class OneSlowRank(Scene):
        def graph(self, mesh: Any) -> BaseNode[Any]:
            self.metadata_fn = metadata if mesh.get_rank() == 1 else count_tokens
            return super().graph(mesh)

    changes = vars(scene(split=False, order="sequential"))
    fast, late = measured(OneSlowRank(**changes), ranks=2)
    assert node(late, "MetadataDeriver").busy > 10 * node(fast, "MetadataDeriver").busy
    assert node(fast, "Planner").exchanging > 0.5 * node(late, "MetadataDeriver").busy
    assert "exchanging" in fast.bottleneck and "other ranks" in fast.bottleneck
    assert "MetadataDeriver" in late.bottleneck


def test_a_model_peer_points_to_its_constructor() -> None:
    def body(mesh: Any) -> LoaderStats:
        with scene(pack_fn=slow_pack).loader(mesh) as loader:
            for _ in loader:
                pass
            return loader.stats()

    constructor, peer = run_ranks({"dp": 1, "tp": 2}, body)
    assert "Packer" in constructor.bottleneck
    assert "look at the constructor's statistics" in peer.bottleneck
    assert peer.micro_batches == constructor.micro_batches


@pytest.mark.parametrize("below", ["WindowSampler", "Planner", "Collator", "ModelParallelBroadcaster"])
def test_a_node_of_another_library_is_timed_where_it_stands(below: str) -> None:
    """Its own time is told from that of the nodes below it, anywhere in the graph."""
    one = scene(insert={below: lambda source: Mapper(source, slow)})
    (stats,) = measured(one)
    mapper = node(stats, "ParallelMapper")
    assert mapper.busy / mapper.items == pytest.approx(SLOW_S, rel=0.5)
    assert "most for ParallelMapper" in stats.bottleneck
    assert sum(other.busy for other in stats.nodes if other.name != "ParallelMapper") < mapper.busy


def test_a_subclass_that_calls_its_base_is_counted_once() -> None:
    class Base(Stage[int]):
        def next(self) -> int:
            return 1

    class Derived(Base):
        def next(self) -> int:
            return super().next() + 1

    derived = Derived(None)
    assert [next(derived), next(derived)] == [2, 2]
    assert derived.times.items == 2


def test_an_end_and_an_error_are_no_items() -> None:
    class Ends(Stage[int]):
        def next(self) -> int:
            raise StopIteration

    ends = Ends(None)
    assert list(ends) == []
    assert ends.times.items == 0
    assert ends.times.consumer > 0


def test_statistics_before_the_first_batch() -> None:
    def body(mesh: Any) -> LoaderStats:
        with scene().loader(mesh) as loader:
            return loader.stats()

    (stats,) = run_ranks({"dp": 1}, body)
    assert stats.bottleneck == "Nothing has been delivered yet."
    assert "WindowSampler" in str(stats)


def test_the_table_has_a_line_for_each_node_and_ends_with_the_sentence() -> None:
    (stats,) = measured(scene(depth=1))
    lines = str(stats).splitlines()
    assert lines[0].split()[:3] == ["node", "thread", "items"]
    assert [line.split()[0] for line in lines[1 : 1 + len(stats.nodes)]] == [node.name for node in stats.nodes]
    assert lines[-1] == stats.bottleneck
    assert all(f"<td>{node.name}</td>" in stats._repr_html_() for node in stats.nodes)


def test_since_refuses_another_graph() -> None:
    (one,), (other,) = measured(scene()), measured(scene(split=False))
    with pytest.raises(ValueError, match="other nodes"):
        one.since(other)


def test_ranges_appear_in_a_profile_and_only_there() -> None:
    def body(mesh: Any) -> list[str]:
        with scene().loader(mesh) as loader:
            batches = iter(loader)
            next(batches)
            with profile() as profiled:
                next(batches)
            next(batches)
        return [event.key for event in profiled.key_averages()]

    (keys,) = run_ranks({"dp": 1}, body)
    assert {"WindowSampler", "Planner", "Packer", "StepCheckpointer"} <= set(keys)


def test_describe_counts_what_happened() -> None:
    """Threads, exchanges and buffered items of a graph that runs."""

    def body(mesh: Any) -> Any:
        with scene(depth=1).loader(mesh) as loader:
            next(iter(loader))
            time.sleep(0.3)
            return describe(loader.graph)

    described = run_ranks({"dp": 2}, body)[0]
    nodes = {node.name: node for node in described.nodes}
    assert nodes["HostPrefetcher"].buffered == 1
    assert nodes["Planner"].exchanges == 4  # status and numbers, and the plan, of two windows
    assert nodes["Planner"].ranks == 2
    assert nodes["Packer"].thread == "HostPrefetcher"
