"""Ranks as processes of their own, which may be killed, without each of them importing torch anew."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

SECONDS = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["graphs.pretrain"])


class Ranks:
    """Runs ``function(*arguments)`` in ``size`` processes, whose environment is what torchrun would give them.

    What they print goes to ``output``. Leaving the ``with`` block ends those that still run.
    """

    def __init__(self, size: int, output: Path, function: Callable[..., object], *arguments: Any) -> None:
        self.output = output
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes: list[BaseProcess] = [
            _context.Process(
                target=_run, args=({"RANK": str(r), **environment}, output, function, arguments), daemon=True
            )
            for r in range(size)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every rank."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(SECONDS)

    def wait(self) -> None:
        """Until all have ended, each with code 0."""
        deadline = time.monotonic() + SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.output.read_text()}"


def _run(
    environment: dict[str, str], output: Path, function: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    function(*arguments)
