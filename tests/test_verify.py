"""`gpuinfer verify` lets a sound model pass, and names the place where an unsound one goes wrong."""

from __future__ import annotations

import json
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

from gpuinfer.lab.verify import logits_checks, probed_answers, transformers_child, transformers_peer, verification
from gpuinfer.lab.verify.probed_answers import DecoderProbe
from gpuinfer.lab.verify.verify_setup import open_setup
from gpuinfer.text.generator import setup
from gpuinfer.text.language import tokenizer as subwords
from gpuinfer.text.language.chat_template import ChatTemplate

pytestmark = pytest.mark.usefixtures("children_forked")

BRIEF = ("--batch-sizes", "1,3", "--new-tokens", "6", "--limit", "6", "--device", "cpu")
ALONE = (*BRIEF, "--no-transformers")
PLANTED = 3  # positions of an answer to a one-token prompt, where the planted decoders do something
CHECKS = [
    "1 at once = alone",
    "3 at once = alone",
    "any order = alone",
    "any page = alone",
    "few pages = alone",
    "in chunks = whole",
    "shared beginning = own",
    "drawn, at once = alone",
    "3 samples = one by one",
    "graphs = eager",
    "compiled = plain torch",
    "tokens = AutoTokenizer's",
    "gpuinfer = transformers",
]

Alter = Callable[[torch.Tensor, bool], None]


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


@pytest.fixture(autouse=True)
def one_lane(request, monkeypatch) -> None:
    """Lanes wait for one another at each step, for long where tests share the cores: one of these tests has several."""
    if "real_checkpoint" not in request.node.name:
        monkeypatch.setattr(setup, "cores", lambda: 1)


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


@pytest.fixture
def near_peer(monkeypatch) -> None:
    """transformers answers from a thread of this process, which has imported it already."""

    class Beside(threading.Thread):
        exitcode = None

        def kill(self) -> None:
            """It ends when its channel does."""

    def started(channel, *arguments):
        beside = Beside(target=transformers_child.answer_requests, args=(channel, *arguments), daemon=True)
        beside.start()
        return beside

    monkeypatch.setattr(transformers_peer, "start_transformers", started)


@pytest.fixture
def verify(gpuinfer, tmp_path):
    """Run the command on a tiny checkpoint: exit code, document by check, what was said."""

    def run(*words: str, model: Path | None = None) -> tuple[int, dict[str, Any], str]:
        report = tmp_path / "verify.json"
        model = model or tiny_checkpoint("qwen2")
        code, out, err = gpuinfer("verify", "--model", str(model), "--json", str(report), *words)
        document = json.loads(report.read_text()) if report.exists() else {}
        return code, document, out + err

    return run


def checks(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document["checks"]}


@pytest.mark.thorough
def test_a_real_checkpoint_passes_every_check_that_can_be_made_here(verify):
    code, document, said = verify(*BRIEF)
    assert code == 0
    assert document["schema"] == "gpuinfer.verify/1"
    assert (document["status"], document["holds"], document["prompts"]) == ("done", True, 6)
    found = checks(document)
    assert list(found) == CHECKS
    assert "CUDA" in found["graphs = eager"]["why"]
    statuses = {name: check["status"] for name, check in found.items()}
    assert statuses["graphs = eager"] == "skipped"
    assert statuses["gpuinfer = transformers"] == "holds"
    assert "fails" not in statuses.values()
    assert 0 < found["gpuinfer = transformers"]["largest_difference"] < 1e-4
    words = " ".join(said.split())
    assert f"All {list(statuses.values()).count('holds')} checks that were made hold" in words
    # transformers makes a Qwen2 tokenizer anew and cuts words as Qwen's does, whatever tokenizer.json says
    assert statuses["tokens = AutoTokenizer's"] == "differs"
    assert "the difference is on the side of transformers (Qwen2Tokenizer" in words


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_narrow_format_is_judged_by_its_distance_to_float32(verify, near_peer, family):
    code, document, said = verify(*BRIEF, "--dtype", "bfloat16", model=tiny_checkpoint(family, dtype="bfloat16"))
    assert code == 0, said
    found = checks(document)["gpuinfer = transformers"]
    far = found["from_float32"]
    assert found["status"] == "holds"
    assert 0 < far["gpuinfer"] < logits_checks.FACTOR * far["transformers"]
    assert found["largest_difference"] > 1e-3  # what two sound programs make of bfloat16
    assert document["tolerance"]["least"] < far["transformers"] * 4
    assert document["computed_in"] in ("bfloat16", "float32")
    assert checks(document)["tokens = AutoTokenizer's"]["status"] == "holds"


