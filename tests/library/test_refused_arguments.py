"""Arguments of the Python names that cannot be: each an error that says what, and ends with the cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpuinfer
from gpuinfer.errors import UsageError

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
