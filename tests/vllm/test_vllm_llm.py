"""`gpuinfer.LLM` with vLLM as its engine."""

from __future__ import annotations

import pytest
from vllm_held import CLOSE

import gpuinfer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPTS = ["Once upon a time", "The sea was", [72, 105]]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def test_a_program_asks_it_as_it_asks_our_own_engine():
    asked = ("The sea was", [" calm", " rough"])
    with gpuinfer.LLM("tiny") as own:
        wanted, scores = [one.text for one in own.generate(PROMPTS, **GREEDY)], own.score(*asked)
    with gpuinfer.LLM("tiny", backend="vllm") as llm:
        assert [one.text for one in llm.generate(PROMPTS, **GREEDY)] == wanted
        assert "".join(part.text for part in llm.stream(PROMPTS[0], **GREEDY)) == wanted[0]
        for one, other in zip(llm.score(*asked), scores, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)
        alike = [[one.texts for one in llm.generate(["Once"] * 2, n=2, seed=seed)] for seed in (3, 3, 4)]
        assert alike[0] == alike[1] != alike[2]
        assert alike[0][0] != alike[0][1], "each prompt draws its own"
    assert llm.report()["progress"]["done"] == 3 + 1 + 2 + 6
