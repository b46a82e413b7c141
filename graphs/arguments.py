"""The builder's arguments, checked against each other: every refusal of a native graph, before anything is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from graphs.config import DistributedDatasetConfig
from hp_nodes.samplers import check_batch_sampler
from hp_nodes.transport import DataTopology

__all__ = ["Arguments", "refusals", "worker_arguments"]

_OWNED = ("batch_sampler", "batch_size", "collate_fn", "dataset", "drop_last", "generator", "sampler", "shuffle")
_WORKER_DEFAULTS: dict[str, Any] = {
    "num_workers": 0,
    "pin_memory": False,
    "prefetch_factor": None,
    "persistent_workers": False,
    "in_order": True,
    "multiprocessing_context": None,
    "pin_memory_device": "",
    "timeout": 0,
    "worker_init_fn": None,
}
Arguments = Mapping[str, Any]


def refusals(dataset: Any, topology: DataTopology, config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    """Why these arguments are refused; empty when they are accepted. ``given`` has every keyword of the builder."""
    problems = _mode_problems(config, given) or (_function_problems(config, given) + _later(config, given))
    if problems:
        return problems
    problems = _mesh_problems(topology, config)
    problems += _worker_problems(given["dataloader_kwargs"] or {})
    try:
        check_batch_sampler(
            given["batch_sampler"],
            micro_batch_size=config.local_batch_size,
            dp_rank=topology.data_rank,
            dp_world_size=topology.data_parallel_size,
        )
    except ValueError as error:
        problems.append(str(error))
    return problems + (_data_problems(dataset, given, config) if topology.is_constructor else [])


def worker_arguments(dataloader_kwargs: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """The number of workers, and what else torch's DataLoader is given."""
    options = dict(dataloader_kwargs or {})
    options.pop("in_order", None)  # results are put in order either way
    workers = options.pop("num_workers", 0)
    return workers, {key: value for key, value in options.items() if value != _WORKER_DEFAULTS[key]}


