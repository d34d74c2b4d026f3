"""Issue 30, launchers: plugins that start any process of gpuinfer, hosts by ssh, replicas on them.

Those by ssh use the system's own client and a real sshd on loopback (`system/sshd_here.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import BaseModel, ConfigDict

SHAMS = str(Path(__file__).parents[1] / "launchers")
sys.path.insert(0, SHAMS)

from packages import install  # noqa: E402
from plans import COMMAND, SECONDS, plan  # noqa: E402
from serving.replica_servers import serving  # noqa: E402
from serving.replica_servers import until as until_served  # noqa: E402
from system import sshd_here  # noqa: E402
from system.sshd_here import Sshd  # noqa: E402

from gpuinfer.cli.building import launcher_options, merge  # noqa: E402
from gpuinfer.config import registry  # noqa: E402
from gpuinfer.config.options import GivenValue  # noqa: E402
from gpuinfer.errors import UnknownName, UsageError, WorkError  # noqa: E402
from gpuinfer.launchers.base import LaunchedProcess, Launcher, ProcessPlan, make_launcher  # noqa: E402
from gpuinfer.launchers.external import ExternalLauncher  # noqa: E402
from gpuinfer.launchers.local import LocalLauncher  # noqa: E402
from gpuinfer.launchers.ssh import SshLauncher  # noqa: E402
from gpuinfer.testing import assert_ok, launchers  # noqa: E402
from gpuinfer.testing.launchers import check_launcher  # noqa: E402

WAIT_S = 3 * SECONDS


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  another program's doing
            await asyncio.sleep(0.05)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# Launchers are plugins, and start any process


SAYS = "import sys; print(*sys.argv[1:], flush=True); raise SystemExit('no coordinator there')"


async def test_a_launcher_starts_a_node_as_it_starts_a_replica_and_says_which_it_was(tmp_path):
    """A node gets no --host, no ready file of it is awaited; messages say node-3."""
    launcher = LocalLauncher(command=(sys.executable, "-c", SAYS))
    node = ProcessPlan("node-3", 3, tmp_path, ("node", "127.0.0.1:80"), serves=False)
    replica = replace(node, name="replica-3", serves=True)
    for one, words in ((node, []), (replica, ["--host", "127.0.0.1"])):
        process = await launcher.launch(one)
        await until(lambda process=process: not process.alive)
        assert process.log == tmp_path / f"{one.name}.log"
        said = process.log.read_text().splitlines()[0].split()
        assert said == ["node", "127.0.0.1:80", *words, "--leave-with-parent"]
        told = str(process.failure("ended before it joined"))
        assert told.startswith(f"{one.name} ended before it joined (exit code 1)."), told
        assert "no coordinator there" in told
        await process.kill()
    assert launcher.reached_at() == "127.0.0.1"


ACME = """
    from pydantic import BaseModel, ConfigDict, Field
    from gpuinfer.launchers.local import LocalLauncher
    class Here(LocalLauncher):
        "Processes on this machine, by another name."
        class Options(BaseModel):
            model_config = ConfigDict(extra="forbid", frozen=True)
            queue: str = Field("short", description="which queue")
        name = "acme"
