"""What `gpuinfer verify` is made of: ends to every wait, and comparisons that miss nothing."""

from __future__ import annotations

import json
import multiprocessing

import numpy as np
import pytest
from text.tiny import tiny_checkpoint

from gpuinfer.api import Setup
from gpuinfer.errors import WorkError
from gpuinfer.lab.verify import logits_checks, probed_answers, transformers_peer
from gpuinfer.lab.verify import verify_setup as prompts
from gpuinfer.lab.verify.divergence import DivergenceJudge
from gpuinfer.lab.verify.probed_answers import DecoderProbe, asked, history
from gpuinfer.lab.verify.transformers_peer import TransformersPeer
from gpuinfer.lab.verify.verification import Verification
from gpuinfer.lab.verify.verify_setup import Tolerance, VerifyOptions, open_setup, tolerance
from gpuinfer.text.transformer import PAGE


@pytest.fixture
def rig():
    options = VerifyOptions(model=str(tiny_checkpoint("llama")), batch_sizes=[3], new_tokens=4, limit=9)
    opened = open_setup(options, Setup(devices=("cpu",)))
    yield opened
    opened.close()


@pytest.fixture
def reference(rig):
    return asked(rig, probed_answers.likeliest(rig).reference)


@pytest.mark.parametrize(
    "off",
    [
        pytest.param(1e-2, id="too much"),
        pytest.param(np.nan, id="not a number"),
        pytest.param(np.inf, id="infinite"),
    ],
)
def test_one_logit_of_one_position_that_is_off_is_found(rig, reference, off):
    def other(tokens):
        for rows in logits_checks.position_logits(rig.decoder, tokens):
            if len(tokens) == len(rig.items[2].tokens) + 3:
                rows[5, 11] += off
            yield rows

    finding = logits_checks.compare_logits(rig, "one", reference, other, ("ours", "theirs"), Tolerance(1e-4))
    assert finding.status == "fails"
    (fault,) = [one for one in finding.divergences if one.number == 2]
    assert (fault.position, 11 in fault.tokens) == (5, True)


def test_graphs_are_compared_with_a_decoder_that_is_opened_without(rig, reference):
    verification = Verification(rig.options, rig.setup)
    rig.facts = {**rig.facts, "device": "cuda:0"}  # where there are graphs
    finding = verification._eager(rig, DivergenceJudge(rig, Tolerance(1e-4)), reference)
    assert (finding.status, finding.compared) == ("holds", 9)


def test_a_decoder_equals_itself(rig, reference):
    def other(tokens):
        return logits_checks.position_logits(rig.decoder, tokens)

    finding = logits_checks.compare_logits(rig, "one", reference, other, ("ours", "theirs"), Tolerance(0.0))
    assert (finding.status, finding.difference) == ("holds", 0.0)
    assert finding.compared == sum(len(item.tokens) + 3 for item in rig.items)


def off_by(rig, noise):
    """A decoder's logits, each `noise` above or below what they are."""
    decoder = rig.decoder

    def asked(tokens):
        for rows in logits_checks.position_logits(decoder, tokens):
            yield rows + np.float32(noise) * np.where(np.indices(rows.shape).sum(axis=0) % 2, 1, -1).astype(np.float32)

    return asked


def test_a_side_that_is_nearer_to_float32_than_the_other_holds_however_far_they_are_apart(rig, reference):
    sides = ("ours", "theirs")
    finding = logits_checks.compare_rounding(rig, "one", reference, off_by(rig, 5.0), off_by(rig, 0.01), sides)
    assert finding.status == "holds"
    assert finding.from_float32 == pytest.approx({"ours": 0.01, "theirs": 4.99 + 0.02}, abs=0.03)
    assert finding.difference == pytest.approx(5.0, abs=1e-3)


@pytest.mark.parametrize("off", [0.05, np.nan, np.inf])
def test_one_logit_that_is_further_from_float32_than_any_of_the_other_s_is_found(rig, reference, off):
    def exact(tokens):
        for rows in logits_checks.position_logits(rig.decoder, tokens):
            if len(tokens) == len(rig.items[2].tokens) + 3:
                rows[5, 11] += off
            yield rows

    def other(tokens):
        return (np.nan_to_num(rows, nan=0.0, posinf=0.0) + np.float32(0.01) for rows in exact(tokens))

    if not np.isfinite(off):  # then it is ours that is broken, and the others are sound
        exact, other = off_by(rig, 0.0), off_by(rig, 0.01)
        rig.decoder = Broken(rig.decoder, off)
    finding = logits_checks.compare_rounding(rig, "one", reference, other, exact, ("ours", "theirs"))
    assert finding.status == "fails"
    assert "from float32" in finding.why
    if np.isfinite(off):
        (fault,) = [one for one in finding.divergences if not one.tie]
        assert (fault.number, fault.position, fault.tokens[1]) == (2, 5, 11)


