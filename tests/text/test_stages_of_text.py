"""Models of text in stages: a step cut into micro-batches, and answers that are those of the whole model."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text.random_models import LLAMA, VARIANTS, random_weights
from text.toy import run
from text.unmasking import prompt_of
from text.unmasking import run as run_masks
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpuinfer import api
from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendError, Closed, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.report.report import Run, build, schema
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.text.decoder import torch_layers
from gpuinfer.text.decoder.attention_plan import positions_of
from gpuinfer.text.generator import open_generator
from gpuinfer.text.stages.staged_decoder import MicroBatchCutter, Portion, PortionSegment
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.text.transformer import Step, Vectors

LONG = "a longer prompt that has to go through in chunks, beside others and before others: "
PROMPTS = [
    Prompt(text=text, key=str(number), samples=1 + number % 2, sampling=Sampling(max_tokens=6, top_p=0.9, logprobs=1))
    for number, text in enumerate(["x", LONG, LONG + "again", "def batch(rows):"])
]
WAYS = [
    pytest.param({"parallel": "layers"}, id="layers"),
    pytest.param({"parallel": "pipeline"}, id="pipeline"),
    pytest.param({"parallel": "pipeline", "split_points": (1,), "micro_batch_rows": 5}, id="small micro-batches"),
]


def opened(model="tiny", slots=4, dtype="float32", **tuning):
    setup = Setup(devices=("cpu",), dtype=dtype, deterministic=True)
    return open_generator(
        ModelSpec(model, kind="text"),
        setup,
        TorchModelOptions(slots=slots, context=128, step_tokens=24, threads=1, **tuning),
    )


def answers(prompts=PROMPTS, run=run, **options):
    generator = opened(**options)
    try:
        return [[(one.tokens, one.logprobs) for one in outcome.completions] for outcome in run(generator, prompts)]
    finally:
        generator.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in ("bfloat16", "float16"))]
)
def test_text_is_that_of_the_whole_model(way, dtype):
    assert answers(dtype=dtype, **way) == answers(dtype=dtype)


def test_attention_in_float16_does_not_depend_on_which_kernels_are_allowed(monkeypatch):
    """Torch's choice among kernels is the process's: no stage makes one that another would lose by, and none
    goes by that of another which has just allowed the faster kernel.
    """
    expected, attended, allowed = answers(PROMPTS[1:2], dtype="float16"), torch_layers.of_group, set()

    def beside_another(*given):
        allowed.add(torch.backends.cuda.flash_sdp_enabled())
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return attended(*given)

    monkeypatch.setattr(torch_layers, "of_group", beside_another)
    assert answers(PROMPTS[1:2], dtype="float16", parallel="layers") == expected
    assert allowed == {True}


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["tiny-llada", "tiny-llada-moe"])
@pytest.mark.parametrize("way", WAYS)
def test_masks_are_filled_in_as_by_the_whole_model(model, way):
    prompts = [prompt_of("what is", 12), prompt_of("x", 5), prompt_of(LONG, 8)]
    assert answers(prompts, run_masks, model=model, **way) == answers(prompts, run_masks, model=model)


segments = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=9)


@given(segments, st.one_of(st.none(), st.integers(1, 20)), st.booleans(), st.data())
def test_micro_batches_are_the_step_in_parts(segments, rows, whole_segments, data):
    starts, lengths = (np.array(part, np.int32) for part in zip(*segments, strict=True))
    total = int(lengths.sum())
    wanted = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))), np.int32)
    places = np.array(sorted(data.draw(st.sets(st.integers(0, total - 1)))), np.int32)
    step = Step(
        np.arange(total, dtype=np.int32) * 7,
        np.arange(2 * len(starts), dtype=np.int32)[::-1].reshape(-1, 2).copy(),
        starts,
        lengths,
        wanted,
        np.arange(len(starts), dtype=np.int32) % 3,
        np.arange(total, dtype=np.int32) + 1 if whole_segments else None,
        Vectors(places, places[:, None].astype(np.float32)),
    )
    cutter = MicroBatchCutter(rows, least=3, most=4)
    for _ in range(2):  # the second time it knows where
        parts = cutter.cut(step)
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), step.tokens)
        assert np.array_equal(np.concatenate([positions_of(part) for part in parts]), positions_of(step))
        pages = [np.repeat(part.pages, part.lengths, 0) for part in parts]
        assert np.array_equal(np.concatenate(pages), np.repeat(step.pages, step.lengths, 0))
        adapters = [np.repeat(part.adapters, part.lengths) for part in parts]
        assert np.array_equal(np.concatenate(adapters), np.repeat(step.adapters, step.lengths))
        assert [token for part in parts for token in part.tokens[part.wanted].tolist()] == (7 * wanted).tolist()
        own = [
            (part.tokens[part.vectors.places], part.vectors.values[:, 0]) for part in parts if part.vectors is not None
        ]
        assert [token for tokens, _ in own for token in tokens.tolist()] == (7 * places).tolist()
        assert [value for _, values in own for value in values.tolist()] == places.tolist()
        assert all(part.lengths.min() > 0 for part in parts)
        if whole_segments:
            assert sum(len(part.lengths) for part in parts) == len(starts)
            assert np.array_equal(np.concatenate([part.sees for part in parts]), step.sees)
        elif rows is not None:
            assert max(len(part.tokens) for part in parts) <= rows
        else:
            assert len(parts) <= 4
            assert len(parts) == 1 or min(len(part.tokens) for part in parts) >= 3
        assert all(
            a is b
            for one, other in zip(parts, cutter.cut(step), strict=True)
            for a, b in ((one.pages, other.pages), (one.lengths, other.lengths), (one.adapters, other.adapters))
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_portions_have_all_that_a_model_has_once(name):
    shape = replace(LLAMA, layers=4, **VARIANTS[name])
    weights = random_weights(shape)
    cut = [Portion(shape, start, stop) for start, stop in ((0, 1), (1, 3), (3, 4))]
    shapes, own = [one.shape for one in cut], [one.weights(weights) for one in cut]
    assert sum((one.layers for one in own), ()) == weights.layers
    assert [one.layers for one in shapes] == [1, 2, 1]
    for part, one in zip(cut, shapes, strict=True):
        for layer in range(one.layers):
            assert one.mixed(layer) == shape.mixed(part.start + layer)
            assert one.inner(layer) == shape.inner(part.start + layer)
        assert one.windows == shape.windows[part.start : part.stop]
    assert [one.embedding is weights.embedding for one in own] == [True, False, False]
    assert [one.head is weights.head for one in own] == [False, False, True]
    assert own[0].positions is weights.positions
    assert own[1].positions is None


def test_a_stage_that_fails_is_named_and_the_answers_beside_it_come(monkeypatch):
    def raising(self, value):
        if not callable(value) and self._number == 1 and ord("!") in value[0].tokens:
            raise ValueError("no exclamations.")
        return computed(self, value)

    computed = PortionSegment.__call__
    monkeypatch.setattr(PortionSegment, "__call__", raising)
    generator = opened(parallel="pipeline", split_points=(1,))
    good, bad = run(generator, [PROMPTS[0], Prompt(text="no!", sampling=Sampling(max_tokens=4))])
    generator.close()
    assert len(good.completions[0].tokens) > 0
    assert isinstance(bad, BackendError)
    assert "ValueError: no exclamations (raised in stage 1, layer" in str(bad)


def backend(model="tiny", devices=("cpu",), **options):
    return InProcess(Setup(model=ModelSpec(model, kind="text"), devices=devices), slots=4, context=128, **options)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("tiny", {"stages": 9}, r"9 stages, and model 'tiny' has \d layers.*-B stages="),
        ("tiny", {"split_points": (9,)}, r"has \d layers, 0 to \d"),
        ("tiny", {"layers": "blocks"}, "are known. Leave -B layers out"),
        ("null", {}, "has no layers to cut. Leave -B parallel out"),
    ],
)
async def test_what_cannot_be_cut_so_says_why(model, options, said):
    with pytest.raises(UsageError, match=said):
        await backend(model, parallel="pipeline", **options).start(BackendContext())


async def test_the_report_tells_of_each_stage():
    engine = Engine(backend(devices=("cpu", "cpu"), parallel="pipeline"), Dynamic())
    await engine.start()
    found = await asyncio.gather(*(engine.submit(prompt, rows=prompt.samples) for prompt in PROMPTS))
    assert [len(one.completions) for one in found] == [1, 2, 1, 2]
    snapshot = replace(engine.snapshot(), device=dict(engine.backend.device()))
    await engine.close()
    assert [lane["name"] for lane in snapshot.lanes if lane["name"].startswith("stage")] == ["stage 0", "stage 1"]
    wall_s = max(sum(lane["stations"].values()) for lane in snapshot.lanes)
    setup = Setup(devices=("cpu", "cpu"))
    report = build(Run("generate", "inprocess", "dynamic", "", 0.0, wall_s, "done", setup, snapshot, api.Progress(1)))
    jsonschema.validate(report, schema())
    told = report["stages"]
    assert told["stages"][0]["layers"][0] == 0
    assert told["stages"][0]["layers"][1] + 1 == told["stages"][1]["layers"][0]
    assert told["micro_batches"] >= told["batches"] > 0
    assert snapshot.device["in_force"]["stages"] == 2


async def test_closed_while_it_answers_it_leaves_nothing():
    one = backend(parallel="pipeline")
    await one.start(BackendContext())
    prompt = Prompt(text="x", sampling=Sampling(max_tokens=100, ignore_eos=True))
    stream = aiter(one.stream([Request(prompt, parts=True)]))
    await anext(stream)
    await one.close()
    *_, last = [event async for event in stream]
    assert isinstance(last.error, Closed)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpuinfer-stage")]
