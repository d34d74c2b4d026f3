"""The FastAPI service of `examples/`: what it refuses, and under load, started by uvicorn as its users do."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))

from fastapi_service import Images, service  # noqa: E402 (found by the line above)

CONNECTIONS, REQUESTS = 32, 20
PATIENCE_S = 120.0
IMAGE = torch.full((3, 16, 16), 0.5).tolist()


class Gate:
    """A function of a batch that holds all batches but that of ones, on which it is tried, until `go` is set."""

    def __init__(self):
        self.go = threading.Event()

    def __call__(self, rows):
        if bool((rows == 0.5).any()):
            assert self.go.wait(PATIENCE_S)
        return rows.flatten(1)[:, :10]


@contextlib.asynccontextmanager
async def client_of(app):
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=PATIENCE_S) as client:
            yield client


REFUSED = {
    "too late": ({"pixels": IMAGE}, {"X-Timeout": "1us"}, 504, "no answer within"),
    "no time": ({"pixels": IMAGE}, {"X-Timeout": "soon"}, 422, "timeout='soon' is no time"),
    "no priority": ({"pixels": IMAGE}, {"X-Priority": "urgent"}, 422, "high"),
    "too small": ({"pixels": [[[0.5] * 8] * 16] * 3}, {}, 422, "float32 [3, 16, 8]"),
    "ragged": ({"pixels": [[[0.5] * 16, [1.0]]]}, {}, 422, "a row is made of"),
    "no pixels": ({}, {}, 422, "Field required"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_answered_has_a_status_and_a_reason(name):
    body, headers, status, reason = REFUSED[name]
    async with client_of(service(Images())) as client:
        answer = await client.post("/predict", json=body, headers=headers)
    assert answer.status_code == status
    assert reason in json.dumps(answer.json())


async def test_a_full_queue_says_when_to_come_again():
    gate = Gate()
    async with client_of(service(gate, max_queue_rows=2, max_rows=1)) as client:
        asked = [
            asyncio.ensure_future(client.post("/predict", json={"pixels": IMAGE}, headers={"X-Timeout": "60s"}))
            for _ in range(6)
        ]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)  # while no batch goes through
        gate.go.set()
        assert {(one.result().status_code, one.result().headers["retry-after"]) for one in done} == {(503, "1")}
        assert "2 of 2 rows are outstanding" in done.pop().result().json()["detail"]
        assert 200 in {one.status_code for one in await asyncio.gather(*asked)}


@pytest.fixture
def server(tmp_path):
    """The port of the service under uvicorn, its process, and the file of what it says."""
    port, said = free_port(), tmp_path / "said.txt"
    words = [sys.executable, "-m", "uvicorn", "fastapi_service:app", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLES)])}
    with said.open("w") as file:
        process = subprocess.Popen(words, env=environment, stdout=file, stderr=file, cwd=tmp_path)
    try:
        until = time.monotonic() + PATIENCE_S
        while "Uvicorn running on" not in said.read_text():
            assert process.poll() is None, said.read_text()
            assert time.monotonic() < until, said.read_text()
            time.sleep(0.05)
        yield port, process, said
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def ask(port, number):
    """What one connection is answered to its images, which no other connection has."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    draw = np.random.default_rng(number)
    found = []
    for _ in range(REQUESTS):
        pixels = draw.random((3, 16, 16), np.float32)
        headers = {"Content-Type": "application/json", "X-Timeout": "100s"}
        headers["X-Priority"] = ("high", "normal", "low")[number % 3]
        connection.request("POST", "/predict", json.dumps({"pixels": pixels.tolist()}), headers)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        assert answer.status == 200, body
        found.append((pixels, body["scores"]))
    connection.close()
    return found


@pytest.mark.thorough
def test_under_load_each_connection_has_its_own_answers_in_shared_batches_and_sigterm_ends_it_in_order(server):
    port, process, said = server
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        found = [pair for one in pool.map(ask, [port] * CONNECTIONS, range(CONNECTIONS)) for pair in one]
    assert len(found) == CONNECTIONS * REQUESTS
    with torch.no_grad():
        wanted = Images().eval()(torch.from_numpy(np.stack([pixels for pixels, _ in found]))).numpy()
    np.testing.assert_allclose(np.array([scores for _, scores in found]), wanted, atol=1e-4)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/stats")
    stats = json.loads(connection.getresponse().read())
    assert stats["batches"]["rows_mean"] > 1, stats["batches"]
    assert stats["errors"]["failed"] == stats["errors"]["expired"] == 0
    connection.request("GET", "/verdict")
    assert re.search(r"^finished +640 rows", connection.getresponse().read().decode())
    connection.close()
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM), said.read_text()
    assert "Application shutdown complete" in said.read_text()
    assert "Traceback" not in said.read_text()
