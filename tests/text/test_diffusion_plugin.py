"""A third party's decoder: found by its entry point and used like ours; and what the kit says of faulty ones."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from packages import install
from pydantic import ConfigDict
from text.diffusion_filling import filled
from text.diffusion_toy import MASK, Toy, prompt_of

from gpuinfer.config import registry
from gpuinfer.errors import PluginError
from gpuinfer.generation import Sampling, Unmasking
from gpuinfer.testing import assert_ok
from gpuinfer.testing.decoders import check_decoder, viewed
from gpuinfer.text.diffusion import unmasking_plan
from gpuinfer.text.diffusion.unmasking_decoder import Decision, Edited, UnmaskingDecoder

PAGE = (Path(__file__).parent.parent.parent / "docs" / "plugins.md").read_text()
EXAMPLE = next(code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "class Leftmost" in code)


@pytest.fixture
def leftmost(tmp_path, monkeypatch):
    """A package that offers the page's decoder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "acme", {"decoders": {"leftmost": "acme_decoders:Leftmost"}}, {"acme_decoders": EXAMPLE})
    yield
    sys.modules.pop("acme_decoders", None)
    unmasking_plan.make_decoder.cache_clear()


def asking(**options) -> UnmaskingDecoder:
    return unmasking_plan.decoder_for(
        Sampling(unmasking=Unmasking(decoder="leftmost", options=options)), "low-confidence"
    )


def test_the_example_is_short():
    assert len(EXAMPLE.splitlines()) < 40


@pytest.mark.usefixtures("leftmost")
def test_it_is_asked_for_by_name_and_fills_in_from_the_left():
    toy, prompt, seen = Toy(), prompt_of(4), []

    def watched(tokens):
        seen.append([at for at, token in enumerate(tokens) if token == MASK])
        return toy(tokens)

    found = filled(asking(most=3), watched, MASK, prompt, 12, 12, 12, threshold=0.0)
    assert found.forwards == 4
    assert seen[1:] == [list(range(first, 16)) for first in (4, 7, 10, 13)]


@pytest.mark.usefixtures("leftmost")
def test_it_keeps_the_contract():
    kind = registry.load("decoders", "leftmost")
    assert_ok(check_decoder(kind))
    assert registry.find("decoder", "leftmost").package == "acme 1.0"


def test_what_is_no_decoder_cannot_be_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "odd", {"decoders": {"odd": "odd_decoders:Odd"}}, {"odd_decoders": "class Odd: pass"})
    with pytest.raises(
        PluginError, match=r"no subclass of gpuinfer\.text\.diffusion\.unmasking_decoder\.UnmaskingDecoder"
    ):
        registry.load("decoders", "odd")


@pytest.mark.parametrize("name", registry.names("decoders"))
def test_our_own_keep_the_contract(name):
    assert_ok(check_decoder(registry.load("decoders", name)))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("block-refinement", {"edit_threshold": 0.5}),
        ("threshold", {"least": "quota"}),
        ("dream", {"algorithm": "margin", "temperature": 1.0}),
    ],
)
def test_our_own_keep_the_contract_with_options(name, options):
    kind = registry.load("decoders", name)
    assert_ok(check_decoder(lambda: kind(kind.Options(**options))))


class First(UnmaskingDecoder):
    """In order: the first mask."""

    def decide(self, kept, view):
        return Decision(np.arange(len(view.positions)) == 0)


class Idle(First):
    def decide(self, kept, view):
        return Decision(np.zeros(len(view.positions), np.bool_))


class Numbers(First):
    def decide(self, kept, view):
        return Decision(np.flatnonzero(view.confidence >= 0))


class Blind(First):
    def decide(self, kept, view):
        return view.confidence > 0.5


class Long(First):
    def decide(self, kept, view):
        return Decision(np.ones(view.masks, np.bool_))


class Meddling(First):
    def decide(self, kept, view):
        view.confidence[:] = 0
        return super().decide(kept, view)


class Editing(First):
    def decide(self, kept, view):
        return Decision(super().decide(kept, view).commit, np.ones(2, np.bool_))


class Gambling(First):
    def decide(self, kept, view):
        return Decision(np.arange(len(view.positions)) <= random.randrange(3))


class Mixing(First):
    """Counts the steps of all its rows together."""

    def __init__(self, options=None):
        super().__init__(options)
        self.steps = 0

    def decide(self, kept, view):
        self.steps += 1
        return Decision(np.arange(len(view.positions)) < self.steps)


class Boundless(First):
    def adjust(self, kept, positions, logits):
        logits /= 0.0


class Drowning(First):
    def blend(self, kept, step):
        return float("nan")


class Certain(First):
    default_threshold = 1.5


class Careless(First):
    class Options(First.Options):
        model_config = ConfigDict(extra="ignore")


BROKEN = {
    Idle: ("fills every block in", "committed none of 1 masks in 16 steps on end"),
    Numbers: ("commits masks and nothing else", "`commit` is int64 [1]. Return an array of bool [1]"),
    Blind: ("commits masks and nothing else", "decide returned ndarray. Return a Decision"),
    Long: ("commits masks and nothing else", "with masks here and there: `commit` is bool [12]"),
    Meddling: ("commits masks and nothing else", "read-only"),
    Editing: ("commits masks and nothing else", "edits tokens that it was not shown"),
    Gambling: ("decides the same about the same block", "draw from view.uniform"),
    Mixing: ("keeps what it knows of a row to itself", "in what `begin` returns"),
    Boundless: ("leaves logits that are numbers", "NaN or +inf"),
    Drowning: ("blends by a share", "blend returned nan"),
    Certain: ("takes any threshold, or says that it has none", "default_threshold is 1.5"),
    Careless: ("refuses unknown options", "without a word"),
}


def test_the_kit_finds_nothing_in_a_decoder_that_is_in_order():
    assert_ok(check_decoder(First))


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_the_kit_names_the_promise_that_is_broken(kind):
    random.seed(0)
    promise, said = BROKEN[kind]
    broken = {finding.name: finding.detail for finding in check_decoder(kind) if not finding.ok}
    assert list(broken) == [promise]
    assert said in broken[promise]


def test_a_block_in_one_line():
    view = viewed([0.2, 0.9], positions=[3, 7], threshold=0.5, edited=Edited(*(np.zeros(1, np.int32),) * 3, np.ones(1)))
    assert First().decide(None, view).commit.tolist() == [True, False]
    assert (view.masks, view.threshold) == (2, 0.5)
