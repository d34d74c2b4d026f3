"""A server of our own for one run: `gpuinfer serve` as a child, which is ended with all that it has started."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gpuinfer.errors import WorkError
from gpuinfer.fleet.launchers.launcher import ReplicaPlan
from gpuinfer.fleet.launchers.local import COMMAND, Local

START_S, END_S = 300.0, 30.0


@asynccontextmanager
async def serving(
    words: Sequence[str], folder: Path, number: int, command: Sequence[str] = COMMAND
) -> AsyncIterator[str]:
    """Its URL, once it is ready. `words` are the flags of `gpuinfer serve`; its log is in the folder.

    Raises `WorkError`, with its last words, when it does not come up.
    """
    plan = ReplicaPlan(
        index=number,
        setup_file=folder / "none",
        key_file=folder / "none",
        folder=folder,
        devices=None,
        threads=None,
        arguments=(),
    )
    ready = ("--host", "127.0.0.1", "--port", "0", "--ready-file", str(plan.ready_file))
    for left in (plan.ready_file, plan.log):  # by a run before, in the same folder
        left.unlink(missing_ok=True)
    server = await Local(command=(*command, "serve", *words, *ready)).launch(plan)
    try:
        try:
            host, port = await server.ready(START_S)
        except WorkError as error:
            why = str(error).partition("\n")[0].replace(plan.name, "the server", 1)  # its log may be gone by then
            raise WorkError(f"{why}\nTry it by itself: {shlex.join(['gpuinfer', 'serve', *words])}") from None
        yield f"http://{host}:{port}"
    finally:
        await server.terminate(END_S)
        plan.ready_file.unlink(missing_ok=True)
