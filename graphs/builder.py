"""``build_distributed_dataloader``: from a dataset, a mesh and a configuration to a loader.

Construction takes one agreement: each rank checks what it was given without raising, all exchange what they found over
a group made first, and then either every rank raises the same ValueError or every rank builds its graph. Nothing is
read and no other group is made before that; a failed construction leaves nothing behind.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from torchdata.nodes import BaseNode

from graphs.agreement import Offer, agree
from graphs.arguments import batch_spec, is_external, refusals, worker_arguments
from graphs.config import DistributedDatasetConfig
from graphs.external import ExternalParts, external_graph
from graphs.native import NativeParts, native_graph, peer_graph
from hp_nodes import DistributedDataLoader, SampleMetadata, WindowSampler, WorkloadCost
from hp_nodes.nodes.batch_layout import BatchLayout
from hp_nodes.plain import to_text
from hp_nodes.planning import BackboneCostModel, BalancingAlgorithm, CausalAttentionCostModel
from hp_nodes.samplers import BatchSampler
from hp_nodes.text import collate_text, pack_text, split_packed_text, text_metadata
from hp_nodes.transport import DataTopology, Transport, create_transport
from hp_nodes.transport.agreement import gather_texts
from hp_nodes.transport.balance_group import create_balance_group
from hp_nodes.transport.device import DEVICE_OF
from hp_nodes.transport.device_tensors import create_tensor_transport
from hp_nodes.transport.handed_over import HandedOverTransport
from hp_nodes.transport.topology import Mesh
from hp_nodes.types import MicroBatch

__all__ = ["build_distributed_dataloader"]

CostModel = Callable[[SampleMetadata], WorkloadCost]
Parts = NativeParts | ExternalParts
logger = logging.getLogger("hp_nodes")
_NOTHING_TO_PLAN = (
    "nothing to plan: each rank has one whole record a window (local_batch_size 1, one round a window), so no plan "
    "changes what a step costs, and planning is skipped. Raise local_batch_size, balance_window_size or the rounds of "
    "a step, or split records"
)


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
    fingerprint: Mapping[str, Any] | None = None,
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
        device: None or the CPU; a CUDA or NPU device turns staging to it on.
        model_batch_spec: what a micro-batch looks like, see :class:`hp_nodes.ModelParallelBroadcaster`; None:
            ``collate_fn.model_batch_spec``, else that of the built-in text, else it is sent to model peers.
        batch_sampler: on every rank; only constructors advance it.
        external_step_source: on each rank, yields whole local rounds of raw samples; each ends a step, or
            ``external_step_source.rounds_per_step`` of them do where it has that attribute.
        model_config, cost_model: what a sample costs; else ``metadata.cost``.
        balancing_algorithm: plans in the built-in planner's place.
        fingerprint: plain values of your own that a checkpoint must agree with, such as the dataset's revision.

    Raises:
        ValueError: on every rank, with every problem and the ranks that have it.
    """
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
        "fingerprint": dict(fingerprint or {}),
    }
    topology, problems = _topology(mesh, config)
    offer, parts = Offer(problems), None
    if not problems:
        offer, parts = _prepared(dataset, topology, config, given)
    timeout_s = getattr(config, "timeout_s", DistributedDatasetConfig.timeout_s)  # config may be something else
    held: list[Transport] = [create_transport(topology, "all", timeout_s=timeout_s)]
    try:
        agreed = agree(held[0], topology, offer)
        graph = _graph(parts, topology, config, agreed, held, _device(config, device))
        return DistributedDataLoader(
            graph,
            fingerprint={**given["fingerprint"], **agreed.fingerprint},
            transports=held,
            topology=topology,
            length=agreed.length,
            log_balance=config.log_balance,
        )
    except BaseException:
        for transport in held:
            transport.close()
        raise


def _topology(mesh: Mesh, config: DistributedDatasetConfig) -> tuple[DataTopology, list[str]]:
    """Who this rank is, and why that cannot be told. Only all ranks together can refuse what one of them was given."""
    try:
        if not isinstance(config, DistributedDatasetConfig):
            raise ValueError(f"config is a {type(config).__name__}; accepted: a DistributedDatasetConfig")
        return DataTopology.from_mesh(mesh, config.dp_dim_names), []
    except ValueError as error:
        names = getattr(mesh, "mesh_dim_names", None)
        if not names or mesh.get_coordinate() is None:
            raise  # there is no mesh to meet the others in
        return DataTopology.from_mesh(mesh, names), [str(error)]


