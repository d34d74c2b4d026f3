"""A fleet written down for HAProxy."""

from __future__ import annotations

import re

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.fleet.haproxy import HaproxyPlan, HaproxyServer, render_haproxy

TWO = [HaproxyServer.of("127.0.0.1:8001"), HaproxyServer.of("http://node-7.cluster:8002/")]
BALANCE = {"round-robin": "roundrobin", "power-of-two": "random(2)", "random": "random(1)", "sticky": "leastconn"}


def section(name: str, **plan: str) -> list[str]:
    """The lines of a section, without comments."""
    text = render_haproxy(TWO, HaproxyPlan(**plan)).partition(f"\n{name}\n")[2]
    lines = [line.partition("#")[0].rstrip() for line in re.split(r"\n(?=\S)", text)[0].splitlines()]
    return [line.strip() for line in lines if line]


def test_every_replica_is_a_server_with_a_bound_and_checks_of_its_health():
    backend, defaults = section("backend replicas"), section("defaults")
    servers = ["server replica-0 127.0.0.1:8001 maxconn 256", "server replica-1 node-7.cluster:8002 maxconn 256"]
    assert [line for line in backend if line.startswith("server ")] == servers
    assert {"balance leastconn", "http-check expect status 200"} <= set(backend)
    assert any("/health" in line for line in backend)
    assert any("slowstart" in line and "check" in line for line in backend)
    assert {"retry-on conn-failure", "option redispatch 1", "retries 3"} <= set(defaults)
    limits = {line.split()[1] for line in defaults if line.startswith("timeout ")}
    assert limits >= {"connect", "client", "server", "queue"}
    front = {"http-request del-header X-Gpuinfer-Begun", "http-request del-header X-Gpuinfer-Created"}
    assert {*front, "bind 127.0.0.1:8000"} <= set(section("frontend gpuinfer"))
    for routing, balance in BALANCE.items():
        backend = section("backend replicas", routing=routing)
        assert f"balance {balance}" in backend
        assert any(line.startswith("stick on req.hdr(X-Gpuinfer-Session)") for line in backend) == (routing == "sticky")


def test_nothing_gets_in_by_an_address_a_key_or_a_policy():
    for wrong in (
        "a b:1", "a:0", "a:99999", "a:1\n    server x", "", ":80", "a:", "a:1 check", "[::g]:1", "https://a:1", "a:1/x"
    ):  # fmt: skip
        with pytest.raises(UsageError, match="no address of a replica"):
            HaproxyServer.of(wrong)
        with pytest.raises(UsageError, match="is no address"):
            render_haproxy(TWO, HaproxyPlan(bind=wrong + " x"))
    for key in ('a" \n    server x 1.2.3.4:1', "a b", 'a"b', "a\\b", ""):
        with pytest.raises(UsageError, match="key has characters"):
            render_haproxy(TWO, HaproxyPlan(key=key))
    with pytest.raises(UsageError, match="Choose from"):
        render_haproxy(TWO, HaproxyPlan(routing="static-rr\n"))
    with pytest.raises(UsageError, match="no replica"):
        render_haproxy([], HaproxyPlan())


def test_the_command_writes_what_flags_and_settings_say(gpuinfer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpuinfer.toml").write_text('[fleet]\nworker = ["10.0.0.1:8001", "10.0.0.2:8001"]\nmaxconn = 32\n')
    key = tmp_path / "key"
    key.write_text("the-key\n")
    key.chmod(0o600)
    code, out, err = gpuinfer("fleet", "haproxy-config", "--routing", "sticky", "--key-file", str(key))
    assert code == 0, err
    assert re.findall(r"server \S+ (\S+) maxconn (\d+)", out) == [("10.0.0.1:8001", "32"), ("10.0.0.2:8001", "32")]
    assert 'Authorization "Bearer the-key"' in out
    assert "chmod 600" in err
    code, out, _ = gpuinfer("fleet", "haproxy-config", "--worker", "127.0.0.1:1")
    assert (code, re.findall(r"server replica-\d+ (\S+)", out)) == (0, ["127.0.0.1:1"])


def test_bad_words_are_told_with_the_cure(gpuinfer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, told in [
        (["haproxy-config"], "--worker HOST:PORT"),
        (["haproxy-config", "--worker", "a b"], "Write HOST:PORT"),
        (["haproxy-config", "--worker", "a:1", "--routing", "best"], "Choose from"),
        (["status", "http://127.0.0.1:9"], "gpuinfer serve --replicas"),
        (["status", "nonsense"], "Write http://host:port"),
    ]:
        code, out, err = gpuinfer("fleet", *words)
        assert (code, out) == (2, "")
        assert told in err
