"""The demonstration, whole but small: real processes under torchrun, killed and resumed, with its table and picture."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from graphs import demo


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo, "DIRECTORY", tmp_path / "demo")
    monkeypatch.setattr(demo, "RECORDS", tmp_path / "demo.records")
    (tmp_path / "text").mkdir()
    for number in range(300):
        (tmp_path / "text" / f"{number:03d}.txt").write_text("for x in range(10): return x\n" * (number % 7 + 1))
    monkeypatch.setattr(demo, "standard_library", lambda: tmp_path / "text")
    monkeypatch.setattr(demo, "VOCABULARY", 270)
    monkeypatch.setattr(demo, "SIZES", demo.SIZES | {"text": tmp_path / "text", "seq-len": 256, "global-batch-size": 4})
    return tmp_path / "demo"


@pytest.mark.slow
def test_the_demo_resumes_exactly_and_shows_it(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    demo.main()
    told = capfd.readouterr().out
    assert "10 of 10 identical to the last bit" in told
    assert re.search(r"killed in step \d+, resumed behind step [48]", told)
    for row in ("step, predicted", "step, measured", "waiting for others", "loss of the same steps"):
        assert row in told
    assert (small / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("missing", ["matplotlib", "tokenizers"])
def test_without_its_packages_the_extra_is_named(small: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"{missing}.*hp-nodes\[demo\]"):
        demo.main()
    assert not small.exists()
