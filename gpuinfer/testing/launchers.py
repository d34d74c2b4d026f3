"""What a launcher promises, tried with real processes: servers of a stand-in model, which are up within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.config.setup_file import ServerSetup
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children
from gpuinfer.launchers.base import LaunchedProcess, Launcher, ProcessPlan
from gpuinfer.testing.findings import Examination, Finding, check_build, check_unknown_options, run_bounded

WHAT = "says what it is"
SERVES = "starts a process that serves, with the files that it reads"
LOG = "brings its log here"
TERMINATES = "has it leave on `terminate`"
KILLS = "kills one, and does no harm to one that has ended"
NODE = "starts a process that does not serve, with the arguments alone"
FAILS = "says how one failed, with its last words"
OWNER = "leaves nothing running when its own process is killed"
AFTERWARDS = (LOG, TERMINATES, KILLS, NODE, FAILS, OWNER)
TIMES = 12  # limits of a check that one that starts processes may take
OWNER_TIMES = 30  # the same of the last one: a batch system may notice late that a process is gone
LOOK_S = 0.05
RUN_OPTIONS = ("nodes", "coordinator")  # keys of -L that a run takes for itself
KEY = "check-launcher"


def check_launcher(
    kind: type[Launcher],
    values: Mapping[str, Any] | None = None,
    timeout_s: float = 10.0,
    *,
    examiner: Examination | None = None,
) -> list[Finding]:
    """Every promise of `launchers.base.Launcher`; `kind` is a class at the top of a module, `values` its options.

    Each check may take `timeout_s`, or what `examiner` allows; one that starts processes 12 times as long, and the
    last of them 30 times. Where the launcher says that it cannot work here, or that it starts nothing, the rest is not
    tried.
    """

    def check(examiner: Examination) -> None:
        def build(**options: Any) -> Launcher:
            return kind(kind.Options(**options))

        launcher = check_build(lambda: build(**(values or {})), Launcher, examiner)
        if launcher is None:
            return
        check_unknown_options(kind.Options, launcher.options, build, examiner)
        examiner.check("has options of its own names", lambda: _fault_of_names(launcher))
        try:
            launcher.check()
            lacking = "" if launcher.starts else "it starts no process"
        except UsageError as error:
            lacking = f"it cannot work here: {error}"
        if lacking:
            for name in (WHAT, SERVES, *AFTERWARDS):
                examiner.skip(name, lacking)
            return
        examiner.check(WHAT, lambda: _fault_of_facts(launcher))
        with tempfile.TemporaryDirectory(prefix="gpuinfer-launcher-", dir=_place(launcher)) as folder:
            asyncio.run(_LauncherExamination(launcher, Path(folder), examiner).run())

    return run_bounded(check, examiner or Examination(timeout_s))


def _place(launcher: Launcher) -> Path | None:
    if launcher.shared is not None:
        launcher.shared.mkdir(mode=0o700, parents=True, exist_ok=True)
    return launcher.shared


def _fault_of_names(launcher: Launcher) -> str | None:
    taken = sorted(set(RUN_OPTIONS).intersection(type(launcher).Options.model_fields))
    if not taken:
        return None
    return f"its option '{taken[0]}' is a key of -L that a run takes for itself. Rename it."


def _fault_of_facts(launcher: Launcher) -> str | None:
    if not isinstance(launcher.name, str) or not launcher.name:
        return f"its name is {launcher.name!r}. Give the class `name`, the one of its entry point."
    if launcher.capacity is not None and not (isinstance(launcher.capacity, int) and launcher.capacity > 0):
        return f"capacity is {launcher.capacity!r}. Give the number of processes that it has room for, or None."
    if not (isinstance(launcher.at_once, int) and launcher.at_once > 0):
        return f"at_once is {launcher.at_once!r}. Give the number of processes that may come up at a time."
    address = launcher.reached_at()
    if not isinstance(address, str) or not address or "/" in address or " " in address:
        return f"reached_at() gave {address!r}. Return this machine's address or name alone, as its hosts reach it."
    return None


@dataclass(frozen=True, slots=True)
class _Files:
    """What a server reads: its setup, and the key that it asks for."""

    setup: Path
    key: Path

    @classmethod
    def write(cls, folder: Path) -> _Files:
        model = ModelSpec("gpuinfer.testing.fakes:tiny_model", inputs=8)
        described = ServerSetup(setup=Setup(model=model, devices=("cpu",)), backend="standin")
        files = cls(folder / "setup.json", folder / "server.key")
        for path, contents in ((files.setup, msgspec.json.encode(described)), (files.key, f"{KEY}\n".encode())):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(contents)
        return files

    @property
    def words(self) -> tuple[str, ...]:
        return ("serve", "--setup-file", str(self.setup), "--api-key-file", str(self.key), "--port", "0")


class _LauncherExamination:
    """One launcher, from its first process to its end."""

    def __init__(self, launcher: Launcher, folder: Path, examiner: Examination) -> None:
        self._launcher, self._folder, self._examiner = launcher, folder, examiner
        self._files = _Files.write(folder)
        self._index = 0
        self._limit_s = TIMES * examiner.limit_s

    async def run(self) -> None:
        examiner = self._examiner
        try:
            if await self._try(SERVES, self._fault_of_serving):
                for name, fault_of in (
                    (LOG, self._fault_of_log),
                    (TERMINATES, self._fault_of_terminating),
                    (KILLS, self._fault_of_killing),
                    (NODE, self._fault_of_node),
                    (FAILS, self._fault_of_failing),
                    (OWNER, self._fault_of_owner),
                ):
                    await self._try(name, fault_of)
            else:
                for name in AFTERWARDS:
                    examiner.skip(name, f"'{SERVES}' does not hold")
        finally:
            await examiner.check_async("closes", self._closed, self._limit_s)

    async def _try(self, name: str, fault_of: Callable[[], Awaitable[str | None]]) -> bool:
        times = OWNER_TIMES if name == OWNER else TIMES
        return await self._examiner.check_async(name, fault_of, times * self._examiner.limit_s)

    async def _closed(self) -> None:
        await self._launcher.close()

    def _plan(self, **more: Any) -> ProcessPlan:
        """Of a server; each has a number of its own."""
        self._index += 1
        files = (self._files.setup, self._files.key)
        plan = ProcessPlan(f"replica-{self._index}", self._index, self._folder, self._files.words, files)
        plan = replace(plan, **more)
        return replace(plan, arguments=(*plan.arguments, "--ready-file", str(plan.ready_file))) if plan.serves else plan

    @contextlib.asynccontextmanager
    async def _launched(self, plan: ProcessPlan) -> AsyncIterator[LaunchedProcess]:
        process = await self._launcher.launch(plan)
        try:
            yield process
        finally:
            await process.kill()

    async def _fault_of_serving(self) -> str | None:
        async with self._launched(self._plan()) as process:
            if not isinstance(process, LaunchedProcess):
                return f"launch gave {process!r:.80}. Return a LaunchedProcess."
            address = await process.ready(self._limit_s)
            status = await asyncio.to_thread(_status, address)
            if status != 200:
                return (
                    f"ready() gave {address}, where a request with the key is answered with {status}. Return the "
                    "address at which this process reaches it, and carry over `plan.files`."
                )
            return None if process.alive else "it serves, and `alive` is False. Say so only once it has ended."

    async def _fault_of_log(self) -> str | None:
        async with self._launched(self._plan()) as process:
            await process.ready(self._limit_s)
            await _until(lambda: "tiny_model at http://" in process.last_words())
            if process.log.resolve() != process.plan.log.resolve():
                return f"its log is {process.log}. Write what it prints to plan.log."
        return None

    async def _fault_of_terminating(self) -> str | None:
        async with self._launched(self._plan()) as process:
            address = await process.ready(self._limit_s)
            await process.terminate(self._limit_s / 2)
            if process.alive:
                return "it is alive after terminate(). Come back when it has ended; kill it when the time is over."
            await _until(lambda: _is_closed(address))
            if "finishing what is under way" not in process.last_words():
                return "it was killed. Send it SIGTERM first: requests that are under way are finished then."
        return None

    async def _fault_of_killing(self) -> str | None:
        process = await self._launcher.launch(self._plan())
        address = await process.ready(self._limit_s)
        await process.kill()
        if process.alive:
            return "it is alive after kill(). Come back when it has ended."
        await _until(lambda: _is_closed(address))
        await process.kill()
        await process.terminate(1.0)
        return None

    async def _fault_of_node(self) -> str | None:
        words = (*self._files.words, "--host", "127.0.0.1")
        node = self._plan(serves=False, arguments=words)
        async with self._launched(replace(node, name=f"node-{node.index}")) as process:
            await _until(lambda: "tiny_model at http://127.0.0.1:" in process.last_words() or not process.alive)
            if not process.alive:
                return f"it ended: {process.failure('ended')}. Add --host for a plan that serves alone."
        return None

    async def _fault_of_failing(self) -> str | None:
        plan = self._plan()
        async with self._launched(replace(plan, arguments=(*plan.arguments, "--no-such-flag"))) as process:
            try:
                await process.ready(self._limit_s)
            except WorkError as error:
                message = str(error)
            else:
                return "it serves, though its command line is refused. Give it all of plan.arguments."
            if "--no-such-flag" not in message or plan.name not in message:
                return f"its failure is {message!r}. Raise `self.failure(why)`, with the process's name and last words."
            return "it has ended, and `alive` is True." if process.alive else None

    async def _fault_of_owner(self) -> str | None:
        own = self._folder / "owner"  # not ours: by what is there a launcher may see that its process lives
        own.mkdir(mode=0o700, exist_ok=True)
        plan, kind = self._plan(folder=own), type(self._launcher)
        options = self._launcher.options.model_dump(mode="json", exclude_unset=True)
        arguments = {"module": kind.__module__, "kind": kind.__qualname__, "options": options, "limit_s": self._limit_s}
        arguments |= {"index": plan.index, "folder": str(plan.folder), "arguments": plan.arguments}
        arguments["files"] = [str(path) for path in plan.files]
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"from {__name__} import hold_launched; hold_launched()", json.dumps(arguments)),
            env=children.with_our_path(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            line = await owner.stdout.readline() if owner.stdout else b""
            if not line.startswith(b"{"):
                return f"in another process it did not come up: {line.decode('utf-8', 'replace')!r}"
            address = tuple(json.loads(line)["address"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                owner.kill()
            await owner.communicate()
        await _until(lambda: _is_closed(address))
        return None


def hold_launched() -> None:
    """A process that launches another and waits: what its first argument says, as JSON. It prints the address."""
    arguments = json.loads(sys.argv[1])
    kind: Any = importlib.import_module(arguments["module"])
    for name in arguments["kind"].split("."):
        kind = getattr(kind, name)
    launcher: Launcher = kind(kind.Options(**arguments["options"]))
    files = tuple(map(Path, arguments["files"]))
    index = arguments["index"]
    plan = ProcessPlan(f"replica-{index}", index, Path(arguments["folder"]), tuple(arguments["arguments"]), files)

    async def hold() -> None:
        process = await launcher.launch(plan)
        address = await process.ready(arguments["limit_s"])
        print(json.dumps({"address": address}), flush=True)
        await asyncio.sleep(arguments["limit_s"])

    asyncio.run(hold())


def _status(address: tuple[str, int]) -> int | str:
    """Of a response that asks for the key."""
    host, port = address
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/models"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {KEY}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError as error:
        return str(error)


def _is_closed(address: Any) -> bool:
    """Whether nothing listens there any more."""

    try:
        with socket.create_connection(address, 5.0) as connection:
            connection.settimeout(5.0)
            connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            return not connection.recv(1)  # a tunnel takes connections for one that has ended
    except OSError:
        return True


async def _until(done: Callable[[], bool]) -> None:
    """The check itself has a limit."""
    while not await asyncio.to_thread(done):  # noqa: ASYNC110 (another process's doing)
        await asyncio.sleep(LOOK_S)
