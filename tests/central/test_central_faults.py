"""Processes that are killed or stopped: nothing hangs, nothing is lost or answered twice, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from programs import ask_forever, ask_in_loop, is_alive, named, own, stop, use_inherited, wait_until_gone, wrong
from servers import Program, listening, pid_of, programs, served, serving, serving_held, until

from gpuinfer.api import BackendContext, Request
from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.async_client import TextConnector
from gpuinfer.central.connection import CentralConnection
from gpuinfer.errors import BackendDied, Closed, Expired, UsageError
from gpuinfer.stats import since

pytestmark = pytest.mark.usefixtures("children_forked")

NOTICED = 60.0  # seconds until a stopped server is noticed: 5 s of silence, and this machine may be busy
SILENCE = "no sign of life"  # said of a server that is noticed by its silence alone, seconds after its end


@pytest.fixture
def held():
    with serving_held(in_flight=1, max_rows=8) as found:
        yield found


@contextlib.asynccontextmanager
async def backend_of(server):
    backend = CentralRemote(server._setup, address=server.address)
    await backend.start(BackendContext())
    try:
        yield backend
    finally:
        await backend.close()


def way_to(server):
    return TextConnector(CentralRemote, server._setup, server.address, server.restarts_within_s)


def request_of(number, rows=8):
    return Request(named(1, number, rows), rows)


def answers(client, number, **terms):
    return wrong(named(1, number, 8), client.evaluate(named(1, number, 8), **terms)) is None


# The server is killed


async def test_whoever_waits_for_a_killed_server_knows_at_once(held):
    """By its hanging up, and not by its silence."""
    server, hold = held
    others = Program(ask_forever, server.client(), 1, 1, 8), Program(ask_in_loop, way_to(server), 2, 2, 8)
    async with backend_of(server) as backend:
        with server.client() as client, programs(*others):
            assert [other.hear() for other in others] == ["here", "here"]
            hold.close()
            waiting = [client.submit(named(1, number, 3)) for number in range(3)]
            asked = asyncio.ensure_future(backend.infer([request_of(1), request_of(2)]))
            await asyncio.to_thread(hold.wait_until_reached)
            os.kill(pid_of(server), signal.SIGKILL)
            for pending in waiting:
                with pytest.raises(BackendDied, match=r"gone.*option restart"):
                    pending.result(60)
            for ask in (client.evaluate, client.submit):
                with pytest.raises(BackendDied):
                    ask(named(1, 1, 1))
            heard = [*(other.hear() for other in others), *map(repr, await asyncio.wait_for(asked, 60))]
            heard += map(repr, await backend.infer([request_of(3)]))
    assert [said.startswith("BackendDied") and SILENCE not in said for said in heard] == [True] * 5


@pytest.mark.parametrize("full", [False, True])
async def test_what_is_cancelled_or_closed_is_taken_back_from_the_server(held, full):
    server, hold = held
    async with backend_of(server) as backend:
        requests = [request_of(number) for number in range(4)]
        hold.close()
        asked = asyncio.ensure_future(backend.infer(requests))
        await asyncio.to_thread(hold.wait_until_reached)  # the first is in the model
        if full:
            await backend.close()
        backend.cancel(requests[2])
        backend.cancel(request_of(9))  # of which it has never heard
        await asyncio.sleep(0)
        hold.open()
        found = [isinstance(answer, Closed) for answer in await asyncio.wait_for(asked, 60)]
        assert found == ([True] * 4 if full else [False, False, True, False])
        if not full:
            assert (await backend.infer([requests[2]]))[0].shape == (8, 4)
            await asyncio.to_thread(until, lambda: server.stats().requests == 4, "the count of all requests")
            assert server.stats().errors["cancelled"] == 1


def test_a_server_that_comes_back_answers_what_was_outstanding_once(monkeypatch, caplog):
    """It may take a line in just before it ends, or hold its greeting back until the line before is over: it hangs up,
    and is asked again.
    """
    greet, hung_up = CentralConnection._greet, []

    def greeted(connection, timeout_s):
        if not hung_up:
            hung_up.append(timeout_s)
            raise BackendDied("the central server does not answer.") from ConnectionResetError("it hung up")
        return greet(connection, timeout_s)

    with serving(arguments={"seconds": 0.05}, restart=True) as server, server.client() as client:
        others = Program(ask_forever, server.client(), 1, 1, 64), Program(ask_in_loop, way_to(server), 2, 2, 64)
        with programs(*others):
            assert [other.hear() for other in others] == ["here", "here"]
            blocks, expected = [client.block(64) for _ in range(3)], named(3, 1, 64)
            for block in blocks:
                block[:] = expected
            asked = [(client.submit(block[:rows]), expected[:rows]) for rows, block in enumerate(blocks, 1)]
            asked += [(client.submit(named(4, number, 5)), named(4, number, 5)) for number in range(5)]
            first, before = pid_of(server), server.stats()
            monkeypatch.setattr(CentralConnection, "_greet", greeted)
            os.kill(first, signal.SIGKILL)
            assert server.stats().requests >= before.requests, "they are there while it comes back"
            assert [wrong(rows, pending.result(60)) for pending, rows in asked] == [None] * 8
            assert [other.end()[0] for other in others] == ["stopped", "stopped"]
            late = client.block(8)
            late[:] = named(5, 5, 8)
            assert wrong(named(5, 5, 8), client.evaluate(late)) is None
        assert pid_of(server) != first
        assert hung_up
        assert "It is started again." in caplog.text
        lanes = since(server.stats(), before).lanes
        assert len({lane["name"] for lane in lanes}) == len(lanes)
        assert all(seconds >= 0 for lane in lanes for seconds in lane["stations"].values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        pytest.param(8, {}, r"came back 2 times, and died again .* these rows end it", id="rows that end it"),
        pytest.param(5, {"batch_timeout": 1.0}, "batch|answer", id="rows that hang", marks=pytest.mark.soak),
    ],
)
def test_a_server_that_dies_again_and_again_is_given_up(how, options, said):
    with serving("models:faulty", restart=True, **options) as server, server.client() as client:
        client.evaluate(named(1, 1, 4))
        rows = named(1, 2, 4)
        rows[0, -2:] = how, 999
        with pytest.raises(BackendDied, match=said) as died:
            client.evaluate(rows, timeout=200)
        assert "restart" not in str(died.value)
        until(lambda: not listening(server), "the end of a server that only dies")


@pytest.mark.soak
def test_a_stopped_server_is_noticed_and_replaced():
    with serving(restart=True) as server, server.client() as client:
        stopped = pid_of(server)
        stop(stopped)
        try:
            assert answers(client, 1, timeout=NOTICED + 60)
            assert pid_of(server) != stopped
            assert wait_until_gone([stopped], 10) == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)


@pytest.mark.thorough
async def test_a_stopped_server_that_will_not_come_back_is_noticed_by_all_who_wait():
    with serving() as server, server.client() as client:
        async with backend_of(server) as backend:
            stop(pid_of(server))
            asked = asyncio.ensure_future(backend.infer([request_of(1)]))
            with pytest.raises(BackendDied):
                await asyncio.to_thread(client.evaluate, named(1, 1, 1), timeout=NOTICED)
            assert [type(answer) for answer in await asyncio.wait_for(asked, NOTICED)] == [BackendDied]


@pytest.mark.thorough
def test_deadlines_are_kept_while_a_server_comes_back_and_a_client_can_be_closed_then():
    with serving(restart=True) as server, server.client() as client, server.client() as other:
        assert answers(client, 1)
        assert answers(other, 1)
        kept = client.submit(named(1, 2, 8))
        with server._line_lock:  # its owner cannot bring it back meanwhile
            os.kill(pid_of(server), signal.SIGKILL)
            for ask in (client.submit(named(1, 3, 8)).result, lambda seconds: answers(other, 4, timeout=seconds)):
                with pytest.raises(Expired):
                    ask(0.2)
            with pytest.raises(Expired):
                server.client().evaluate(named(1, 4, 8), timeout=0.2)
            other.close()
            with pytest.raises(Closed):
                other.evaluate(named(1, 2, 8))
        assert wrong(named(1, 2, 8), kept.result(60)) is None
        assert answers(client, 5, timeout=60)
        until(lambda: not any(thread.name == "gpuinfer-return" for thread in threading.enumerate()))


def test_whoever_wants_a_server_that_is_gone_for_good_hears_why_and_so_does_the_log(held, caplog):
    server, hold = held
    with server.client() as client:
        hold.close()
        asked = [client.submit(named(1, number, 1)) for number in range(192)]
        os.kill(pid_of(server), signal.SIGKILL)
        until(lambda: not listening(server), "the end of the server")
        for ask in (lambda: client.submit(named(1, 1, 1)), asked[-1].result):
            with pytest.raises(BackendDied):
                ask()
        with pytest.raises(BackendDied, match=r"was killed \(SIGKILL.*option restart"):
            server.client()
        assert "was killed (SIGKILL" in caplog.text


# The owner


def owned(restart, clients):
    """A program that owns a server and forked clients, the name of its socket and the others' process ids."""
    program = Program(own, restart, clients, method="spawn", at=0, daemon=False)
    name, *pids = program.hear().split()
    return program, name, [int(pid) for pid in pids]