"""


@pytest.fixture
def acme(empty_folder, tmp_path, monkeypatch) -> Iterator[Path]:
    (folder := tmp_path / "site").mkdir()
    install(folder, "gpuinfer-acme", {"launchers": {"acme": "acme_launcher:Here"}}, {"acme_launcher": ACME})
    monkeypatch.syspath_prepend(str(folder))
    registry.search_again()
    yield empty_folder
    sys.modules.pop("acme_launcher", None)
    registry.search_again()


def test_a_launcher_of_a_third_party_is_found_completed_listed_and_switched_off_like_ours(acme, gpuinfer, monkeypatch):
    ours = {"local", "ssh", "slurm", "ray"}
    assert {*ours, "acme"} <= set(registry.names("launchers"))
    assert {one.distribution for one in registry.listing("launchers") if one.name in ours} == {"gpuinfer"}
    made = make_launcher("acme", {"queue": GivenValue("long", "-L queue")})
    assert (type(made).__name__, made.options.queue) == ("Here", "long")
    with pytest.raises(UsageError, match=r"-L colour: launcher 'acme' has no option 'colour'.*Options: queue"):
        make_launcher("acme", {"colour": GivenValue("red", "-L colour")})
    with pytest.raises(UnknownName, match=r"no launcher named 'acm'. Did you mean 'acme'"):
        make_launcher("acm", {})
    code, out, _ = gpuinfer("plugins", "list")
    assert code == 0
    assert "acme" in out.partition("launchers")[2]
    code, out, _ = gpuinfer("plugins", "show", "launcher", "acme")
    assert "-L queue=" in out
    monkeypatch.setenv(registry.DISABLED, "launchers.acme")
    assert "acme" not in registry.names("launchers")


def test_a_launcher_has_its_options_from_settings_file_environment_and_flag(empty_folder, monkeypatch):
    (empty_folder / "gpuinfer.toml").write_text(
        '[launchers.slurm]\npartition = "long"\naccount = "physics"\ncpus = 2\n'
    )
    monkeypatch.setenv("GPUINFER_LAUNCHERS__SLURM__ACCOUNT", "biology")
    given = launcher_options(merge("serve", {}), "slurm", ["cpus=8"])
    assert {key: one.value for key, one in given.items()} == {"partition": "long", "account": "biology", "cpus": "8"}
    assert given["account"].origin == "GPUINFER_LAUNCHERS__SLURM__ACCOUNT"
    assert launcher_options(merge("serve", {}), "ray", []) == {}
    (empty_folder / "gpuinfer.toml").write_text("[launchers.slrum]\npartition = 1\n")
    with pytest.raises(UsageError, match=r"no such launcher. Did you mean 'slurm'"):
        merge("serve", {})


# Hosts by ssh


ssh = pytest.mark.system
limit = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def there() -> Iterator[Sshd]:
    with sshd_here.running() as made:
        yield made


@contextlib.asynccontextmanager
async def launching(there: Sshd, *, real: bool = False, **options: Any) -> AsyncIterator[SshLauncher]:
    """`real`: gpuinfer itself, not a sham."""
    given = {"hosts": there.host, "options": there.options, **options}
    made = SshLauncher(SshLauncher.Options(**given), () if real else COMMAND)
    made.check()
    try:
        yield made
    finally:
        await made.close()
    await until(lambda: not there.sessions())


@ssh
@limit
@pytest.mark.parametrize("tunnel", [False, True])
async def test_a_process_serves_on_a_host_of_ssh_with_its_files_its_log_comes_and_nothing_stays(
    there, tunnel, tmp_path
):
    """No folder is shared: what it needs travels, with modes that keep others out, and is removed at its end."""
    key, mark = tmp_path / "key", secrets.token_hex(8)
    key.write_text("secret\n")
    own = plan(tmp_path, "--api-key-file", str(key), mark)
    async with launching(there, tunnel=tunnel, folder="/") as launcher:
        assert launcher.reached_at() == "127.0.0.1"
        process = await launcher.launch(replace(own, files=(key,)))
        host, port = await process.ready(WAIT_S)
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        await writer.wait_closed()
        await until(lambda: "the sham replica is up" in process.last_words())
        sham = psutil.Process(process.remote_pid)
        carried = Path((words := sham.cmdline())[words.index("--api-key-file") + 1])
        assert carried != key
        assert private_file(carried) == ("secret\n", 0o600, 0o700)
        bound = {one.laddr.ip for one in sham.net_connections() if one.status == psutil.CONN_LISTEN}
        assert (sham.cwd(), bound) == ("/", {"127.0.0.1"})
        await process.terminate(WAIT_S)
        assert (process.alive, process.ending) == (False, "exit code 0")
        await until(lambda: not carried.parent.exists())
        await process.kill()


def private_file(path: Path) -> tuple[str, int, int]:
    """What it holds; its mode and its folder's."""
    return path.read_text(), path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777


