"""Whether each plugin can be loaded, tried in a process of its own: an import may end it, or never come back."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

from gpuinfer.config import registry
from gpuinfer.config.registry import PluginRecord
from gpuinfer.host import children
from gpuinfer.host.child import BURIAL_S, Channel, ChannelClosed, Child

LIMIT_S = 90.0  # for all of them: torch's first import from a cold disk


def inspect_all(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """The records with `ok` known, in their order. One that takes the process with it harms no other."""
    left = [record for record in records if record.ok is None]
    known: dict[PluginRecord, PluginRecord] = {}
    while left:
        child, until = Child(_inspect, left, name="gpuinfer plugins", group=True), time.monotonic() + LIMIT_S
        answers, why = Channel(child.end), f"importing it did not end within {LIMIT_S:g} s"
        try:
            while left and answers.poll(max(0.0, until - time.monotonic())):
                ok, reason = answers.receive()
                known[left[0]] = replace(left[0], ok=ok, reason=reason)
                left = left[1:]
        except ChannelClosed:
            why = f"importing it ended the process (exit code {child.exit_code()})"
        finally:
            child.kill(BURIAL_S)
        if left:  # the process ended at the first of these
            known[left[0]] = replace(left[0], ok=False, reason=why)
            left = left[1:]
    return [known.get(record, record) for record in records]


def _inspect(end: socket.socket, records: Sequence[PluginRecord]) -> None:
    """The process: [ok, reason] of each record."""
    children.set_up_child(group=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # whatever a plugin prints
    answers = Channel(end)
    for record in map(registry.inspect, records):
        answers.send([record.ok, record.reason])
    os._exit(0)  # threads that an import has left behind may hang
