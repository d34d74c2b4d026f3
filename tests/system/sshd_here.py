"""A real sshd on loopback, for tests: configuration, keys and port of its own, so that it meets no other one.

Needs the Debian package openssh-server. It runs as the user of the tests and lets that user in by a key of its own.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ports import free_port

SECONDS = 60
ROOT = Path(__file__).parents[2]
CONFIGURATION = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
SetEnv PYTHONPATH={path} OMP_NUM_THREADS=1
{more}
"""


@dataclass
class Sshd:
    """One that listens at `port`."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def host(self) -> str:
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    @property
    def options(self) -> list[str]:
        """Of its client: the key, and where the host's key is known."""
        known = self.folder / "known_hosts"
        return [f"IdentityFile={self.folder}/user_key", f"UserKnownHostsFile={known}", "IdentitiesOnly=yes"]

    @property
    def flags(self) -> list[str]:
        """The same at our command line."""
        values = [f"hosts={self.host}", *(f"options={one}" for one in self.options)]
        return [word for one in values for word in ("-L", one)]

    def sessions(self) -> list[psutil.Process]:
        """All that it has started: connections, and what runs in them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


@contextlib.contextmanager
def running(more: str = "", path: str = "") -> Iterator[Sshd]:
    """Up, and ended with its sessions at the end. `more`: lines of its configuration; `path`: first of its Python's."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("needs openssh-server")
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # where it has no privileges; Debian's service makes it
    folder = Path(tempfile.mkdtemp(prefix="sshd-"))
    try:
        for name in ("host_key", "user_key"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, timeout=SECONDS)
        port = free_port()
        paths = os.pathsep.join(filter(None, [path, str(ROOT)]))
        (folder / "config").write_text(CONFIGURATION.format(port=port, folder=folder, path=paths, more=more))
        key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
        with (folder / "log").open("wb") as log:
            words = [program, "-D", "-e", "-f", str(folder / "config")]
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True)
        made = Sshd(folder, port, process)
        try:
            _wait_for(port, folder / "log")
            yield made
        finally:
            for one in [*made.sessions()[::-1], psutil.Process(process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
            process.wait(SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(port: int, log: Path) -> None:
    until = time.monotonic() + SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > until:
                raise AssertionError(f"sshd did not come up:\n{log.read_text()}") from None
            time.sleep(0.05)
        else:
            return
