"""Real, if tiny, checkpoints from a folder to text: against transformers, and against themselves in other company."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from text.decoders import kernels, on_the_cpu
from text.oracle import peer
from text.random_models import LLAMA, random_weights
from text.tiny import tiny_checkpoint
from text.toy import run

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import BadResult, UsageError
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.text.checkpoint import Checkpoint, open_checkpoint
from gpuinfer.text.generator import Generator, open_generator
from gpuinfer.text.generator.setup import fit_to_memory
from gpuinfer.text.language.language import Language
from gpuinfer.text.language.vocabulary import Vocabulary
from gpuinfer.text.text_options import TorchModelOptions

TEXTS = [
    "The quick brown fox",
    "def batch(rows):",
    "Zürich, naïve café, 東京; and a longer prompt that has to go through in chunks, beside others and before others",
    "user: what is",
    "x",
    "The quick brown fox jumps over the lazy dog, and then",
    "The quick brown fox jumps over the lazy dog, but not",
]


def opened(folder, *, dtype="float32", arguments=None, **tuning):
    spec = ModelSpec(name=str(folder), kind="text", arguments=arguments or {})
    setup = Setup(devices=("cpu",), dtype=dtype, deterministic=True)
    return open_generator(spec, setup, TorchModelOptions(**{"slots": 4, "step_tokens": 24, "threads": 1, **tuning}))


ASKED_FIRST = """
import sys
from numba.core.dispatcher import Dispatcher
from gpuinfer.generation import Constraint, Prompt, Sampling
from text.test_generator_models import opened
from text.toy import run


def ready():
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("gpuinfer.text.")]
    kernels = {id(one): one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}
    return {f"{one.__module__}.{one.__name__}": len(one.overloads) for one in kernels.values()}


generator = opened("tiny", slots=2)
before = ready()
assert any(before.values())
for more in (
    {"logprobs": 3},
    {"prompt_logprobs": 2},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"presence_penalty": 1.0, "repetition_penalty": 1.2},
    {"stop": ("a",), "min_tokens": 2},
    {"constraint": Constraint(regex="[a-z]{3}")},
):
    (answer,) = run(generator, [Prompt(text="Hello", key="k", sampling=Sampling(max_tokens=4, **more))])
    assert answer.completions, more
    assert ready() == before, more
"""


@pytest.mark.thorough
def test_a_generator_that_is_open_has_all_kernels_that_a_request_may_need():
    """In a process of its own: in this one other tests have asked for everything."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", ASKED_FIRST]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_rows_that_give_back_their_pages_have_the_bits_that_they_would_have_had(family):
    """Four pages: those of one row that is as long as the context, and one more."""
    sampling = Sampling(max_tokens=40, top_p=0.95, repetition_penalty=1.1, logprobs=1, ignore_eos=True)
    prompts = [
        Prompt(text=text, key=text, samples=1 + number % 2, sampling=sampling) for number, text in enumerate(TEXTS)
    ]
    found = []
    for pages in (None, 4):
        generator, steps = opened(tiny_checkpoint(family), pages=pages, context=96), []
        found.append([outcome.completions for outcome in run(generator, prompts, watch=steps.append)])
        generator.close()
        assert any(stepped.preempted for stepped in steps) == (pages is not None)
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [on_the_cpu, partial(kernels, threads=1)], ids=["torch", "kernels"])
def test_a_prompt_whose_logits_are_nan_does_not_spoil_what_others_share_with_it(make):
    """Masked weights of zero are multiplied with the values that they hide, so its system prompt is NaN as well."""
    shape = replace(LLAMA, kv_heads=4)
    weights, poison = random_weights(shape), 7
    weights.embedding[poison] = torch.nan
    system, sampling = [10 + number % 40 for number in range(100)], Sampling(max_tokens=4, temperature=0)
    asked = [Prompt(tokens=(*system, *own), sampling=sampling) for own in ([poison, 1], [20, 21], [22, 21], [20, 21])]
    how = {"seed": 1, "end_tokens": (60,), "step_tokens": 256, "threads": 1, "deterministic": True}
    found = []
    for prompts in (asked, asked[1:]):
        decoder = make(shape, weights, torch.float32, slots=4, length=256)
        generator = Generator(decoder, Language(Vocabulary(tuple(map(chr, range(97, 157)))), 61, (60,)), **how)
        found.append([outcome for prompt in prompts for outcome in run(generator, [prompt])])
        generator.close()
    [failed, *outcomes], expected = found
    assert isinstance(failed, BadResult)
    assert [one.completions for one in outcomes] == [one.completions for one in expected]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_greedy_text_is_that_of_transformers(family):
    folder = tiny_checkpoint(family)
    generator = opened(folder)
    prompts = [Prompt(text=text, sampling=Sampling(temperature=0, max_tokens=16, ignore_eos=True)) for text in TEXTS]
    outcomes = run(generator, prompts)
    generator.close()
    how = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    for prepared, outcome in zip(generator.prepare(prompts), outcomes, strict=True):
        inputs = torch.tensor(prepared.tokens.tolist())[None]
        expected = peer(folder).generate(inputs, attention_mask=torch.ones_like(inputs), **how)
        assert list(outcome.completions[0].tokens) == expected[0, len(prepared.tokens) :].tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sampled_text_is_the_same_in_any_company_order_and_chunks(dtype):
    folder, prompts = tiny_checkpoint("qwen2"), []
    for number, text in enumerate(TEXTS):
        how = {"top_p": 0.95, "repetition_penalty": 1.1, "stop": ("e",) if number == 3 else ()}
        sampling = Sampling(max_tokens=12 + number, **how)
        prompts.append(Prompt(text=text, key=f"{number}", samples=1 + number % 2, sampling=sampling))

    def answers(generator, asked):
        return [
            [(one.text, one.tokens, one.finish_reason) for one in outcome.completions]
            for outcome in run(generator, asked)
        ]

    expected = []
    for prompt in prompts:
        generator = opened(folder, slots=2, step_tokens=1000, dtype=dtype)
        expected += answers(generator, [prompt])
        generator.close()
    for slots, step_tokens in ((7, 16), (2, 7), (16, 1000)):
        order = random.Random(slots).sample(range(len(prompts)), len(prompts))
        generator = opened(folder, slots=slots, step_tokens=step_tokens, dtype=dtype)
        for _ in range(2):  # the second time with what the first has left in the slots
            assert answers(generator, [prompts[number] for number in order]) == [expected[number] for number in order]
        generator.close()


