"""A text model in the central server's place for one, that says something and dies when it is asked."""

from __future__ import annotations

from typing import Any

from gpuinfer.api import Backend, BackendContext, Limits
from gpuinfer.errors import BackendDied


class Dying(Backend):
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
