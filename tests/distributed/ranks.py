"""Real ranks for tests: processes with a Gloo default group, kept for a whole test module.

``pool.run(fn, *arguments)`` calls a module-level function on every rank and returns the results in rank order. A rank
that raises, dies or does not answer in time fails the test within seconds, and the pool is made anew for the next one.
Ranks are forked from a server that has imported torch once, so that a pool of four starts in a second.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["graphs.pretrain"])


def _serve(rank: int, size: int, port: int, calls: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    while True:
        call = calls.recv()
        if call is None:
            break
        function, arguments = call
        try:
            calls.send((True, function(*arguments)))
        except BaseException as error:
            calls.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class RankPool:
    """``size`` processes; made on first use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Any] = []
        self._calls: list[Any] = []

    def start(self) -> None:
        port = _free_port()
        for rank in range(self.size):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self.size, port, there))
            process.start()
            self.processes.append(process)
            self._calls.append(here)

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 45.0, lost: Collection[int] = ()
    ) -> list[Any]:
        """Results in rank order; None for the ranks that are to be ``lost``, after which the pool is made anew."""
        if not self.processes:
            self.start()
        for calls in self._calls:
            calls.send((function, arguments))
        deadline = time.monotonic() + timeout_s
        results: list[Any] = []
        try:
            for rank, calls in enumerate(self._calls):
                if rank in lost:
                    results.append(None)
                    continue
                while not calls.poll(0.05):
                    if time.monotonic() > deadline:
                        raise AssertionError(f"rank {rank} gave no answer within {timeout_s} s: it hangs")
                    if not self.processes[rank].is_alive() and not calls.poll(0):
                        raise AssertionError(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
                good, value = calls.recv()
                if not good:
                    raise AssertionError(f"rank {rank}: {value}{self._others(rank)}")
                results.append(value)
        except BaseException:
            self.kill()
            raise
        if lost:
            self.kill()
        return results

    def _others(self, first: int) -> str:
        """What other ranks have to say, a moment after one has failed."""
        told = []
        for rank, calls in enumerate(self._calls):
            if rank > first and calls.poll(3) and self.processes[rank].is_alive():
                good, value = calls.recv()
                told.append(f"\n--- rank {rank}: {'returned' if good else value}")
        return "".join(told)

    def stop(self) -> None:
        for calls in self._calls:
            calls.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                self.kill()
                raise AssertionError("a rank did not end")
        self.processes, self._calls = [], []

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self._calls = [], []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
