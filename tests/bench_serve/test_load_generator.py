"""The load generator against a server whose delays are known: what is sent when, how answers are counted, and what is
said of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.engine.arrivals import ConstantRate, Poisson
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.http import network
from gpuinfer.http.client import HttpClient
from gpuinfer.lab.serve_bench import target_server
from gpuinfer.lab.serve_bench.load_generator import LoadGenerator, OfferedLoad, waking
from gpuinfer.lab.serve_bench.load_summary import LoadRun, keeps_promises, promises, routes, summarised
from gpuinfer.lab.serve_bench.load_tables import medians
from gpuinfer.lab.serve_bench.requests import (
    EventCounter,
    LengthRange,
    RequestRecord,
    RowRequests,
    TextRequests,
    clock,
    read_prompts,
)
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


def with_client(script, work, url=None, **options):
    """What `work` makes of a client of a server with this script."""

    async def run():
        async with serving(script) as own:
            client = HttpClient(url or own, **options)
            try:
                return await work(client)
            finally:
                await client.close()

    return network.run_loop(run())


def sent(script, load, calls=None, promised=None, url=None):
    run = with_client(
        script,
        lambda client: LoadGenerator(client, calls or Completions(), load, "1").run(),
        url,
        connections=1000,
        timeout_s=load.timeout_s,
    )
    return run, summarised(run, promised or {})


def test_a_closed_loop_sends_so_many_and_no_more():
    script = Script()
    run, figures = sent(script, OfferedLoad(concurrency=4, seconds=None, requests=40, warmup_s=0.0))
    assert (figures["requests"], figures["answered"], script.number) == (40, 40, 40)
    assert (figures["output_tokens"], figures["input_tokens"]) == (4, 8)
    assert run.records[0].events is not None
    assert [call["prompt"] for call in script.seen] != [script.seen[0]["prompt"]] * 40


def test_an_open_loop_heeds_no_answer_and_counts_from_when_requests_were_due():
    """Served one by one, 50 ms each, but due every 10 ms: a sender that waits would see 50 ms, and no queue."""
    load = OfferedLoad(arrivals=ConstantRate(100.0), seconds=None, requests=12, warmup_s=0.0)
    run, figures = sent(Script(first_s=0.05, batch=1), load, Completions(stream=False))
    assert [round(one.due - run.began, 6) for one in run.records] == [round(at / 100, 6) for at in range(12)]
    assert figures["e2e_s"]["max"] >= 12 * 0.05 - 0.12


def test_the_same_seed_brings_the_same_requests_at_the_same_times():
    def once():
        script = Script()
        run, _ = sent(script, OfferedLoad(arrivals=Poisson(300.0), seconds=None, requests=30, warmup_s=0.02))
        return [one.due - run.records[0].due for one in run.records], sorted(str(call) for call in script.seen)

    (times, calls), again = once(), once()
    assert (pytest.approx(times, abs=1e-6), calls) == again


def test_the_warm_up_is_sent_and_not_counted_and_goodput_counts_what_was_in_time():
    script = Script(first_s=0.005)
    run, figures = sent(script, OfferedLoad(concurrency=2, seconds=0.2, warmup_s=0.2), Completions(stream=False))
    assert script.number == len(run.records) > figures["requests"]
    assert figures["seconds"] == pytest.approx(0.2)
    for promised, share in (({"ttft": 0.005}, 0.0), ({"ttft": 60.0, "tpot": 60.0, "e2e": 60.0}, 1.0)):
        _, figures = sent(Script(first_s=0.03), OfferedLoad(1, None, None, 4, 0.0), promised=promised)
        assert figures["goodput_share"] == share


@pytest.mark.parametrize(
    ("script", "stream", "errors"),
    [
        (Script(fail=2), True, {"HTTP 429": 2}),
        (Script(fail=2, status=500), False, {"HTTP 500": 2}),
        (Script(cut=True), True, {"stream cut off": 4}),
        (Script(first_s=30.0), False, {"timeout": 4}),
        (None, True, {"unreachable": 4}),
    ],
)
def test_errors_by_kind(script, stream, errors):
    load = OfferedLoad(2, None, None, 4, 0.0, timeout_s=0.3 if "timeout" in errors else 30.0)
    url = None if script else "http://127.0.0.1:9"
    _, figures = sent(script or Script(), load, Completions(stream=stream), url=url)
    assert figures["errors"] == errors


def test_a_server_is_asked_for_its_models_and_how_it_counts_tokens():
    scale = with_client(Script(per_word=3.0, besides=5), lambda client: target_server.scale(client, Completions()))
    assert scale.words(128) == 41
    assert len(Completions(scale=scale, input_tokens=LengthRange(128, 128)).make(0).body.split()) == 41
    with pytest.raises(WorkError, match=r"HTTP 400: too much of this\nChange what is asked"):
        with_client(Script(fail=1, status=400), lambda client: target_server.ask(client, Completions()))
    chat = {"id": "chat", "kind": "text", "owned_by": "gpuinfer"}
    both = Script(listed=[chat, {"id": "net", "kind": "rows", "owned_by": "gpuinfer", "features": 8}])
    net = with_client(both, lambda client: target_server.look(client, "net"))
    assert net == target_server.TargetServer("net", "rows", True, 8, True)
    assert with_client(both, target_server.look).model == "chat"
    with pytest.raises(UsageError, match="serves chat, net, and no 'nut'"):
        with_client(both, lambda client: target_server.look(client, "nut"))
    assert RowRequests(rows=1, features=8, binary=False, seed="1", model="net").path == "/v1/evaluate?model=net"


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    batch = {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "3"}]}}
    rows = [{"prompt": "1", "temperature": 0}, {"messages": [{"role": "user", "content": "2"}], "id": 7}, batch]
    path.write_text("\n\n".join(["plain words", '"quoted"', *map(json.dumps, rows)]))
    texts = ["plain words", "quoted", "1", "2", "3"]
    assert [row["prompt"] for row in read_prompts(path, "completions")] == texts
    chats = read_prompts(path, "chat")
    assert [row["messages"][0]["content"] for row in chats] == texts
    assert chats[2]["temperature"] == 0
    assert not any({"id", "custom_id", "prompt"} & row.keys() for row in chats)


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


# Streams are counted by their bytes as if each event had been read


def data(*events) -> bytes:
    texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in events]
    return b"".join(b"data: " + text + b"\n\n" for text in texts)


def text(said="x", reason=None):
    return {"choices": [{"index": 0, "text": said, "finish_reason": reason}]}


def delta(**said):
    return {"choices": [{"index": 0, "delta": said}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
DONE = b"[DONE]"
ROLE = delta(role="assistant", content="")


def fed(parts):
    record = RequestRecord(0.0)
    events = EventCounter(record)
    for at, part in parts:
        events.feed(float(at), part)
    events.finish()
    return record


@pytest.mark.parametrize(
    ("stream", "events", "tokens", "error"),
    [
        (data(text(), text(), text(), USAGE, DONE), 3, 3, None),
        (data(ROLE, delta(content="a"), delta(content="b"), delta(), USAGE, DONE), 2, 3, None),
        (data(text(), text("", "stop"), DONE), 1, None, None),
        (data(text(), text()), 2, None, "stream cut off"),
        (data(text(), {"error": {"message": "no"}}), 1, None, "error in the stream"),
        (data(text("\ndata: x\n\ndata: y"), DONE), 1, None, None),
        (data(text(), text(), DONE).replace(b"\n", b"\r\n"), 2, None, None),
        (b": ping\n\n" + data(text(), DONE), 1, None, None),
        (data(delta(reasoning_content="hm"), delta(content="a"), DONE), 2, None, None),
        (data({"choices": None}, b"{", DONE), 0, None, None),
        (b"", 0, None, "stream cut off"),
    ],
)
def test_what_a_stream_holds(stream, events, tokens, error):
    record = fed([(1, stream)])
    assert (len(record.events), record.tokens, record.error) == (events, tokens, error)


@given(st.lists(st.integers(1, 700), max_size=12), st.integers(1, 30))
def test_the_count_does_not_depend_on_how_the_bytes_are_cut(cuts, count):
    whole = data(delta(role="assistant"), *[delta(content=f"{number}") for number in range(count)], USAGE, DONE)
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    record = fed((at, whole[start:end]) for at, (start, end) in enumerate(itertools.pairwise(places)))
    assert (len(record.events), record.tokens, record.input_tokens, record.error) == (count, 3, 7, None)
    assert list(record.events) == sorted(record.events)


def test_a_long_stream_keeps_only_its_end():
    record = fed([*((at, data(text("x" * 400))) for at in range(300)), (300, data(text("", "stop"), USAGE, DONE))])
    assert (len(record.events), record.tokens, record.last) == (300, 3, 299.0)


# Figures of records


def record(due, ended, *, first=None, tokens=None, error=None, lag_s=0.0, route=None):
    one = RequestRecord(due)
    one.ended, one.error, one.tokens, one.lag_s = ended, error, tokens, lag_s
    if route is not None:
        one.route = route
    if first is not None:
        one.first, one.last, one.events = first, ended, array("d", [first, ended])
    return one


def test_rates_count_what_ended_within_the_window_and_latencies_what_was_due_after_the_warm_up():
    records = [record(9.5, 10.5), record(10.0, 11.0), record(11.0, 11.5), record(11.9, 13.0)]
    figures = summarised(LoadRun(records, began=10.0, ended=12.0), {})
    assert figures["requests_per_s"] == 1.5
    assert (figures["requests"], figures["e2e_s"]["max"]) == (3, pytest.approx(1.1))
    run = LoadRun([record(10.0, 13.0, first=11.0, tokens=10)], began=10.0, ended=12.0)  # half of them within it
    assert summarised(run, {})["output_tokens_per_s"] == 2.5


@pytest.mark.parametrize(
    ("cpu", "lag", "saturated"), [(0.3, 0.0, False), (0.97, 0.0, True), (0.3, 0.2, True), (0.3, 0.001, False)]
)
def test_when_the_sender_is_not_to_be_trusted(cpu, lag, saturated):
    records = [record(10.0, 11.0, lag_s=lag) for _ in range(10)]
    assert summarised(LoadRun(records, 10.0, 12.0, cpu), {})["sender"]["saturated"] is saturated


def test_promises_and_who_kept_them():
    assert promises("ttft:200ms, tpot:20ms,e2e:1s") == {"ttft": 0.2, "tpot": 0.02, "e2e": 1.0}
    one = record(0.0, 3.0, first=1.0, tokens=5)
    assert keeps_promises(one, {"ttft": 1.0, "tpot": 0.5, "e2e": 3.0})
    assert not keeps_promises(one, {"e2e": 2.9})
    assert keeps_promises(record(0.0, 3.0), {"ttft": 0.1})  # not streamed: unknown
    assert not keeps_promises(record(0.0, 0.1, error="timeout"), {"e2e": 1.0})
    routed = [
        record(0.0, 1.0, route="replica=1; why=least-loaded 3<5; attempt=1"),
        record(0.0, 1.0, route="replica=10; why=sticky; attempt=1"),
        record(0.0, 1.0, route="replica=1; why=least-loaded 0=0; attempt=2"),
    ]
    assert routes([*routed, record(0.0, 1.0)]) == {
        "1": {"least-loaded": 1, "least-loaded, repeated": 1},
        "10": {"sticky": 1},
    }


def test_the_middle_of_several_runs():
    runs = [
        {"a": 1.0, "b": {"p50": 3.0}, "c": None, "errors": {"HTTP 429": 1}, "d": [1.0, 2.0], "e": False},
        {"a": 2.0, "b": {}, "c": None, "errors": {}, "d": [], "e": True},
        {"a": 9.0, "b": {"p50": 5.0}, "c": None, "errors": {"HTTP 429": 2}, "d": [3.0, 4.0], "e": False},
    ]
    middle = {"a": 2.0, "b": {"p50": 4.0}, "c": None, "errors": {"HTTP 429": 3}, "d": [2.0, 3.0], "e": True}
    assert medians(runs) == middle
