"""Two models in one server against two servers with half the cores each: closed loops of clients, in turns.

    python benchmarks/models.py [--pair rows|text|mixed] [--rounds 5] [--seconds 4] [--clients 4] [--ways one,at-once]

`one` serves both models (`gpuinfer serve --model a=…,b=…`), in turns or at once, whichever it finds to be faster;
`turns` gives all cores to each forward (`-B threads=` their number), `threads=1` one, and `at-once` is `-B gate=false`;
`halves` are two servers, each held to half the cores (`taskset`).
Blocks of 256 rows go to `blobnet` as safetensors, prompts of 32 tokens for 64 more to `--text`. All servers are up all
the time, and asked one way after the other. Shown is, of each way, the rate of each model (rows or tokens a second) in
the median, the cores that its servers had, and the mean over the models of the ratio to `halves`, round by round; then
the same for each second of processor time that the servers took, which others on the machine disturb less. `--ways`
takes some of them alone (without `halves` there are no ratios), `--device cuda` puts the models on a GPU, and `--json`
writes the rates down.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gpuinfer.http.client import HttpClient
from gpuinfer.models.row_format import MEDIA_TYPE, rows_to_body

FEATURES, ROWS, TOKENS = 256, 256, 64
PAIRS = {"rows": ("rows", "rows"), "text": ("text", "text"), "mixed": ("text", "rows")}
COMMON = ("--features", str(FEATURES), "-B", "slots=16", "--quiet")
ALL = f"threads={len(os.sched_getaffinity(0))}"
WAYS = {"one": (), "turns": ("-B", ALL), "threads=1": ("-B", "threads=1"), "at-once": ("-B", "gate=false")}


class Server:
    """One of ours, on these cores, or on all."""

    def __init__(self, models: str, folder: Path, words: Sequence[str] = (), cores: Sequence[int] = ()) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        held = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        self.ready = folder / f"{self.port}.json"
        command = [*held, sys.executable, "-m", "gpuinfer", "serve", "--model", models, "--port", str(self.port)]
        with (folder / f"{self.port}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *COMMON, *words, "--ready-file", str(self.ready)], stdout=log, stderr=log
            )

    def cpu_s(self) -> float:
        """Processor time that it has taken."""
        spent = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self) -> None:
        while not self.ready.exists():
            if self.process.poll() is not None:
                raise SystemExit("a server did not come up")
            time.sleep(0.2)


class Asked:
    """One model by one way: closed loops of clients."""

    def __init__(self, server: Server, name: str, kind: str) -> None:
        self.server = server
        self.url, self.kind = f"http://127.0.0.1:{server.port}", kind
        if kind == "rows":
            rows = np.sin(np.arange(ROWS * FEATURES, dtype=np.float32)).reshape(ROWS, FEATURES)
            self.path, self.body = f"/v1/evaluate?model={name}", rows_to_body(np.abs(rows))
            self.head, self.worth = [("Content-Type", MEDIA_TYPE)], ROWS
        else:
            asked = {"model": name, "prompt": list(range(3, 35)), "max_tokens": TOKENS, "ignore_eos": True}
            self.path, self.body = "/v1/completions", json.dumps(asked).encode()
            self.head, self.worth = [("Content-Type", "application/json")], TOKENS

    async def rate(self, clients: int, seconds: float) -> float:
        """Rows or tokens a second."""
        client = HttpClient(self.url, connections=clients, timeout_s=120)
        until, done = time.perf_counter() + seconds, 0

        async def loop() -> None:
            nonlocal done
            while time.perf_counter() < until:
                response = await client.request("POST", self.path, self.body, self.head)
                if response.status != 200:
                    raise SystemExit(f"{self.path}: {response.body[:200]!r}")
                done += self.worth

        began = time.perf_counter()
        try:
            await asyncio.gather(*(loop() for _ in range(clients)))
        finally:
            await client.close()
        return done / (time.perf_counter() - began)


async def together(asked: Sequence[Asked], clients: int, seconds: float) -> tuple[list[float], float]:
    """The rate of each, and the cores that the servers had."""
    servers = {one.server for one in asked}
    before, began = sum(one.cpu_s() for one in servers), time.perf_counter()
    rates = list(await asyncio.gather(*(one.rate(clients, seconds) for one in asked)))
    return rates, (sum(one.cpu_s() for one in servers) - before) / (time.perf_counter() - began)


@contextlib.contextmanager
def ways(pair: Sequence[str], text: str, wanted: Sequence[str], device: str) -> Iterator[dict[str, list[Asked]]]:
    places = {"rows": "blobnet", "text": text}
    names = ["a", "b"]
    both = ",".join(f"{name}={places[kind]}" for name, kind in zip(names, pair, strict=True))
    cores = sorted(os.sched_getaffinity(0))
    halves = (cores[: len(cores) // 2], cores[len(cores) // 2 :])
    with tempfile.TemporaryDirectory(prefix="models-") as told:
        folder, on = Path(told), ("--device", device)
        found = {way: [Server(both, folder, [*on, *words])] * 2 for way, words in WAYS.items() if way in wanted}
        if "halves" in wanted:
            found["halves"] = [
                Server(f"{name}={places[kind]}", folder, on, half)
                for name, kind, half in zip(names, pair, halves, strict=True)
            ]
        try:
            for servers in found.values():
                for one in servers:
                    one.wait()
            yield {
                way: [Asked(one, name, kind) for one, name, kind in zip(servers, names, pair, strict=True)]
                for way, servers in found.items()
            }
        finally:
            for servers in found.values():
                for one in servers:
                    one.process.send_signal(signal.SIGTERM)
            for servers in found.values():
                for one in servers:
                    one.process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, default="rows")
    parser.add_argument("--text", default="tiny", help="the model of text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=4, help="of each model")
    parser.add_argument("--ways", default=",".join(("halves", *WAYS)), help="which")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="a file for the median rates of each model, by way")
    own = parser.parse_args()
    wanted = own.ways.split(",")
    if unknown := [way for way in wanted if way not in ("halves", *WAYS)]:
        parser.error(f"no way {', '.join(unknown)}. There are halves, {', '.join(WAYS)}.")
    with ways(PAIRS[own.pair], own.text, wanted, own.device) as found:
        rates: dict[str, list[list[float]]] = {way: [] for way in found}
        cores: dict[str, list[float]] = {way: [] for way in found}
        for number in range(own.rounds + 1):
            for way, asked in found.items():
                measured, had = asyncio.run(together(asked, own.clients, own.seconds if number else 1.0))
                if number:  # the first warms up
                    rates[way].append(measured)
                    cores[way].append(had)
    medians = {
        way: [statistics.median(column) for column in zip(*rounds, strict=True)] for way, rounds in rates.items()
    }
    if own.json is not None:
        own.json.write_text(json.dumps(medians, indent=1) + "\n")
    for way, rounds in rates.items():
        each = ", ".join(f"{rate:,.0f}" for rate in medians[way])
        had = f"{way:>10}: {each}/s on {statistics.median(cores[way]):.2f} cores"
        if "halves" not in rates:
            print(had)
            continue
        ratios = [
            statistics.fmean(mine / theirs for mine, theirs in zip(one, other, strict=True))
            for one, other in zip(rounds, rates["halves"], strict=True)
        ]
        paid = [ratio * all_of / own for ratio, own, all_of in zip(ratios, cores[way], cores["halves"], strict=True)]
        print(f"{had}, {spread(ratios)}; paid {spread(paid)}")


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    main()
