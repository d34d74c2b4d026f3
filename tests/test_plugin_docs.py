"""The examples of docs/plugins.md keep the contract that the page describes."""

from __future__ import annotations

import asyncio
import re
import sys
import types
from pathlib import Path

import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Prompt
from gpuinfer.testing import FakeInfer, assert_ok, check_backend
from gpuinfer.testing.fakes import made_up

PAGE = Path(__file__).parent.parent / "docs" / "plugins.md"
MODEL = Setup(model=ModelSpec("gpuinfer.testing.fakes:tiny_model", inputs=8), devices=("cpu",))


@pytest.fixture(scope="module")
def page():
    """All Python of the page, run from top to bottom as one module; its own asserts hold."""
    module = types.ModuleType("docs_plugins")
    sys.modules[module.__name__] = module
    source = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    exec(compile(source, str(PAGE), "exec"), module.__dict__)  # noqa: S102
    yield module
    del sys.modules[module.__name__]


def test_the_backend_of_text_keeps_the_contract(page):
    assert_ok(check_backend(page.Poet))


def test_an_answer_is_told_as_it_grows(page, capsys):
    prompt = Prompt(text="x", key="k")
    answer = asyncio.run(page.tell(FakeInfer(lambda request: made_up(request.payload)), prompt))
    assert answer == made_up(prompt)
    assert capsys.readouterr().out == answer.completions[0].text


def test_the_backend_with_the_runs_model_keeps_the_contract(page):
    assert_ok(check_backend(lambda: page.OneByOne(MODEL)))


def test_the_page_names_every_check_that_is_made_of_a_kind(page):
    from gpuinfer.config.registry import KINDS
    from gpuinfer.testing.packages import CHECKS

    table = PAGE.read_text().partition("| of | is tried |")[2]
    assert [kind for kind in CHECKS if not re.search(rf"^\| an? {KINDS[kind]} \|", table, re.M)] == []
