"""Central servers with a small model of text, and engines that ask them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from gpuinfer.api import Backend, BackendContext, Limits, ModelSpec, Setup
from gpuinfer.backends.central import CentralRemote
from gpuinfer.central.server import ServerProcess
from gpuinfer.config import registry
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.text.text_options import TorchModelOptions

SETUP = Setup(ModelSpec("tiny", kind="text"), devices=("cpu",), deterministic=True)
SLOTS, CONTEXT = 4, 2048


def server_of_text(**options: Any) -> ServerProcess:
    tuning = TorchModelOptions(slots=SLOTS, context=CONTEXT, threads=1)
    return ServerProcess(SETUP, tuning, registry.load("strategies", "dynamic")(SETUP), **options)


@contextlib.contextmanager
def serving_text(**options: Any) -> Iterator[ServerProcess]:
    server = server_of_text(**options)
    server.start()
    try:
        yield server
    finally:
        server.close(quiet=True)


@contextlib.asynccontextmanager
async def asking(server: ServerProcess) -> AsyncIterator[Engine]:
    """An engine that passes on to the server, as a run's or a worker's does."""
    remote = CentralRemote(SETUP, address=server.address, restarts_within_s=server.restarts_within_s)
    engine = Engine(remote, registry.load("strategies", "dynamic")(SETUP))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close(drain=False)


def short(key: str, tokens: int = 4) -> Prompt:
    """It ends after so many tokens, which are its own in any company."""
    return Prompt(text=f"prompt {key}", key=key, sampling=Sampling(max_tokens=tokens, ignore_eos=True))


def long(key: str) -> Prompt:
    """It goes on for thousands of steps."""
    return short(key, CONTEXT - 100)


class Dying(Backend):
    """In the central server's place for a model of text: says something and dies when it is asked."""

    serves = ("text",)

    async def start(self, context: BackendContext) -> None:
        self.limits = Limits(4, in_flight=4, slots=4)

    async def infer(self, batch: Any) -> Any:
        print("INFO all is well\nOddError: the moon is in the way\nand so on", flush=True)
        raise BackendDied("the toy died. Start it again, unless it is already.")


class Odd(Dying):
    """What it says of its device is nonsense."""

    def device(self) -> Any:
        raise KeyError("positions")
