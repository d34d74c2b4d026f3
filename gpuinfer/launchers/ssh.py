"""Processes on other hosts by ssh: the system's own client, one connection a process.

Nothing but gpuinfer and its models must be there: files go over with the order, the log comes back as standard error.
The far end (`remote_end.py`) leaves with the connection, which ends with this process, however that ends. With a tunnel
the connections of the process go through it too, for hosts behind a firewall.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpuinfer.config import registry
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children, installation
from gpuinfer.launchers import base, carried_process, remote_end
from gpuinfer.launchers.base import Launcher, ProcessPlan
from gpuinfer.launchers.remote_end import RemoteOrder
from gpuinfer.launchers.remote_process import RemoteProcess
from gpuinfer.launchers.ssh_hosts import SshHost, choose_host, explain_complaint, read_hosts

log = logging.getLogger(__name__)

PATH = r"^[A-Za-z0-9_./~][^\x00-\x1f\x7f]*$"
OPTION = re.compile(r"[A-Za-z][A-Za-z0-9]*=[^\x00-\x1f\x7f]+")
PYTHON_S = 60.0  # for Python to come up there, once there is a connection
COMPLAINT_LINES = 20  # of what ssh says of a changed key
FORWARD_S = 20.0
CHUNK = 1 << 16
AT_ONCE = 6  # connections that are opened to one sshd at a time: it refuses some beyond ten (MaxStartups)
TRIES = 5  # at a port of this machine for a tunnel, which another program may take first
SETTINGS = (
    ("BatchMode", "yes"),  # no question is answered
    ("ServerAliveInterval", "5"),
    ("ServerAliveCountMax", "4"),
    ("ClearAllForwardings", "yes"),  # those of the user's configuration would be taken by the first connection
    ("RemoteCommand", "none"),
    ("RequestTTY", "no"),
    ("ForwardX11", "no"),
    ("LogLevel", "ERROR"),  # what it says is part of the process's log
)


class SshLauncher(Launcher):
    """Hosts that are reached by ssh: files, log and, on wish, all connections go over it."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        hosts: str = Field(description="USER@HOST:PORT slots=N, several with commas; or @FILE with one a line")
        slots: int = Field(1, ge=1, le=1024, description="processes on a host that does not say so itself")
        gpus: int | None = Field(None, ge=1, le=64, description="of one process; default all that are there")
        python: str | None = Field(None, pattern=PATH, description="the Python there; default the path of this one")
        folder: str | None = Field(None, pattern=PATH, description="where it runs there; default the home folder")
        options: list[str] = Field([], description="of ssh itself, such as IdentityFile=FILE; repeatable")
        tunnel: bool = Field(False, description="carry its connections by ssh too, for hosts behind a firewall")
        connect: float = Field(20.0, gt=0, le=600, description="seconds for a connection to come about")

        @field_validator("options")
        @classmethod
        def _whole(cls, words: list[str]) -> list[str]:
            """Each `Name=value`; a value with commas has come in parts."""
            whole: list[str] = []
            for part in words:
                if whole and "=" not in part:
                    whole[-1] += f",{part}"
                elif not OPTION.fullmatch(part):
                    raise ValueError(f"'{part}' is no option of ssh. Write Name=value, as after ssh -o")
                else:
                    whole.append(part)
            return whole

    name = "ssh"
    options: Options

    def __init__(self, options: BaseModel | None = None, command: Sequence[str] = ()) -> None:
        """`command` is for tests: what a plan's arguments follow there."""
        super().__init__(options)
        self.hosts = read_hosts(self.options.hosts, self.options.slots)
        self.capacity = sum(one.slots for one in self.hosts)
        self.bind = "127.0.0.1" if self.options.tunnel else "0.0.0.0"
        self._command = tuple(command)
        self._python = self.options.python or ("python3" if installation.one_file() else sys.executable)
        self._gates = {str(one): asyncio.Semaphore(AT_ONCE) for one in self.hosts}
        self._failures = 0
        self._running: set[SshProcess] = set()

    def check(self) -> None:
        if shutil.which("ssh") is None:
            raise UsageError("there is no ssh here. Install OpenSSH's client (Debian: openssh-client).")

    def reached_at(self) -> str:
        if self.options.tunnel:
            return "127.0.0.1"
        return base.own_address((self._resolved(self.hosts[0]), 22))

    def _resolved(self, host: SshHost) -> str:
        """The name or address that ssh connects to for this host: it may be an alias of the user's configuration."""
        if not host.address:
            ended = children.run_program(["ssh", *self._flags(), "-G", *host.words], self.options.connect)
            lines = ended.out.decode("utf-8", "replace").splitlines()
            found = (line.split()[1] for line in lines if line.startswith("hostname "))
            host.address = next(found, host.name.rpartition("@")[2])
        return host.address

    def _flags(self) -> list[str]:
        """The user's own come first: of two the first counts for ssh."""
        ours = [f"{name}={value}" for name, value in SETTINGS]
        ours.append(f"ConnectTimeout={max(1, round(self.options.connect))}")
        return [word for one in [*self.options.options, *ours] for word in ("-o", one)]

    async def launch(self, plan: ProcessPlan) -> SshProcess:
        if plan.devices is not None:
            raise UsageError(
                "--gpus names devices of this machine, and the process runs elsewhere. Say -L gpus=1 instead."
            )
        chosen = choose_host(self.hosts)
        if chosen is None:
            raise WorkError(
                f"{plan.name} has no place: all {self.capacity} slots of -L hosts are taken. Name more hosts, or more "
                "slots a host."
            )
        host, slot = chosen
        host.taken.add(slot)
        process = SshProcess(plan, host, self._flags(), self._python, lambda: host.taken.discard(slot))
        try:
            gpus = self.options.gpus
            devices = None if gpus is None else ",".join(str(slot * gpus + number) for number in range(gpus))
            order = carried_process.process_order(plan, devices=devices, command=self._command)
            remote = RemoteOrder(order, self.options.folder, host.slots, "127.0.0.1" if self.options.tunnel else None)
            async with self._gates[str(host)]:
                await process.connect(self.options.connect, self.options.tunnel)
            resolved = "" if self.options.tunnel else await asyncio.to_thread(self._resolved, host)
            await process.begin_at(remote, resolved)
        except BaseException as error:
            if isinstance(error, WorkError | OSError):
                self._failures += 1
                host.failed = self._failures
            await process.kill()
            if isinstance(error, OSError):
                raise WorkError(
                    f"{plan.name} cannot be started: {error.filename or 'ssh'}: {error.strerror}."
                ) from None
            raise
        host.failed = 0
        self._running = {one for one in self._running if one.alive} | {process}
        return process

    async def close(self) -> None:
        await asyncio.gather(*(one.kill() for one in self._running), return_exceptions=True)
        self._running.clear()


