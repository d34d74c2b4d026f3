"""What `gpuinfer verify` is made of: ends to every wait, and comparisons that miss nothing."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
from text.tiny import tiny_checkpoint

from gpuinfer.api import Setup
from gpuinfer.errors import WorkError
from gpuinfer.lab.verify import logits_checks, probed_answers, transformers_peer
from gpuinfer.lab.verify import verify_setup as prompts
from gpuinfer.lab.verify.probed_answers import DecoderProbe, probe_answers
from gpuinfer.lab.verify.transformers_peer import TransformersPeer
from gpuinfer.lab.verify.verify_setup import Tolerance, VerifyOptions, open_setup, tolerance


@pytest.fixture
def rig():
    options = VerifyOptions(model=str(tiny_checkpoint("llama")), batch_sizes=[3], new_tokens=4, limit=9)
    opened = open_setup(options, Setup(devices=("cpu",)))
    yield opened
    opened.close()


@pytest.fixture
def reference(rig):
    return probe_answers(rig, probed_answers.likeliest_route(rig).reference)


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


def test_a_tokenizer_that_knows_no_text_gets_tokens(rig):
    class Deaf:
        def encode(self, texts):
            return [ValueError("unknown sign") for _ in texts]

    items = prompts.built_in_questions(Deaf(), vocabulary=10, room=20, seed=1)
    assert len(items) >= 6
    assert all(0 < len(item.tokens) <= 20 and item.tokens.max() < 10 for item in items)


def test_what_is_allowed_goes_with_the_largest_logit_of_a_row():
    rows = np.array([[0.0, -4.0, 1.0], [0.0, -20.0, 100.0], [50.0, -np.inf, np.nan]], np.float32)
    allowed = tolerance(0.0, None).allowed(rows)
    assert allowed.shape == (3, 1)
    assert allowed[:, 0] == pytest.approx([1e-4, 1.6e-3, 8e-4])
    assert tolerance(0.02, None).least == 0.02
    assert tolerance(0.02, 0.25) == Tolerance(0.25)


def test_a_generator_that_does_nothing_is_given_up(rig, monkeypatch):
    from gpuinfer.text.generator import Generator, Stepped

    monkeypatch.setattr(Generator, "step", lambda self: Stepped(()))
    with pytest.raises(WorkError, match="without doing anything"):
        probe_answers(rig, probed_answers.likeliest_route(rig).reference)


class Ended:
    exitcode = -9

    def join(self, seconds):
        pass


def test_a_peer_that_dies_is_told_with_the_cure():
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(WorkError, match=r"code -9.*--no-transformers"):
        TransformersPeer(ours, Ended(), 8).reply(1.0)


def test_a_peer_that_is_silent_is_not_waited_for_for_ever(monkeypatch):
    monkeypatch.setattr(transformers_peer, "ANSWER_S", 0.0)
    ours, theirs = multiprocessing.Pipe()
    with pytest.raises(WorkError, match="took over"):
        next(TransformersPeer(ours, Ended(), 8).logits("float32", np.zeros(1, np.int32)))
    theirs.close()
