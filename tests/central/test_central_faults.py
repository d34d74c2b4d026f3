"""Processes that are killed or stopped: nothing hangs, nothing is lost or answered twice, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
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


# The server is killed


@pytest.fixture
def held():
    with serving_held() as found:
        yield found


def test_clients_that_wait_for_a_killed_server_know_at_once(held):
    """By its hanging up, and not by its silence."""
    server, hold = held
    with (
        server.client() as client,
        programs(
            Program(ask_forever, server.client(), 1, 1, 16),
            Program(ask_in_loop, TextConnector(CentralRemote, server._setup, server.address, 0.0), 2, 2, 16),
        ) as others,
    ):
        assert [other.hear() for other in others] == ["here", "here"]
        hold.close()
        waiting = [client.submit(named(1, number, 3)) for number in range(3)]
        hold.wait_until_reached()
        os.kill(pid_of(server), signal.SIGKILL)
        for pending in waiting:
            with pytest.raises(BackendDied, match=r"gone.*option restart"):
                pending.result(60)
        with pytest.raises(BackendDied):
            client.evaluate(named(1, 1, 1))
        for other in others:
            heard = other.hear()
            assert heard.startswith("BackendDied")
            assert SILENCE not in heard


async def test_whoever_awaits_a_killed_server_knows_at_once(held):
    server, hold = held
    backend = CentralRemote(server._setup, address=server.address)
    await backend.start(BackendContext())
    hold.close()
    asked = asyncio.ensure_future(backend.infer([Request(named(1, 1, 2), 2), Request(named(1, 2, 3), 3)]))
    await asyncio.to_thread(hold.wait_until_reached)
    os.kill(pid_of(server), signal.SIGKILL)
    answers = await asyncio.wait_for(asked, 60)
    assert [type(answer) for answer in answers] == [BackendDied, BackendDied]
    assert not [answer for answer in answers if SILENCE in str(answer)]
    assert isinstance((await backend.infer([Request(named(1, 3, 1), 1)]))[0], BackendDied)
    await backend.close()


@pytest.mark.thorough
async def test_a_cancelled_request_is_taken_back_from_the_server():
    with serving_held(in_flight=1, max_rows=8) as (server, hold):
        backend = CentralRemote(server._setup, address=server.address)
        await backend.start(BackendContext())
        requests = [Request(named(1, number, 8), 8) for number in range(4)]
        hold.close()
        asked = asyncio.ensure_future(backend.infer(requests))
        await asyncio.to_thread(hold.wait_until_reached)  # the first is in the model
        backend.cancel(requests[2])
        backend.cancel(Request(named(1, 9, 8), 8))  # of which it has never heard
        await asyncio.sleep(0)
        hold.open()
        answers = await asyncio.wait_for(asked, 60)
        assert [isinstance(answer, Closed) for answer in answers] == [False, False, True, False]
        backend.cancel(requests[2])
        assert (await backend.infer([requests[2]]))[0].shape == (8, 4)
        await asyncio.to_thread(until, lambda: server.stats().requests == 4, "the count of all requests")
        assert server.stats().errors["cancelled"] == 1
        await backend.close()


async def test_a_backend_that_is_closed_fails_whoever_still_waits(held):
    server, hold = held
    backend = CentralRemote(server._setup, address=server.address)
    await backend.start(BackendContext())
    hold.close()
    asked = asyncio.ensure_future(backend.infer([Request(named(1, 1, 2), 2)]))
    await asyncio.to_thread(hold.wait_until_reached)
    await backend.close()
    assert [type(answer) for answer in await asyncio.wait_for(asked, 60)] == [Closed]


@pytest.mark.thorough
def test_a_server_that_restarts_answers_what_was_outstanding_once():
    with serving(arguments={"seconds": 0.05}, restart=True) as server:
        way = TextConnector(CentralRemote, server._setup, server.address, server.restarts_within_s)
        with (
            server.client() as client,
            programs(Program(ask_forever, server.client(), 1, 1, 64), Program(ask_in_loop, way, 2, 2, 64)) as others,
        ):
            assert [other.hear() for other in others] == ["here", "here"]
            blocks = [client.block(64) for _ in range(3)]
            for block in blocks:
                block[:] = named(3, 1, 64)
            asked = [client.submit(block[:rows]) for rows, block in enumerate(blocks, 1)]
            arrays = [client.submit(named(4, number, 5)) for number in range(5)]
            first = pid_of(server)
            os.kill(first, signal.SIGKILL)
            for rows, pending in enumerate(asked, 1):
                assert wrong(named(3, 1, rows), pending.result(60)) is None
            for number, pending in enumerate(arrays):
                assert wrong(named(4, number, 5), pending.result(60)) is None
            assert [other.end()[0] for other in others] == ["stopped", "stopped"]
            assert pid_of(server) != first
            late = client.block(8)
            late[:] = named(5, 5, 8)
            assert wrong(named(5, 5, 8), client.evaluate(late)) is None


@pytest.mark.soak
def test_a_server_that_dies_again_and_again_is_given_up():
    with serving("models:faulty", restart=True, batch_timeout=1.0) as server, server.client() as client:
        rows = named(1, 1, 4)
        rows[0, -2:] = 5, 999  # hangs
        with pytest.raises(BackendDied, match=r"batch|answer"):
            client.evaluate(rows, timeout=120)
        until(lambda: not listening(server), "the end of a server that only dies")


@pytest.mark.thorough
def test_rows_that_end_the_server_each_time_it_comes_back_are_told_of():
    with serving("models:faulty", restart=True) as server, server.client() as client:
        client.evaluate(named(1, 1, 4))
        rows = named(1, 2, 4)
        rows[0, -2:] = 8, 999  # ends the process
        with pytest.raises(BackendDied, match=r"came back 2 times, and died again .* these rows end it") as died:
            client.evaluate(rows, timeout=200)
        assert "restart" not in str(died.value)


def test_a_server_that_hangs_up_as_it_ends_is_asked_again_when_it_is_back(monkeypatch, caplog):
    """It may take a line in just before it ends, or hold its greeting back until the line before is over."""
    greet, hung_up = CentralConnection._greet, []

    def greeted(connection, timeout_s):
        if not hung_up:
            hung_up.append(timeout_s)
            raise BackendDied("the central server does not answer.") from ConnectionResetError("it hung up")
        return greet(connection, timeout_s)

    with serving(restart=True) as server, server.client() as client:
        assert wrong(named(1, 1, 9), client.evaluate(named(1, 1, 9))) is None
        monkeypatch.setattr(CentralConnection, "_greet", greeted)
        os.kill(pid_of(server), signal.SIGKILL)
        assert wrong(named(1, 2, 9), client.evaluate(named(1, 2, 9), timeout=60)) is None
        assert hung_up
        assert "It is started again." in caplog.text


@pytest.mark.soak
def test_a_stopped_server_is_noticed_and_replaced():
    with serving(restart=True) as server, server.client() as client:
        stopped = pid_of(server)
        stop(stopped)
        try:
            assert wrong(named(1, 1, 9), client.evaluate(named(1, 1, 9), timeout=NOTICED + 60)) is None
            assert pid_of(server) != stopped
            assert wait_until_gone([stopped], 10) == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)


@pytest.mark.thorough
async def test_a_stopped_server_that_will_not_come_back_is_noticed_by_all_who_wait():
    with serving() as server, server.client() as client:
        backend = CentralRemote(server._setup, address=server.address)
        await backend.start(BackendContext())
        stop(pid_of(server))
        asked = asyncio.ensure_future(backend.infer([Request(named(1, 1, 2), 2)]))
        try:
            with pytest.raises(BackendDied):
                await asyncio.to_thread(client.evaluate, named(1, 1, 1), timeout=NOTICED)
            assert [type(answer) for answer in await asyncio.wait_for(asked, NOTICED)] == [BackendDied]
        finally:
            await backend.close()


@pytest.mark.thorough
def test_deadlines_are_kept_while_a_server_comes_back():
    with serving(restart=True) as server, server.client() as client:
        assert wrong(named(1, 1, 9), client.evaluate(named(1, 1, 9))) is None
        kept = client.submit(named(1, 2, 9))
        with server._line_lock:  # its owner cannot bring it back meanwhile
            os.kill(pid_of(server), signal.SIGKILL)
            late = [client.submit(named(1, 3, 9)), server.client(), client]
            with pytest.raises(Expired):
                late[0].result(0.2)
            for other in late[1:]:
                with pytest.raises(Expired):
                    other.evaluate(named(1, 4, 9), timeout=0.2)
        assert wrong(named(1, 2, 9), kept.result(60)) is None
        assert wrong(named(1, 5, 9), client.evaluate(named(1, 5, 9), timeout=60)) is None


@pytest.mark.thorough
def test_a_client_can_be_closed_while_its_server_comes_back():
    with serving(restart=True) as server, server.client() as client:
        assert wrong(named(1, 1, 9), client.evaluate(named(1, 1, 9))) is None
        with server._line_lock:
            os.kill(pid_of(server), signal.SIGKILL)
            pending = client.submit(named(1, 2, 9))
            with pytest.raises(Expired):
                pending.result(0.2)
            client.close()
            with pytest.raises(Closed):
                client.evaluate(named(1, 2, 9))
        until(lambda: not any(thread.name == "gpuinfer-return" for thread in threading.enumerate()))


def test_asking_for_more_after_the_server_is_gone_for_good_says_so(held):
    server, hold = held
    with server.client() as client:
        hold.close()
        asked = [client.submit(named(1, number, 1)) for number in range(192)]
        os.kill(pid_of(server), signal.SIGKILL)
        until(lambda: not listening(server))
        with pytest.raises(BackendDied):
            client.submit(named(1, 1, 1))
        with pytest.raises(BackendDied):
            asked[-1].result()


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
@pytest.mark.sample
@pytest.mark.parametrize("restart", [False, True], ids=["", "that would restart it"])
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
        told = Program(use_inherited, client, pending, method="fork", at=2)
        with programs(told):
            heard = told.hear().split("|")
            assert len(heard) == 3
            assert all("came here by fork" in words for words in heard), heard
        assert wrong(named(1, 1, 3), pending.result(30)) is None
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert wrong(named(1, 2, 3), client.evaluate(named(1, 2, 3), timeout=30)) is None


# Closing


@pytest.mark.thorough
def test_closing_fails_who_waits_and_leaves_nothing():
    server = served(arguments={"seconds": 0.3})
    with server, server.client() as client, programs(Program(ask_forever, server.client(), 1, 1, 8)) as (other,):
        other.hear()
        asked = [client.submit(named(1, number, 600)) for number in range(20)]
        pid = pid_of(server)
        server.close(quiet=True)
        with pytest.raises((Closed, BackendDied)):
            asked[-1].result()
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
        os.kill(pid_of(server), signal.SIGKILL)
        first = pid_of(server)
        until(lambda: pid_of(server) != first, "another process")
        second = pid_of(server)
        server.close(quiet=True)
        assert wait_until_gone([second], 30) == []
        assert pid_of(server) == second
        assert not any(thread.name == "gpuinfer-server-watch" for thread in threading.enumerate())


@pytest.mark.thorough
def test_statistics_are_there_while_a_server_comes_back_and_count_all_its_lives():
    with serving(restart=True) as server, server.client() as client:
        for number in range(3):
            client.evaluate(named(1, number, 10))
        before = server.stats()
        assert before.requests == 3
        os.kill(pid_of(server), signal.SIGKILL)
        for _ in range(20):
            assert server.stats().requests == 3
        client.evaluate(named(1, 3, 10), timeout=60)
        until(lambda: server.stats().requests == 4, "the new server is asked")
        lanes = since(server.stats(), before).lanes
        assert len({lane["name"] for lane in lanes}) == len(lanes)
        assert all(seconds >= 0 for lane in lanes for seconds in lane["stations"].values())


@pytest.mark.thorough
def test_an_answer_about_statistics_that_comes_too_late_is_not_taken_for_the_next():
    with serving() as server, server.client() as client:
        stop(pid_of(server))
        assert not server._ask({"stats": True}, 0.05)
        os.kill(pid_of(server), signal.SIGCONT)
        client.evaluate(named(1, 1, 10))
        assert server.stats().requests == 1
        assert server.close(quiet=True).requests == 1


def test_whoever_wants_a_client_of_a_server_that_is_gone_hears_why_and_so_does_the_log(caplog):
    with serving() as server:
        os.kill(pid_of(server), signal.SIGKILL)
        until(lambda: not listening(server), "the end of the server")
        with pytest.raises(BackendDied, match=r"was killed \(SIGKILL.*option restart"):
            server.client()
        assert "was killed (SIGKILL" in caplog.text


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "code"),
    [
        pytest.param("ends", 0, id="a program that ends"),
        pytest.param("raises", 1, id="a program that dies of an error"),
        pytest.param("child", 0, id="a child process that ends"),
    ],
)
def test_a_program_that_forgets_to_close_its_server_ends_and_takes_it_along(how, code):
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here)}
    command = [sys.executable, "forgetful.py", how]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    assert wait_until_gone([int(done.stdout)], 30) == []
