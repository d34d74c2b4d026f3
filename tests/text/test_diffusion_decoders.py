"""Each decoder does what its source describes, token for token; what may be asked of one; third parties' decoders,
found by their entry points and used like ours; and what the kit says of faulty ones.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from packages import install
from pydantic import ConfigDict
from text import diffusion_reference as reference
from text.diffusion_toy import MASK, VOCABULARY, Toy, ToyMasks, prompt_of
from text.toy import run

from gpuinfer.config import registry
from gpuinfer.errors import BadPrompt, PluginError
from gpuinfer.generation import Prompt, Sampling, Unmasking
from gpuinfer.testing import assert_ok
from gpuinfer.testing.decoders import check_decoder, viewed
from gpuinfer.text.diffusion import unmasking_plan
from gpuinfer.text.diffusion.decoders import schedule
from gpuinfer.text.diffusion.diffusion_generator import DiffusionGenerator
from gpuinfer.text.diffusion.unmasking_decoder import Decision, Edited, UnmaskingDecoder
from gpuinfer.text.language.language import Language
from gpuinfer.text.language.vocabulary import Vocabulary

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "block_refinement.json").read_text())["cases"]
PAGE = (HERE.parent.parent / "docs" / "plugins.md").read_text()
EXAMPLE = next(code for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S) if "class Leftmost" in code)


def decoder(name: str, **options) -> UnmaskingDecoder:
    return unmasking_plan.decoder_for(Sampling(unmasking=Unmasking(decoder=name, options=options)), "low-confidence")


def filled(model, prompt, length, *, block=None, seed=None, **how):
    """The tokens that a generator answers with over whole canvases, and its forwards. `block`: it is block-causal."""
    made = ToyMasks(model, block)
    language = Language(Vocabulary(tuple(map(chr, range(200, 200 + VOCABULARY)))), VOCABULARY, ())
    generator = DiffusionGenerator(made, language, seed=0, end_tokens=(), step_tokens=512, threads=1)
    sampling = Sampling(
        max_tokens=length, temperature=0.0, ignore_eos=True, seed=seed, unmasking=Unmasking(cache="none", **how)
    )
    [outcome] = run(generator, [Prompt(tokens=tuple(prompt), sampling=sampling)])
    generator.close()
    return list(outcome.completions[0].tokens), made.forwards


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: "-".join(str(case[name]) for name in list(case)[:-1]))
def test_block_refinement_does_what_diffusers_pipeline_did(case):
    """Recorded by record_block_refinement.py; the reference of the other tests is held to it too."""
    toy, prompt, length, block = Toy(case["seed"]), prompt_of(case["prompt"]), case["length"], case["block"]
    threshold, edit = case["threshold"], case["edit"]
    expected = reference.block_refinement(toy, MASK, prompt, length, block, case["steps"], threshold, edit)
    assert expected.tokens == case["tokens"]
    blocks = -(-(len(prompt) + length) // block) - len(prompt) // block
    how = {"decoder": "block-refinement", "options": {"edit_threshold": edit}, "threshold": threshold}
    assert filled(toy, prompt, length, block=block, steps=case["steps"] * blocks, **how) == (
        case["tokens"],
        expected.forwards,
    )


@pytest.mark.parametrize(("name", "options", "steps"), [("random", {}, 8), ("dream", {"temperature": 5.0}, 16)])
def test_a_random_order_follows_the_schedule_and_the_seed(name, options, steps):
    def order(seed):
        return filled(Toy(), prompt_of(4), 16, seed=seed, decoder=name, options=options, steps=steps)

    assert order(1) == order(1)
    assert name == "dream" or order(1)[1] == steps
    assert len({tuple(order(seed)[0]) for seed in range(8)}) > 4
    for count in (1, 2, 10**12):  # Dream's schedule ends with any number of steps
        assert sum(schedule(50, count, 1e-3).values()) == 50


def test_credits_are_a_rows_own_and_requests_with_the_same_options_share_a_decoder():
    """Two rows that take turns get what each gets alone."""
    shared, toys = decoder("credit"), (Toy(1), Toy(2))
    together, positions, found = [shared.begin(), shared.begin()], np.arange(6, dtype=np.int32), []
    apart = [shared.begin(), shared.begin()]
    for rows, order in ((together, (0, 1, 0, 1)), (apart, (0, 0, 1, 1))):
        adjusted = {0: [], 1: []}
        for row in order:
            logits = toys[row]([MASK] * 6).numpy()
            shared.adjust(rows[row], positions, logits)
            adjusted[row].append(logits.tolist())
        found.append(adjusted)
    assert found[0] == found[1]
    assert decoder("factor", factor=2.0) is decoder("factor", factor=2.0) is not decoder("factor", factor=1.0)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"decoder": "treshold"},
            "no decoder named 'treshold'. Did you mean 'threshold'? Installed: block-refinement,",
        ),
        ({"decoder": "factor", "options": {"facto": 1}}, "'factor' has no option 'facto'. Did you mean 'factor'?"),
        ({"decoder": "factor", "options": {"factor": 0}}, "option factor: 0 is not more than 0. Give more than 0."),
        ({"decoder": "dream", "options": {"algorithm": "max"}}, "Choose from probability, margin, entropy."),
        ({"threshold": 0.9}, "decoder 'low-confidence' has no threshold. Leave it out, or choose block-refinement or"),
        ({"decoder": "threshold", "threshold": 1.1}, "threshold is 1.1. Give a number from 0 to 1."),
        ({"decoder": "threshold", "threshold": "high"}, "threshold is 'high'. Give a number from 0 to 1."),
        ({"decoder": "threshold", "threshold": float("nan")}, "threshold is nan. Give a number from 0 to 1."),
    ],
)
def test_what_cannot_be_asked_is_refused_with_the_choices(asked, said):
    with pytest.raises(BadPrompt) as caught:
        unmasking_plan.decoder_for(Sampling(unmasking=Unmasking(**asked)), "low-confidence")
    assert said in str(caught.value)


# Third parties'


@pytest.fixture
def leftmost(tmp_path, monkeypatch):
    """A package that offers the page's decoder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "acme", {"decoders": {"leftmost": "acme_decoders:Leftmost"}}, {"acme_decoders": EXAMPLE})
    yield
    sys.modules.pop("acme_decoders", None)
    unmasking_plan.make_decoder.cache_clear()


