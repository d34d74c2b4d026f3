"""Load on a fleet while its replicas are killed, suspended and ended at random; every answer is compared.

As a program, for as long as one likes:

    python tests/fleet/killing.py --requests 5000 --replicas 3
    python tests/fleet/killing.py --requests 5000 --model tiny      the text model in place of stand-ins

Prints what happened as JSON, and exits with 1 when a request failed or an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet_programs as programs
import psutil
import standin_replica
from fleet_programs import Program

from gpuinfer.errors import GpuinferError

DEEDS = {"killed": signal.SIGKILL, "suspended": signal.SIGSTOP, "ended": signal.SIGTERM}
DIFFERENT = 64  # questions


@dataclass
class Outcome:
    requests: int = 0
    streams: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    deeds: Counter[str] = field(default_factory=Counter)
    whole_again_s: float = 0.0
    seconds: float = 0.0
    router: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        return {**self.__dict__, "failed": self.failed[:10], "failures": len(self.failed), "wrong": self.wrong[:5]}


class Load:
    """`requests` in all, `at_once` under way, every third a stream. `said`: what is the answer to each question."""

    def __init__(self, it: Program, requests: int, at_once: int, tokens: int, said: dict[int, str] | None) -> None:
        self._it, self._at_once, self._tokens = it, at_once, tokens
        self._left = iter(range(requests))
        self._said = said
        self.outcome = Outcome()
        self.done = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(self._client())

    async def _client(self) -> None:
        for number in self._left:
            stream = number % 3 == 0
            try:
                said = await (self.streamed if stream else self.whole)(number % DIFFERENT)
            except (GpuinferError, ValueError, KeyError) as error:
                self.outcome.failed.append(f"{'stream' if stream else 'whole'}: {type(error).__name__}: {error}")
            else:
                if self._said is not None and said != self._said[number % DIFFERENT]:
                    self.outcome.wrong.append(f"{said!r}, not {self._said[number % DIFFERENT]!r}")
            self.outcome.requests += 1
            self.outcome.streams += stream
            self.done += 1

    def question(self, number: int) -> dict[str, Any]:
        return {"prompt": f"question {number}", "seed": number, "max_tokens": self._tokens, "temperature": 1.0}

    async def whole(self, number: int) -> str:
        response = await self._it.ask("POST", "/v1/completions", self.question(number))
        if response.status != 200:
            raise ValueError(f"{response.status} {response.body[:200]!r}")
        return str(json.loads(response.body)["choices"][0]["text"])

    async def streamed(self, number: int) -> str:
        asked = json.dumps({**self.question(number), "stream": True}).encode()
        assert self._it.client is not None
        async with self._it.client.stream("POST", "/v1/completions", asked) as response:
            whole = b"".join([part async for part in response])
        if response.status != 200:
            raise ValueError(f"{response.status} {whole[:200]!r}")
        return _text(whole)


def _text(events: bytes) -> str:
    """Of a stream that came to its end."""
    datas = [line.removeprefix("data: ") for line in events.decode().splitlines() if line.startswith("data: ")]
    if not datas or datas[-1] != "[DONE]":
        raise ValueError(f"a stream broke off with {datas[-1:]}")
    told = [json.loads(data) for data in datas[:-1]]
    if errors := [one for one in told if "error" in one]:
        raise ValueError(str(errors[0]))
    return "".join(one["choices"][0]["text"] for one in told if one["choices"])


async def disturb(it: Program, outcome: Outcome, dice: random.Random, every_s: float) -> None:
    """Kill, suspend or end a replica now and then, whatever it is about."""
    while True:
        await asyncio.sleep(dice.expovariate(1 / every_s))
        pids = [pid for worker in await it.workers() if (pid := worker.get("pid")) is not None]
        deed = dice.choice(sorted(DEEDS))
        with contextlib.suppress(ProcessLookupError):
            if pids:
                os.kill(dice.choice(pids), DEEDS[deed])
                outcome.deeds[deed] += 1


async def drive(
    it: Program,
    replicas: int,
    requests: int,
    at_once: int,
    tokens: int,
    every_s: float,
    seed: int,
    *,
    tiny: bool = False,
) -> Outcome:
    """Load and disturbance until all is answered, and then until the pool is whole."""
    first = Load(it, 0, 1, tokens, None)
    said = {
        number: await first.whole(number) if tiny else standin_replica.text(f"question {number}", number, tokens)
        for number in range(DIFFERENT)
    }
    load = Load(it, requests, at_once, tokens, said)
    began = time.monotonic()
    disturbing = asyncio.create_task(disturb(it, load.outcome, random.Random(seed), every_s))
    try:
        await load.run()
    finally:
        disturbing.cancel()
        await asyncio.wait({disturbing})
    if not disturbing.cancelled() and (error := disturbing.exception()) is not None:
        raise error
    outcome = load.outcome
    outcome.seconds = time.monotonic() - began
    ended = time.monotonic()
    await programs.until(lambda: _whole(it, replicas), "the pool is whole again")
    outcome.whole_again_s = time.monotonic() - ended
    workers = await it.workers()
    outcome.router = (await it.json("/stats"))["router"]
    outcome.counters = {key: sum(worker[key] for worker in workers) for key in ("retried", "resumed", "errors")}
    return outcome


async def _whole(it: Program, replicas: int) -> bool:
    """All up, and none of them suspended or gone without anybody's having noticed yet."""
    idle = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    try:
        workers = await it.whole(replicas)
        return workers is not None and all(psutil.Process(one["pid"]).status() not in idle for one in workers)
    except psutil.Error:
        return False


@contextlib.asynccontextmanager
async def of_tiny(folder: Path, replicas: int, model: str = "tiny") -> AsyncIterator[Program]:
    """A fleet of the command itself, with the built-in model of text, or with these."""
    key = folder / "admin.key"
    key.touch(0o600)
    key.write_text(f"{programs.ADMIN_KEY}\n")
    command = [sys.executable, "-m", "gpuinfer", "serve", "--model", model, "--port", "0"]
    command += ["--replicas", str(replicas), "--ready-file", str(folder / "ready.json"), "--admin-key-file", str(key)]
    async with programs.fleet(folder, command=[*command, "-B", "slots=16", "-B", "threads=1"]) as it:
        yield it


async def main(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="killing-") as name:
        folder = Path(name)
        tiny = given.model == "tiny"
        standin = {"answer_s": given.answer_s, "room": 4}
        made = of_tiny(folder, given.replicas) if tiny else programs.fleet(
            folder, replicas=given.replicas, standin=standin, router_processes=given.routers, queue=given.queue
        )  # fmt: skip
        async with made as it:
            sizes = (given.replicas, given.requests, given.at_once, given.tokens, given.every, given.seed)
            outcome = await drive(it, *sizes, tiny=tiny)
            if outcome.failed or outcome.wrong:
                print(it.log, file=sys.stderr)
    print(json.dumps(outcome.told(), indent=1))
    return 1 if outcome.failed or outcome.wrong else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--requests", type=int, default=5000)
    made.add_argument("--replicas", type=int, default=3)
    made.add_argument("--routers", type=int, default=1)
    made.add_argument("--queue", choices=["replica", "global"], default="replica")
    made.add_argument("--at-once", type=int, default=24)
    made.add_argument("--tokens", type=int, default=16)
    made.add_argument("--every", type=float, default=1.5, help="seconds between two deeds, on average")
    made.add_argument("--answer-s", type=float, default=0.05, help="of a stand-in")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--model", choices=["standin", "tiny"], default="standin")
    return made


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parser().parse_args())))