def is_known(name):
    return name in Path("/proc/net/unix").read_text()


def named_memory(pids):
    """Files of shared memory that these processes have mapped or open and that could outlive them."""
    maps = [line.split()[-1] for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    links = [os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return [path for path in maps + links if path.startswith("/dev/shm")]


@pytest.mark.thorough
@pytest.mark.parametrize("restart", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["", "with restart"])
def test_with_a_killed_owner_all_ends_and_nothing_is_left(restart):
    program, name, pids = owned(restart, 2)
    with programs(program):
        assert is_known(name)
        assert named_memory([program.pid, *pids]) == []
        program.kill()
        assert wait_until_gone(pids, 30) == []
    assert not is_known(name)


@pytest.mark.thorough
def test_a_forked_child_that_leaves_takes_nothing_of_its_parents_along():
    with serving() as server, server.client() as client:
        pending = client.submit(named(1, 1, 3))
        with programs(Program(use_inherited, client, pending, method="fork", at=2)) as (program,):
            heard = program.hear().split("|")
            assert ["came here by fork" in words for words in heard] == [True] * 3, heard
        assert wrong(named(1, 1, 3), pending.result(30)) is None
        if not (child := os.fork()):
            server.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert answers(client, 2, timeout=30)


@pytest.mark.thorough
@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("raises", 1), ("child", 0)])
def test_a_program_that_forgets_to_close_its_server_ends_and_takes_it_along(how, code):
    here = Path(__file__).parent
    command = [sys.executable, "forgetful.py", how]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    assert wait_until_gone([int(done.stdout)], 30) == []


