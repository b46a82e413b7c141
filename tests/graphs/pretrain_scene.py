"""Runs of the training program on a small text, as several test modules make them."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from graphs.pretrain import main
from tests.graphs.ranks import SECONDS, Ranks

STEPS = 24
EVERY = 3


def write_text(root: Path) -> Path:
    """Documents of 1 to 150 words."""
    words = random.Random(0)
    for number in range(150):
        content = " ".join(
            words.choice(("if", "else", "return", "for", "in", "x")) for _ in range(words.randint(1, 150))
        )
        (root / f"{number}.txt").write_text(content)
    return root


class Run:
    """One training run and its files; started again, it continues its log."""

    def __init__(self, text: Path, directory: Path, ranks: int, *options: str) -> None:
        self.directory = directory
        self.ranks = ranks
        directory.mkdir(parents=True, exist_ok=True)
        # One record file for all runs: it is packed by the first.
        files = {"--text": text, "--records": text / "records", "--log-file": directory / "log.jsonl"}
        sizes = {
            "--seq-len": 256,
            "--hidden": 16,
            "--layers": 1,
            "--heads": 1,
            "--eval-records": 8,
            "--global-batch-size": 4,
        }
        run = {"--steps": STEPS, "--checkpoint-every": EVERY, "--warm-up": 3}
        self.arguments = [str(part) for option in (files | sizes | run).items() for part in option] + list(options)

    def start(self, *options: str, main: Any = main) -> Ranks:
        return Ranks(self.ranks, self.directory / "output.txt", main, [*self.arguments, *options])

    def finish(self, *options: str) -> Run:
        with self.start(*options) as ranks:
            ranks.wait()
        return self

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "log.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events("step")}

    def gradient_norms(self) -> list[float]:
        return [event["gradient_norm"] for event in self.events("step")]

    def output(self) -> str:
        return (self.directory / "output.txt").read_text()

    def await_steps(self, count: int) -> None:
        deadline = time.monotonic() + SECONDS
        while len(self.events("step")) < count:
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.002)


def run_all(runs: list[Run], *options: str) -> None:
    """Let runs on equally many ranks finish, one after the other, in the same processes."""
    with ExitStack() as held:
        ports = [held.enter_context(socket.socket()) for _ in runs]
        for port in ports:
            port.bind(("127.0.0.1", 0))
        programs = [(port.getsockname()[1], [*run.arguments, *options]) for port, run in zip(ports, runs, strict=True)]
    first = runs[0]
    with Ranks(first.ranks, first.directory / "output.txt", one_after_the_other, programs) as ranks:
        ranks.wait()


def one_after_the_other(programs: list[tuple[int, list[str]]]) -> None:
    for port, arguments in programs:
        os.environ["MASTER_PORT"] = str(port)
        main(arguments)
