"""Model-parallel broadcast: every model peer gets its constructor's micro-batch, when it is consumed.

On a constructor: takes micro-batches, gives the same ones, and sends each to the peers. On a peer: has no source and
gives what arrives. Communicates within the model-parallel group: a small fixed header (status, place, sizes), then one
body. Adds no entry of its own; with each micro-batch that ends a step the constructor sends its state, so a peer's
state is the constructor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, exchanging, failing_at
from hp_nodes.nodes.graph import NODES_KEY
from hp_nodes.nodes.host_prefetcher import announce
from hp_nodes.nodes.run_ahead import again
from hp_nodes.nodes.stage import Stage
from hp_nodes.nodes.window_sampler import next_epoch
from hp_nodes.plain import from_text, to_text
from hp_nodes.transport import Transport
from hp_nodes.transport.codec import Codec, Frame
from hp_nodes.transport.opening import Status
from hp_nodes.types import MicroBatch

__all__ = ["ModelParallelBroadcaster"]

_FIELDS = 10  # status, epoch, step, round, flags, tokens, label tokens, bytes of frame, of state, of error


class ModelParallelBroadcaster(Stage[MicroBatch]):
    """The constructor's micro-batches on every rank of its model-parallel group.

    Args:
        source: gives micro-batches; None on a peer.
        transport: of the model-parallel group, the constructor at place 0.
        allow_pickle: let batches travel that the codec does not know.
        initial_state: on a peer, the state its constructor's graph starts with.

    Raises:
        ValueError: a constructor without a source, or a peer with one.
        DataPlaneError: (on ``next``) what the constructor raised.
    """

    communicates = True

    def __init__(
        self,
        source: BaseNode[MicroBatch] | None,
        transport: Transport,
        *,
        allow_pickle: bool = False,
        initial_state: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(source, name=name)
        if (source is None) == (transport.rank == 0):
            role = "the constructor needs a source" if source is None else "a model peer has no source"
            raise ValueError(f"{self.name} at place {transport.rank} of its group: {role}")
        self.transport = transport
        self.codec = Codec(allow_pickle=allow_pickle)
        self._told: dict[str, Any] = dict(initial_state or {})
        self._delivered = False
        self._end: BaseException | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        if self.source is None:
            self._reset_peer(initial_state)
            initial_state = None
        super().reset(initial_state)
        self._end = None

    def source_state(self) -> dict[str, Any]:
        return dict(self._told) if self.source is None else super().source_state()

    def next(self) -> MicroBatch:
        if self._end is not None:
            raise again(self._end)
        try:
            batch = self._receive() if self.source is None else self._send()
        except BaseException as error:
            self._end = error
            raise
        self._delivered = True
        return self.give(batch)

    def _reset_peer(self, initial_state: Mapping[str, Any] | None) -> None:
        """The constructor's graph is reset the same way; what it will report from there is known here."""
        if initial_state is not None:
            if not isinstance(initial_state.get(NODES_KEY), Mapping):
                raise ValueError(f"{self.name}: {initial_state!r} is not a state")
            self._told = dict(initial_state[NODES_KEY])
        elif self._delivered:
            self._told = next_epoch(self._told)
        self._delivered = False

    def _send(self) -> MicroBatch:
        try:
            batch: MicroBatch = self.pull()
            if self.transport.size == 1:
                return batch
            frame, state = self._encoded(batch)
        except StopIteration:
            self._tell(np.array([Status.END], dtype=np.int64))
            raise
        except BaseException as failure:
            if self.transport.size > 1:
                failure = self._common(failure)
            raise failure
        body = np.empty(frame.nbytes + len(state), dtype=np.uint8)
        frame.write_into(body[: frame.nbytes])
        body[frame.nbytes :] = np.frombuffer(state, dtype=np.uint8)
        self._tell(_header(batch, frame.nbytes, len(state)), body)
        return batch

    def _encoded(self, batch: MicroBatch) -> tuple[Frame, bytes]:
        with failing_at(self.name, epoch=batch.epoch, step=batch.step):
            state = to_text(super().source_state()).encode() if batch.ends_step else b""
            return self.codec.frame([batch.data]), state

    def _common(self, failure: BaseException) -> DataPlaneError:
        """Tell the peers of a failure; the other constructors, when they do not know of it, by the next exchange."""
        error = DataPlaneError.of(failure, rank=self.transport.global_ranks[0], node=self.name)
        if error is not failure:
            error.__cause__ = failure
        text = error.to_bytes()
        header = np.zeros(_FIELDS, dtype=np.int64)
        header[0], header[9] = Status.ERROR, len(text)
        self._tell(header, np.frombuffer(text, dtype=np.uint8).copy())
        if not error.agreed:
            announce(self, error)
        return error

    def _tell(self, header: NDArray[np.int64], body: NDArray[np.uint8] | None = None) -> None:
        if self.transport.size == 1:
            return
        sent = np.zeros(_FIELDS, dtype=np.int64)
        sent[: len(header)] = header
        with exchanging(self.name):
            self.transport.broadcast(sent.view(np.uint8), 0, f"{self.name}: header")
            if body is not None and len(body):
                self.transport.broadcast(body, 0, f"{self.name}: body")

    def _receive(self) -> MicroBatch:
        header = np.zeros(_FIELDS, dtype=np.int64)
        with exchanging(self.name):
            self.transport.broadcast(header.view(np.uint8), 0, f"{self.name}: header")
        frame_nbytes, state_nbytes, error_nbytes = (int(size) for size in header[7:10])
        body = np.empty(error_nbytes or (frame_nbytes + state_nbytes), dtype=np.uint8)
        if len(body):
            with exchanging(self.name):
                self.transport.broadcast(body, 0, f"{self.name}: body")
        if header[0] == Status.END:
            raise StopIteration
        if header[0] == Status.ERROR:
            error = DataPlaneError.from_bytes(body.tobytes())
            error.agreed = True
            raise error
        if state_nbytes:
            self._told = from_text(body[frame_nbytes:].tobytes().decode())
        return _micro_batch(header, self.codec.decode(body[:frame_nbytes])[0])


def _header(batch: MicroBatch, frame_nbytes: int, state_nbytes: int) -> NDArray[np.int64]:
    flags = int(batch.ends_window) + 2 * int(batch.ends_step) + 4 * int(batch.ends_epoch)
    tokens = -1 if batch.num_tokens is None else batch.num_tokens
    labels = -1 if batch.num_label_tokens is None else batch.num_label_tokens
    values = [Status.WINDOW, batch.epoch, batch.step, batch.round, flags, tokens, labels, frame_nbytes, state_nbytes, 0]
    return np.array(values, dtype=np.int64)


def _micro_batch(header: NDArray[np.int64], data: Any) -> MicroBatch:
    _, epoch, step, number, flags, tokens, labels = (int(value) for value in header[:7])
    return MicroBatch(
        data=data,
        epoch=epoch,
        step=step,
        round=number,
        ends_window=bool(flags & 1),
        ends_step=bool(flags & 2),
        ends_epoch=bool(flags & 4),
        num_tokens=None if tokens < 0 else tokens,
        num_label_tokens=None if labels < 0 else labels,
    )