class Broken(DecoderProbe):
    """One logit of each step is no number."""

    def __init__(self, decoder, off):
        super().__init__(decoder)
        self.off = off

    def forward(self, step):
        logits = super().forward(step).clone()
        logits[0, 3] += self.off
        return logits


def test_other_pages_are_the_last_ones_first(rig):
    plan = probed_answers.likeliest(rig)
    (places,) = [route.order for _, route in plan.routes if route.order is not None]
    assert places.tolist() == list(range(rig.decoder.pages))[::-1]


def test_few_pages_hold_one_row_and_little_more(rig):
    (route,) = [route for _, route in probed_answers.likeliest(rig).routes if route.pages is not None]
    assert rig.decoder.length <= PAGE * (route.pages - 1) < rig.decoder.length + PAGE
    assert [len(tokens) for (tokens,) in asked(rig, route).tokens] == [4] * len(rig.items)


def test_chunks_cut_every_prompt_that_is_long_enough(rig):
    assert all(probed_answers.chunk(longest) < longest for longest in (8, 24, 300, 4000))


def test_shared_beginnings_are_taken_over_and_not_computed(rig):
    (route,) = [route for _, route in probed_answers.likeliest(rig).routes if route.name == "shared"]
    assert asked(rig, route).cached > 0


def test_prompts_alone_share_nothing(rig, reference):
    assert reference.cached == 0


def test_the_built_in_prompts_differ_in_length_and_some_begin_alike(rig):
    lengths = {len(item.tokens) for item in rig.items}
    assert len(lengths) > 5
    first, second = (rig.items[number].tokens[:30] for number in (7, 8))
    assert first.tolist() == second.tolist()


def test_a_tokenizer_that_knows_no_text_gets_tokens(rig):
    class Deaf:
        def encode(self, texts):
            return [ValueError("unknown sign") for _ in texts]

    items = prompts.built_in(Deaf(), vocabulary=10, room=20, seed=1)
    assert len(items) >= 6
    assert all(0 < len(item.tokens) <= 20 and item.tokens.max() < 10 for item in items)


def test_what_is_allowed_goes_with_the_largest_logit_of_a_row():
    rows = np.array([[0.0, -4.0, 1.0], [0.0, -20.0, 100.0], [50.0, -np.inf, np.nan]], np.float32)
    allowed = tolerance(0.0, None).allowed(rows)
    assert allowed.shape == (3, 1)
    assert allowed[:, 0] == pytest.approx([1e-4, 1.6e-3, 8e-4])
    assert tolerance(0.02, None).least == 0.02
    assert tolerance(0.02, 0.25) == Tolerance(0.25)


def test_a_history_depends_on_order_and_grows_by_parts():
    assert history([1, 2]) != history([2, 1])
    assert history([1, 2, 3]) == history([3], history([1, 2]))


def test_a_generator_that_does_nothing_is_given_up(rig, monkeypatch):
    from gpuinfer.text.generator import Generator, Stepped

    monkeypatch.setattr(Generator, "step", lambda self: Stepped(()))
    with pytest.raises(WorkError, match="without doing anything"):
        asked(rig, probed_answers.likeliest(rig).reference)


class Ended:
    exitcode = -9

    def join(self, seconds):
        pass


def test_a_peer_that_dies_is_told_with_the_cure():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(WorkError, match=r"code -9.*--no-transformers"):
        TransformersPeer(ours, Ended(), 8).told(1.0)


def test_a_peer_that_fails_says_why():
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(json.dumps({"error": "ValueError: no such model"}).encode())
    with pytest.raises(WorkError, match="no such model"):
        TransformersPeer(ours, Ended(), 8).told(1.0)


def test_a_peer_that_is_silent_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(transformers_peer, "ANSWER_S", 0.0)
    ours, theirs = multiprocessing.Pipe()
    with pytest.raises(WorkError, match="took over"):
        next(TransformersPeer(ours, Ended(), 8).logits("float32", np.zeros(1, np.int32)))
    theirs.close()
