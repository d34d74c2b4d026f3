"""What lies in deploy/ can be read, names only options, metrics and files that there are, and starts a server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from forking import Forked, own_environment
from monitoring.exposed import everything, labels_of
from ports import free_port
from serving.replica_servers import until, write_keys

from gpuinfer.cli.serve import ServeFleetOptions
from gpuinfer.config.settings import Common
from gpuinfer.serving.monitoring.live_page import FILES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SECONDS = 120
KEY = "a-key-of-the-tests"


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "gpuinfer.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def dockerfile() -> list[tuple[str, str]]:
    """Its instructions, and what follows each."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(name, rest.strip()) for name, rest in re.findall(r"^([A-Z]+) (.*)$", text, re.M)]


def kubernetes(kind: str) -> dict[str, Any]:
    (found,) = [one for one in documents(DEPLOY / "kubernetes" / "gpuinfer.yaml") if one["kind"] == kind]
    return found


def container() -> dict[str, Any]:
    (one,) = kubernetes("Deployment")["spec"]["template"]["spec"]["containers"]
    return one


COMMANDS = {
    "systemd": lambda: shlex.split(unit()["ExecStart"][0])[1:],
    "docker": lambda: json.loads(dict(dockerfile())["CMD"]),
    "compose": lambda: documents(DEPLOY / "compose.yaml")[0]["services"]["gpuinfer"]["command"],
    "kubernetes": lambda: container()["args"],
}


THEIRS = {  # flags of other programs, and of the commands that wrote the files
    "--config", "--target", "--python", "--without-pip", "--gid", "--mount", "--program", "--no-monitor",
    "--build-arg", "--default-index", "--no-cache", "--uid", "--create-home", "--interval", "--user", "--from",
    "--timeout", "--gpus", "--start-period", "--retries", "--system", "--now", "--from-file",
}  # fmt: skip


@pytest.mark.parametrize(
    "path", [one for one in sorted(DEPLOY.rglob("*")) if one.is_file()], ids=lambda path: path.name
)
def test_each_manifest_can_be_read_and_each_option_of_ours_that_is_named_exists(path):
    if path.suffix in (".yaml", ".yml"):
        assert all(isinstance(one, dict) for one in documents(path))
    known = {f"--{name.replace('_', '-')}" for name in (*ServeFleetOptions.model_fields, *Common.model_fields)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text()))
    assert named - known - THEIRS == set()


@pytest.fixture
def served(tmp_path) -> Iterator[Any]:
    """Starts `gpuinfer` with a command of deploy/, its paths and its port put to where they are here."""
    running: list[Forked] = []
    write_keys(tmp_path / "keys", f"{KEY} name=tests")

    def start(words: list[str]) -> int:
        port = free_port()
        text = (DEPLOY / "systemd" / "gpuinfer.toml").read_text()
        (tmp_path / "gpuinfer.toml").write_text(here(text.replace("port = 8000", f"port = {port}")))
        words = [here(word).replace("--port=8000", f"--port={port}") for word in words]
        if "--config" not in words and not any(word.startswith("--port") for word in words):
            words += ["--port", str(port)]
        with (tmp_path / "log").open("wb") as log:
            process = Forked(["gpuinfer", *words], tmp_path, own_environment(), stdout=log, stderr=log)
        running.append(process)
        until(lambda: healthy(port) or process.poll() is not None, lambda: (tmp_path / "log").read_text())
        assert process.poll() is None, (tmp_path / "log").read_text()
        return port

    def here(text: str) -> str:
        for path in ("/run/secrets/keys", "/etc/gpuinfer/keys"):
            text = text.replace(path, str(tmp_path / "keys"))
        for path in ("/models/default", "/srv/models/default"):
            text = re.sub(rf"(?<![\w/]){path}", "tiny", text)
        return text.replace("/etc/gpuinfer/gpuinfer.toml", str(tmp_path / "gpuinfer.toml"))

    yield start
    for one in running:
        one.send_signal(signal.SIGTERM)
        try:
            assert one.wait(SECONDS) == 0, (tmp_path / "log").read_text()
        finally:
            one.kill()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.parametrize("where", COMMANDS)
def test_each_command_starts_a_server_that_asks_for_its_keys_and_ends_when_asked(served, where):
    port = served(list(COMMANDS[where]()))
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=SECONDS)
    refused.value.close()


