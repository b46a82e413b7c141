"""CONTRACT 1, 2, 6 and 7 through the builder: every mode on every mesh delivers what the sampler chose, and resumes."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import (
    DataPlaneError,
    DistributedDataLoader,
    HostPrefetcher,
    MetadataDeriver,
    Planner,
    Router,
    SampleMetadata,
    TensorFieldSpec,
    WorkloadCost,
    describe,
)
from hp_nodes.nodes.graph import all_nodes
from hp_nodes.planning import CausalAttentionCostModel
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.scenes import content, pickled, rest

SEQ_LEN = 16
STEPS = 3


class Texts:
    """Records of one to three documents, 16 tokens at most; every token of record i is i. Counts reads by index."""

    def __init__(self, size: int = 48, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = [rng.integers(1, 6, size=rng.integers(1, 4)).tolist() for _ in range(size)]
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        total = sum(self.lengths[index])
        return {
            "input_ids": np.full(total, index + 1),
            "labels": np.full(total, index + 1),
            "cu_seq_lens": np.cumsum([0, *self.lengths[index]]),
        }

    def tokens(self) -> Any:
        """int64[records]: what a record takes of a bin, unsplit."""
        return np.array([sum(lengths) for lengths in self.lengths])


def documents(record: dict[str, Any]) -> list[Any]:
    return [part for part in np.split(record["input_ids"], record["cu_seq_lens"][1:-1]) if len(part)]


def padded(samples: Any, seq_len: int) -> Any:
    packed = torch.zeros(seq_len, dtype=torch.int64)
    joined = torch.from_numpy(np.concatenate(samples))
    packed[: len(joined)] = joined
    return packed


def records_of_rows(batch: Any) -> Counter[int]:
    """Record → its tokens in the batch."""
    rows = batch["input_ids"] if isinstance(batch, dict) else batch
    found = Counter(rows.reshape(-1).tolist())
    found.pop(0, None)
    return Counter({token - 1: number for token, number in found.items()})


def records_whole(batch: Any) -> Counter[int]:
    return Counter({int(record["input_ids"][0]) - 1: len(record["input_ids"]) for record in batch})


class LocalRounds:
    """An external source over the same order: rank r of a round takes its slice; bins of one record."""

    def __init__(self, dataset: Texts, sampler: DistributedBatchSampler) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.rounds_per_step = sampler.global_batch_size // sampler.global_micro_batch_size
        self.epoch = self.given = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.sampler.load_state_dict({"epoch": self.epoch, "consumed_samples": self.given})
        for indices in self.sampler:
            self.given += self.sampler.global_micro_batch_size
            yield [[self.dataset[index]] for index in indices]
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


MODES: dict[str, tuple[dict[str, Any], Callable[[Texts], dict[str, Any]], Callable[[Any], Counter[int]]]] = {
    "online": (
        {},
        lambda dataset: {"metadata_fn": lambda record: SampleMetadata(len(record["input_ids"])), "collate_fn": list},
        records_whole,
    ),
    "precomputed": (
        {"metadata_mode": True},
        lambda dataset: {"metadata": dataset.tokens(), "collate_fn": list},
        records_whole,
    ),
    "split": (
        {},
        lambda dataset: {
            "metadata_fn": lambda document: SampleMetadata(len(document)),
            "split_fn": documents,
            "pack_fn": padded,
            "collate_fn": torch.stack,
        },
        records_of_rows,
    ),
    "repack": ({"repack_sequences": True}, lambda dataset: {}, records_of_rows),
    "external": (
        {},
        lambda dataset: {
            "metadata_fn": lambda record: SampleMetadata(len(record["input_ids"])),
            "pack_fn": lambda records, seq_len: padded([record["input_ids"] for record in records], seq_len),
            "collate_fn": torch.stack,
        },
        records_of_rows,
    ),
}


def loader_of(
    mode: str, mesh: Any, dataset: Any, window: int = 1, settings: Any = None, **given: Any
) -> DistributedDataLoader:
    """A loader whose steps hold 16 records, 2 a rank and round, in a shuffled order."""
    config, arguments, _ = MODES[mode]
    topology = DataTopology.from_mesh(mesh)
    sampler = DistributedBatchSampler(
        48, 2, 16, topology.data_rank, topology.data_parallel_size, order="shuffle", seed=3
    )
    functions = arguments(dataset if dataset is not None else Texts()) | given
    if mode == "external":
        functions["external_step_source"] = LocalRounds(dataset, sampler)
    else:
        functions["batch_sampler"] = sampler
        functions["metadata"] = functions.get("metadata") if topology.is_constructor else None
    functions.setdefault("cost_model", None if mode == "repack" else CausalAttentionCostModel())
    return build_distributed_dataloader(
        dataset if topology.is_constructor else None,
        mesh,
        DistributedDatasetConfig(
            seq_len=SEQ_LEN,
            local_batch_size=2,
            balance_window_size=window,
            timeout_s=20.0,
            **config,
            **(settings or {}),
        ),
        **functions,
    )


def chosen(step: int) -> list[int]:
    sampler = DistributedBatchSampler(48, 16, 16, 0, 1, order="shuffle", seed=3)
    sampler.load_state_dict({"epoch": 0, "consumed_samples": 16 * step})
    return list(next(iter(sampler)))


GRID = [
    (mode, dp, tp, window)
    for mode in MODES
    for dp in (1, 2, 4)
    for tp in (1, 2)
    for window in sorted({1, 2, 8 // dp})
    if not (mode == "external" and (tp > 1 or window > 1)) and not (dp == 4 and tp == 2 and window != 2)
]


@pytest.mark.parametrize(("mode", "dp", "tp", "window"), GRID)
def test_every_step_holds_the_samplers_records_on_every_mesh(mode: str, dp: int, tp: int, window: int) -> None:
    """The records of each step, each whole and once; equal batches on model peers; as many rounds on every rank."""
    counted = MODES[mode][2]
    reads: Counter[int] = Counter()

    def run(mesh: Any) -> tuple[list[Any], list[Any], int]:
        dataset = Texts()
        with loader_of(mode, mesh, dataset, window) as loader:
            found = []
            for batch in loader:
                found.append((loader.last.step, loader.last.round, counted(batch), loader.last.ends_step))
                assert loader.last.ends_step == (loader.last.round == 8 // dp - 1)
            reads.update(dataset.reads)
            return found, [content(batch) for batch in rest(loader, 1)], len(found)

    results = run_ranks({"dp": dp, "tp": tp}, run)
    assert {number for _, _, number in results} == {STEPS * 8 // dp}
    for rank in range(0, dp * tp, tp):
        assert all(results[rank + peer] == results[rank] for peer in range(tp))
    lengths = Texts().tokens()
    for step in range(STEPS):
        held: Counter[int] = Counter()
        for rank in range(0, dp * tp, tp):
            for at, _, records, _ in results[rank][0]:
                held.update(records if at == step else {})
        assert held == Counter({index: int(lengths[index]) for index in chosen(step)})
    if mode != "external":
        assert len(reads) == 48


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_resume_at_every_step_is_the_uninterrupted_run(mode: str, shape: dict[str, int]) -> None:
    if mode == "external" and len(shape) > 1:
        pytest.skip("external steps need a pure data-parallel mesh")
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


class Divergent:
    """An algorithm that plans otherwise on one rank."""

    def __init__(self, turned: bool) -> None:
        self.turned = turned

    def assign(self, problem: Any) -> Any:
        bins = np.arange(problem.num_samples, dtype=np.int32)
        return bins[::-1].copy() if self.turned else bins

    def objective(self, loads: Any) -> float:
        return float(-loads[0].max() if self.turned else loads.max())


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


# ---- model-parallel meshes


class Rows:
    """Record i is a tensor of i; counts reads."""

    def __init__(self, size: int = 18) -> None:
        self.size = size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return torch.full((3,), index)


def rows_loader(mesh: Any, dataset: Any, collate_fn: Any = torch.stack, **given: Any) -> DistributedDataLoader:
    """18 records, 2 a micro-batch, 8 a step, in order."""
    topology = DataTopology.from_mesh(mesh)
    sampler = DistributedBatchSampler(18, 2, 8, topology.data_rank, topology.data_parallel_size)
    return build_distributed_dataloader(
        dataset,
        mesh,
        DistributedDatasetConfig(seq_len=8, local_batch_size=2, timeout_s=10.0),
        batch_sampler=sampler,
        metadata_fn=lambda record: SampleMetadata(3, WorkloadCost(llm=1.0)),
        collate_fn=collate_fn,
        **given,
    )


SPEC = TensorFieldSpec((2, 3), torch.int64)


@pytest.mark.parametrize("spec", [None, SPEC], ids=["layout sent", "spec"])
def test_two_by_two(spec: Any) -> None:
    """dp 2 × tp 2, 18 records, micro-batch 2, global batch 8: 2 steps of 2 rounds, the end, 2 dropped."""

    def run(mesh: Any) -> tuple[list[Any], list[Any], int]:
        dataset = Rows()
        with rows_loader(mesh, dataset, model_batch_spec=spec) as loader:
            assert len(loader) == 4
            found, states = [], [pickled(loader.state_dict())]
            for batch in loader:
                last = loader.last
                found.append((last.step, last.round, last.ends_step, batch[:, 0].tolist()))
                states.append(pickled(loader.state_dict()))
                if mesh.get_rank() in (0, 2):
                    assert last.report is not None
                    dropped = last.report.dropped
                else:
                    assert last.report is None and last.positions is None
                    dropped = 2
            assert dropped == 2
            with pytest.raises(StopIteration):
                next(loader)
        for place, state in enumerate(states[:-1]):
            with rows_loader(mesh, Rows(), model_batch_spec=spec) as again:
                again.load_state_dict(state)
                after = [(again.last.step, again.last.round, batch[:, 0].tolist()) for batch in again]
                assert after == [(step, number, data) for step, number, _, data in found[place - place % 2 :]]
        return found, states, dataset.reads

    results = run_ranks({"dp": 2, "tp": 2}, run)
    assert results[0][0] == [(0, 0, False, [0, 1]), (0, 1, True, [4, 5]), (1, 0, False, [8, 9]), (1, 1, True, [12, 13])]
    assert results[2][0] == [
        (0, 0, False, [2, 3]),
        (0, 1, True, [6, 7]),
        (1, 0, False, [10, 11]),
        (1, 1, True, [14, 15]),
    ]
    assert results[1][0] == results[0][0] and results[3][0] == results[2][0]
    assert all(states == results[0][1] for _, states, _ in results)
    assert [reads for _, _, reads in results] == [8, 0, 8, 0]


@pytest.mark.parametrize(
    ("shape", "constructors", "names"),
    [
        ({"dp": 2, "tp": 4}, {0: [0, 1, 2, 3], 4: [4, 5, 6, 7]}, None),
        ({"dp": 2, "cp": 2, "tp": 2}, {0: [0, 1, 2, 3], 4: [4, 5, 6, 7]}, None),
        ({"pp": 2, "dp": 2, "tp": 2}, {0: [0, 1, 4, 5], 2: [2, 3, 6, 7]}, None),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {0: [0, 1], 2: [2, 3], 4: [4, 5], 6: [6, 7]}, None),
        ({"a": 2, "b": 2}, {0: [0, 2], 1: [1, 3]}, ("b",)),
    ],
    ids=["dp tp", "dp cp tp", "pp dp tp", "two dp dimensions", "named"],
)
def test_every_mesh_delivers_the_constructors_batch(shape: Any, constructors: Any, names: Any) -> None:
    def run(mesh: Any) -> tuple[list[Any], int]:
        dataset = Rows(16)
        topology = DataTopology.from_mesh(mesh, names)
        sampler = DistributedBatchSampler(16, 2, 8, topology.data_rank, topology.data_parallel_size)
        with build_distributed_dataloader(
            dataset,
            mesh,
            DistributedDatasetConfig(seq_len=8, local_batch_size=2, dp_dim_names=names, timeout_s=10.0),
            batch_sampler=sampler,
            metadata_fn=lambda record: SampleMetadata(3, WorkloadCost(llm=1.0)),
            collate_fn=torch.stack,
        ) as loader:
            return [batch[:, 0].tolist() for batch in loader], dataset.reads

    results = run_ranks(shape, run)
    for constructor, peers in constructors.items():
        assert all(results[peer][0] == results[constructor][0] for peer in peers)
        assert all((results[peer][1] > 0) == (peer == constructor) for peer in peers)
    delivered = [record for constructor in constructors for batch in results[constructor][0] for record in batch]
    assert sorted(delivered) == list(range(16))


@pytest.mark.parametrize("where", ["everywhere", "one constructor"])
def test_a_batch_that_does_not_fit_its_spec_is_one_error_on_all_ranks(where: str) -> None:
    """Constructors and peers, at the same micro-batch, whichever rank's batch it was."""

    def run(mesh: Any) -> tuple[int, str]:
        def collate(bins: Any) -> Any:
            batch = torch.stack(list(bins))
            wrong = batch.max() >= 8 and (where == "everywhere" or mesh.get_rank() == 2)
            return batch.int() if wrong else batch

        loader = rows_loader(mesh, Rows(), collate, model_batch_spec=SPEC)
        count = 0
        with pytest.raises(DataPlaneError) as caught:  # noqa: PT012  where it comes is what matters
            for _ in loader:
                count += 1
        with pytest.raises(DataPlaneError) as second:
            next(loader)
        assert str(second.value) == str(caught.value)
        loader.close()
        return count, str(caught.value)

    before = time.monotonic()
    results = run_ranks({"dp": 2, "tp": 2}, run)
    assert time.monotonic() - before < 8
    assert len(set(results)) == 1
    count, text = results[0]
    assert count == 2
    assert "field batch: expected int64[2, 3], found int32[2, 3]" in text
    assert ("rank 2" in text) == (where == "one constructor")


