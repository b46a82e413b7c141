"""Every Python block of every documentation page runs as printed, and every link leads to something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "graphs/README.md",
    "hp_nodes/nodes/README.md",
    "hp_nodes/planning/README.md",
    "hp_nodes/transport/README.md",
    "notebooks/README.md",
]
PAGES = [page for page in PAGES if (ROOT / page).exists()]
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block)
    launched = re.match(r"# \S+: torchrun --nproc-per-node (\d+)", block)
    command = [sys.executable, str(program)]
    if launched:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", launched[1]]
        command = [sys.executable, *torchrun, str(program)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not ((ROOT / page).parent / target).exists()]
    assert not missing


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 2
    assert "README.md" in PAGES
