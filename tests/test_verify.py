"""`gpuinfer verify` lets a sound model pass, and names the place where an unsound one goes wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from text.test_checkpoint_nanogpt import saved
from text.tiny import copy_of, llama_tokenizer, tiny_checkpoint
from text.tiny_diffusion import tiny_diffusion

from gpuinfer.api import Setup
from gpuinfer.errors import WorkError
from gpuinfer.host.child import Channel, Conversation
from gpuinfer.lab.verify import (
    diffusion_checks,
    logits_checks,
    probed_answers,
    transformers_child,
    transformers_peer,
    verification,
    verify_setup,
)
from gpuinfer.lab.verify.probed_answers import DecoderProbe, probe_answers
from gpuinfer.lab.verify.transformers_peer import TransformersPeer
from gpuinfer.lab.verify.verify_setup import Tolerance, VerifyOptions, open_setup, tolerance
from gpuinfer.text.generator import Generator, Stepped, setup
from gpuinfer.text.language import tokenizer as subwords
from gpuinfer.text.language.chat_template import ChatTemplate

pytestmark = pytest.mark.usefixtures("children_forked")

BRIEF = ("--batch-sizes", "1,3", "--new-tokens", "6", "--limit", "6", "--device", "cpu")
ALONE = (*BRIEF, "--no-transformers")
MASKS = ("--batch-sizes", "1,3", "--new-tokens", "8", "--limit", "4", "--block-length", "4", "--device", "cpu")
PLANTED = 3  # positions of an answer to a one-token prompt, where the planted decoders do something
BATCHES = ["1 at once = alone", "3 at once = alone", "any order = alone"]
CHECKS = [*BATCHES, "any page = alone", "few pages = alone", "in chunks = whole", "shared beginning = own"]
CHECKS += ["drawn, at once = alone", "3 samples = one by one", "graphs = eager", "compiled = plain torch"]
TOKENS, LOGITS = "tokens = AutoTokenizer's", "gpuinfer = transformers"

Alter = Callable[[torch.Tensor, bool], None]


@pytest.fixture(autouse=True)
def one_lane(request, monkeypatch) -> None:
    """Lanes wait for one another at each step, for long where tests share the cores: one of these tests has several."""
    if "real_checkpoint" not in request.node.name:
        monkeypatch.setattr(setup, "cores", lambda: 1)


@pytest.fixture
def verify(gpuinfer, tmp_path):
    """Run the command on a tiny checkpoint: exit code, document with its checks by name, what was said in one line."""

    def run(*words: str, model: Path | str | None = None) -> tuple[int, dict[str, Any], str]:
        report = tmp_path / "verify.json"
        model = model or tiny_checkpoint("qwen2")
        code, out, err = gpuinfer("verify", "--model", str(model), "--json", str(report), *words)
        document = json.loads(report.read_text()) if report.exists() else {}
        if document:
            document["checks"] = {check["name"]: check for check in document["checks"]}
        return code, document, " ".join((out + err).split())

    return run


class Planted(DecoderProbe):
    """A decoder that is not itself at one position: `alter` changes its row of logits, knowing if it has company."""

    alter: Alter

    def forward(self, step):
        logits = super().forward(step)
        ends = step.starts + step.lengths
        rows = np.repeat(np.arange(len(ends)), step.lengths)[step.wanted]
        for number, row in enumerate(rows.tolist()):
            if ends[row] == PLANTED + 1:
                self.alter(logits[number], len(step.pages) > 1)
        return logits


@pytest.fixture
def planted(monkeypatch) -> Callable[[Alter], None]:
    def plant(alter: Alter) -> None:
        def opened(options, setup):
            rig = open_setup(options, setup)
            rig.decoder = Planted(rig.decoder)
            rig.decoder.alter = alter
            return rig

        monkeypatch.setattr(verification, "open_setup", opened)

    return plant


class Beside(threading.Thread):
    """In the place of a child process: transformers answers from a thread, which has imported it already."""

    code = None

    def __init__(self, target, *arguments, **named) -> None:
        self.end, theirs = socket.socketpair()
        super().__init__(target=transformers_child.answer_requests, args=(theirs, *arguments), daemon=True)
        self.start()

    def exit_code(self, within_s):
        return self.code

    def kill(self, within_s):
        """It ends when its channel does."""


@pytest.fixture
def near_peer(monkeypatch) -> None:
    monkeypatch.setattr(transformers_peer, "Child", Beside)


@pytest.mark.thorough
def test_a_real_checkpoint_passes_every_check_that_can_be_made_here(verify):
    code, document, said = verify(*BRIEF)
    checks = document["checks"]
    assert (code, document["schema"], document["status"]) == (0, "gpuinfer.verify/1", "done")
    assert (document["holds"], document["prompts"], list(checks)) == (True, 6, [*CHECKS, TOKENS, LOGITS])
    statuses = {name: check["status"] for name, check in checks.items()}
    assert (statuses["graphs = eager"], statuses[LOGITS]) == ("skipped", "holds")
    assert "fails" not in statuses.values()
    assert 0 < checks[LOGITS]["largest_difference"] < 1e-4
    assert f"All {list(statuses.values()).count('holds')} checks that were made hold" in said
    # transformers makes a Qwen2 tokenizer anew and cuts words as Qwen's does, whatever tokenizer.json says
    assert statuses[TOKENS] == "differs"
    assert "the difference is on the side of transformers (Qwen2Tokenizer" in said


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_narrow_format_is_judged_by_its_distance_to_float32(verify, near_peer, family):
    code, document, said = verify(*BRIEF, "--dtype", "bfloat16", model=tiny_checkpoint(family, dtype="bfloat16"))
    assert code == 0, said
    found = document["checks"][LOGITS]
    far = found["from_float32"]
    assert (found["status"], document["checks"][TOKENS]["status"]) == ("holds", "holds")
    assert 0 < far["gpuinfer"] < logits_checks.FACTOR * far["transformers"]
    assert found["largest_difference"] > 1e-3  # what two sound programs make of bfloat16
    assert document["tolerance"]["least"] < far["transformers"] * 4
    assert document["computed_in"] in ("bfloat16", "float32")


def test_the_side_that_departs_from_the_tokenizer_file_is_named(verify, near_peer, monkeypatch, tmp_path):
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "spaced")
    llama_tokenizer(folder, tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / "chat").write_text('{"messages": [{"role": "user", "content": "two"}]}')
    chat = ("--prompts", str(tmp_path / "chat"))
    for words in ((), chat):
        assert verify(*BRIEF, *words, model=folder)[1]["checks"][TOKENS]["status"] == "holds"
    render = ChatTemplate.render
    with monkeypatch.context() as patch:
        patch.setattr(ChatTemplate, "render", lambda self, *given: render(self, *given) + "!")
        chatted = verify(*BRIEF, *chat, model=folder)
    monkeypatch.setattr(subwords, "respaced", lambda tokenizer, *given: setattr(tokenizer, "normalizer", None))
    for code, document, said in (chatted, verify(*BRIEF, "--limit", "1", model=folder)):
        assert (code, document["checks"][TOKENS]["status"]) == (4, "fails")
        assert "the difference is on the side of gpuinfer" in said


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_deterministic_demands_the_same_bits_and_gets_them(verify, family):
    code, document, _ = verify(*ALONE, "--deterministic", "--dtype", "bfloat16", model=tiny_checkpoint(family))
    assert code == 0
    checks = document["checks"]
    assert {check["largest_difference"] for name, check in checks.items() if "torch" not in name} == {0.0}


def test_a_decoder_that_is_wrong_in_company_is_named_with_its_logits(verify, planted):
    def wrong(row, company):
        if company:
            row[7] = row.max() + 5.0

    planted(wrong)
    code, document, said = verify(*ALONE)
    assert (code, document["holds"]) == (4, False)
    assert document["checks"]["1 at once = alone"]["status"] == "holds"
    failed = document["checks"]["3 at once = alone"]
    parted = next(one for one in failed["divergences"] if one["tokens"][1] == 7)
    (ours, theirs) = (parted["logits"][side] for side in ("alone", "3 at once"))
    assert (failed["status"], parted["tie"]) == ("fails", False)
    assert ours[0] > ours[1]
    assert theirs[1] > theirs[0] + 4.0
    assert f"for token {parted['tokens'][0]} and {theirs[1]:.6g} for token 7" in said


def test_logits_that_are_off_are_a_fault_though_every_token_is_the_same(verify, planted):
    planted(lambda row, company: row.mul_(1.01) if company else None)
    code, document, _ = verify(*ALONE)
    assert code == 4
    (fault,) = document["checks"]["3 at once = alone"]["divergences"]
    assert fault["tokens"][0] == fault["tokens"][1]
    assert "the logits differ by" in fault["why"]


def test_a_tie_passes_and_is_said(verify, planted):
    def near_tie(row, company):
        """The two likeliest tokens are a hair apart, and in company the other way round."""
        first, second = row.topk(2).indices.tolist()
        row[first] = row[second] + (-2e-5 if company else 2e-5)

    planted(near_tie)
    code, document, said = verify(*ALONE, "--limit", "2")
    found = document["checks"]["3 at once = alone"]
    assert (code, found["status"], found["ties"] > 0) == (0, "holds", True)
    assert "a tie: the two logits are" in said


def test_other_tokens_drawn_from_the_same_logits_are_a_fault(verify, monkeypatch):
    key = probed_answers._key
    monkeypatch.setattr(probed_answers, "_key", lambda ask: key(ask) + ("" if ask.samples == 1 else "-other"))
    code, document, _ = verify(*ALONE)
    statuses = [document["checks"][name]["status"] for name in ("drawn, at once = alone", "3 samples = one by one")]
    assert (code, statuses) == (4, ["holds", "fails"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch-sizes 0,3", "1 to 4096"),
        ("--new-tokens 256", "Use fewer"),
        ("--prompts none.jsonl", "Give one that exists"),
        ("--prompts bad.jsonl", "row 2"),
        ("--prompts long.jsonl", "Shorten it"),
        ("--prompts empty.jsonl", "no prompts"),
        ("--meta bad.jsonl", "--checkpoint"),
        ("--tolerance -1", "tolerance"),
        ("--device cuda:77", "cuda:77"),
        ("--model damaged", "model.safetensors"),
        ("--model tiny --block-length 4", "`block_length` says how a diffusion model fills its masks in"),
    ],
)
def test_bad_usage_is_refused_with_the_cure(verify, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('"fine"\n{"promt": "x"}\n')
    Path("long.jsonl").write_text(json.dumps({"prompt": [5] * 300}))
    Path("empty.jsonl").write_text("\n")
    if "damaged" in words:
        weights = copy_of(tiny_checkpoint("qwen2"), tmp_path / "damaged") / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    code, document, told = verify(*words.split())
    assert (code, document) == (2, {})
    assert said in told
    assert "Traceback" not in told


def test_a_nanogpt_checkpoint_is_verified_without_transformers_that_has_no_such_model(gpuinfer, tmp_path):
    words = ("--checkpoint", str(saved(tmp_path)), "--batch-sizes", "3", "--new-tokens", "4", "--device", "cpu")
    code, out, _ = gpuinfer("verify", *words, "--json", "-")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0
    assert checks["compiled = plain torch"]["status"] in ("holds", "skipped")
    assert "no nanogpt models" in checks[LOGITS]["why"]


def test_transformers_that_fails_is_no_fault_of_ours_and_is_said(verify, near_peer, monkeypatch):
    def unreadable(*words, **options):
        raise OSError("no tokenizer here")

    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", unreadable)
        code, document, said = verify(*BRIEF, "--limit", "1")
    assert (code, document["checks"][TOKENS]["status"], document["checks"][LOGITS]["status"]) == (0, "skipped", "holds")
    assert "no tokenizer here" in said
    monkeypatch.setattr(transformers_peer, "LOAD_S", 0.0)
    code, document, said = verify(*BRIEF, "--limit", "1")
    assert (code, document["checks"][LOGITS]["status"]) == (0, "skipped")
    assert "gave no answer within 0 s" in said


@pytest.mark.parametrize(("gone", "why"), [(True, r"SIGKILL.*--no-transformers"), (False, "no answer within 0 s")])
def test_a_peer_that_dies_or_is_silent_is_told_with_the_cure(monkeypatch, gone, why):
    monkeypatch.setattr(transformers_peer, "ANSWER_S", 5.0 if gone else 0.0)
    ours, theirs = socket.socketpair()
    if gone:
        theirs.close()
    child = Beside.__new__(Beside)
    child.code = -9
    peer = TransformersPeer(Conversation("the process with transformers", child, Channel(ours)), 8)
    for _ in range(2):  # a later answer would be that to an earlier question
        with pytest.raises(WorkError, match=why):
            next(peer.logits("float32", np.zeros(1, np.int32)))
    theirs.close()


def test_ctrl_c_leaves_what_was_found_and_says_that_it_is_not_all(verify, monkeypatch):
    answered, routes = verification.probe_answers, []

    def interrupted(rig, route):
        routes.append(route)
        if len(routes) == 3:
            raise KeyboardInterrupt
        return answered(rig, route)

    monkeypatch.setattr(verification, "probe_answers", interrupted)
    code, document, _ = verify(*ALONE)
    assert (code, document["status"], document["holds"], len(document["checks"])) == (3, "partial", False, 1)


# Diffusion models


def test_masks_are_filled_in_alike_in_any_company_and_a_cache_is_told_what_it_changes(verify):
    code, document, said = verify(*MASKS, "--cfg-scale", "0.5", model="tiny-llada")
    assert code == 0, said
    checks, caches = document["checks"], [f"{name} cache ~ none" for name in ("prefix", "dual", "vicinity")]
    held = [*BATCHES, "any company = alone", "drawn, at once = alone", "3 samples = one by one"]
    expected = dict.fromkeys(held, "holds") | dict.fromkeys(caches, "told")
    expected |= {"compiled = plain torch": "holds", LOGITS: "skipped"}
    assert {name: check["status"] for name, check in checks.items()} == expected
    assert "of 32 tokens differ" in checks["dual cache ~ none"]["why"]
    assert "dual cache ~ none: " in said


def test_the_cache_of_a_block_causal_model_changes_nothing(verify):
    code, document, said = verify(*MASKS, model=tiny_diffusion("sdar"))
    assert (code, document["checks"]["exact cache = none"]["status"]) == (0, "holds"), said
    assert not [name for name in document["checks"] if "~" in name]


def test_a_row_that_feels_its_company_is_found():
    options = VerifyOptions(model="tiny-llada", batch_sizes=[2], new_tokens=4, limit=3)
    opened = open_setup(options, Setup(devices=("cpu",)))
    plain = opened.generator.decoder.forward

    def forward(step: Any) -> Any:
        logits = plain(step).clone()
        if len(step.pages) > 1:
            logits[0, ord("a")] += 50.0
        return logits

    opened.generator.decoder.forward = forward
    try:
        masks = diffusion_checks.DiffusionChecks(opened)
        masks.answer_alone()
        finding = dict(masks.checks())["2 at once = alone"]()
    finally:
        opened.close()
    assert finding.status == "fails"
    assert "2 at once token 97" in finding.why


# Comparisons miss nothing, and waits have ends


@pytest.fixture
def rig():
    options = VerifyOptions(model=str(tiny_checkpoint("llama")), batch_sizes=[3], new_tokens=4, limit=9)
    opened = open_setup(options, Setup(devices=("cpu",)))
    yield opened
    opened.close()


@pytest.fixture
def reference(rig):
    return probe_answers(rig, probed_answers.likeliest_route(rig).reference)


def logits_of(rig, off=0.0, noise=0.0):
    """Asks for the logits: one of them is `off`, all of them are `noise` above or below what they are."""
    decoder = rig.decoder

    def asked(tokens):
        for rows in logits_checks.position_logits(decoder, tokens):
            if len(tokens) == len(rig.items[2].tokens) + 3:
                rows[5, 11] += off
            signs = np.where(np.indices(rows.shape).sum(axis=0) % 2, 1, -1).astype(np.float32)
            yield rows + np.float32(noise) * signs

    return asked


@pytest.mark.parametrize("off", [1e-2, np.nan, np.inf])
def test_one_logit_of_one_position_that_is_off_is_found(rig, reference, off):
    other, sides = logits_of(rig, off), ("ours", "theirs")
    finding = logits_checks.compare_logits(rig, "one", reference, other, sides, Tolerance(1e-4))
    assert finding.status == "fails"
    (fault,) = [one for one in finding.divergences if one.number == 2]
    assert (fault.position, 11 in fault.tokens) == (5, True)


def test_a_side_that_is_nearer_to_float32_than_the_other_holds_however_far_they_are_apart(rig, reference):
    sides, other, exact = ("ours", "theirs"), logits_of(rig, noise=5.0), logits_of(rig, noise=0.01)
    finding = logits_checks.compare_rounding(rig, "one", reference, other, exact, sides)
    assert finding.status == "holds"
    assert finding.from_float32 == pytest.approx({"ours": 0.01, "theirs": 4.99 + 0.02}, abs=0.03)
    assert finding.difference == pytest.approx(5.0, abs=1e-3)


class Broken(DecoderProbe):
    """One logit of each step is no number."""

    off = 0.0

    def forward(self, step):
        logits = super().forward(step).clone()
        logits[0, 3] += self.off
        return logits


@pytest.mark.parametrize("off", [0.05, np.nan, np.inf])
def test_one_logit_that_is_further_from_float32_than_any_of_the_other_s_is_found(rig, reference, off):
    exact, other = logits_of(rig, off), logits_of(rig, off, 0.01)
    if not np.isfinite(off):  # then it is ours that is broken, and the others are sound
        exact, other = logits_of(rig), logits_of(rig, noise=0.01)
        rig.decoder = Broken(rig.decoder)
        rig.decoder.off = off
    finding = logits_checks.compare_rounding(rig, "one", reference, other, exact, ("ours", "theirs"))
    assert finding.status == "fails"
    assert "from float32" in finding.why
    if np.isfinite(off):
        (fault,) = [one for one in finding.divergences if not one.tie]
        assert (fault.number, fault.position, fault.tokens[1]) == (2, 5, 11)


def test_a_tokenizer_that_knows_no_text_gets_tokens():
    class Deaf:
        def encode(self, texts):
            return [ValueError("unknown sign") for _ in texts]

    items = verify_setup.built_in_questions(Deaf(), vocabulary=10, room=20, seed=1)
    assert len(items) >= 6
    assert all(0 < len(item.tokens) <= 20 and item.tokens.max() < 10 for item in items)


def test_what_is_allowed_goes_with_the_largest_logit_of_a_row():
    rows = np.array([[0.0, -4.0, 1.0], [0.0, -20.0, 100.0], [50.0, -np.inf, np.nan]], np.float32)
    allowed = tolerance(0.0, None).allowed(rows)
    assert (allowed.shape, allowed[:, 0]) == ((3, 1), pytest.approx([1e-4, 1.6e-3, 8e-4]))
    assert (tolerance(0.02, None).least, tolerance(0.02, 0.25)) == (0.02, Tolerance(0.25))


def test_a_generator_that_does_nothing_is_given_up(rig, monkeypatch):
    monkeypatch.setattr(Generator, "step", lambda self: Stepped(()))
    with pytest.raises(WorkError, match="without doing anything"):
        probe_answers(rig, probed_answers.likeliest_route(rig).reference)
