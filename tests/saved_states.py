"""Loaders whose states are kept as files for ever, so that every release reads what an earlier one wrote.

``python -m tests.saved_states`` writes the files of the current version that are missing. It never changes one: a file
that cannot be read any more is a run that cannot be resumed any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import DistributedDataLoader, SampleMetadata, WorkloadCost
from hp_nodes.samplers import BlendedBatchSampler, DistributedBatchSampler
from hp_nodes.state import STATE_VERSION
from hp_nodes.transport import run_ranks
from tests.nodes.test_resume import Noise
from tests.scenes import Documents, Scene

DATA = Path(__file__).parent / "data"


class Records:
    """Record i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def whole_records(mesh: Any, sampler: Any, size: int, **config: Any) -> DistributedDataLoader:
    """What the builder makes of records that stay whole, each of the same cost."""
    return build_distributed_dataloader(
        Records(size),
        mesh,
        DistributedDatasetConfig(seq_len=8, local_batch_size=sampler.micro_batch_size, timeout_s=20.0, **config),
        batch_sampler=sampler,
        metadata_fn=lambda record: SampleMetadata(1),
        cost_model=lambda metadata: WorkloadCost(llm=1.0),
        collate_fn=list,
    )


def shuffled(mesh: Any) -> DistributedDataLoader:
    return whole_records(mesh, DistributedBatchSampler(50, 2, 8, mesh.get_rank(), mesh.size(), order="shuffle"), 50)


def blended(mesh: Any) -> DistributedDataLoader:
    sampler = BlendedBatchSampler(
        [9, 20, 5], [0.2, 0.7, 0.1], 2, 8, mesh.get_rank(), mesh.size(), order="shuffle", on_end="repeat"
    )
    return whole_records(mesh, sampler, 34)


def users_nodes(mesh: Any) -> DistributedDataLoader:
    """A node with state of its rank's own: generators of two kinds."""
    return Scene(Documents(32), window=2, insert={"Collator": Noise}).loader(mesh)


def within_a_step(mesh: Any) -> DistributedDataLoader:
    """Without StepCheckpointer: loads that are carried over, and a window that is half given."""
    return Scene(Documents(32), micro=1, window=2, objective="makespan", checkpointer=False).loader(mesh)


@dataclass(frozen=True)
class Saved:
    make: Callable[[Any], DistributedDataLoader]
    micro_batches: int
    """Delivered before the state was taken; more than an epoch's go on with the next one."""
    following: int = 6
    """Delivered after it, up to the end of a step."""


SAVED = {
    "shuffled": Saved(shuffled, 4),
    "second_epoch": Saved(shuffled, 14),
    "finished": Saved(shuffled, 12),
    "blended": Saved(blended, 4),
    "users_nodes": Saved(users_nodes, 4, 8),
    "within_a_step": Saved(within_a_step, 3, 13),
}


def deliver(loader: DistributedDataLoader, micro_batches: int) -> list[Any]:
    """Epoch, step and positions of the next micro-batches, and what a user's node drew for them."""
    found: list[Any] = []
    while len(found) < micro_batches:
        for batch in loader:
            drawn = list(batch[1]) if isinstance(batch[-1], tuple) and isinstance(batch[-1][-1], float) else None
            assert loader.last is not None
            assert loader.last.positions is not None
            found.append([loader.last.epoch, loader.last.step, list(loader.last.positions), drawn])
            if len(found) == micro_batches:
                break
    return found


def whole_steps(of_ranks: list[list[Any]], first: int = 0) -> list[Any]:
    """The positions of each step over all ranks: which samples a step holds is promised, their layout is not."""
    steps: dict[tuple[int, int], set[int]] = {}
    for found in of_ranks:
        for epoch, step, positions, _ in found:
            steps.setdefault((epoch, step), set()).update(positions)
    return [[*step, sorted(positions)] for step, positions in sorted(steps.items())][first:]


def summary(name: str, of_ranks: list[list[Any]]) -> dict[str, Any]:
    """What must be the same for ever."""
    within = name == "within_a_step"  # the rest of a window that was half given is its plan's
    return {
        "steps": whole_steps(of_ranks, first=int(within)),
        "draws": [[drawn for *_, drawn in found] for found in of_ranks],
    }


def path_of(name: str, version: int = STATE_VERSION) -> Path:
    return DATA / f"state_v{version}_{name}.json"


def recorded(name: str) -> dict[str, Any]:
    """The leaves of two ranks, and what comes next."""

    def run(mesh: Any) -> tuple[dict[str, str], list[Any]]:
        with SAVED[name].make(mesh) as loader:
            deliver(loader, SAVED[name].micro_batches)
            return loader.state_dict(), deliver(loader, SAVED[name].following)

    results = run_ranks({"dp": 2}, run)
    state = {key: text for leaves, _ in results for key, text in leaves.items()}
    return {"state": state, "next": summary(name, [found for _, found in results])}


def resumed(name: str, state: dict[str, str]) -> dict[str, Any]:
    """What comes after a state."""

    def run(mesh: Any) -> list[Any]:
        with SAVED[name].make(mesh) as loader:
            loader.load_state_dict(state)
            return deliver(loader, SAVED[name].following)

    return summary(name, run_ranks({"dp": 2}, run))


def main() -> None:
    DATA.mkdir(exist_ok=True)
    for name in SAVED:
        if not path_of(name).exists():
            path_of(name).write_text(json.dumps(recorded(name)) + "\n", encoding="utf-8")
            print(path_of(name))


if __name__ == "__main__":
    main()
