"""``make demo``: in about two minutes, on two ranks, see that balancing saves time and that resuming is exact.

1. Trains a tokenizer on the interpreter's standard library and packs that text into records.
2. Trains a small model without interruption.
3. Trains it again, kills every rank with SIGKILL in the middle of a step, resumes, and compares the losses of both
   runs. The same checkpoint also goes on, for one step, on one rank alone.
4. Trains steps with and without balancing, in turn, and compares time, waiting and loss.

Prints one table, writes ``demo.png``; all of it is in ``runs/demo``. Needs the extra ``demo``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from graphs.text_records import find_text_files, standard_library
from graphs.tokenizer import train_tokenizer

__all__ = ["main"]

RANKS = 2
STEPS = 10
CHECKPOINT_EVERY = 4
KILLED_BEHIND = 6
BLOCKS = 4
BLOCK_STEPS = 2
ALONE_WITHIN = 1e-5
"""On another number of ranks the same loss is summed in another order."""
DIRECTORY = Path("runs/demo")
RECORDS = Path("runs/demo.records")
"""Stays from one demo to the next: the text is packed again only when it changed."""
# Tokens of three bytes or so bring most files of the standard library below one row, so rows hold several documents.
VOCABULARY = 1024
SIZES = {"global-batch-size": 16, "hidden": 32, "layers": 1, "heads": 1, "warm-up": 4, "eval-records": 0}

Event = dict[str, Any]


def launch(name: str, output: Any = None, ranks: int = RANKS, **options: Any) -> subprocess.Popen[bytes]:
    """Start the training program on all ranks; its log is ``NAME.jsonl``."""
    given = {
        "records": RECORDS,
        "tokenizer": DIRECTORY / "tokenizer.json",
        "log-file": DIRECTORY / f"{name}.jsonl",
        **SIZES,
        **options,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "graphs.pretrain"]
    for option, value in given.items():
        command += [f"--{option}"] if value is True else [f"--{option}", str(value)]
    return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        raise SystemExit(f"the training program ended with code {process.returncode}")


def events(name: str, kind: str) -> list[Event]:
    """The complete lines of a log of one kind, as far as it is written."""
    path = DIRECTORY / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def train_and_kill(name: str, **options: Any) -> int:
    """Train until step KILLED_BEHIND is done, end all ranks at once in the middle of the next, and say which it was."""
    with open(DIRECTORY / f"{name}.txt", "wb") as output:
        process = launch(name, output, **options)
        try:
            while len(steps := events(name, "step")) < KILLED_BEHIND:
                if process.poll() is not None:
                    raise SystemExit(f"the run to be killed ended by itself: see {output.name}")
                time.sleep(0.02)
            time.sleep(steps[-1]["seconds"] / 2)
            for pid in events(name, "start")[-1]["pids"]:
                os.kill(pid, signal.SIGKILL)
        finally:
            process.terminate()
            process.wait()
    return len(events(name, "step")) + 1


def losses(name: str) -> dict[int, float]:
    """The loss of each step; of a step that was done twice, the later one."""
    return {event["step"]: event["loss"] for event in events(name, "step")}


def prepare() -> None:
    for module in ("matplotlib", "tokenizers"):
        try:
            __import__(module)
        except ImportError as missing:
            raise SystemExit(
                f"the demo needs {module}, which is in the extra 'demo': pip install 'hp-nodes[demo]'"
            ) from missing
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir(parents=True)
    train_tokenizer(find_text_files(standard_library())[::4], DIRECTORY / "tokenizer.json", VOCABULARY)


def table(killed_in: int) -> str:
    """What all runs showed."""
    trained, comparison = events("uninterrupted", "step"), events("comparison", "comparison")[-1]
    one, other = losses("uninterrupted"), losses("resumed")
    alone = events("alone", "step")[-1]
    resumed_behind = events("resumed", "resumed")[-1]["step"]
    tokens, padding = (sum(step[what] for step in trained) for what in ("tokens", "padding"))
    evenness = [sum(step["imbalance"][i] for step in trained) / len(trained) for i in range(3)]
    same = sum(one[step] == other.get(step) for step in one)
    padded = f"padding {padding / (tokens + padding):.0%}"
    seconds = "{:>10.3f} s{:>10.3f} s   {:.3f} times as fast"
    rows = [
        ("trained", f"{len(trained)} steps, {tokens:,} tokens, {padded}, {RANKS} ranks"),
        ("slowest rank / even share", "{:.3f} as sampled, {:.3f} balanced (bound {:.3f})".format(*evenness)),
        ("loss", f"{one[1]:.4f} at the start, {one[len(one)]:.4f} at the end"),
        ("killed and resumed", f"killed in step {killed_in}, resumed behind step {resumed_behind}"),
        ("losses of both runs", f"{same} of {len(one)} identical to the last bit"),
        ("resumed on one rank", f"step {alone['step']}: loss {alone['loss']:.6f}, {one[alone['step']]:.6f} on {RANKS}"),
        ("", f"{'as sampled':>12}{'balanced':>12}"),
        ("step, predicted", seconds.format(*comparison["predicted_seconds"], comparison["predicted_speedup"])),
        ("step, measured", seconds.format(*comparison["step_seconds"], comparison["speedup"])),
        ("waiting for others", "{:>12.1%}{:>12.1%}".format(*comparison["waiting_share"])),
        ("loss of the same steps", "{:>12.6f}{:>12.6f}".format(*comparison["loss"])),
    ]
    return "\n".join(f"{name:<26}{value}".rstrip() for name, value in rows)


def draw(path: Path) -> None:
    """Loads per rank of one step before and after, and the waiting of every step both ways."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = events("comparison", "step")
    ways = {way: [step for step in compared if step["way"] == way] for way in ("as sampled", "balanced")}
    shown = max(ways["balanced"], key=lambda step: step["imbalance"][0] - step["imbalance"][1])
    figure, (before, after, waiting) = pyplot.subplots(1, 3, figsize=(12, 3.6), width_ratios=(1, 1, 1.3))
    unit = max(max(loads) for loads in shown["loads_before"])
    for axes, key, title in ((before, "loads_before", "as sampled"), (after, "loads_after", "balanced")):
        draw_loads(axes, shown[key], unit)
        axes.set_title(f"step {shown['step']}, {title}")
    before.set_ylabel("work, largest micro-batch = 1")
    after.legend(loc="upper right")
    for way, steps in ways.items():
        waiting.plot([s["step"] for s in steps], [100 * s["waiting_share"] for s in steps], marker="o", label=way)
    waiting.set(title="time spent waiting for the other rank", xlabel="step", ylabel="% of the step", ylim=(0, None))
    waiting.legend(frameon=False)
    for axes in (before, after, waiting):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def draw_loads(axes: Any, loads: list[list[float]], unit: float) -> None:
    """Bars of each round, one for each rank; the line over them is what the round takes."""
    for rank, rounds in enumerate(loads):
        places = [number + (rank - (len(loads) - 1) / 2) * 0.4 for number in range(len(rounds))]
        axes.bar(places, [load / unit for load in rounds], width=0.38, label=f"rank {rank}")
    slowest = [max(of_round) / unit for of_round in zip(*loads, strict=True)]
    axes.hlines(
        slowest, [n - 0.42 for n in range(len(slowest))], [n + 0.42 for n in range(len(slowest))], color="black"
    )
    axes.set(xlabel="round", ylim=(0, 1.1))


