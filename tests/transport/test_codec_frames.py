"""What arrives is never believed: a changed, foreign or forged frame is an error; not a crash, a hang or a wrong
value.
"""

from __future__ import annotations

import json
import struct
import sys
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from hp_nodes.transport.codec import Codec, CodecError
from hp_nodes.transport.codec_frame import HEADER_NBYTES, Block, ChunkLayout, write_header
from tests.soak_codec import broken_frames, decode_or_refuse, seal
from tests.transport.codec_samples import Frozen, Plain, Point, same


@pytest.mark.parametrize("resealed", [False, True])
def test_mutated_frames(resealed: bool) -> None:
    refused = 0
    for samples, frame, original in broken_frames(3000, seed=7):
        if resealed and frame.size >= HEADER_NBYTES and frame.size % 64 == 0:
            # A forger computes the checksums too: values may differ then, but nothing may crash or hang.
            decode_or_refuse(seal(frame))
            continue
        found = decode_or_refuse(frame)
        refused += found is None
        assert found is None or (np.array_equal(frame, original) and same(found, samples))
    assert resealed or refused > 2500


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_thousand_mutated_frames() -> None:
    for samples, frame, _ in broken_frames(100_000, seed=8):
        found = decode_or_refuse(frame)
        assert found is None or same(found, samples)


def test_any_changed_byte_or_exchanged_word_of_a_payload_is_noticed() -> None:
    codec = Codec()
    frame = codec.frame([torch.arange(6000), torch.zeros(100, dtype=torch.uint8)]).to_array()
    for place in range(0, frame.size, 37):
        changed = frame.copy()
        changed[place] ^= 0x80
        with pytest.raises(CodecError, match="malformed|version|byte order"):
            codec.decode(changed)
    words = frame.view(np.uint64)
    first = int(np.flatnonzero(words == 1)[-1])
    for distance in (1, 8, 511, 512, 513, 1024, 4096):
        swapped = words.copy()
        swapped[[first, first + distance]] = swapped[[first + distance, first]]
        with pytest.raises(CodecError, match="changed on the way"):
            codec.decode(swapped.view(np.uint8))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 128, 4096])
def test_bytes_that_are_no_frame(count: int) -> None:
    for content in (
        np.zeros(count, np.uint8),
        np.full(count, 255, np.uint8),
        np.random.default_rng(0).integers(0, 256, count),
    ):
        with pytest.raises(CodecError, match="malformed frame"):
            Codec().decode(content.astype(np.uint8))


def test_buffers_of_another_type_are_refused() -> None:
    for buffer in (np.zeros(64, np.int8), np.zeros((8, 8), np.uint8), np.zeros(128, np.uint8)[::2], torch.zeros(64)):
        with pytest.raises(CodecError, match="accepted: contiguous uint8"):
            Codec().decode(buffer)


def test_another_version_and_another_byte_order_are_named() -> None:
    frame = Codec().frame([1]).to_array()
    newer, swapped = frame.copy(), frame.copy()
    newer[8] += 1
    swapped[10:12] = swapped[10:12][::-1]
    with pytest.raises(CodecError, match="version 3; this release reads version 2"):
        Codec().decode(newer)
    with pytest.raises(CodecError, match="another byte order"):
        Codec().decode(swapped)


def forged(structure: Any, rows: int, *blocks: Any) -> np.ndarray[Any, Any]:
    """A frame whose checksums are right and whose content an encoder never wrote."""
    layout = ChunkLayout(json.dumps(structure).encode(), rows, [Block.of_array(np.asarray(block)) for block in blocks])
    frame = np.zeros(HEADER_NBYTES + layout.nbytes, np.uint8)
    layout.write(frame[HEADER_NBYTES:])
    write_header(frame, rows, 1)
    return frame


NONE = np.zeros(0, np.uint8)
FIELDS = ["columns", [["int"], ["int"]]]


