"""Examples run as they are, plugins of pages keep the contract, and what pages quote of them is what they say."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.config.registry import KINDS
from gpuinfer.generation import Prompt
from gpuinfer.testing import FakeInfer, assert_ok, check_backend
from gpuinfer.testing.fakes import made_up
from gpuinfer.testing.packages import CHECKS

ROOT = Path(__file__).parent.parent
CLIENT = ROOT / "examples" / "central_client.py"
PLUGINS = (ROOT / "docs" / "plugins.md").read_text()
MODEL = Setup(model=ModelSpec("gpuinfer.testing.fakes:tiny_model", inputs=8), devices=("cpu",))


def quoted(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)


def bare(text: str) -> str:
    """The text without blank lines and without indentation, which depends on what is around it."""
    return "\n".join(["", *(line.strip() for line in text.splitlines() if line.strip()), ""])


@pytest.mark.thorough
def test_the_central_client_runs_in_silence_but_for_what_it_did_and_its_page_quotes_it_as_it_is(tmp_path):
    words = [sys.executable, str(CLIENT)]  # a user's program need not lie where it is started
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    *workers, last = done.stdout.splitlines()
    assert last == "3 workers, 63 requests, 30,723 rows, one model"
    assert sorted(re.sub(r"[-\d.]+$", "X", line) for line in workers if line.startswith("worker ")) == [
        f"worker {number}: 10,241 rows asked for, the best is rated X" for number in range(3)
    ]
    told = [line for line in done.stderr.splitlines() if line]
    assert told[0].startswith("gpuinfer server: 63 requests, 30,723 rows in ")
    assert len(told) == 3
    blocks = quoted((ROOT / "docs" / "central.md").read_text())
    assert blocks
    assert [block for block in blocks if bare(block) not in bare(CLIENT.read_text())] == []


def test_the_plugins_of_the_page_keep_the_contract_and_the_page_names_every_check(capsys, monkeypatch):
    """All Python of the page, run from top to bottom as one module; its own asserts hold."""
    page = types.ModuleType("docs_plugins")
    monkeypatch.setitem(sys.modules, page.__name__, page)
    exec(compile("\n".join(quoted(PLUGINS)), "plugins.md", "exec"), page.__dict__)  # noqa: S102
    assert_ok(check_backend(page.Poet))
    assert_ok(check_backend(lambda: page.OneByOne(MODEL)))
    capsys.readouterr()
    prompt = Prompt(text="x", key="k")
    answer = asyncio.run(page.tell(FakeInfer(lambda request: made_up(request.payload)), prompt))
    assert answer == made_up(prompt)
    assert capsys.readouterr().out == answer.completions[0].text
    table = PLUGINS.partition("| of | is tried |")[2]
    assert [kind for kind in CHECKS if not re.search(rf"^\| an? {KINDS[kind]} \|", table, re.M)] == []
