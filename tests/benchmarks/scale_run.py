"""What does not grow with the length of a run or of a dataset: time, memory and state of windows, samplers and starts.

    python -m tests.benchmarks.scale_run [--quick]

* A long run: 100,000 windows of one rank's whole graph and 20,000 of two virtual ranks, epoch after epoch, in twenty
  parts. Time of a window in the last parts next to the first; memory that a window adds, fitted over the third and the
  last quarter: resident, and, in a shorter run, as Python counts it; size of the state.
* A million steps of a sampler, walked one by one; and what it costs to stand there: restoring, the state's size.
* The shuffle, place by place, of datasets of 10³ to 10¹² records.
* Start to first batch of datasets of 10⁹ and 10¹² records, next to a bare ``import torch``: whole processes, in turn.
  A plain installation; what the extra ``fast`` adds (importing numba) has a row of its own where it is installed.

Figures are processor time but for the start, where the wall time is shown as well.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import resource
import statistics
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes import DistributedDataLoader, StepCheckpointer, WindowSampler
from hp_nodes.nodes.graph import read_state
from hp_nodes.planning import PackingProblem
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.samplers.permutation import KeyedPermutation
from hp_nodes.transport import DataTopology, create_transport, run_ranks
from tests.benchmarks.record import Row, interleaved, run_alone
from tests.benchmarks.scale_job import Job

__all__ = ["measure"]

COMMAND = "python -m tests.benchmarks.scale_run"
ROOT = Path(__file__).parents[2]
PARTS = 20
MILLION = 10**6
NO_LEAK = "≤ 50 B"
"""The smallest objects of Python that hold something take 56."""


# ---- a long run


class LongRun:
    """What is seen of a run, in equal parts: milliseconds a window, bytes held, bytes of state.

    All ranks stop at the end of each part, so that rank 0 looks at all of them in the same place.
    """

    def __init__(self, ranks: int, windows: int, traced: bool) -> None:
        self.of_part = max(1, windows // PARTS)
        self.traced = traced
        self.milliseconds: list[float] = []
        self.held: list[float] = []
        self.state: list[int] = []
        self._together = threading.Barrier(ranks)

    def follow(self, loader: Any, looking: bool) -> None:
        windows, parts, began = 0, 0, time.process_time()
        while parts < PARTS:
            for _ in loader:
                windows += loader.last.ends_window
                if windows == self.of_part:
                    self._together.wait()
                    if looking:
                        self._look(loader, time.process_time() - began)
                    self._together.wait()
                    windows, parts, began = 0, parts + 1, time.process_time()
                    if parts == PARTS:
                        return

    def _look(self, loader: Any, seconds: float) -> None:
        self.milliseconds.append(1e3 * seconds / self.of_part)
        gc.collect()
        self.held.append(float(tracemalloc.get_traced_memory()[0] if self.traced else resident()))
        self.state.append(sum(len(text) for text in loader.state_dict().values()))

    def growth(self) -> list[float]:
        """Bytes that a window adds, of the third and of the last quarter of the run."""
        half, quarter = PARTS // 2, PARTS // 4
        pieces = (self.held[half : half + quarter + 1], self.held[half + quarter - 1 :])
        return [float(np.polyfit(self.of_part * np.arange(len(piece)), piece, 1)[0]) for piece in pieces]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Rotating:
    """Whole bins go to the next rank in about half of the windows: exchanges at next to no planning time."""

    def assign(self, problem: PackingProblem) -> NDArray[np.int32]:
        assert problem.reference is not None
        return (problem.reference + problem.num_rounds * problem.local_batch_size) % problem.num_bins

    def objective(self, loads: NDArray[np.float64]) -> float:
        return float(loads[0].sum())


def long_run(ranks: int, windows: int, *, traced: bool = False, algorithm: Any = None) -> LongRun:
    """A whole graph, windows of two rounds of text, 50 of them an epoch; built a window ahead in a thread, or, to count
    Python's memory, when asked for, so that nothing is under way when it is looked at.
    """
    seen, job = LongRun(ranks, windows, traced), Job(ranks, rounds=2, windows=50)

    def of_rank(mesh: Any) -> None:
        topology = DataTopology.from_mesh(mesh)
        transport = create_transport(topology)
        rank, depth = topology.data_rank, 0 if traced else 1
        graph = StepCheckpointer(job.graph(rank, transport, depth=depth, algorithm=algorithm))
        with DistributedDataLoader(graph, topology=topology, transports=[transport]) as loader:
            seen.follow(loader, looking=rank == 0)

    if traced:
        tracemalloc.start()
    try:
        run_ranks({"dp": ranks}, of_rank)
    finally:
        tracemalloc.stop()
    return seen


def long_run_rows(ranks: int, windows: int, counted: int, command: str) -> list[Row]:
    """``counted``: windows of the run whose Python objects are counted, which takes ten times as long. With one rank it
    is with the built-in planner, after a few windows that compile what it compiles.
    """
    seen = long_run(ranks, windows, algorithm=Rotating())
    planner = Rotating() if ranks > 1 else None
    long_run(ranks, PARTS, algorithm=planner)
    traced = long_run(ranks, counted, traced=True, algorithm=planner)
    who = "one rank" if ranks == 1 else f"{ranks} virtual ranks"
    what = f"{windows:,} windows, {who}"
    late, early = seen.milliseconds[-5:], seen.milliseconds[1:6]
    beside: dict[str, Any] = {"baseline": "near the beginning", "command": command}
    return [
        Row.of(f"{what}: time of a window at the end", "ms", late, baseline_values=early, wanted="≤ 1.1", **beside),
        Row.of(f"{what}: resident memory a window adds", "B", seen.growth(), wanted=NO_LEAK, command=command),
        Row.of(f"{what}: state", "B", seen.state[-1:], baseline_values=seen.state[:1], wanted="≤ 1.05", **beside),
        Row.of(
            f"{counted:,} windows, {who}: Python's memory a window adds",
            "B",
            traced.growth(),
            wanted=NO_LEAK if ranks == 1 else None,  # of several, what another thread holds comes and goes
            command=command,
        ),
    ]


# ---- samplers and state


def sampler(records: int) -> DistributedBatchSampler:
    """One of 8 ranks, 8 records of it in each step of 64."""
    return DistributedBatchSampler(records, 8, 64, 3, 8, order="shuffle", seed=1)


def walked(steps: int) -> list[float]:
    """Microseconds a step, of each of ten equal parts of a walk through ``steps`` steps."""
    own, found = iter(sampler(64 * steps)), []
    for _ in range(10):
        began = time.process_time()
        for _ in range(steps // 10):
            next(own)
        found.append(1e6 * (time.process_time() - began) / (steps // 10))
    return found


def standing_at(step: int) -> tuple[float, float]:
    """Milliseconds to set the cursor of a new graph there and make its next window; bytes of the state then."""
    began = time.process_time()
    node = WindowSampler(sampler(64 * 2 * MILLION), 1)
    node.reset({"hp_nodes": {node.name: {"epoch": 3, "consumed_samples": 64 * step, "finished": False}}})
    window = next(node)
    state = read_state(node)
    milliseconds = 1e3 * (time.process_time() - began)
    assert window.step == step
    return milliseconds, float(len(str(state)))


def place_by_place(records: int) -> float:
    """Nanoseconds of a place of the shuffle, 64 at a time as a step asks for them."""
    shuffle, times = KeyedPermutation(records, 1, 2), 300
    places = np.arange(64, dtype=np.int64) % records
    began = time.process_time()
    for _ in range(times):
        shuffle(places)
    return 1e9 * (time.process_time() - began) / times / 64


def sampler_rows(steps: int, repeats: int, command: str) -> list[Row]:
    parts = walked(steps)
    standing = {step: [standing_at(step) for _ in range(repeats + 1)][1:] for step in (0, MILLION)}
    times, sizes = ({step: [pair[k] for pair in pairs] for step, pairs in standing.items()} for k in (0, 1))
    shuffles = interleaved({f"{n:.0e}": lambda n=n: place_by_place(n) for n in (10**3, 10**9, 10**12)}, repeats)
    small = {"baseline": "10³ records", "baseline_values": shuffles["1e+03"], "command": command}
    begin = {"baseline": "at the beginning", "command": command}
    return [
        Row.of(
            f"{steps:,} steps of a shuffled sampler: time of a step in the last fifth",
            "µs",
            parts[-2:],
            baseline_values=parts[:2],
            wanted="≤ 1.1",
            **begin,
        ),
        Row.of("resume at step 10⁶, next window made", "ms", times[MILLION], baseline_values=times[0], **begin),
        Row.of("state at step 10⁶", "B", sizes[MILLION], baseline_values=sizes[0], wanted="≤ 1.2", **begin),
        Row.of("a place of the shuffle of 10⁹ records", "ns", shuffles["1e+09"], **small),
        Row.of("a place of the shuffle of 10¹² records", "ns", shuffles["1e+12"], **small),
    ]


# ---- start


START = """
import numpy as np
from graphs import DistributedDatasetConfig, build_distributed_dataloader
from hp_nodes.datasets import document_record
from hp_nodes.planning import PackingProblem
from hp_nodes.samplers import DistributedBatchSampler
from hp_nodes.transport import VirtualMesh, VirtualWorld

