"""Mutated frames without end: ``python -m tests.soak_codec [--frames 100000] [--seed 0]``.

Every frame is one that a codec wrote, changed as a wire, a disk or a fault in a program might change it. It must be
refused with a ``CodecError`` or, where the change happened to change nothing, decode to what was encoded. Each is
then sealed anew, as a forger would, and decoded: any value or a ``CodecError`` will do, a crash, a hang or another
exception will not.
"""

from __future__ import annotations

import argparse
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hp_nodes.transport.codec import Codec, CodecError
from hp_nodes.transport.codec_frame import HEADER_NBYTES, write_header
from tests.transport.codec_samples import Empty, Frozen, Outer, Plain, Point, array_of, mutate, same, tensor_of

Bytes = np.ndarray[Any, Any]


def sample_sets() -> list[list[Any]]:
    """Samples that make use of every part of the format."""
    tokens = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (3, 5, 700)]
    plain = [1, -(2**80), 2.5, float("nan"), 1j, "text", "\ud800", b"bytes", bytearray(b"x"), None, True, np.str_("s")]
    arrays = [
        array_of(dtype, shape, 1) for dtype in ("f4", ">i2", "S3", [("a", "<i4")]) for shape in ((), (3,), (2, 3))
    ]
    tensors = [
        tensor_of(dtype, shape, 2)
        for dtype in (torch.bfloat16, torch.bool, torch.float8_e5m2)
        for shape in ((), (2, 2))
    ]
    records = [Point(1, torch.arange(2)), Plain({"k": [1]}), Frozen((1, "a"), []), Empty(), Outer.Inner(np.int8(3))]
    nested = [{"images": [torch.zeros(3, 2 + i, 2) for i in range(3)], 5: {}, "t": (1, ("x", [None]))}, [], {}, ()]
    return [tokens, plain, arrays, tensors, records, nested, [tokens[0], *plain, *records, *nested], [None] * 2000]


def broken_frames(count: int, seed: int) -> Iterator[tuple[list[Any], Bytes, Bytes]]:
    """Samples, a mutated frame of theirs, and the frame as it was."""
    generator = np.random.default_rng(seed)
    whole = [(samples, Codec().frame(samples).to_array()) for samples in sample_sets()]
    for number in range(count):
        samples, frame = whole[number % len(whole)]
        made = mutate(frame, generator)
        for _ in range(int(generator.integers(3)) if made.size >= 256 and made.size % 8 == 0 else 0):
            made = mutate(made[: made.size // 8 * 8], generator)
            if made.size < 256:
                break
        yield samples, made, frame


def decode_or_refuse(frame: Bytes) -> list[Any] | None:
    """What a frame holds; None when it is refused. Any other exception passes."""
    try:
        return Codec().decode(frame)
    except CodecError:
        return None


def seal(frame: Bytes) -> Bytes:
    """The frame with the checksums that belong to what is in it; its counts stay."""
    made: Bytes = frame.copy()
    samples, chunks = struct.unpack_from("=QQ", made.data, 24)
    write_header(made, samples, chunks)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start, refused, harmless, forged = time.perf_counter(), 0, 0, 0
    for samples, frame, _ in broken_frames(arguments.frames, arguments.seed):
        found = decode_or_refuse(frame)
        if found is None:
            refused += 1
        else:
            assert same(found, samples), "a wrong value"
            harmless += 1
        if frame.size >= HEADER_NBYTES and frame.size % 64 == 0:
            forged += decode_or_refuse(seal(frame)) is not None
    seconds = time.perf_counter() - start
    print(f"{arguments.frames} mutated frames in {seconds:.0f} s: {refused} refused, {harmless} unchanged, none wrong;")
    print(f"sealed anew, {forged} decoded to something, the others were refused; no other exception")


if __name__ == "__main__":
    main()
