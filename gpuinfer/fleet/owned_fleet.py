"""A fleet that is started for one run, and ended with it."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpuinfer.api import Setup, Strategy
from gpuinfer.config import registry
from gpuinfer.config.options import GivenValue
from gpuinfer.config.setup_file import ServerSetup
from gpuinfer.errors import UsageError
from gpuinfer.fleet.folder import PrivateFolder
from gpuinfer.fleet.replica_client import ANSWER_S
from gpuinfer.host import machine
from gpuinfer.http.access import LOOPBACK, Access, Keys
from gpuinfer.stats import Snapshot

if TYPE_CHECKING:
    from gpuinfer.fleet.supervisor import Fleet

MOST_BYTES = 1 << 30  # of one block of rows
DRAIN_S = 2.0  # nothing is under way any more when a run ends


class OwnedFleet:
    """The fleet, on loopback and with a key of its own, so that nobody else on this machine asks it."""

    def __init__(self, wanted: Any, backend_options: Mapping[str, Any], setup: Setup, strategy: Strategy) -> None:
        """`wanted`: the options of the backend `fleet`; `backend_options`: those of the backend in each replica."""
        # a replica is told what its plugins are by name, and reads that from a file
        names = registry.names("strategies")
        name = next((one for one in names if registry.load("strategies", one) is type(strategy)), None)
        if name is None:
            raise UsageError(
                f"the strategy {type(strategy).__name__} is no installed plugin, so that replicas do not find it. "
                "Offer it by an entry point, or use another backend."
            )
        described = ServerSetup(
            setup=setup,
            backend=wanted.backend,
            backend_options=backend_options,
            strategy=name,
            strategy_options=strategy.options.model_dump(mode="json"),
        )
        self._wanted, self._described = wanted, described
        self._fleet: Fleet | None = None
        self._folder: PrivateFolder | None = None
        self.key = secrets.token_urlsafe(32)

    async def start(self) -> str:
        """The URL, once all replicas have come up. Raises `UsageError`, and `WorkError` with a replica's last words."""
        from gpuinfer.fleet.plan import FleetPlan, devices_for, gpus_here, gpus_of
        from gpuinfer.fleet.routing_policies import check_policy_options
        from gpuinfer.fleet.supervisor import Fleet
        from gpuinfer.launchers import base

        wanted = self._wanted
        check_policy_options(wanted.routing, {})
        given = {
            name: GivenValue(value, f"-B launcher_options {name}") for name, value in wanted.launcher_options.items()
        }
        launcher = base.make_launcher(wanted.launcher, given)
        self._folder = PrivateFolder(tempfile.gettempdir())
        setup = replace(self._described.setup, processes=wanted.replicas if launcher.here else 1)
        devices = gpus_here() if launcher.here and machine.wants_cuda(setup.devices) else ()
        gpus = gpus_of(wanted.gpus) if wanted.gpus else None
        if gpus is not None:
            devices = devices_for(gpus, launcher, wanted.replicas)
            setup = replace(setup, devices=("cuda",))  # a replica that cannot use its own does not fall back on the CPU
        plan = FleetPlan(
            setup=msgspec.json.encode(msgspec.structs.replace(self._described, setup=setup)),
            replicas=wanted.replicas,
            devices=devices,
            devices_named=gpus is not None and bool(devices),
            understood="" if gpus is None else gpus.understood,
            routing=wanted.routing,
            router_processes=wanted.router_processes,
            api_keys=(self.key,),
            access=Access(Keys.read(self.key_file), None, LOOPBACK),
            request_timeout_s=ANSWER_S,
            drain_s=DRAIN_S,
            body_bytes=MOST_BYTES,
            arguments=("--quiet", "--drain-timeout", f"{DRAIN_S:g}", "--max-body", str(MOST_BYTES)),
        )
        self._fleet = Fleet(plan, launcher)
        url: str = await self._fleet.start()
        return url

    @property
    def key_file(self) -> Path:
        """For worker processes: the key, which its owner alone can read."""
        if self._folder is None:
            raise UsageError("this fleet has not been started. Await start() first.")
        path = self._folder.path / "key"
        return path if path.exists() else self._folder.write(path.name, f"{self.key}\n".encode())

    @property
    def notices(self) -> Sequence[str]:
        return () if self._fleet is None else self._fleet.launcher.notices

    async def update(self, body: Mapping[str, Any]) -> None:
        """See `Fleet.update`."""
        await self._there().update(body)

    async def unload(self, adapter: str) -> None:
        await self._there().unload(adapter)

    def _there(self) -> Fleet:
        if self._fleet is None:
            raise UsageError("this fleet has not been started. Await start() first.")
        return self._fleet

    async def snapshot(self) -> Snapshot:
        """What all replicas have counted."""
        return Snapshot() if self._fleet is None else await self._fleet.snapshot(0.0)

    async def close(self) -> None:
        if self._fleet is not None:
            await self._fleet.close()
            self._fleet = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