def _prepared(
    dataset: Any, topology: DataTopology, config: DistributedDatasetConfig, given: Mapping[str, Any]
) -> tuple[Offer, Parts | None]:
    """What this rank says to the others, and what its graph is made of. Raises nothing, reads nothing."""
    try:
        problems = refusals(dataset, topology, config, given)
        if problems:
            return Offer(problems), None
        spec = batch_spec(config, given)
        shared = {
            "mode": "external" if is_external(given) else "native",
            "type of device": _kind(_device(config, given["device"])),
            **{f"config.{name}": value for name, value in _plain_config(config).items()},
            "model_batch_spec": None if spec is None else str(BatchLayout(spec)),
            "fingerprint": to_text(given["fingerprint"]),
        }
        if is_external(given):
            external = _external_parts(config, given)
            fingerprint = {"seed": config.seed, "rounds_per_step": external.rounds_per_step}
            return Offer([], {**shared, **fingerprint}, fingerprint), external
        return _native_offer(dataset, topology, config, given, shared)
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return Offer([text]), None


def _native_offer(
    dataset: Any,
    topology: DataTopology,
    config: DistributedDatasetConfig,
    given: Mapping[str, Any],
    shared: dict[str, Any],
) -> tuple[Offer, NativeParts]:
    sampler = given["batch_sampler"]
    first = WindowSampler(sampler, config.balance_window_size)
    fingerprint = first.fingerprint()
    shared["sampler global_batch_size"] = fingerprint["global_batch_size"]
    shared |= {f"sampler {name}": value for name, value in fingerprint["sampler"].items()}
    parts = _native_parts(dataset, config, given)
    if not topology.is_constructor:
        return Offer([], shared), parts
    start = first.state_dict()["hp_nodes"]
    shared |= {"dataset_length": len(dataset), "start": start}
    if config.metadata_mode:
        # Reading behind the plan runs ahead of it by as many windows as the workers take: the same on every rank.
        ahead = parts.worker_options or {}
        shared["dataloader_kwargs num_workers"] = parts.num_workers
        shared["dataloader_kwargs prefetch_factor"] = ahead.get("prefetch_factor")
    fingerprint = {**fingerprint, "dataset_length": len(dataset), "seed": config.seed}
    return Offer([], shared, fingerprint, start, first.micro_batches_per_epoch), parts


