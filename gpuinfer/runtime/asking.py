"""One bounded question to a backend, before anything is measured, started or loaded: can it serve what is wanted?"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

from gpuinfer.api import Backend
from gpuinfer.config import blame

log = logging.getLogger(__name__)

ANSWER_S = 60.0


async def let_refuse(backend: Backend) -> None:
    """Raise what its `check` raises. One that does not answer in time is named, and left to its start, which is
    watched.

    It is asked in a thread with an event loop of its own, so that one that blocks keeps nobody: neither the caller's
    loop nor the process.
    """
    if type(backend).check is Backend.check:  # which knows of nothing
        return
    answered: Future[None] = Future()
    answered.set_running_or_notify_cancel()  # whoever stops waiting leaves the thread to itself

    def ask() -> None:
        try:
            with blame.calling(backend, "check"):
                asyncio.run(backend.check())
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            answered.set_exception(error)
        else:
            answered.set_result(None)

    threading.Thread(target=ask, name="gpuinfer check", daemon=True).start()
    try:
        await asyncio.wait_for(asyncio.wrap_future(answered), ANSWER_S)
    except TimeoutError:  # ours: what a plugin raises is a `WorkError` that names it
        log.warning(
            "%s has not said within %g s whether it can serve this, and is started all the same.",
            blame.who(backend),
            ANSWER_S,
        )
