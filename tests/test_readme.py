"""Every Python block of the README runs as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0][:40])
def test_block(block: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block)
    launched = re.match(r"# \S+: torchrun --nproc-per-node (\d+)", block)
    command = [sys.executable, str(program)]
    if launched:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", launched[1]]
        command = [sys.executable, *torchrun, str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 2
