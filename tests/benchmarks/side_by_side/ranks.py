"""Two fresh processes over Gloo that call a function together, with a limit; and what a process has used so far."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

SIZE = 2
LIMIT_S = 170.0
TICK = os.sysconf("SC_CLK_TCK")


class RankError(RuntimeError):
    """A rank raised, or did not answer in time."""


def serve(rank: int, size: int, port: int, calls: Any) -> None:
    started = time.perf_counter()
    import torch
    import torch.distributed as dist

    imported = time.perf_counter() - started
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    calls.send((True, imported))
    while (call := calls.recv()) is not None:
        function, arguments = call
        try:
            calls.send((True, function(rank, size, *arguments)))
        except BaseException as error:
            calls.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Ranks:
    """``SIZE`` processes, from entering to leaving. ``call`` runs ``function(rank, size, *arguments)`` on each."""

    def __enter__(self) -> Ranks:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes, self.calls = [], []
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, SIZE, port, there))
            process.start()
            self.processes.append(process)
            self.calls.append(here)
        self.import_seconds = [self._answer(rank, 60.0)[1] for rank in range(SIZE)]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for process, calls in zip(self.processes, self.calls, strict=True):
            with contextlib.suppress(OSError):  # it may be gone
                calls.send(None)
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        for calls in self.calls:
            calls.send((function, arguments))

    def call(self, function: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Results in rank order.

        Raises:
            RankError: a rank raised, or gave no answer within the limit.
        """
        self.start(function, *arguments)
        deadline = time.monotonic() + limit_s
        answers = [self._answer(rank, deadline - time.monotonic()) for rank in range(SIZE)]
        for good, value in answers:
            if not good:
                raise RankError(value)
        return [value for _, value in answers]

    def outcomes(self, limit_s: float) -> list[tuple[float, str] | None]:
        """Of what was started: seconds and error (or "returned") of each rank; None for one that is still at it
        ``limit_s`` after another was done.
        """
        started = time.monotonic()
        until = started + LIMIT_S
        found: list[tuple[float, str] | None] = [None] * SIZE
        while time.monotonic() < until and None in found:
            for rank, calls in enumerate(self.calls):
                if found[rank] is None and calls.poll(0.01):
                    try:
                        good, value = calls.recv()
                    except EOFError:
                        good, value = False, "ended"
                    found[rank] = (time.monotonic() - started, "returned" if good else value.split("\n")[0])
                    until = min(until, time.monotonic() + limit_s)
        return found

    def _answer(self, rank: int, within_s: float) -> tuple[bool, Any]:
        try:
            if not self.calls[rank].poll(max(0.0, within_s)):
                raise RankError(f"rank {rank} gave no answer in time")
            answer: tuple[bool, Any] = self.calls[rank].recv()
        except EOFError:
            raise RankError(f"rank {rank} died") from None
        return answer


def processor_seconds() -> float:
    """Of this process and its children, those that still run included."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return seconds + sum(seconds_of(child) for child in children(os.getpid()))


def children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(child) for child in file.read().split()]
    except OSError:
        return []
    return found + [grandchild for child in found for grandchild in children(child)]


def seconds_of(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            fields: Sequence[str] = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK  # utime and stime, in ticks: man 5 proc


def resident_bytes() -> int:
    """The most memory that this process has had resident since it was started, pages of mapped files included."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