@ssh
@limit
async def test_a_node_dials_this_machine_through_a_tunnel(there, tmp_path):
    """Its arguments name the end of the tunnel there in the place of our address."""
    asks = "import sys, urllib.request as u; print(sys.argv[1], u.urlopen('http://' + sys.argv[1]).read().decode())"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        launcher = SshLauncher(
            SshLauncher.Options(hosts=there.host, options=there.options, tunnel=True), (sys.executable, "-c", asks)
        )
        node = ProcessPlan("node-0", 0, tmp_path, (address,), serves=False, dials=address)
        process = await launcher.launch(node)
        await until(lambda: not process.alive)
        dialled, said = process.last_words().split()
        assert said == "hello", process.log.read_text()
        assert dialled != address
        await launcher.close()
    await until(lambda: not there.sessions())


@ssh
@limit
async def test_a_stubborn_process_is_killed_and_one_that_fails_is_reported_with_its_last_words(there, tmp_path):
    async with launching(there, slots=2) as launcher:
        stubborn = await launcher.launch(plan(tmp_path, "--stubborn"))
        await stubborn.ready(WAIT_S)
        sham = psutil.Process(stubborn.remote_pid)
        await stubborn.terminate(0.2)
        assert not stubborn.alive
        await until(lambda: gone(sham))
        failing = await launcher.launch(plan(tmp_path, "--fail", "CUDA out of memory", index=1))
        with pytest.raises(
            WorkError, match=r"replica-1 \(\S+\) ended before it served \(exit code 1\)[\s\S]*CUDA out of"
        ):
            await failing.ready(WAIT_S)


