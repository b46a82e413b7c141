"""Model-parallel broadcast: every model peer gets its constructor's micro-batch, when it is consumed.

On a constructor: takes micro-batches, gives the same ones, and sends each to the peers. On a peer: has no source and
gives what arrives. Communicates within the model-parallel group, over two transports:

* a header of fixed size on the first: status, place, sizes that may change, host values, boundary state, and the layout
  of the micro-batch where it is not known beforehand and has changed. What does not fit the header follows it, and so
  do tensors that stay on the host.
* all other tensors as one buffer on the second. Where they are on a device that is a
  :class:`~hp_nodes.transport.TensorTransport` of its own backend: the buffer is on the device, and so is what the peers
  get. Tensors that are not on that device stay on the host.

Adds no entry of its own; with each micro-batch that ends a step the constructor sends its state, so a peer's state is
the constructor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from hp_nodes.errors import DataPlaneError, exchanging, failing_at
from hp_nodes.nodes.batch_layout import BatchLayout, elsewhere, skeleton
from hp_nodes.nodes.delivery import Delivery, Message, header_of
from hp_nodes.nodes.graph import NODES_KEY
from hp_nodes.nodes.host_prefetcher import announce
from hp_nodes.nodes.run_ahead import again, is_interruption
from hp_nodes.nodes.stage import Stage
from hp_nodes.nodes.window_sampler import next_epoch
from hp_nodes.plain import from_text, to_text
from hp_nodes.transport import Transport
from hp_nodes.transport.codec import Codec
from hp_nodes.transport.opening import Status
from hp_nodes.types import MicroBatch

__all__ = ["ModelParallelBroadcaster"]


class ModelParallelBroadcaster(Stage[MicroBatch]):
    """The constructor's micro-batches on every rank of its model-parallel group.

    Args:
        source: gives micro-batches; None on a peer.
        transport: of the model-parallel group, the constructor at place 0.
        spec: nested dict, list or tuple whose leaves are :class:`TensorFieldSpec`, ``int`` for a host value that may
            change, or static values: the same on every rank, and then no names or dtypes are sent. None: the layout is
            sent along, and again only when it changes.
        tensors: another transport of the same ranks, for tensors; None: the first carries them too. A
            :class:`~hp_nodes.transport.TensorTransport` carries those of its device from there.
        allow_pickle: let static values travel that the codec does not know.
        initial_state: on a peer, the state its constructor's graph starts with.

    Raises:
        ValueError: a constructor without a source, a peer with one, or a malformed spec.
        DataPlaneError: (on ``next``) what the constructor raised, or a micro-batch does not fit the spec.
    """

    communicates = True

    def __init__(
        self,
        source: BaseNode[MicroBatch] | None,
        transport: Transport,
        spec: Any = None,
        *,
        tensors: Transport | None = None,
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
        self._known = None if spec is None else BatchLayout(spec)
        self._delivery = Delivery(transport, tensors or transport, self.name)
        self._told: dict[str, Any] = dict(initial_state or {})
        self._layout = self._known
        self._layout_sent = b""
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
            if not is_interruption(error):
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

    # ---- on a constructor

    def _send(self) -> MicroBatch:
        try:
            batch: MicroBatch = self.pull()
            if self.transport.size == 1:
                return batch
            message = self._message(batch)
        except StopIteration:
            self._tell(Message(header_of(Status.END)))
            raise
        except BaseException as failure:
            if self.transport.size > 1 and not is_interruption(failure):
                failure = self._common(failure)
            raise failure
        self._tell(message)
        return batch

    def _message(self, batch: MicroBatch) -> Message:
        """A micro-batch, ready to be sent: nothing that can fail here is left for later."""
        with failing_at(self.name, epoch=batch.epoch, step=batch.step):
            state = to_text(super().source_state()).encode() if batch.ends_step else b""
            layout, described = self._described(batch.data)
            changed = described if described != self._layout_sent else b""
            device = self._delivery.device
            taken = layout.take_apart(batch.data, device)
            message = Message(header_of(Status.WINDOW, batch), changed, state, *taken, layout.fields, device)
        self._layout, self._layout_sent = layout, described
        return message

    def _described(self, data: Any) -> tuple[BatchLayout, bytes]:
        """The layout of a micro-batch, and what describes it to the peers; nothing where they know it."""
        if self._known is not None:
            return self._known, b""
        device = self._delivery.device
        on_host = [] if device is None else elsewhere(data, device)
        told = [skeleton(data), on_host] if on_host else [skeleton(data)]
        described = self.codec.frame(told).to_array().tobytes()
        if self._layout is not None and described == self._layout_sent:
            return self._layout, described
        return BatchLayout.of(data, on_host), described

    def _common(self, failure: BaseException) -> DataPlaneError:
        """Tell the peers of a failure; the other constructors, when they do not know of it, by the next exchange."""
        error = DataPlaneError.of(failure, rank=self.transport.global_ranks[0], node=self.name)
        if error is not failure:
            error.__cause__ = failure
        self._tell(Message(header_of(Status.ERROR), text=error.to_bytes()))
        if not error.agreed:
            announce(self, error)
        return error

    def _tell(self, message: Message) -> None:
        if self.transport.size > 1:
            with exchanging(self.name):
                self._delivery.send(message)

    # ---- on a peer

    def _receive(self) -> MicroBatch:
        with exchanging(self.name):
            arrival = self._delivery.receive()
        if arrival.status == Status.END:
            raise StopIteration
        if arrival.status == Status.ERROR:
            error = DataPlaneError.from_bytes(arrival.text.tobytes())
            error.agreed = True
            raise error
        if len(arrival.layout):
            self._layout = BatchLayout.of(*self.codec.decode(np.array(arrival.layout)))
        if len(arrival.text):
            self._told = from_text(arrival.text.tobytes().decode())
        assert self._layout is not None, "the first micro-batch brings the layout where there is no spec"
        with exchanging(self.name):
            tensors = self._delivery.receive_tensors(arrival, self._layout)
        return arrival.micro_batch(self._layout.put_together(tensors, arrival.numbers))
