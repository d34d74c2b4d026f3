"""`/v1/evaluate` beside mosec: one JSON row of 256 floats a request, a transformer of 4.9 M parameters.

    python benchmarks/evaluate.py --peer VENV/bin/python [--rounds 3] [--seconds 5] [--connections 64,256]

needs wrk, and a Python with mosec and torch for the peer. Both servers take batches of up to 64 rows, wait 5 ms for
company and compute in one thread of torch with the same module. `blobnet` is ours with the built-in network of the same
size, `blobnet 2` the same with two forwards at once, each in a thread; `central` has the network in its own process
(`--backend central`) and half as many rows in a batch, so that one half is under way while the other is read. They are
asked in turns; of each the median over the rounds is shown, and the ratio to mosec.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

FEATURES, ROWS, WAIT_MS = 256, 64, 5
NETWORK = '''
import torch
from torch import nn


class Net(nn.Module):
    """Width 256, 6 layers, feed-forward 1,024: one token for each row."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True)
        self.embed, self.norm = nn.Linear(256, 256), nn.LayerNorm(256)
        self.body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 53)

    def forward(self, x):
        return self.head(self.body(self.norm(self.embed(x)).unsqueeze(1)).squeeze(1))


def network():
    torch.manual_seed(0)
    return Net().eval()
'''
PEER = """
import json
import torch
from mosec import Server, Worker
from network import network


class Evaluate(Worker):
    def __init__(self):
        torch.set_num_threads(1)
        self.net = network()

    def deserialize(self, data):
        return json.loads(data)

    def serialize(self, data):
        return json.dumps(data).encode()

    def forward(self, data):
        with torch.inference_mode():
            return self.net(torch.tensor([one["x"] for one in data])).tolist()


if __name__ == "__main__":
    server = Server()
    server.append_worker(Evaluate, num=1, max_batch_size=ROWS, max_wait_time=WAIT)
    server.run()
"""


class Case:
    """One server and what it is sent."""

    def __init__(self, name: str, url: str, script: Path) -> None:
        self.name, self.url, self.script = name, url, script
        self.rates: dict[int, list[float]] = {}
        self.p99: dict[int, list[float]] = {}

    def run(self, connections: int, seconds: int) -> None:
        words = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds}",
            "-s",
            str(self.script),
            "--timeout",
            "30s",
            "--latency",
            self.url,
        ]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        if "Non-2xx" in said or "Socket errors" in said:
            raise SystemExit(f"{self.name}: not all were answered:\n{said}")
        self.rates.setdefault(connections, []).append(float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1]))
        value, unit = re.search(r"99%\s+([\d.]+)(us|ms|s)\b", said).groups()
        self.p99.setdefault(connections, []).append(float(value) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit])


def scripts(folder: Path) -> tuple[Path, Path]:
    """What wrk sends: JSON, and safetensors with the same row."""
    row = [math.sin(number) for number in range(1, FEATURES + 1)]
    text = json.dumps({"x": [round(value, 3) for value in row]})
    plain = folder / "json.lua"
    plain.write_text(f"wrk.method='POST'; wrk.headers['Content-Type']='application/json'\nwrk.body='{text}'\n")
    import numpy as np

    from gpuinfer.models.row_format import MEDIA_TYPE, rows_to_body

    body = "".join(f"\\{byte:03d}" for byte in rows_to_body(np.array([row], np.float32)))
    binary = folder / "binary.lua"
    binary.write_text(f"wrk.method='POST'; wrk.headers['Content-Type']='{MEDIA_TYPE}'\nwrk.body='{body}'\n")
    return plain, binary


@contextlib.contextmanager
def running(words: list[str], folder: Path, name: str, environment: dict[str, str]) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def answers(url: str) -> None:
    body = json.dumps({"x": [0.5] * FEATURES}).encode()
    for _ in range(600):
        with contextlib.suppress(OSError):
            asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=5) as response:
                response.read()
                return
        time.sleep(0.2)
    raise SystemExit(f"nothing answers at {url}")


def ours(model: str, port: int, forwards: int = 1, backend: str = "inprocess", rows: int = ROWS) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "gpuinfer",
            "serve",
            "--model",
            model,
            "--features",
            str(FEATURES),
            "--port",
            str(port),
            "--backend",
            backend,
        ),
        *(
            "-B",
            f"max_rows={rows}",
            "-B",
            "threads=1",
            "-B",
            f"in_flight={forwards}",
            "-S",
            f"max_wait={WAIT_MS}ms",
            "--quiet",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the Python of a virtual environment with mosec and torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", default="64,256")
    parser.add_argument("--only", default="", help="cases, such as mosec,json")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evaluate-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "network.py").write_text(NETWORK)
        (folder / "peer.py").write_text(PEER.replace("ROWS", str(ROWS)).replace("WAIT", str(WAIT_MS)))
        plain, binary = scripts(folder)
        ports = [free_port() for _ in range(5)]
        inherited = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent.parent)])}
        peer = [own.peer, "peer.py", "--port", str(ports[0]), "--address", "127.0.0.1"]
        urls = [f"http://127.0.0.1:{ports[0]}/inference"]
        urls += [f"http://127.0.0.1:{port}/v1/evaluate" for port in ports[1:]]
        stack.enter_context(running(peer, folder, "mosec", {**inherited, "PYTHONPATH": str(folder)}))
        stack.enter_context(running(ours("network:network", ports[1]), folder, "ours", inherited))
        stack.enter_context(running(ours("blobnet", ports[2]), folder, "blobnet", inherited))
        stack.enter_context(running(ours("blobnet", ports[3], 2), folder, "blobnet-2", inherited))
        central = ours("blobnet", ports[4], backend="central", rows=ROWS // 2)
        stack.enter_context(running(central, folder, "central", inherited))
        for url in urls:
            answers(url)
        cases = [
            Case("mosec", urls[0], plain),
            Case("json", urls[1], plain),
            Case("binary", urls[1], binary),
            Case("blobnet", urls[2], plain),
            Case("blobnet binary", urls[2], binary),
            Case("blobnet 2", urls[3], plain),
            Case("blobnet 2 binary", urls[3], binary),
            Case("central", urls[4], plain),
            Case("central binary", urls[4], binary),
        ]
        cases = [case for case in cases if not own.only or case.name in own.only.split(",")]
        several = [int(one) for one in own.connections.split(",")]
        for _ in range(own.rounds):
            for connections in several:
                for case in cases:
                    case.run(connections, own.seconds)
        print("| connections | server | requests/s | ratio | p99, ms |\n|---|---|---|---|---|")
        for connections in several:
            first = statistics.median(cases[0].rates[connections])
            for case in cases:
                rate, p99 = statistics.median(case.rates[connections]), statistics.median(case.p99[connections])
                print(f"| {connections} | {case.name} | {rate:,.0f} | {rate / first:.2f} | {p99:.1f} |")


if __name__ == "__main__":
    main()
