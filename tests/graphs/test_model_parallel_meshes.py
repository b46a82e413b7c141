"""CONTRACT 2 and 7 on meshes: peers get their constructor's batch, only constructors read, one error for all."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DataPlaneError, SampleMetadata, TensorFieldSpec, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.graphs.mode_scene import SEQ_LEN, SPEC, Rows, Texts, loader_of, rows_loader
from tests.scenes import pickled, rest


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


def test_batches_are_sent_when_they_are_consumed_never_ahead(monkeypatch: Any) -> None:
    """However many the constructor has built."""
    headers: list[int] = []

    def create(topology: Any, scope: Any, **settings: Any) -> Any:
        transport = create_transport(topology, scope, **settings)
        if scope == "model_parallel" and topology.is_constructor:
            broadcast = transport.broadcast

            def counting(buffer: Any, root: int, where: str) -> None:
                headers.append("header" in where)
                broadcast(buffer, root, where)

            transport.broadcast = counting  # type: ignore[method-assign]
        return transport

    monkeypatch.setattr("graphs.builder.create_transport", create)

    def run(mesh: Any) -> list[int]:
        seen = []
        with loader_of("repack", mesh, Texts(), settings={"host_prefetch_depth": 3}) as loader:
            for _ in range(3):
                next(loader)
                time.sleep(0.1)
                seen.append(sum(headers))
        return seen

    results = run_ranks({"dp": 1, "tp": 2}, run)
    assert results[0] == [1, 2, 3]


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
