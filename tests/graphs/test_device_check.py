"""The program that checks a device, run on the stand-in; and what it says where there is no device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphs import device_check
from graphs.device_assertions import ASSERTIONS


def test_every_assertion_and_figure_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main(["--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert all(f"{name} " in table for name in ASSERTIONS)
    for figure in (
        "transport of data",
        "transport of tensors",
        "waits for data",
        "plain DataLoader",
        "bare pinned copy",
        "host synchronisations",
        "pinned memory",
    ):
        assert figure in table
    assert "0 of these are not as promised" in table


def test_a_promise_that_is_broken_is_told_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(open_device: Any) -> None:
        raise AssertionError("a byte was wrong")

    monkeypatch.setattr(device_check, "ASSERTIONS", {"it holds": broken})
    monkeypatch.setattr(device_check, "figures", lambda *more, **options: iter(()))
    assert device_check.main(["--device", "cpu"]) == 1
    assert "AssertionError: a byte was wrong" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert device_check.main(["--device", "cuda"]) == 2
    assert "finds no device" in capsys.readouterr().err