class Computed:  # a record is a function of its index, so there may be any number of them
    def __len__(self):
        return {records}
    def __getitem__(self, index):
        return document_record(np.arange(100 + index % 900))

config = DistributedDatasetConfig(seq_len=2048, local_batch_size=2, balance_window_size=2, repack_sequences=True)
sampler = DistributedBatchSampler({records}, 2, 8, 0, 1, order="shuffle")
mesh = VirtualMesh(VirtualWorld(1), dict(dp=1), 0)
with build_distributed_dataloader(Computed(), mesh, config, batch_sampler=sampler) as loader:
    assert next(loader)["input_ids"].shape == (2, 2048)
"""


def process(program: str) -> tuple[float, float]:
    """Wall and processor seconds of ``python -c program``."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start_rows(repeats: int, command: str) -> list[Row]:
    plain = "import sys; sys.modules['numba'] = None\n" + START
    programs = {"torch": "import torch"}
    programs |= {f"10{n} records": plain.format(records=10**k) for k, n in ((9, "⁹"), (12, "¹²"))}
    if importlib.util.find_spec("numba") is not None:
        programs["10⁹ records, with numba"] = START.format(records=10**9)
    for program in programs.values():
        process(program)  # caches are warm afterwards
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for repeat in range(repeats):
        for name in list(programs)[:: -1 if repeat % 2 else 1]:
            took[name].append(process(programs[name]))
    rows = []
    for name in list(programs)[1:]:
        for kind, figure in (("wall time", 0), ("processor time", 1)):
            more = [own[figure] - bare[figure] for own, bare in zip(took[name], took["torch"], strict=True)]
            text = f"start to first batch, {name}, more than importing torch: {kind}"
            rows.append(Row.of(text, "s", more, wanted=None if "numba" in name else "≤ 1 s", command=command))
    bare = [wall for wall, _ in took["torch"]]
    return [*rows, Row("importing torch, a whole process", statistics.median(bare), "s", command=command)]


def measure(arguments: Sequence[str]) -> list[Row]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a hundredth of the windows and steps: a minute")
    quick = parser.parse_args(arguments).quick
    command = COMMAND + (" --quick" if quick else "")
    rows = start_rows(3 if quick else 9, command)
    rows += sampler_rows(20_000 if quick else MILLION, 3 if quick else 9, command)
    rows += long_run_rows(1, *((2_000, 400) if quick else (100_000, 2_000)), command)
    return rows + long_run_rows(2, *((600, 200) if quick else (20_000, 1_000)), command)


if __name__ == "__main__":
    run_alone(measure)
