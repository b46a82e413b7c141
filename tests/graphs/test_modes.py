"""CONTRACT 1, 2, 6 and 7 through the builder: every mode on every mesh delivers what the sampler chose, and resumes."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import (
    DataPlaneError,
    DistributedDataLoader,
    HostPrefetcher,
    MetadataDeriver,
    Planner,
    Router,
    SampleMetadata,
    WorkloadCost,
    describe,
)
from hp_nodes.nodes.graph import all_nodes
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import run_ranks
from tests.graphs.mode_scene import MODES, SEQ_LEN, STEPS, Divergent, Texts, chosen, loader_of, records_whole
from tests.scenes import content, pickled, rest

GRID = [
    (mode, dp, tp, window)
    for mode in MODES
    for dp in (1, 2, 4)
    for tp in (1, 2)
    for window in sorted({1, 2, 8 // dp})
    if mode != "external" or (tp, window) == (1, 1)
]


@pytest.mark.parametrize(("mode", "dp", "tp", "window"), GRID)
def test_every_step_holds_the_samplers_records_on_every_mesh(mode: str, dp: int, tp: int, window: int) -> None:
    """The records of each step, each whole and once; equal batches on model peers; as many rounds on every rank. Each
    occurrence is read once: by its target where metadata is precomputed, else by the rank whose sampler chose it.
    """
    counted = MODES[mode][2]

    def run(mesh: Any) -> tuple[list[Any], list[Any], int, Counter[int]]:
        dataset = Texts()
        with loader_of(mode, mesh, dataset, window) as loader:
            assert mode == "external" or len(loader) == STEPS * 8 // dp
            found = []
            for batch in loader:
                found.append((loader.last.step, loader.last.round, counted(batch), loader.last.ends_step))
                assert loader.last.ends_step == (loader.last.round == 8 // dp - 1)
            reads = Counter(dataset.reads)
            return found, [content(batch) for batch in rest(loader, 1)], len(found), reads

    results = run_ranks({"dp": dp, "tp": tp}, run)
    assert {number for _, _, number, _ in results} == {STEPS * 8 // dp}
    for rank in range(0, dp * tp, tp):
        assert all(results[rank + peer][:3] == results[rank][:3] for peer in range(tp))
        assert not any(results[rank + peer][3] for peer in range(1, tp))
    lengths = Texts().tokens()
    for step in range(STEPS):
        held: Counter[int] = Counter()
        for rank in range(0, dp * tp, tp):
            for at, _, records, _ in results[rank][0]:
                held.update(records if at == step else {})
        assert held == Counter({index: int(lengths[index]) for index in chosen(step)})
    for rank in range(dp):
        found, _, _, reads = results[rank * tp]
        if mode == "precomputed":
            assert reads == Counter(index for _, _, records, _ in found for index in records)
        elif mode != "external":
            own = DistributedBatchSampler(48, 2, 16, rank, dp, order="shuffle", seed=3)
            assert reads == Counter(index for indices in own for index in indices)


SHAPES: list[dict[str, int]] = [{"dp": 2}, {"dp": 2, "tp": 2}]


@pytest.mark.parametrize(
    ("mode", "shape"),
    [(mode, shape) for mode in MODES for shape in SHAPES if mode != "external" or "tp" not in shape],
    ids=str,
)
def test_resume_at_every_step_is_the_uninterrupted_run(mode: str, shape: dict[str, int]) -> None:
    window = 1 if mode == "external" else 2

    def run(mesh: Any) -> None:
        with loader_of(mode, mesh, Texts(), window) as loader:
            states, batches = [pickled(loader.state_dict())], []
            for batch in loader:
                batches.append((loader.last.step, loader.last.round, content(batch)))
                if loader.last.ends_step:
                    states.append(pickled(loader.state_dict()))
        for step, state in enumerate(states[:-1]):
            with loader_of(mode, mesh, Texts(), window, {"host_prefetch_depth": step}) as again:
                again.load_state_dict(state)
                assert [found[1:] for found in rest(again)] == batches[4 * step :]

    run_ranks(shape, run)


# ---- precomputed


def exchanges_of(loader: DistributedDataLoader) -> int:
    return sum(node.transport.exchanges for node in all_nodes(loader.graph) if isinstance(node, HostPrefetcher))


@pytest.mark.parametrize("broadcast_plan", [True, False])
def test_precomputed_reads_at_the_target_and_exchanges_no_payload(broadcast_plan: bool) -> None:
    """Each record once, by the rank that trains on it; an opening, the plan and a closing are all that is exchanged."""
    everywhere: list[Counter[int]] = []

    def run(mesh: Any) -> tuple[int, int]:
        dataset = Texts()
        settings = {"broadcast_plan": broadcast_plan, "host_prefetch_depth": 0}
        with loader_of("precomputed", mesh, dataset, 4, settings) as loader:
            assert not any(isinstance(node, Router) for node in all_nodes(loader.graph))
            trained: Counter[int] = Counter()
            windows = moved = 0
            for batch in loader:
                trained.update(records_whole(batch).keys())
                report = loader.last.report
                assert report.bytes_sent == report.bytes_received == report.samples_sent == 0
                windows += loader.last.ends_window
                moved += report.plan.accepted
            assert trained == dataset.reads
            everywhere.append(dataset.reads)
            return exchanges_of(loader) - windows * (3 if broadcast_plan else 2), moved

    results = run_ranks({"dp": 2}, run)
    assert sum(everywhere, Counter()) == Counter(range(48))
    capacities = results[0][0]
    assert all(extra == capacities for extra, _ in results)
    assert 1 <= capacities <= 4  # the numbers that outgrew the first opening, and the end of the epoch
    assert all(moved for _, moved in results)


def test_precomputed_knows_the_plan_before_any_read() -> None:
    """The first record read already belongs to the planned order."""

    def run(mesh: Any) -> tuple[list[int], list[int]]:
        order: list[int] = []

        class Watched(Texts):
            def __getitem__(self, index: int) -> dict[str, Any]:
                order.append(index)
                return super().__getitem__(index)

        with loader_of("precomputed", mesh, Watched(), 4, {"host_prefetch_depth": 0}) as loader:
            batches = [next(loader) for _ in range(4)]
        return order, [index for batch in batches for index in records_whole(batch)]

    for read, trained in run_ranks({"dp": 2}, run):
        assert read == trained


@pytest.mark.parametrize("workers", [1, 2])
def test_precomputed_with_reader_workers(workers: int) -> None:
    def run(mesh: Any, **given: Any) -> list[Any]:
        with loader_of("precomputed", mesh, Texts(), 2, **given) as loader:
            return rest(loader)

    expected = run_ranks({"dp": 2}, run)
    kwargs = {"num_workers": workers, "multiprocessing_context": "fork"}
    assert run_ranks({"dp": 2}, lambda mesh: run(mesh, dataloader_kwargs=kwargs)) == expected


@pytest.mark.parametrize("mode", ["online", "precomputed"])
def test_ranks_that_plan_differently_are_told(mode: str) -> None:
    """Where nothing is exchanged, the closing exchange shows it."""

    def run(mesh: Any) -> str:
        algorithm = Divergent(mesh.get_rank() == 1)
        with (
            loader_of(mode, mesh, Texts(), 2, {"broadcast_plan": False}, balancing_algorithm=algorithm) as loader,
            pytest.raises(DataPlaneError) as caught,
        ):
            list(loader)
        return str(caught.value)

    texts = run_ranks({"dp": 2}, run)
    assert len(set(texts)) == 1
    assert "ranks [1] have another plan than rank 0" in texts[0]


def test_what_is_wrong_with_precomputed_metadata_names_the_sample_everywhere() -> None:
    def run(mesh: Any) -> tuple[str, int]:
        dataset = Texts()
        table = [SampleMetadata(int(tokens)) for tokens in dataset.tokens()]
        table[chosen(1)[3]] = "seven"  # type: ignore[call-overload]
        with (
            loader_of("precomputed", mesh, dataset, metadata=table) as loader,
            pytest.raises(DataPlaneError) as caught,
        ):
            list(loader)
        return str(caught.value), sum(dataset.reads.values())

    results = run_ranks({"dp": 2}, run)
    assert len({text for text, _ in results}) == 1
    assert f"index {chosen(1)[3]}" in results[0][0]
    assert "'seven'" in results[0][0]
    assert all(reads <= 8 for _, reads in results)  # the first step's, and none of the second


def test_metadata_of_other_lengths_costs_nothing_to_read() -> None:
    """The table is asked once a window, and what is not in the window is not looked up."""

    class Big(np.ndarray):
        asked: ClassVar[Counter[str]] = Counter()

        def __getitem__(self, key: Any) -> Any:
            Big.asked[str(np.shape(key))] += 1
            return super().__getitem__(key)

    def run(mesh: Any) -> None:
        with loader_of("precomputed", mesh, Texts(), 4, metadata=Texts().tokens().view(Big)) as loader:
            list(loader)

    run_ranks({"dp": 1}, run)
    assert Big.asked["(8,)"] == 6


# ---- nothing to plan


class Whole:
    """Record i is i + 1."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index + 1


