"""Small traces for the tests, what holds for all of them, and a worker that is killed."""

from __future__ import annotations

import math
import os
import signal

from gpuinfer.api import Limits, Priority, Reason, Request
from gpuinfer.engine.trace_recorder import Recorder

START = 1000.0  # on the clock


def request(at=0.0, rows=1, priority=Priority.NORMAL, left_s=math.inf, group=None, client=None):
    return Request(None, rows, START + at, priority, START + at + left_s, group, client)


def recorder(path, **more):
    return Recorder(path, **{"limits": Limits(64, 2), "strategy": "dynamic", **more})


def record_little(path, batches=3):
    """A batch of two requests every 10 ms; the second request of each fails."""
    one = recorder(path)
    for number in range(batches):
        at = number * 0.01
        both = [request(at, 3, Priority.HIGH, 0.5, "big", ("a", 1)), request(at + 0.001, client="zoë")]
        for each in both:
            one.arrived(each)
        batch = one.cut(both, 4, Reason.CLIENTS, START + at + 0.002)
        one.settled(both[0], "ok", START + at + 0.005)
        one.settled(both[1], "failed", START + at + 0.005)
        one.ran(batch, 0.0025, START + at + 0.006)
    one.close()


def check_trace(trace):
    """What holds for every trace of a run."""
    for events in (trace.arrivals, trace.cuts, trace.batches, trace.settles):
        assert [one.at for one in events] == sorted(one.at for one in events)
    known = {(one.engine, one.id): one for one in trace.arrivals}
    assert len(known) == len(trace.arrivals)
    ended = [(one.engine, one.id) for one in trace.settles]
    assert len(set(ended)) == len(ended)
    assert set(ended) <= set(known)
    taken = [(one.engine, number) for one in trace.cuts for number in one.ids]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(known)
    assert {(one.engine, one.batch) for one in trace.batches} <= {(one.engine, one.batch) for one in trace.cuts}


async def ask_and_die(infer, channel, arguments):
    """A worker that asks, says so, and is killed the moment after."""
    for number in range(arguments["each"]):
        await channel.send({"answer": await infer(number)})
    os.kill(os.getpid(), signal.SIGKILL)
