"""What every node of ours has: a name of its own, a source, its entry of the state; errors say which is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from hp_nodes import (
    Collator,
    DataPlaneError,
    DistributedDataLoader,
    MetadataDeriver,
    Packer,
    Planner,
    Router,
    SampleMetadata,
    SampleReader,
    Splitter,
    StepCheckpointer,
    WindowSampler,
)
from hp_nodes.nodes.graph import node_names
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import SingleRankTransport, run_ranks
from tests.scenes import Scene


def sampler(**given: Any) -> WindowSampler:
    return WindowSampler(DistributedBatchSampler(8, 2, 4, 0, 1), **given)


def test_a_name_is_the_class_numbered_when_repeated_or_what_was_given() -> None:
    graph = StepCheckpointer(StepCheckpointer(StepCheckpointer(sampler(), name="first")))
    assert list(node_names(graph).values()) == ["WindowSampler", "first", "StepCheckpointer", "StepCheckpointer_2"]


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two nodes are called 'reader'; give one of them another name"):
        SampleReader(sampler(name="reader"), [1] * 8, name="reader")


@pytest.mark.parametrize("source", [[1, 2], None.__class__, "WindowSampler"])
def test_a_source_is_a_node(source: Any) -> None:
    with pytest.raises(ValueError, match="SampleReader: the source is .*; accepted: a torchdata BaseNode"):
        SampleReader(source, [1] * 8)


def test_an_entry_goes_to_the_node_of_its_name_only() -> None:
    graph = SampleReader(sampler(name="order"), [1] * 8)
    graph.reset(None)
    next(graph)
    state = graph.state_dict()
    assert list(state["hp_nodes"]) == ["order"]
    for entries, text in (
        ({**state["hp_nodes"], "SampleReader": {"read": 2}}, "has an entry for node 'SampleReader', which keeps none"),
        ({**state["hp_nodes"], "Filter": {}}, r"has entries \['Filter'\], but this graph has no such node"),
        ({"WindowSampler": state["hp_nodes"]["order"]}, r"no entry for node 'order'; it has \['WindowSampler'\]"),
    ):
        with pytest.raises(ValueError, match=text):
            graph.reset({"hp_nodes": entries})
    graph.reset(state)
    assert [key.position for key in next(graph).keys] == [2, 3]


ALONE = SingleRankTransport()
OUT_OF_ORDER = {
    "Splitter": (lambda: Splitter(sampler(), list), "has no samples; a SampleReader below the Splitter fills them"),
    "MetadataDeriver": (
        lambda: MetadataDeriver(sampler(), SampleMetadata),
        "has no samples; a SampleReader below the MetadataDeriver fills them",
    ),
    "Planner": (
        lambda: Planner(SampleReader(sampler(), [1] * 8), ALONE, seq_len=8, local_batch_size=2),
        "has no metadata; a MetadataDeriver below the Planner fills it",
    ),
    "Router": (
        lambda: Router(SampleReader(sampler(), [1] * 8), ALONE),
        "has no plan or no samples; a SampleReader and a Planner below the Router fill them",
    ),
    "Packer": (
        lambda: Packer(SampleReader(sampler(), [1] * 8), seq_len=8, local_batch_size=2),
        "samples are not where the plan wants them; a Router below the Packer brings them",
    ),
    "Collator": (lambda: Collator(sampler(), local_batch_size=2), "has no packed bins; a Packer below the Collator"),
}


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_a_node_that_finds_the_field_it_needs_empty_says_which_node_fills_it(name: str) -> None:
    make, text = OUT_OF_ORDER[name]
    node = make()
    node.reset(None)
    with pytest.raises((ValueError, DataPlaneError), match=text):
        next(node)


def test_a_closed_loader_says_so() -> None:
    def run(mesh: Any) -> None:
        loader = Scene().loader(mesh)
        next(loader)
        loader.close()
        loader.close()
        with pytest.raises(RuntimeError, match="the loader is closed; build a new one"):
            next(loader)

    run_ranks({"dp": 2}, run)


def test_a_loader_over_something_else_is_told() -> None:
    with pytest.raises(ValueError, match="the graph is a list; accepted: a torchdata BaseNode"):
        DistributedDataLoader([1, 2])  # type: ignore[arg-type]
