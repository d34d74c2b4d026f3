"""A backend is asked whether it can serve, once and for so long, whatever it does; and what models are called."""

from __future__ import annotations

import asyncio
import threading

import pytest
from helpers import Doubler

from gpuinfer.api import ModelSpec
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.runtime import session
from gpuinfer.runtime.session import preflight
from gpuinfer.runtime.session_counters import distinct_names

ENOUGH_S = 60.0  # for anything here to come about


class Raising(Doubler):
    error: BaseException | None = None

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


@pytest.mark.parametrize(
    "error", [UsageError("Ask for less."), RuntimeError("odd"), TimeoutError("too slow"), SystemExit(3)], ids=repr
)
async def test_a_refusal_is_raised_as_it_is_and_any_other_error_is_the_backends_fault(error, monkeypatch):
    monkeypatch.setattr(Raising, "error", error)
    refusal = isinstance(error, UsageError)
    said = r"^Ask for less\.$" if refusal else rf"'Raising'.*check raised {type(error).__name__}"
    with pytest.raises(UsageError if refusal else BackendError, match=said):
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


async def test_it_is_asked_beside_the_loop_and_one_that_knows_of_nothing_is_not_asked(monkeypatch):
    backend = Looking()
    await preflight(backend)
    thread, loop = backend.asked_in
    assert thread is not threading.current_thread()
    assert loop is not asyncio.get_running_loop()
    monkeypatch.setattr(session.threading, "Thread", lambda **given: pytest.fail("it was asked"))
    await preflight(Doubler())


@pytest.mark.parametrize(
    ("own", "other", "names"),
    [
        (("blobnet", None), ("blobnet-small", None), ("blobnet", "blobnet-small")),
        (("a/chat", None), ("b/chat", None), ("a/chat", "b/chat")),
        (("/m/chat", None), ("/m/base", None), ("chat", "base")),
        (("blobnet", "n/new.pt"), ("blobnet", "o/old.pt"), ("blobnet (new.pt)", "blobnet (old.pt)")),
        (("blobnet", "l/2/w.pt"), ("blobnet", "l/1/w.pt"), ("blobnet (2/w.pt)", "blobnet (1/w.pt)")),
        (("nets:make", "new.pt"), ("nets:make", None), ("nets:make (new.pt)", "nets:make (no weights file)")),
        (("blobnet", "a.pt"), ("blobnet", "a.pt"), ("own blobnet", "blobnet")),
    ],
)
def test_two_models_of_a_run_have_names_that_tell_them_apart(own, other, names):
    one, two = ModelSpec(*own), ModelSpec(*other)
    assert distinct_names(one, two) == names
    assert distinct_names(two, one) == (names[::-1] if own != other else names)