def test_the_spec_is_the_arguments_else_the_collate_functions_else_the_texts() -> None:
    """What wins is what the batch has to fit."""

    class Collate:
        model_batch_spec = SPEC

        def __call__(self, bins: Any) -> Any:
            return torch.stack(list(bins))

    def refused(mesh: Any, **given: Any) -> str:
        with rows_loader(mesh, Rows(), **given) as loader, pytest.raises(DataPlaneError) as caught:
            next(loader)
        return str(caught.value)

    def run(mesh: Any) -> None:
        other = TensorFieldSpec((2, 4), torch.int64)
        assert "expected int64[2, 4]" in refused(mesh, collate_fn=Collate(), model_batch_spec=other)
        wrong = Collate()
        wrong.model_batch_spec = other
        assert "expected int64[2, 4]" in refused(mesh, collate_fn=wrong)
        with rows_loader(mesh, Rows(), Collate()) as loader:
            assert next(loader).shape == (2, 3)
        with loader_of("repack", mesh, Texts()) as loader:
            batch = next(loader)
            assert batch["input_ids"].shape == batch["position_ids"].shape == (2, SEQ_LEN)
            assert type(batch["max_seq_len"]) is int

    run_ranks({"dp": 1, "tp": 2}, run)


@pytest.mark.parametrize("described", [False, True])
def test_repacked_text_sends_no_names(described: bool, monkeypatch: Any) -> None:
    """The built-in layout is known to every rank; another collate function's is described to the peers."""
    from hp_nodes.text import collate_text

    recorded: list[bytes] = []

    def create(topology: Any, scope: Any, **settings: Any) -> Any:
        transport = create_transport(topology, scope, **settings)
        if scope == "model_parallel":
            broadcast = transport.broadcast

            def recording(buffer: Any, root: int, where: str) -> None:
                broadcast(buffer, root, where)
                recorded.append(buffer.tobytes())

            transport.broadcast = recording  # type: ignore[method-assign]
        return transport

    monkeypatch.setattr("graphs.builder.create_transport", create)
    given = {"collate_fn": lambda bins: collate_text(bins)} if described else {}

    def run(mesh: Any) -> list[Any]:
        with loader_of("repack", mesh, Texts(), 2, **given) as loader:
            return rest(loader)

    results = run_ranks({"dp": 1, "tp": 2}, run)
    assert results[0] == results[1]
    assert any(b"position_ids" in sent for sent in recorded) == described
    assert len(recorded) == 2 * (2 * len(results[0]) + 1)  # on each rank a header and the tensors, and the end