# Closing


def test_closing_fails_who_waits_and_leaves_nothing(held):
    server, hold = held
    with server.client() as client, programs(Program(ask_forever, server.client(), 1, 1, 8)) as (other,):
        other.hear()
        stop(pid_of(server))  # its answer comes too late, and is not taken for the next one's
        asked = server.stats().requests
        assert not server._ask({"stats": True}, 0.05)
        os.kill(pid_of(server), signal.SIGCONT)
        assert answers(client, 1)
        assert server.stats().requests > asked
        hold.close()
        pending, pid = [client.submit(named(1, number, 8)) for number in range(20)], pid_of(server)
        hold.wait_until_reached()
        hold.open()
        server.close(quiet=True)
        with pytest.raises((Closed, BackendDied)):
            client.submit(named(1, 1, 8)).result()
        assert all(one.done for one in pending)
        assert other.hear().startswith(("Closed", "BackendDied"))
    assert not is_alive(pid)
    assert not listening(server)
    assert server.close(quiet=True) == server.stats()
    with pytest.raises(Closed):
        server.client()


def test_a_server_that_was_never_started_can_be_closed():
    assert served().close(quiet=True).requests == 0
    server = served("models:no_such_factory")
    with pytest.raises(UsageError, match="no_such_factory"):
        server.start()
    assert server.close(quiet=True).requests == 0
    assert not listening(server)


