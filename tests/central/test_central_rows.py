"""No answer ever reaches the wrong client or the wrong row, whoever is killed, gives up or hurries; full queues."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from counts import counts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import ask_ahead, ask_forever, ask_in_loop, ask_once, hold, named, stop, wrong
from servers import Program, mapped, pid_of, programs, serving, serving_held, until

from gpuinfer.api import Priority
from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.async_client import TextConnector
from gpuinfer.central.client_sessions import ClientAcceptor
from gpuinfer.central.protocol import listen
from gpuinfer.errors import Closed, Expired, QueueFull
from gpuinfer.strategies.priority import ByPriority

pytestmark = pytest.mark.usefixtures("children_forked")

WIDEST = 128


@pytest.fixture(scope="module")
def server():
    with serving(max_rows=512) as server:
        yield server


@pytest.fixture(scope="module")
def clients(server):
    with server.client() as one, server.client() as two, server.client() as three:
        yield [(client, [client.block(WIDEST) for _ in range(2)]) for client in (one, two, three)]


ASK = st.tuples(
    st.integers(0, 2),  # which client
    st.integers(1, WIDEST),
    st.sampled_from(["array", "strided", "block", "middle of a block"]),
    st.sampled_from(["wait", "wait", "wait", "give up", "short deadline"]),
    st.sampled_from(list(Priority)),
    st.sampled_from([None, "a", ("b", 1)]),
)


def payload_in(kind, rows, blocks, busy):
    """These rows, lying where `kind` says; a block only when nobody waits for it."""
    free = [number for number in range(len(blocks)) if number not in busy]
    if kind == "strided":
        return rows.repeat(2, axis=0)[::2], None
    if kind == "array" or not free:
        return rows, None
    start = min(3, WIDEST - len(rows)) if kind == "middle of a block" else 0
    part = blocks[free[0]][start : start + len(rows)]
    part[:] = rows
    return part, free[0]


@pytest.mark.parametrize("examples", [pytest.param(60, id="60"), pytest.param(3000, id="3000", marks=pytest.mark.soak)])
def test_every_row_has_its_own_answer_whatever_is_asked_in_whatever_order(clients, examples):
    request = iter(range(10**9))

    @settings(deadline=None, max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.lists(ASK, min_size=1, max_size=25), st.integers(0, 2**32 - 1))
    def tried(asks, seed):
        waiting, busy = [], {0: set(), 1: set(), 2: set()}
        for who, size, kind, how, priority, group in asks:
            client, blocks = clients[who]
            rows = named(who, next(request) % 60_000, size)
            payload, block = payload_in(kind, rows, blocks, busy[who])
            busy[who] |= {block} - {None}
            timeout = 1e-4 if how == "short deadline" else None
            waiting.append((client.submit(payload, priority=priority, group=group, timeout=timeout), rows, how))
        random.Random(seed).shuffle(waiting)
        for pending, rows, how in waiting:
            if how == "give up":
                pending.cancel()
            with contextlib.suppress(Expired, Closed):
                assert wrong(rows, pending.result(60)) is None
        for client, blocks in clients:  # those that were given up may still be read: let them end
            until(lambda client=client, blocks=blocks: all(is_free(client, block) for block in blocks))

    tried()


def is_free(client, block):
    try:
        client.evaluate(block[:1], timeout=30)
    except Exception as error:
        if "with the server already" not in str(error):
            raise
        return False
    return True


def test_threads_and_processes_with_many_requests_outstanding_are_never_mixed_up(server):
    wrongs = []

    def work(client, who):
        for request in range(100):
            rows = named(who, request, 1 + request % 40)
            if fault := wrong(rows, client.evaluate(rows)):
                wrongs.append(fault)

    with (
        server.client() as client,
        programs(*(Program(ask_ahead, server.client(), who, who, 150, WIDEST) for who in range(10, 14))) as them,
    ):
        threads = [threading.Thread(target=work, args=(client, who)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [(program.hear(), program.hear(600)) for program in them] == [("here", "right")] * 4
    assert not any(thread.is_alive() for thread in threads)
    assert wrongs == []


@pytest.mark.thorough
@pytest.mark.parametrize("kills", counts(4, 200))
def test_clients_killed_beside_them_change_no_answer_and_leave_no_memory(server, kills):
    before, chance = mapped(pid_of(server)), random.Random(kills)
    way = TextConnector(CentralRemote, server._setup, server.address, 0.0)
    with programs(
        Program(ask_forever, server.client(), 1, 1, WIDEST), Program(ask_in_loop, way, 2, 2, WIDEST)
    ) as steady:
        assert [program.hear() for program in steady] == ["here", "here"]
        for kill in range(kills):
            with programs(Program(ask_forever, server.client(), 3, kill, WIDEST)) as (victim,):
                victim.hear()
                time.sleep(chance.uniform(0, 0.05))
                victim.kill()
        ends = [program.end() for program in steady]
    assert [(how, asked > 0) for how, asked in ends] == [("stopped", True)] * 2
    until(lambda: mapped(pid_of(server)) == before, "the release of the killed clients' memory")


def test_a_stopped_client_holds_nobody_up_and_goes_on_when_continued(server):
    with programs(*(Program(ask_forever, server.client(), who, who, WIDEST) for who in range(2))) as (stopped, other):
        assert [stopped.hear(), other.hear()] == ["here", "here"]
        stop(stopped.pid)
        with server.client() as client:
            for request in range(50):
                assert wrong(named(7, request, 30), client.evaluate(named(7, request, 30), timeout=30)) is None
        stopped.kill(signal.SIGCONT)
        assert [stopped.end()[0], other.end()[0]] == ["stopped", "stopped"]


@pytest.mark.parametrize("method", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.thorough)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_can_be_handed_to_a_process_of_any_start_method(server, method):
    with programs(Program(ask_once, server.client(), 3, method=method)) as (program,):
        assert program.hear() == "right"


# A queue that is full

WIDTH = 64  # rows of a block, as wide as a batch: 64 of them may wait


def refused(asked):
    """The numbers and errors of the requests that the server has turned away."""
    found = {}
    for number, pending in enumerate(asked):
        try:
            assert wrong(named(1, number, WIDTH), pending.result(60)) is None
        except QueueFull as error:
            found[number] = error
    return found


def test_a_full_server_turns_the_lowest_class_away_and_says_when_to_come_again():
    low, high = 80, 10
    with serving_held(in_flight=1, max_rows=WIDTH, strategy=ByPriority()) as (server, hold), server.client() as client:
        client.evaluate(named(1, 0, WIDTH))  # from now on it knows what a batch takes
        hold.close()
        first = client.submit(named(1, low + high, WIDTH))
        hold.wait_until_reached()
        asked = [
            client.submit(named(1, number, WIDTH), priority=Priority.LOW if number < low else Priority.HIGH)
            for number in range(low + high)
        ]
        hold.open()  # and it finds all of them at once
        assert wrong(named(1, low + high, WIDTH), first.result(60)) is None
        away = refused(asked)
        until(lambda: server.stats().requests == 2 + low + high - len(away), "the count of all requests")
        counted = server.stats().classes
    assert away
    assert max(away) < low
    assert all(error.retry_after_s > 0 and "There may be room in" in str(error) for error in away.values())
    assert [counted[name]["requests"] for name in ("high", "normal", "low")] == [high, 2, low - len(away)]
    assert counted["low"]["errors"]["rejected"] == len(away)
    assert all(sum(count["latency"]["counts"].values()) == count["requests"] for count in counted.values())


@pytest.mark.thorough
def test_no_more_rows_wait_in_the_server_than_it_was_told():
    with serving_held(in_flight=1, max_rows=WIDTH, max_queue_rows=WIDTH) as (server, hold), server.client() as client:
        hold.close()
        asked = [client.submit(named(1, 0, WIDTH))]
        hold.wait_until_reached()
        asked += [client.submit(named(1, number, WIDTH)) for number in range(1, 4)]
        hold.open()
        away = refused(asked)
    assert ["raise max_queue_rows." in str(error) for error in away.values()] == [True, True]


# Nothing is asked


@pytest.mark.thorough
def test_an_idle_server_with_eight_idle_clients_uses_next_to_no_cpu():
    def cpu_s(pid):
        """Seconds that a process has had of all cores."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with serving() as server, programs(*(Program(hold, server.client(), at=1) for _ in range(8))) as clients:
        assert [client.hear() for client in clients] == ["here"] * 8
        pids = [pid_of(server), *(client.pid for client in clients)]
        before, started = sum(map(cpu_s, pids)), time.monotonic()
        time.sleep(3.0)
        assert sum(map(cpu_s, pids)) - before < 0.05 * (time.monotonic() - started)


@pytest.mark.parametrize("seconds", [1e7, 1e300])
def test_a_wait_of_any_length_can_be_begun(seconds):
    listener, address = listen()
    with listener:
        lines = ClientAcceptor(listener, address.token, 1, (b"", 0), lambda rows: None)
        lines.wake()
        found = lines.wait(seconds)
        for held in (lines._wake_reader, lines._wake_writer, lines._selector):  # for as long as a server lives
            held.close()
    assert len(found) == 1
