"""What a fleet is to be, decided before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpuinfer.errors import UsageError
from gpuinfer.fleet.scaling import Scaling
from gpuinfer.host import machine
from gpuinfer.http.access import Access

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
