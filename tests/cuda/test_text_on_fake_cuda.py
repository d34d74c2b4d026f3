"""Models of text from checkpoint to answer on a CUDA device: opened, sized and tried, prompts, tokens, masks, scores;
and what the device is asked beside: what it holds, if it answers, how fast it is.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

from text.toy import run
from text.unmasking import prompt_of
from text.unmasking import run as run_masks

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.models.device import Gauge, device_name
from gpuinfer.models.out_of_memory import answers, is_lost
from gpuinfer.text import text_roofline
from gpuinfer.text.diffusion import torch_scores
from gpuinfer.text.diffusion.scoring import Asked, Scorer, guided
from gpuinfer.text.generator import open_generator
from gpuinfer.text.generator.fault_isolation import FaultIsolation
from gpuinfer.text.generator.memory_fitting import MemoryFitter
from gpuinfer.text.text_options import TorchModelOptions

UPLOADS = "text/decoder/torch_batch.py Uploads.room"  # until the copy before is over
DRAWN = "text/sampling/torch_path.py Download.values"
BLENDED = "text/diffusion/scoring.py Blender.blended"
STAGES = ("models/pipeline/stage.py CudaStage.at_work", "models/pipeline/stage.py CudaStage._wait")
LONG = "a longer prompt that has to go through in chunks, beside others and before others: "


pytestmark = pytest.mark.usefixtures("text")


def opened(model="tiny", dtype="bfloat16", deterministic=False, devices=("cuda:0",), **tuning):
    setup = Setup(devices=devices, dtype=dtype, deterministic=deterministic)
    return open_generator(
        ModelSpec(model, kind="text"),
        setup,
        TorchModelOptions(**{"slots": 4, "context": 128, "step_tokens": 24} | tuning),
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


@pytest.mark.thorough
def test_a_cache_is_made_anew_in_another_size_while_the_device_is_short_of_memory(cuda):
    generator, device = opened(deterministic=True), {"free": 8 << 30}
    fitter = MemoryFitter(generator, lambda: device["free"], keep_free=4 << 30, min_slots=2)
    assert not generator.decoder.pages_go_back
    pages = generator.decoder.pages
    assert len(finished(run(generator, prompts_with(temperature=0.0)))) == 4
    device["free"] = 0
    assert fitter.is_due
    assert fitter.fit()
    assert (generator.decoder.pages, fitter.counted()["slots"]) == (fitter.bounds.pages[0], 2)
    assert generator.decoder.pages < pages
    assert len(finished(run(generator, prompts_with(temperature=0.0)))) == 4
    device["free"] = 8 << 30
    assert fitter.fit()
    assert (generator.decoder.pages, fitter.counted()["slots"]) == (pages, 4)
    assert len(finished(run(generator, prompts_with(temperature=0.0)))) == 4
    generator.close()


@pytest.mark.sample
@pytest.mark.parametrize(
    ("way", "sampling"),
    [
        ({}, {"temperature": 0.0}),
        ({"dtype": "float16"}, {"top_p": 0.9, "logprobs": 2, "processed_logprobs": True, "seed": 3}),
        ({"deterministic": True}, {"min_tokens": 3, "stop_token_ids": (5,), "repetition_penalty": 1.2}),
        ({"graphs": False, "dtype": "float32"}, {"logit_bias": {3: 1.0}, "top_k": 4, "min_p": 0.1}),
        ({"weights": "int8"}, {"temperature": 0.0}),
        ({"weights": "int4", "deterministic": True}, {"temperature": 0.0}),
    ],
    ids=str,
)
def test_prompts_are_answered_with_a_wait_for_each_draw(cuda, caplog, way, sampling):
    one = opened(**way)
    with cuda.waiting_only_in(UPLOADS, DRAWN):
        assert finished(run(one, prompts_with(**sampling))) == [5, 5, 5, 5]
    assert caplog.messages == []
    assert bool(cuda.captured) == bool(cuda.replayed) == way.get("graphs", True)


def test_experts_of_few_bits_are_refused_where_none_of_our_kernels_compute(cuda):
    with pytest.raises(UsageError, match=r"experts are quantised on a CPU .* Use --device cpu"):
        opened("tiny-llada-moe", weights="int8")


@pytest.mark.thorough
def test_log_probabilities_of_prompts_are_read_for_each_chunk(cuda):
    one = opened()
    with cuda.waiting_only_in(UPLOADS, DRAWN):
        (outcome,) = run(one, prompts_with(prompt_logprobs=1)[2:])
    assert len(outcome.prompt_logprobs) == len(LONG + "again")


@pytest.mark.sample
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


@pytest.mark.thorough
def test_masks_are_blended_on_the_device(cuda):
    one = opened("tiny-llada")
    cuda.read = 0.0  # no mask is sure enough to be committed before its step
    with cuda.waiting_only_in(UPLOADS, DRAWN, BLENDED):
        outcomes = run_masks(one, [prompt_of("what is", 12, decoder="smoothing", ignore_eos=True)])
    assert finished(outcomes) == [12]


@pytest.mark.thorough
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


# Scores of masks: sent in one copy, read back once


VOCABULARY = 301
OPTIONS = {
    "the likeliest": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "seed": 5},
    "filtered": {"temperature": 0.8, "top_k": 9, "top_p": 0.7, "min_p": 0.1},
    "edited": {"temperature": 0.0, "logit_bias": {5: 30.0, 8: 1.5}, "min_tokens": 4, "stop_token_ids": (5, 6)},
}


def wanted(sampling, first, count):
    return Asked(sampling, "k", 0, first, np.arange(count, dtype=np.int32), 0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("needs", [(), ("margin", "entropy")], ids=str)
@pytest.mark.parametrize("options", [*([name] for name in OPTIONS), [*OPTIONS]], ids=" and ".join)
def test_rows_of_all_kinds_are_scored_with_one_copy_and_one_wait(cuda, options, needs):
    each = torch_scores.ROWS  # more than one piece, and logits that no row wants
    rows = [wanted(Sampling(**OPTIONS[name]), number * each, each - 1) for number, name in enumerate(options)]
    scorer = Scorer(VOCABULARY, cuda.device, threads=1, seed=3, end_tokens=(7,), mask_token=300)
    logits = torch.zeros(len(options) * each + 1, VOCABULARY, device=cuda.device)
    for times in (1, 2):  # into two buffers in turn
        with cuda.waiting_only_in(DRAWN):
            scored = scorer.score(logits, rows, needs)
        assert (cuda.waits, cuda.sent) == ({DRAWN: times}, times)
        assert (len(scored.tokens), scored.bad) == (len(logits), {})
    with cuda.waiting_only_in(DRAWN, UPLOADS):  # until a copy is over before its memory is written again
        scorer.score(logits, rows, needs)
    assert (cuda.waits, cuda.sent) == ({DRAWN: 3, UPLOADS: 1}, 3)


def test_a_row_that_is_guided_waits_for_nothing(cuda):
    both = torch.zeros(2, 3, VOCABULARY, device=cuda.device)
    with cuda.waiting_only_in():
        guided(both[0], both[1], 1.5)


# The device itself


def test_a_gauge_tells_what_tensors_and_allocator_hold(cuda):
    cuda.allocated = 3 << 20
    read = Gauge(cuda.device).read()
    assert (read["name"], read["allocated_mb"], read["reserved_mb"]) == (device_name(cuda.device), 3.0, 3.0)


def test_a_device_that_still_answers_is_not_lost(cuda):
    with cuda.waiting_only_in("models/out_of_memory.py answers"):
        assert answers(cuda.device)
        assert not is_lost(RuntimeError("CUDA error: invalid configuration argument"), cuda.device)


def test_the_roofline_of_text_waits_for_the_device_after_each_pass(cuda, monkeypatch):
    generator = opened(dtype="float32", slots=2, context=32, step_tokens=16)
    monkeypatch.setattr(text_roofline, "LOOK_S", 0.0)
    threads = torch.get_num_threads()
    generator.decoder.use(threads + 1)
    assert torch.get_num_threads() == threads  # which are the processor's
    with cuda.waiting_only_in("text/text_roofline.py _look", UPLOADS):
        found = text_roofline.measure_roofline(generator.decoder, rows=2, step_tokens=16, seconds=0.0)
    assert found.at_rows == 2


def test_memory_that_ran_out_is_given_back_before_a_smaller_step(cuda):
    troubles = FaultIsolation(SimpleNamespace(rows=[]))
    assert troubles.failed(["a", "b"], 8, torch.OutOfMemoryError("CUDA out of memory.")) is None
    assert cuda.log == ["the cache is emptied"]
