"""The wire format of samples: what a sample may be made of, and how samples become one buffer of bytes and back.

Takes samples (nested dicts, lists, tuples, named tuples and dataclasses of tensors, numpy arrays and plain values),
gives a :class:`Frame` that encodes them straight into a send buffer; the other way round gives samples whose tensors
and arrays are views of the receive buffer. So payload is copied once on each side of the wire, or not at all.

Promises:

* A sample comes back as it was: types, containers, key order, dtypes, shapes, every bit of every number. Tensors and
  arrays come back contiguous and writable. (Two fields that shared one tensor come back as two tensors.)
* What cannot come back like that is refused by ``frame`` and ``check``, before anything is written, with its path.
* A frame that is not exactly what a codec wrote is refused: a :class:`CodecError`, never a wrong value.
* Nothing is pickled, and nothing unpickled, without ``allow_pickle=True``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hp_nodes.transport.codec_checksum import Checksum
from hp_nodes.transport.codec_decode import ColumnDecoder, read_structure
from hp_nodes.transport.codec_encode import ColumnEncoder
from hp_nodes.transport.codec_frame import (
    ALIGNMENT,
    HEADER_NBYTES,
    Bytes,
    ChunkLayout,
    CodecError,
    Where,
    read_chunks,
    read_header,
    write_header,
)
from hp_nodes.transport.codec_pause import collector_paused
from hp_nodes.transport.send_buffer import SendBuffer

__all__ = ["Codec", "CodecError", "Frame"]

_CHUNK_SAMPLES = 1024
# Samples that are taken apart together: enough to spread the cost of a chunk (some 100 µs), few enough that the objects
# passed over several times stay in the processor's cache (all of 65,536 at once took twice as long a sample) and that
# what is put together of small tensors takes no memory that counts.


class Frame:
    """Encoded samples, not yet written: their layout is known, their bytes are still where they were.

    Attributes:
        nbytes: length of the frame; a multiple of 64.
        sizes: int64[samples], bytes of payload of each sample.
    """

    def __init__(self, chunks: list[ChunkLayout], sizes: NDArray[np.int64]) -> None:
        self._chunks = chunks
        self.sizes = sizes
        self.nbytes = HEADER_NBYTES + sum(chunk.nbytes for chunk in chunks)

    def write_into(self, buffer: Bytes) -> None:
        """Write the frame.

        Args:
            buffer: contiguous uint8[nbytes].

        Raises:
            ValueError: the buffer has another dtype or length.
        """
        if buffer.dtype != np.uint8 or buffer.shape != (self.nbytes,) or not buffer.flags.c_contiguous:
            raise ValueError(f"buffer is {buffer.dtype}{list(buffer.shape)}; accepted: contiguous uint8[{self.nbytes}]")
        start, checksum = HEADER_NBYTES, Checksum()
        for chunk in self._chunks:
            chunk.write(buffer[start : start + chunk.nbytes])
            start += chunk.nbytes
            checksum.add(buffer[HEADER_NBYTES:], start - HEADER_NBYTES)
        write_header(buffer, len(self.sizes), len(self._chunks), checksum.of(buffer[HEADER_NBYTES:]))

    def to_array(self) -> Bytes:
        """The frame in a buffer of its own: uint8[nbytes]."""
        buffer = np.empty(self.nbytes, np.uint8)
        self.write_into(buffer)
        return buffer


class Codec:
    """Turns samples into frames and frames into samples. Holds no state: one codec serves any number of threads.

    Args:
        allow_pickle: pickle what is not supported otherwise, and unpickle what arrives pickled. Unpickling runs
            whatever code the sender chose.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle

    def frame(self, samples: Sequence[Any]) -> Frame:
        """Lay out a frame of these samples, in this order. They must not change before it is written.

        Raises:
            CodecError: a sample holds what cannot travel; ``error.sample`` is its place in ``samples``.
        """
        chunks, sizes = [], [np.zeros(0, np.int64)]
        with collector_paused():
            for chunk, part_sizes in self._chunks(samples):
                chunks.append(chunk)
                sizes.append(part_sizes)
        return Frame(chunks, np.concatenate(sizes))

    def encode(self, samples: Sequence[Any], into: SendBuffer) -> tuple[int, NDArray[np.int64]]:
        """Append a frame of these samples, each written while it is at hand: a third faster than ``frame`` and
        ``write_into`` where samples are small. A buffer that takes no more is left at what it holds.

        Returns:
            Bytes of the frame, and int64[samples] of payload of each sample.

        Raises:
            CodecError: as ``frame``; what was appended before is in the buffer.
        """
        start, nbytes, checksum, count = into.used, HEADER_NBYTES, Checksum(), 0
        sizes = [np.zeros(0, np.int64)]
        into.add(HEADER_NBYTES)
        with collector_paused():
            for chunk, part_sizes in self._chunks(samples):
                if count == 0:
                    into.expect(chunk.nbytes * len(samples) // len(part_sizes) + ALIGNMENT)
                if into.add(chunk.nbytes):
                    chunk.write(into.view(start + nbytes))
                    checksum.add(into.view(start + HEADER_NBYTES), nbytes + chunk.nbytes - HEADER_NBYTES)
                nbytes += chunk.nbytes
                count += 1
                sizes.append(part_sizes)
                del chunk  # before the next one is made
        if not into.overflowed:
            write_header(into.view(start), len(samples), count, checksum.of(into.view(start + HEADER_NBYTES)))
        return nbytes, np.concatenate(sizes)

    def _chunks(self, samples: Sequence[Any]) -> Iterator[tuple[ChunkLayout, NDArray[np.int64]]]:
        for first in range(0, len(samples), _CHUNK_SAMPLES):
            part = list(samples[first : first + _CHUNK_SAMPLES])
            encoder = ColumnEncoder(self._allow_pickle)
            structure, sizes = encoder.column(part, _sample_at(first))
            text = json.dumps(structure, separators=(",", ":")).encode("ascii")
            yield ChunkLayout(text, len(part), encoder.taken()), sizes

    def decode(self, buffer: Bytes | torch.Tensor) -> list[Any]:
        """The samples of a frame, in their order; tensors and arrays are views of ``buffer``.

        Args:
            buffer: uint8[nbytes], contiguous: a numpy array or a CPU tensor. Best aligned to 64 bytes: where an item
                would not be aligned to its own size, its column is copied. A read-only buffer is copied as a whole.

        Raises:
            CodecError: it is not a frame of this version, changed on the way, or holds classes or pickles that are not
                accepted here.
        """
        frame = _flat(buffer)
        count, chunks = read_header(frame)
        samples: list[Any] = []
        try:
            with collector_paused():
                for rows, structure, blocks in read_chunks(frame, chunks):
                    decoder = ColumnDecoder(blocks, frame.size, self._allow_pickle)
                    samples.extend(decoder.samples(read_structure(structure), rows))
        except CodecError:
            raise
        except Exception as error:
            # What a structure that no encoder wrote can set off: a missing block, a value of another type, a bad shape.
            raise CodecError(f"malformed frame: {type(error).__name__}: {error}") from error
        if len(samples) != count:
            raise CodecError(f"malformed frame: {len(samples)} samples; its header says {count}")
        return samples

    def check(self, sample: Any) -> None:
        """Raise what ``frame([sample])`` would raise.

        Raises:
            CodecError: the sample holds what cannot travel.
        """
        ColumnEncoder(self._allow_pickle).column([sample], _sample_at(0))

    def nbytes(self, sample: Any) -> int:
        """Bytes of payload of one sample, roughly: what a planner needs to prefer the smaller of two. Never raises."""
        return _payload_nbytes(sample)


def _sample_at(first: int) -> Where:
    return lambda row: (first + row, "sample")


def _flat(buffer: Bytes | torch.Tensor) -> Bytes:
    array = buffer.numpy() if isinstance(buffer, torch.Tensor) else buffer
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise CodecError(f"buffer is {array.dtype}{list(array.shape)}; accepted: contiguous uint8[n]")
    return array if array.flags.writeable else array.copy()


def _payload_nbytes(value: Any) -> int:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_payload_nbytes, value.values()))
    if isinstance(value, (list, tuple)):
        plain = bool(value) and isinstance(value[0], (int, float))  # a list of token ids is not walked
        return 8 * len(value) if plain else sum(map(_payload_nbytes, value))
    if hasattr(value, "__dataclass_fields__"):
        return sum(_payload_nbytes(getattr(value, name, None)) for name in value.__dataclass_fields__)
    return 8
