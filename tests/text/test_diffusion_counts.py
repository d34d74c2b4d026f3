"""What a diffusion model's steps are counted as: useful tokens, forwards, positions; and who is told of them."""

from __future__ import annotations

import asyncio

import pytest

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Prompt, Sampling, Unmasking
from gpuinfer.report.report import unmasking
from gpuinfer.serving.monitoring.metrics import exposition
from gpuinfer.stats import DIFFUSION_COUNTS, DiffusionCounters, Snapshot
from gpuinfer.text.generator import Tuning, open_generator
from gpuinfer.text.generator.driver import DriverCounters

PROMPT, ANSWER, BLOCK = 10, 24, 8
SPEC = ModelSpec("tiny-llada", arguments={"slots": 4, "context": 64}, kind="text")


@pytest.fixture(scope="module")
def generator():
    made = open_generator(SPEC, Setup(model=SPEC, devices=("cpu",)), Tuning(threads=1))
    yield made
    made.close()


def prompt(number, **unmasking_of):
    tokens = tuple((7 * number + place) % 200 for place in range(PROMPT))
    asked = Unmasking(block_length=BLOCK, **unmasking_of)
    return Prompt(
        tokens=tokens, sampling=Sampling(max_tokens=ANSWER, temperature=0, ignore_eos=True, unmasking=asked), key="k"
    )


def counted(generator, *prompts):
    """What answering them came to, and the answers' tokens."""
    counters, answers = DriverCounters(), []
    for number, prepared in enumerate(generator.prepare(prompts)):
        generator.add(number, prepared)
    while generator.busy:
        stepped = generator.step()
        counters.add(stepped, 0.001)
        answers += [answer.completions[0].tokens for _, answer in stepped.finished]
    found = DiffusionCounters.of({name: getattr(counters, name) for name in DIFFUSION_COUNTS})
    assert found is not None
    return found, answers


def test_a_token_a_step_over_whole_canvases(generator):
    found, answers = counted(generator, prompt(0), prompt(1))
    assert [len(answer) for answer in answers] == [ANSWER, ANSWER]
    assert (found.forwards, found.useful, found.committed, found.idle) == (2 * ANSWER, 2 * ANSWER, 2 * ANSWER, 0)
    assert (found.tokens_per_forward, found.computed_share) == (1.0, 1.0)
    assert found.positions == 2 * ANSWER * (PROMPT + ANSWER)


def test_with_a_cache_a_block_is_computed_anew_and_the_whole_canvas_once_for_each(generator):
    found, _ = counted(generator, prompt(0, cache="dual"))
    assert found.positions == ANSWER * (PROMPT + ANSWER)
    assert found.computed == 3 * (PROMPT + ANSWER) + (ANSWER - 3) * BLOCK


def test_guidance_has_a_canvas_of_its_own_in_the_same_forward(generator):
    found, _ = counted(generator, prompt(0, cfg_scale=1.0))
    assert (found.forwards, found.positions) == (ANSWER, 2 * ANSWER * (PROMPT + ANSWER))


def test_fewer_steps_bring_more_tokens_each(generator):
    found, _ = counted(generator, prompt(0, steps=6), prompt(1, steps=12))
    assert found.forwards == 6 + 12
    assert found.useful == 2 * ANSWER


def test_what_follows_the_end_of_an_answer_is_committed_and_not_useful(generator):
    """Stop tokens are what ends it here: a random model hardly says its own end."""
    (first,) = counted(generator, prompt(0, steps=3))[1]
    end = first[3]
    plain = prompt(0, steps=3)
    stopping = Prompt(
        tokens=plain.tokens,
        sampling=Sampling(max_tokens=ANSWER, temperature=0, stop_token_ids=(end,), unmasking=plain.sampling.unmasking),
        key="k",
    )
    found, (answer,) = counted(generator, stopping)
    assert len(answer) == first.index(end) + 1 < BLOCK
    assert found.useful == len(answer)
    assert found.committed == BLOCK
    assert found.forwards == 1, "the other blocks are left as they are"


def test_reports_and_metrics_tell_of_them_across_processes(generator):
    found, _ = counted(generator, prompt(0, steps=6))
    steps = dict(zip(DIFFUSION_COUNTS, (6, found.computed, ANSWER, found.positions, ANSWER, 0), strict=True))
    travelled = Snapshot.from_wire(Snapshot(slots=4, device={"tokens": {"output": ANSWER}, "steps": steps}).to_wire())
    assert unmasking(travelled) == found.plain()
    text = exposition(travelled).decode()
    assert "gpuinfer_forwards_total 6.0" in text
    assert f"gpuinfer_computed_positions_total {found.computed:.1f}" in text


def test_a_backend_tells_its_steps_so():
    """As every road does, from the driver's counters to `Backend.device`."""
    from gpuinfer.text.model import TextModel

    async def told():
        model = await TextModel.open(SPEC, Setup(model=SPEC, devices=("cpu",)), Tuning(threads=1), lambda rows, s: None)
        try:
            return model.device()
        finally:
            await model.close()

    device = asyncio.run(told())
    assert set(DIFFUSION_COUNTS) <= device["steps"].keys()
    assert device["model"]["decoder"] == "low-confidence"
    assert device["model"]["cache"] == "none"
