"""A real vLLM, asked as any other backend is asked."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from peft import adapter
from vllm_held import CLOSE, SECONDS, own, scored

from gpuinfer.api import ModelSpec, Request
from gpuinfer.backends.vllm_engine.engine_process import model_for_vllm
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Constraint, Generation, Listed, Part, Prompt, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TEXTS = ("The capital", "once upon a time", "1 2 3 4", "gpuinfer", "a", "Zürich", "{", "one more prompt of them")
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = Sampling(max_tokens=12, temperature=0.8, top_p=0.9, ignore_eos=True)


def test_greedy_answers_are_those_of_our_own_engine_up_to_ties(held):
    prompts = [Prompt(text=text, key=text, sampling=GREEDY) for text in TEXTS]
    for theirs, ours in zip(held.asked(*prompts), own(*prompts), strict=True):
        (mine,), (other,) = ours.completions, theirs.completions
        apart = next(
            (i for i, pair in enumerate(zip(mine.tokens, other.tokens, strict=True)) if len(set(pair)) > 1), None
        )
        if apart is None:
            assert mine.text == other.text
            continue
        first, second = mine.logprobs[apart].likeliest
        assert first.logprob - second.logprob < CLOSE


def test_drawn_answers_to_more_long_prompts_than_a_step_takes_all_come(held):
    prompts = [Prompt(text=f"{number} " * 600, key=f"{number}", sampling=DRAWN) for number in range(6)]
    assert [len(one.completions[0].tokens) for one in held.asked(*prompts)] == [DRAWN.max_tokens] * 6


def test_raw_and_processed_logprobs_are_those_of_a_separate_forward(held):
    prompt = Prompt(text="The capital", sampling=structs.replace(DRAWN, logprobs=1, processed_logprobs=True))
    plain = Prompt(text="The capital", sampling=Sampling(max_tokens=12, logprobs=0, processed_logprobs=True))
    drawn, undisturbed = held.asked(prompt, plain)
    for asked, answer in ((prompt, drawn), (plain, undisturbed)):
        (one,) = answer.completions
        raw = np.array([position.chosen.logprob for position in one.logprobs])
        known = scored((*asked.text.encode(), *one.tokens), len(one.tokens))
        np.testing.assert_allclose(raw, known, atol=CLOSE)
    (one,) = undisturbed.completions
    np.testing.assert_allclose([position.chosen.logprob for position in one.logprobs], one.processed, atol=CLOSE)
    (one,) = drawn.completions
    assert all(
        kept >= position.chosen.logprob - 1.5 for kept, position in zip(one.processed, one.logprobs, strict=True)
    )
    assert list(one.processed) != [position.chosen.logprob for position in one.logprobs]
    (likeliest,) = held.asked(Prompt(text="a", sampling=structs.replace(GREEDY, processed_logprobs=True)))
    assert set(likeliest.completions[0].processed) == {0.0}  # taken for certain


def test_prompt_logprobs_are_those_of_our_own_engine(held):
    prompt = Prompt(text="once upon a time", sampling=Sampling(max_tokens=0, prompt_logprobs=2))
    (theirs,), (ours,) = held.asked(prompt), own(prompt)
    assert theirs.completions[0].tokens == ()
    assert theirs.prompt_logprobs[0] is None
    for one, other in zip(theirs.prompt_logprobs[1:], ours.prompt_logprobs[1:], strict=True):
        assert abs(one.chosen.logprob - other.chosen.logprob) < CLOSE
        assert [like.token for like in one.likeliest] == [like.token for like in other.likeliest]


def test_the_same_seed_draws_the_same_and_samples_differ_by_their_numbers(held):
    prompt = Prompt(text="gpuinfer", key="k", samples=3, sampling=DRAWN)
    first, again = held.asked(prompt)[0], held.asked(prompt)[0]
    assert first.completions == again.completions
    assert len({one.tokens for one in first.completions}) == 3
    (third,) = held.asked(structs.replace(prompt, samples=1, first_sample=2))
    assert third.completions[0] == first.completions[2]
    (other,) = held.asked(structs.replace(prompt, key="another"))
    assert other.completions[0].tokens != first.completions[0].tokens


@pytest.mark.parametrize(
    "sampling",
    [structs.replace(GREEDY, logprobs=1), DRAWN, structs.replace(GREEDY, stop=("e", "~~"), min_tokens=2)],
    ids=["greedy, with logprobs", "drawn", "stop strings"],
)
def test_parts_make_the_answer(held, sampling):
    prompt, parts = Prompt(text="once upon a time", samples=2, sampling=sampling), list[Part]()
    whole = held.run(held.ask(prompt, parts))
    assert len(parts) >= 2
    for number, answer in enumerate(whole.completions):
        own_parts = [part for part in parts if part.sample == number]
        assert "".join(part.text for part in own_parts) == answer.text
        assert sum((part.tokens for part in own_parts), ()) == answer.tokens
        assert [part.finish_reason for part in own_parts[:-1]] == [None] * (len(own_parts) - 1)
        assert own_parts[-1].finish_reason == answer.finish_reason
        if sampling.logprobs is not None:
            assert sum((part.logprobs for part in own_parts), ()) == answer.logprobs


def test_stop_strings_stop_tokens_and_the_end_token_are_told_apart(held):
    (free,) = held.asked(Prompt(text="a", sampling=structs.replace(GREEDY, ignore_eos=True, logprobs=None)))
    text, tokens = free.completions[0].text, free.completions[0].tokens
    stopped, cut = held.asked(
        Prompt(text="a", sampling=structs.replace(GREEDY, logprobs=None, stop=(text[3:5],))),
        Prompt(text="a", sampling=structs.replace(GREEDY, logprobs=None, stop_token_ids=(tokens[4],))),
    )
    assert stopped.completions[0].stop_reason == text[3:5]
    assert stopped.completions[0].text == text[: text.index(text[3:5])]
    assert cut.completions[0].stop_reason == tokens[4]
    assert cut.completions[0].tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert free.completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (Constraint(choice=("yes it is", "no")), {"yes it is", "no"}.__contains__),
        (Constraint(regex="[0-9]{3}-[a-c]"), lambda text: text[:3].isdigit() and text[3] == "-" and len(text) == 5),
        (Constraint(json_schema={"enum": ["x", 1]}), {'"x"', "1"}.__contains__),
        (Constraint(grammar='start: "q" ("w" | "e")'), {"qw", "qe"}.__contains__),
    ],
    ids=["choice", "regex", "json", "grammar"],
)
def test_answers_match_their_constraint(held, constraint, fits):
    sampling = Sampling(max_tokens=40, constraint=constraint)
    for answer in held.asked(*(Prompt(text="x", key=str(n), sampling=sampling) for n in range(4))):
        (one,) = answer.completions
        assert fits(one.text), one.text
        assert one.finish_reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (Prompt(text="a", sampling=Sampling(temperature=3.0)), "temperature is 3"),
        (Prompt(text="a", adapter="nobody"), "the adapter 'nobody'"),
        (Prompt(tokens=(5000,)), "token 5000"),
        (Prompt(tokens=(1,) * 3000), "3000 tokens"),
        (Prompt(text="a", sampling=Sampling(logit_bias={9999: 1.0})), "logit_bias"),
        (Prompt(text="a", sampling=Sampling(constraint=Constraint(regex="("))), "regex"),
    ],
    ids=["temperature", "adapter", "token", "length", "bias", "regex"],
)
def test_what_cannot_be_served_fails_alone_and_names_its_field(held, prompt, why):
    async def both() -> list[object]:
        return list(await asyncio.gather(held.ask(prompt), held.ask(Prompt(text="a")), return_exceptions=True))

    bad, good = held.run(both())
    assert isinstance(bad, BadPrompt)
    assert why in str(bad)
    assert isinstance(good, Generation)


def test_a_request_that_nobody_wants_any_more_is_taken_from_the_engine(held):
    request = Request(Prompt(text="long", sampling=Sampling(max_tokens=2000, ignore_eos=True)))

    async def seen_at_work(reading) -> bool:
        while not reading.done():
            if (await held.backend.stats())["device"]["engine"]["running"] > 0:
                return not reading.done()
            await asyncio.sleep(0.01)
        return False

    async def left() -> None:
        """A machine that is held up may see it only when it is answered; or an engine that was held up starts again."""
        until = time.monotonic() + SECONDS / 2
        while time.monotonic() < until:
            stream = held.backend.stream([request])
            reading = asyncio.ensure_future(anext(stream))
            seen = await seen_at_work(reading)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.aclose()
            if seen:
                return
            await asyncio.sleep(0.5)
        pytest.fail("it always ended before it was seen at work")

    held.run(left())
    held.asked(Prompt(text="a"))  # a step after it, which counts what is left
    assert held.device()["engine"]["running"] == 0


def test_what_the_engine_counts_is_told(held):
    before = held.device()
    held.asked(
        *(Prompt(text="counted " * 40, key=str(n), sampling=structs.replace(DRAWN, max_tokens=8)) for n in range(4))
    )
    after = held.device()
    assert after["tokens"]["output"] - before["tokens"]["output"] == 32
    assert after["tokens"]["input"] - before["tokens"]["input"] == 4 * 320
    assert after["steps"]["steps"] > before["steps"]["steps"]
    counted = {"running", "waiting", "preemptions", "cache_usage", "prefix_queries", "prefix_hits"}
    assert after["engine"].keys() >= counted
    assert after["model"]["slots"] == 64


def test_adapters_have_a_name_and_a_number_for_each_version(held, tmp_path):
    base = Prompt(text="adapt", sampling=GREEDY)
    asked = structs.replace(base, adapter="policy")
    plain = held.asked(base)[0]
    held.update("v1", adapter(tmp_path / "1", 1), adapter="policy")
    first = held.asked(asked)[0]
    held.update("v2", adapter(tmp_path / "2", 2), adapter="policy")
    second, still = held.asked(asked, base)
    assert first.versions == ("policy@v1",)
    assert second.completions[0].versions == ((0, "policy@v2"),)
    assert len({one.completions[0].tokens for one in (plain, first, second)}) == 3
    assert still.completions[0].tokens == plain.completions[0].tokens
    assert held.backend.adapters == ("policy", "policy@v1", "policy@v2")
    assert held.asked(structs.replace(base, adapter="policy@v1"))[0].completions == first.completions
    with pytest.raises(UsageError, match=r"hidden|inputs|shape|128"):
        held.update("v3", adapter(tmp_path / "3", 3, hidden=128), adapter="policy")
    assert held.asked(asked)[0].completions == second.completions
    held.run(held.backend.unload("policy"))
    with pytest.raises(BadPrompt, match="the adapter 'policy'"):
        held.asked(asked)


def test_other_weights_answer_from_the_update_on_and_old_caches_serve_nobody(held, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    prompt = Prompt(text="the same beginning of every prompt " * 8, sampling=GREEDY)
    first = Path(model_for_vllm(ModelSpec("tiny", kind="text"), tmp_path)[0])
    other = tmp_path / "other"
    shutil.copytree(first, other)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"][32:127] = weights["lm_head.weight"][32:127][torch.randperm(95)].clone()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    (before,) = held.asked(prompt)
    held.update("w2", other)
    (after,) = held.asked(prompt)
    assert (after.versions, after.cached_tokens) == (("w2",), 0)
    assert after.completions[0].tokens != before.completions[0].tokens
    held.update("w3", first, drain=False)
    (again,) = held.asked(prompt)
    assert (again.versions, again.cached_tokens) == (("w3",), 0)
    assert again.completions[0].tokens == before.completions[0].tokens
    with pytest.raises(UsageError, match="there is no model folder"):
        held.update("w4", tmp_path / "nowhere")


ITEMS = (("PAR", "A PAR - BUR"), ("PAR", "A PAR H"), ("MAR", "A MAR S A PAR - BUR"))


def test_lists_between_tags_are_kept_to(held):
    free = Prompt(text="orders", sampling=structs.replace(GREEDY, max_tokens=40))
    text = held.asked(free)[0].completions[0].text
    listed = Listed(items=ITEMS, begin=text[3:5], end="~end~")  # which the model says of itself
    sampling = Sampling(max_tokens=400, temperature=0.0, constraint=Constraint(listed=listed))
    drawn = structs.replace(sampling, temperature=1.0, logit_bias=dict.fromkeys(listed.begin.encode(), 8.0))
    prompts = [structs.replace(free, sampling=sampling), structs.replace(free, key="1", samples=2, sampling=drawn)]
    answers = [one for answer in held.asked(*prompts) for one in answer.completions]
    assert answers[0].finish_reason == "stop"
    assert answers[0].text.startswith(text[:5])
    for one in answers:
        assert len(one.nodes) == len(one.tokens)
        before, tag, said = one.text.partition(listed.begin)
        assert tag
        assert set(one.nodes[: len(before)]) <= {-1}
        if one.finish_reason == "stop":
            lines = said.split("\n")
            assert lines[0] == ""
            assert lines[-1] == listed.end
            assert set(lines[1:-1]) <= {item for _, item in ITEMS}
            assert len([unit for unit, item in ITEMS if item in lines]) <= 2
