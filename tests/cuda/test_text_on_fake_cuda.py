"""Models of text from checkpoint to answer on a CUDA device: opened, sized and tried, prompts, tokens, masks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from text.toy import run
from text.unmasking import prompt_of
from text.unmasking import run as run_masks

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.text.generator import Tuning, open_generator

UPLOADS = "text/decoder/torch_batch.py Uploads.room"  # until the copy before is over
DRAWN = "text/sampling/torch_path.py Download.values"
BLENDED = "text/diffusion/scoring.py Blender.blended"
STAGES = ("models/pipeline/stage.py CudaStage.at_work", "models/pipeline/stage.py CudaStage._wait")
LONG = "a longer prompt that has to go through in chunks, beside others and before others: "


pytestmark = pytest.mark.usefixtures("text")


def opened(model="tiny", dtype="bfloat16", deterministic=False, devices=("cuda:0",), **tuning):
    setup = Setup(devices=devices, dtype=dtype, deterministic=deterministic)
    return open_generator(
        ModelSpec(model, kind="text"), setup, Tuning(**{"slots": 4, "context": 128, "step_tokens": 24} | tuning)
    )


def finished(outcomes):
    """How many tokens each answer has; a prompt that failed says why."""
    assert all(isinstance(one, Generation) for one in outcomes), outcomes
    return [len(answer.tokens) for one in outcomes for answer in one.completions]


def prompts_with(**sampling):
    return [
        Prompt(text=text, key=text, samples=samples, sampling=Sampling(max_tokens=5, ignore_eos=True, **sampling))
        for text, samples in (("x", 2), (LONG, 1), (LONG + "again", 1))
    ]


@pytest.mark.parametrize(
    ("way", "sampling"),
    [
        ({}, {"temperature": 0.0}),
        ({"dtype": "float16"}, {"top_p": 0.9, "logprobs": 2, "processed_logprobs": True, "seed": 3}),
        ({"deterministic": True}, {"min_tokens": 3, "stop_token_ids": (5,), "repetition_penalty": 1.2}),
        ({"graphs": False, "dtype": "float32"}, {"logit_bias": {3: 1.0}, "top_k": 4, "min_p": 0.1}),
    ],
    ids=str,
)
def test_prompts_are_answered_with_a_wait_for_each_draw(cuda, caplog, way, sampling):
    one = opened(**way)
    with cuda.waiting_only_in(UPLOADS, DRAWN):
        assert finished(run(one, prompts_with(**sampling))) == [5, 5, 5, 5]
    assert caplog.messages == []
    assert bool(cuda.captured) == bool(cuda.replayed) == way.get("graphs", True)


def test_log_probabilities_of_prompts_are_read_for_each_chunk(cuda):
    one = opened()
    with cuda.waiting_only_in(UPLOADS, DRAWN):
        (outcome,) = run(one, prompts_with(prompt_logprobs=1)[2:])
    assert len(outcome.prompt_logprobs) == len(LONG + "again")


@pytest.mark.parametrize(
    ("model", "unmasking"),
    [
        ("tiny-llada", {"temperature": 0.8, "top_k": 5, "logit_bias": {3: 1.0}, "min_tokens": 3}),
        ("tiny-llada", {"cfg_scale": 0.5, "cache": "dual", "block_length": 4, "logprobs": 2}),
        ("tiny-llada-moe", {"decoder": "factor"}),
        ("tiny-llada2", {"decoder": "dream"}),
        ("tiny-dream", {"cache": "prefix", "block_length": 4}),
        ("tiny-sdar", {"cache": "exact"}),
    ],
    ids=str,
)
def test_masks_are_filled_in_with_a_wait_for_each_step(cuda, caplog, model, unmasking):
    one = opened(model)
    with cuda.waiting_only_in(UPLOADS, DRAWN):
        outcomes = run_masks(one, [prompt_of(text, 8, ignore_eos=True, **unmasking) for text in ("what is", "x")])
    assert finished(outcomes) == [8, 8]
    assert caplog.messages == []


def test_masks_are_blended_on_the_device(cuda):
    one = opened("tiny-llada")
    cuda.read = 0.0  # no mask is sure enough to be committed before its step
    with cuda.waiting_only_in(UPLOADS, DRAWN, BLENDED):
        outcomes = run_masks(one, [prompt_of("what is", 12, decoder="smoothing", ignore_eos=True)])
    assert finished(outcomes) == [12]


@pytest.mark.parametrize(
    ("model", "parallel", "devices"),
    [
        ("tiny", "pipeline", ("cuda:0",)),
        ("tiny", "layers", ("cuda:0", "cuda:1")),
        ("tiny-llada", "layers", ("cuda:0",)),
        ("tiny-llada", "pipeline", ("cuda:0", "cuda:1")),
    ],
    ids=str,
)
def test_stages_answer_as_one_device_does(cuda, stages_inline, model, parallel, devices):
    cuda.devices = 2
    one = opened(model, devices=devices, parallel=parallel, stages=2)
    with cuda.waiting_only_in(UPLOADS, DRAWN, *STAGES):
        if model == "tiny":
            assert finished(run(one, prompts_with())) == [5, 5, 5, 5]
        else:
            assert finished(run_masks(one, [prompt_of(LONG, 8, ignore_eos=True), prompt_of("x", 8)])) == [8, 8]