def main() -> None:
    started = time.monotonic()
    print("== text", flush=True)
    prepare()
    training = {"steps": STEPS, "checkpoint-every": CHECKPOINT_EVERY}
    print("== train without interruption", flush=True)
    finish(launch("uninterrupted", checkpoint=DIRECTORY / "uninterrupted", **training))
    print(f"== train again, SIGKILL in step {KILLED_BEHIND + 1}", flush=True)
    killed_in = train_and_kill("resumed", checkpoint=DIRECTORY / "resumed", **training)
    shutil.copytree(DIRECTORY / "resumed", DIRECTORY / "alone")
    print("== resume", flush=True)
    finish(launch("resumed", checkpoint=DIRECTORY / "resumed", resume=True, **training))
    print("== resume the same checkpoint on one rank", flush=True)
    behind = events("resumed", "resumed")[-1]["step"]
    finish(launch("alone", ranks=1, checkpoint=DIRECTORY / "alone", resume=True, steps=behind + 1))
    print("== the same steps with and without balancing", flush=True)
    finish(launch("comparison", compare=BLOCKS, **{"block-steps": BLOCK_STEPS}))
    draw(DIRECTORY / "demo.png")
    print(f"\n{table(killed_in)}\n\n{DIRECTORY / 'demo.png'} shows it. {time.monotonic() - started:.0f} s in all.")
    if losses("resumed") != losses("uninterrupted"):
        raise SystemExit("the resumed run's losses differ from the uninterrupted run's")
    alone = events("alone", "step")[-1]
    if abs(alone["loss"] - losses("uninterrupted")[alone["step"]]) > ALONE_WITHIN:
        raise SystemExit("the step resumed on one rank has another loss")


if __name__ == "__main__":
    main()