def test_the_side_that_departs_from_the_tokenizer_file_is_named(verify, near_peer, monkeypatch, tmp_path):
    folder = copy_of(tiny_checkpoint("llama"), tmp_path / "spaced")
    llama_tokenizer(folder, tokenizer_class="PreTrainedTokenizerFast")
    assert checks(verify(*BRIEF, model=folder)[1])["tokens = AutoTokenizer's"]["status"] == "holds"

    def shifted(tokenizer, family, settings):
        tokenizer.normalizer = None

    monkeypatch.setattr(subwords, "respaced", shifted)
    code, document, said = verify(*BRIEF, "--limit", "1", model=folder)
    assert code == 4
    assert checks(document)["tokens = AutoTokenizer's"]["status"] == "fails"
    assert "the difference is on the side of gpuinfer" in " ".join(said.split())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_deterministic_demands_the_same_bits_and_gets_them(verify, family):
    code, document, _ = verify(*ALONE, "--deterministic", "--dtype", "bfloat16", model=tiny_checkpoint(family))
    assert code == 0
    assert {check["largest_difference"] for name, check in checks(document).items() if "torch" not in name} == {0.0}


def test_a_decoder_that_is_wrong_in_company_is_named_with_its_logits(verify, planted):
    def wrong(row, company):
        if company:
            row[7] = row.max() + 5.0

    planted(wrong)
    code, document, said = verify(*ALONE)
    assert code == 4
    assert not document["holds"]
    found = checks(document)
    assert found["1 at once = alone"]["status"] == "holds"
    failed = found["3 at once = alone"]
    assert failed["status"] == "fails"
    parted = next(one for one in failed["divergences"] if one["tokens"][1] == 7)
    (ours, theirs) = (parted["logits"][side] for side in ("alone", "3 at once"))
    assert ours[0] > ours[1]
    assert theirs[1] > theirs[0] + 4.0
    assert not parted["tie"]
    words = " ".join(said.split())
    assert f"for token {parted['tokens'][0]} and" in words
    assert f"{theirs[1]:.6g} for token 7" in words


def test_logits_that_are_off_are_a_fault_though_every_token_is_the_same(verify, planted):
    def louder(row, company):
        if company:
            row.mul_(1.01)

    planted(louder)
    code, document, _ = verify(*ALONE)
    assert code == 4
    (fault,) = checks(document)["3 at once = alone"]["divergences"]
    assert fault["tokens"][0] == fault["tokens"][1]
    assert "the logits differ by" in fault["why"]


def near_tie(row, company):
    """The two likeliest tokens are a hair apart, and in company the other way round."""
    first, second = row.topk(2).indices.tolist()
    row[first] = row[second] + (-2e-5 if company else 2e-5)


def test_a_tie_passes_and_is_said(verify, planted):
    planted(near_tie)
    code, document, said = verify(*ALONE, "--limit", "2")
    assert code == 0
    found = checks(document)["3 at once = alone"]
    assert found["status"] == "holds"
    assert found["ties"] > 0
    assert "a tie: the two logits are" in " ".join(said.split())


