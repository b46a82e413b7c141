"""``build_distributed_dataloader``: from a dataset, a mesh and a configuration to a loader.

Construction takes one agreement: each rank checks what it was given without raising, all exchange what they found over
a group made first, and then either every rank raises the same ValueError or every rank builds its graph. Nothing is
read and no other group is made before that; a failed construction leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphs.arguments import refusals, worker_arguments
from graphs.config import DistributedDatasetConfig
from graphs.native import NativeParts, native_graph, peer_graph
from hp_nodes import DistributedDataLoader, SampleMetadata, WindowSampler, WorkloadCost
from hp_nodes.planning import BackboneCostModel, BalancingAlgorithm, CausalAttentionCostModel
from hp_nodes.samplers import BatchSampler
from hp_nodes.text import collate_text, pack_text, split_packed_text, text_metadata
from hp_nodes.transport import DataTopology, Transport, create_transport
from hp_nodes.transport.agreement import gather_texts
from hp_nodes.transport.topology import Mesh

__all__ = ["build_distributed_dataloader"]

CostModel = Callable[[SampleMetadata], WorkloadCost]


def build_distributed_dataloader(
    dataset: Any,
    mesh: Mesh,
    config: DistributedDatasetConfig,
    *,
    metadata_fn: Callable[[Any], SampleMetadata] | None = None,
    metadata: Any = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    pack_fn: Callable[[Sequence[Any], int], Any] | None = None,
    split_fn: Callable[[Any], Sequence[Any]] | None = None,
    collate_fn: Callable[[Sequence[Any]], Any] | None = None,
    device: Any = None,
    model_batch_spec: Any = None,
    batch_sampler: BatchSampler | None = None,
    external_step_source: Any = None,
    model_config: Any = None,
    cost_model: CostModel | None = None,
    balancing_algorithm: BalancingAlgorithm | None = None,
) -> DistributedDataLoader:
    """A loader over a ready-made graph. Every rank of the mesh calls it at the same point.

    Args:
        dataset: map-style; None off the constructors.
        mesh: a torch DeviceMesh with named dimensions, or the mesh that ``run_ranks`` hands out.
        config: the same on every rank.
        metadata_fn: sample → :class:`SampleMetadata`; with ``repack_sequences`` missing means counting ``input_ids``.
        metadata: by dataset index, with ``metadata_mode=True``.
        dataloader_kwargs: those of torch's DataLoader that only change how records are read.
        pack_fn, split_fn: ``(samples, seq_len) → packed`` and record → sequences; both or neither.
        collate_fn: the bins of a round → what the loop gets. Whole records are handed to it untouched.
        batch_sampler: on every rank; only constructors advance it.
        model_config, cost_model: what a sample costs; else ``metadata.cost``.
        balancing_algorithm: plans in the built-in planner's place.

    Raises:
        ValueError: on every rank, with every problem and the ranks that have it.
    """
    topology = DataTopology.from_mesh(mesh, config.dp_dim_names)
    given = {
        "metadata_fn": metadata_fn,
        "metadata": metadata,
        "dataloader_kwargs": dataloader_kwargs,
        "pack_fn": pack_fn,
        "split_fn": split_fn,
        "collate_fn": collate_fn,
        "device": device,
        "model_batch_spec": model_batch_spec,
        "batch_sampler": batch_sampler,
        "external_step_source": external_step_source,
        "model_config": model_config,
        "cost_model": cost_model,
        "balancing_algorithm": balancing_algorithm,
    }
    control = create_transport(topology, "all", timeout_s=config.timeout_s)
    held: list[Transport] = [control]
    try:
        agreed = _agree(control, topology, *_offer(dataset, topology, config, given))
        held.append(create_transport(topology, "model_parallel", timeout_s=config.timeout_s))
        if topology.is_constructor:
            held.append(create_transport(topology, "data_parallel", timeout_s=config.timeout_s))
            graph = native_graph(_parts(dataset, config, given), config, data=held[2], model=held[1])
        else:
            graph = peer_graph(agreed["start"], config, held[1])
        return DistributedDataLoader(
            graph,
            fingerprint=agreed["fingerprint"],
            transports=held,
            topology=topology,
            length=agreed["length"],
            log_balance=config.log_balance,
        )
    except BaseException:
        for transport in held:
            transport.close()
        raise


def _offer(
    dataset: Any, topology: DataTopology, config: DistributedDatasetConfig, given: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """This rank's problems, and what the others must agree with."""
    try:
        problems = refusals(dataset, topology, config, given)
        if problems:
            return problems, {}
        first = WindowSampler(given["batch_sampler"], config.balance_window_size)
        offer: dict[str, Any] = {"config": _plain_config(config), "sampler": first.fingerprint()}
        if topology.is_constructor:
            _resolved_cost_model(config, given)
            offer["length"] = first.micro_batches_per_epoch
            offer["dataset_length"] = len(dataset)
            offer["start"] = first.state_dict()["hp_nodes"]
        return [], offer
    except Exception as error:
        return [f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)], {}