# ---- refusals of external steps, and what the builder leaves behind


def external(mesh: Any, steps: Any = ((),), config: Any = None, **given: Any) -> DistributedDataLoader:
    return build_distributed_dataloader(
        None,
        mesh,
        DistributedDatasetConfig(seq_len=8, local_batch_size=1, timeout_s=10.0, **(config or {})),
        **{
            "external_step_source": steps,
            "metadata_fn": lambda record: SampleMetadata(1, WorkloadCost(llm=1.0)),
            **given,
        },
    )


class RaisingSource:
    """Raises when it is touched."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read before the refusal")


class OddRounds(RaisingSource):
    rounds_per_step = 0


EXTERNAL: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "spec": ({"model_batch_spec": {}}, {"dp": 2}, "model_batch_spec with external_step_source.*accepted: None"),
    "split": ({"split_fn": list}, {"dp": 2}, "split_fn with external_step_source"),
    "metadata mode": ({"config": {"metadata_mode": True}}, {"dp": 2}, "metadata_mode=True with external_step_source"),
    "sampler": ({"batch_sampler": object()}, {"dp": 2}, "batch_sampler with external_step_source"),
    "metadata": ({"metadata": [1]}, {"dp": 2}, "metadata with external_step_source"),
    "workers": (
        {"dataloader_kwargs": {"num_workers": 2}},
        {"dp": 2},
        r"dataloader_kwargs \['num_workers'\] with external",
    ),
    "window": (
        {"config": {"balance_window_size": 2}},
        {"dp": 2},
        "balance_window_size is 2 with external.*accepted: 1",
    ),
    "mesh": ({}, {"dp": 2, "tp": 2}, "2 ranks a data-parallel coordinate; accepted.*pure data-parallel"),
    "group": (
        {"config": {"balance_group_size": 2}},
        {"dp": 3},
        "balance_group_size is 2; accepted: .*divides the 3 ranks",
    ),
    "no metadata_fn": ({"metadata_fn": None}, {"dp": 2}, "metadata_fn is missing; accepted"),
    "no source": ({"steps": 7}, {"dp": 2}, "external_step_source is a int; accepted: an iterable"),
    "rounds": ({"steps": OddRounds()}, {"dp": 2}, "rounds_per_step is 0; accepted: an int >= 1"),
    "objective": (
        {"balancing_algorithm": Divergent(False), "config": {"objective": "balance"}},
        {"dp": 2},
        "balancing_algorithm has its own objective",
    ),
}


@pytest.mark.parametrize("name", EXTERNAL)
def test_refused_with_an_external_source(name: str) -> None:
    changes, shape, pattern = EXTERNAL[name]
    changes = {"steps": RaisingSource(), **changes}

    def run(mesh: Any) -> str:
        with pytest.raises(ValueError, match=f"(?s){pattern}") as caught:
            external(mesh, **changes)
        create_transport(DataTopology.from_mesh(mesh), "all").all_gather(np.zeros(1, np.uint8), "the test")
        if len(mesh.shape) == 1:
            steps = [[[[mesh.get_rank()]]]]
            with external(mesh, steps) as loader:
                assert list(loader) == [((([mesh.get_rank()],),))]
        return str(caught.value)

    assert len(set(run_ranks(shape, run))) == 1


def test_an_empty_set_of_dataloader_kwargs_is_fine_with_an_external_source() -> None:
    run_ranks({"dp": 1}, lambda mesh: external(mesh, dataloader_kwargs={}).close())


LATER: dict[str, tuple[dict[str, Any], str]] = {
    "skip": ({"config": {"on_error": "skip"}}, "on_error='skip' comes later; accepted so far: 'raise'"),
    "nccl": (
        {"config": {"communication_backend": "nccl"}},
        "communication_backend 'nccl' .*accepted so far: 'auto', 'gloo'",
    ),
    "hccl": ({"config": {"communication_backend": "hccl"}}, "needs a NPU device, and there is none here; accepted"),
    "device": ({"device": "cuda:0"}, "device 'cuda:0' comes later; accepted so far: 'cpu'"),
    "no device": ({"device": "gpu"}, "device is 'gpu'.*accepted: a torch device"),
}


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_says_so(name: str) -> None:
    changes, pattern = LATER[name]

    def run(mesh: Any) -> None:
        with pytest.raises(ValueError, match=f"(?s){pattern}"):
            external(mesh, RaisingSource(), **changes)

    run_ranks({"dp": 2}, run)


NATIVE: dict[str, tuple[Callable[[Any], dict[str, Any]], str]] = {
    "specs differ": (
        lambda mesh: {"model_batch_spec": SPEC if mesh.get_rank() else TensorFieldSpec((2, None), torch.int64)},
        "model_batch_spec differs.*int64.2, any.*on ranks .0.*int64.2, 3.* on ranks .1, 2, 3.",
    ),
    "spec is none": (lambda mesh: {"model_batch_spec": {"x": float}}, "model_batch_spec: .*is the type float"),
    "spec of the collate function": (
        lambda mesh: {"collate_fn": type("C", (), {"model_batch_spec": [torch.zeros(1)], "__call__": None})},
        "model_batch_spec: .* is a Tensor; accepted",
    ),
    "kwargs": (lambda mesh: {"dataloader_kwargs": 3}, "dataloader_kwargs is 3; accepted: a mapping"),
    "pin": (lambda mesh: {"dataloader_kwargs": {"pin_memory": 1}}, "pin_memory is 1; accepted: True or False"),
    "prefetch": (
        lambda mesh: {"dataloader_kwargs": {"num_workers": 1, "prefetch_factor": 0}},
        "prefetch_factor is 0; accepted: None, or an int >= 1",
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_refusals_on_every_rank(name: str) -> None:
    changes, pattern = NATIVE[name]

    def run(mesh: Any) -> str:
        dataset = Rows()
        with pytest.raises(ValueError, match=f"(?s){pattern}") as caught:
            rows_loader(mesh, dataset, **changes(mesh))
        with rows_loader(mesh, Rows()) as loader:
            assert len(list(loader)) == 4
        assert dataset.reads == 0
        return str(caught.value)

    assert len(set(run_ranks({"dp": 2, "tp": 2}, run))) == 1


@pytest.mark.parametrize("table", [np.zeros(48), np.zeros(48, dtype=[("tokens", int)])])
def test_a_table_of_something_else_is_refused_before_a_read(table: Any) -> None:
    dataset = Texts()

    def run(mesh: Any) -> None:
        with pytest.raises(ValueError, match="metadata .*accepted"):
            loader_of("precomputed", mesh, dataset, metadata=table)

    run_ranks({"dp": 2, "tp": 2}, run)
    assert not dataset.reads


def test_names_of_dimensions_that_one_rank_has_wrong_are_told_to_all() -> None:
    """Nobody waits for a rank that cannot tell who it is."""

    def run(mesh: Any) -> str:
        names = ("data",) if mesh.get_rank() == 3 else None
        with pytest.raises(ValueError, match="the mesh has no") as caught:
            build_distributed_dataloader(
                Rows(),
                mesh,
                DistributedDatasetConfig(seq_len=8, local_batch_size=2, dp_dim_names=names, timeout_s=10.0),
                batch_sampler=DistributedBatchSampler(18, 2, 8, mesh.get_local_rank("dp"), 2),
                metadata_fn=lambda record: SampleMetadata(3),
            )
        return str(caught.value)

    before = time.monotonic()
    texts = run_ranks({"dp": 2, "tp": 2}, run)
    assert time.monotonic() - before < 5
    assert set(texts) == {texts[0]}
    assert texts[0].startswith("rank 3: dp_dim_names ('data',)")


def test_modes_that_differ_are_told() -> None:
    def run(mesh: Any) -> str:
        with pytest.raises(ValueError, match="mode differs") as caught:
            external(mesh) if mesh.get_rank() else rows_loader(mesh, Rows())
        return str(caught.value)

    assert '"native" on ranks [0], "external" on ranks [1]' in run_ranks({"dp": 2}, run)[0]


def test_worker_settings_that_differ_matter_behind_the_plan_only() -> None:
    def run(mesh: Any, mode: str) -> None:
        kwargs = {"num_workers": mesh.get_rank(), "multiprocessing_context": "fork"} if mesh.get_rank() else None
        loader_of(mode, mesh, Texts(), dataloader_kwargs=kwargs).close()

    run_ranks({"dp": 2}, lambda mesh: run(mesh, "online"))
    with pytest.raises(ValueError, match="num_workers differs: 0 on ranks .0., 1 on ranks .1."):
        run_ranks({"dp": 2}, lambda mesh: run(mesh, "precomputed"))


def test_readers_and_planner_may_be_named() -> None:
    settings = {"dataset_reader_ranks": (2, 0), "planner_rank": 2}
    run_ranks({"dp": 2, "tp": 2}, lambda mesh: loader_of("online", mesh, Texts(), settings=settings).close())


def test_a_config_that_is_none() -> None:
    with pytest.raises(ValueError, match="config is a dict; accepted: a DistributedDatasetConfig"):
        run_ranks({"dp": 1}, lambda mesh: build_distributed_dataloader(Rows(), mesh, {}))  # type: ignore[arg-type]


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
