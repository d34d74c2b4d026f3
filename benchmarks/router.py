"""The router beside other proxies and beside none: requests a second, first bytes of streams, memory.

usage: python benchmarks/router.py TMPDIR [--nginx PATH] [--wrk PATH] [--vllm-router PATH] [--rounds N] [--seconds S]

Needs nginx (for the upstreams, and as a peer) and wrk. All proxies stand before the same two upstreams, which answer at
once, and take turns; a ratio is of the medians of its column. Without a path to vllm-router that row is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import resource
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from router_streams import Streamed, measured, open_idle, started

from gpuinfer.fleet.router.processes import Routers
from gpuinfer.fleet.router.protocol import FleetMember, Roster, RouterConfig
from gpuinfer.http.network import run_loop

UPSTREAMS = 9501, 9502
PEERS = {"nginx": 9503, "vllm-router": 9504}
ANSWER = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"tiny","choices":[{"index":0,"message":{"role":'
    '"assistant","content":"hello there"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":3,'
    '"total_tokens":13}}'
)
NGINX = """
worker_processes 1; worker_rlimit_nofile 65536; error_log {tmp}/{name}.err; pid {tmp}/{name}.pid; daemon off;
events {{ worker_connections 16384; }}
http {{ access_log off; keepalive_requests 1000000000; keepalive_timeout 600; {rest} }}
"""
SERVES = """
server {{ listen 127.0.0.1:9501 backlog=4096; listen 127.0.0.1:9502 backlog=4096; default_type application/json;
 location / {{ return 200 '{{"status":"ok"}}'; }}
 location /v1/chat/completions {{ client_body_buffer_size 64k; return 200 '{answer}'; }} }}
"""
RELAYS = """
upstream u { least_conn; server 127.0.0.1:9501; server 127.0.0.1:9502; keepalive 64; }
server { listen 127.0.0.1:9503 backlog=4096;
 location / { proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ""; } }
"""
POST = """
wrk.method="POST"; wrk.headers["Content-Type"]="application/json"
wrk.body='{"model":"tiny","messages":[{"role":"user","content":"Hello, please tell me something about GPU inference \
servers."}],"max_tokens":16}'
"""
VARIED = """
wrk.method="POST"; n=0
function request()
  n=n+1
  return wrk.format("POST", nil, {["Content-Type"]="application/json", ["X-Request-Id"]="r" .. n,
    ["User-Agent"]="OpenAI/Python 2.1.0", ["Accept"]="application/json", ["Accept-Encoding"]="gzip, deflate",
    ["Authorization"]="Bearer none", ["X-Stainless-Lang"]="python", ["X-Stainless-OS"]="Linux",
    ["X-Stainless-Arch"]="x64", ["X-Stainless-Runtime"]="CPython"}, '{"messages":[]}')
