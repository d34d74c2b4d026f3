"""The backend `fleet` with a far side that answers by script."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time

import numpy as np
import pytest
from far import ROWS, TEXT, breaking_off, far, parts, refusing

from gpuinfer.api import BackendContext, ModelSpec, Priority, Request, Setup
from gpuinfer.backends.fleet import FleetBackend
from gpuinfer.errors import (
    BackendDied,
    BackendError,
    BadPrompt,
    BadResult,
    Closed,
    Expired,
    GpuinferError,
    QueueFull,
    UsageError,
)
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.text import answer_frames

SECONDS = 60.0
OF_ROWS = Setup(ModelSpec("blobnet-small", inputs=8, arguments={"actions": 4, "seats": 2}))
OF_TEXT = Setup(ModelSpec("tiny", kind="text"))


@contextlib.asynccontextmanager
async def opened(served=ROWS, setup=OF_ROWS, replicas=1, **options):
    """A backend, and the far side that it asks."""
    async with far(served, replicas) as there:
        backend = FleetBackend(setup, endpoint=there.url, **options)
        await backend.start(BackendContext())
        try:
            yield backend, there
        finally:
            await backend.close()


def text(**options):
    return opened(TEXT, OF_TEXT, **options)


def block(rows=3, **more) -> Request:
    return Request(np.arange(rows * 8, dtype=np.float32).reshape(rows, 8), rows, **more)


def prompt(text="abc", samples=1, *, reads=False, **more) -> Request:
    return Request(Prompt(text=text, samples=samples), samples, parts=reads, **more)


async def heard(backend, *requests):
    return [(event.request, event.error or event.value) async for event in backend.stream(requests)]


async def test_blocks_of_rows_go_there_and_back_in_one_request_each_with_their_way_in_headers():
    async with opened() as (backend, there):
        requests = [block(rows) for rows in (1, 5, 64)]
        for request, (double, total) in zip(requests, await backend.infer(requests), strict=True):
            np.testing.assert_array_equal(double, request.payload * 2)
            np.testing.assert_array_equal(total[:, 0], request.payload.sum(axis=1))
        assert len(there.seen) == 3
        await backend.infer([block(priority=Priority.HIGH, deadline=time.monotonic() + 100, client="me")])
        asked = there.seen[-1].headers
        assert (asked["x-gpuinfer-priority"], asked["x-gpuinfer-client"]) == ("high", "me")
        assert 0 < float(asked["x-gpuinfer-timeout"]) <= 100
        assert not [name for name in there.seen[0].headers if name.startswith("x-gpuinfer")]


async def test_limits_are_those_of_the_far_side():
    async with opened(replicas=2) as (backend, _):
        assert (backend.limits.max_rows, backend.limits.slots) == (64, None)
        assert backend.limits.in_flight > 2
    async with text(replicas=10) as (backend, _):
        assert (backend.limits.max_rows, backend.limits.in_flight) == (8, 80)
        assert backend.limits.slots > 80


async def test_parts_are_passed_on_and_make_the_answer_which_comes_in_one_piece_without_a_reader():
    async with text() as (backend, there):
        request = prompt("hello", samples=2, reads=True)
        *news, (_, last) = await heard(backend, request)
        assert [part for _, part in news] == parts(request.payload)
        assert isinstance(last, Generation)
        assert last.completions[1].text == "hello"
        there.seen.clear()
        found = await heard(backend, prompt("a"), prompt("b"))
        assert sorted(one.completions[0].text for _, one in found) == ["a", "b"]
        assert {exchange.query.get("parts") for exchange in there.seen} == {"0"}


@pytest.mark.parametrize("after", [0, 1, 3, 5])
async def test_a_stream_that_breaks_off_goes_on_and_nothing_is_said_twice(after):
    async with text() as (backend, there):
        there.next = [breaking_off(after), breaking_off(after), breaking_off(2)]
        request = prompt("hello", reads=True)
        news = await heard(backend, request)
        assert [part for _, part in news if isinstance(part, Part)] == parts(request.payload)
        assert len(there.seen) == 4


async def hang_up(exchange):
    exchange._connection.transport.abort()


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_server_that_is_not_there_for_a_moment_is_asked_again_and_one_gone_for_good_given_up(status):
    async with opened(retry=0.3) as (backend, there):
        there.next = [refusing(status, "no replica is up", Retry_After="0"), hang_up]
        ((double, _),) = await backend.infer([block()])
        assert (double.shape, len(there.seen)) == ((3, 8), 3)
        there.next = [refusing(status, "no replica is up")] * 100
        (told,) = await backend.infer([block()])
        assert isinstance(told, BackendDied)
        assert "has not answered for 0.3 s: no replica is up" in str(told)


async def nonsense(exchange):
    exchange.respond(200, b"nonsense")


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (refusing(429, "the queue is full", Retry_After="7"), QueueFull, "the queue is full"),
        (refusing(408, "too late"), Expired, "too late"),
        (refusing(400, "a row has 3 values"), BadPrompt, "a row has 3 values"),
        (refusing(422, "NaN"), BadResult, "NaN"),
        (refusing(500, "it failed"), BackendError, "it failed"),
        (refusing(500, "NaN", X_Gpuinfer_Error="BadResult"), BadResult, "NaN"),
        (refusing(500, "odd", X_Gpuinfer_Error="UsageError"), BackendError, "odd"),
        (refusing(500, "odd", X_Gpuinfer_Error="SystemExit"), BackendError, "odd"),
        (nonsense, BackendError, "sent no answer"),
    ],
)
async def test_errors_are_ours_again(answer, kind, words):
    async with opened() as (backend, there):
        there.next = [answer]
        (told,) = await backend.infer([block()])
        assert type(told) is kind
        assert words in str(told)
        assert kind is not QueueFull or told.retry_after_s == 7


async def test_an_error_in_a_frame_is_the_requests_own():
    async def fail(exchange):
        frame = answer_frames.to_frame(BadPrompt("no such token. Use another."))
        exchange.respond(200, frame, answer_frames.FRAMES_TYPE)

    async with text() as (backend, there):
        there.next = [fail]
        found = await heard(backend, prompt("a"), prompt("b"))
        assert sorted(type(one).__name__ for _, one in found) == ["BadPrompt", "Generation"]


@pytest.mark.parametrize("reads", [False, True])
async def test_cancelling_closes_the_requests_connection(reads):
    gone = asyncio.Event()

    async def hang(exchange):
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()  # our server cancels a request whose client is gone

    async with text() as (backend, there):
        there.next = [hang]
        request = prompt(reads=reads)
        task = asyncio.ensure_future(heard(backend, request))
        async with asyncio.timeout(SECONDS):
            while not there.seen:  # noqa: ASYNC110  the server tells nobody
                await asyncio.sleep(0.01)
            backend.cancel(request)
            await gone.wait()
            ((_, told),) = await task
        assert isinstance(told, Closed)


async def test_what_cannot_travel_fails_alone_and_after_the_close_all_does():
    async with opened() as (backend, there):
        late = block(deadline=time.monotonic() - 1)
        odd, grouped, late, good = await backend.infer([Request("rows"), block(group="a"), late, block()])
        assert (type(odd), type(grouped), type(late), type(good)) == (BackendError, BackendError, Expired, tuple)
        assert len(there.seen) == 1
        await backend.close()
        (told,) = await backend.infer([block()])
        assert isinstance(told, GpuinferError)
        assert await backend.stats() is None


@pytest.mark.parametrize(
    ("served", "setup", "words"),
    [
        (TEXT, OF_ROWS, "serves a model of text, 'tiny', and this run has one of rows"),
        ({**ROWS, "features": 9}, OF_ROWS, "gpuinfer serve --model blobnet-small --features 8"),
        ({**ROWS, "input_dtype": "bits"}, OF_ROWS, "9 features|bits"),
        ({**ROWS, "id": "blobnet"}, OF_ROWS, "-B model=blobnet"),
        ({**TEXT, "slots": -3}, OF_TEXT, "one version"),
        ({"id": "gpt-4", "object": "model"}, OF_TEXT, "is no server of gpuinfer's"),
    ],
)
async def test_another_model_than_the_runs_is_refused_with_the_cure(served, setup, words):
    async with far(served) as there:
        for way in ("check", "start"):
            backend = FleetBackend(setup, endpoint=there.url)
            with pytest.raises(UsageError, match=words):
                await (backend.check() if way == "check" else backend.start(BackendContext()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "http://127.0.0.1:9"}, r"cannot reach http://127\.0\.0\.1:9[\s\S]*gpuinfer serve"),
        ({"endpoint": "localhost:8000"}, "Write http://host:port"),
        ({"endpoint": "https://a"}, "Write http://host:port"),
        ({"endpoint": "http://"}, "Write http://host:port"),
        ({"endpoint": "http://a:port"}, "Write http://host:port"),
        ({"key_file": "x"}, "-B key_file goes with -B endpoint"),
        ({"endpoint": "http://a", "replicas": 2}, "-B replicas is said of replicas that are started"),
        ({"endpoint": "http://a", "threads": 2}, "-B threads is said of"),
    ],
)
async def test_an_address_that_is_none_and_options_that_contradict_one_another_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        await FleetBackend(OF_ROWS, **options).start(BackendContext())


async def test_a_worker_process_gets_the_address_and_the_keys_file_and_no_key(tmp_path):
    key = tmp_path / "key"
    key.write_text("# mine\nsecret-of-mine\n")
    key.chmod(0o600)
    async with opened({**ROWS, "id": "ours"}, key_file=str(key), model="ours") as (backend, there):
        packed = pickle.dumps(backend.connect())
        assert b"secret" not in packed
        worker = pickle.loads(packed).open()  # noqa: S301  our own
        await worker.start(BackendContext())
        await worker.infer([block()])
        assert there.seen[-1].headers["authorization"] == "Bearer secret-of-mine"
        await worker.close()