class SshProcess(RemoteProcess):
    """A process on another host, in the care of one connection."""

    def __init__(
        self, plan: ProcessPlan, host: SshHost, flags: Sequence[str], python: str, released: Callable[[], None]
    ) -> None:
        super().__init__(plan)
        self.host = host
        self._flags, self._python, self._released = flags, python, released
        self._connection: asyncio.subprocess.Process | None = None
        self._resolved = ""
        self._socket: Path | None = None  # of a tunnel: through which forwards are requested

    @property
    def called(self) -> str:
        return f"{self.plan.name} ({self.host})"

    async def connect(self, within_s: float, tunnel: bool) -> None:
        """Come as far as gpuinfer on the other host. Raises `WorkError` with the cure, `OSError`."""
        flags = ["-o", "ControlPath=none"]  # a connection that others share would outlive this process
        if tunnel:
            self._socket = _socket_path(self.plan)
            flags = ["-o", "ControlMaster=yes", "-o", "ControlPersist=no", "-o", f"ControlPath={self._socket}"]
        there = shlex.join([self._python, "-m", remote_end.__name__])
        written = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            pipe = asyncio.subprocess.PIPE
            self._connection = await asyncio.create_subprocess_exec(
                "ssh", *flags, *self._flags, *self.host.words, there,
                stdin=pipe, stdout=pipe, stderr=written, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(written)
        if not (version := await self.greet(within_s + PYTHON_S)):
            await self._end(1.0)  # so that all of what it says is there
            words = self.last_words(COMPLAINT_LINES)
            why = explain_complaint(words, self.host, self._python, registry.own_version())
            raise WorkError(f"{self.called} cannot be started: {why}")
        self.refuse_other_version(version, self._python)

    async def begin_at(self, order: RemoteOrder, resolved: str) -> None:
        """Have it run. `resolved`: where this process reaches the host; empty: through the tunnel alone."""
        self._resolved = resolved
        dials = self.plan.dials
        if dials is not None and not resolved:
            port = await self._forward("-R", f"127.0.0.1:0:{dials}")
            process = msgspec.structs.replace(order.process, words={dials: f"127.0.0.1:{int(port)}"})
            order = msgspec.structs.replace(order, process=process)
        await self.begin(order)

    async def _read(self) -> bytes:
        stream = None if self._connection is None else self._connection.stdout
        return b"" if stream is None else await stream.read(CHUNK)

    async def _write(self, data: bytes) -> None:
        stream = None if self._connection is None else self._connection.stdin
        if stream is not None and not stream.is_closing():
            with contextlib.suppress(ConnectionError):  # it has ended, which is seen where it is read
                stream.write(data)
                await stream.drain()

    async def _end(self, within_s: float) -> None:
        connection = self._connection
        if connection is None:
            return
        if connection.stdin is not None:
            connection.stdin.close()
        try:
            await asyncio.wait_for(connection.wait(), within_s)
        except TimeoutError:
            log.warning("%s: the connection to %s does not end and is broken off", self.plan.name, self.host)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(connection.pid, signal.SIGKILL)
            await connection.wait()

    def _ended(self) -> None:
        """Its slot is another's from here on."""
        released, self._released = self._released, lambda: None
        released()
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    async def _reached(self, there: tuple[str, int]) -> tuple[str, int]:
        host, port = there
        if self._resolved:
            return self._resolved, port
        for _ in range(TRIES):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ours = int(probe.getsockname()[1])
            with contextlib.suppress(WorkError):
                await self._forward("-L", f"127.0.0.1:{ours}:{host}:{port}")
                return "127.0.0.1", ours
        raise WorkError("its tunnel did not come about")

    async def _forward(self, flag: str, words: str) -> str:
        """Have the connection carry another. What ssh prints: the port of a remote forward. Raises `WorkError`."""
        command = ["ssh", "-o", f"ControlPath={self._socket}", "-O", "forward", flag, words, *self.host.words]
        ended = await asyncio.to_thread(children.run_program, command, FORWARD_S)
        if ended.code != 0:
            raise WorkError(
                f"{self.called} has no tunnel: {ended.last_words}. Let its sshd forward (AllowTcpForwarding yes), or "
                "leave -L tunnel out."
            )
        return ended.out.decode().strip()

    async def ready(self, within_s: float) -> tuple[str, int]:
        host, port = await super().ready(within_s)
        if self._resolved:
            await self._try(host, port)
        return host, port

    async def _try(self, host: str, port: int) -> None:
        """Raises `WorkError` where a firewall is between."""
        try:
            async with asyncio.timeout(FORWARD_S):
                _, writer = await asyncio.open_connection(host, port)
        except OSError as error:  # TimeoutError is one
            why = error.strerror or "no answer"
            raise WorkError(
                f"{self.called} serves at {host}:{port}, out of reach from here: {why}. Open its firewall, or "
                "carry the connection by ssh: -L tunnel=true"
            ) from None
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


SOCKET_PATH = 80  # characters: ssh puts some behind it for a moment, and the system allows 107


def _socket_path(plan: ProcessPlan) -> Path:
    """In the plan's folder, where its path is as short as sockets want; else a name in /tmp that cannot be guessed."""
    path = plan.folder / f"{plan.name}.{plan.attempt}.ssh"
    if len(str(path)) <= SOCKET_PATH:
        path.unlink(missing_ok=True)
        return path
    return Path("/tmp", f"gpuinfer-ssh-{secrets.token_hex(16)}")
