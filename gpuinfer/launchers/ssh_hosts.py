"""The hosts of the launcher `ssh`: how a list of them is written, which has room, and what its complaints mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpuinfer.errors import UsageError

USER, NAME, PORT = r"(?P<user>[A-Za-z0-9_][\w.+-]*)@", r"[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:.]+\]", r":(?P<port>\d{1,5})"
HOST = re.compile(f"(?:{USER})?(?P<host>{NAME})(?:{PORT})?")
SLOTS = re.compile(r"slots=(\d{1,4})")
FORM = "Write USER@HOST:PORT slots=N, of which HOST alone is enough."


@dataclass
class SshHost:
    """One host, and which of its slots are taken."""

    name: str  # as ssh takes it: user@host, or an alias of its configuration
    port: int | None = None
    slots: int = 1
    taken: set[int] = field(default_factory=set)
    address: str = ""  # what ssh connects to, once that is known
    failed: int = 0  # number of the last launch that failed here; 0: none has

    @property
    def words(self) -> tuple[str, ...]:
        """The end of a command line of ssh, before the remote command."""
        port = () if self.port is None else ("-p", str(self.port))
        return (*port, "--", self.name)

    @property
    def typed(self) -> str:
        """The same as people type it behind ssh or ssh-copy-id."""
        return self.name if self.port is None else f"-p {self.port} {self.name}"

    @property
    def known_as(self) -> str:
        """Its name in files of known hosts."""
        name = self.name.rpartition("@")[2]
        return name if self.port in (None, 22) else f"'[{name}]:{self.port}'"

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


def read_hosts(text: str, slots: int) -> list[SshHost]:
    """`a,user@b:2222 slots=4`, or `@FILE` with a host a line. `slots`: of a host without. Raises `UsageError`."""
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
            raise UsageError(f"-L hosts={text}: {why}. Name a file with a host a line.") from None
    else:
        lines = text.split(",")
    found = [_host(words, slots, text) for line in lines if (words := line.partition("#")[0].split())]
    if not found:
        raise UsageError(f"-L hosts={text} names no host. {FORM}")
    twice = {str(one) for one in found if [str(other) for other in found].count(str(one)) > 1}
    if twice:
        raise UsageError(f"-L hosts={text} names {', '.join(sorted(twice))} twice. Write it once, with slots=N.")
    return found


def _host(words: Sequence[str], slots: int, text: str) -> SshHost:
    match = HOST.fullmatch(words[0])
    port = int(match["port"]) if match and match["port"] else None
    own = SLOTS.fullmatch(words[1]) if len(words) == 2 else None
    if not match or len(words) > 2 or (len(words) == 2 and not own) or port == 0 or (port or 0) > 65_535:
        raise UsageError(f"-L hosts={text}: '{' '.join(words)}' is no host. {FORM}")
    room = int(own[1]) if own else slots
    if not room:
        raise UsageError(f"-L hosts={text}: '{' '.join(words)}' has no slot. Give it one, or leave it out.")
    user = f"{match['user']}@" if match["user"] else ""
    return SshHost(f"{user}{match['host'].strip('[]')}", port, room)


def choose_host(hosts: Sequence[SshHost]) -> tuple[SshHost, int] | None:
    """The host for the next process, and its slot there: the one with the most room, of equals the first. Where a
    launch has failed comes after the others, the last failure last. None: all are full.
    """
    free = [one for one in hosts if len(one.taken) < one.slots]
    if not free:
        return None
    chosen = min(free, key=lambda one: (one.failed, len(one.taken) / one.slots))
    return chosen, min(set(range(chosen.slots)) - chosen.taken)


COMPLAINTS = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one that is known here: the host is new, or another one answers. If you know why, "
        "forget the old key: ssh-keygen -R {known}",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its host key is not known here. Connect once by hand (ssh {typed}) and compare the key, or take it as it "
        "comes: -L options=StrictHostKeyChecking=accept-new",
    ),
    (
        r"Permission denied|Too many authentication failures|no mutual signature",
        "it does not let you in without a password. Install your key there (ssh-copy-id {typed}), load it (ssh-add) "
        "or name it: -L options=IdentityFile=FILE",
    ),
    (r"Could not resolve hostname", "its name is not known here. Correct -L hosts, or give its address."),
    (
        r"[Cc]onnection refused",
        "no sshd listens there. Start it, or name its port: -L hosts=HOST:PORT",
    ),
    (
        r"timed out|[Nn]o route to host|[Nn]etwork is unreachable",
        "it cannot be reached. See whether it is up, and the network between (ssh {typed}).",
    ),
    (
        r"No module named '?gpuinfer\.",
        "there is an older gpuinfer in {python} there. Install this one: pip install gpuinfer=={version}",
    ),
    (
        r"No module named '?(gpuinfer|\w+)",
        "{python} there has no gpuinfer, or not all of it. Install it (pip install gpuinfer=={version}), or name the "
        "Python that has it: -L python=PATH",
    ),
    (
        r"(not found|No such file or directory|[Pp]ermission denied|Unknown command)",
        "there is no {python}. Name the Python that has gpuinfer there: -L python=PATH",
    ),
)
"""What ssh, a shell or Python says when nothing comes about, and what it means; the first that fits."""


def explain_complaint(text: str, host: SshHost, python: str, version: str) -> str:
    """What kept a connection from coming about, with the cure; words that are not known are quoted."""
    for pattern, meaning in COMPLAINTS:
        if re.search(pattern, text):
            return meaning.format(typed=host.typed, known=host.known_as, python=python, version=version)
    said = f' It printed: "{text}".' if text else " It printed nothing."
    return f"the connection ended before gpuinfer came up there.{said} Try by hand: ssh {host.typed} {python} --version"