def test_there_is_time_to_finish_requests_before_anything_is_killed():
    drain_s = 30.0
    for words in (COMMANDS["compose"](), COMMANDS["kubernetes"]()):
        assert f"--drain-timeout={drain_s:g}" in words
    (text,) = re.findall(r"drain_timeout = (\d+)", (DEPLOY / "systemd" / "gpuinfer.toml").read_text())
    assert float(text) == drain_s
    assert float(unit()["TimeoutStopSec"][0]) > drain_s
    assert unit()["KillMode"] == ["mixed"], "of a fleet the first process alone is asked"
    assert documents(DEPLOY / "compose.yaml")[0]["services"]["gpuinfer"]["stop_grace_period"] == "45s"
    waits_s = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert kubernetes("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s + waits_s


@pytest.mark.parametrize(
    ("command", "path"),
    [
        pytest.param("kubernetes --mount gpuinfer-models:/models:ro:50Gi", "kubernetes/gpuinfer.yaml", id="manifests"),
        pytest.param("systemd --program /opt/gpuinfer/bin/gpuinfer", "systemd/gpuinfer.service", id="the unit"),
    ],
)
def test_what_a_command_writes_lies_there_as_it_writes_it(gpuinfer, command, path):
    code, out, _ = gpuinfer("fleet", *command.split())
    assert code == 0
    assert (DEPLOY / path).read_text() == out, f"gpuinfer fleet {command} > deploy/{path}"


def test_probes_ask_what_needs_no_key_and_a_pod_is_found_by_its_service():
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container()[probe]["httpGet"] == {"path": "/health", "port": "http"}
    labels = kubernetes("Deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in (
        kubernetes("Service")["spec"]["selector"],
        kubernetes("Deployment")["spec"]["selector"]["matchLabels"],
        kubernetes("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    pod = kubernetes("Deployment")["spec"]["template"]["spec"]
    assert {one["name"] for one in pod["volumes"]} == {one["name"] for one in container()["volumeMounts"]}
    (keys,) = [one["secret"] for one in pod["volumes"] if "secret" in one]
    assert keys["defaultMode"] == 0o440, "the group of the pod may read it, and nobody else"


def test_files_that_are_mounted_or_copied_are_there():
    for service in documents(DEPLOY / "compose.yaml")[0]["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith(".") and source not in ("./models", "./tls"):
                assert (DEPLOY / source).exists(), source
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text()
    needed = [line[1:] for line in ignored.splitlines() if line.startswith("!")]
    assert {"gpuinfer", "docs", "pyproject.toml", "constraints.txt"} <= set(needed)
    assert {target for name, rest in dockerfile() if name == "FROM" for target in rest.split(" AS ")[1:]} == {
        "build", "base", "cpu", "cuda"
    }  # fmt: skip


def test_examples_of_the_page_are_the_files_and_lead_from_the_name_to_the_server():
    page = (ROOT / "docs" / "proxies.md").read_text()
    assert f"```nginx gpuinfer.conf\n{(DEPLOY / 'nginx.conf').read_text()}```" in page
    (text,) = re.findall(r"^```yaml traefik.yml\n(.*?)^```", page, re.M | re.S)
    told = yaml.safe_load(text)["http"]
    (router,) = told["routers"].values()
    balancer = told["services"][router["service"]]["loadBalancer"]
    assert [one["url"] for one in balancer["servers"]] == ["http://127.0.0.1:8000"]
    assert balancer["healthCheck"]["path"] == "/health"


def test_alerts_ask_for_metrics_and_labels_that_there_are():
    known = labels_of(everything())
    (group,) = documents(DEPLOY / "prometheus" / "alerts.yml")[0]["groups"]
    for rule in group["rules"]:
        names = set(re.findall(r"\bgpuinfer_\w+", rule["expr"]))
        assert names <= set(known), rule["alert"]
        for label in set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) - {"instance"}:
            assert any(label in known[name] for name in names), rule["alert"]


def test_grafana_gets_the_dashboard_that_the_server_hands_out():
    path = documents(DEPLOY / "grafana" / "dashboards.yaml")[0]["providers"][0]["options"]["path"]
    volumes = documents(DEPLOY / "compose.yaml")[0]["services"]["grafana"]["volumes"]
    (source,) = [one.split(":")[0] for one in volumes if one.split(":")[1].startswith(f"{path}/")]
    board = json.loads((DEPLOY / source).read_text())
    assert "/dashboard.json" in FILES
    assert board["uid"] == "gpuinfer"
    assert "${DS_" not in json.dumps(board), "a board from a folder has no inputs that a person fills in"
    (chosen,) = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
    kinds = {one["type"] for one in documents(DEPLOY / "grafana" / "datasources.yaml")[0]["datasources"]}
    assert chosen["query"] in kinds


@pytest.mark.system
def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    text = (DEPLOY / "systemd" / "gpuinfer.service").read_text()
    ours = shutil.which("gpuinfer", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    (tmp_path / "gpuinfer.service").write_text(text.replace("/opt/gpuinfer/bin/gpuinfer", str(ours)))
    said = run("systemd-analyze", "verify", tmp_path / "gpuinfer.service")
    assert "gpuinfer.service" not in said, said


@pytest.mark.system
def test_promtool_takes_rules_and_configuration_and_the_rules_fire(tmp_path):
    folder = tmp_path / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    (tmp_path / "key").write_text("a-key")
    config = folder / "prometheus.yml"
    config.write_text(config.read_text().replace("/run/secrets/prometheus_key", str(tmp_path / "key")))
    run("promtool", "check", "config", config)
    run("promtool", "check", "rules", folder / "alerts.yml")
    run("promtool", "test", "rules", folder / "alerts_test.yml")


def run(*words: object) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
