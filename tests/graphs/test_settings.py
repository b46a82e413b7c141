"""CONTRACT 1: what each setting of the configuration changes in what is delivered, through the builder."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hp_nodes import DataPlaneError, SampleMetadata, WorkloadCost, peek, sample_rng
from hp_nodes.transport import run_ranks
from tests.graphs.mode_scene import MODES, SEQ_LEN, STEPS, Texts, chosen, loader_of
from tests.scenes import rest

NATIVE = [mode for mode in MODES if mode != "external"]


# ---- how far ahead


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_host_prefetch_depth_counts_windows_beyond_the_one_delivered(depth: int) -> None:
    """A window here is two rounds of two records; nothing is read before the first batch is asked for."""

    def run(mesh: Any) -> None:
        dataset = Texts()
        with loader_of("online", mesh, dataset, 2, {"host_prefetch_depth": depth}) as loader:
            assert not dataset.reads
            for delivered in range(1, 5):
                next(loader)
                wanted = 4 * ((delivered + 1) // 2 + depth)
                deadline = time.monotonic() + 5
                while dataset.reads.total() < wanted and time.monotonic() < deadline:
                    time.sleep(0.005)
                time.sleep(0.05)
                assert dataset.reads.total() == wanted

    run_ranks({"dp": 1}, run)


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_device_prefetch_depth_is_ignored_on_the_cpu(depth: int) -> None:
    def run(mesh: Any) -> list[Any]:
        with loader_of("online", mesh, Texts(), 2, {"device_prefetch_depth": depth}) as loader:
            found = [next(loader)]
            assert not [thread.name for thread in threading.enumerate() if "DevicePrefetcher" in thread.name]
            return [*found, *loader]

    assert len(run_ranks({"dp": 1}, run)[0]) == STEPS * 8


# ---- what is drawn, and in which order


class Drawing(Texts):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"drawn": sample_rng().python.random()}


def test_seed_changes_what_samples_draw_and_never_their_order() -> None:
    def run(mesh: Any, seed: int) -> Any:
        with loader_of("online", mesh, Drawing(), settings={"seed": seed}) as loader:
            records = [record for batch in loader for record in batch]
            return [int(record["input_ids"][0]) - 1 for record in records], [record["drawn"] for record in records]

    ((order, drawn),) = run_ranks({"dp": 1}, lambda mesh: run(mesh, 1))
    assert sorted(order) == sorted(index for step in range(STEPS) for index in chosen(step))
    assert run_ranks({"dp": 1}, lambda mesh: run(mesh, 1)) == [(order, drawn)]
    ((order_of_2, drawn_of_2),) = run_ranks({"dp": 1}, lambda mesh: run(mesh, 2))
    assert order_of_2 == order
    assert not set(drawn) & set(drawn_of_2)


@pytest.mark.parametrize("mode", NATIVE)
def test_a_plan_computed_on_every_rank_is_the_one_that_is_broadcast(mode: str) -> None:
    def run(mesh: Any, broadcast_plan: bool) -> list[Any]:
        with loader_of(mode, mesh, Texts(), 4, {"broadcast_plan": broadcast_plan}) as loader:
            return rest(loader)

    assert run_ranks({"dp": 2}, lambda mesh: run(mesh, True)) == run_ranks({"dp": 2}, lambda mesh: run(mesh, False))


@pytest.mark.parametrize("objective", ["lockstep", "makespan", "balance"])
def test_the_objective_is_the_one_that_is_lowered(objective: str) -> None:
    def run(mesh: Any) -> None:
        with loader_of("online", mesh, Texts(), 4, {"objective": objective}) as loader:
            for _ in loader:
                plan = loader.last.report.plan
                assert plan.objective == objective
                before, after = (
                    {
                        "lockstep": costs.max(axis=0).sum(),
                        "makespan": costs.sum(axis=1).max(),
                        "balance": (costs.sum(axis=1).std() / costs.sum(axis=1).mean()) ** 2,
                    }[objective]
                    for costs in (plan.costs_before, plan.costs_after)
                )
                assert plan.before == pytest.approx(before)
                assert plan.after == pytest.approx(after)
                assert plan.lower_bound <= after <= before

    run_ranks({"dp": 2}, run)


def test_the_gain_of_a_used_plan_is_above_the_threshold_and_of_a_kept_reference_is_not() -> None:
    def run(mesh: Any) -> set[bool]:
        accepted = set()
        with loader_of("online", mesh, Texts(), 4, {"min_balance_gain": 0.15}) as loader:
            for _ in loader:
                plan = loader.last.report.plan
                assert plan.threshold == 0.15
                assert plan.accepted == (plan.gain > 0.15)
                assert plan.accepted or (plan.costs_before == plan.costs_after).all()
                accepted.add(plan.accepted)
        return accepted

    assert run_ranks({"dp": 2}, run)[0] == {True, False}


# ---- what goes into a bin


def sequences(record: dict[str, Any]) -> list[int]:
    """Lengths in the place of sequences: one that fits no bin of every third record, of the others two that do."""
    index = int(record["input_ids"][0]) - 1
    return [SEQ_LEN + 1 + index] if index % 3 == 0 else [4, 2]


def of_length(sample: int) -> SampleMetadata:
    return SampleMetadata(sample, WorkloadCost(llm=float(sample)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_oversized_sample_is_alone_in_its_bin_which_is_flagged(ranks: int) -> None:
    """CASES 3, with samples that are packed together."""
    given = {"split_fn": sequences, "metadata_fn": of_length, "pack_fn": lambda samples, seq_len: list(samples)}

    def first_step(mesh: Any, **settings: Any) -> tuple[list[list[int]], list[bool]]:
        with loader_of("split", mesh, Texts(), 8, settings, collate_fn=list, cost_model=None, **given) as loader:
            flagged = peek(loader.graph, after="Planner").plan.oversized.tolist()
            return [packed for batch in (next(loader) for _ in range(8 // ranks)) for packed in batch], flagged

    results = run_ranks({"dp": ranks}, lambda mesh: first_step(mesh, oversized_policy="single"))
    bins = [packed for delivered, _ in results for packed in delivered]
    assert [max(packed) > SEQ_LEN for packed in bins] == results[0][1]
    assert all(len(packed) == 1 or sum(packed) <= SEQ_LEN for packed in bins)
    longer = [index for index in chosen(0) if index % 3 == 0]
    assert sorted(packed[0] for packed in bins if packed[0] > SEQ_LEN) == [SEQ_LEN + 1 + i for i in sorted(longer)]
    with pytest.raises(DataPlaneError, match="longer than seq_len 16"):
        run_ranks({"dp": ranks}, first_step)


def test_a_record_that_exceeds_a_budget_is_an_error_that_names_both() -> None:
    """CONTRACT 6: a record fits one bin, tokens and every budget."""
    counted = {"metadata_fn": lambda part: SampleMetadata(len(part), packing_costs={"documents": 1, "any": 0})}

    def run(mesh: Any) -> str:
        settings = {"packing_budgets": {"any": 1, "documents": 2}}
        with (
            loader_of("split", mesh, Texts(), 4, settings, **counted) as loader,
            pytest.raises(DataPlaneError) as caught,
        ):
            next(loader)
        return str(caught.value).split("\n")[0]

    texts = run_ranks({"dp": 2}, run)
    assert texts[0] == texts[1]
    first = next(place for place, index in enumerate(chosen(0)) if len(Texts().lengths[index]) == 3)
    assert "puts 3.0 of budget 'documents', its limit is 2.0" in texts[0]
    assert ", ".join(f"sample (position {first}, part {part})" for part in range(3)) in texts[0]


def test_pad_token_id_is_what_rows_end_with_and_what_records_lose_at_their_end() -> None:
    class Padded(Texts):
        """Every record ends with two tokens that are padding."""

        def __getitem__(self, index: int) -> dict[str, Any]:
            record = super().__getitem__(index)
            ends = record["cu_seq_lens"]
            return {
                "input_ids": np.append(record["input_ids"], [99, 99])[:SEQ_LEN],
                "labels": np.append(record["labels"], [-100, -100])[:SEQ_LEN],
                "cu_seq_lens": np.append(ends, min(ends[-1] + 2, SEQ_LEN)),
            }

    def run(mesh: Any, pad_token_id: int | None) -> tuple[Counter[int], int]:
        with loader_of("repack", mesh, Padded(), 2, {"pad_token_id": pad_token_id}) as loader:
            tokens: Counter[int] = Counter()
            placed = 0
            for batch in loader:
                tokens.update(batch["input_ids"].flatten().tolist())
                placed += loader.last.num_tokens
            return tokens, placed

    total = int(Texts().tokens().sum())
    slots = STEPS * 8 * 2 * SEQ_LEN
    ((tokens, placed),) = run_ranks({"dp": 1}, lambda mesh: run(mesh, 99))
    assert (tokens[99], tokens[0], placed) == (slots - total, 0, total)
    ((tokens, placed),) = run_ranks({"dp": 1}, lambda mesh: run(mesh, None))
    assert (tokens[99], tokens[0], placed) == (placed - total, slots - placed, total + 2 * 48)


# ---- what may fail, and what may travel


class Holes(Texts):
    """Some records cannot be read."""

    bad = frozenset({3, 11, 30})

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.bad:
            raise OSError(f"record {index} is damaged")
        return super().__getitem__(index)


SKIPPING = {"on_error": "skip", "max_skipped": 6}


@pytest.mark.parametrize("mode", NATIVE)
def test_a_record_that_cannot_be_read_is_replaced_in_every_native_mode(mode: str) -> None:
    """The same ones on any number of ranks; every other record is delivered as ever, and the report counts."""
    counted = MODES[mode][2]

    def run(mesh: Any) -> tuple[Counter[int], list[int]]:
        with loader_of(mode, mesh, Holes(), 2, SKIPPING) as loader:
            found: Counter[int] = Counter()
            skipped = []
            for batch in loader:
                found.update(counted(batch))
                if loader.last.ends_step:
                    skipped.append(loader.last.report.skipped)
            return found, skipped

    whole = dict(enumerate(Texts().tokens().tolist()))
    results = {ranks: run_ranks({"dp": ranks}, run) for ranks in (1, 2)}
    found = {ranks: sum((tokens for tokens, _ in of_ranks), Counter()) for ranks, of_ranks in results.items()}
    assert found[1] == found[2]
    assert not found[1].keys() & Holes.bad
    assert all(found[1][index] % whole[index] == 0 and found[1][index] for index in whole if index not in Holes.bad)
    counts = {tuple(skipped) for of_ranks in results.values() for _, skipped in of_ranks}
    assert len(counts) == 1 and sum(*counts) >= 3


@pytest.mark.parametrize("function", ["split_fn", "metadata_fn", "cost_model"])
def test_what_the_users_functions_raise_is_raised_though_records_may_be_skipped(function: str) -> None:
    def failing(value: Any) -> Any:
        raise ArithmeticError(f"{function} cannot do this")

    def run(mesh: Any) -> str:
        settings = {"on_error": "skip", "max_skipped": 1000}
        with (
            loader_of("split", mesh, Texts(), 1, settings, **{function: failing}) as loader,
            pytest.raises(DataPlaneError, match=f"ArithmeticError: {function} cannot do this") as caught,
        ):
            next(loader)
        return str(caught.value).split("\n")[0]

    texts = run_ranks({"dp": 2}, run)
    assert texts[0] == texts[1]
    assert "index" in texts[0]


class Opaque:
    """What the wire format does not know."""

    def __init__(self, number: int) -> None:
        self.number = number


class WithOpaque(Texts):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return super().__getitem__(index) | {"opaque": Opaque(index)}


def test_values_that_the_wire_format_does_not_know_travel_only_where_pickle_is_allowed() -> None:
    """The refusal comes with the first window, before anything has moved."""

    def run(mesh: Any, **settings: Any) -> list[int]:
        with loader_of("online", mesh, WithOpaque(), 4, settings) as loader:
            return [record["opaque"].number for batch in loader for record in batch]

    results = run_ranks({"dp": 2}, lambda mesh: run(mesh, allow_pickle=True))
    assert sorted(number for numbers in results for number in numbers) == list(range(48))
    with pytest.raises(DataPlaneError, match=r"step 0.*Opaque.*allow_pickle=True"):
        run_ranks({"dp": 2}, run)
    with pytest.raises(DataPlaneError, match=r"step 0.*Opaque.*allow_pickle=True"):
        run_ranks({"dp": 2}, lambda mesh: run(mesh, min_balance_gain=0.99))  # nothing moves


@pytest.mark.parametrize("log_balance", [True, False])
def test_a_line_for_each_step_is_logged_by_one_rank_when_asked_for(log_balance: bool, caplog: Any) -> None:
    """CONTRACT 11."""

    def run(mesh: Any) -> None:
        with loader_of("online", mesh, Texts(), 2, {"log_balance": log_balance}) as loader:
            list(loader)

    with caplog.at_level(logging.INFO, logger="hp_nodes"):
        run_ranks({"dp": 2, "tp": 2}, run)
    lines = [record.getMessage() for record in caplog.records if "lockstep" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == [f"epoch 0 step {step}" for step in range(STEPS) if log_balance]
    assert all(record.levelno == logging.INFO for record in caplog.records)


def test_the_time_limit_is_that_of_every_exchange() -> None:
    """A rank that does not come is named after ``timeout_s``."""

    def run(mesh: Any) -> str:
        with loader_of("online", mesh, Texts(), settings={"host_prefetch_depth": 0, "timeout_s": 0.5}) as loader:
            if mesh.get_rank() == 1:
                time.sleep(2.0)
                return ""
            before = time.monotonic()
            with pytest.raises(DataPlaneError) as caught:
                next(loader)
            assert 0.4 < time.monotonic() - before < 1.5
            return str(caught.value)

    assert "[1]" in run_ranks({"dp": 2}, run)[0]