def test_other_tokens_drawn_from_the_same_logits_are_a_fault(verify, monkeypatch):
    key = probed_answers._key
    monkeypatch.setattr(probed_answers, "_key", lambda ask: key(ask) + ("" if ask.samples == 1 else "-other"))
    code, document, _ = verify(*ALONE)
    assert code == 4
    found = checks(document)
    assert found["drawn, at once = alone"]["status"] == "holds"
    assert found["3 samples = one by one"]["status"] == "fails"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--batch-sizes", "0,3"], "1 to 4096", id="no rows at once"),
        pytest.param(["--new-tokens", "256"], "Use fewer", id="more new tokens than positions"),
        pytest.param(["--prompts", "none.jsonl"], "Give one that exists", id="no such file"),
        pytest.param(["--prompts", "bad.jsonl"], "row 2", id="a row that is wrong"),
        pytest.param(["--prompts", "long.jsonl"], "Shorten it", id="a prompt that does not fit"),
        pytest.param(["--prompts", "empty.jsonl"], "no prompts", id="an empty file"),
        pytest.param(["--meta", "bad.jsonl"], "--checkpoint", id="characters without their checkpoint"),
        pytest.param(["--tolerance", "-1"], "tolerance", id="a tolerance below nothing"),
        pytest.param(["--device", "cuda:77"], "cuda:77", id="a device that is not there"),
    ],
)
def test_bad_usage_is_refused_with_the_cure(verify, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"promt": "x"}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": [5] * 300}))
    (tmp_path / "empty.jsonl").write_text("\n")
    code, document, told = verify(*words)
    assert (code, document) == (2, {})
    assert said in told
    assert "Traceback" not in told


def test_a_damaged_checkpoint_is_refused(verify, tmp_path):
    folder = copy_of(tiny_checkpoint("qwen2"), tmp_path / "damaged")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    code, _, told = verify(model=folder)
    assert code == 2
    assert "model.safetensors" in told


def test_a_nanogpt_checkpoint_is_verified_without_transformers_that_has_no_such_model(gpuinfer, tmp_path):
    model = saved(tmp_path)
    words = ("--checkpoint", str(model), "--batch-sizes", "3", "--new-tokens", "4", "--json", "-", "--device", "cpu")
    code, out, _ = gpuinfer("verify", *words)
    assert code == 0
    found = checks(json.loads(out))
    assert found["compiled = plain torch"]["status"] in ("holds", "skipped")
    assert "no nanogpt models" in found["gpuinfer = transformers"]["why"]


def test_transformers_that_fails_is_no_fault_of_ours_and_is_said(verify, near_peer, monkeypatch):
    monkeypatch.setattr(transformers_peer, "LOAD_S", 0.0)
    code, document, said = verify(*BRIEF, "--limit", "1")
    assert code == 0
    assert checks(document)["gpuinfer = transformers"]["status"] == "skipped"
    assert "transformers took over 0 s" in " ".join(said.split())


def test_transformers_that_cannot_read_the_tokenizer_still_compares_the_logits(verify, near_peer, monkeypatch):
    def unreadable(*words, **options):
        raise OSError("no tokenizer here")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unreadable)
    code, document, said = verify(*BRIEF, "--limit", "1")
    assert code == 0
    found = checks(document)
    assert found["tokens = AutoTokenizer's"]["status"] == "skipped"
    assert found["gpuinfer = transformers"]["status"] == "holds"
    assert "no tokenizer here" in " ".join(said.split())


def test_chats_are_compared_too(verify, near_peer, monkeypatch, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "two"}]}')
    words = (*BRIEF, "--prompts", str(prompts))
    before = checks(verify(*words, model=tiny_checkpoint("llama"))[1])["tokens = AutoTokenizer's"]
    assert before["status"] == "holds"
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *given: render(self, *given) + "!")
    code, document, said = verify(*words, model=tiny_checkpoint("llama"))
    assert code == 4
    assert checks(document)["tokens = AutoTokenizer's"]["status"] == "fails"
    assert "the difference is on the side of gpuinfer" in " ".join(said.split())


def test_ctrl_c_leaves_what_was_found_and_says_that_it_is_not_all(verify, monkeypatch):
    answered, routes = verification.probe_answers, []

    def interrupted(rig, route):
        routes.append(route)
        if len(routes) == 3:
            raise KeyboardInterrupt
        return answered(rig, route)

    monkeypatch.setattr(verification, "probe_answers", interrupted)
    code, document, _ = verify(*ALONE)
    assert code == 3
    assert (document["status"], document["holds"], len(document["checks"])) == ("partial", False, 1)
