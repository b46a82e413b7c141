"""Random configurations against the order by definition: ``python -m tests.soak_resume [--configurations 10000]``.

Each configuration draws a dataset, a global batch, an order and a seed; runs some steps on some ranks, resumes the
state on others, with another micro-batch, window, prefetch depth and mode; and compares what every step holds with
:mod:`tests.reference_order`. All ranks are virtual.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes import SampleMetadata, WorkloadCost
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import run_ranks
from tests.reference_order import rank_share, step_records
from tests.saved_states import Records

RANKS = (1, 1, 2, 2, 3, 4)


@dataclass(frozen=True)
class Layout:
    """What may differ between save and resume."""

    ranks: int
    micro: int
    window: int
    depth: int
    metadata_mode: bool
    balanced: bool
    steps: int


@dataclass(frozen=True)
class Configuration:
    size: int
    global_batch: int
    seed: int | None
    epoch: int
    step: int
    layouts: tuple[Layout, ...]


def draw(generator: random.Random) -> Configuration:
    """A configuration in which every layout divides the global batch."""
    global_batch = generator.randint(1, 16)
    steps = generator.randint(1, 4)
    size = generator.choice(
        (global_batch * steps + generator.randrange(global_batch), 10**9 + generator.randrange(999))
    )
    layouts = []
    for _ in range(2):
        ranks = generator.choice([ranks for ranks in RANKS if global_batch % ranks == 0])
        share = global_batch // ranks
        micro = generator.choice([micro for micro in range(1, share + 1) if share % micro == 0])
        kinds = generator.random() < 0.5, generator.random() < 0.7
        layouts.append(
            Layout(ranks, micro, generator.randint(1, 4), generator.randint(0, 2), *kinds, generator.randint(1, 2))
        )
    last = size // global_batch - 1
    first = generator.randint(0, min(last, 10**6))
    seed = generator.choice((None, generator.randrange(1000)))
    return Configuration(size, global_batch, seed, generator.randrange(4), first, tuple(layouts))


class Lengths:
    """Metadata by index, without a list of it."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> SampleMetadata:
        return SampleMetadata(1 + index * 7919 % 31)


def cost(metadata: SampleMetadata) -> WorkloadCost:
    return WorkloadCost(llm=float(metadata.pack_tokens**2))


def deliver(configuration: Configuration, layout: Layout, state: Any) -> tuple[list[list[tuple[int, int, Any]]], Any]:
    """(epoch, step, records) of each micro-batch on each rank, and the state after some steps."""

    def run(mesh: Any) -> tuple[list[tuple[int, int, Any]], Any]:
        size, shuffled = configuration.size, configuration.seed is not None
        sampler = DistributedBatchSampler(
            size,
            layout.micro,
            configuration.global_batch,
            mesh.get_rank(),
            layout.ranks,
            order="shuffle" if shuffled else "sequential",
            seed=configuration.seed or 0,
        )
        begin = {"epoch": configuration.epoch, "consumed_samples": configuration.step * configuration.global_batch}
        sampler.load_state_dict(begin)
        config = DistributedDatasetConfig(
            seq_len=64,
            local_batch_size=layout.micro,
            balance_window_size=layout.window,
            host_prefetch_depth=layout.depth,
            metadata_mode=layout.metadata_mode,
            min_balance_gain=0.0 if layout.balanced else 1 - 1e-9,
            timeout_s=30.0,
        )
        lengths = Lengths(size)
        given = {"metadata": lengths} if layout.metadata_mode else {"metadata_fn": lengths.__getitem__}
        with build_distributed_dataloader(
            Records(size), mesh, config, batch_sampler=sampler, collate_fn=list, cost_model=cost, **given
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found, steps = [], 0
            while steps < layout.steps:
                for batch in loader:
                    found.append((loader.last.epoch, loader.last.step, batch))
                    steps += loader.last.ends_step
                    if steps == layout.steps:
                        break
            return found, loader.state_dict()

    results = run_ranks({"dp": layout.ranks}, run)
    return [found for found, _ in results], results[0][1]


def check(configuration: Configuration) -> int:
    """Run a configuration; how many steps agreed."""
    state, epoch, step, agreed = None, configuration.epoch, configuration.step, 0
    for layout in configuration.layouts:
        of_ranks, state = deliver(configuration, layout, state)
        for _ in range(layout.steps):
            if step == configuration.size // configuration.global_batch:
                epoch, step = epoch + 1, 0
            wanted = step_records(step, configuration.global_batch, configuration.size, configuration.seed, epoch)
            found = [[r for e, s, batch in rank if (e, s) == (epoch, step) for r in batch] for rank in of_ranks]
            assert sorted(r for records in found for r in records) == sorted(wanted), configuration
            if not layout.balanced:
                shares = [rank_share(wanted, rank, layout.ranks, layout.micro) for rank in range(layout.ranks)]
                assert found == shares, configuration
            step, agreed = step + 1, agreed + 1
    return agreed


def configurations(count: int, seed: int = 0) -> Iterator[Configuration]:
    generator = random.Random(seed)
    return (draw(generator) for _ in range(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configurations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("hp_nodes").setLevel(logging.ERROR)
    start, steps = time.perf_counter(), 0
    for number, configuration in enumerate(configurations(options.configurations, options.seed), 1):
        steps += check(configuration)
        if number % 500 == 0 or number == options.configurations:
            seconds = time.perf_counter() - start
            print(f"{number} configurations, {steps} steps, every one as defined; {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
