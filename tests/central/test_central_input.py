"""Bad input, models that misbehave, and too little room: an error that ends with the cure, for whoever caused it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from models import BAD, FEATURES, Faulty
from programs import named, wrong
from servers import SECONDS, pid_of, served, serving, serving_held, until

from gpuinfer.api import BackendContext, ModelSpec, Request
from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.client_sessions import ClientAcceptor
from gpuinfer.central.protocol import listen
from gpuinfer.errors import (
    BackendDied,
    BackendError,
    BadResult,
    Closed,
    Expired,
    QueueFull,
    RequestError,
    UnknownName,
    UsageError,
)
from gpuinfer.host import shared_memory

pytestmark = pytest.mark.usefixtures("children_forked")


@pytest.fixture(scope="module")
def server():
    with serving("models:faulty", arguments={"shape": "dict"}, max_rows=512, max_clients=4) as server:
        yield server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def whole(answer):
    """The answer of a `dict` model, in one array."""
    return np.column_stack([answer["name"], answer["hash"]])


def well(client):
    rows = named(8, 8, 11)
    return wrong(rows, whole(client.evaluate(rows, timeout=30))) is None


NAN = np.full((3, FEATURES), np.nan, np.float32)
PARTLY = named(1, 1, 3)
PARTLY[1, 2] = np.nan


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        pytest.param(np.zeros((3, 7), np.float32), BackendError, r"\[3, 8\].*got float32 \[3, 7\]", id="another width"),
        pytest.param(np.zeros(8, np.float32), BackendError, r"got float32 \[8\]", id="a row that is no block"),
        pytest.param(np.zeros((2, 2, 8), np.float32), BackendError, "got float32", id="three dimensions"),
        pytest.param(np.float32(3), BackendError, "got float32|0 rows", id="a number"),
        pytest.param(np.zeros((), np.float32), BackendError, r"got float32 \[\]", id="an array without dimensions"),
        pytest.param(np.zeros((3, 8)), BackendError, "float32.*got float64", id="another dtype"),
        pytest.param(np.zeros((3, 8), np.uint8), BackendError, "float32.*got uint8", id="whole numbers"),
        pytest.param(np.zeros((3, 8), object), BackendError, "got object", id="objects"),
        pytest.param(np.zeros((0, 8), np.float32), BackendError, "0 rows", id="no rows"),
        pytest.param([[0.0] * 8], BackendError, "got list", id="a list"),
        pytest.param(None, BackendError, "got NoneType", id="nothing"),
        pytest.param("rows", BackendError, "got str", id="a string"),
        pytest.param(np.zeros((513, 8), np.float32), RequestError, "513 rows.*1 to 512.*max_rows", id="too many rows"),
        pytest.param(NAN, BackendError, "NaN", id="nothing but NaN"),
        pytest.param(PARTLY, BackendError, "NaN", id="one NaN"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_cure(client, payload, kind, message):
    with pytest.raises(kind, match=message) as caught:
        client.evaluate(payload)
    assert str(caught.value).endswith(".")
    assert well(client)


@pytest.mark.parametrize("rows", [0, -1, 513])
def test_a_block_of_impossible_size_is_refused(client, rows):
    with pytest.raises(RequestError, match="1 to 512"):
        client.block(rows)
    assert well(client)


@pytest.mark.parametrize("group", [[1], {"a": 1}, {1, 2}, object(), "x" * 100_000, 2**80], ids=type)
def test_a_group_that_cannot_travel_is_refused(client, group):
    with pytest.raises(RequestError, match="group"):
        client.evaluate(named(1, 1, 1), group=group)
    assert well(client)


@pytest.mark.parametrize("priority", [3, -1, "high", 1.5])
def test_a_class_that_does_not_exist_is_refused(client, priority):
    with pytest.raises(RequestError, match=r"priority .* cannot be queued"):
        client.evaluate(named(1, 1, 1), priority=priority)
    assert well(client)


def test_a_block_that_is_with_the_server_already_is_refused(client):
    block = client.block(100)
    block[:] = named(1, 1, 100)
    pending = client.submit(block)
    with pytest.raises(RequestError, match="with the server already"):
        client.submit(block[:3])
    assert wrong(block, whole(pending.result(30))) is None


def test_too_many_outstanding_requests_are_refused(client):
    blocks = [client.block(1) for _ in range(256)]
    with pytest.raises(QueueFull, match="at most 256 blocks"):
        client.evaluate(named(1, 1, 1))
    asked = [client.submit(block) for block in blocks]
    assert [len(whole(pending.result(30))) for pending in asked] == [1] * 256


def test_more_threads_than_a_client_has_blocks_wait_for_one_another(client):
    def ask(who: int) -> str | None:
        rows = named(who, 1, 3)
        return wrong(rows, whole(client.evaluate(rows, timeout=SECONDS)))

    with ThreadPoolExecutor(300) as threads:
        assert list(threads.map(ask, range(600))) == [None] * 600


def test_a_timeout_ends_the_wait_for_a_block():
    with serving_held() as (server, hold), server.client() as client:
        hold.close()
        asked = [client.submit(named(1, number, 1)) for number in range(192)]
        with pytest.raises(Expired, match=r"no answer within 0\.2 s"):
            client.evaluate(named(1, 1, 1), timeout=0.2)
        hold.open()
        assert [len(pending.result(60)) for pending in asked] == [1] * 192


@pytest.mark.parametrize("timeout", [1e-5, 1e-9])
def test_a_timeout_that_is_over_at_once_is_told_as_it_was_given(client, timeout):
    client.evaluate(named(1, 1, 1))
    with pytest.raises(Expired, match=rf"no answer within {timeout:g} s\."):
        client.evaluate(named(1, 1, 1), timeout=timeout)


async def test_an_event_loop_may_ask_for_small_blocks_and_then_for_larger_ones(server):
    backend = CentralRemote(server._setup, address=server.address)
    await backend.start(BackendContext())
    for rows in (1, 65, 129):
        asked = [Request(named(1, number, rows), rows) for number in range(256)]
        for request, answer in zip(asked, await backend.infer(asked), strict=True):
            assert wrong(request.payload, whole(answer)) is None
    await backend.close()


# Models that misbehave

FAULTS = [
    pytest.param(Faulty.RAISES, BackendError, "ValueError: this row cannot be answered", id="raises"),
    pytest.param(Faulty.ANSWERS_NAN, BadResult, "NaN", id="answers NaN"),
    pytest.param(Faulty.EXITS, BackendError, "SystemExit", id="leaves"),
    pytest.param(Faulty.OTHER_NAMES, BadResult, "agreed", id="answers under other names"),
    pytest.param(Faulty.CHATTERS, BackendError, "xxx …|… xxx|xxx", id="says very much"),
    pytest.param(Faulty.INTERRUPTS, BackendError, r"raised KeyboardInterrupt\. Only", id="raises without a word"),
    pytest.param(Faulty.UNSPEAKABLE, BackendError, "raised Unspeakable", id="raises what cannot be put into words"),
]


def poisoned(how):
    rows = named(2, 2, 6)
    rows[4, -2:] = how, BAD
    return rows


@pytest.mark.parametrize(("how", "kind", "message"), FAULTS)
def test_a_row_that_the_model_fails_on_fails_its_own_request_only(server, client, how, kind, message):
    before = server.stats()
    blocks = [named(1, number, 1 + 20 * number) for number in range(8)]
    asked = [client.submit(block) for block in blocks[:4]]
    bad = client.submit(poisoned(how))
    asked += [client.submit(block) for block in blocks[4:]]
    with pytest.raises(kind, match=message):
        bad.result(30)
    for block, pending in zip(blocks, asked, strict=True):
        assert wrong(block, whole(pending.result(30))) is None
    until(lambda: server.stats().requests - before.requests == 8)
    assert server.stats().errors.get("failed", 0) - before.errors.get("failed", 0) == 1


@pytest.mark.thorough
def test_a_model_that_hangs_is_given_up_and_whoever_waits_is_told():
    with serving("models:faulty", batch_timeout=0.5) as server, server.client() as client, server.client() as other:
        asked = [client.submit(poisoned(Faulty.HANGS)) for _ in range(3)]
        with pytest.raises(BackendDied, match=r"has not answered a batch for 0\.5 s.*batch_timeout"):
            asked[0].result(60)
        for pending in asked[1:]:
            with pytest.raises(BackendDied):
                pending.result(10)
        with pytest.raises(BackendDied):
            other.evaluate(named(1, 1, 1), timeout=30)


def test_a_timeout_holds_while_the_model_hangs_and_sending_never_blocks():
    with serving("models:faulty", in_flight=1) as server, server.client() as client:
        client.submit(poisoned(Faulty.HANGS))
        asked = [client.submit(named(1, number, 1), timeout=600) for number in range(180)]
        for pending in asked:
            for _ in range(2):
                with pytest.raises(Expired, match=r"within 0\.001 s"):
                    pending.result(0.001)
        with pytest.raises(Expired, match=r"0\.2 s"):
            client.evaluate(named(2, 2, 2), timeout=0.2)
        os.kill(pid_of(server), 9)


def test_an_answer_that_was_waited_for_too_briefly_can_be_waited_for_again():
    with serving_held() as (server, hold), server.client() as client:
        hold.close()
        pending, given_up = (client.submit(named(1, number, 3)) for number in range(2))
        for _ in range(2):
            with pytest.raises(Expired, match=r"within 0\.01 s"):
                pending.result(timeout=0.01)
        given_up.cancel()
        with pytest.raises(Closed, match="cancelled"):
            given_up.result()
        assert not pending.done
        hold.open()
        assert wrong(named(1, 0, 3), pending.result(SECONDS)) is None
        assert (pending.done, pending.error) == (True, None)
        assert wrong(named(1, 0, 3), pending.value) is None


# Room


def test_too_many_clients_are_told_so(server):
    clients = [server.client() for _ in range(4)]
    for client in clients:
        assert well(client)
    with pytest.raises(UsageError, match=r"4 clients already.*max_clients"):
        server.client().evaluate(named(1, 1, 1))
    clients[0].close()
    late = server.client()

    def enters():
        nonlocal late
        try:
            return well(late)
        except UsageError:
            late = server.client()
            return False

    until(enters, "room for another client")
    for client in [*clients, late]:
        client.close()


def test_a_lack_of_shared_memory_is_said_with_the_size(client, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    size = client.block(512).nbytes
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"[\d,]+ bytes of shared memory cannot be had: No space left") as caught:
        client.block(512)
    told = int(str(caught.value).split(" bytes")[0].replace(",", ""))
    assert size < told < 2 * size
    monkeypatch.undo()
    assert well(client)


@pytest.fixture
def no_descriptors():
    """A context in which this process can open nothing more."""

    @contextlib.contextmanager
    def limited():
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    return limited


def test_a_lack_of_descriptors_is_said_with_the_cure(server, no_descriptors):
    with no_descriptors():
        with pytest.raises(UsageError, match=r"4,096 bytes of shared memory.*ulimit -n"):
            shared_memory.create(4096)
        with pytest.raises(UsageError, match=r"no line to the central server.*ulimit -n"):
            server.client().evaluate(named(1, 1, 1))


def test_a_server_without_descriptors_rests_until_there_are_some(no_descriptors):
    listener, address = listen()
    lines = ClientAcceptor(listener, address.token, 4, (b"", 0), lambda rows: None)
    with contextlib.closing(listener), socket.socket(socket.AF_UNIX) as client:
        client.connect(address.path)
        with no_descriptors():
            lines.take_in(lines.ready(), None, None)
            assert not lines.sessions
            assert not lines.ready()
        lines.take_in(lines.wait(SECONDS), None, None)
        (session,) = lines.sessions.values()
        session.hang_up()
        for end in (lines._wake_reader, lines._wake_writer, lines._selector):
            end.close()


def test_a_client_that_is_dropped_without_being_closed_holds_no_memory(server):
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    client = server.client()
    assert well(client)
    assert client.block(5).shape == (5, FEATURES)
    client._connection._socket.close()  # else Python warns of it, rightly
    del client
    gc.collect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before, "the end of all it held")


@pytest.mark.thorough
def test_without_memfd_memory_has_no_name_either():
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here)}
    done = subprocess.run(
        [sys.executable, "without_memfd.py"], cwd=here, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "{'faults': [None, None], 'memfd': False, 'left': 0" in done.stdout


# Used wrongly


def test_a_client_that_is_closed_says_so(server):
    client = server.client()
    pending = client.submit(named(1, 1, 400))
    client.close()
    client.close()
    with pytest.raises(Closed, match=r"server\.client\(\)"):
        client.evaluate(named(1, 1, 1))
    with pytest.raises(Closed):
        client.block(3)
    with pytest.raises(Closed):
        pending.result(5)


@pytest.mark.sample
@pytest.mark.parametrize(
    ("model", "options", "kind", "message"),
    [
        pytest.param("models:tagged", {"inputs": 0}, UsageError, "inputs=N", id="no features"),
        pytest.param(lambda: None, {}, UsageError, "at a module's top", id="a factory without a name"),
        pytest.param("models:tagged", {"strategy": "dynamite"}, UnknownName, "dynamic", id="an unknown strategy"),
        pytest.param("models:taged", {}, UnknownName, "tagged", id="an unknown factory"),
        pytest.param("models:named", {}, UsageError, r".", id="what is no factory"),
        pytest.param("models:tagged", {"input_dtype": "float16"}, UnknownName, "float32", id="an unknown dtype"),
        pytest.param(ModelSpec("models:network"), {}, UsageError, r".", id="a specification without features"),
        pytest.param(5, {}, UsageError, "Give a function", id="no model"),
        pytest.param("models:tagged", {"inputs": "4"}, UsageError, "inputs", id="features that are no number"),
        pytest.param("models:tagged", {"max_rows": 0}, UsageError, "max_rows", id="no rows"),
        pytest.param("models:tagged", {"in_flight": 1.5}, UsageError, "in_flight", id="half a batch"),
        pytest.param("models:tagged", {"batch_timeout": 0}, UsageError, "batch_timeout", id="no time"),
        pytest.param(
            "models:tagged",
            {"arguments": {"shap": "dict"}},
            UsageError,
            r"no argument 'shap'\. Did you mean 'shape'\? It takes seconds, shape",
            id="an argument mistyped",
        ),
        pytest.param(
            "models:tagged", {"arguments": {"features": 9}}, UsageError, "features=9 .* rows of 8", id="another size"
        ),
        pytest.param(
            "blobnet-small",
            {"arguments": {"actions": 2, "seats": 2, "hidden": 7}},
            UsageError,
            "no argument 'hidden'. It takes actions, seats",
            id="an argument that a network of ours does not take",
        ),
    ],
)
def test_a_server_that_cannot_be_had_says_why(model, options, kind, message):
    with pytest.raises(kind, match=message):
        served(model, **options).start()


@pytest.mark.thorough
def test_a_server_serves_once():
    server = served()
    with pytest.raises(Closed, match="with CentralServer"):
        server.client()
    with server, pytest.raises(UsageError, match="started before"):
        server.start()
    with pytest.raises(UsageError, match="started before"):
        server.start()


def test_a_timeout_that_is_no_number_is_refused_and_the_client_goes_on(client):
    for timeout, said in ((float("nan"), "timeout is NaN"), ("1s", "timeout is '1s'. Give seconds as a number")):
        with pytest.raises(UsageError, match=said):
            client.evaluate(named(1, 1, 3), timeout=timeout)
    assert client.evaluate(named(1, 1, 3), timeout=np.float32(60))["name"].shape == (3, 3)
    assert well(client)


def test_chunk_rows_are_how_many_rows_go_through_at_once():
    with serving("models:Together", chunk_rows=16) as server, server.client() as client:
        assert (client.evaluate(named(1, 1, 64)) == 16).all()