@pytest.mark.parametrize(
    ("structure", "rows", "blocks"),
    [
        (["nothing"], 1, []),
        ([], 1, []),
        ({"a": 1}, 1, []),
        (None, 1, []),
        (["int"], 1, []),
        (["int"], 1, [[1, 2]]),
        (["int"], 1, [[1], [2]]),
        (["bool"], 1, [np.array([2], np.uint8)]),
        (["bytes"], 2, [[5, -3], np.zeros(2, np.uint8)]),
        (["bytes"], 1, [[2**62], NONE]),
        (["bytes"], 2, [[2**63 - 1, 2**63 - 1], NONE]),
        (["str"], 1, [[1], np.array([255], np.uint8)]),
        (["str"], 1, [[2], np.array([65], np.uint8)]),
        (["list", ["none"]], 1, [[2**40], NONE]),
        (["list", ["columns", []]], 1, [[1]]),
        (["dict", ["a", "a"], FIELDS], 1, [[1], [2]]),
        (["dict", ["a", 5], FIELDS], 1, [[1], [2]]),
        (["dict", [], ["columns", []]], 1, []),
        (["dict", ["a"], FIELDS], 1, [[1], [2]]),
        (["tuple", 10**9, ["woven", ["none"]]], 1, [NONE]),
        (["tuple", -1, ["woven", ["none"]]], 1, [NONE]),
        (["map", ["int"], ["int"]], 1, [[2], [1, 1], [1, 2]]),
        (["map", ["list", ["none"]], ["int"]], 1, [[1], [0], NONE, [1]]),
        (["union", [["int"]]], 1, [np.array([1], np.uint32), [1]]),
        (["union", []], 1, [np.array([0], np.uint32)]),
        (["tensor", "int64", 1], 1, [[2], [1]]),
        (["tensor", "int64", 1], 1, [[-1], NONE]),
        (["tensor", "int64", 2], 1, [[2**32, 2**32], NONE]),
        (["tensor", "int64", 3], 1, [[2**31, 2**31, 4], NONE]),
        (["tensor", "int64", 10**6], 1, [NONE, NONE]),
        (["tensor", "int64", "1"], 1, [[1], [1]]),
        (["tensor", "qint8", 1], 1, [[1], np.zeros(1, np.uint8)]),
        (["tensor", "no dtype", 1], 1, [[1], np.zeros(1, np.uint8)]),
        (["tensor", ["int64"], 1], 1, [[1], [1]]),
        (["array", "|O", 1], 1, [[1], [1]]),
        (["array", [["a", "|O"]], 1], 1, [[1], [1]]),
        (["array", [["a", [["b", "|O"]]]], 1], 1, [[1], [1]]),
        (["array", "|V0", 1], 1, [[1], NONE]),
        (["array", "<i99", 1], 1, [[1], [1]]),
        (["array", "|V99999999999999", 1], 1, [[1], [1]]),
        (["array", [["a", "<i8", [2**31, 2**31]]], 1], 1, [[1], [1]]),
        (["scalar", "O"], 1, [[1]]),
        (["scalar", "<i8"], 1, [[1, 2]]),
        (["pickle"], 1, [[3], np.frombuffer(b"N.x", np.uint8)]),
        (["dataclass", "subprocess", "Popen", ["args"], ["columns", [["int"]]]], 1, [[1]]),
        (["dataclass", "builtins", "eval", ["a"], ["columns", [["int"]]]], 1, [[1]]),
        (["named", "os", "stat_result", ["a"], ["columns", [["int"]]]], 1, [[1]]),
        (["named", Point.__module__, "Point", ["x"], ["columns", [["int"]]]], 1, [[1]]),
        (["dataclass", Point.__module__, "Point", ["x", "y"], FIELDS], 1, [[1], [1]]),
        (["named", Plain.__module__, "Plain", ["a", "b"], FIELDS], 1, [[1], [1]]),
        (["dataclass", Frozen.__module__, "Frozen.__init__", ["first", "second"], FIELDS], 1, [[1], [1]]),
        (["dataclass", Frozen.__module__, "dataclasses.dataclass", ["a"], ["columns", [["int"]]]], 1, [[1]]),
        (["dataclass", 5, 6, ["a"], ["columns", [["int"]]]], 1, [[1]]),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, list) and value and isinstance(value[0], str) else "",
)  # fmt: skip
def test_forged_structures_are_refused_without_great_effort(structure: Any, rows: int, blocks: list[Any]) -> None:
    frame = forged(structure, rows, *blocks)
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(CodecError):
            Codec().decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 5


def test_a_frame_does_not_make_this_process_import_anything_foreign() -> None:
    module = "antigravity"
    assert module not in sys.modules
    with pytest.raises(CodecError, match="has not imported"):
        Codec().decode(forged(["dataclass", module, "X", ["a"], ["columns", [["int"]]]], 1, [1]))
    assert module not in sys.modules


def test_deep_structures_are_refused() -> None:
    structure: Any = ["int"]
    for _ in range(900):
        structure = ["list", structure]
    with pytest.raises(CodecError):
        Codec().decode(forged(structure, 1, [1]))
    deep = (b'["list",' * 100_000).ljust(1 << 20)
    layout = ChunkLayout(deep, 1, [])
    frame = np.zeros(HEADER_NBYTES + layout.nbytes, np.uint8)
    layout.write(frame[HEADER_NBYTES:])
    write_header(frame, 1, 1)
    with pytest.raises(CodecError, match="structure cannot be read"):
        Codec().decode(frame)


def test_counts_that_do_not_fit_are_refused() -> None:
    frame = forged(["int"], 1, [1])
    for offset, value in ((0, 10**6), (0, 0), (8, 2), (16, 2**60), (24, 2**60), (24, 0), (32, 2**62), (32, 1)):
        changed = frame.copy()
        changed[HEADER_NBYTES + offset : HEADER_NBYTES + offset + 8] = np.frombuffer(struct.pack("=Q", value), np.uint8)
        with pytest.raises(CodecError):
            Codec().decode(seal(changed))
    for samples, chunks in ((2, 1), (1, 2), (1, 0), (2**50, 1), (1, 2**50)):
        changed = frame.copy()
        write_header(changed, samples, chunks)
        with pytest.raises(CodecError):
            Codec().decode(changed)
