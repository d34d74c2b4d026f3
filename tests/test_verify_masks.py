"""`gpuinfer verify` of a diffusion model: what must be the same is, and what a cache changes is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from text.tiny_diffusion import tiny_diffusion

from gpuinfer.api import Setup
from gpuinfer.lab.verify.diffusion_checks import DiffusionChecks
from gpuinfer.lab.verify.verify_setup import VerifyOptions, open_setup
from gpuinfer.text.generator import setup

BRIEF = ("--batch-sizes", "1,3", "--new-tokens", "8", "--limit", "4", "--block-length", "4", "--device", "cpu")


@pytest.fixture(autouse=True)
def one_lane(monkeypatch) -> None:
    """Lanes wait for one another at each step, for long where tests share the cores."""
    monkeypatch.setattr(setup, "cores", lambda: 1)


@pytest.fixture
def verify(gpuinfer, tmp_path):
    """Run the command: exit code, checks by name, what was said."""

    def run(model: object, *words: str) -> tuple[int, dict[str, Any], str]:
        report = tmp_path / "verify.json"
        code, out, err = gpuinfer("verify", "--model", str(model), "--json", str(report), *BRIEF, *words)
        found = json.loads(report.read_text())["checks"] if report.exists() else []
        return code, {check["name"]: check for check in found}, out + err

    return run


def test_answers_are_the_same_in_any_company_and_a_cache_is_told_what_it_changes(verify):
    code, checks, said = verify("tiny-llada", "--cfg-scale", "0.5")
    assert code == 0, said
    assert {name: check["status"] for name, check in checks.items()} == {
        "1 at once = alone": "holds",
        "3 at once = alone": "holds",
        "any order = alone": "holds",
        "any company = alone": "holds",
        "drawn, at once = alone": "holds",
        "3 samples = one by one": "holds",
        "prefix cache ~ none": "told",
        "dual cache ~ none": "told",
        "vicinity cache ~ none": "told",
        "compiled = plain torch": "holds",
        "gpuinfer = transformers": "skipped",
    }
    assert "of 32 tokens differ" in checks["dual cache ~ none"]["why"]
    assert "dual cache ~ none: " in said


def test_the_cache_of_a_block_causal_model_changes_nothing(verify):
    code, checks, said = verify(tiny_diffusion("sdar"))
    assert code == 0, said
    assert checks["exact cache = none"]["status"] == "holds"
    assert not [name for name in checks if "~" in name]


def test_a_model_without_masks_is_not_verified_with_words_on_them(verify):
    code, checks, said = verify("tiny")
    assert (code, checks) == (2, {})
    assert "`block_length` says how a diffusion model fills its masks in" in " ".join(said.split())


def test_a_row_that_feels_its_company_is_found():
    options = VerifyOptions(model="tiny-llada", batch_sizes=[2], new_tokens=4, limit=3)
    opened = open_setup(options, Setup(devices=("cpu",)))
    plain = opened.generator.decoder.forward

    def forward(step: Any) -> Any:
        logits = plain(step)
        if len(step.pages) > 1:
            logits = logits.clone()
            logits[0, ord("a")] += 50.0
        return logits

    opened.generator.decoder.forward = forward
    try:
        masks = DiffusionChecks(opened)
        masks.alone()
        findings = {name: check() for name, check in masks.checks()}
    finally:
        opened.close()
    assert findings["2 at once = alone"].status == "fails"
    assert "2 at once token 97" in findings["2 at once = alone"].why
