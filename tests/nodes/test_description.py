"""describe() shows any graph: as text, as Mermaid, and as boxes."""

from __future__ import annotations

from typing import Any

import pytest
from torchdata.nodes import IterableWrapper, Mapper, Prefetcher

from hp_nodes import describe
from hp_nodes.transport import run_ranks
from tests.graphs.external_scene import ExternalScene, rounds
from tests.scenes import Scene


def scene_described(**changes: Any) -> Any:
    return run_ranks({"dp": 2}, lambda mesh: describe(Scene(**changes).graph(mesh)))[0]


def test_text_has_one_line_a_node_from_the_top_down() -> None:
    text = scene_described()
    assert isinstance(text, str)
    names = [line.split("(")[0].strip() for line in text.splitlines()]
    assert names[0] == "StepCheckpointer"
    assert names[-3:] == ["Splitter", "SampleReader", "WindowSampler"]
    indents = [len(line) - len(line.lstrip()) for line in text.splitlines()]
    assert indents == sorted(indents)


def test_settings_functions_and_data_are_named() -> None:
    text = scene_described()
    assert "Packer(seq_len=64, local_batch_size=2)" in text
    assert "split_fn=halves" in text
    assert "cost_model=CausalAttentionCostModel" in text
    assert "dataset=Documents" in text


def test_threads_exchanges_and_state() -> None:
    lines = {line.split("(")[0].strip(): line for line in scene_described(depth=2).splitlines()}
    assert "thread: HostPrefetcher" in lines["SampleReader"]
    assert "thread" not in lines["StepCheckpointer"]
    assert "exchanges with 2 ranks" in lines["Planner"]
    assert "exchanges, alone" in lines["ModelParallelBroadcaster"]
    assert "state" in lines["WindowSampler"] and "state" not in lines["Packer"]


def test_rounds_that_a_reader_of_external_steps_holds_are_counted() -> None:
    """Of a step of two rounds, one was given; the reader holds the other one, and the next step, before it ends one."""

    def run(mesh: Any) -> Any:
        scene = ExternalScene(
            lambda rank: rounds(rank, [1] * 8), rounds_per_step=2, settings={"host_prefetch_depth": 0}
        )
        with scene.loader(mesh) as loader:
            next(loader)
            return describe(loader.graph)

    described = run_ranks({"dp": 2}, run)[0]
    (reader,) = (node for node in described.nodes if node.kind == "ExternalStepReader")
    assert reader.buffered == 3
    assert reader.exchanges == 1
    assert "3 buffered" in described and "3 buffered" in described.mermaid and "3 buffered" in described._repr_html_()


def test_without_a_thread_none_is_shown() -> None:
    assert "thread" not in scene_described(depth=0)


def test_nodes_of_other_libraries_and_of_the_user() -> None:
    graph = Prefetcher(Mapper(IterableWrapper(range(3)), str), 2)
    described = describe(graph)
    assert [node.name for node in described.nodes] == ["IterableWrapper", "ParallelMapper", "Prefetcher"]
    assert described.nodes[0].thread == "Prefetcher"
    assert described.nodes[2].sources == ("ParallelMapper",)


def test_mermaid_draws_every_node_and_edge() -> None:
    described = scene_described()
    drawing = described.mermaid
    assert drawing.startswith("flowchart")
    assert drawing.count("-->") == len(described.nodes) - 1
    assert 'subgraph t8["thread of HostPrefetcher"]' in drawing
    assert all(f"<b>{node.name}</b>" in drawing for node in described.nodes)
    (again,) = run_ranks({"dp": 1}, lambda mesh: describe(Scene().graph(mesh), format="mermaid"))
    assert str(again).startswith("flowchart")
    assert again.nodes


def test_boxes_escape_what_users_wrote() -> None:
    graph = Mapper(IterableWrapper(range(3)), str)
    graph.name = "<script>"
    assert "<script>" not in describe(graph)._repr_html_()


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'text' or 'mermaid'"):
        describe(IterableWrapper([]), format="dot")  # type: ignore[arg-type]


def test_looking_starts_nothing() -> None:
    """Neither a thread nor a read nor an exchange."""
    import threading

    before = threading.active_count()

    def body(mesh: Any) -> int:
        graph = Scene(depth=1).graph(mesh)
        text = describe(graph)
        assert "exchanges so far" not in text
        return threading.active_count()

    (inside,) = run_ranks({"dp": 1}, body)
    assert inside <= before + 1