def _plain_config(config: DistributedDatasetConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {
        name: value if isinstance(value, (int, float, str, bool)) else repr(value) for name, value in values.items()
    }


def _agree(control: Transport, topology: DataTopology, problems: list[str], offer: dict[str, Any]) -> dict[str, Any]:
    """One exchange; afterwards all ranks raise the same error, or none.

    Raises:
        ValueError: a rank has a problem, or ranks differ.
    """
    mine = json.dumps({"problems": problems, "offer": offer}).encode()
    told = [json.loads(text) for text in gather_texts(control, mine, "construction")]
    ranks = control.global_ranks
    found: dict[str, list[int]] = {}
    for rank, said in zip(ranks, told, strict=True):
        for problem in said["problems"]:
            found.setdefault(problem, []).append(rank)
    if not found:
        found = _differences({rank: said["offer"] for rank, said in zip(ranks, told, strict=True)})
    if found:
        raise ValueError("; ".join(_with_ranks(problem, who, ranks) for problem, who in found.items()))
    constructor = told[ranks.index(topology.model_parallel_ranks[0])]["offer"]
    fingerprint = {
        "dataset_length": constructor["dataset_length"],
        "seed": constructor["config"]["seed"],
        **constructor["sampler"],
    }
    return {"fingerprint": fingerprint, "start": constructor["start"], "length": constructor["length"]}


def _with_ranks(problem: str, who: list[int], ranks: Sequence[int]) -> str:
    if len(who) == len(ranks) or not who:
        return problem
    return f"rank {who[0]}: {problem}" if len(who) == 1 else f"ranks {who}: {problem}"


def _differences(offers: Mapping[int, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Each value that ranks should share and do not, with what each has."""
    flat = {
        rank: {
            **{f"config.{name}": value for name, value in offer["config"].items()},
            "sampler global_batch_size": offer["sampler"]["global_batch_size"],
            **{f"sampler {name}": value for name, value in offer["sampler"]["sampler"].items()},
            **{name: offer[name] for name in ("dataset_length", "start") if name in offer},
        }
        for rank, offer in offers.items()
    }
    names = sorted({name for values in flat.values() for name in values})
    problems: dict[str, list[int]] = {}
    for name in names:
        seen: dict[str, list[int]] = {}
        for rank, values in flat.items():
            if name in values:
                seen.setdefault(json.dumps(values[name]), []).append(rank)
        if len(seen) > 1:
            shown = ", ".join(f"{value} on ranks {who}" for value, who in seen.items())
            problems[f"{name} differs: {shown}; accepted: the same on every rank"] = []
    return problems


def _parts(dataset: Any, config: DistributedDatasetConfig, given: Mapping[str, Any]) -> NativeParts:
    """The functions of each stage: the user's, the built-in text ones, or those of whole records."""
    workers, options = worker_arguments(given["dataloader_kwargs"])
    cost_model = _resolved_cost_model(config, given)
    split_fn, pack_fn, collate_fn, metadata_fn = (
        given[name] for name in ("split_fn", "pack_fn", "collate_fn", "metadata_fn")
    )
    if config.repack_sequences:
        split_fn = partial(split_packed_text, pad_token_id=config.pad_token_id)
        pack_fn = partial(pack_text, pad_token_id=config.pad_token_id)
        collate_fn = collate_fn or collate_text
        metadata_fn = partial(text_metadata, metadata_fn=metadata_fn)
    return NativeParts(
        dataset=dataset,
        batch_sampler=given["batch_sampler"],
        metadata_fn=metadata_fn,
        metadata=given["metadata"],
        cost_model=cost_model,
        padding_cost=_padding_table(cost_model, config.seq_len) if pack_fn is not None else None,
        split_fn=split_fn,
        pack_fn=pack_fn if pack_fn is not None else _whole_record,
        collate_fn=collate_fn,
        algorithm=given["balancing_algorithm"],
        num_workers=workers,
        worker_options=options,
    )


def _resolved_cost_model(config: DistributedDatasetConfig, given: Mapping[str, Any]) -> CostModel | None:
    if given["cost_model"] is not None:
        chosen: CostModel = given["cost_model"]
        return chosen
    if config.repack_sequences:
        return CausalAttentionCostModel()
    return BackboneCostModel(given["model_config"]) if given["model_config"] is not None else None


def _padding_table(cost_model: CostModel | None, seq_len: int) -> Any:
    price = getattr(cost_model, "padding_cost", None)
    return None if price is None else np.array([price(tokens) for tokens in range(seq_len + 1)], dtype=np.float64)


def _whole_record(samples: Sequence[Any], seq_len: int) -> Any:
    """One record, one bin."""
    (record,) = samples
    return record
