"""CONTRACT 5: metadata from samples and from tables of every kind; costs one by one and all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hp_nodes import MetadataDeriver, SampleMetadata, SampleReader, Window, WindowSampler, WorkloadCost
from hp_nodes.planning import BackboneCostModel, CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
ORDER = [7, 0, 5, 5]
EXPECTED = [6, 3, 9, 9]


def window_of(metadata: Any = None, metadata_fn: Any = None, cost_model: Any = None, order: Any = ORDER) -> Window:
    """The window that a deriver gives for records ``order``."""
    sampler = DistributedBatchSampler(len(order), len(order), len(order), 0, 1, index_mapping=order)
    source: Any = WindowSampler(sampler)
    if metadata_fn is not None:
        source = SampleReader(source, TOKENS)
    deriver = MetadataDeriver(source, metadata_fn, metadata=metadata, cost_model=cost_model)
    deriver.reset(None)
    return next(deriver)


class Counting:
    """A sequence that counts how often it is asked."""

    def __init__(self, entries: Any) -> None:
        self.entries = entries
        self.calls = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        self.calls += 1
        return self.entries[index]


class Many(Counting):
    def __getitems__(self, indices: list[int]) -> Any:
        self.calls += 1
        return [self.entries[index] for index in indices]


class CountingArray(np.ndarray):
    calls = 0

    def __getitem__(self, key: Any) -> Any:
        type(self).calls += 1
        return super().__getitem__(key)


def structured() -> Any:
    table = np.zeros(8, dtype=[("pack_tokens", "i4"), ("llm", "f4"), ("packing_costs", [("images", "f8")])])
    table["pack_tokens"] = TOKENS
    table["llm"] = np.arange(8)
    table["packing_costs"]["images"] = np.arange(8) * 2
    return table


def memory_map(tmp_path: Path) -> Any:
    structured().tofile(tmp_path / "metadata.bin")
    return np.memmap(tmp_path / "metadata.bin", dtype=structured().dtype, mode="r")


def arrow() -> Any:
    return pytest.importorskip("pyarrow")


def hugging_face(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


FIELDS = {"pack_tokens": TOKENS, "llm": [float(place) for place in range(8)]}
COUNTS: dict[str, Any] = {
    "list of SampleMetadata": lambda: [SampleMetadata(tokens) for tokens in TOKENS],
    "list of ints": lambda: TOKENS,
    "list of fields": lambda: [{"pack_tokens": tokens} for tokens in TOKENS],
    "own sequence": lambda: Counting(TOKENS),
    "own sequence for many": lambda: Many(TOKENS),
    "integer array": lambda: np.array(TOKENS, dtype=np.uint16),
    "object array": lambda: np.array([SampleMetadata(tokens) for tokens in TOKENS], dtype=object),
    "torch tensor": lambda: torch.tensor(TOKENS),
    "Arrow array": lambda: arrow().array(TOKENS),
    "Arrow chunks": lambda: arrow().chunked_array([TOKENS[:3], TOKENS[3:]]),
    "Arrow column": lambda: arrow().table(FIELDS)["pack_tokens"],
    "Hugging Face column": lambda: hugging_face(FIELDS)["pack_tokens"],
    "Hugging Face column of arrays": lambda: hugging_face(FIELDS).with_format("numpy")["pack_tokens"],
    "pandas series": lambda: pytest.importorskip("pandas").Series(TOKENS, index=range(100, 108)),
}
WITH_COSTS: dict[str, Any] = {
    "structured array": structured,
    "record array": lambda: structured().view(np.recarray),
    "list of fields": lambda: [
        {"pack_tokens": t, "cost": {"llm": float(n)}, "packing_costs": {"images": 2.0 * n}, "sample_id": n}
        for n, t in enumerate(TOKENS)
    ],
    "Arrow table": lambda: arrow().table({**FIELDS, "packing_costs": [{"images": 2.0 * n} for n in range(8)]}),
    "Arrow structs": lambda: arrow().array(
        [{"pack_tokens": t, "llm": float(n), "packing_costs": {"images": 2.0 * n}} for n, t in enumerate(TOKENS)]
    ),
    "Hugging Face dataset": lambda: hugging_face({**FIELDS, "packing_costs": [{"images": 2.0 * n} for n in range(8)]}),
    "pandas frame": lambda: pytest.importorskip("pandas").DataFrame(
        {**FIELDS, "packing_costs": [{"images": 2.0 * n} for n in range(8)]}
    ),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_token_counts_of_every_kind(kind: str) -> None:
    """CONTRACT 2, 5: anything with __len__ and __getitem__."""
    window = window_of(COUNTS[kind](), cost_model=CausalAttentionCostModel())
    assert window.tokens is not None and window.costs is not None
    assert window.tokens.dtype == np.int64
    assert window.tokens.tolist() == EXPECTED
    assert window.costs.tolist() == [tokens**2 for tokens in EXPECTED]
    assert window.samples is None


@pytest.mark.parametrize("kind", [*WITH_COSTS, "memory map"])
def test_named_fields_of_every_kind(kind: str, tmp_path: Path) -> None:
    window = window_of(memory_map(tmp_path) if kind == "memory map" else WITH_COSTS[kind]())
    assert window.tokens is not None and window.costs is not None and window.metadata is not None
    assert window.tokens.tolist() == EXPECTED
    assert window.costs.tolist() == ORDER
    assert [metadata.packing_costs["images"] for metadata in window.metadata] == [2 * index for index in ORDER]


def test_an_array_is_looked_up_once_for_a_window() -> None:
    table = np.array(TOKENS).view(CountingArray)
    CountingArray.calls = 0
    window_of(table, cost_model=CausalAttentionCostModel())
    assert CountingArray.calls == 1
    many = Many(TOKENS)
    window_of(many, cost_model=CausalAttentionCostModel())
    assert many.calls == 1
    single = Counting(TOKENS)
    window_of(single, cost_model=CausalAttentionCostModel())
    assert single.calls == len(ORDER)


@pytest.mark.parametrize("table", [TOKENS, np.array(TOKENS)], ids=["list", "array"])
def test_an_index_outside_the_table_is_named(table: Any) -> None:
    with pytest.raises(IndexError, match="index 8 is outside the metadata of 8 entries"):
        window_of(table, order=[0, 1, 8, 2])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (7, "metadata is a int; accepted: anything with __getitem__ and __len__"),
        (iter(TOKENS), "accepted: anything with __getitem__ and __len__"),
        (np.zeros(8), r"an array float64\[8\]; accepted: one dimension, of integers"),
        (np.zeros((8, 2), dtype=int), r"int64\[8, 2\]"),
        (np.zeros(8, dtype=[("tokens", "i4")]), r"unknown fields \['tokens'\]; accepted: pack_tokens"),
        (np.zeros(8, dtype=[("llm", "f4")]), "no field 'pack_tokens'"),
    ],
)
def test_what_is_no_table_is_refused_before_anything_is_read(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_of(table)


def test_a_table_that_also_holds_the_records_is_refused() -> None:
    for table in (hugging_face({**FIELDS, "text": ["x"] * 8}), arrow().table({**FIELDS, "text": ["x"] * 8})):
        with pytest.raises(ValueError, match=r"unknown fields \['text'\].*select those first"):
            window_of(table)


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (0, ValueError, "pack_tokens is 0; accepted: an int >= 1"),
        (True, TypeError, "True; accepted: a SampleMetadata"),
        (2.5, TypeError, "2.5; accepted: a SampleMetadata"),
        (None, TypeError, "None; accepted"),
        ({"pack_tokens": None}, ValueError, "pack_tokens is None"),
        ({"pack_tokens": 2, "llm": -1.0}, ValueError, "'llm' is -1.0"),
        ({"pack_tokens": 2, "cost": WorkloadCost(), "llm": 1.0}, ValueError, "cost is given as a whole and by"),
    ],
)
def test_a_bad_entry_is_named(entry: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        window_of([2, entry, 2], order=[0, 2, 1])
    assert "index 1" in caught.value._hp_nodes_location["sample"]


# ---- costs


class Mine(CausalAttentionCostModel):
    """A newer ``__call__``; the inherited ``costs`` does not know of it."""

    def __call__(self, metadata: SampleMetadata) -> WorkloadCost:
        return WorkloadCost(llm=1.0)


class Watched(CausalAttentionCostModel):
    one = many = 0

    def __call__(self, metadata: SampleMetadata) -> WorkloadCost:
        self.one += 1
        return super().__call__(metadata)

    def costs(self, metadata: Any) -> Any:
        self.many += 1
        return super().costs(metadata)


def test_a_model_that_prices_many_samples_is_asked_once() -> None:
    """It stays exact, and online too."""
    for source in ({"metadata": TOKENS}, {"metadata_fn": lambda record: SampleMetadata(record)}):
        model = Watched()
        window = window_of(cost_model=model, **source)
        assert window.costs is not None
        assert window.costs.tolist() == [tokens**2 for tokens in EXPECTED]
        assert (model.one, model.many) == (0, 1)


def test_a_newer_call_wins_over_inherited_costs() -> None:
    window = window_of(TOKENS, cost_model=Mine())
    assert window.costs is not None
    assert window.costs.tolist() == [1.0] * 4


def test_the_sample_whose_cost_fails_is_named() -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    table = [SampleMetadata(4), SampleMetadata(4, features={"P": 9, "D": 9})]
    with pytest.raises(ValueError, match="add up to its pack_tokens 4") as caught:
        window_of(table, cost_model=BackboneCostModel(config), order=[0, 1])
    assert "index 1" in caught.value._hp_nodes_location["sample"]


@pytest.mark.parametrize("costs", [[1.0], [[1.0] * 4]])
def test_costs_of_another_shape_are_refused(costs: Any) -> None:
    class Short(CausalAttentionCostModel):
        def costs(self, metadata: Any) -> Any:
            return np.array(costs)

    with pytest.raises(TypeError, match=r"costs\(\) gave shape"):
        window_of(TOKENS, cost_model=Short())


@pytest.mark.parametrize("given", [3.0, None, {"llm": 3.0}])
def test_what_a_cost_model_gives_is_checked(given: Any) -> None:
    with pytest.raises(TypeError, match="the cost model returned .*; accepted: a WorkloadCost") as caught:
        window_of(TOKENS, cost_model=lambda metadata: given, order=[3, 0])
    assert "index 3" in caught.value._hp_nodes_location["sample"]


def test_a_cost_is_its_llm_component_alone() -> None:
    """The others are the user's own; nothing is balanced by them."""
    costs = [WorkloadCost(9, 9, 9, llm=float(n), memory=9, communication=9) for n in range(8)]
    assert window_of([SampleMetadata(1, cost) for cost in costs]).costs.tolist() == ORDER


def test_exactly_one_of_the_two_sources() -> None:
    for arguments in ({}, {"metadata": TOKENS, "metadata_fn": lambda record: SampleMetadata(1)}):
        with pytest.raises(ValueError, match="accepted: exactly one"):
            MetadataDeriver(WindowSampler(DistributedBatchSampler(4, 1, 1, 0, 1)), **arguments)


def test_what_metadata_fn_gives_is_checked() -> None:
    with pytest.raises(TypeError, match="metadata_fn gave 6; accepted: a SampleMetadata"):
        window_of(metadata_fn=lambda record: record)
