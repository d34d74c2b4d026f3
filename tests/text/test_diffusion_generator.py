"""What becomes of one prompt that a diffusion model answers."""

from __future__ import annotations

from text.unmasking import generator_of, run

from gpuinfer.generation import Prompt, Sampling


def test_an_answer_has_as_many_tokens_as_were_asked_for_and_no_mask():
    generator = generator_of("tiny-llada")
    (answer,) = run(generator, [Prompt(text="hello", sampling=Sampling(max_tokens=20, temperature=0.0))])
    (completion,) = answer.completions
    assert len(completion.tokens) == 20
    assert generator.decoder.shape.masking.mask_token not in completion.tokens
    assert completion.finish_reason == "length"
    assert completion.text == generator.language.decode(completion.tokens)
