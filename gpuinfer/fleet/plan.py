"""What a fleet is to be, decided before anything starts, and how many replicas there should be under its load.

Scaling reads no clock and starts nothing. The load is the requests that wait or are answered in the whole fleet; so
many replicas are wanted that none has more than `target` of it. A few looks in a row scale up; only a longer calm
scales down.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpuinfer.errors import UsageError
from gpuinfer.host import machine
from gpuinfer.http.access import Access

LOOK_S = 1.0  # between two looks
UP_LOOKS = 3  # in a row over target, before more are started
SLACK = 0.8  # of the target: what fewer replicas would have each, for them to be enough


@dataclass(frozen=True, slots=True)
class Scaling:
    """The limits. `least` = `most`: no scaling."""

    least: int
    most: int
    target: float = 16.0  # requests that wait or are being answered, per replica
    down_delay_s: float = 60.0

    @property
    def fixed(self) -> bool:
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """From how many replicas to how many, and why, for people."""

    at: float
    before: int
    after: int
    reason: str

    def told(self, now: float) -> dict[str, Any]:
        """What `/stats` says of it."""
        return {"ago_s": now - self.at, "before": self.before, "after": self.after, "reason": self.reason}


class Scaler:
    """Decides, look by look. `now` never goes back."""

    def __init__(self, scaling: Scaling) -> None:
        self._limits = scaling
        self._over = 0  # looks in a row
        self._roomy_since: float | None = None  # since when fewer would have been enough at every look
        self._roomy_load = 0.0  # the most load since then

    def look(self, now: float, load: float, replicas: int) -> ScalingDecision | None:
        """What to change; None: nothing. `replicas`: all that are up, or are being started."""
        limits = self._limits
        if not limits.least <= replicas <= limits.most:
            self._reset()
            after = min(max(replicas, limits.least), limits.most)
            word = "fewer than the least" if replicas < after else "more than the most"
            return ScalingDecision(now, replicas, after, f"{replicas} replicas are {word} allowed, {after}")
        needed = self._needed(load, limits.target)
        self._over = self._over + 1 if needed > replicas else 0
        if self._over >= UP_LOOKS:
            self._reset()
            each = load / max(1, replicas)
            reason = f"{each:.1f} requests per replica, over the target of {limits.target:g} in {UP_LOOKS} looks"
            return ScalingDecision(now, replicas, needed, reason)
        if self._needed(load, SLACK * limits.target) >= replicas:
            self._roomy_since = None
            return None
        if self._roomy_since is None:
            self._roomy_since, self._roomy_load = now, load
        self._roomy_load = max(self._roomy_load, load)
        if now - self._roomy_since < limits.down_delay_s:
            return None
        self._reset()
        reason = f"at most {self._roomy_load:g} requests under way for {limits.down_delay_s:g} s: fewer will do"
        return ScalingDecision(now, replicas, replicas - 1, reason)

    def _needed(self, load: float, each: float) -> int:
        """Replicas for this load, within the limits."""
        return min(max(math.ceil(load / each), self._limits.least), self._limits.most)

    def _reset(self) -> None:
        self._over, self._roomy_since = 0, None


MOST_REPLICAS = 512  # as many as the router has counters for
NODES = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class FleetPlan:
    """All that a `Fleet` needs beside its launcher. `setup` is what a setup file holds, as `gpuinfer serve` reads it.

    `devices` are what replicas see one each of; more replicas than devices share them only where nobody has named them.
    """

    setup: bytes
    replicas: int = 1
    scaling: Scaling | None = None  # None: `replicas`, whatever the load
    devices: Sequence[str] = ()
    devices_named: bool = False  # by a person: one replica each
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    router_processes: int = 1
    routing: str = "least-loaded"
    routing_options: Mapping[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()  # lines of a key file; none: everybody may ask
    access: Access = field(default_factory=Access)  # of what the router does not send to replicas; the same API keys
    tls: tuple[str, str] | None = None  # files of a certificate and its key
    log: Literal["plain", "json"] | None = None  # requests, on standard error
    request_timeout_s: float = 300.0
    start_s: float | None = None  # for a replica to serve; None: what its launcher takes for reasonable
    drain_s: float = 60.0  # for what is under way to finish, before it is broken off
    body_bytes: int = 64 << 20  # of one request, at most
    connections: int = 8192  # of clients, to one router process
    logs: Path | None = None  # None: the fleet's own temporary folder
    arguments: tuple[str, ...] = ()  # more of each replica's command line

    @property
    def limits(self) -> Scaling:
        return self.scaling or Scaling(self.replicas, self.replicas)

    @property
    def most(self) -> int:
        """Replicas of our own that there may be at once. A fleet of a fixed size may still be added to by hand."""
        if self.scaling is not None:
            return self.scaling.most
        return len(self.devices) if self.devices_named else MOST_REPLICAS

    def check(self) -> None:
        """Raises `UsageError` for numbers that do not go together."""
        limits = self.limits
        if not 1 <= limits.least <= limits.most <= MOST_REPLICAS:
            raise UsageError(
                f"a fleet of {limits.least} to {limits.most} replicas cannot be. "
                f"Give 1 to {MOST_REPLICAS:,}, the least first."
            )
        if not limits.least <= self.replicas <= limits.most:
            raise UsageError(
                f"--replicas {self.replicas} is not within {limits.least} to {limits.most}. "
                "Change it, --min-replicas or --max-replicas."
            )
        if self.devices_named and limits.most > len(self.devices):
            raise UsageError(
                f"--gpus names {len(self.devices)} devices for {limits.most} replicas, and each takes one. "
                "Name more; one that is named twice is shared by two."
            )

    def threads(self) -> int:
        """Cores for each replica's libraries: its share, when the fleet is as large as it may become."""
        return max(1, machine.cores() // max(1, self.limits.most))


def gpus_of(text: str) -> tuple[str, ...]:
    """`0,2,4,6`, or names such as GPU-8f…; each replica sees one. Raises `UsageError`."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(re.fullmatch(r"\d{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}", one) for one in found):
        raise UsageError(f"--gpus {text}: not a list of devices. Write their numbers, such as 0,2,4,6.")
    return found


def gpus_here() -> tuple[str, ...]:
    """Those that this process sees: replicas take them in turn. Empty without any."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        return tuple(part.strip() for part in seen.split(",") if part.strip())
    return tuple(str(place) for place in range(_nodes())) if machine.has_cuda() else ()


def refuse_absent_gpus(devices: Sequence[str]) -> None:
    """Raise `UsageError` for devices that people named and this machine does not have, as far as their numbers tell."""
    named = f"--gpus {','.join(devices)}"
    if not machine.has_cuda():
        raise UsageError(
            f"{named}: no NVIDIA driver is at work on this machine. Leave --gpus out: --replicas N serves on the CPU."
        )
    here = _nodes()
    if here and (absent := [one for one in devices if one.isdecimal() and int(one) >= here]):
        there_are = "0 alone" if here == 1 else f"0 to {here - 1}"
        raise UsageError(
            f"{named}: there is no device {absent[0]} on this machine. Name some of those here: {there_are}."
        )


def _nodes() -> int:
    """NVIDIA devices of this machine; 0 where the system does not list them."""
    return sum(NODES.fullmatch(node) is not None for node in os.listdir("/dev"))
