"""A fleet written down for HAProxy."""

from __future__ import annotations

import re

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.fleet.haproxy import HaproxyPlan, HaproxyServer, render_haproxy

TWO = [HaproxyServer.of("127.0.0.1:8001"), HaproxyServer.of("http://node-7.cluster:8002/")]


def sections(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.partition("#")[0].rstrip()
        if words and not words.startswith(" "):
            lines = found.setdefault(words, [])
        elif words:
            lines.append(words.strip())
    return found


def test_every_replica_is_a_server_with_a_bound_and_checks_of_its_health():
    backend = sections(render_haproxy(TWO, HaproxyPlan()))["backend replicas"]
    assert [line for line in backend if line.startswith("server ")] == [
        "server replica-0 127.0.0.1:8001 maxconn 256",
        "server replica-1 node-7.cluster:8002 maxconn 256",
    ]
    assert "balance leastconn" in backend
    assert "http-check expect status 200" in backend
    assert any("/health" in line for line in backend)
    assert any("slowstart" in line and "check" in line for line in backend)


def test_what_never_reached_a_replica_goes_to_another_one_and_nothing_else_does():
    defaults = sections(render_haproxy(TWO, HaproxyPlan()))["defaults"]
    assert {"retry-on conn-failure", "option redispatch 1", "retries 3"} <= set(defaults)
    assert {line.split()[1] for line in defaults if line.startswith("timeout ")} >= {
        "connect",
        "client",
        "server",
        "queue",
    }


def test_what_only_a_router_may_say_is_taken_away():
    front = sections(render_haproxy(TWO, HaproxyPlan()))["frontend gpuinfer"]
    assert {"http-request del-header X-Gpuinfer-Begun", "http-request del-header X-Gpuinfer-Created"} <= set(front)
    assert "bind 127.0.0.1:8000" in front


@pytest.mark.parametrize(
    ("routing", "balance"),
    [("round-robin", "roundrobin"), ("power-of-two", "random(2)"), ("random", "random(1)"), ("sticky", "leastconn")],
)
def test_each_policy_has_its_like(routing, balance):
    backend = sections(render_haproxy(TWO, HaproxyPlan(routing=routing)))["backend replicas"]
    assert f"balance {balance}" in backend
    assert any(line.startswith("stick on req.hdr(X-Gpuinfer-Session)") for line in backend) == (routing == "sticky")


@pytest.mark.parametrize(
    "wrong",
    ["a b:1", "a:0", "a:99999", "a:1\n    server x", "", ":80", "a:", "a:1 check", "[::g]:1", "https://a:1", "a:1/x"],
)
def test_an_address_that_is_none_is_refused(wrong):
    with pytest.raises(UsageError, match="no address of a replica"):
        HaproxyServer.of(wrong)
    with pytest.raises(UsageError, match="is no address"):
        render_haproxy(TWO, HaproxyPlan(bind=wrong + " x"))


def test_nothing_gets_in_by_a_key_or_a_policy():
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
