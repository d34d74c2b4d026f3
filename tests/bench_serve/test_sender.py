"""The sender against a server whose delays are known: what it sends when, and what it says of it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from gpuinfer.engine.arrivals import ConstantRate, Poisson
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.http import network
from gpuinfer.http.client import HttpClient
from gpuinfer.lab.serve_bench import target_server
from gpuinfer.lab.serve_bench.load_generator import LoadGenerator, OfferedLoad, waking
from gpuinfer.lab.serve_bench.load_summary import summarised
from gpuinfer.lab.serve_bench.requests import LengthRange, RowRequests, TextRequests, clock, read_prompts
from tests.bench_serve.scripted import Script, serving

Completions = partial(
    TextRequests,
    endpoint="completions",
    model="scripted",
    stream=True,
    seed="1",
    input_tokens=LengthRange(8, 8),
    output_tokens=LengthRange(4, 4),
)


def sent(script, load, calls=None, promised=None):
    async def send():
        async with serving(script) as url:
            client = HttpClient(url, connections=1000, timeout_s=load.timeout_s)
            try:
                return await LoadGenerator(client, calls or Completions(), load, "1").run()
            finally:
                await client.close()

    run = network.run_loop(send())
    return run, summarised(run, promised or {})


def test_a_closed_loop_sends_so_many_and_no_more():
    script = Script()
    run, figures = sent(script, OfferedLoad(concurrency=4, seconds=None, requests=40, warmup_s=0.0))
    assert (figures["requests"], figures["answered"], script.number) == (40, 40, 40)
    assert figures["output_tokens"] == 4
    assert figures["input_tokens"] == 8
    assert run.records[0].events is not None
    assert [call["prompt"] for call in script.seen] != [script.seen[0]["prompt"]] * 40


def test_an_open_loop_heeds_no_answer_and_counts_from_when_requests_were_due():
    """Served one by one, 50 ms each, but due every 10 ms: a sender that waits would see 50 ms, and no queue."""
    script = Script(first_s=0.05, batch=1)
    load = OfferedLoad(arrivals=ConstantRate(100.0), seconds=None, requests=12, warmup_s=0.0)
    run, figures = sent(script, load, Completions(stream=False))
    assert [round(one.due - run.began, 6) for one in run.records] == [round(at / 100, 6) for at in range(12)]
    assert figures["e2e_s"]["max"] >= 12 * 0.05 - 0.12


def test_the_same_seed_brings_the_same_requests_at_the_same_times():
    def once():
        script = Script()
        run, _ = sent(script, OfferedLoad(arrivals=Poisson(300.0), seconds=None, requests=30, warmup_s=0.02))
        return [one.due - run.records[0].due for one in run.records], sorted(str(call) for call in script.seen)

    one, other = once(), once()
    assert one[0] == pytest.approx(other[0], abs=1e-6)
    assert one[1] == other[1]


def test_the_warm_up_is_sent_and_not_counted():
    script = Script(first_s=0.005)
    run, figures = sent(script, OfferedLoad(concurrency=2, seconds=0.2, warmup_s=0.2), Completions(stream=False))
    assert script.number == len(run.records) > figures["requests"]
    assert figures["seconds"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("script", "stream", "kind"),
    [
        pytest.param(Script(fail=2), True, "HTTP 429", id="turned away"),
        pytest.param(Script(fail=2, status=500), False, "HTTP 500", id="an error"),
        pytest.param(Script(cut=True), True, "stream cut off", id="a stream without its end"),
        pytest.param(Script(first_s=30.0), False, "timeout", id="no answer in time"),
    ],
)
def test_errors_by_kind(script, stream, kind):
    load = OfferedLoad(2, None, None, 4, 0.0, timeout_s=0.3 if kind == "timeout" else 30.0)
    _, figures = sent(script, load, Completions(stream=stream))
    assert figures["errors"] == {kind: 2 if script.fail else 4}


def test_a_server_that_is_gone_is_an_error_of_each_request():
    async def send():
        client = HttpClient("http://127.0.0.1:9", timeout_s=5.0)
        return await LoadGenerator(client, Completions(), OfferedLoad(2, None, None, 4, 0.0), "1").run()

    assert summarised(network.run_loop(send()), {})["errors"] == {"unreachable": 4}


def test_goodput_counts_what_was_in_time():
    script = Script(first_s=0.03)
    _, figures = sent(script, OfferedLoad(1, None, None, 4, 0.0), promised={"ttft": 0.005})
    assert (figures["goodput_per_s"], figures["goodput_share"]) == (0.0, 0.0)
    _, figures = sent(script, OfferedLoad(1, None, None, 4, 0.0), promised={"ttft": 60.0, "tpot": 60.0, "e2e": 60.0})
    assert figures["goodput_share"] == 1.0


# Who is there


def asked(script, what):
    async def ask():
        async with serving(script) as url:
            client = HttpClient(url)
            try:
                return await what(client)
            finally:
                await client.close()

    return network.run_loop(ask())


def test_prompts_are_as_long_as_the_server_counts():
    script = Script(per_word=3.0, besides=5)
    scale = asked(script, lambda client: target_server.scale(client, Completions()))
    assert scale.words(128) == 41
    assert len(Completions(scale=scale, input_tokens=LengthRange(128, 128)).make(0).body.split()) == 41


def test_the_first_refusal_is_said_before_thousands_are():
    with pytest.raises(WorkError, match=r"HTTP 400: too much of this\nChange what is asked"):
        asked(Script(fail=1, status=400), lambda client: target_server.ask(client, Completions()))


def test_of_several_models_the_one_that_is_named_is_asked():
    listed = [
        {"id": "chat", "kind": "text", "owned_by": "gpuinfer"},
        {"id": "net", "kind": "rows", "owned_by": "gpuinfer", "features": 8},
    ]
    net = asked(Script(listed=listed), lambda client: target_server.look(client, "net"))
    assert net == target_server.TargetServer("net", "rows", True, 8, True)
    assert asked(Script(listed=listed), target_server.look).model == "chat"
    with pytest.raises(UsageError, match="serves chat, net, and no 'nut'"):
        asked(Script(listed=listed), lambda client: target_server.look(client, "nut"))
    assert RowRequests(rows=1, features=8, binary=False, seed="1", model="net").path == "/v1/evaluate?model=net"


# What is asked


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "one", "temperature": 0}\n\nplain words\n"quoted"\n'
        '{"messages": [{"role": "user", "content": "two"}], "id": 7}\n'
        '{"custom_id": "a", "url": "/v1/chat/completions", '
        '"body": {"messages": [{"role": "user", "content": "three"}]}}\n'
    )
    assert [row["prompt"] for row in read_prompts(path, "completions")] == [
        "one",
        "plain words",
        "quoted",
        "two",
        "three",
    ]
    chats = read_prompts(path, "chat")
    assert [row["messages"][0]["content"] for row in chats] == ["one", "plain words", "quoted", "two", "three"]
    assert chats[0]["temperature"] == 0
    assert not any({"id", "custom_id", "prompt"} & row.keys() for row in chats)


@pytest.mark.parametrize(("name", "said"), [("none", "cannot be read"), ("empty", "holds no prompts")])
def test_a_file_that_is_none(tmp_path, name, said):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UsageError, match=said):
        read_prompts(tmp_path / name, "chat")


# Waking


def test_a_sleep_ends_no_sooner_than_it_should_and_may_be_cancelled():
    async def sleep():
        async with waking() as sleep_until:
            for length in (0.0, -1.0, 1e-5, 3e-4, 0.0123):
                due = clock() + length
                await sleep_until(due)
                assert clock() >= due
            sleeping = asyncio.ensure_future(sleep_until(clock() + 60.0))
            await asyncio.sleep(0.01)
            sleeping.cancel()
            await asyncio.wait([sleeping])
            await sleep_until(clock() + 0.001)
        return sleeping.cancelled()

    assert network.run_loop(sleep())
