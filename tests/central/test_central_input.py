"""Bad input, models that misbehave, too little room, programs that cannot be served: an error with the cure, for those
who caused it, and the others are served.
"""

from __future__ import annotations

import contextlib
import errno
import functools
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
from servers import SECONDS, served, serving, serving_held, until
from torch import nn

from gpuinfer.api import BackendContext, ModelSpec, Request
from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.client_sessions import ClientAcceptor
from gpuinfer.central.protocol import listen
from gpuinfer.central.server import CentralServer
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

HERE = Path(__file__).parent


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


ONE = named(1, 1, 1)
ROWS = np.ones((2, FEATURES), np.float32)
PARTLY = named(1, 1, 3)
PARTLY[1, 2] = np.nan


@pytest.mark.parametrize(
    ("ask", "kind", "said"),
    [
        (lambda client: client.evaluate(np.zeros((3, 7), np.float32)), BackendError, r"\[3, 8\].*got float32 \[3, 7\]"),
        (lambda client: client.evaluate(ROWS[0]), BackendError, r"got float32 \[8\].* send row\[None\]"),
        (lambda client: client.evaluate(ROWS.reshape(2, 2, 4)), BackendError, r"Send rows\.reshape\(len\(rows\), -1\)"),
        (lambda client: client.evaluate(np.float32(3)), BackendError, "got float32|0 rows"),
        (lambda client: client.evaluate(ROWS.astype(float)), BackendError, r"Send rows\.astype\(np\.float32\)"),
        (lambda client: client.evaluate(np.zeros((3, 8), object)), BackendError, "got object"),
        (lambda client: client.evaluate(ROWS[:0]), BackendError, "0 rows"),
        (
            lambda client: client.evaluate(ROWS.tolist()),
            BackendError,
            r"got list.*Send np\.asarray\(rows, np\.float32\)",
        ),
        (lambda client: client.evaluate(None), BackendError, "got NoneType"),
        (lambda client: client.evaluate(np.zeros((513, 8), np.float32)), RequestError, "513 rows.*1 to 512.*max_rows"),
        (lambda client: client.evaluate(ROWS * np.nan), BackendError, "NaN"),
        (lambda client: client.evaluate(PARTLY), BackendError, "NaN"),
        *((lambda client, rows=rows: client.block(rows), RequestError, "1 to 512") for rows in (0, -1, 513)),
        *(
            (lambda client, group=group: client.evaluate(ONE, group=group), RequestError, "the group .* cannot travel")
            for group in ([1], {1, 2}, object(), "x" * 100_000, 2**80)
        ),
        *(
            (lambda client, one=one: client.evaluate(ONE, priority=one), RequestError, r"priority .* cannot be queued")
            for one in (3, -1, "high", 1.5)
        ),
        (lambda client: client.evaluate(ONE, timeout=float("nan")), UsageError, "timeout is NaN"),
        (lambda client: client.evaluate(ONE, timeout="1s"), UsageError, "timeout is '1s'. Give seconds as a number"),
        (lambda client: client.evaluate(ONE, timeout=1e-9), Expired, r"no answer within 1e-09 s\."),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_cure(client, ask, kind, said):
    assert well(client)
    with pytest.raises(kind, match=said) as caught:
        ask(client)
    assert str(caught.value).endswith(".")
    assert well(client)


# Blocks, and threads and loops that want more than there are


def test_blocks_are_used_once_at_a_time_and_there_are_so_many(client):
    block = client.block(100)
    block[:] = named(1, 1, 100)
    pending = client.submit(block)
    with pytest.raises(RequestError, match="with the server already"):
        client.submit(block[:3])
    assert wrong(block, whole(pending.result(30))) is None
    blocks = [client.block(1) for _ in range(255)]
    with pytest.raises(QueueFull, match="at most 256 blocks"):
        client.evaluate(ONE)
    asked = [client.submit(block) for block in blocks]
    assert [len(whole(pending.result(30))) for pending in asked] == [1] * 255


async def test_more_threads_and_tasks_than_a_client_has_blocks_wait_for_one_another(client, server):
    def ask(who: int) -> str | None:
        rows = named(who, 1, 3)
        return wrong(rows, whole(client.evaluate(rows, timeout=SECONDS)))

    with ThreadPoolExecutor(300) as threads:
        assert list(threads.map(ask, range(600))) == [None] * 600
    backend = CentralRemote(server._setup, address=server.address)
    await backend.start(BackendContext())
    for rows in (1, 65, 129):
        asked = [Request(named(1, number, rows), rows) for number in range(256)]
        for request, answer in zip(asked, await backend.infer(asked), strict=True):
            assert wrong(request.payload, whole(answer)) is None
    await backend.close()


def test_a_timeout_ends_any_wait_and_an_answer_can_be_waited_for_again():
    with serving_held() as (server, hold), server.client() as client:
        hold.close()
        pending, given_up, *others = (client.submit(named(1, number, 3), timeout=600) for number in range(192))
        for _ in range(2):
            with pytest.raises(Expired, match=r"within 0\.01 s"):
                pending.result(timeout=0.01)
        with pytest.raises(Expired, match=r"no answer within 0\.2 s"):
            client.evaluate(ONE, timeout=0.2)  # for which there is no block
        given_up.cancel()
        with pytest.raises(Closed, match="cancelled"):
            given_up.result()
        assert not pending.done
        hold.open()
        assert wrong(named(1, 0, 3), pending.result(SECONDS)) is None
        assert (pending.done, pending.error, wrong(named(1, 0, 3), pending.value)) == (True, None, None)
        assert [len(one.result(60)) for one in others] == [3] * 190


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
        for ask in (asked[1].result, asked[2].result, lambda seconds: other.evaluate(ONE, timeout=seconds)):
            with pytest.raises(BackendDied):
                ask(30)


# Room


def test_too_many_clients_are_told_so_and_one_that_is_closed_makes_room(server):
    clients = [server.client() for _ in range(4)]
    assert all(map(well, clients))
    with pytest.raises(UsageError, match=r"4 clients already.*max_clients"):
        server.client().evaluate(ONE)
    pending = clients[0].submit(named(1, 1, 400))
    for _ in range(2):
        clients[0].close()
    for ask in (lambda: clients[0].evaluate(ONE), lambda: clients[0].block(3), lambda: pending.result(5)):
        with pytest.raises(Closed, match=r"server\.client\(\)"):
            ask()

    def enters():
        with contextlib.suppress(UsageError), server.client() as late:
            return well(late)
        return False

    until(enters, "room for another client")
    for client in clients:
        client.close()


def test_a_lack_of_shared_memory_is_said_with_the_size(client, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    size = client.block(512).nbytes
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UsageError, match=r"[\d,]+ bytes of shared memory cannot be had: No space left") as caught:
        client.block(512)
    assert size < int(str(caught.value).split(" bytes")[0].replace(",", "")) < 2 * size
    monkeypatch.undo()
    assert well(client)


@contextlib.contextmanager
def no_descriptors():
    """In which this process can open nothing more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_lack_of_descriptors_is_said_with_the_cure_and_a_server_rests_until_there_are_some(server):
    listener, address = listen()
    lines = ClientAcceptor(listener, address.token, 4, (b"", 0), lambda rows: None)
    with contextlib.closing(listener), socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(address.path)
        with no_descriptors():
            with pytest.raises(UsageError, match=r"4,096 bytes of shared memory.*ulimit -n"):
                shared_memory.create(4096)
            with pytest.raises(UsageError, match=r"no line to the central server.*ulimit -n"):
                server.client().evaluate(ONE)
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


# Servers that cannot be had


class Doubled(nn.Module):
    """A network without an `__init__` of its own."""

    def forward(self, rows):
        return rows * 2


def local():
    def network():
        return Doubled()

    return network


SIZES = {"actions": 2, "seats": 2, "hidden": 7}
REFUSED = [  # at once
    ("models:tagged", {"inputs": 0}, UsageError, "inputs=N"),
    ("models:tagged", {"inputs": "4"}, UsageError, "inputs"),
    ("models:tagged", {"inputs": (3, 0)}, UsageError, "its shape"),
    ("models:tagged", {"inputs": 4, "example": [1.0]}, UsageError, "Leave inputs out"),
    ("models:tagged", {"inputs": (3, 4), "input_dtype": "bits"}, UsageError, "float32"),
    ("models:tagged", {"strategy": "dynamite"}, UnknownName, "dynamic"),
    ("models:tagged", {"max_rows": 0}, UsageError, "max_rows"),
    ("models:tagged", {"in_flight": 1.5}, UsageError, "in_flight"),
    ("models:tagged", {"batch_timeout": 0}, UsageError, "batch_timeout"),
    (ModelSpec("models:network"), {}, UsageError, "."),
    (ModelSpec("tiny", kind="text"), {}, UsageError, "takes rows"),
    (5, {}, UsageError, "model is 5. Give a module, a function"),
    (nn.Linear(4, 2), {"inputs": 0}, UsageError, r"example=torch\.zeros\(3, 32, 32\), or inputs=N"),
    (nn.Linear(4, 2), {"weights": "file"}, UsageError, "load_state_dict"),
    (functools.partial(Doubled), {}, UsageError, r"functools\.partial, which has no name"),
    (lambda: None, {}, UsageError, "is a lambda, which no other process can import"),
    (local(), {}, UsageError, "'network', made inside of a function"),
]
STARTED = [  # by the process
    ("models:taged", {}, UnknownName, "tagged"),
    ("models.tagged", {}, UsageError, "Did you mean 'models:tagged'?"),
    ("models:named", {}, UsageError, "."),
    (nn.Linear, {}, UsageError, "needs in_features, out_features.*write a function around it"),
    ("models:tagged", {"input_dtype": "float16"}, UnknownName, "float32"),
    ("models:tagged", {"arguments": {"shap": "dict"}}, UsageError, r"'shap'\. Did you mean 'shape'\? It takes seconds"),
    ("models:tagged", {"arguments": {"features": 9}}, UsageError, "features=9 .* rows of 8"),
    ("blobnet-small", {"arguments": SIZES}, UsageError, "no argument 'hidden'. It takes actions, seats"),
]


@pytest.mark.parametrize(("model", "options", "kind", "said"), REFUSED)
def test_a_server_that_cannot_be_is_refused_at_once(model, options, kind, said):
    with pytest.raises(kind, match=said):
        served(model, **options)


@pytest.mark.sample
@pytest.mark.parametrize(("model", "options", "kind", "said"), STARTED)
def test_a_server_that_cannot_be_had_says_why(model, options, kind, said):
    with pytest.raises(kind, match=said):
        served(model, **options).start()


def test_a_server_serves_once_and_a_network_needs_no_init():
    server = CentralServer(f"{__name__}:Doubled", inputs=4)
    with pytest.raises(Closed, match="with CentralServer"):
        server.client()
    with server, server.client() as client:
        assert (client.evaluate(np.ones((2, 4), np.float32)) == 2).all()
        with pytest.raises(UsageError, match="started before"):
            server.start()
    with pytest.raises(UsageError, match="started before"):
        server.start()


# Programs as people write them

UNGUARDED = (HERE / "unguarded.py").read_text()
OF_A_MODULE = UNGUARDED[: UNGUARDED.index("class")] + "from test_central_input import Doubled\n\n"
OF_A_MODULE += UNGUARDED[UNGUARDED.index("with ") :]
HEAD, _, TAIL = UNGUARDED.partition("class Doubled")
BELOW = HEAD + 'if __name__ == "__main__":\n' + "\n".join(f" {line}" for line in f"class Doubled{TAIL}".splitlines())
BY_NAME = UNGUARDED.replace("(Doubled", '("__main__:Doubled"')
WRITE = "Write it into a file, such as model.py, and give 'model:Doubled'."


def program(*words, text=None):
    return subprocess.run(
        [sys.executable, *words], cwd=HERE, input=text, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("way", "text", "said"),
    [
        pytest.param("file", UNGUARDED, "starts a server whenever it is imported", id="no guard"),
        pytest.param("-", UNGUARDED, WRITE, id="from standard input"),
        pytest.param("-c", BY_NAME, WRITE, id="a word, by name", marks=pytest.mark.thorough),
        pytest.param(
            "file", BELOW, "above `if __name__ == '__main__':`", id="below the guard", marks=pytest.mark.thorough
        ),
        pytest.param("-", OF_A_MODULE, None, id="of a module, from standard input", marks=pytest.mark.thorough),
        pytest.param("-c", OF_A_MODULE, None, id="of a module, in a word", marks=pytest.mark.thorough),
    ],
)
def test_a_program_is_served_or_told_what_to_do(way, text, said, tmp_path):
    (tmp_path / "program.py").write_text(text)
    words = {"-": ["-"], "-c": ["-c", text], "file": [str(tmp_path / "program.py")]}[way]
    done = program(*words, text=text if way == "-" else None)
    if said is None:
        assert (done.returncode, done.stdout.strip()) == (0, "16.0"), done.stderr
    else:
        assert (done.returncode, said in done.stderr.splitlines()[-1]) == (1, True), done.stderr
        assert done.stderr.count("Traceback") == 1, done.stderr


@pytest.mark.thorough
def test_without_memfd_memory_has_no_name_either():
    done = program("without_memfd.py")
    assert done.returncode == 0, done.stderr
    assert "{'faults': [None, None], 'memfd': False, 'left': 0" in done.stdout