@pytest.mark.usefixtures("leftmost")
def test_a_decoder_of_another_package_keeps_the_contract_and_fills_in_from_the_left():
    toy, seen = Toy(), []

    def watched(tokens):
        seen.append([at for at, token in enumerate(tokens) if token == MASK])
        return toy(tokens)

    how = {"decoder": "leftmost", "options": {"most": 3}, "steps": 12, "threshold": 0.0}
    assert filled(watched, prompt_of(4), 12, **how)[1] == 4
    assert seen == [list(range(first, 16)) for first in (4, 7, 10, 13)]
    assert_ok(check_decoder(registry.load("decoders", "leftmost")))
    assert registry.find("decoder", "leftmost").package == "acme 1.0"
    assert len(EXAMPLE.splitlines()) < 40


def test_what_is_no_decoder_cannot_be_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "odd", {"decoders": {"odd": "odd_decoders:Odd"}}, {"odd_decoders": "class Odd: pass"})
    wanted = r"no subclass of gpuinfer\.text\.diffusion\.unmasking_decoder\.UnmaskingDecoder"
    with pytest.raises(PluginError, match=wanted):
        registry.load("decoders", "odd")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in registry.names("decoders")),
        ("block-refinement", {"edit_threshold": 0.5}),
        ("threshold", {"least": "quota"}),
        ("dream", {"algorithm": "margin", "temperature": 1.0}),
    ],
)
def test_our_own_keep_the_contract(name, options):
    kind = registry.load("decoders", name)
    assert_ok(check_decoder(lambda: kind(kind.Options(**options))))


class First(UnmaskingDecoder):
    """In order: the first mask."""

    def decide(self, kept, view):
        return Decision(np.arange(len(view.positions)) == 0)


class Meddling(First):
    def decide(self, kept, view):
        view.confidence[:] = 0
        return super().decide(kept, view)


class Mixing(First):
    """Counts the steps of all its rows together."""

    steps = 0

    def decide(self, kept, view):
        self.steps += 1
        return Decision(np.arange(len(view.positions)) < self.steps)


class Boundless(First):
    def adjust(self, kept, positions, logits):
        logits /= 0.0


class Careless(First):
    class Options(First.Options):
        model_config = ConfigDict(extra="ignore")


def a_kind(name, **methods):
    return type(name, (First,), methods)


def deciding(name, decide):
    return a_kind(name, decide=lambda self, kept, view: decide(view))


def first(view):
    return np.arange(len(view.positions)) == 0


COMMITS = "commits masks and nothing else"
BROKEN = [
    (
        deciding("Idle", lambda v: Decision(first(v) & False)),
        "fills every block in",
        "committed none of 1 masks in 16 steps",
    ),
    (
        deciding("Numbers", lambda v: Decision(np.flatnonzero(v.confidence >= 0))),
        COMMITS,
        "Return an array of bool [1]",
    ),
    (deciding("Blind", lambda v: v.confidence > 0.5), COMMITS, "decide returned ndarray. Return a Decision"),
    (
        deciding("Long", lambda v: Decision(np.ones(v.masks, bool))),
        COMMITS,
        "masks here and there: `commit` is bool [12]",
    ),
    (Meddling, COMMITS, "read-only"),
    (
        deciding("Editing", lambda v: Decision(first(v), np.ones(2, bool))),
        COMMITS,
        "edits tokens that it was not shown",
    ),
    (
        deciding("Gambling", lambda v: Decision(np.arange(len(v.positions)) <= random.randrange(3))),
        "decides the same about the same block",
        "draw from view.uniform",
    ),
    (Mixing, "keeps what it knows of a row to itself", "in what `begin` returns"),
    (Boundless, "leaves logits that are numbers", "NaN or +inf"),
    (a_kind("Drowning", blend=lambda self, kept, step: float("nan")), "blends by a share", "blend returned nan"),
    (
        a_kind("Certain", default_threshold=1.5),
        "takes any threshold, or says that it has none",
        "default_threshold is 1.5",
    ),
    (Careless, "refuses unknown options", "without a word"),
]


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(("kind", "promise", "said"), BROKEN, ids=[kind.__name__ for kind, *_ in BROKEN])
def test_the_kit_names_the_promise_that_is_broken(kind, promise, said):
    random.seed(0)
    broken = {finding.name: finding.detail for finding in check_decoder(kind) if not finding.ok}
    assert list(broken) == [promise]
    assert said in broken[promise]


def test_the_kit_finds_nothing_in_a_decoder_that_is_in_order_and_makes_a_block_in_one_line():
    assert_ok(check_decoder(First))
    view = viewed([0.2, 0.9], positions=[3, 7], threshold=0.5, edited=Edited(*(np.zeros(1, np.int32),) * 3, np.ones(1)))
    assert First().decide(None, view).commit.tolist() == [True, False]
    assert (view.masks, view.threshold) == (2, 0.5)
