"""Ports for programs that are told theirs before they start."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

LOWEST = 15_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # what the system hands out to whoever names no port

_dice = random.Random(os.urandom(8))


def free_port() -> int:
    """A port of 127.0.0.1 where nobody listens now, and that the system gives to nobody who does not name it: so that
    no other test's connection takes it before the program does that it is for.
    """
    highest = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    for _ in range(1000):
        port = _dice.randrange(LOWEST, max(highest, LOWEST + 1000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("no free port was found")
