"""The router before real replicas: a stream goes on with the same text when the one that wrote it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from forking import Forked
from run_router import Router, post, routing

from gpuinfer.fleet.router.protocol import FleetMember
from gpuinfer.fleet.router.shared_counters import MemberCell

START_S = 250.0


@contextlib.asynccontextmanager
async def replicas(count: int, folder: Path) -> AsyncIterator[list[tuple[Forked, FleetMember]]]:
    (folder / "key").write_text("the-key-of-the-replicas\n")
    (folder / "key").chmod(0o600)
    words = ["serve", "--model", "tiny", "-B", "threads=1", "--port", "0", "--behind-router", "--api-key-file", "key"]
    processes = []
    try:
        for number in range(count):
            with (folder / f"log-{number}").open("wb") as log:
                command = ["gpuinfer", *words, "--ready-file", f"ready-{number}"]
                processes.append(Forked(command, folder, stdout=log, stderr=log))
        members = [
            await asyncio.to_thread(ready, folder / f"ready-{number}", number, process)
            for number, process in enumerate(processes)
        ]
        yield list(zip(processes, members, strict=True))
    finally:
        for process in processes:
            process.kill()
            process.wait(START_S)


def ready(file: Path, number: int, process: Forked) -> FleetMember:
    end = time.monotonic() + START_S
    while not file.exists():
        over = time.monotonic() > end or process.poll() is not None
        assert not over, (file.parent / f"log-{number}").read_text()
        time.sleep(0.1)
    told = json.loads(file.read_text())
    return FleetMember(number, told["host"], told["port"], "up", key="the-key-of-the-replicas")


def ask(samples: int) -> bytes:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 1500, "seed": 5, "temperature": 1.0, "stream": True}
    return json.dumps({**body, "n": samples, "stream_options": {"include_usage": True}}).encode()


def told(body: bytes) -> tuple[dict[int, str], dict[int, str], dict]:
    """The text of each sample, why each ended, and the usage, but for what a replica happened to have in its cache."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage: dict = {}
    assert body.endswith(b"data: [DONE]\n\n")
    for data in re.findall(rb"(?m)^data: (\{.*)$", body):
        event = json.loads(data)
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons, {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


async def undisturbed(router: Router, samples: int) -> bytes:
    return (await router.post(ask(samples))).body


@pytest.mark.thorough
@pytest.mark.parametrize("samples", [1, 3])
async def test_a_stream_goes_on_with_the_same_text_when_its_replica_is_killed(tmp_path, samples):
    async with replicas(2, tmp_path) as fleet, routing() as router:
        router.roster(*(member for _, member in fleet))
        expected = await undisturbed(router, samples)
        connection = await router.connect()
        await connection.send(post(ask(samples)))
        head = await connection.head()
        body = await connection.chunk()
        fleet[int(head.route["replica"])][0].kill()
        while piece := await connection.chunk():
            body += piece
        connection.close()
        assert told(body) == told(expected)
        assert sum(router.cell(slot, MemberCell.RESUMED) for slot in (0, 1)) == 1, body[-3000:]