end
"""


@dataclass(frozen=True)
class Seen:
    """What wrk saw."""

    rate: float
    p99_ms: float
    errors: int
    cpu_us: float  # of the proxy, a request: what a busy machine changes least


@dataclass
class Bench:
    tmp: Path
    wrk: str
    seconds: float
    pids: dict[int, int]  # port → the process that serves it

    def load(self, port: int, connections: int, script: str = "post") -> Seen:
        words = [
            self.wrk,
            "-t1",
            f"-c{connections}",
            f"-d{self.seconds:g}s",
            "-s",
            f"{self.tmp}/{script}.lua",
            "--latency",
        ]
        before = cpu_s(self.pids.get(port))
        told = subprocess.run(
            [*words, "--timeout", "10s", f"http://127.0.0.1:{port}/v1/chat/completions"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        took = cpu_s(self.pids.get(port)) - before
        requests = int(_found(r"(\d+) requests in", told))
        rate = float(_found(r"Requests/sec:\s+([\d.]+)", told))
        number, unit = re.search(r"99%\s+([\d.]+)(us|ms|s)", told).groups()  # type: ignore[union-attr]
        errors = sum(map(int, re.findall(r"(?:connect|read|write|timeout|responses:) (\d+)", told)))
        return Seen(rate, float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit], errors, 1e6 * took / requests)

    def alternating(self, ports: dict[str, int], rounds: int, connections: int, script: str) -> dict[str, list[Seen]]:
        seen: dict[str, list[Seen]] = {name: [] for name in ports}
        for _ in range(rounds):
            for name, port in ports.items():
                seen[name].append(self.load(port, connections, script))
        return seen


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"wrk said:\n{text}")
    return found[1]


def cpu_s(pid: int | None) -> float:
    """What a process and its children have used."""
    if pid is None:
        return 0.0
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


@contextlib.contextmanager
def running(*commands: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(command, **quiet) for command in commands]  # type: ignore[call-overload]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)


def until_there(port: int) -> None:
    end = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
            return
        if time.monotonic() > end:
            raise SystemExit(f"nobody serves on port {port}. See what was started.")
        time.sleep(0.2)


def rates(bench: Bench, ports: dict[str, int], rounds: int) -> None:
    for script, what in (("post", "one request again and again"), ("varied", "heads that differ, with ten headers")):
        seen = bench.alternating(ports, rounds, 32, script)
        ours = statistics.median(one.rate for one in seen["ours"])
        print(f"\n{what}: 32 connections, {rounds} rounds of {bench.seconds:g} s")
        for name, all_of_it in seen.items():
            rate = statistics.median(one.rate for one in all_of_it)
            p99 = statistics.median(one.p99_ms for one in all_of_it)
            errors = sum(one.errors for one in all_of_it)
            cpu = statistics.median(one.cpu_us for one in all_of_it)
            print(
                f"  {name:12} {rate:9,.0f} req/s  p99 {p99:6.2f} ms  errors {errors}  CPU {cpu:5.1f} µs/req"
                f"  ours/this {ours / rate:5.2f}"
            )


def crowds(bench: Bench, port: int, rounds: int) -> None:
    print("\nmany connections, ours alone")
    seen = {count: [] for count in (32, 1000, 4000)}
    for _ in range(rounds):
        for count in seen:
            seen[count].append(bench.load(port, count))
    few = statistics.median(one.rate for one in seen[32])
    for count, all_of_it in seen.items():
        rate = statistics.median(one.rate for one in all_of_it)
        p99 = statistics.median(one.p99_ms for one in all_of_it)
        errors = sum(one.errors for one in all_of_it)
        print(
            f"  {count:5} connections {rate:9,.0f} req/s  p99 {p99:7.2f} ms  errors {errors}  of 32's {rate / few:5.2f}"
        )


async def streams(routers: Routers, port: int, rounds: int) -> None:
    for gap_s, what in ((0.02, "an event every 20 ms"), (0.0, "as fast as they go")):
        process, upstream = await asyncio.to_thread(started, 100, gap_s)
        routers.update(Roster(next(versions), (FleetMember(9, "127.0.0.1", upstream, "up"),)))
        seen = {"direct": [], "ours": []}
        for _ in range(rounds):
            for name, target in (("direct", upstream), ("ours", port)):
                seen[name].append(await asyncio.to_thread(measured, target, 200, 100, 0.002 if gap_s else 0.0))
        print(f"\n200 streams of 100 events, {what}; {rounds} rounds")
        middle = {name: medians(of_it) for name, of_it in seen.items()}
        for name, (p50, p99, rate, lost) in middle.items():
            print(f"  {name:7} first event p50 {p50:7.2f} p99 {p99:7.2f} ms  {rate:9,.0f} events/s  lost {lost:g}")
        print(
            f"  first event p99 {middle['ours'][1] - middle['direct'][1]:+.2f} ms,"
            f" events/s {middle['ours'][2] / middle['direct'][2]:.2f} of direct"
        )
        process.kill()


def medians(seen: Sequence[Streamed]) -> list[float]:
    return [statistics.median(column) for column in zip(*(vars(one).values() for one in seen), strict=True)]


async def memory(routers: Routers, port: int) -> None:
    process, upstream = await asyncio.to_thread(started, -1, 0.0)
    routers.update(Roster(next(versions), (FleetMember(10, "127.0.0.1", upstream, "up"),)))
    (pid,) = routers.pids()
    before = psutil.Process(pid).memory_info().rss / 2**20
    readers = await open_idle(port, 4000)
    after = psutil.Process(pid).memory_info().rss / 2**20
    print(f"\n4,000 idle streams: {after:.0f} MB, {before:.0f} MB before them")
    for reader in readers:
        reader.transport.abort()
    process.kill()


def _versions() -> Iterator[int]:
    version = 0
    while True:
        yield (version := version + 1)


versions = _versions()


async def all_of_it(given: argparse.Namespace, bench: Bench) -> None:
    config = RouterConfig("127.0.0.1", 0, f"{bench.tmp}/nobody.sock", "key")
    routers = Routers(config, lambda event: None)
    port = await routers.start()
    members = tuple(FleetMember(number, "127.0.0.1", upstream, "up") for number, upstream in enumerate(UPSTREAMS))
    routers.update(Roster(next(versions), members))
    bench.pids[port] = routers.pids()[0]
    ports = {name: PEERS[name] for name in PEERS if name == "nginx" or given.vllm_router} | {"ours": port}
    try:
        await asyncio.to_thread(rates, bench, ports, given.rounds)
        await asyncio.to_thread(crowds, bench, port, given.rounds)
        await streams(routers, port, given.rounds)
        await memory(routers, port)
        print(f"\n{routers.totals()}")
    finally:
        await routers.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tmp", type=Path)
    parser.add_argument("--nginx", default="nginx")
    parser.add_argument("--wrk", default="wrk")
    parser.add_argument("--vllm-router", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tmp = given.tmp.resolve()
    tmp.mkdir(parents=True, exist_ok=True)
    (tmp / "post.lua").write_text(POST)
    (tmp / "varied.lua").write_text(VARIED)
    (tmp / "up.conf").write_text(NGINX.format(tmp=tmp, name="up", rest=SERVES.format(answer=ANSWER)))
    (tmp / "px.conf").write_text(NGINX.format(tmp=tmp, name="px", rest=RELAYS))
    commands = [[given.nginx, "-c", f"{tmp}/{name}.conf"] for name in ("up", "px")]
    if given.vllm_router:
        urls = [f"http://127.0.0.1:{port}" for port in UPSTREAMS]
        commands.append([given.vllm_router, "--worker-urls", *urls, "--host", "127.0.0.1", "--port", "9504"])
        commands[-1] += ["--policy", "round_robin", "--prometheus-port", "9505"]
    with running(*commands) as processes:
        for port in (*UPSTREAMS, *(PEERS.values() if given.vllm_router else [PEERS["nginx"]])):
            until_there(port)
        pids = dict(zip(PEERS.values(), (process.pid for process in processes[1:]), strict=False))
        run_loop(all_of_it(given, Bench(tmp, given.wrk, given.seconds, pids)))


if __name__ == "__main__":
    main()
