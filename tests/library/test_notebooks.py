"""Notebooks of `examples/` run in a real Jupyter kernel; and what a class of a notebook can and cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
CELL_S = 240


RUN = """\
import sys
import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

read, written, folder, seconds = sys.argv[1:]
notebook = nbformat.read(read, as_version=4)
manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/kernel")  # opens no port
NotebookClient(notebook, km=manager, timeout=int(seconds)).execute()
nbformat.write(notebook, written)
"""


def executed(path, folder):
    """The notebook with its outputs, run in `folder` by a client in a process of its own; a cell that raises fails."""
    own = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **own, "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-W", "ignore", "-c", RUN, path, folder / "executed.ipynb", folder, str(CELL_S)]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=5 * CELL_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "executed.ipynb").read_text())


def said(notebook):
    """All that the cells printed and showed, HTML where there is some."""
    outputs = [one for cell in notebook["cells"] for one in cell.get("outputs", ())]
    shown = [one.get("text") or one["data"].get("text/html") or one["data"].get("text/plain", "") for one in outputs]
    return "\n".join("".join(one) for one in shown)


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_its_verdict(path, tmp_path):
    shown = said(executed(path, tmp_path))
    assert "<table>" in shown
    assert "bottleneck" in shown
    assert "ipywidgets" not in shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []


IN_A_CELL = """\
import torch, gpuinfer

class Doubled(torch.nn.Module):
    def forward(self, rows):
        return rows * 2

with gpuinfer.Batcher(Doubled()) as batcher:
    print(batcher.predict(torch.ones(2)).tolist(), (await batcher(torch.ones(2))).tolist())
    print(repr(batcher))
async with gpuinfer.Batcher(Doubled()) as batcher:
    print((await batcher(torch.zeros(2))).tolist())
for model in (Doubled(), Doubled, lambda rows: rows):
    try:
        gpuinfer.Batcher(model, backend="central")
    except gpuinfer.errors.UsageError as error:
        print(error)
"""


@pytest.mark.thorough
def test_a_class_of_a_cell_works_in_process_and_another_process_is_told_why_not(tmp_path):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": IN_A_CELL, "outputs": [], "execution_count": None}
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "own.ipynb").write_text(json.dumps(notebook))
    lines = said(executed(tmp_path / "own.ipynb", tmp_path)).splitlines()
    assert lines[:3] == [
        "[2.0, 2.0] [2.0, 2.0]",
        "<gpuinfer.Batcher of Doubled on inprocess, open, rows of float32 [2]>",
        "[0.0, 0.0]",
    ]
    why = "class 'Doubled' is defined in a notebook or at a prompt, and another process cannot import it from there."
    assert [line.startswith(why) for line in lines[3:]] == [True, True, False]
    assert lines[5].startswith("a lambda cannot be imported by another process. Write it to a file, such as nets.py")
    assert "from nets import Doubled" in lines[3]
