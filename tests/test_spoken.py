"""Exceptions and objects whose words raise, or cannot be written down, are told of all the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from evil import Few
from helpers import AtOnce

from gpuinfer.api import Backend, Limits
from gpuinfer.config import blame
from gpuinfer.errors import BackendError
from gpuinfer.host import error_text
from gpuinfer.host.error_text import error_from_wire, error_to_wire
from gpuinfer.runtime.run import run
from gpuinfer.testing import check_backend

EVIL = """
class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("nobody may say it")
    __repr__ = __str__
"""
made = {}
exec(EVIL, made)  # noqa: S102  as the modules below have it
Unspeakable = made["Unspeakable"]


class Leaving(Exception):
    def __str__(self):
        sys.exit(3)


class Numeric(Exception):
    def __str__(self):
        return 5


class Loud(str):
    def __str__(self):
        return self

    def strip(self, *arguments):
        raise RuntimeError("let me be")


class Ours(BackendError):
    """Of a stranger, and of our kind."""

    __str__ = Unspeakable.__str__


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(ValueError("one\ntwo."), "ValueError: one", id="as usual"),
        pytest.param(ValueError(), "ValueError", id="without a word"),
        pytest.param(Unspeakable(), "Unspeakable: <Unspeakable whose str() raises RuntimeError>", id="raises"),
        pytest.param(Leaving(), "Leaving: <Leaving whose str() raises SystemExit>", id="leaves"),
        pytest.param(Numeric(), "Numeric: <Numeric whose str() raises TypeError>", id="no text"),
        pytest.param(ValueError(Loud("loud")), "ValueError: loud", id="a text with methods of its own"),
        pytest.param(ValueError("half \ud800"), "ValueError: half ?", id="half a character"),
        pytest.param(KeyError(Unspeakable()), "KeyError: <KeyError whose str() raises RuntimeError>", id="of others"),
    ],
)
def test_an_exception_is_told_in_one_line_whatever_its_words_do(error, words):
    assert error_text.short_message(error) == words


def test_words_without_end_are_cut():
    assert len(error_text.safe_str(ValueError("x" * 10_000_000))) < 2 * error_text.LONGEST_TEXT


def test_an_error_of_ours_that_a_stranger_derived_goes_over_the_wire():
    told = error_from_wire(json.loads(json.dumps(error_to_wire(Ours("x")))))
    assert isinstance(told, BackendError)
    assert "whose str() raises" in str(told)


class Silent(Backend):
    limits = Limits(8)

    async def infer(self, batch):
        raise Unspeakable


def test_a_run_names_the_plugin_that_raised_it():
    with pytest.raises(BackendError, match="infer raised Unspeakable"):
        run(Few(), Silent(), AtOnce(), roofline=False, update_s=0.02)
    assert "start raised Unspeakable" in str(blame.raised_by(Silent(), "start", Unspeakable()))


def test_the_kit_goes_on_to_its_end():
    findings = check_backend(Silent)
    assert "raised Unspeakable" in str([finding.detail for finding in findings])
    assert findings[-1].name == "closes"


SOURCES = {
    "at its import": f"{EVIL}\nraise Unspeakable",
    "when it is built": f"{EVIL}\ndef made(*_, **__):\n    raise Unspeakable",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["selfplay", "--model", "unspeakable:made", "--games", "1", "--no-roofline"], id="a model"),
        pytest.param(["selfplay", "--game", "unspeakable:made", "--model", "uniform"], id="a game"),
        pytest.param(["rollouts", "--env", "unspeakable:made", "--model", "null"], id="an environment"),
    ],
)
def test_a_module_that_raises_it_ends_a_command_as_any_other(words, source, tmp_path: Path, monkeypatch, gpuinfer):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "unspeakable", raising=False)
    Path("unspeakable.py").write_text(source)
    code, _, said = gpuinfer(*words)
    assert code in (1, 2), said
    assert "\ngpuinfer: " in f"\n{said}"
    assert "Traceback" not in said
