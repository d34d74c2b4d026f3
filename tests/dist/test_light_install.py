"""The wheel of gpuinfer alone, with its hard dependencies and no extra: the default runs, and what needs an extra names it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from installing import Installed, install_alone, wheels

from gpuinfer.host.extras import EXTRAS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(2000), pytest.mark.xdist_group("light")]
PLAY = ("selfplay", "--game", "connect-four", "--games", "2", "--simulations", "8", "--model", "blobnet-small", "--quiet")
GENERATE = ("generate", "--model", "tiny", "--prompt", "The sea was", "--max-new-tokens", "8")
BROUGHT = {"hub", "plugins"}  # tokenizers needs huggingface_hub, which needs packaging
REFUSED = {
    "mlflow": "loop --track mlflow --game connect-four --out new",
    "onnx": "export --model blobnet-small --features 4 --actions 2 --seats 2 --out net.onnx",
    "otel": "serve --model tiny --otlp-endpoint http://127.0.0.1:4318",
    "parquet": "generate --model tiny --input in.jsonl --output out.parquet",
    "plots": "bench selfplay --report new",
    "ray": "serve --model tiny --launcher ray --replicas 2",
    "schemas": "generate --model tiny --prompt a --regex x+",
    "tensorboard": "loop --track tensorboard=runs --game connect-four --out new",
    "tune": "tune selfplay --apply",
    "wandb": "loop --track wandb --game connect-four --out new",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Installed:
    """An environment of this Python with the wheel and what it asks for."""
    ours = next(path for path in wheels() if path.name.startswith("gpuinfer-"))
    there = install_alone(tmp_path_factory.mktemp("light"), Path(sys.executable), ours)
    (there.home / "in.jsonl").write_text('{"prompt": "a"}\n')
    return there


@pytest.mark.parametrize("words", [PLAY, GENERATE], ids=["selfplay", "generate"])
def test_the_default_runs(alone, words):
    done = alone.run("gpuinfer", *words)
    assert done.returncode == 0, done.stderr


def test_it_serves(alone):
    ready, log = alone.home / "ready.json", alone.home / "log"
    words = ["serve", "--model", "tiny", "--port", "0", "--ready-file", str(ready)]
    with log.open("wb") as written:
        process = subprocess.Popen(
            [alone.bin / "gpuinfer", *words], cwd=alone.home, env=alone.environment, stdout=written, stderr=written
        )
    try:
        end = time.monotonic() + 600
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}).encode()
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body, timeout=600) as answer:
            assert json.load(answer)["choices"][0]["finish_reason"] in ("stop", "length")
        with urllib.request.urlopen(f"{url}/metrics", timeout=600) as answer:
            assert b"gpuinfer_requests_total" in answer.read()
    finally:
        process.terminate()
        process.wait(600)


@pytest.mark.parametrize(("extra", "command"), REFUSED.items(), ids=REFUSED)
def test_a_missing_extra_is_named(alone, extra, command):
    done = alone.run("gpuinfer", *command.split())
    assert done.returncode == 2, done.stderr
    assert done.stderr.rstrip().endswith(f"pip install 'gpuinfer[{extra}]'"), done.stderr


def test_doctor_says_which_extras_are_there(alone):
    done = alone.run("gpuinfer", "doctor")
    for name in EXTRAS:
        line = next(line for line in done.stdout.splitlines() if line.split()[1:2] == [name])
        assert ("not installed" in line) is (name not in BROUGHT), line
