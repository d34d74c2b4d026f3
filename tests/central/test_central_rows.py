"""No answer ever reaches the wrong client or the wrong row, whoever is killed, gives up or hurries."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time

import pytest
from counts import counts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import ask_ahead, ask_forever, ask_in_loop, named, stop, wrong
from servers import Program, mapped, pid_of, programs, serving, until

from gpuinfer.api import Priority
from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.async_client import TextConnector
from gpuinfer.errors import Closed, Expired

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
    free = [block for number, block in enumerate(blocks) if number not in busy]
    if kind == "strided":
        wide = rows.repeat(2, axis=0)
        return wide[::2], None
    if kind == "array" or not free:
        return rows, None
    start = min(3, WIDEST - len(rows)) if kind == "middle of a block" else 0
    free[0][start : start + len(rows)] = rows
    number = next(number for number, block in enumerate(blocks) if block is free[0])
    return free[0][start : start + len(rows)], number


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
            timeout = 1e-4 if how == "short deadline" else None
            pending = client.submit(payload, priority=priority, group=group, timeout=timeout)
            if block is not None:
                busy[who].add(block)
            waiting.append((pending, rows, how))
        random.Random(seed).shuffle(waiting)
        for pending, rows, how in waiting:
            if how == "give up":
                pending.cancel()
            with contextlib.suppress(Expired, Closed):
                assert wrong(rows, pending.result(60)) is None
        for client, blocks in clients:  # those that were given up may still be read: let them end
            until(lambda client=client, blocks=blocks: all(usable(client, block) for block in blocks))

    tried()


def usable(client, block):
    """Whether nobody has this block any more."""
    try:
        client.evaluate(block[:1], timeout=30)
    except Exception as error:
        if "with the server already" in str(error):
            return False
        raise
    return True


def test_threads_of_one_client_each_get_their_own_answers(server):
    wrongs = []

    def work(client, who):
        for request in range(100):
            rows = named(who, request, 1 + request % 40)
            if fault := wrong(rows, client.evaluate(rows)):
                wrongs.append(fault)

    with server.client() as client:
        threads = [threading.Thread(target=work, args=(client, who)) for who in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrongs == []


@pytest.mark.parametrize("requests", counts(150, 20_000))
def test_clients_with_many_requests_outstanding_are_never_mixed_up(server, requests):
    with programs(*(Program(ask_ahead, server.client(), who, who, requests, WIDEST) for who in range(4))) as them:
        assert [(program.hear(), program.hear(600)) for program in them] == [("here", "right")] * 4


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
    assert [how for how, _ in ends] == ["stopped", "stopped"]
    assert all(asked > 0 for _, asked in ends)
    until(lambda: mapped(pid_of(server)) == before, "the release of the killed clients' memory")


def test_a_stopped_client_holds_nobody_up_and_goes_on_when_continued(server):
    with programs(*(Program(ask_forever, server.client(), who, who, WIDEST) for who in range(2))) as (stopped, other):
        assert [stopped.hear(), other.hear()] == ["here", "here"]
        stop(stopped.pid)
        with server.client() as client:
            for request in range(50):
                rows = named(7, request, 30)
                assert wrong(rows, client.evaluate(rows, timeout=30)) is None
        stopped.kill(signal.SIGCONT)
        assert stopped.end()[0] == "stopped"
        assert other.end()[0] == "stopped"


@pytest.mark.parametrize("method", ["spawn", "fork", pytest.param("forkserver", marks=pytest.mark.thorough)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_can_be_handed_to_a_process_of_any_start_method(server, method):
    from programs import ask_once

    with programs(Program(ask_once, server.client(), 3, method=method)) as (program,):
        assert program.hear() == "right"
