"""Every mode, refusals and misfits over real processes and Gloo groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hp_nodes import DataPlaneError, HostPrefetcher, TensorFieldSpec
from hp_nodes.nodes.graph import all_nodes
from tests.distributed.ranks import RankPool
from tests.graphs.mode_scene import MODES, SPEC, Rows, Texts, chosen, loader_of, rows_loader
from tests.scenes import content, pickled


def mesh_of(*dims: str) -> Any:
    """Dimensions of size 2 over all ranks, or all ranks in one."""
    size = dist.get_world_size()
    return init_device_mesh("cpu", (2,) * len(dims) if len(dims) > 1 else (size,), mesh_dim_names=dims)


def _epoch(mode: str, dims: tuple[str, ...], window: int) -> tuple[list[Any], int, str]:
    """Micro-batches with their records, reads of this rank, and the state after the first step; resumed from there."""
    counted = MODES[mode][2]
    mesh, dataset = mesh_of(*dims), Texts()
    with loader_of(mode, mesh, dataset, window) as loader:
        found, state = [], None
        for batch in loader:
            found.append((loader.last.step, counted(batch), content(batch)))
            if state is None and loader.last.ends_step:
                state = pickled(loader.state_dict())
    with loader_of(mode, mesh, Texts(), window) as again:
        again.load_state_dict(state)
        assert [(again.last.step, content(batch)) for batch in again] == [
            (step, data) for step, _, data in found if step >= 1
        ]
    return found, sum(dataset.reads.values()), str(state)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "external"])
def test_modes_over_dp_and_tp(mode: str, four_ranks: RankPool) -> None:
    results = four_ranks.run(_epoch, mode, ("dp", "tp"), 2)
    assert results[0][0] == results[1][0]
    assert results[2][0] == results[3][0]
    assert [reads > 0 for _, reads, _ in results] == [True, False, True, False]
    assert len({state for _, _, state in results}) == 1
    _check_steps([results[0][0], results[2][0]])


def test_external_steps_over_four_ranks(four_ranks: RankPool) -> None:
    _check_steps([found for found, *_ in four_ranks.run(_epoch, "external", ("dp",), 1)])


def _check_steps(constructors: list[Any]) -> None:
    lengths = Texts().tokens()
    for step in range(3):
        held = sum(
            (records for found in constructors for at, records, _ in found if at == step), start=type(Texts().reads)()
        )
        assert held == {index: int(lengths[index]) for index in chosen(step)}


def _precomputed_exchanges(broadcast_plan: bool) -> tuple[int, list[int]]:
    dataset = Texts()
    settings = {"broadcast_plan": broadcast_plan, "host_prefetch_depth": 0}
    with loader_of("precomputed", mesh_of("dp"), dataset, 4, settings) as loader:
        trained = [int(record["input_ids"][0]) - 1 for batch in loader for record in batch]
        transport = next(node.transport for node in all_nodes(loader.graph) if isinstance(node, HostPrefetcher))
        assert loader.last.report.bytes_received == 0
    assert sorted(trained) == sorted(dataset.reads.elements())
    return transport.exchanges, trained


@pytest.mark.parametrize("broadcast_plan", [True, False])
def test_precomputed_exchanges_numbers_only(broadcast_plan: bool, four_ranks: RankPool) -> None:
    results = four_ranks.run(_precomputed_exchanges, broadcast_plan)
    assert sorted(index for _, trained in results for index in trained) == list(range(48))
    windows = 3
    assert {exchanges for exchanges, _ in results} == {windows * (3 if broadcast_plan else 2) + 1 + 2}
    # one more opening where the numbers outgrew the first, and the opening and closing of the end


def _misfit() -> tuple[int, str]:
    def collate(bins: Any) -> Any:
        batch = torch.stack(list(bins))
        return batch.int() if dist.get_rank() == 2 and batch.max() >= 8 else batch

    count = 0
    loader = rows_loader(mesh_of("dp", "tp"), Rows(), collate, model_batch_spec=SPEC)
    try:
        for _ in loader:
            count += 1
    except DataPlaneError as error:
        return count, str(error)
    finally:
        loader.close()
    return count, "no error"


def test_a_batch_that_does_not_fit_is_one_error_on_every_process(four_ranks: RankPool) -> None:
    results = four_ranks.run(_misfit)
    assert len(set(results)) == 1
    assert results[0][0] == 2
    assert "rank 2" in results[0][1]
    assert "expected int64[2, 3], found int32[2, 3]" in results[0][1]


def _refused_then_built() -> tuple[str, list[Any]]:
    mesh, dataset = mesh_of("dp", "tp"), Rows()
    wrong = TensorFieldSpec((2, 4), torch.int64) if dist.get_rank() == 3 else SPEC
    with pytest.raises(ValueError, match="model_batch_spec differs") as caught:
        rows_loader(mesh, dataset, model_batch_spec=wrong)
    assert dataset.reads == 0
    with rows_loader(mesh, dataset, model_batch_spec=SPEC) as loader:
        return str(caught.value), [batch[:, 0].tolist() for batch in loader]


def test_a_refusal_on_every_process_and_a_second_construction(four_ranks: RankPool) -> None:
    results = four_ranks.run(_refused_then_built)
    assert len({text for text, _ in results}) == 1
    assert results[0][1] == results[1][1] == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert results[2][1] == results[3][1] == [[2, 3], [6, 7], [10, 11], [14, 15]]


def _big_integers() -> list[int]:
    values = [8388609, 16777217, 16777219]

    class Offsets(Rows):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(values)

    with rows_loader(mesh_of("dp", "tp"), Offsets(), model_batch_spec=SPEC) as loader:
        return next(loader)[0].tolist()


def test_integers_stay_integers(four_ranks: RankPool) -> None:
    """CASES 13."""
    assert four_ranks.run(_big_integers) == [[8388609, 16777217, 16777219]] * 4
