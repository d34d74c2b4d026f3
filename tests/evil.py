"""A package that harms whoever uses it, as far as it can: each plugin does what its options say. Child processes
import it by name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

from packages import install

from gpuinfer.api import Backend, BackendContext, Infer, Limits, Options, Progress, QueueView, Strategy, Workload

POINTS = {"backends": {"evil": "evil:Evil"}, "strategies": {"far": "evil:Far"}, "workloads": {"few": "evil:Few"}}


class Fails:
    """Raises in the method that the option `fail` names."""

    def _fail(self, method: str) -> None:
        if self.options.fail == method:
            raise RuntimeError(f"evil {method}\nand more of it")


class Evil(Fails, Backend):
    """Answers with what it was asked, but for the method that is named."""

    class Options(Options):
        hold: str = ""  # never comes back, whatever it is told
        block: str = ""  # the same, and blocks the event loop
        fail: str = ""  # raises
        every: int = 1  # so many batches

    limits = Limits(8)
    batches = 0

    async def _do(self, method: str) -> None:
        if self.options.block == method:
            time.sleep(1e6)  # noqa: ASYNC251 (that is the point)
        while self.options.hold == method:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > self.until:  # the test is long over
                    raise
        self._fail(method)

    @property
    def until(self) -> float:
        return self.__dict__.setdefault("_until", asyncio.get_running_loop().time() + 60)

    async def start(self, context: BackendContext) -> None:
        await self._do("start")

    async def infer(self, batch):
        self.batches += 1
        if self.batches % self.options.every == 0:
            await self._do("infer")
        return [request.payload for request in batch]

    def device(self):
        self._fail("device")
        return {}

    def connect(self):
        self._fail("connect")
        return super().connect()

    def block(self, rows):
        self._fail("block")

    async def close(self) -> None:
        await self._do("close")


class Far(Fails, Strategy):
    """Cuts far away, or not even that."""

    class Options(Options):
        seconds: float = 3600.0
        fail: str = ""

    def cut_at(self, queue: QueueView) -> float:
        self._fail("cut_at")
        return queue.now + self.options.seconds

    def select(self, queue):
        self._fail("select")
        return super().select(queue)

    def reason(self, queue):
        self._fail("reason")
        return super().reason(queue)

    def account(self, batch, now):
        self._fail("account")

    def observe(self, batch):
        self._fail("observe")


class Few(Fails, Workload):
    """Asks a few questions, and bears what becomes of them."""

    class Options(Options):
        questions: int = 3
        workers: int = 0
        fail: str = ""
        mute: bool = False

    def model(self):
        self._fail("model")

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        self._fail("run")
        total = self.options.questions
        yield Progress(0, total, "questions")
        if self.options.mute:
            await asyncio.Event().wait()
        if self.options.fail == "block":
            infer.block(1)
        if self.options.workers:
            async with infer.workers("evil:ask", [{}] * self.options.workers) as workers:
                async for _ in workers:
                    pass
            return
        for done in range(1, total + 1):
            try:
                await infer(done)
            except Exception:
                if self.options.fail != "nothing":
                    raise
            yield Progress(done, total, "questions")


async def ask(infer, channel, arguments) -> None:
    await infer(1)


def install_evil(folder: Path) -> None:
    """The package `evil-pkg` 0.1, whose module is this one."""
    install(folder, "evil-pkg", POINTS, version="0.1")