PROGRAM = """
import asyncio, json, sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from plans import COMMAND, plan
from gpuinfer.launchers.ssh import SshLauncher
async def main():
    launcher = SshLauncher(SshLauncher.Options(**json.loads(sys.argv[3])), COMMAND)
    process = await launcher.launch(plan(Path(sys.argv[2])))
    await process.ready(180)
    print(process.remote_pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@ssh
@limit
@pytest.mark.parametrize("lost", ["this side", "the connection", "the far end of ssh"])
async def test_nothing_is_left_running_over_there_after_kill_9(there, lost, tmp_path):
    given = json.dumps({"hosts": there.host, "options": there.options, "tunnel": True})
    words = ["-c", PROGRAM, SHAMS, str(tmp_path), given]
    owner = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(WAIT_S):
            sham = psutil.Process(int(await owner.stdout.readline()))
        far_end = sham.parent()
        (client,) = psutil.Process(owner.pid).children()
        assert client.name() == "ssh"
        {"this side": owner, "the connection": client, "the far end of ssh": far_end}[lost].kill()
        await until(lambda: gone(sham))
        await until(lambda: not there.sessions())
        await until(lambda: gone(client))
    finally:
        with contextlib.suppress(ProcessLookupError):
            owner.kill()
        await owner.communicate()


def other_version(folder: Path) -> str:
    """A Python that has gpuinfer 9.9."""
    (folder / "other").mkdir()
    install(folder / "other", "gpuinfer", {}, version="9.9")
    path = f"{folder / 'other'}{os.pathsep}{sshd_here.ROOT}"
    return script(folder / "python", f'PYTHONPATH={path} exec {sys.executable} "$@"')


def script(place: Path, line: str) -> str:
    place.write_text(f"#!/bin/sh\n{line}\n")
    place.chmod(0o755)
    return str(place)


@ssh
@limit
@pytest.mark.parametrize(
    ("wrong", "cure"),
    [
        ("key", r"does not let you in without a password\. Install your key there \(ssh-copy-id "),
        ("host key", r"host key is not known here\. Connect once by hand[\s\S]*StrictHostKeyChecking=accept-new"),
        ("changed host key", r"host key is not the one that is known here[\s\S]*ssh-keygen -R '\[127\.0\.0\.1\]:"),
        ("port", r"no sshd listens there\. Start it, or name its port"),
        ("name", r"its name is not known here\. Correct -L hosts"),
        ("python", r"there is no /no/such/python\. Name the Python that has gpuinfer there: -L python=PATH"),
        ("package", r"has no gpuinfer, or not all of it\. Install it \(pip install gpuinfer==0\.1\.0\)"),
        ("version", r"there has gpuinfer 9\.9, and this is 0\.1\.0\. Install the same on both sides"),
        ("folder", r"cannot run there: /no/such/folder: No such file"),
    ],
)
async def test_what_keeps_a_host_from_being_used_is_said_with_its_cure(there, wrong, cure, tmp_path):
    async with launching(there, **wrong_options(there, tmp_path)[wrong]) as launcher:
        with pytest.raises(WorkError, match=cure) as told:
            await (await launcher.launch(plan(tmp_path))).ready(WAIT_S)  # what only the far end can know is said there
        assert str(told.value).startswith("replica-0 (")


def wrong_options(there: Sshd, folder: Path) -> dict[str, dict[str, Any]]:
    """For each thing that can be wrong the options of one for which it is."""
    (folder / "known").write_text("")
    host = (there.folder / "known_hosts").read_text().split()[0]
    other = " ".join((there.folder / "user_key.pub").read_text().split()[:2])
    (folder / "changed").write_text(f"{host} {other}\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True, timeout=SECONDS)
    key, known, *more = there.options
    return {
        "key": {"options": [f"IdentityFile={folder / 'key'}", known, *more]},
        "host key": {"options": [key, f"UserKnownHostsFile={folder / 'known'}", *more]},
        "changed host key": {"options": [key, f"UserKnownHostsFile={folder / 'changed'}", *more]},
        "port": {"hosts": "127.0.0.1:1"},
        "name": {"hosts": "no-such-host.invalid"},
        "python": {"python": "/no/such/python"},
        "package": {"python": script(folder / "bare", f'PYTHONPATH= exec {sys.executable} -I -S "$@"')},
        "version": {"python": other_version(folder)},
        "folder": {"folder": "/no/such/folder"},
    }


def test_without_ssh_here_the_cure_is_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"there is no ssh here\. Install OpenSSH's client"):
        make_launcher("ssh", {"hosts": GivenValue("a", "-L hosts")})


@ssh
@limit
async def test_processes_go_where_there_is_room_and_around_a_host_that_fails(there, tmp_path):
    hosts = f"127.0.0.1:1, {there.host} slots=2"
    async with launching(there, hosts=hosts, gpus=2) as launcher:
        assert launcher.capacity == 3
        with pytest.raises(WorkError, match="no sshd listens there"):
            await launcher.launch(plan(tmp_path))
        first, second = [await launcher.launch(plan(tmp_path, index=number)) for number in (1, 2)]
        for process, devices in ((first, "0,1"), (second, "2,3")):
            await process.ready(WAIT_S)
            await until(lambda process=process, devices=devices: f"with devices {devices}" in process.last_words())
        with pytest.raises(WorkError, match="no sshd listens there"):
            await launcher.launch(plan(tmp_path, index=3))  # the others are full
        await first.kill()
        again = await launcher.launch(plan(tmp_path, index=4))
        await again.ready(WAIT_S)


@ssh
@limit
@pytest.mark.parametrize("tunnel", [False, True])
def test_serve_keeps_two_replicas_on_a_host_of_ssh_though_one_is_killed(there, tunnel, tmp_path):
    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{fleet.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return json.load(response)

    def completed() -> str:
        return ask("/v1/completions", {"prompt": "Hello", "max_tokens": 8, "seed": 1})["choices"][0]["text"]

    flags = ["--launcher", "ssh", *there.flags, "-L", "slots=2", "-L", f"tunnel={tunnel}"]
    with serving(
        "--model", "tiny", "--replicas", 2, "-B", "slots=4", "-B", "threads=1", *flags, folder=tmp_path
    ) as fleet:
        until_served(lambda: ask("/stats")["healthy_workers"] == 2, lambda: fleet.log)
        text = completed()
        replicas = [one for one in there.sessions() if "--behind-router" in one.cmdline()]
        assert len(replicas) == 2
        replicas[0].kill()
        assert [completed() for _ in range(5)] == [text] * 5
        until_served(lambda: sum(one["restarts"] for one in ask("/stats")["workers"]) > 0, lambda: fleet.log)
        until_served(lambda: ask("/stats")["healthy_workers"] == 2, lambda: fleet.log)
        assert fleet.end() == 0, fleet.log
    until_served(lambda: not there.sessions(), lambda: str(there.sessions()))


# A launcher of one's own


class Reserved(LocalLauncher):
    """Has a key that a run takes for itself, room for nothing, and no process to show."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        nodes: int = 1

    name = "reserved"
    capacity = 0

    async def launch(self, plan: ProcessPlan) -> LaunchedProcess:
        raise WorkError("the quota is used up. Ask for more.")


