"""What ranks tell each other besides data: texts of any length, and the one error that all of them raise."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from hp_nodes.errors import DataPlaneError, some_of
from hp_nodes.transport.protocol import Transport
from hp_nodes.types import MicroBatch, Window

__all__ = ["gather_texts", "own_failure", "raise_common"]


def own_failure(
    transport: Transport, error: BaseException, node: str, item: Window | MicroBatch | None
) -> DataPlaneError:
    """What this rank tells the others of ``error``, which was raised in ``node`` or below it.

    Args:
        item: that was worked on; None when there was none yet.
    """
    place = {} if item is None else {"epoch": item.epoch, "step": item.step}
    failed = DataPlaneError.of(error, rank=transport.global_ranks[transport.rank], node=node, **place)
    if failed is not error:
        failed.__cause__ = error
    return failed


def gather_texts(transport: Transport, text: bytes, where: str) -> list[bytes]:
    """Everybody's ``text``, in the order of places. Two exchanges: lengths, then the texts."""
    length = np.array([len(text)], dtype=np.int64).view(np.uint8)
    lengths = transport.all_gather(length, f"{where}: lengths").view(np.int64)[:, 0]
    padded = np.zeros(int(lengths.max()), dtype=np.uint8)
    padded[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    texts = transport.all_gather(padded, f"{where}: texts")
    return [row[:size].tobytes() for row, size in zip(texts, lengths, strict=True)]


def raise_common(transport: Transport, error: DataPlaneError | None, where: str) -> NoReturn:
    """Called by every rank once any of them announced an error: all raise the one of the lowest place.

    Args:
        error: this rank's own, or None.
    """
    texts = gather_texts(transport, error.to_bytes() if error is not None else b"", where)
    failed = [place for place, text in enumerate(texts) if text]
    common = DataPlaneError.from_bytes(texts[failed[0]])
    if len(failed) > 1:
        others = [transport.global_ranks[place] for place in failed[1:]]
        common.message += f" (ranks {some_of(others)} failed at the same point)"
    common.agreed = True
    # The rank where it happened keeps its own exception as the cause, so that a debugger sees the frames.
    raise common from (error.__cause__ if error is not None and failed[0] == transport.rank else None)
