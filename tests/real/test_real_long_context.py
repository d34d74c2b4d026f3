"""As many tokens as SmolLM2 has positions, 8,192: what comes last is what transformers computes, and prompts that begin
alike share what was computed.

The first 4 of its 30 layers stand for it, with its widths, heads, angles and vocabulary: whole, such a prompt takes two
minutes here and there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from answering import TIE, Answerer, Reference, agreed, greedy
from safetensors.torch import load_file, save_file

from gpuinfer.errors import GpuinferError
from gpuinfer.generation import Prompt

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
LAYERS, POSITIONS, NEW = 4, 8192, 32
SHARED = 8000  # tokens that two prompts begin with
PAGE = 32


@pytest.fixture(scope="module")
def shallow(folder, tmp_path_factory):
    """The model's folder without its upper layers."""
    place = tmp_path_factory.mktemp("models") / "shallow"
    place.mkdir()
    for file in folder.glob("*.json"):
        shutil.copy(file, place)
    for file in folder.glob("*.jinja"):
        shutil.copy(file, place)
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == POSITIONS
    (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in weights.items() if ".layers." not in name or int(name.split(".")[2]) < LAYERS}
    assert len(kept) < len(weights)
    save_file(kept, place / "model.safetensors", metadata={"format": "pt"})
    return place


@pytest.fixture(scope="module")
def asked(shallow):
    """Two prompts that fill all positions with their answers, one after the other, and what was answered."""
    reference = Reference(shallow)
    pages = [ROOT / "docs" / name for name in ("generate.md", "serve.md", "selfplay.md", "rollouts.md", "fleet.md")]
    tokens = reference.tokenizer("\n".join(page.read_text() for page in pages))["input_ids"]
    length = POSITIONS - NEW
    assert len(tokens) > 2 * length
    prompts = [tokens[:length], tokens[:SHARED] + tokens[length : 2 * length - SHARED]]
    with Answerer(shallow, slots=4, context=POSITIONS) as answerer:
        sampling = greedy(NEW, logprobs=2, ignore_eos=True)
        given = [answerer.answer([Prompt(tokens=tuple(one), sampling=sampling)])[0] for one in prompts]
        too_long = Prompt(tokens=tuple(tokens[: POSITIONS + 1]), sampling=sampling)
        with pytest.raises(GpuinferError) as refused:
            answerer.answer([too_long])
    return reference, prompts, given, str(refused.value)


def test_what_comes_after_8_thousand_tokens_is_what_transformers_computes(asked):
    """The second prompt from the keys and values of what it shares with the first, as both programs keep them."""
    reference, prompts, given, _ = asked
    model, kept = reference.model, None
    for prompt, generation in zip(prompts, given, strict=True):
        [answer] = generation.completions
        assert len(answer.tokens) == NEW
        whole = torch.tensor([[*prompt, *answer.tokens]])
        first = 0
        if kept is not None:
            kept.crop(SHARED)
            first = SHARED
        with torch.inference_mode():
            told = model.model(whole[:, first:], past_key_values=kept, use_cache=True)
            logits = model.lm_head(told.last_hidden_state[0, -NEW - 1 : -1])
        kept = told.past_key_values
        same, tied = agreed(logits, answer.tokens)
        assert same == NEW or tied, f"they part at token {same}"
        expected = torch.log_softmax(logits, -1)
        for row, one in enumerate(answer.logprobs):
            for candidate in (one.chosen, *one.likeliest):
                assert abs(candidate.logprob - float(expected[row, candidate.token])) < TIE


def test_a_prompt_takes_over_the_pages_that_it_shares_with_an_earlier_one(asked):
    first, second = asked[2]
    assert first.cached_tokens == 0
    assert SHARED - PAGE < second.cached_tokens <= SHARED


def test_a_prompt_beyond_the_last_position_is_refused_with_both_numbers(asked):
    said = asked[3]
    assert "8,193" in said or "8193" in said
    assert "8,192" in said or "8192" in said
