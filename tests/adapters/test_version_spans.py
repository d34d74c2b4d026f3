"""Which weights drew which tokens: said of each answer, of each of its parts, and by who goes on with it elsewhere."""

from __future__ import annotations

import asyncio

import pytest
from helpers import AtOnce, Doubler
from msgspec import structs
from random_adapters import stepped
from text.tiny import tiny_checkpoint
from text.toy import alone, joined, prompt, toy_generator

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BadPrompt, Closed, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.runtime.session import Session
from gpuinfer.text.answer_frames import DeliveredAnswer
from gpuinfer.text.generator.answer import versions_begun_in, versions_until, with_version

WAIT_S = 60.0


def test_spans_are_joined_where_the_version_stays():
    assert with_version((), 0, "a") == ((0, "a"),)
    assert with_version((), 3, "a") == ((0, ""), (3, "a"))
    assert with_version((), 3, "") == ((0, ""),)
    assert with_version(((0, "a"), (4, "b")), 2, "a") == ((0, "a"),)
    assert versions_until(((0, "a"), (4, "b")), 4) == ((0, "a"),)
    assert versions_until(((5, "b"),), 9) == ((0, ""), (5, "b"))
    assert versions_begun_in(((0, ""), (5, "b")), 0) == ((5, "b"),)


def test_only_weights_that_drew_kept_tokens_are_named():
    whole, _ = stepped(toy_generator(), prompt("ab", 4), {1: ("v1", 5), 0: ("v0", 7)})
    assert whole.completions[0].versions == ((0, "v0"), (1, "v1"))
    base = alone(prompt("ab", 9))[0]
    for stop, changes, versions in (
        ("zq", {2: ("v1", 5)}, ((0, ""), (2, "v1"))),
        (base.text[2:4], {3: ("", 0)}, ((0, ""),)),  # it cuts off the tokens of the later weights
    ):
        sampling = Sampling(max_tokens=9, stop=(stop,), ignore_eos=True)
        whole, parts = stepped(toy_generator(), structs.replace(prompt("ab", 9), sampling=sampling), changes)
        assert whole.completions[0].versions == versions
        assert joined(parts) == list(whole.completions)
    assert whole.completions[0].text == base.text[:2]


def test_an_answer_says_which_weights_drew_which_tokens_here_and_where_it_goes_on():
    """The first server dies after so many parts; the second has the newest weights alone."""
    asked, spans = prompt("ab", 9, samples=2), ((0, ""), (3, "v1"), (6, "v2"))
    whole, parts = stepped(toy_generator(), asked, {3: ("v1", 5), 6: ("v2", 6)})
    assert [one.versions for one in whole.completions] == [spans] * 2
    assert joined(parts) == list(whole.completions)
    assert whole.versions == ("", "v1", "v2")
    for cut in (0, 1, 4, 6, 9):
        had = DeliveredAnswer(asked)
        for part in parts[: 2 * cut]:
            had.fresh(part)
        second = toy_generator()
        second.update("v3", 9)
        whole, more = stepped(second, had.rest(), {})
        wanted = with_version(tuple(span for span in spans if span[0] < cut), cut, "v3") if cut < 9 else spans
        assert [one.versions for one in whole.completions] == [wanted] * 2
        fresh = [part for part in parts[: 2 * cut] if part.finish_reason is None or cut == 9]
        again = [part for part in more if part.finish_reason is None or cut < 9]
        assert joined([*fresh, *again]) == list(whole.completions)


def test_versions_of_tokens_that_are_not_there_are_refused():
    begun = structs.replace(prompt("ab", 9), begun=((1, 2, 3),))
    for spans in ((((3, "v1"),),), (((0, "a"), (0, "b")),), (((-1, "a"),),), ((), ())):
        with pytest.raises(BadPrompt, match="one for each sample" if spans == ((), ()) else "versions"):
            stepped(toy_generator(), structs.replace(begun, begun_versions=spans), {})


def folder(seed):
    return str(tiny_checkpoint("qwen2", seed=seed))


async def test_a_workload_changes_the_weights_that_it_asks():
    model = ModelSpec(folder(0), kind="text")
    sampling = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
    backend = InProcess(Setup(devices=("cpu",), model=model), context=64, slots=4)
    async with Session(backend, AtOnce()) as infer:
        asked = Prompt(text="The tide", key="a", sampling=sampling)
        before = await asyncio.wait_for(infer(asked), WAIT_S)
        stream = infer.stream(asked)
        first = await asyncio.wait_for(anext(stream), WAIT_S)
        await asyncio.wait_for(infer.update("v1", folder(1), drain=False), WAIT_S)
        parts = [first, *[part async for part in stream]]
        after = await asyncio.wait_for(infer(asked), WAIT_S)
        with pytest.raises(UsageError, match="no weights at"):
            await infer.update("v2", "nowhere")
    assert before.completions[0].versions == ((0, ""),)
    assert after.completions[0].versions == ((0, "v1"),)
    assert joined(parts) == list(stream.result.completions)
    assert stream.result.completions[0].versions[-1][1] in ("", "v1")  # it may have been quicker


async def test_a_backend_that_cannot_says_so_and_a_session_that_is_closed_too():
    infer = Session(Doubler(), AtOnce())
    async with infer:
        with pytest.raises(UsageError, match="cannot change its weights"):
            await infer.update("v1", "somewhere")
    with pytest.raises(Closed):
        await infer.update("v1", "somewhere")
