"""Fleets of stand-in replicas: real processes, real supervision, no model."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gpuinfer.fleet.launchers.local import LocalLauncher
from gpuinfer.fleet.plan import FleetPlan

REPLICA = Path(__file__).with_name("standin_replica.py")
LIMIT_S = 60.0  # for anything to come about on a machine that has other things to do


def launcher() -> LocalLauncher:
    return LocalLauncher(command=(sys.executable, str(REPLICA)))


def plan(replicas: int = 1, *, standin: dict[str, Any] | None = None, **more: Any) -> FleetPlan:
    return FleetPlan(setup=json.dumps(standin or {}).encode(), replicas=replicas, **more)


async def until(condition: Callable[[], Any], what: str, within_s: float = LIMIT_S) -> Any:
    """What the condition comes to, once it is something; it may be asynchronous."""
    end = time.monotonic() + within_s
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, f"{what} did not come about within {within_s:.0f} s"
        await asyncio.sleep(0.02)