def _mode_problems(config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    if given["external_step_source"] is not None:
        return [
            "external_step_source: external steps come later; accepted so far: batch_sampler with metadata_fn or "
            "metadata"
        ]
    if given["batch_sampler"] is None:
        return [
            "nothing defines a step; accepted: batch_sampler with metadata_fn, batch_sampler with metadata and "
            "metadata_mode=True, or external_step_source with metadata_fn"
        ]
    if given["metadata"] is not None and given["metadata_fn"] is not None:
        return [
            "both metadata and metadata_fn were given; accepted: metadata with metadata_mode=True, else metadata_fn"
        ]
    if config.metadata_mode:
        if given["metadata"] is None:
            return ["metadata_mode=True without metadata; accepted: a sequence of SampleMetadata by dataset index"]
    elif given["metadata"] is not None:
        return ["metadata was given with metadata_mode=False; accepted: metadata_fn, or metadata_mode=True"]
    elif given["metadata_fn"] is None and not config.repack_sequences:
        return ["metadata_fn is missing; accepted: sample -> SampleMetadata (with repack_sequences it may be left out)"]
    return []


def _function_problems(config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    problems = []
    if config.balance_group_size is not None:
        problems.append("balance_group_size is for external steps only; accepted here: None")
    if config.repack_sequences and (given["split_fn"] or given["pack_fn"]):
        problems.append("repack_sequences has its own split and pack; accepted with it: no split_fn, no pack_fn")
    elif (given["split_fn"] is None) != (given["pack_fn"] is None):
        lone, missing = ("split_fn", "pack_fn") if given["split_fn"] else ("pack_fn", "split_fn")
        problems.append(f"{lone} without {missing}; accepted: both, or neither (records stay whole)")
    if config.metadata_mode and given["split_fn"] is not None:
        problems.append("split_fn with metadata_mode: sequences are known only after reading; accepted: whole records")
    if given["balancing_algorithm"] is not None and config.objective != "lockstep":
        problems.append(f"balancing_algorithm has its own objective, but objective={config.objective!r} was given too")
    for name in ("metadata_fn", "split_fn", "pack_fn", "collate_fn", "cost_model"):
        if given[name] is not None and not callable(given[name]):
            problems.append(f"{name} is {given[name]!r}; accepted: a callable")
    return problems


def _later(config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    """What is accepted by name but not built yet. TODO(builder-modes)."""
    problems = []
    if given["model_batch_spec"] is not None:
        problems.append("model_batch_spec comes later; accepted so far: None (the layout is sent along)")
    if config.on_error == "skip":
        problems.append("on_error='skip' comes later; accepted so far: 'raise'")
    if config.communication_backend in ("nccl", "hccl"):
        problems.append(
            f"communication_backend {config.communication_backend!r} comes later; accepted so far: 'auto', 'gloo'"
        )
    if given["device"] is not None and str(given["device"]).split(":")[0] != "cpu":
        problems.append(f"device {given['device']!r} comes later; accepted so far: 'cpu'")
    return problems


def _mesh_problems(topology: DataTopology, config: DistributedDatasetConfig) -> list[str]:
    problems = []
    readers, planner = config.dataset_reader_ranks, config.planner_rank
    if readers is not None and tuple(readers) != topology.constructor_ranks:
        problems.append(
            f"dataset_reader_ranks is {tuple(readers)}; accepted: the constructors {topology.constructor_ranks}"
        )
    if planner is not None and planner not in topology.constructor_ranks:
        problems.append(f"planner_rank is {planner}; accepted: one of the constructors {topology.constructor_ranks}")
    if config.dataset_already_sharded:
        problems.append("dataset_already_sharded is True; accepted with a batch_sampler: False")
    return problems


def _data_problems(dataset: Any, given: Arguments, config: DistributedDatasetConfig) -> list[str]:
    problems = []
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        problems.append(f"dataset is a {type(dataset).__name__}; accepted: map-style, with __getitem__ and __len__")
    metadata = given["metadata"]
    if config.metadata_mode:
        if not hasattr(metadata, "__getitem__"):
            problems.append(f"metadata is a {type(metadata).__name__}; accepted: anything with __getitem__ and __len__")
        elif hasattr(metadata, "__len__") and hasattr(dataset, "__len__") and len(metadata) != len(dataset):
            problems.append(
                f"metadata has {len(metadata)} entries, the dataset {len(dataset)} records; accepted: equally many"
            )
    return problems


def _worker_problems(options: Mapping[str, Any]) -> list[str]:
    owned = sorted(set(options) & set(_OWNED))
    unknown = sorted(set(options) - set(_OWNED) - set(_WORKER_DEFAULTS))
    problems = []
    if owned:
        problems.append(f"dataloader_kwargs {owned} belong to the graph; accepted: {sorted(_WORKER_DEFAULTS)}")
    if unknown:
        problems.append(f"dataloader_kwargs {unknown} are unknown; accepted: {sorted(_WORKER_DEFAULTS)}")
    workers = options.get("num_workers", 0)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        return [*problems, f"dataloader_kwargs num_workers is {workers!r}; accepted: an int >= 0"]
    timeout = options.get("timeout", 0)
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not math.isfinite(timeout) or timeout < 0:
        problems.append(f"dataloader_kwargs timeout is {timeout!r}; accepted: a finite number >= 0 (seconds)")
    elif workers == 0:
        of_workers = ("timeout", "prefetch_factor", "persistent_workers", "multiprocessing_context")
        needing = [name for name in of_workers if options.get(name, _WORKER_DEFAULTS[name]) != _WORKER_DEFAULTS[name]]
        problems += [
            f"dataloader_kwargs {name}={options[name]!r} needs workers; accepted with num_workers >= 1"
            for name in needing
        ]
    return problems
