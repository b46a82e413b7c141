"""The pause ends with the last one who asked for it, and a program's own choice about its collector is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from hp_nodes.transport.codec import Codec, CodecError
from hp_nodes.transport.codec_pause import collector_paused


@pytest.fixture(autouse=True)
def _own_collector() -> Iterator[None]:
    enabled, threshold = gc.isenabled(), gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()


def test_coding_leaves_the_collector_as_it_was() -> None:
    gc.set_threshold(500, 7, 8)
    codec = Codec()
    codec.decode(codec.frame([torch.arange(3)] * 3).to_array())
    with pytest.raises(CodecError):
        codec.frame([{1}])
    with pytest.raises(CodecError):
        codec.decode(codec.frame([1]).to_array()[:64])
    assert gc.isenabled() and gc.get_threshold() == (500, 7, 8)


def test_nothing_is_collected_within_and_the_last_one_out_ends_the_pause() -> None:
    threshold, runs = gc.get_threshold(), gc.get_stats()[0]["collections"]
    with collector_paused():
        with collector_paused():
            kept = [[i] for i in range(20_000)]
        kept += [[i] for i in range(20_000)]
        assert gc.get_stats()[0]["collections"] == runs
    assert gc.get_threshold() == threshold and len(kept) == 40_000


def test_a_choice_made_meanwhile_is_kept() -> None:
    with collector_paused():
        gc.disable()
        gc.set_threshold(123, 4, 5)
    assert not gc.isenabled() and gc.get_threshold() == (123, 4, 5)


def test_a_received_buffer_is_freed_with_its_samples_though_no_collection_runs() -> None:
    buffer = Codec().frame([{"x": torch.arange(3)}, [torch.ones(2)]]).to_array()
    gone = weakref.ref(buffer)
    gc.disable()
    try:
        samples = Codec().decode(buffer)
        del buffer
        assert gone() is not None
        del samples
        assert gone() is None
    finally:
        gc.enable()
