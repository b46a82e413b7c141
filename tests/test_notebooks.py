"""Every notebook runs from its first cell to its last, as a reader would run it, and keeps small outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDED = {"02": ["matplotlib"], "04": ["pyarrow"]}
LARGEST_KIB = 120
FOREVER = "def forever(mesh):\n    while True:\n        pass"


def outputs_of(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in NEEDED.get(path.stem[:2], []):
        pytest.importorskip(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    notebook = nbformat.read(path, as_version=4)
    kept = [kinds_of(output) for output in outputs_of(notebook)]
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    ran = outputs_of(notebook)
    texts = [output.get("text", "") for output in ran]
    # Each says with a line of its own that what it promises holds.
    assert not any(text.rstrip().endswith(": False") for text in texts), texts
    assert {kind for output in ran for kind in kinds_of(output)} >= {kind for kinds in kept for kind in kinds}


def kinds_of(output: Any) -> tuple[str, ...]:
    return tuple(sorted(output.get("data", {})))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_small(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < LARGEST_KIB * 1024
    assert any(cell.get("outputs") for cell in notebook["cells"])
    assert not [output for cell in notebook["cells"] for output in cell.get("outputs", []) if "ename" in output]
    assert "/tmp/" not in path.read_text()


def test_there_are_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


def test_the_stop_button_ends_virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a notebook server does when it is pressed, to a kernel whose ranks compute without an end."""
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
    try:
        client.execute_interactive(f"from hp_nodes.transport import run_ranks\n{FOREVER}", timeout=60)
        endless = client.execute("print('running', flush=True)\nrun_ranks({'dp': 4}, forever)")
        while client.get_iopub_msg(timeout=30)["content"].get("text", "").strip() != "running":
            pass
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=15)
        while reply["parent_header"].get("msg_id") != endless:
            reply = client.get_shell_msg(timeout=15)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        left = client.execute_interactive(
            "import threading\nassert not [t for t in threading.enumerate() if t.name.startswith('rank ')]", timeout=30
        )
        assert left["content"]["status"] == "ok"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