class Elsewhere(LocalLauncher):
    """Cannot work here."""

    def check(self) -> None:
        raise UsageError("there is no cluster here. Run this where there is one.")


class Forgetful(LocalLauncher):
    """Forgets the last words of its processes."""

    name = "forgetful"

    async def launch(self, plan: ProcessPlan) -> LaunchedProcess:
        launched = await super().launch(plan)
        launched.failure = lambda why: WorkError("it failed. Try again.")
        return launched


def faults(kind: type[Launcher]) -> dict[str, str]:
    return {one.name: one.detail for one in check_launcher(kind) if not one.ok or one.skipped}


def test_the_kit_names_what_is_wrong_with_a_launcher_and_tries_nothing_where_it_cannot_work():
    found = faults(Reserved)
    assert "its option 'nodes' is a key of -L that a run takes for itself" in found["has options of its own names"]
    assert found[launchers.WHAT].startswith("capacity is 0.")
    assert found[launchers.SERVES] == "the quota is used up. Ask for more."
    assert found[launchers.OWNER].startswith("not tried: 'starts a process that serves")
    for kind, why in (
        (Elsewhere, "it cannot work here: there is no cluster"),
        (ExternalLauncher, "it starts no process"),
    ):
        found = faults(kind)
        assert set(found) == {launchers.WHAT, launchers.SERVES, *launchers.AFTERWARDS}
        assert all(one.startswith(f"not tried: {why}") for one in found.values())


@pytest.mark.thorough
def test_the_kit_finds_our_own_launcher_in_order_and_names_the_faults_of_one_that_is_not():
    assert_ok(check_launcher(LocalLauncher))
    assert set(faults(Forgetful)) == {launchers.FAILS}


@ssh
@limit
@pytest.mark.parametrize("tunnel", [False, True])
def test_the_launcher_by_ssh_keeps_the_contract(there, tunnel):
    assert_ok(check_launcher(SshLauncher, {"hosts": there.host, "options": there.options, "tunnel": tunnel}))


@pytest.mark.thorough
def test_a_new_launcher_is_written_with_a_package_that_keeps_the_contract(acme, gpuinfer, monkeypatch):
    """Its own tests and lint: tests/adding."""
    code, out, _ = gpuinfer("plugins", "new", "launcher", "gentle")
    assert (code, "gpuinfer_gentle/launcher.py" in out) == (0, True)
    monkeypatch.syspath_prepend(str(acme / "gpuinfer-gentle"))
    try:
        assert_ok(check_launcher(importlib.import_module("gpuinfer_gentle.launcher").GentleLauncher))
    finally:
        for name in [one for one in sys.modules if one.startswith("gpuinfer_gentle")]:
            del sys.modules[name]


# A run on hosts


@ssh
@limit
def test_a_run_on_nodes_by_ssh_through_a_tunnel_writes_the_bytes_of_one_machine(there, tmp_path):
    words = [
        "selfplay",
        "--model",
        "rollout",
        "--game",
        "blob",
        "--games",
        "60",
        "--seed",
        "3",
        "--quiet",
        "--no-roofline",
    ]
    nodes = ["--launcher", "ssh", *there.flags, "-L", "slots=2", "-L", "nodes=2", "-L", "tunnel=true"]
    for place, flags in (("one", ["--workers", "1"]), ("nodes", nodes)):
        command = [sys.executable, "-m", "gpuinfer", *words, *flags, "--out", str(tmp_path / place)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
    records = [
        {path.name: path.read_bytes() for path in (tmp_path / place).glob("*.npz")} for place in ("one", "nodes")
    ]
    assert records[0]
    assert records[0] == records[1]
    until_served(lambda: not there.sessions(), lambda: str(there.sessions()))
