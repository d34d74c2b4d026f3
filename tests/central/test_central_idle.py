"""A server that is asked nothing costs next to nothing, and waits for as long as it takes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from programs import hold
from servers import Program, pid_of, programs, serving

from gpuinfer.central.client_sessions import ClientAcceptor
from gpuinfer.central.protocol import listen

pytestmark = pytest.mark.usefixtures("children_forked")

SECONDS = 3.0
CLIENTS = 8
SHARE = 0.05  # of a core; the benchmark measures the true figure, which is far lower


def cpu_s(pid):
    """Seconds that a process has had of all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.thorough
def test_an_idle_server_with_eight_idle_clients_uses_next_to_no_cpu():
    with serving() as server, programs(*(Program(hold, server.client(), at=1) for _ in range(CLIENTS))) as clients:
        assert [client.hear() for client in clients] == ["here"] * CLIENTS
        pids = [pid_of(server), *(client.pid for client in clients)]
        before, started = sum(map(cpu_s, pids)), time.monotonic()
        time.sleep(SECONDS)
        assert sum(map(cpu_s, pids)) - before < SHARE * (time.monotonic() - started)


@pytest.mark.parametrize("seconds", [1e7, 1e10, 1e300])
def test_a_wait_of_any_length_can_be_begun(seconds):
    listener, address = listen()
    with listener:
        lines = ClientAcceptor(listener, address.token, 1, (b"", 0), lambda rows: None)
        lines.wake()
        found = lines.wait(seconds)
        for held in (
            lines._wake_reader,
            lines._wake_writer,
            lines._selector,
        ):  # a server keeps them as long as it lives
            held.close()
    assert len(found) == 1