def one_record(mesh: Any, dataset: Any = None, **changes: Any) -> DistributedDataLoader:
    rank, ranks = mesh.get_local_rank("dp"), mesh.size("dp")
    settings = {"seq_len": 8, "local_batch_size": 1, "timeout_s": 10.0}
    settings |= {name: changes.pop(name) for name in list(changes) if name in ("objective", "balance_window_size")}
    sampler = DistributedBatchSampler(8, 1, changes.pop("global_batch", ranks), rank, ranks)
    return build_distributed_dataloader(
        dataset or Whole(),
        mesh,
        DistributedDatasetConfig(**settings),  # type: ignore[arg-type]
        batch_sampler=sampler,
        metadata_fn=lambda record: SampleMetadata(record, WorkloadCost(llm=float(record))),
        collate_fn=list,
        **changes,
    )


def test_one_whole_record_a_rank_and_window_is_not_planned_and_said_once(caplog: Any) -> None:
    def run(mesh: Any) -> list[Any]:
        with one_record(mesh) as loader:
            found = []
            for batch in loader:
                report = loader.last.report
                assert report is None or report.plan.before == report.plan.after == report.plan.lower_bound
                found.append(batch)
            return found

    with caplog.at_level(logging.WARNING, logger="hp_nodes"):
        results = run_ranks({"dp": 2, "tp": 2}, run)
    assert results[0] == results[1] == [[1], [3], [5], [7]]
    assert results[2] == results[3] == [[2], [4], [6], [8]]
    said = [record.getMessage() for record in caplog.records if "nothing to plan" in record.getMessage()]
    assert len(said) == 1
    assert "local_batch_size" in said[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch": 4, "balance_window_size": 2},
        {"global_batch": 4, "objective": "makespan"},
        {"balancing_algorithm": Divergent(False)},
        {"split_fn": lambda record: [record], "pack_fn": lambda records, seq_len: records},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_where_there_is_something_to_plan_nothing_is_said(changes: dict[str, Any], caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, logger="hp_nodes"):
        run_ranks({"dp": 2}, lambda mesh: list(one_record(mesh, **dict(changes))))
    assert not [record for record in caplog.records if "nothing to plan" in record.getMessage()]


def test_a_record_that_does_not_fit_is_still_an_error() -> None:
    class Long(Whole):
        def __getitem__(self, index: int) -> int:
            return 9 if index == 3 else 1

    def run(mesh: Any) -> str:
        with one_record(mesh, Long()) as loader, pytest.raises(DataPlaneError) as caught:
            list(loader)
        return str(caught.value)

    texts = run_ranks({"dp": 2}, run)
    assert len({text.split("\n")[0] for text in texts}) == 1
    assert "longer than seq_len 8" in texts[0]


# ---- split and pack


def test_a_record_stays_together_where_balancing_gains_nothing() -> None:
    """Its own sequences are the fallback grouping: with the gate closed every bin is one record, in order."""

    def run(mesh: Any) -> list[Any]:
        with loader_of("split", mesh, Texts(), 4, {"min_balance_gain": 0.999}) as loader:
            return [[sorted(set(row.tolist()) - {0}) for row in batch] for batch in loader]

    results = run_ranks({"dp": 2}, run)
    for step in range(STEPS):
        kept = [row for number in range(4) for rank in range(2) for row in results[rank][4 * step + number]]
        assert kept == [[index + 1] for index in chosen(step)]


def test_sequences_of_all_rounds_of_a_window_are_planned_together() -> None:
    """A window of four rounds is one plan, never worse than the records as they came; next() still gives a round."""

    def run(mesh: Any) -> None:
        with loader_of("repack", mesh, Texts(), 4) as loader:
            crossed = 0
            for batch in loader:
                last = loader.last
                assert batch["input_ids"].shape == (2, SEQ_LEN)
                assert last.ends_window == (last.round == 3)
                home = {position - 16 * last.step for position in last.positions}
                crossed += any(place // 4 != last.round for place in home)
                if last.ends_step:
                    plan = last.report.plan
                    assert plan.costs_after.shape == (2, 4)
                    assert plan.accepted and plan.after < plan.before
            assert crossed  # a sequence is trained on in another round than its record was drawn for

    run_ranks({"dp": 2}, run)


def test_a_record_whose_sequences_do_not_fit_one_bin_is_an_error() -> None:
    class Long(Texts):
        def __init__(self) -> None:
            super().__init__()
            self.lengths[5] = [9, 9]

    def run(mesh: Any) -> str:
        with loader_of("repack", mesh, Long()) as loader, pytest.raises(DataPlaneError) as caught:
            list(loader)
        return str(caught.value)

    texts = run_ranks({"dp": 2}, run)
    assert len({text.split("\n")[0] for text in texts}) == 1
    assert "18 tokens, seq_len is 16" in texts[0]


def documents_of(sample: Any) -> SampleMetadata:
    return SampleMetadata(len(sample), packing_costs={"documents": 1})


def test_budgets_limit_every_bin() -> None:
    """CONTRACT 1, packing_budgets: additive and inclusive."""

    def run(mesh: Any, limit: int, metadata_fn: Any = documents_of) -> int:
        settings = {"packing_budgets": {"documents": limit}}
        given = {"metadata_fn": metadata_fn, "pack_fn": lambda samples, seq_len: len(samples), "collate_fn": max}
        with loader_of("split", mesh, Texts(), 4, settings, **given) as loader:
            return max(loader)

    assert max(run_ranks({"dp": 2}, lambda mesh: run(mesh, 9))) > 3
    assert max(run_ranks({"dp": 2}, lambda mesh: run(mesh, 3))) == 3
    with pytest.raises(DataPlaneError, match=r"index \d+.*packing_costs lacks \['documents'\]"):
        run_ranks({"dp": 2}, lambda mesh: run(mesh, 3, lambda sample: SampleMetadata(len(sample))))


def test_a_single_sample_above_a_budget_is_an_error_even_when_oversize_is_allowed() -> None:
    def run(mesh: Any) -> str:
        table = [
            {"pack_tokens": 40 if index == 7 else 4, "packing_costs": {"images": 2 if index == 9 else 1}}
            for index in range(48)
        ]
        settings = {"packing_budgets": {"images": 1}, "oversized_policy": "single"}
        with (
            loader_of("precomputed", mesh, Texts(), 4, settings, metadata=table) as loader,
            pytest.raises(DataPlaneError) as caught,
        ):
            list(loader)
        return str(caught.value).split("\n")[0]

    texts = run_ranks({"dp": 2}, run)
    assert texts[0] == texts[1]
    assert "budget 'images' is limited to 1.0" in texts[0]


def test_external_steps_of_text_are_packed_and_collated_by_the_built_in_functions() -> None:
    """Samples of an external source are sequences already: repack_sequences packs and collates them."""

    def run(mesh: Any) -> list[Any]:
        def text(length: int) -> dict[str, Any]:
            return {"input_ids": np.full(length, length), "labels": np.full(length, length)}

        steps = [[[text(3), text(2)], [text(5 + mesh.get_rank())]] for _ in range(2)]
        with build_distributed_dataloader(
            None,
            mesh,
            DistributedDatasetConfig(seq_len=8, local_batch_size=2, repack_sequences=True, timeout_s=10.0),
            external_step_source=steps,
        ) as loader:
            return [(batch["input_ids"].shape, batch["num_label_tokens"]) for batch in loader]

    results = run_ranks({"dp": 2}, run)
    assert all(shape == (2, 8) for batches in results for shape, _ in batches)
    assert [a + b for (_, a), (_, b) in zip(*results, strict=True)] == [21, 21]


def test_repacked_text_counts_its_labels_on_every_rank() -> None:
    """CASES 10: the batch carries what a global mean needs."""

    def run(mesh: Any) -> int:
        with loader_of("repack", mesh, Texts(), 2) as loader:
            total = 0
            for batch in loader:
                assert batch["num_label_tokens"] == loader.last.num_label_tokens
                assert loader.last.num_tokens == int((batch["input_ids"] != 0).sum())
                total += batch["num_label_tokens"]
            return total

    totals = run_ranks({"dp": 2, "tp": 2}, run)
    assert totals[0] == totals[1]
    assert totals[2] == totals[3]
    assert totals[0] + totals[2] == Texts().tokens().sum()


def test_metadata_that_counts_other_tokens_than_the_packer_is_named() -> None:
    def run(mesh: Any) -> str:
        with (
            loader_of("repack", mesh, Texts(), metadata_fn=lambda sample: SampleMetadata(4)) as loader,
            pytest.raises(DataPlaneError) as caught,
        ):
            list(loader)
        return str(caught.value)

    texts = run_ranks({"dp": 2}, run)
    assert len(set(texts)) == 1
    assert "pack_tokens is 4, but the sample has" in texts[0]


def test_the_order_of_nodes_is_the_designs() -> None:
    """Precomputed metadata comes before reading, and describe() shows it."""

    def run(mesh: Any) -> None:
        with loader_of("precomputed", mesh, Texts()) as loader:
            names = [type(node).__name__ for node in all_nodes(loader.graph)]
            assert names[:5] == ["WindowSampler", "MetadataDeriver", "Planner", "SampleReader", "Packer"]
            assert describe(loader.graph).startswith("StepCheckpointer")
        with loader_of("online", mesh, Texts()) as loader:
            names = [type(node).__name__ for node in all_nodes(loader.graph)]
            assert names[:5] == ["WindowSampler", "SampleReader", "MetadataDeriver", "Planner", "Router"]

    run_ranks({"dp": 1}, run)


def test_cost_models_are_resolved_in_their_order() -> None:
    """The argument, else attention when repacking, else the model's configuration, else metadata.cost."""
    backbone = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}

    def costs(mesh: Any, mode: str, **given: Any) -> str:
        with loader_of(mode, mesh, Texts(), **given) as loader:
            nodes = list(all_nodes(loader.graph))
            deriver = next(node for node in nodes if isinstance(node, MetadataDeriver))
            priced = next(node for node in nodes if isinstance(node, Planner)).padding_cost
            return f"{type(deriver.cost_model).__name__} {priced is not None}"

    def run(mesh: Any) -> None:
        assert costs(mesh, "repack") == "CausalAttentionCostModel True"
        assert costs(mesh, "repack", model_config=backbone) == "CausalAttentionCostModel True"
        assert costs(mesh, "online", cost_model=None, model_config=backbone) == "BackboneCostModel False"
        assert costs(mesh, "split", cost_model=None, model_config=backbone) == "BackboneCostModel True"
        assert costs(mesh, "online", cost_model=None) == "NoneType False"
        assert costs(mesh, "online", model_config=backbone) == "CausalAttentionCostModel False"

    run_ranks({"dp": 1}, run)


def test_nothing_is_left_running() -> None:
    gc.collect()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate() if "Prefetcher" in thread.name]
        if not left:
            return
        time.sleep(0.05)
    raise AssertionError(left)
