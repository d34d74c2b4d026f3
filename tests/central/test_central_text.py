"""A model of text in the central server's process: answers, whole and as they grow, what is measured over there, what
goes wrong.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from programs import is_alive
from servers import pid_of, until
from strangers import Stranger
from text.toy import joined
from texts import SLOTS, Dying, Odd, asking, long, serving_text, short

from gpuinfer.api import Priority
from gpuinfer.central import server as server_module
from gpuinfer.central.protocol import (
    HEADER,
    LARGEST_BEGUN,
    RecordKind,
    Unpacker,
    WireRecord,
    generation_from_wire,
    hello,
    pack_record,
    part_from_wire,
    request_to_wire,
)
from gpuinfer.central.server_process import OtherTextBackend
from gpuinfer.engine.stream import PartStream
from gpuinfer.errors import BackendDied, BackendError, BadPrompt, Closed, Expired, PromptTooLong, RequestError
from gpuinfer.generation import Constraint, Generation, Part, Prompt, Sampling
from gpuinfer.text.answer_frames import LARGEST_PROMPT, DeliveredAnswer

pytestmark = pytest.mark.usefixtures("children_forked")

SECONDS = 120  # after which what does not come about has failed
MANY = [long(f"{number}") for number in range(10 * SLOTS)]  # busy for seconds: the last are under way whoever stalls


@pytest.fixture(scope="module")
def server():
    with serving_text() as one:
        yield one


async def all_of(engine, prompts, **terms):
    asked = (engine.submit(prompt, rows=getattr(prompt, "samples", 1), **terms) for prompt in prompts)
    return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), SECONDS)


async def begun(engine, server, prompts):
    """Tasks that ask for these, once the first of them have slots."""
    before = server.stats()
    tasks = [asyncio.create_task(engine.submit(prompt)) for prompt in prompts]
    await asyncio.to_thread(
        until, lambda: sum(server.stats().reasons.values()) > sum(before.reasons.values()), "their admission"
    )
    return tasks


async def cancelled(server, before, count=1):
    enough = before + count
    await asyncio.to_thread(until, lambda: server.stats().errors["cancelled"] >= enough, "the end of what was left")


def reading(engine, prompt):
    return PartStream(lambda on_part: engine.submit(prompt, rows=prompt.samples, on_part=on_part))


async def read(stream):
    return [part async for part in stream]


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


async def test_answers_and_their_parts_travel_as_they_are(server):
    rich = Sampling(max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1, logit_bias={65: 2}, stop=("qu", "e"))
    prompts = [
        *(short(f"{number}", 20) for number in range(SLOTS)),
        Prompt(text="ab", samples=2, key="k", sampling=rich),
    ]
    async with asking(server) as engine:
        streams = [reading(engine, prompt) for prompt in prompts]
        given = await asyncio.wait_for(asyncio.gather(*map(read, streams)), SECONDS)
        whole = await all_of(engine, prompts, priority=Priority.HIGH, group=("a", 1))
    for parts, stream, answer in zip(given, streams, whole, strict=True):
        assert joined(parts) == list(stream.result.completions) == list(answer.completions)
    assert whole[-1].prompt_tokens == len(whole[-1].prompt_logprobs) == 2
    assert whole[-1].prompt_logprobs[0] is None
    for completion in whole[-1].completions:
        assert [one.chosen.token for one in completion.logprobs] == list(completion.tokens)
        assert all(len(one.likeliest) == 2 for one in completion.logprobs)


BAD = [
    (Prompt(tokens=(10**6,)), {}, BadPrompt, "token"),
    (Prompt(text="a", sampling=Sampling(constraint=Constraint(regex="("))), {}, BadPrompt, "regex"),
    (Prompt(text="a" * 10_000), {}, PromptTooLong, "2,048|2048|context"),
    (Prompt(text=5), {}, BadPrompt, "Expected `str"),
    (Prompt(text="\ud800"), {}, BadPrompt, "travel|Unicode|UTF"),
    (Prompt(text="a" * LARGEST_PROMPT), {}, BadPrompt, "at most"),
    (Prompt(text="a", sampling=Sampling(seed=1 << 90)), {}, BadPrompt, "travel"),
    ("no prompt", {}, BackendError, "."),
    (Prompt(text="a", samples=SLOTS + 1), {}, RequestError, "."),
    (short("x"), {"group": b"x" * 10**6}, RequestError, "group"),
]


async def test_a_bad_prompt_fails_alone_and_says_why(server):
    async with asking(server) as engine:
        for prompt, terms, kind, words in BAD:
            (bad,), (good,) = await asyncio.gather(all_of(engine, [prompt], **terms), all_of(engine, [short("good")]))
            assert type(bad) is kind, bad
            assert re.search(words, str(bad))
            assert str(bad).endswith(".")
            assert isinstance(good, Generation)


# Whoever leaves


@pytest.mark.parametrize("how", ["cancels", "closes", "stops reading", "waits past its deadline"])
async def test_whoever_leaves_takes_its_prompts_along(server, how):
    before = server.stats().errors["cancelled"]
    async with asking(server) as engine:
        if how == "stops reading":
            for stream in [reading(engine, long(f"{number}")) for number in range(SLOTS)]:
                await anext(stream)
                await stream.aclose()
        else:
            tasks = await begun(engine, server, MANY)
            if how == "closes":
                await engine.backend.close()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(one) for one in ended[-SLOTS:]} == {Closed}
            elif how == "waits past its deadline":
                (late,) = await all_of(engine, [short("late")], timeout=0.2)
                assert type(late) is Expired
            for task in tasks:
                task.cancel()
        if how != "closes":
            (answer,) = await all_of(engine, [short("next")])
            assert isinstance(answer, Generation)
    await cancelled(server, before)


# Strangers


def greeted(server):
    stranger = Stranger(server, greet=False)
    stranger.send(hello(server.address.token, b"a stranger"))
    assert stranger.next().body == {"max_rows": SLOTS, "slots": SLOTS}
    return stranger


TOO_LARGE = HEADER.pack(RecordKind.PROMPT, 0, 0, 1, 0, 1, LARGEST_PROMPT + LARGEST_BEGUN + 1, 1.0)
NO_TIME = pack_record(WireRecord(RecordKind.PROMPT, rows=1, left_s=float("nan"), body=b"x"))
NO_PROMPT = pack_record(WireRecord(RecordKind.PROMPT, rows=1, number=7, left_s=9.0, body=b"\xc1\xff"))
ROWS = pack_record(WireRecord(RecordKind.ASK, rows=1, left_s=1.0))


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        pytest.param(ROWS, RecordKind.GOODBYE, id="rows"),
        pytest.param(TOO_LARGE, RecordKind.GOODBYE, id="a body without a bound"),
        pytest.param(NO_TIME, RecordKind.GOODBYE, id="a deadline that is none"),
        pytest.param(NO_PROMPT, RecordKind.FAILED, id="bytes that are no prompt"),
    ],
)
async def test_a_client_that_sends_something_else_is_told_and_the_others_are_served(server, sent, kind):
    with greeted(server) as stranger:
        stranger.raw(sent)
        answer = stranger.next()
        assert answer.kind == kind
        assert kind == RecordKind.GOODBYE or (answer.number, answer.body["type"]) == (7, "BadPrompt")
    async with asking(server) as engine:
        assert isinstance((await all_of(engine, [short("good")]))[0], Generation)


async def test_a_client_that_reads_nothing_stalls_nobody_and_is_owed_one_part_a_sample(server):
    """Its answers are some times as long as what a line holds."""
    sampling = Sampling(max_tokens=400, ignore_eos=True, logprobs=20)
    body = request_to_wire(Prompt(text="much", samples=SLOTS - 1, sampling=sampling), None, parts=True)
    with greeted(server) as deaf:
        before = server.stats().requests
        deaf.send(WireRecord(RecordKind.PROMPT, rows=SLOTS - 1, number=1, left_s=float(SECONDS), body=body))
        async with asking(server) as engine:
            assert joined(await read(reading(engine, short("other", 100))))
        await asyncio.to_thread(until, lambda: server.stats().requests == before + 2, "both answers")
        given = []
        while (record := deaf.next()).kind == RecordKind.PART:
            given.append(part_from_wire(record.body))
    assert joined(given) == list(generation_from_wire(record.body).completions)
    assert max(len(part.tokens) for part in given) > 50, "joined while they waited"


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


# The server dies


@pytest.mark.thorough
async def test_a_killed_server_fails_at_once_what_is_under_way():
    with serving_text() as server:
        async with asking(server) as engine:
            stream = reading(engine, long("a"))
            tasks = await begun(engine, server, MANY)
            await anext(stream)
            os.kill(pid_of(server), signal.SIGKILL)
            _, late = await asyncio.wait(tasks, timeout=SECONDS)
            assert not late
            ended = [type(task.exception()) for task in tasks]
            assert set(ended[-SLOTS:]) == {BackendDied}
            with pytest.raises(BackendDied):
                await asyncio.wait_for(read(stream), SECONDS)
            (after,) = await all_of(engine, [short("after")])
            assert type(after) is BackendDied


@pytest.mark.thorough
async def test_a_server_that_comes_back_is_asked_again_and_goes_on_where_the_one_before_stopped():
    with serving_text(restart=True) as server:
        async with asking(server) as engine:
            prompts = [short(f"{number}", 600) for number in range(2 * SLOTS)]
            streams = [reading(engine, prompt) for prompt in prompts]
            tasks = await begun(engine, server, prompts)
            first, died = await anext(streams[0]), pid_of(server)
            os.kill(died, signal.SIGKILL)
            given = await asyncio.wait_for(asyncio.gather(*map(read, streams)), SECONDS)
            answers = await asyncio.wait_for(asyncio.gather(*tasks), SECONDS)
            assert pid_of(server) != died
            assert not is_alive(died)
            again = await all_of(engine, prompts)
    given[0].insert(0, first)
    for parts, stream, whole, answer in zip(given, streams, answers, again, strict=True):
        assert joined(parts) == list(stream.result.completions) == list(whole.completions) == list(answer.completions)


def part(sample, text, reason=None):
    return Part(sample=sample, text=text, tokens=tuple(map(ord, text)), finish_reason=reason)


def test_what_a_reader_has_had_is_what_its_answer_goes_on_after():
    prompt = Prompt(text="x", samples=3, begun=((), (7,), ()))
    had = DeliveredAnswer(prompt)
    assert had.rest() == prompt
    said = [part(0, "he"), part(1, "a"), part(0, "llo", "stop"), part(1, "b")]
    assert [had.fresh(one) for one in said] == said
    assert had.rest() == structs.replace(prompt, begun=(tuple(map(ord, "hello")), (7, 97, 98), ()))
    assert had.fresh(part(0, "", "stop")) is None, "it was whole"
    assert had.fresh(part(1, "", "stop")) is not None
    with pytest.raises(BackendError, match="nobody asked for"):
        had.fresh(part(3, "a"))


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
