"""Configurations that `gpuinfer fleet haproxy-config` writes, and a real HAProxy that runs with one."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import urllib.request

import pytest
from ports import free_port
from serving.replica_servers import SECONDS, Server, until, write_keys

from gpuinfer.fleet.haproxy import BALANCE, HaproxyPlan, HaproxyServer, render_haproxy

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy"),
]


@pytest.mark.parametrize("routing", [*BALANCE, "sticky"])
@pytest.mark.parametrize("key", [None, "some-key_of.ours="])
def test_haproxy_takes_what_is_written(routing, key, tmp_path):
    targets = [HaproxyServer.of("127.0.0.1:8001"), HaproxyServer.of("[::1]:8002"), HaproxyServer.of("localhost:8003")]
    (tmp_path / "h.cfg").write_text(render_haproxy(targets, HaproxyPlan(routing=routing, key=key)))
    done = subprocess.run(["haproxy", "-c", "-f", tmp_path / "h.cfg"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr


@pytest.fixture
def behind(tmp_path):
    """Two replicas with a key, and HAProxy in front: its port, and the replicas."""
    write_keys(tmp_path / "key", "a-key-of-the-replicas")
    replicas = []
    proxy = None
    try:
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            words = ["--model", "tiny", "-B", "slots=4", "-B", "threads=1", "--api-key-file", tmp_path / "key"]
            replicas.append(Server(*words, folder=tmp_path / str(number)))
        for replica in replicas:
            replica.wait_until_ready()
        port = free_port()
        workers = [word for replica in replicas for word in ("--worker", f"127.0.0.1:{replica.port}")]
        words = ["fleet", "haproxy-config", *workers, "--bind", f"127.0.0.1:{port}", "--routing", "round-robin"]
        command = [sys.executable, "-m", "gpuinfer", *words, "--key-file", str(tmp_path / "key")]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=True)
        (tmp_path / "h.cfg").write_text(said.stdout)
        proxy = subprocess.Popen(["haproxy", "-db", "-f", tmp_path / "h.cfg"], stderr=subprocess.DEVNULL)
        yield port, replicas
    finally:
        if proxy is not None:
            proxy.kill()
            proxy.wait(SECONDS)
        for replica in replicas:
            replica.kill()


def asked(port: int, **more) -> str:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 1, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return response.read().decode()


def test_a_chat_goes_through_it_whole_and_as_a_stream_and_past_a_replica_that_died(behind):
    port, replicas = behind
    whole: list[str] = []

    def answered() -> bool:  # once its checks have found a replica
        with contextlib.suppress(OSError):
            whole.append(asked(port))
        return bool(whole)

    until(answered)
    text = json.loads(whole[0])["choices"][0]["message"]["content"]
    stream = asked(port, stream=True)
    events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"]) == text
    replicas[0].kill()
    for _ in range(6):  # round robin: half of them meet the dead one first
        assert json.loads(asked(port))["choices"][0]["message"]["content"] == text
