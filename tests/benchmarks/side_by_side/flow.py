"""What runs on the ranks: each function opens one way over its file and measures one thing."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.benchmarks.side_by_side.corpus import IGNORED_LABEL, SEQ_LEN, Failing, Repeated
from tests.benchmarks.side_by_side.ranks import processor_seconds, resident_bytes
from tests.benchmarks.side_by_side.ways import OURS, WAYS, Opened, Setting


def steps_of(opened: Opened, rounds: int, steps: int) -> Iterator[Any]:
    """The micro-batches of so many steps; the state is asked for at the end of each."""
    for _ in range(steps):
        for _ in range(rounds):
            yield next(opened.batches)
        opened.state()


def deliver(rank: int, size: int, name: str, setting: Setting, steps: int) -> dict[str, float]:
    """Processor seconds, wall seconds and labelled tokens of ``steps`` steps, behind the first one."""
    opened, rounds = WAYS[name](setting, rank, size), setting.rounds(size)
    try:
        for _ in steps_of(opened, rounds, 1):
            pass
        dist.barrier()
        start, used = time.perf_counter(), processor_seconds()
        tokens = sum(batch["num_label_tokens"] for batch in steps_of(opened, rounds, steps))
        seconds, used = time.perf_counter() - start, processor_seconds() - used
        dist.barrier()  # nobody closes while another measures
    finally:
        opened.close()
    return {"processor": used, "seconds": seconds, "tokens": tokens}


def work(rank: int, size: int, name: str, setting: Setting, steps: int) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens without padding, and sum of squared segment lengths, of each round of each step."""
    opened, rounds = WAYS[name](setting, rank, size), setting.rounds(size)
    tokens, costs = [], []
    try:
        for batch in steps_of(opened, rounds, steps):
            segments = np.diff(batch["cu_seq_lens"].numpy()).astype(np.float64)
            costs.append(float(segments @ segments))
            tokens.append(batch["input_ids"].numel() - padding(batch))
    finally:
        opened.close()
    return [[*tokens[at : at + rounds]] for at in range(0, len(tokens), rounds)], [
        [*costs[at : at + rounds]] for at in range(0, len(costs), rounds)
    ]


def padding(batch: dict[str, Any]) -> int:
    """Places of the segments at the rows' ends that hold no label."""
    bounds, labels = batch["cu_seq_lens"].tolist(), batch["labels"].flatten()
    tails = [(start, end) for start, end in pairwise(bounds) if end % SEQ_LEN == 0]
    return sum(end - start for start, end in tails if bool((labels[start:end] == IGNORED_LABEL).all()))


def start(rank: int, size: int, name: str, setting: Setting) -> tuple[float, int]:
    """Seconds from here (torch is imported, the process group is made) to the first micro-batch; peak memory above."""
    before = resident_bytes()
    began = time.perf_counter()
    opened = WAYS[name](setting, rank, size)
    next(opened.batches)
    seconds = time.perf_counter() - began
    for _ in steps_of(opened, setting.rounds(size), 8):
        pass
    used = resident_bytes() - before
    dist.barrier()
    opened.close()
    return seconds, used


def states(rank: int, size: int, name: str, setting: Setting, places: list[int]) -> list[Any]:
    """The states behind so many micro-batches of the epoch, ascending."""
    opened, found, done = WAYS[name](setting, rank, size), [], 0
    try:
        for place in places:
            for _ in range(place - done):
                next(opened.batches)
            done = place
            found.append(pickle.dumps(opened.state()))
    finally:
        opened.close()
    return found


class Counted:
    """A dataset that counts its reads."""

    reads = 0

    def __init__(self, dataset: Any, length: int) -> None:
        self.dataset = Repeated(dataset, length) if length else dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        Counted.reads += 1
        return self.dataset[index]


def resume(rank: int, size: int, name: str, setting: Setting, saved: list[list[Any]], place: int) -> tuple[float, int]:
    """Seconds from a saved state to the micro-batch behind it, in a program that runs; records read meanwhile."""
    state = pickle.loads(saved[rank][place])
    dist.barrier()
    Counted.reads, began = 0, time.perf_counter()
    opened = WAYS[name](setting, rank, size, state)
    next(opened.batches)
    seconds, reads = time.perf_counter() - began, Counted.reads
    dist.barrier()
    opened.close()
    return seconds, reads


def fail(rank: int, size: int, name: str, setting: Setting, stays: bool) -> None:
    """A training loop that meets in every micro-batch. Rank 1 cannot read what stands some 300 documents into its share
    (ours reads rows of ten) and, unless it ``stays`` (saving, or held in a debugger), its process ends as with any
    uncaught error.
    """
    wrap = partial(Failing, count=30 if name == OURS else 300)
    wrapped = replace(setting, wrap=wrap) if rank == 1 else setting
    opened = WAYS[name](wrapped, rank, size)
    try:
        for batch in opened.batches:
            dist.all_reduce(torch.tensor(batch["num_label_tokens"]))
    except Exception as error:
        if rank == 1 and not stays:
            opened.close()
            os._exit(1)
        raise RuntimeError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


def consume(rank: int, size: int, name: str, setting: Setting, steps: int, step_seconds: float) -> list[float]:
    """Share of each step that the consuming thread spends in ``next``, when the rest of the step takes as long."""
    opened, rounds = WAYS[name](setting, rank, size), setting.rounds(size)
    shares = []
    try:
        for _ in range(2 * rounds):  # the first window has nobody to be built behind
            next(opened.batches)
            time.sleep(step_seconds / rounds)
        for _ in range(steps):
            inside = 0.0
            dist.barrier()
            began = time.perf_counter()
            for number in range(rounds):
                asked = time.perf_counter()
                next(opened.batches)
                inside += time.perf_counter() - asked
                # Sleeping is late by a little each time; the step stays as long as it is meant to be.
                time.sleep(max(0.0, began + step_seconds * (number + 1) / rounds - time.perf_counter()))
            shares.append(100 * inside / (time.perf_counter() - began))
        dist.barrier()
    finally:
        opened.close()
    return shares
