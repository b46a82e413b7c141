"""The bytes of a frame: where each block lies, and whether all of them arrived as they were sent.

A frame is a header of 64 bytes and a body; the body is a run of chunks, each a chunk header, the lengths of its
blocks, its structure as JSON text, then the blocks (arrays of numbers, text, payload). Everything starts at a
multiple of 64 bytes within the frame and every frame is a multiple of 64 bytes long, so frames that lie one behind
the other are aligned as well.

This file takes and gives flat uint8 arrays. It promises that whatever it reads lies inside the frame, and that a
frame which was cut, lengthened or changed on the way is refused: the header carries its own CRC and a checksum of the
body.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_nodes.transport.codec_checksum import checksum_of

ALIGNMENT = 64
"""Bytes. A cache line, and a multiple of every item size."""

Bytes = NDArray[np.uint8]
Write = Callable[[Bytes], None]
Where = Callable[[int], tuple[int, str]]
"""From the row of a column to the sample it is part of and its path inside it: ``(3, "sample['image'][2]")``."""

_VERSION = 2
_MAGIC = b"hp-nodes"
_HEADER = struct.Struct("=8sHH4xQQQQI")  # magic, version, byte order, length, samples, chunks, checksum, CRC of these
_CHUNK = struct.Struct("=QQQQ")  # length, samples, bytes of structure, blocks
_BYTE_ORDER = 0x0102


class CodecError(ValueError):
    """A sample that cannot be encoded, or a frame that is not what a codec wrote.

    ``sample`` is the place of the offending sample in the sequence given to ``frame``; None for a malformed frame.
    """

    def __init__(self, message: str, sample: int | None = None) -> None:
        super().__init__(message)
        self.sample = sample


class Block:
    """``nbytes`` bytes that ``write`` puts into the place it is given. Nothing is copied before that."""

    __slots__ = ("nbytes", "write")

    def __init__(self, nbytes: int, write: Write) -> None:
        self.nbytes = nbytes
        self.write = write

    @classmethod
    def of_array(cls, array: NDArray[Any]) -> Block:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(flat.size, lambda target: np.copyto(target, flat))

    @classmethod
    def of_pieces(cls, pieces: list[bytes] | list[bytearray], nbytes: int) -> Block:
        def write(target: Bytes) -> None:
            view, start = target.data, 0
            for piece in pieces:
                view[start : start + len(piece)] = piece
                start += len(piece)

        return cls(nbytes, write)


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class ChunkLayout:
    """Where the parts of one chunk lie, and how they are written there."""

    def __init__(self, structure: bytes, samples: int, blocks: list[Block]) -> None:
        self._structure = structure
        self._samples = samples
        self._blocks = blocks
        self._prefix = _CHUNK.size + 8 * len(blocks) + len(structure)
        self.nbytes = aligned(self._prefix) + sum(aligned(block.nbytes) for block in blocks)

    def write(self, target: Bytes) -> None:
        lengths = np.fromiter((block.nbytes for block in self._blocks), np.int64, len(self._blocks)).tobytes()
        head = _CHUNK.pack(self.nbytes, self._samples, len(self._structure), len(self._blocks))
        start = _put(target, 0, np.frombuffer(head + lengths + self._structure, np.uint8))
        for block in self._blocks:
            end = start + block.nbytes
            block.write(target[start:end])
            start = aligned(end)
            target[end:start] = 0


def _put(target: Bytes, start: int, piece: Bytes) -> int:
    end = start + piece.size
    target[start:end] = piece
    target[end : aligned(end)] = 0
    return aligned(end)


HEADER_NBYTES = aligned(_HEADER.size)


def write_header(frame: Bytes, samples: int, chunks: int, checksum: int | None = None) -> None:
    """Seal a frame whose body is written; ``checksum`` is its own, when it is known."""
    checksum = checksum_of(frame[HEADER_NBYTES:]) if checksum is None else checksum
    head = _HEADER.pack(_MAGIC, _VERSION, _BYTE_ORDER, frame.size, samples, chunks, checksum, 0)[:-4]
    _put(frame, 0, np.frombuffer(head + struct.pack("=I", zlib.crc32(head)), np.uint8))


def read_header(frame: Bytes) -> tuple[int, int]:
    """The number of samples and of chunks of a frame that arrived whole.

    Raises:
        CodecError: it did not.
    """
    if frame.size < HEADER_NBYTES or frame.size % ALIGNMENT:
        raise CodecError(
            f"malformed frame: {frame.size} bytes; accepted: a multiple of {ALIGNMENT}, at least {HEADER_NBYTES}"
        )
    head = frame[:HEADER_NBYTES].tobytes()
    magic, version, byte_order, nbytes, samples, chunks, checksum, crc = _HEADER.unpack_from(head)
    if magic != _MAGIC:
        raise CodecError(f"malformed frame: it starts with {magic!r}; accepted: {_MAGIC!r}")
    if byte_order != _BYTE_ORDER:
        raise CodecError(f"the frame was written in another byte order than this machine's ({sys.byteorder}-endian)")
    if version != _VERSION:
        raise CodecError(f"the frame has version {version}; this release reads version {_VERSION}")
    if zlib.crc32(head[: _HEADER.size - 4]) != crc or any(head[_HEADER.size :]):
        raise CodecError("malformed frame: the header changed on the way")
    if nbytes != frame.size:
        raise CodecError(f"malformed frame: {frame.size} bytes arrived of the {nbytes} that were sent")
    if checksum_of(frame[HEADER_NBYTES:]) != checksum:
        raise CodecError("malformed frame: the body changed on the way (its checksum differs)")
    if samples > frame.size or chunks > frame.size:
        raise CodecError(f"malformed frame: {samples} samples in {chunks} chunks within {frame.size} bytes")
    return samples, chunks


def read_chunks(frame: Bytes, chunks: int) -> Iterator[tuple[int, bytes, list[Bytes]]]:
    """For each chunk its number of samples, its structure and its blocks, all within the frame.

    Raises:
        CodecError: a length does not fit the frame, or bytes are left.
    """
    start = HEADER_NBYTES
    for _ in range(chunks):
        if frame.size - start < _CHUNK.size:
            raise CodecError("malformed frame: it ends within a chunk")
        nbytes, samples, structure, blocks = _CHUNK.unpack_from(frame.data, start)
        if nbytes > frame.size - start or structure + 8 * blocks + _CHUNK.size > nbytes or samples > nbytes:
            raise CodecError("malformed frame: a chunk's lengths do not fit the frame")
        yield samples, *_read_parts(frame[start : start + nbytes], structure, blocks)
        start += nbytes
    if start != frame.size:
        raise CodecError(f"malformed frame: {frame.size - start} bytes behind its last chunk")


def _read_parts(chunk: Bytes, structure: int, blocks: int) -> tuple[bytes, list[Bytes]]:
    text = _CHUNK.size + 8 * blocks
    lengths = chunk[_CHUNK.size : text].view(np.int64).tolist()
    start, parts = aligned(text + structure), []
    for nbytes in lengths:
        if not 0 <= nbytes <= chunk.size - start:
            raise CodecError("malformed frame: a block reaches beyond its chunk")
        parts.append(chunk[start : start + nbytes])
        start = aligned(start + nbytes)
    if start != chunk.size:
        raise CodecError("malformed frame: a chunk is longer than its blocks")
    return chunk[text : text + structure].tobytes(), parts