def _plain_config(config: DistributedDatasetConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {
        name: value if isinstance(value, (int, float, str, bool)) else repr(value) for name, value in values.items()
    }


def _graph(
    parts: Parts | None,
    topology: DataTopology,
    config: DistributedDatasetConfig,
    agreed: Offer,
    held: list[Transport],
    device: Any,
) -> BaseNode[MicroBatch]:
    """The graph of this rank. Every group that it makes is put into ``held``."""

    def group(scope: Literal["data_parallel", "model_parallel"]) -> Transport:
        held.append(create_transport(topology, scope, timeout_s=config.timeout_s))
        return held[-1]

    assert parts is not None
    model = group("model_parallel")
    tensors = model if model.size == 1 else _tensor_group(topology, config, device, held)
    data = _data_group(topology, config, device, held)
    if isinstance(parts, ExternalParts):
        assert data is not None
        balanced = _balance_group(topology, config, data, held)
        return external_graph(parts, config, data, balanced, model, device=device)
    if data is None:
        return peer_graph(agreed.start, config, model, tensors, parts.batch_spec)
    if parts.nothing_to_plan and topology.data_rank == 0:
        logger.warning(_NOTHING_TO_PLAN)
    return native_graph(parts, config, data, model, tensors)


def _device(config: DistributedDatasetConfig, device: Any) -> Any:
    """Where batches are wanted: where it was said, else on the device of the backend that was asked for."""
    return device or DEVICE_OF.get(config.communication_backend, "cpu")


def _kind(device: Any) -> str:
    return str(device).split(":")[0]


def _data_group(
    topology: DataTopology, config: DistributedDatasetConfig, device: Any, held: list[Transport]
) -> Transport | None:
    """The data-parallel group; None on a model peer."""
    backend = "gloo" if config.communication_backend == "auto" else config.communication_backend

    def make() -> Transport | None:
        constructor = topology.is_constructor
        settings: dict[str, Any] = {"timeout_s": config.timeout_s, "backend": backend, "device": device}
        return create_transport(topology, "data_parallel", **settings) if constructor else None

    return _held(held, make()) if backend == "gloo" else _tested_on_all(held, make, "making the data-parallel group")


def _balance_group(
    topology: DataTopology, config: DistributedDatasetConfig, data: Transport, held: list[Transport]
) -> Transport:
    """The group within which this rank balances; ``data`` itself where that is everybody."""

    def make() -> Transport | None:
        made = create_balance_group(topology, data, config.balance_group_size)
        return None if made is data else made

    if isinstance(data, HandedOverTransport):
        return _tested_on_all(held, make, "making the balancing groups") or data
    return _held(held, make()) or data


def _tensor_group(
    topology: DataTopology, config: DistributedDatasetConfig, device: Any, held: list[Transport]
) -> Transport:
    """The model-parallel group that carries tensors: over the backend of the device where they are."""
    if _kind(device) == "cpu" or topology.world is not None:
        made = _held(held, create_transport(topology, "model_parallel", timeout_s=config.timeout_s))
    else:

        def make() -> Transport:
            ranks = topology.model_parallel_ranks
            return create_tensor_transport(ranks, topology.global_rank, config.timeout_s, device=device)

        made = _tested_on_all(held, make, "making the group of tensors")
    assert made is not None
    return made


def _held(held: list[Transport], made: Transport | None) -> Transport | None:
    if made is not None:
        held.append(made)
    return made


def _tested_on_all(held: list[Transport], make: Callable[[], Transport | None], where: str) -> Transport | None:
    """A group over a device's backend. Where that fails its test on one rank it fails on all, which hear of it over the
    first of ``held``, the group of all ranks.
    """
    made, failure = None, b""
    try:
        made = _held(held, make())
    except RuntimeError as error:
        failure = str(error).encode()
    failures = [text.decode() for text in gather_texts(held[0], failure, where) if text]
    if failures:
        raise RuntimeError("; ".join(dict.fromkeys(failures)))
    return made


# ---- the functions of each stage: the user's, the built-in text ones, or those of whole records


def _native_parts(dataset: Any, config: DistributedDatasetConfig, given: Mapping[str, Any]) -> NativeParts:
    workers, options = worker_arguments(given["dataloader_kwargs"])
    split_fn, pack_fn, collate_fn, metadata_fn = _functions(config, given)
    cost_model = _resolved_cost_model(config, given)
    whole_records = split_fn is None
    return NativeParts(
        dataset=dataset,
        batch_sampler=given["batch_sampler"],
        metadata_fn=metadata_fn,
        metadata=given["metadata"],
        cost_model=cost_model,
        padding_cost=None if whole_records else _padding_table(cost_model, config.seq_len),
        split_fn=split_fn,
        pack_fn=_whole_record if whole_records else pack_fn,
        collate_fn=collate_fn,
        algorithm=given["balancing_algorithm"],
        nothing_to_plan=whole_records and _one_record_a_window(config, given),
        batch_spec=batch_spec(config, given),
        num_workers=workers,
        worker_options=options,
        device=_device(config, given["device"]),
    )


def _external_parts(config: DistributedDatasetConfig, given: Mapping[str, Any]) -> ExternalParts:
    _, pack_fn, collate_fn, metadata_fn = _functions(config, given)
    cost_model = _resolved_cost_model(config, given)
    source = given["external_step_source"]
    return ExternalParts(
        source,
        metadata_fn,
        getattr(source, "rounds_per_step", 1),
        cost_model=cost_model,
        padding_cost=None if pack_fn is None else _padding_table(cost_model, config.seq_len),
        pack_fn=pack_fn,
        collate_fn=collate_fn,
        algorithm=given["balancing_algorithm"],
    )


def _functions(config: DistributedDatasetConfig, given: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Split, pack, collate and metadata."""
    split_fn, pack_fn, collate_fn, metadata_fn = (
        given[name] for name in ("split_fn", "pack_fn", "collate_fn", "metadata_fn")
    )
    if config.repack_sequences:
        split_fn = partial(split_packed_text, pad_token_id=config.pad_token_id)
        pack_fn = partial(pack_text, pad_token_id=config.pad_token_id)
        collate_fn = collate_fn or collate_text
        metadata_fn = partial(text_metadata, metadata_fn=metadata_fn)
    return split_fn, pack_fn, collate_fn, metadata_fn


def _one_record_a_window(config: DistributedDatasetConfig, given: Mapping[str, Any]) -> bool:
    """Whether each rank has one bin a window, and nothing counts but that window's slowest rank."""
    sampler = given["batch_sampler"]
    rounds = sampler.global_batch_size // sampler.global_micro_batch_size
    one = config.local_batch_size == 1 and min(config.balance_window_size, rounds) == 1
    carried = config.objective == "makespan" and rounds > 1
    return one and not carried and given["balancing_algorithm"] is None


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
