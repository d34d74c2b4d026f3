"""Arguments of the Python names: those that cannot be are errors that end with the cure, those that can are heeded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gpuinfer
from gpuinfer.errors import BadResult, UsageError

NET = torch.nn.Linear(3, 2)
ROW = torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: gpuinfer.Batcher(NET, devices=[]), r'devices=\[\] names none. Give "auto"'),
        (lambda: gpuinfer.serve(NET, example=ROW, port=70_000), "port=70000 is no port. Give a number from 1 to 65535"),
        (lambda: gpuinfer.serve(NET, example=ROW, port=-1), "port=-1 is no port. Give a number"),
        (lambda: gpuinfer.serve(NET, example=ROW, port="x"), "port='x' is no port. Give a number"),
        (lambda: gpuinfer.serve(NET, example=ROW, port=True), "port=True is no port. Give a number"),
        (lambda: gpuinfer.serve(NET, example=ROW, seed="x"), "seed='x' is no seed. Give a whole number from 0 on"),
        (lambda: gpuinfer.serve(NET, example=ROW, check="no"), "check='no' is of str. Give True or False"),
        (lambda: gpuinfer.serve(NET, example=ROW, name=3), "name=3 is of int. Give a text"),
        (lambda: gpuinfer.serve(NET, example=ROW, host=3), "host=3 is of int. Give an address"),
        (lambda: gpuinfer.serve(NET, example=ROW, ragged="yes"), "ragged='yes' is no choice. Give one of None, 'pad'"),
        (lambda: gpuinfer.serve("tiny", ragged="pad"), "is of models of rows. Give an example of one, or leave it out"),
        (lambda: gpuinfer.LLM("tiny", adapters="x"), "adapters='x' is no mapping. Give folders by name"),
        (
            lambda: gpuinfer.LLM("tiny").generate("a", choice=[]),
            r"choice=\[\] leaves no answer. Give one or more texts",
        ),
        (lambda: gpuinfer.LLM("tiny").chat(None), "messages=None are none. Give a text, or a list"),
        (lambda: gpuinfer.LLM("tiny").chat([1]), r"messages=\[1\] are none. Give a text, or a list"),
        (lambda: gpuinfer.SelfPlay("connect-four").play(1, out=""), "out='' names no folder. Give one"),
        (lambda: gpuinfer.GameRecords("/tmp"), "/tmp holds no records of games. Give a folder"),
        (lambda: gpuinfer.CentralServer(NET, example=ROW, max_row=3), "named 'max_row'. Did you mean 'max_rows'"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_with_the_cure(call, said):
    with pytest.raises(UsageError, match=said) as refused:
        call()
    assert str(refused.value).endswith((".", ". "))


PLAYS = """
import os, signal, sys, gpuinfer
records = gpuinfer.GameRecords.temporary()
print(records.path, flush=True)
if sys.argv[1:] == ["die"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporary_records_of_a_killed_program_go_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (others := tmp_path / "gpuinfer-games-of-mine").mkdir()

    def run(*words: str) -> Path:
        done = subprocess.run([sys.executable, "-c", PLAYS, *words], stdout=subprocess.PIPE, text=True, timeout=120)
        return Path(done.stdout.strip())

    left = run("die")
    assert left.is_dir()
    run()
    assert list(tmp_path.iterdir()) == [others]


def test_answers_of_a_model_by_name_go_unchecked_on_request(tmp_path, monkeypatch):
    module = (
        "import torch\n\n\nclass Inverse(torch.nn.Module):\n    def forward(self, rows):\n        return 1 / rows\n"
    )
    (tmp_path / "divided.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    zero = torch.zeros(2)
    with gpuinfer.Batcher("divided:Inverse", example=zero, check=False, threads=1) as batcher:
        assert torch.isinf(batcher.predict(zero)).all()
    with (
        gpuinfer.Batcher("divided:Inverse", example=zero, threads=1) as batcher,
        pytest.raises(BadResult, match="NaN or"),
    ):
        batcher.predict(zero)


def test_another_backend_has_flat_rows_as_arrays():
    """The echo of a plugin is what it was given."""
    rows = torch.arange(6.0).view(2, 3)
    with gpuinfer.Batcher(NET, backend="echo") as batcher:
        assert torch.equal(batcher.predict(rows[0]), rows[0])
        assert torch.equal(batcher.predict_batch(rows), rows)
        assert [one.tolist() for one in batcher.map(rows.numpy())] == rows.tolist()

    async def ask():
        async with gpuinfer.Batcher(NET, backend="echo") as batcher:
            return await batcher(rows[1].numpy())

    found = asyncio.run(ask())
    assert isinstance(found, np.ndarray)
    assert found.tolist() == rows[1].tolist()