def test_the_built_in_model_keeps_to_a_json_schema():
    generator = opened("tiny", slots=3)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    sampling = Sampling(max_tokens=40, constraint=Constraint(json_schema=schema))
    outcomes = run(generator, [Prompt(text="json: ", key=str(number), sampling=sampling) for number in range(4)])
    generator.close()
    answers = {
        (one.text.replace(" ", "").replace("\n", ""), one.finish_reason) for o in outcomes for one in o.completions
    }
    assert answers <= {('{"a":1}', "stop"), ('{"a":2}', "stop")}


def test_what_was_opened_is_told_with_what_was_estimated_and_the_tuning_comes_before_the_models_arguments():
    generator = opened("tiny", arguments={"context": 100, "slots": 5, "step_tokens": 9}, slots=3)
    generator.close()
    facts = generator.facts
    assert (facts["slots"], facts["context"], facts["step_tokens"], facts["dtype"]) == (3, 100, 24, "float32")
    assert facts["estimated_weights_bytes"] > 4_000_000
    assert facts["estimated_bytes"] > facts["estimated_weights_bytes"] + facts["estimated_cache_bytes"]
    assert facts["cache_bytes"] == pytest.approx(facts["estimated_cache_bytes"], rel=0.25)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        pytest.param({"context": 10**6}, "--context N", id="a context that the model was not made for"),
        pytest.param({"pages": 3}, "Use -B pages=64, or --context 96", id="pages for less than one row"),
        pytest.param({"threads": 10**5}, "-B threads=N with N from 1 to", id="more threads than cores"),
        pytest.param({"arguments": {"slots": 0}}, "slots is 0", id="no slots"),
        pytest.param({"arguments": {"slots": 10**9}}, "does not fit", id="slots that fit nowhere"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(tuning, message, monkeypatch):
    monkeypatch.setattr(Checkpoint, "weights", lambda *given: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match=message):
        opened("tiny", **{"slots": None, **tuning})


def test_a_context_that_nobody_asked_for_gets_shorter_until_it_fits():
    checkpoint = open_checkpoint(ModelSpec(name="tiny", kind="text"))

    def fitted(pages, context, free):
        return fit_to_memory(checkpoint, 64, pages, context, torch.float32, free)

    needed = checkpoint.estimate(64, 16, 512, torch.float32).peak_bytes
    shorter, estimate = fitted(None, None, int(needed / 0.9) + 2)
    assert (fitted(None, None, 10**12)[0], shorter, estimate.peak_bytes) == (2048, 512, needed)
    for pages, context, free, said in (
        (None, 2048, int(needed / 0.9) + 2, "does not fit"),
        (15, 512, 10**12, "hold 480, and one row of 512 tokens takes 16 pages"),
        (4_000_000, 512, 10**10, r"4,000,000 pages[^\n]*\nUse -B pages=\d+ or"),
    ):
        with pytest.raises(UsageError, match=said):
            fitted(pages, context, free)
