"""What the client processes of these tests do. They import neither torch nor pytest, so that they start quickly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from multiprocessing.connection import Connection as Line
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import BackendContext, Request
from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.client import CentralClient
from gpuinfer.errors import GpuinferError

FEATURES = 8
PRIME = 65_521


def named(who: int, request: int, rows: int) -> NDArray[np.float32]:
    """Rows that no other client or request has."""
    block = np.empty((rows, FEATURES), np.float32)
    block[:, 0], block[:, 1], block[:, 2] = who, request, np.arange(rows)
    block[:, 3:] = (block[:, :3] @ np.array([7.0, 11.0, 13.0], np.float32) % 251)[:, None]
    return block


def wrong(block: NDArray[np.float32], answer: NDArray[np.float32]) -> str | None:
    """What is wrong with this answer of `models.tagged` to `block`, if anything."""
    weights = np.arange(1, FEATURES + 1, dtype=np.float64) ** 2
    hashes = (block.astype(np.float64) @ weights) % PRIME
    expected = np.column_stack([block[:, :3].astype(np.float64), hashes]).astype(np.float32)
    if answer.shape == expected.shape and np.array_equal(answer, expected):
        return None
    return f"{answer[:2]} where {expected[:2]} was expected"


def ask_ahead(client: CentralClient, who: int, line: Line, seed: int, requests: int, widest: int) -> None:
    """Asks `requests` times with several outstanding, in blocks of its own and in arrays, gives some up, and tells how
    many answers were right. Says at the start that it is there, and at the end `right` or what was wrong.
    """
    chance = random.Random(seed)
    with client:
        blocks = [client.block(widest) for _ in range(3)]
        line.send_bytes(b"here")
        free, outstanding = list(range(len(blocks))), []
        for request in range(requests):
            rows = chance.randint(1, widest)
            place = free.pop(chance.randrange(len(free))) if free and chance.random() < 0.5 else None
            payload = named(who, request, rows)
            if place is not None:
                blocks[place][:rows] = payload
            sent = blocks[place][:rows] if place is not None else payload
            outstanding.append((client.submit(sent), payload, place))
            if place is None and chance.random() < 0.05:  # nobody will ever ask for this one
                outstanding.pop()[0].cancel()
            while len(outstanding) > 6 or (outstanding and request == requests - 1):
                pending, expected, taken = outstanding.pop(chance.randrange(len(outstanding)))
                if fault := wrong(expected, pending.result(60)):
                    return line.send_bytes(f"client {who}: {fault}".encode())
                if taken is not None:
                    free.append(taken)
    return line.send_bytes(b"right")


def ask_forever(client: CentralClient, who: int, line: Line, seed: int, widest: int) -> None:
    """Asks until it is told to stop or an error comes; sends `here` first, then how it ended and how often it asked."""
    chance, asked = random.Random(seed), 0
    try:
        with client:
            block = client.block(widest)
            while not line.poll(0):
                rows = chance.randint(1, widest)
                expected, single = named(who, asked % 60_000, rows), named(who, (asked + 1) % 60_000, 1)
                block[:rows] = expected
                ahead = client.submit(single)
                fault = wrong(expected, client.evaluate(block[:rows])) or wrong(single, ahead.result())
                if fault:
                    return _end(line, f"wrong: {fault}", asked)
                asked += 2
                if asked == 2:
                    line.send_bytes(b"here")
    except GpuinferError as error:
        return _end(line, f"{type(error).__name__}: {error}", asked)
    return _end(line, "stopped", asked)


def _end(line: Line, how: str, asked: int) -> None:
    with contextlib.suppress(OSError):
        line.send_bytes(f"{how}|{asked}".encode())


def ask_once(client: CentralClient, who: int, line: Line) -> None:
    """One request; sends what came of it."""
    try:
        with client:
            fault = wrong(named(who, 0, 5), client.evaluate(named(who, 0, 5)))
            line.send_bytes((fault or "right").encode())
    except GpuinferError as error:
        line.send_bytes(f"{type(error).__name__}: {error}".encode())


def use_inherited(client: CentralClient, pending: Any, line: Line) -> None:
    """In a forked child: tries a client that its parent has opened, and to wait for what the parent asked."""
    told = []
    for attempt in (lambda: client.evaluate(named(0, 0, 1)), lambda: pending.result(5), lambda: client.block(3)):
        try:
            attempt()
            told.append("worked")
        except GpuinferError as error:
            told.append(str(error))
    client.close()
    line.send_bytes("|".join(told).encode())


def ask_in_loop(way: Any, who: int, line: Line, seed: int, widest: int) -> None:
    """The same as `ask_forever` through the backend of a worker process, several requests at a time."""
    asyncio.run(_ask_in_loop(way.open(), who, line, seed, widest))


async def _ask_in_loop(backend: CentralRemote, who: int, line: Line, seed: int, widest: int) -> None:
    chance, asked = random.Random(seed), 0
    try:
        await backend.start(BackendContext())
        block = backend.block(widest)
        while not line.poll(0):
            block[:widest] = named(who, asked % 60_000, widest)
            payloads = [named(who, asked % 60_000, chance.randint(1, widest)), block[: chance.randint(1, widest)]]
            answers = await backend.infer([Request(payload, len(payload), client="me") for payload in payloads])
            for payload, answer in zip(payloads, answers, strict=True):
                if isinstance(answer, Exception):
                    raise answer
                if fault := wrong(payload, answer):
                    return _end(line, f"wrong: {fault}", asked)
            asked += 2
            if asked == 2:
                line.send_bytes(b"here")
    except GpuinferError as error:
        return _end(line, f"{type(error).__name__}: {error}", asked)
    finally:
        await backend.close()
    return _end(line, "stopped", asked)


def hold(client: CentralClient, line: Line) -> None:
    """An idle client: connected, with a block, and nothing to ask after its first answer."""
    with client:
        client.evaluate(named(1, 0, 4))
        line.send_bytes(b"here")
        line.poll(600)


def own(line: Line, restart: bool, clients: int) -> None:
    """A program that owns a server and forks its clients; it sends the socket's name and the processes' ids."""
    import multiprocessing

    from gpuinfer.central.server import CentralServer

    server = CentralServer("models:tagged", inputs=FEATURES, restart=restart, in_flight=2, threads=1)
    server.start()
    context = multiprocessing.get_context("fork")
    children, ends = [], []
    for who in range(clients):
        mine, theirs = context.Pipe()
        child = context.Process(target=ask_forever, args=(server.client(), who, theirs, who, 64))
        child.start()
        theirs.close()
        children.append(child)
        ends.append(mine)
    for end in ends:
        end.recv_bytes()
    assert server._child is not None
    ids = [server._child.pid, *(child.pid for child in children)]
    line.send_bytes(f"{server.address.path[1:]} {' '.join(map(str, ids))}".encode())
    line.poll(600)
    os._exit(0)


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Those of the processes that are still there after so long; one that nobody has waited for is gone."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def state_of(task: str) -> str:
    """The letter that the kernel gives the state of a process or thread in `/proc`; X once it is gone."""
    try:
        with open(f"/proc/{task}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_alive(pid: int) -> bool:
    return state_of(str(pid)) not in "ZX"


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it holds: on a busy machine threads run on for a while after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while any(state_of(f"{pid}/task/{task}") not in "TXZ" for task in os.listdir(f"/proc/{pid}/task")):
        if time.monotonic() > deadline:
            raise AssertionError(f"process {pid} does not stop")
        time.sleep(0.001)
