"""CONTRACT 1 and 2: names, arguments and defaults that programs rely on."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from graphs import build_distributed_dataloader
from hp_nodes import DevicePrefetcher, DistributedDataLoader, SampleMetadata, TensorFieldSpec, WorkloadCost
from hp_nodes.planning import BackboneCostModel, PackingProblem, plan_packing
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import DataTopology

NAMES = {
    "hp_nodes": """WindowSampler SampleReader Splitter MetadataDeriver Planner Router Packer Collator HostPrefetcher
        DevicePrefetcher ModelParallelBroadcaster StepCheckpointer ExternalStepReader SampleKey SampleMetadata
        WorkloadCost Window MicroBatch TensorFieldSpec DataPlaneError DistributedDataLoader describe peek sample_rng""",
    "hp_nodes.samplers": "DistributedBatchSampler BlendedBatchSampler",
    "hp_nodes.transport": "DataTopology create_transport run_ranks",
    "hp_nodes.planning": """PackingProblem plan_packing PackingPlan BalancingAlgorithm BackboneCostModel
        CausalAttentionCostModel fit_cost_model""",
    "hp_nodes.text": "split_packed_text pack_text collate_text to_flash_attention",
    "graphs": "DistributedDatasetConfig build_distributed_dataloader",
}
BUILDER = """metadata_fn metadata dataloader_kwargs pack_fn split_fn collate_fn device model_batch_spec batch_sampler
    external_step_source model_config cost_model balancing_algorithm"""


def defaults(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    assert set(NAMES[module].split()) <= set(found.__all__)
    assert all(hasattr(found, name) for name in found.__all__)


def test_the_builder_takes_three_arguments_and_the_rest_by_keyword_all_none() -> None:
    parameters = inspect.signature(build_distributed_dataloader).parameters
    assert list(parameters)[:3] == ["dataset", "mesh", "config"]
    keywords = {name: p.default for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert set(BUILDER.split()) <= set(keywords)
    assert set(keywords.values()) == {None}


def test_defaults() -> None:
    assert defaults(DistributedBatchSampler) | {"order": "sequential", "seed": 0, "index_mapping": None} == defaults(
        DistributedBatchSampler
    )
    assert defaults(BackboneCostModel)["training_multiplier"] == 3.0
    assert defaults(TensorFieldSpec)["device"] is None
    assert defaults(DevicePrefetcher)["cpu_fields"] == ()
    assert list(defaults(WorkloadCost)) == ["io", "transform", "encoder", "llm", "memory", "communication"]
    assert list(defaults(SampleMetadata)) == ["pack_tokens", "cost", "features", "packing_costs", "sample_id"]
    assert SampleMetadata(1).cost == WorkloadCost() and SampleMetadata(1).sample_id is None
    assert defaults(plan_packing)["objective"] == "lockstep" and defaults(plan_packing)["min_balance_gain"] == 0.0
    assert {"keys", "sizes", "budgets", "budget_limits", "initial_loads"} <= set(defaults(PackingProblem))


LOADER = "set_epoch state_dict load_state_dict close __enter__ __exit__ __iter__ __next__ __len__"
TOPOLOGY = "data_rank data_parallel_size is_constructor constructor_ranks model_parallel_ranks global_rank"
SAMPLER = """total_samples micro_batch_size global_batch_size global_micro_batch_size dp_rank dp_world_size drop_last
    epoch consumed_samples set_epoch state_dict load_state_dict fingerprint"""


def test_what_a_loader_a_topology_and_a_sampler_have() -> None:
    assert all(callable(getattr(DistributedDataLoader, name)) for name in LOADER.split())
    assert all(hasattr(DataTopology.single(), name) for name in TOPOLOGY.split())
    sampler = DistributedBatchSampler(12, 2, 4, 0, 1)
    assert all(hasattr(sampler, name) for name in SAMPLER.split())
