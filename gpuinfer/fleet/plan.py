"""What a fleet is to be, decided before anything starts, and how many replicas there should be under its load.

Scaling reads no clock and starts nothing. The load is the requests that wait or are answered in the whole fleet; so
many replicas are wanted that none has more than `target` of it. A few looks in a row scale up; only a longer calm
scales down.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpuinfer.errors import UsageError
from gpuinfer.host import machine
from gpuinfer.http.access import Access

if TYPE_CHECKING:
    from gpuinfer.launchers.base import Launcher

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


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """How members are probed, in seconds: how often, and how long without an answer makes one dead."""

    interval_s: float = 0.5
    timeout_s: float = 3.0

    @property
    def late_checks(self) -> int:
        """Checks in a row without an answer that end a replica."""
        return max(1, math.ceil(self.timeout_s / self.interval_s))

    @property
    def doubtful_checks(self) -> int:
        """Checks in a row without an answer that make its health doubtful."""
        return max(1, self.late_checks // 2)


MOST_PORT = 65_535
MOST_REPLICAS = 512  # as many as the router has counters for
ALL = "all"
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
    understood: str = ""  # how `--gpus` was read, for people
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    router_processes: int = 1
    worker_port: int | None = None  # of replicas on one host, counted up from it; None: any free ones
    open_workers: bool = False  # whether any client may send requests directly to a replica
    worker_keys: tuple[str, ...] = ()  # lines of a key file; clients with one of these keys may do so too
    health: HealthChecks = HealthChecks()
    queue: Literal["replica", "global"] = "replica"
    max_inputs: int | None = None  # requests under way at one replica; None: no bound, or what each has room for
    queue_limit: int = 4096  # requests that wait in the router
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

    def check(self, launcher: Launcher | None = None) -> None:
        """Raises `UsageError` for numbers that do not go together, and for what cannot be with this launcher."""
        limits = self.limits
        self._check_workers(launcher)
        if self.queue == "global" and self.router_processes > 1:
            raise UsageError(
                f"--queue global keeps one order, which one process must hold, and --router-processes "
                f"{self.router_processes} are several. Leave one of them out: one relays tens of thousands of requests "
                "a second."
            )
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
        if launcher is not None and not launcher.starts:
            raise UsageError(
                f"--launcher {launcher.name} starts nothing, and these replicas have to be started. Leave it out, or "
                "give a server that runs: --backend fleet -B endpoint=URL."
            )
        room = None if launcher is None else launcher.capacity
        if launcher is not None and room is not None and limits.most > room:
            raise UsageError(
                f"--launcher {launcher.name} has room for {room} process{'es' * (room != 1)}, and {limits.most} "
                f"replicas are more. Give --replicas {room}, or more room with -L."
            )
        if self.devices_named and limits.most > len(self.devices):
            raise UsageError(
                f"{self.understood or f'{len(self.devices)} devices are named'}: {limits.most} replicas are more, and "
                "each takes one. Give more devices; one that is named twice is shared by two."
            )

    def _check_workers(self, launcher: Launcher | None) -> None:
        health, first = self.health, self.worker_port
        if health.timeout_s < health.interval_s:
            raise UsageError(
                f"--health-timeout {health.timeout_s:g} is over before the next probe, --health-interval "
                f"{health.interval_s:g}. Give a timeout of a few intervals."
            )
        if self.open_workers and launcher is not None and not is_loopback(launcher.bind):
            raise UsageError(
                f"--worker-api-keys none lets everybody in, and with --launcher {launcher.name} others reach the "
                "replicas. Name a file of keys, or leave it out: then only the router may send them requests."
            )
        if first is None:
            return
        if first + self.limits.most - 1 > MOST_PORT:
            raise UsageError(
                f"--worker-base-port {first} leaves too few ports for {self.limits.most} replicas: {MOST_PORT:,} is "
                "the last. Give a lower one."
            )
        if self.port and 0 <= self.port - first < self.limits.most:
            raise UsageError(
                f"--port {self.port} is the router's, and --worker-base-port {first} gives it to replica "
                f"{self.port - first}. Give another base, such as {self.port + 1}."
            )

    def threads(self) -> int:
        """Cores for each replica's libraries: its share, when the fleet is as large as it may become."""
        return max(1, machine.cores() // max(1, self.limits.most))


@dataclass(frozen=True, slots=True)
class GpuSelection:
    """What `--gpus` asks for: `count` devices, any of them, or those that are named, with one replica each. `all`
    is the count of those here, 0 without any.
    """

    text: str
    count: int
    names: tuple[str, ...] = ()  # none: any

    @property
    def understood(self) -> str:
        """How the flag was read, for people."""
        if self.names:
            which = "device" if self.count == 1 else "devices"
            return f"--gpus {self.text} names {which} {', '.join(self.names)}"
        devices = "1 device" if self.count == 1 else f"{self.count} devices"
        if self.text == ALL:
            return f"--gpus {ALL} is a count of those here: {devices}"
        return f"--gpus {self.text} is a count: {devices} (device {self.text} alone is --gpus {self.text},)"

    def here(self) -> tuple[str, ...]:
        """The devices of this machine. Raises `UsageError` where there are fewer than the count."""
        if self.names:
            return self.names
        found = gpus_here()
        if not self.count:
            raise UsageError(
                f"--gpus {ALL}: there is no device here. Leave --gpus out: --replicas N serves on the CPU."
            )
        if found and self.count > len(found):
            there_are = "1 device is" if len(found) == 1 else f"{len(found)} devices are"
            raise UsageError(
                f"--gpus {self.text} is a count, and {there_are} here. Give --gpus {len(found)}, or name some: "
                f"--gpus {','.join(found)}{',' if len(found) == 1 else ''}. One that is named twice is shared by two."
            )
        return found[: self.count] or tuple(str(place) for place in range(self.count))


def gpus_of(text: str) -> GpuSelection:
    """`4`: so many devices; `all`: as many as are here; `0,2`, `4,` or names such as GPU-8f…: these, and each replica
    sees one. Raises `UsageError`.
    """
    listed = text.strip()
    if listed == ALL:
        return GpuSelection(ALL, len(gpus_here()))
    if listed.isdecimal():
        if not 1 <= int(listed) <= MOST_REPLICAS:
            raise UsageError(
                f"--gpus {listed} is a count of devices, and 1 to {MOST_REPLICAS} can be used. To name device {listed} "
                f"alone, write --gpus {listed},"
            )
        return GpuSelection(listed, int(listed))
    found = tuple(part.strip() for part in listed.removesuffix(",").split(","))
    if not all(re.fullmatch(r"\d{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,80}", one) for one in found):
        raise UsageError(
            f"--gpus {text}: neither a count nor a list of devices. Write how many, such as 4, {ALL}, or their "
            "numbers, such as 0,2,4,6."
        )
    return GpuSelection(listed, len(found), found)


def devices_for(wanted: GpuSelection, launcher: Launcher, replicas: int) -> tuple[str, ...]:
    """The devices of this machine that `--gpus` asks for; none where the launcher finds them, one for each of so many
    replicas. Raises `UsageError`.
    """
    if launcher.here:
        return wanted.here()
    if wanted.text == ALL:
        raise UsageError(
            f"--gpus {ALL} means the devices of this machine, and --launcher {launcher.name} chooses devices "
            "elsewhere. Give a count: --gpus 4."
        )
    if wanted.names:
        raise UsageError(
            f"{wanted.understood} of this machine, and --launcher {launcher.name} chooses devices elsewhere. Give a "
            f"count: --gpus {wanted.count}."
        )
    if replicas > wanted.count:
        raise UsageError(f"{wanted.understood}, for {replicas} replicas, and each takes one. Give --gpus {replicas}.")
    launcher.reserve_one_gpu(f"--gpus {wanted.text}")
    return ()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens at this address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def gpus_here() -> tuple[str, ...]:
    """Those that this process sees: replicas take them in turn. Empty without any."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is not None:
        return tuple(part.strip() for part in seen.split(",") if part.strip())
    return tuple(str(place) for place in range(_nodes())) if machine.has_cuda() else ()


def refuse_absent_gpus(devices: Sequence[str], understood: str = "") -> None:
    """Raise `UsageError` for devices that people named and this machine does not have, as far as their numbers tell.

    `understood`: how `--gpus` was read.
    """
    named = understood or f"--gpus {','.join(devices)}"
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


def refuse_taken_ports(plan: FleetPlan) -> None:
    """Raise `UsageError` for a port of a replica (`worker_port`) at which another program of this machine listens."""
    if plan.worker_port is None:
        return
    for number, port in enumerate(range(plan.worker_port, plan.worker_port + plan.replicas)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has ended still lingers there
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise UsageError(
                    f"--worker-base-port {plan.worker_port} gives replica {number} port {port}, which cannot be had: "
                    f"{error.strerror}. End what listens there, or give another base."
                ) from None


def _nodes() -> int:
    """NVIDIA devices of this machine; 0 where the system does not list them."""
    return sum(NODES.fullmatch(node) is not None for node in os.listdir("/dev"))
