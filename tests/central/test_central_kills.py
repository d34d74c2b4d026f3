"""Kills and stops at random instants, by seed: nothing hangs, nothing lost, nothing doubled, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from programs import ask_forever, ask_in_loop, is_alive, own, wait_until_gone
from servers import Program, pid_of, programs, served

from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.async_client import TextConnector

pytestmark = pytest.mark.usefixtures("children_forked")

EACH = 64  # rows at most in a request
FEW = [pytest.param(seed, id=f"seed {seed}") for seed in range(2)]
MORE = [pytest.param(seed, id=f"seed {seed}", marks=pytest.mark.thorough) for seed in range(2, 8)]
MANY = [pytest.param(seed, id=f"seed {seed}", marks=pytest.mark.soak) for seed in range(8, 200)]


@pytest.mark.parametrize("seed", FEW + MORE + MANY)
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
        way = TextConnector(CentralRemote, server._setup, server.address, server.restarts_within_s)
        with programs(
            Program(ask_forever, server.client(), 1, chance.random(), EACH),
            Program(ask_in_loop, way, 2, chance.random(), EACH),
            Program(ask_forever, server.client(), 3, chance.random(), EACH),
            Program(ask_in_loop, way, 4, chance.random(), EACH),
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
    assert server.address.path[1:] not in Path("/proc/net/unix").read_text()


def strike_owner(chance, number):
    """The owner of a server with two clients is killed: all end. Or it is stopped: all go on until it is killed."""
    owner = Program(own, bool(chance.getrandbits(1)), 2, method="spawn", at=0, daemon=False)
    with programs(owner):
        name, *pids = owner.hear().split()
        others = [int(pid) for pid in pids]
        time.sleep(chance.uniform(0, 0.5))
        owner.kill(number)
        if number == signal.SIGSTOP:
            time.sleep(chance.uniform(0, 0.5))
            assert all(map(is_alive, others))
            if chance.random() < 0.5:
                owner.kill(signal.SIGCONT)
            owner.kill()
        assert wait_until_gone(others, 30) == []
    assert name not in Path("/proc/net/unix").read_text()
