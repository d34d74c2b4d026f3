"""A unit of systemd for a server, a node or another command that runs for long."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from gpuinfer.errors import UsageError

USER = re.compile(r"[a-z_][a-z0-9_-]{0,30}")  # as systemd takes them (systemd.io/USER_NAMES)
ROOM_S = 15  # added to --drain-timeout, until what is left is killed
PLAIN = re.compile(r"[A-Za-z0-9_@:=,./+-]+")


def render_unit(program: str, words: Sequence[str], user: str, drain_s: float, source: str) -> str:
    """The unit that runs `program` with these words. `source`: the command line that wrote it. Raises `UsageError`."""
    if not USER.fullmatch(user):
        raise UsageError(f"--user {user}: no user for a service. Write small letters, digits, '-' and '_', at most 31.")
    if not program.startswith("/"):
        raise UsageError(f"--program {program}: a unit names whole paths. Write it from /, as `which gpuinfer` does.")
    if unprintable := next((word for word in (program, *words) if not word.isprintable()), None):
        raise UsageError(f"{unprintable!r} has characters that a unit cannot hold. Write it without.")
    command = " ".join(map(_quoted, (program, *words)))
    return TEMPLATE.format(
        source=source if source.isprintable() else "gpuinfer fleet systemd",
        command=command,
        user=user,
        stop_s=math.ceil(drain_s) + ROOM_S,
    )


def _quoted(word: str) -> str:
    """One word of ExecStart: % begins a specifier, $ a variable, quotes are as in C (systemd.service(5))."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    if PLAIN.fullmatch(escaped):
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


TEMPLATE = """\
# Written by {source}
# As root: useradd --system {user}; put this to /etc/systemd/system/gpuinfer.service; systemctl daemon-reload;
#          systemctl enable --now gpuinfer. Files of keys and settings: chown {user}, chmod 600.
[Unit]
Description=gpuinfer serves a model over HTTP
After=network-online.target
Wants=network-online.target

[Service]
Type=exec
User={user}
ExecStart={command}
# Of a fleet the first process alone is signalled to end: it lets requests finish and then ends the others.
KillMode=mixed
TimeoutStopSec={stop_s}
Restart=on-failure
RestartSec=5
# Bad settings stay bad; 3 says that requests were broken off at the end.
RestartPreventExitStatus=2
SuccessExitStatus=3
LimitNOFILE=65536
StateDirectory=gpuinfer
CacheDirectory=gpuinfer
WorkingDirectory=/var/lib/gpuinfer
Environment=XDG_CACHE_HOME=/var/cache/gpuinfer HOME=/var/lib/gpuinfer

# Neither PrivateDevices, which hides GPUs, nor MemoryDenyWriteExecute, which forbids compiled kernels.
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
CapabilityBoundingSet=
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
UMask=0077

[Install]
WantedBy=multi-user.target
"""
