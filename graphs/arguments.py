"""The builder's arguments, checked against each other: every refusal that needs nothing but what was given.

Three modes: native online (``batch_sampler`` with ``metadata_fn``), native precomputed (``batch_sampler`` with
``metadata`` and ``metadata_mode=True``), external steps (``external_step_source`` with ``metadata_fn``).
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable, Mapping
from multiprocessing.context import BaseContext
from typing import Any

import torch

from graphs.config import DistributedDatasetConfig
from hp_nodes.nodes.accelerator import open_accelerator
from hp_nodes.nodes.batch_layout import BatchLayout, unnamed_on_host
from hp_nodes.nodes.metadata_table import MetadataTable
from hp_nodes.samplers import check_batch_sampler
from hp_nodes.text import collate_text
from hp_nodes.transport import DataTopology
from hp_nodes.transport.device import backend_problem
from hp_nodes.types import TensorFieldSpec

__all__ = ["Arguments", "batch_spec", "is_external", "refusals", "text_batch_spec", "worker_arguments"]

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


def is_external(given: Arguments) -> bool:
    """Whether the user's own source defines the steps."""
    return given["external_step_source"] is not None


def refusals(dataset: Any, topology: DataTopology, config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    """Why these arguments are refused; empty when they are accepted. ``given`` has every keyword of the builder."""
    if is_external(given):
        problems = _external_problems(topology, config, given)
    else:
        problems = _mode_problems(topology, config, given) or _native_problems(config, given)
    problems = problems or _function_problems(config, given) + _spec_problems(given) + _backend_problems(config, given)
    if problems:
        return problems
    problems = _mesh_problems(topology, config, given) + _device_problems(topology, config, given)
    problems += _worker_problems(given["dataloader_kwargs"] or {})
    if is_external(given):
        return problems
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


def batch_spec(config: DistributedDatasetConfig, given: Arguments) -> Any:
    """What a micro-batch looks like: the argument, else ``collate_fn.model_batch_spec``, else that of the built-in
    text; None: it is sent along.
    """
    if given["model_batch_spec"] is not None:
        return given["model_batch_spec"]
    own = getattr(given["collate_fn"], "model_batch_spec", None)
    if own is not None or not config.repack_sequences or given["collate_fn"] not in (None, collate_text):
        return own
    return text_batch_spec(config)


def text_batch_spec(config: DistributedDatasetConfig) -> dict[str, Any]:
    """What :func:`hp_nodes.text.collate_text` gives, for ``model_batch_spec``."""
    rows = TensorFieldSpec((config.local_batch_size, config.seq_len), torch.int64)
    return {
        "input_ids": rows,
        "labels": rows,
        "cu_seq_lens": TensorFieldSpec((None,), torch.int32),
        "position_ids": rows,
        "max_seq_len": int,
        "num_label_tokens": int,
    }


def worker_arguments(dataloader_kwargs: Mapping[str, Any] | None) -> tuple[int, dict[str, Any]]:
    """The number of workers, and what else torch's DataLoader is given."""
    options = dict(dataloader_kwargs or {})
    options.pop("in_order", None)  # results are put in order either way
    workers = options.pop("num_workers", 0)
    return workers, {key: value for key, value in options.items() if value != _WORKER_DEFAULTS[key]}


def _mode_problems(topology: DataTopology, config: DistributedDatasetConfig, given: Arguments) -> list[str]:
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
        if given["metadata_fn"] is not None:
            return ["metadata_fn with metadata_mode=True; accepted: metadata, or metadata_mode=False"]
        if given["metadata"] is None and topology.is_constructor:
            return ["metadata_mode=True without metadata; accepted: anything that holds an entry a dataset index"]
    elif given["metadata"] is not None:
        return ["metadata was given with metadata_mode=False; accepted: metadata_fn, or metadata_mode=True"]
    elif given["metadata_fn"] is None and not config.repack_sequences:
        return ["metadata_fn is missing; accepted: sample -> SampleMetadata (with repack_sequences it may be left out)"]
    return []


def _native_problems(config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    problems = []
    if config.balance_group_size is not None:
        problems.append("balance_group_size is for external steps only; accepted here: None")
    if config.repack_sequences and (given["split_fn"] is not None or given["pack_fn"] is not None):
        problems.append("repack_sequences has its own split and pack; accepted with it: no split_fn, no pack_fn")
    elif (given["split_fn"] is None) != (given["pack_fn"] is None):
        names = ("split_fn", "pack_fn")
        lone, missing = names if given["split_fn"] is not None else names[::-1]
        problems.append(f"{lone} without {missing}; accepted: both, or neither (records stay whole)")
    if config.metadata_mode and given["split_fn"] is not None:
        problems.append("split_fn with metadata_mode: sequences are known only after reading; accepted: whole records")
    return problems


def _external_problems(topology: DataTopology, config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    source = given["external_step_source"]
    reasons = {
        "batch_sampler": "the source defines the steps",
        "metadata": "the source has no dataset indices",
        "split_fn": "the source yields samples as they are planned",
        "model_batch_spec": "there are no model peers",
    }
    problems = [
        f"{name} with external_step_source: {why}; accepted: None"
        for name, why in reasons.items()
        if given[name] is not None
    ]
    if config.metadata_mode:
        problems.append("metadata_mode=True with external_step_source: it is by dataset index; accepted: False")
    if given["dataloader_kwargs"]:
        problems.append(
            f"dataloader_kwargs {list(given['dataloader_kwargs'])} with external_step_source: the source owns its "
            "workers; accepted: None"
        )
    if config.on_error == "skip":
        problems.append("on_error='skip' with external_step_source: the source reads by itself; accepted: 'raise'")
    if config.balance_window_size > 1:
        problems.append(
            f"balance_window_size is {config.balance_window_size} with external_step_source: each of its rounds is "
            "planned alone; accepted: 1"
        )
    if len(topology.model_parallel_ranks) > 1:
        problems.append(
            f"the mesh has {len(topology.model_parallel_ranks)} ranks a data-parallel coordinate; accepted with "
            "external_step_source: a pure data-parallel mesh"
        )
    groups = config.balance_group_size
    if groups is not None and topology.data_parallel_size % groups:
        problems.append(
            f"balance_group_size is {groups}; accepted: an int that divides the {topology.data_parallel_size} ranks"
        )
    if not isinstance(source, Iterable):
        problems.append(
            f"external_step_source is a {type(source).__name__}; accepted: an iterable of local rounds, or a torchdata "
            "node"
        )
    rounds = getattr(source, "rounds_per_step", 1)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        problems.append(f"external_step_source.rounds_per_step is {rounds!r}; accepted: an int >= 1")
    if given["metadata_fn"] is None and not config.repack_sequences:
        problems.append("metadata_fn is missing; accepted with external_step_source: sample -> SampleMetadata")
    if config.repack_sequences and given["pack_fn"] is not None:
        problems.append("repack_sequences has its own pack; accepted with it: no pack_fn")
    return problems


def _function_problems(config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    problems = []
    algorithm = given["balancing_algorithm"]
    if algorithm is not None and config.objective != "lockstep":
        problems.append(
            f"balancing_algorithm has its own objective, but objective={config.objective!r} was given too; accepted "
            "with it: 'lockstep', the default"
        )
    missing = [name for name in ("assign", "objective") if not callable(getattr(algorithm, name, None))]
    if algorithm is not None and missing:
        problems.append(
            f"balancing_algorithm is a {type(algorithm).__name__} without {' and '.join(missing)}; accepted: an object "
            "with assign(problem) and objective(loads)"
        )
    for name in ("metadata_fn", "split_fn", "pack_fn", "collate_fn", "cost_model"):
        if given[name] is not None and not callable(given[name]):
            problems.append(f"{name} is {given[name]!r}; accepted: a callable")
    if not isinstance(given["dataloader_kwargs"] or {}, Mapping):
        problems.append(f"dataloader_kwargs is {given['dataloader_kwargs']!r}; accepted: a mapping from name to value")
    return problems


def _spec_problems(given: Arguments) -> list[str]:
    sources = (given["model_batch_spec"], getattr(given["collate_fn"], "model_batch_spec", None))
    for spec in sources:
        if spec is not None:
            try:
                BatchLayout(spec)
            except ValueError as error:
                return [str(error)]
    return []


def _backend_problems(config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    backend = config.communication_backend
    if backend not in ("nccl", "hccl"):
        return []
    try:
        problem = backend_problem(backend, given["device"])
    except (RuntimeError, TypeError):
        return []  # the device is no device, which is told elsewhere
    return [] if problem is None else [f"communication_backend: {problem}"]


def _device_problems(topology: DataTopology, config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    device = given["device"]
    if device is None:
        return []
    try:
        if torch.device(device).type == "cpu":
            return []
    except (RuntimeError, TypeError) as error:
        return [f"device is {device!r} ({str(error).splitlines()[0]}); accepted: a torch device"]
    if len(topology.model_parallel_ranks) > 1 and topology.world is not None:
        return [f"device {device!r} with virtual model-parallel ranks, which have no device's backend; accepted: 'cpu'"]
    try:
        open_accelerator(device)
    except (ValueError, ImportError, RuntimeError) as error:
        return [f"{error}; accepted here: 'cpu'"]
    unnamed = unnamed_on_host(batch_spec(config, given))
    if unnamed:
        return [f"model_batch_spec: {unnamed} stay on the host of a batch on {device!r}; accepted: entries with a name"]
    return []


def _mesh_problems(topology: DataTopology, config: DistributedDatasetConfig, given: Arguments) -> list[str]:
    problems = []
    readers, planner = config.dataset_reader_ranks, config.planner_rank
    if readers is not None and sorted(readers) != sorted(topology.constructor_ranks):
        problems.append(
            f"dataset_reader_ranks is {tuple(readers)}; accepted: the constructors {topology.constructor_ranks}"
        )
    if planner is not None and planner not in topology.constructor_ranks:
        problems.append(f"planner_rank is {planner}; accepted: one of the constructors {topology.constructor_ranks}")
    if config.dataset_already_sharded and not is_external(given):
        problems.append("dataset_already_sharded is True; accepted with a batch_sampler: False")
    return problems


def _data_problems(dataset: Any, given: Arguments, config: DistributedDatasetConfig) -> list[str]:
    problems = []
    sized = hasattr(dataset, "__len__")
    if not (hasattr(dataset, "__getitem__") and sized):
        problems.append(f"dataset is a {type(dataset).__name__}; accepted: map-style, with __getitem__ and __len__")
    if config.metadata_mode:
        try:
            entries = len(MetadataTable(given["metadata"]))
        except ValueError as error:
            return [*problems, str(error)]
        if sized and entries != len(dataset):
            problems.append(
                f"metadata has {entries} entries, the dataset {len(dataset)} records; accepted: equally many"
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
    for name in ("pin_memory", "persistent_workers", "in_order"):
        if not isinstance(options.get(name, False), bool):
            problems.append(f"dataloader_kwargs {name} is {options[name]!r}; accepted: True or False")
    ahead = options.get("prefetch_factor")
    if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1):
        problems.append(f"dataloader_kwargs prefetch_factor is {ahead!r}; accepted: None, or an int >= 1")
    context = options.get("multiprocessing_context")
    contexts = multiprocessing.get_all_start_methods()
    if context not in (None, *contexts) and not isinstance(context, BaseContext):
        problems.append(
            f"dataloader_kwargs multiprocessing_context is {context!r}; accepted: None, "
            f"{', '.join(map(repr, contexts))}, or a context of multiprocessing"
        )
    if not isinstance(options.get("pin_memory_device", ""), str):
        problems.append(f"dataloader_kwargs pin_memory_device is {options['pin_memory_device']!r}; accepted: a str")
    if options.get("worker_init_fn") is not None and not callable(options["worker_init_fn"]):
        problems.append(f"dataloader_kwargs worker_init_fn is {options['worker_init_fn']!r}; accepted: a callable")
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
