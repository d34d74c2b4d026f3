"""A fleet as a configuration of HAProxy, for those who have to put that in front.

What it cannot say of a fleet is left out: it counts connections, not rows or tokens, beginnings of prompts stick to no
replica, and a stream that has begun breaks off with its replica.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuinfer.errors import UsageError

BALANCE = {"least-loaded": "leastconn", "round-robin": "roundrobin", "power-of-two": "random(2)", "random": "random(1)"}
STICKY = "sticky"
SESSION = "X-Gpuinfer-Session"
HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.\-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,512}")  # what needs no escape between quotes


@dataclass(frozen=True, slots=True)
class HaproxyServer:
    """One replica. `most`: requests that it gets at once, the others wait in HAProxy."""

    host: str
    port: int
    most: int = 256

    @classmethod
    def of(cls, text: str, most: int = 256) -> HaproxyServer:
        """`HOST:PORT`, or a URL of http. Raises `UsageError`."""
        host, _, port = text.removeprefix("http://").rstrip("/").rpartition(":")
        if not HOST.fullmatch(host) or not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65_536):
            raise UsageError(f"'{text}' is no address of a replica. Write HOST:PORT, such as 127.0.0.1:8001.")
        return cls(host, int(port), most)


@dataclass(frozen=True, slots=True)
class HaproxyPlan:
    """What stands before the replicas. Times in seconds, as the router's own have them."""

    bind: str = "127.0.0.1:8000"
    routing: str = "least-loaded"
    key: str | None = None  # that replicas want; HAProxy then says it, and lets everybody in who reaches it
    timeout_s: float = 300.0
    connect_s: float = 2.0
    slow_start_s: float = 10.0
    connections: int = 8192
    retries: int = 3


def render_haproxy(targets: Sequence[HaproxyServer], front: HaproxyPlan) -> str:
    """The configuration. Raises `UsageError` for what has no place in one."""
    if not targets:
        raise UsageError("there is no replica to write down. Give --worker HOST:PORT, or --url of a fleet that runs.")
    if front.routing not in (*BALANCE, STICKY):
        raise UsageError(f"HAProxy has no '{front.routing}'. Choose from {', '.join((*BALANCE, STICKY))}.")
    if front.key is not None and not KEY.fullmatch(front.key):
        raise UsageError("the replicas' key has characters that HAProxy's configuration cannot hold. Make another.")
    found = re.fullmatch(r"(\S*):(\d{1,5})", front.bind)
    if found is None or not (found[1] in ("", "*") or HOST.fullmatch(found[1])) or not 0 < int(found[2]) < 65_536:
        raise UsageError(f"--bind {front.bind} is no address. Write HOST:PORT, such as 127.0.0.1:8000.")
    sticky = front.routing == STICKY
    backend = [f"    balance {BALANCE['least-loaded'] if sticky else BALANCE[front.routing]}"]
    if sticky:
        backend.append("    stick-table type string len 128 size 200k expire 30m")
        backend.append(f"    stick on req.hdr({SESSION}) if {{ req.hdr({SESSION}) -m found }}")
    if front.key is not None:
        backend.append(f'    http-request set-header Authorization "Bearer {front.key}"')
    seconds = {"connect": front.connect_s, "timeout": front.timeout_s, "slow_start": front.slow_start_s}
    numbers = {name: f"{max(1, round(one * 1000))}ms" for name, one in seconds.items()}
    lines = [
        f"    server replica-{number} {target.host}:{target.port} maxconn {target.most}"
        for number, target in enumerate(targets)
    ]
    return TEMPLATE.format(front=front, backend="\n".join(backend), servers="\n".join(lines), **numbers)


TEMPLATE = """\
# Written by `gpuinfer fleet haproxy-config`. Check it with: haproxy -c -f FILE
global
    log stderr format raw local0 notice
    tune.bufsize 65536  # a request that is asked elsewhere is kept whole: its head and its body

defaults
    mode http
    log global
    option http-keep-alive
    option http-buffer-request  # so that a request can go to another replica
    timeout connect {connect}
    timeout http-request 10s
    timeout http-keep-alive 75s
    timeout client {timeout}
    timeout server {timeout}  # without a byte: streams live as long as they speak
    timeout queue 30s
    retries {front.retries}
    option redispatch 1
    retry-on conn-failure  # nothing has reached the replica then

frontend gpuinfer
    bind {front.bind}
    maxconn {front.connections}
    http-request del-header X-Gpuinfer-Begun
    http-request del-header X-Gpuinfer-Created
    default_backend replicas

backend replicas
{backend}
    option httpchk
    http-check send meth GET uri /health hdr Host localhost
    http-check expect status 200
    default-server check inter 500ms fastinter 200ms fall 6 rise 1 slowstart {slow_start}
{servers}
"""
