"""A model of text in the central server's process: answers, what is measured over there, what goes wrong."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import pytest
from counts import examples
from dying import Dying, Odd
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import is_alive
from servers import pid_of, until
from strangers import Stranger
from texts import SLOTS, asking, long, serving_text, short

from gpuinfer.api import ModelSpec, Priority
from gpuinfer.central import server as server_module
from gpuinfer.central.protocol import HEADER, LARGEST_BEGUN, RecordKind, Unpacker, WireRecord, hello, pack_record
from gpuinfer.central.server import CentralServer
from gpuinfer.central.server_process import OtherTextBackend
from gpuinfer.errors import (
    BackendDied,
    BackendError,
    BadPrompt,
    Closed,
    Expired,
    PromptTooLong,
    RequestError,
    UsageError,
)
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling
from gpuinfer.text.answer_frames import LARGEST_PROMPT

pytestmark = pytest.mark.usefixtures("children_forked")

SECONDS = 120  # after which what does not come about has failed
MANY = [long(f"{number}") for number in range(10 * SLOTS)]  # busy for seconds: the last are under way whoever stalls


@pytest.fixture(scope="module")
def server():
    with serving_text() as one:
        yield one


async def all_of(engine, prompts, **terms):
    asked = (engine.submit(prompt, rows=prompt.samples, **terms) for prompt in prompts)
    return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), SECONDS)


async def begun(engine, server, prompts):
    """Tasks that ask for these, once the first of them have slots."""
    before = server.stats()
    tasks = [asyncio.create_task(engine.submit(prompt)) for prompt in prompts]
    await asyncio.to_thread(
        until, lambda: sum(server.stats().reasons.values()) > sum(before.reasons.values()), "their admission"
    )
    return tasks


async def test_batches_queue_waits_and_the_forward_lane_are_measured_over_there(server):
    before = server.stats()
    async with asking(server) as engine:
        answers = await all_of(engine, [short(f"{number}") for number in range(3 * SLOTS)], client="somebody")
    assert [len(answer.completions[0].tokens) for answer in answers] == [4] * (3 * SLOTS)
    await asyncio.to_thread(until, lambda: server.stats().requests - before.requests == 3 * SLOTS, "their count")
    after = server.stats()
    sizes = {rows for rows, count in after.batches.items() if count > before.batches.get(rows, 0)}
    assert 1 < max(sizes) <= SLOTS
    assert sum(after.queue_wait["counts"].values()) - sum(before.queue_wait["counts"].values()) == 3 * SLOTS
    lanes = {lane["name"]: lane["stations"] for lane in after.lanes}
    assert lanes.keys() == {"forward 0", "prompts 0"}
    assert lanes["forward 0"]["forward"] + lanes["forward 0"]["prefill"] > 0
    assert lanes["prompts 0"]["understand"] > 0
    assert after.rss_peak_mb > 0


async def test_samples_and_logprobs_and_what_was_drawn_travel_as_they_are(server):
    sampling = Sampling(max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1, logit_bias={65: 2})
    prompt = Prompt(text="ab", samples=2, key="k", sampling=sampling)
    async with asking(server) as engine:
        (answer,) = await all_of(engine, [prompt], priority=Priority.HIGH, group=("a", 1))
    assert isinstance(answer, Generation)
    assert answer.prompt_tokens == len(answer.prompt_logprobs) == 2
    assert answer.prompt_logprobs[0] is None
    for completion in answer.completions:
        assert [one.chosen.token for one in completion.logprobs] == list(completion.tokens)
        assert all(len(one.likeliest) == 2 for one in completion.logprobs)


BAD = [
    pytest.param(Prompt(tokens=(10**6,)), BadPrompt, "token", id="a token that the model does not have"),
    pytest.param(
        Prompt(text="a", sampling=Sampling(constraint=Constraint(regex="("))), BadPrompt, "regex", id="a bad regex"
    ),
    pytest.param(Prompt(text="a" * 10_000), PromptTooLong, "2,048|2048|context", id="one that does not fit"),
    pytest.param(Prompt(text=5), BadPrompt, "Expected `str", id="a field of another type"),
    pytest.param(Prompt(text="\ud800"), BadPrompt, "travel|Unicode|UTF", id="text that is none"),
    pytest.param(Prompt(text="a" * LARGEST_PROMPT), BadPrompt, "at most", id="one that is too large to travel"),
    pytest.param(Prompt(text="a", sampling=Sampling(seed=1 << 90)), BadPrompt, "travel", id="a number too large"),
]


@pytest.mark.parametrize(("prompt", "kind", "words"), BAD)
async def test_a_bad_prompt_fails_alone_and_says_why(server, prompt, kind, words):
    async with asking(server) as engine:
        bad, good = await all_of(engine, [prompt, short("good")])
    assert type(bad) is kind, bad
    assert re.search(words, str(bad))
    assert str(bad).endswith(".")
    assert isinstance(good, Generation)


async def test_what_is_no_prompt_and_a_group_that_cannot_travel_fail_alone(server):
    async with asking(server) as engine:
        asked = (engine.submit("a"), engine.submit(short("x"), group=b"x" * 10**6), engine.submit(short("good")))
        stranger, crowded, good = await asyncio.gather(*asked, return_exceptions=True)
        (wide,) = await all_of(engine, [Prompt(text="a", samples=SLOTS + 1)])
    assert (type(stranger), type(crowded), type(wide)) == (BackendError, RequestError, RequestError)
    assert isinstance(good, Generation)


async def test_a_cancelled_prompt_leaves_its_slot_to_the_next(server):
    before = server.stats().errors["cancelled"]
    async with asking(server) as engine:
        tasks = await begun(engine, server, MANY)
        for task in tasks:
            task.cancel()
        (answer,) = await all_of(engine, [short("next")])
        assert isinstance(answer, Generation)
        await asyncio.to_thread(until, lambda: server.stats().errors["cancelled"] >= before + SLOTS, "their end")
        with pytest.raises(asyncio.CancelledError):
            await tasks[-1]


async def test_whoever_leaves_takes_its_prompts_along(server):
    before = server.stats().errors["cancelled"]
    async with asking(server) as engine:
        tasks = await begun(engine, server, MANY)
        await engine.backend.close()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in ended[-SLOTS:]} == {Closed}
    await asyncio.to_thread(until, lambda: server.stats().errors["cancelled"] >= before + SLOTS, "their end")


async def test_a_prompt_that_waits_over_there_past_its_deadline_expires(server):
    async with asking(server) as engine:
        tasks = await begun(engine, server, MANY)
        (late,) = await all_of(engine, [short("late")], timeout=0.2)
        for task in tasks:
            task.cancel()
    assert type(late) is Expired


def greeted(server):
    stranger = Stranger(server, greet=False)
    stranger.send(hello(server.address.token, b"a stranger"))
    assert stranger.next().body == {"max_rows": SLOTS, "slots": SLOTS}
    return stranger


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(pack_record(WireRecord(RecordKind.ASK, rows=1, left_s=1.0)), id="rows"),
        pytest.param(
            HEADER.pack(RecordKind.PROMPT, 0, 0, 1, 0, 1, LARGEST_PROMPT + LARGEST_BEGUN + 1, 1.0),
            id="a body without a bound",
        ),
        pytest.param(
            pack_record(WireRecord(RecordKind.PROMPT, rows=1, left_s=float("nan"), body=b"x")),
            id="a deadline that is none",
        ),
    ],
)
async def test_a_client_that_sends_something_else_is_dismissed_and_the_others_are_served(server, sent):
    with greeted(server) as stranger:
        stranger.raw(sent)
        assert stranger.next().kind == RecordKind.GOODBYE
    async with asking(server) as engine:
        assert isinstance((await all_of(engine, [short("good")]))[0], Generation)


def test_bytes_that_are_no_prompt_are_answered_as_a_bad_prompt(server):
    with greeted(server) as stranger:
        stranger.send(WireRecord(RecordKind.PROMPT, rows=1, number=7, left_s=9.0, body=b"\xc1\xff"))
        answer = stranger.next()
    assert (answer.kind, answer.number, answer.body["type"]) == (RecordKind.FAILED, 7, "BadPrompt")


@pytest.mark.thorough
async def test_a_killed_server_fails_at_once_what_is_under_way():
    with serving_text() as server:
        async with asking(server) as engine:
            tasks = await begun(engine, server, MANY)
            os.kill(pid_of(server), signal.SIGKILL)
            _, late = await asyncio.wait(tasks, timeout=SECONDS)
            assert not late
            assert {type(task.exception()) for task in tasks[-SLOTS:]} == {BackendDied}
            (after,) = await all_of(engine, [short("after")])
            assert type(after) is BackendDied


@pytest.mark.thorough
async def test_a_server_that_comes_back_is_asked_again_and_answers_the_same():
    with serving_text(restart=True) as server:
        async with asking(server) as engine:
            prompts = [short(f"{number}", 300) for number in range(2 * SLOTS)]
            tasks = await begun(engine, server, prompts)
            first = pid_of(server)
            os.kill(first, signal.SIGKILL)
            answers = await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)
            assert pid_of(server) != first
            assert not is_alive(first)
            again = await all_of(engine, prompts)
    assert [answer.completions for answer in answers] == [answer.completions for answer in again]


def test_a_server_of_ones_own_says_that_it_takes_rows():
    with pytest.raises(UsageError, match="takes rows"):
        CentralServer(ModelSpec("tiny", kind="text"))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=8), st.data())
def test_records_arrive_whole_in_whatever_pieces_they_come(bodies, data):
    sent = [WireRecord(RecordKind.PROMPT, number=number, body=body or None) for number, body in enumerate(bodies)]
    stream = b"".join(map(pack_record, sent))
    unpacker, arrived = Unpacker(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        arrived += unpacker.feed(stream[:size])
        stream = stream[size:]
    assert arrived == sent


async def test_whoever_asked_a_server_that_dies_again_and_again_hears_what_it_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "BACK_S", 600.0)  # deaths in a row, however slowly it is asked again
    texts = OtherTextBackend(Dying, called="the toy", log=str(tmp_path / "toy.log"))
    with serving_text(restart=True, texts=texts) as server:
        async with asking(server) as engine:
            (answer,) = await all_of(engine, [short("any")])
            assert type(answer) is BackendDied
            assert str(answer).startswith("the toy died. ")
            assert str(answer).endswith(f'in {tmp_path / "toy.log"}: "OddError: the moon is in the way".')
            async with asyncio.timeout(SECONDS):
                while not server.lost:  # one that has been brought back dies of the next question
                    await all_of(engine, [short("any")])


async def test_a_server_that_fails_at_a_question_is_gone_and_says_why():
    with serving_text(texts=OtherTextBackend(Odd)) as server:
        await asyncio.to_thread(server.stats)
        await asyncio.to_thread(until, lambda: server.lost, "its end")
        with pytest.raises(BackendDied, match=r"failed: KeyError: 'positions'"):
            server.client()
