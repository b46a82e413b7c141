"""Python's cycle collector pauses while many objects are made that are all going to live.

Decoding 65,536 samples makes some 200,000 objects. The collector counts them as a reason to run and walks them
again and again, in vain: three quarters of the time of decoding went there. Only the threshold is changed, never
``gc.disable``: a program that switches the collector off or on meanwhile, in another thread, keeps its choice.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class _Pause:
    """How many threads ask for the pause, and what to restore after the last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._askers = 0
        self._threshold = gc.get_threshold()

    def begin(self) -> None:
        with self._lock:
            if self._askers == 0:
                self._threshold = gc.get_threshold()
                gc.set_threshold(0)
            self._askers += 1

    def end(self) -> None:
        with self._lock:
            self._askers -= 1
            if self._askers == 0 and gc.get_threshold()[0] == 0:
                gc.set_threshold(*self._threshold)


_PAUSE = _Pause()


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection starts within; any number of threads may be inside at a time."""
    _PAUSE.begin()
    try:
        yield
    finally:
        _PAUSE.end()
