"""A backend is asked whether it can serve, once and for so long, whatever it does in the meantime."""

from __future__ import annotations

import asyncio
import threading

import pytest
from helpers import Doubler

from gpuinfer.errors import BackendError, UsageError
from gpuinfer.runtime import session
from gpuinfer.runtime.session import preflight

ENOUGH_S = 60.0  # for anything here to come about


class Raising(Doubler):
    error: BaseException = UsageError("it cannot be had. Ask for less.")

    async def check(self):
        raise self.error


class Blocking(Doubler):
    """Keeps the thread that asks it, until it is let go."""

    let_go = threading.Event()

    async def check(self):
        self.let_go.wait(ENOUGH_S)


class Looking(Doubler):
    """Notes where it was asked."""

    async def check(self):
        self.asked_in = threading.current_thread(), asyncio.get_running_loop()


async def test_what_it_refuses_is_raised_as_it_is():
    with pytest.raises(UsageError, match=r"^it cannot be had. Ask for less.$"):
        await preflight(Raising())


@pytest.mark.parametrize("error", [RuntimeError("odd"), TimeoutError("too slow"), SystemExit(3)], ids=repr)
async def test_what_else_it_raises_is_its_own_fault(error, monkeypatch):
    monkeypatch.setattr(Raising, "error", error)
    with pytest.raises(BackendError, match=rf"'Raising'.*check raised {type(error).__name__}"):
        await preflight(Raising())


async def test_one_that_blocks_keeps_nobody_and_is_named(monkeypatch, caplog):
    monkeypatch.setattr(session, "ANSWER_S", 0.05)
    Blocking.let_go.clear()
    try:
        await asyncio.wait_for(preflight(Blocking()), ENOUGH_S)
    finally:
        Blocking.let_go.set()
    assert "backend 'Blocking' (module test_asking) has not said within 0.05 s" in caplog.text


async def test_whoever_stops_waiting_leaves_the_question_behind():
    Blocking.let_go.clear()
    waiting = asyncio.create_task(preflight(Blocking()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting}, timeout=ENOUGH_S)
    Blocking.let_go.set()
    assert waiting.cancelled()


async def test_it_is_asked_beside_the_loop():
    backend = Looking()
    await preflight(backend)
    thread, loop = backend.asked_in
    assert thread is not threading.current_thread()
    assert loop is not asyncio.get_running_loop()


async def test_one_that_knows_of_nothing_is_not_asked(monkeypatch):
    monkeypatch.setattr(session.threading, "Thread", lambda **given: pytest.fail("it was asked"))
    await preflight(Doubler())