@pytest.mark.thorough
def test_closing_while_a_server_comes_back_leaves_no_process():
    with serving(restart=True) as server:
        first = pid_of(server)
        os.kill(first, signal.SIGKILL)
        until(lambda: pid_of(server) != first, "another process")
        second = pid_of(server)
        server.close(quiet=True)
        assert wait_until_gone([second], 30) == []
        assert pid_of(server) == second
        assert not any(thread.name == "gpuinfer-server-watch" for thread in threading.enumerate())


def test_a_server_that_is_closed_while_it_starts_does_not_start():
    server, errors = served(), []

    def start():
        try:
            server.start()
        except Closed as error:
            errors.append(str(error))

    starting = threading.Thread(target=start)
    starting.start()
    until(lambda: server._child is not None, "the process")
    pid = pid_of(server)
    server.close(quiet=True)
    starting.join(30)
    assert errors == ["the server was closed while it started. Make another."]
    assert wait_until_gone([pid], 30) == []
    assert not listening(server)


# At any instant

EACH = 64  # rows at most in a request
SEEDS = [
    pytest.param(
        seed, id=f"seed {seed}", marks=[] if seed < 2 else pytest.mark.thorough if seed < 8 else pytest.mark.soak
    )
    for seed in range(200)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_killed_or_stopped_at_any_instant_the_others_go_on_or_are_told(seed):
    """The victim, the signal and the instant come from the seed; victims and signals take turns, so that few do too."""
    victim = ("client", "server", "owner", "loop")[seed % 4]
    number = signal.SIGSTOP if seed // 4 % 2 else signal.SIGKILL
    chance = random.Random(seed)
    if victim == "owner":
        strike_owner(chance, number)
    else:
        strike(chance, victim, number)


def strike(chance, victim, number):
    """Of two clients of each kind and their server, one is struck; a stopped client goes on after a while."""
    server, struck = served(restart=True), 0
    server.start()
    try:
        with programs(
            Program(ask_forever, server.client(), 1, chance.random(), EACH),
            Program(ask_in_loop, way_to(server), 2, chance.random(), EACH),
            Program(ask_forever, server.client(), 3, chance.random(), EACH),
            Program(ask_in_loop, way_to(server), 4, chance.random(), EACH),
        ) as clients:
            if chance.random() < 0.7:  # else they are struck while they start
                assert [client.hear() for client in clients] == ["here"] * 4
            time.sleep(chance.uniform(0, 0.3))
            struck = {"client": clients[0].pid, "loop": clients[1].pid, "server": pid_of(server)}[victim]
            os.kill(struck, number)
            time.sleep(chance.uniform(0, 0.3))
            if number == signal.SIGSTOP and victim != "server":
                os.kill(struck, signal.SIGCONT)
            dead = {"client": 0, "loop": 1}.get(victim) if number == signal.SIGKILL else None
            ends = [client.end() for index, client in enumerate(clients) if index != dead]
            assert [how for how, _ in ends] == ["stopped"] * len(ends)
            assert victim != "server" or wait_until_gone([struck], 30) == []
            last = pid_of(server)
    finally:
        server.close(quiet=True)
        if struck and number == signal.SIGSTOP:
            with contextlib.suppress(ProcessLookupError):
                os.kill(struck, signal.SIGCONT)
    assert wait_until_gone([last], 10) == []
    assert not is_known(server.address.path[1:])


def strike_owner(chance, number):
    """The owner of a server with two clients is killed: all end. Or it is stopped: all go on until it is killed."""
    owner, name, others = owned(bool(chance.getrandbits(1)), 2)
    with programs(owner):
        time.sleep(chance.uniform(0, 0.5))
        owner.kill(number)
        if number == signal.SIGSTOP:
            time.sleep(chance.uniform(0, 0.5))
            assert all(map(is_alive, others))
            if chance.random() < 0.5:
                owner.kill(signal.SIGCONT)
            owner.kill()
        assert wait_until_gone(others, 30) == []
    assert not is_known(name)
