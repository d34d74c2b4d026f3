"""What people with a cluster of Kubernetes expect: manifests of a server and of a run that the API takes, refusals with
their cure before anything is applied, a unit of systemd, and nodes that others start.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from typing import Any

import forking
import hypothesis
import pytest
import yaml
from hypothesis import strategies
from monitoring.exposed import everything, labels_of
from ports import free_port
from serving.replica_servers import until, write_keys

from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError
from gpuinfer.fleet.kubernetes.yaml_text import yaml_text
from gpuinfer.launchers import base

WAIT_S = 60
RELEASES = ("1.31.0", "1.34.0", "1.37.0")  # of Kubernetes, of which the package has schemas
OF_OTHERS = ("ServiceMonitor", "ScaledObject")  # kinds that an operator brings
SERVER = ("--gpus", "1", "--mount", "models:/models:ro", "--mount", "cache:/home/gpuinfer/.cache:50Gi")
RUN = ("--name", "sp", "--nodes", "8", "--mount", "records:/records:100Gi:coordinator", "--mount", "data:/data:ro")
GAMES = ("--", "selfplay", "--games", "20000", "--out", "/records/a")

Manifests = dict[str, dict[str, Any]]


@pytest.fixture
def manifests(gpuinfer, empty_folder):
    """The manifests that the command prints, by kind and component, such as `Job node`."""

    def made(*words: str) -> Manifests:
        code, out, err = gpuinfer("fleet", "kubernetes", *words)
        assert code == 0, err
        found = list(yaml.safe_load_all(out))
        named = {f"{one['kind']} {one['metadata']['labels']['app.kubernetes.io/component']}": one for one in found}
        assert len(named) == len(found)
        return named

    return made


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (one,) = manifest["spec"]["template"]["spec"]["containers"]
    return one


COMMANDS = {
    "a server": SERVER,
    "that grows by Kubernetes' own autoscaler": (*SERVER, "--max-replicas", "8", "--namespace", "llm"),
    "that grows by KEDA": (*SERVER, "--max-replicas", "8", "--autoscaler", "keda", "--node-selector", "gpu=h100"),
    "that takes no keys": ("--no-monitor", "--label", "team=a", "--", "serve", "--model", "tiny", "--insecure"),
    "a fleet in each pod": ("--gpus", "4", "--", "serve", "--model", "tiny", "--gpus", "all", "--queue", "global"),
    "a run": (*RUN, *GAMES),
    "of generate on devices": (
        *(*RUN, "--gpus", "1", "--gpu-resource", "amd.com/gpu", "--", "generate", "--model", "/data/m"),
        *("--input", "/data/prompts.jsonl", "--output", "/records/answers.jsonl"),
    ),
    "of rollouts": (*RUN, "--", "rollouts", "--env", "arithmetic", "--model", "tiny", "--groups", "9"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_manifests_hold_to_the_schemas_of_several_releases_of_kubernetes(manifests, words):
    schemas = pytest.importorskip("kubernetes_validate")
    for one in manifests(*words).values():
        if one["kind"] not in OF_OTHERS:
            for release in RELEASES:
                schemas.validate(one, release, strict=True)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_kubectl_reads_each_manifest(gpuinfer, empty_folder, words):
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    _, out, _ = gpuinfer("fleet", "kubernetes", "--no-monitor", *words)
    out = "---\n".join(one for one in out.split("---\n") if "kind: ScaledObject" not in one)
    done = subprocess.run(
        ["kubectl", "label", "--local", "--filename", "-", "read=yes", "--output", "json"],
        input=out,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    decoder, texts, read = json.JSONDecoder(), done.stdout.strip(), []
    while texts:
        one, end = decoder.raw_decode(texts)
        read.append(one)
        texts = texts[end:].lstrip()
    assert [one["metadata"]["name"] for one in read] == [one["metadata"]["name"] for one in yaml.safe_load_all(out)]


def test_probes_take_a_stuck_server_out_and_start_it_anew_and_leave_a_fleets_replicas_to_the_fleet(manifests):
    server = container(manifests(*SERVER)["Deployment server"])
    probed = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probed == {"startup": "/health", "readiness": "/health", "liveness": "/health"}
    fleet = container(manifests("--", "serve", "--model", "tiny", "--replicas", "2")["Deployment server"])
    assert fleet["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert fleet["readinessProbe"]["httpGet"]["path"] == "/health"
    slow = container(manifests(*SERVER, "--start-timeout", "1800")["Deployment server"])["startupProbe"]
    assert slow["periodSeconds"] * slow["failureThreshold"] == 1800


@pytest.mark.parametrize("drain_s", [pytest.param(None, id="as it is"), pytest.param(600, id="long answers")])
def test_a_pod_has_the_time_of_drain_timeout_after_it_gets_no_requests_any_more(manifests, drain_s):
    words = () if drain_s is None else ("--", "serve", "--model", "tiny", "--drain-timeout", str(drain_s))
    pod = manifests(*words)["Deployment server"]["spec"]["template"]["spec"]
    waits_s = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > waits_s + (drain_s or 30)
    assert sum("--drain-timeout" in word for word in pod["containers"][0]["args"]) == 1


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_no_pod_is_root_or_writes_its_root_and_none_gets_settings_from_the_names_of_services(manifests, words):
    pods = [one["spec"]["template"]["spec"] for one in manifests(*words).values() if "template" in one["spec"]]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert not pod["automountServiceAccountToken"]
        assert not pod["enableServiceLinks"], "GPUINFER_PORT=tcp://… of a service of our name would be a setting"
        (one,) = pod["containers"]
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in one["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert {"/tmp", "/home/gpuinfer", "/dev/shm"} <= {mount["mountPath"] for mount in one["volumeMounts"]}


def test_keys_are_a_secret_that_is_named_and_never_written(manifests, gpuinfer, empty_folder):
    made = manifests(*SERVER)
    assert not any(one["kind"] == "Secret" for one in made.values())
    pod = made["Deployment server"]["spec"]["template"]["spec"]
    (keys,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert keys == {"secretName": "gpuinfer-keys", "defaultMode": 0o440}
    assert "--api-key-file=/etc/gpuinfer/keys" in container(made["Deployment server"])["args"]
    assert made["ServiceMonitor server"]["spec"]["endpoints"][0]["authorization"]["credentials"] == {
        "name": "gpuinfer-keys",
        "key": "metrics",
    }
    _, _, err = gpuinfer("fleet", "kubernetes", *RUN, *GAMES)
    assert 'kubectl create secret generic sp-keys --from-literal=key="$(openssl rand -hex 32)"' in err
    open_to_all = manifests("--", "serve", "--model", "tiny", "--insecure")
    assert "secret" not in json.dumps(open_to_all)


def test_prometheus_finds_the_metrics_by_the_names_of_the_service(manifests):
    made = manifests(*SERVER, "--label", "release=prometheus")
    monitor, service = made["ServiceMonitor server"], made["Service server"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["endpoints"]
    (port,) = service["spec"]["ports"]
    assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    labels = made["Deployment server"]["spec"]["template"]["metadata"]["labels"]
    for one in (service["spec"]["selector"], made["Deployment server"]["spec"]["selector"]["matchLabels"]):
        assert one.items() <= labels.items()
    (listening,) = container(made["Deployment server"])["ports"]
    assert (listening["name"], listening["containerPort"]) == (port["targetPort"], 8000)


@pytest.mark.parametrize("queue", ["replica", "global"])
def test_autoscaling_goes_by_a_metric_of_ours_and_leaves_the_number_of_pods_to_the_autoscaler(manifests, queue):
    words = ("--replicas", "2", "--max-replicas", "8", "--target-queue", "32", "--namespace", "llm")
    command = ("--", "serve", "--model", "tiny", "--replicas", "2", "--queue", queue)
    made = manifests(*words, *command)
    assert "replicas" not in made["Deployment server"]["spec"]
    own = made["HorizontalPodAutoscaler server"]["spec"]
    assert (own["minReplicas"], own["maxReplicas"]) == (2, 8)
    (metric,) = own["metrics"]
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "32"}
    name = metric["pods"]["metric"]["name"]
    assert name in labels_of(everything())
    assert name == ("gpuinfer_router_queue_length" if queue == "global" else "gpuinfer_waiting_rows")
    keda = manifests(*words, "--autoscaler", "keda", *command)["ScaledObject server"]["spec"]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (2, 8)
    (trigger,) = keda["triggers"]
    assert trigger["metadata"]["query"] == f'sum({name}{{namespace="llm",service="gpuinfer"}})'
    assert trigger["metadata"]["threshold"] == "32"
    assert keda["scaleTargetRef"]["name"] == made["Deployment server"]["metadata"]["name"]


def test_a_run_is_an_indexed_job_of_nodes_that_dial_the_service_of_their_coordinator(manifests):
    made = manifests(*RUN, *GAMES)
    nodes, coordinator, service = made["Job node"], made["Job coordinator"], made["Service coordinator"]
    assert nodes["spec"]["completionMode"] == "Indexed"
    assert nodes["spec"]["completions"] == nodes["spec"]["parallelism"] == 8
    assert nodes["spec"]["backoffLimitPerIndex"] > 0
    (port,) = service["spec"]["ports"]
    address = f"{service['metadata']['name']}:{port['port']}"
    assert container(nodes)["args"][:2] == ["node", address]
    assert "--index=$(JOB_COMPLETION_INDEX)" in container(nodes)["args"]
    words = container(coordinator)["args"]
    assert words[:5] == ["selfplay", "--games", "20000", "--out", "/records/a"]
    assert {"--resume", "--launcher=external", "nodes=8", f"coordinator={address}", "bind=0.0.0.0"} <= set(words)
    key = "/etc/gpuinfer/key"
    assert f"key_file={key}" in words
    assert container(nodes)["args"][3] == key
    labels = coordinator["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert not service["spec"]["selector"].items() <= nodes["spec"]["template"]["metadata"]["labels"].items()


def test_a_node_that_is_preempted_is_replaced_and_one_that_is_refused_is_not(manifests):
    made = manifests(*RUN, *GAMES)
    for component, refused in (("node", "FailIndex"), ("coordinator", "FailJob")):
        spec = made[f"Job {component}"]["spec"]
        codes, evicted = spec["podFailurePolicy"]["rules"]
        assert (codes["action"], codes["onExitCodes"]["values"]) == (refused, [2])
        assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert spec["template"]["spec"]["restartPolicy"] == "Never", "what such a policy asks for"
    assert made["Job coordinator"]["spec"]["podReplacementPolicy"] == "Failed", "two never write at once"


def test_records_lie_in_a_volume_of_the_coordinator_and_of_the_nodes_unless_they_come_over_the_wire(manifests):
    def claimed(manifest: dict[str, Any]) -> set[str]:
        volumes = manifest["spec"]["template"]["spec"]["volumes"]
        return {one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one}

    over_wire = manifests(*RUN, *GAMES)
    assert claimed(over_wire["Job coordinator"]) == {"records", "data"}
    assert claimed(over_wire["Job node"]) == {"data"}
    assert over_wire["PersistentVolumeClaim coordinator"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    seen = manifests("--mount", "records:/records:100Gi", *GAMES)
    assert claimed(seen["Job node"]) == claimed(seen["Job coordinator"]) == {"records"}
    assert seen["PersistentVolumeClaim coordinator"]["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "100Gi"}},
    }


REFUSED = {
    "a name with capitals": (("--name", "Llm"), "small letters"),
    "a name that leaves no room for a pod's number": (("--name", "a" * 41), "at most 40"),
    "a namespace with a dot": (("--namespace", "a.b"), "small letters"),
    "an image with a space": (("--image", "gpuinfer latest"), "NAME:TAG"),
    "an image in capitals": (("--image", "Gpuinfer:1"), "NAME:TAG"),
    "cores in words": (("--cpu", "four"), "500m"),
    "no cores": (("--cpu", "0"), "500m"),
    "memory in GB": (("--memory", "16GB"), "16Gi"),
    "a resource without its vendor": (("--gpus", "1", "--gpu-resource", "gpu"), "nvidia.com/gpu"),
    "a mount without a path": (("--mount", "models"), "CLAIM:/PATH"),
    "a mount at no whole path": (("--mount", "models:models"), "CLAIM:/PATH"),
    "a mount above its folder": (("--mount", "models:/a/.."), "CLAIM:/PATH"),
    "a mount of another word": (("--mount", "models:/models:rw"), "CLAIM:/PATH"),
    "two mounts at one path": (("--mount", "a:/m", "--mount", "b:/m"), "another path"),
    "a label without a value": (("--label", "team"), "KEY=VALUE"),
    "a secret that is no name": (("--keys-secret", "My Keys"), "small letters"),
    "an address that is none": (("--max-replicas", "3", "--autoscaler", "keda", "--prometheus", "prom"), "http://"),
    "an autoscaler with nothing to scale to": (("--autoscaler", "keda"), "--max-replicas"),
    "fewer at most than at least": (("--replicas", "3", "--max-replicas", "2"), "as many or more"),
    "nodes of a server": (("--nodes", "3"), "Leave it out"),
    "replicas of a run": (("--replicas", "3", "--mount", "r:/records", *GAMES), "Leave it out"),
    "another command": (("--", "bench", "serve"), "no command for pods named 'bench'"),
    "a flag that the command has not": (("--", "serve", "--modle", "x"), "--model"),
    "a value that the command refuses": (("--", "serve", "--model", "tiny", "--queue", "both"), "Choose from"),
    "a server without a model": (("--", "serve", "--drain-timeout", "5"), "--model"),
    "an address of the server": (("--", "serve", "--model", "tiny", "--host", "::"), "Leave it out"),
    "keys in a file": (("--", "serve", "--model", "tiny", "--api-key-file", "k"), "--keys-secret"),
    "another launcher": (("--", "serve", "--model", "tiny", "--launcher", "slurm"), "Leave it out"),
    "records that go with their pod": (GAMES, "--mount records:/records:100Gi"),
    "records in a volume that is read alone": (("--mount", "r:/records:ro", *GAMES), "--mount"),
}


@pytest.mark.parametrize(("words", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_kubernetes_or_the_command_would_refuse_is_refused_with_the_cure(gpuinfer, empty_folder, words, cure):
    code, out, err = gpuinfer("fleet", "kubernetes", *words)
    assert (code, out) == (2, "")
    assert cure in err
    assert len(err.splitlines()) <= 3


def test_settings_of_this_machine_have_no_say_in_what_runs_elsewhere(manifests, empty_folder, monkeypatch):
    before = manifests("--", "serve", "--model", "tiny")
    (empty_folder / "gpuinfer.toml").write_text('[serve]\ndrain_timeout = 500\nmodel = "other"\n')
    monkeypatch.setenv("GPUINFER_SERVE_INSECURE", "true")
    assert manifests("--", "serve", "--model", "tiny") == before


def test_variables_that_kubernetes_sets_for_a_service_of_our_name_are_no_settings(gpuinfer, empty_folder, monkeypatch):
    links = {
        "GPUINFER_SERVICE_HOST": "10.0.0.1",
        "GPUINFER_SERVICE_PORT_HTTP": "80",
        "GPUINFER_PORT": "tcp://10.0.0.1:80",
        "GPUINFER_PORT_80_TCP_ADDR": "10.0.0.1",
        "GPUINFER_COORDINATOR_PORT_7411_TCP": "tcp://10.0.0.1:7411",
    }
    for name, value in links.items():
        monkeypatch.setenv(name, value)
    code, _, err = gpuinfer("config")
    assert code == 2, "elsewhere they are settings with a typing error"
    assert "no such setting" in err
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert gpuinfer("config")[0] == 0
    monkeypatch.setenv("GPUINFER_PROT", "80")
    assert gpuinfer("config")[0] == 2


def test_variables_in_a_commands_words_stay_words(manifests):
    words = (
        "--",
        "serve",
        "--model",
        "tiny",
        "--served-model-name",
        "a",
        "--max-body",
        "4096",
        "--log-format",
        "plain",
    )
    args = container(manifests(*words)["Deployment server"])["args"]
    assert args[: len(words)] == [*words[1:], "--drain-timeout=30"]
    text = "/records/$(HOME) 'quoted'"
    run = manifests("--mount", "r:/records", "--", "selfplay", "--out", text)["Job coordinator"]
    assert "/records/$$(HOME) 'quoted'" in container(run)["args"]


def test_files_are_written_and_nobodys_changes_are_written_over(gpuinfer, empty_folder):
    code, out, _ = gpuinfer("fleet", "kubernetes", "--output", "made", *SERVER)
    assert code == 0
    files = sorted((empty_folder / "made").iterdir())
    assert sorted(out.split()) == [str(path.relative_to(empty_folder)) for path in files]
    kinds = {yaml.safe_load(path.read_text())["kind"] for path in files}
    assert {"Deployment", "Service", "PodDisruptionBudget", "PersistentVolumeClaim", "ServiceMonitor"} == kinds
    assert gpuinfer("fleet", "kubernetes", "--output", "made", *SERVER)[0] == 0, "the same once more"
    changed = empty_folder / "made" / "gpuinfer-service.yaml"
    changed.write_text("changed by hand\n")
    before = {path: path.read_text() for path in files}
    code, _, err = gpuinfer("fleet", "kubernetes", "--output", "made", "--cpu", "8", *SERVER)
    assert code == 2
    assert "Take it away, or name a new folder" in err
    assert {path: path.read_text() for path in files} == before


TEXTS = strategies.text(strategies.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    TEXTS | strategies.integers() | strategies.booleans() | strategies.sampled_from(["no", "Yes", "1e3", "~", "-"])
)


@pytest.mark.property
@hypothesis.given(
    strategies.dictionaries(
        TEXTS,
        strategies.recursive(
            SCALARS, lambda inner: strategies.lists(inner) | strategies.dictionaries(TEXTS, inner), max_leaves=12
        ),
    )
)
def test_yaml_says_what_was_meant_whatever_the_texts(document):
    assert list(yaml.safe_load_all(yaml_text([document, document], ["a comment"]))) == [document, document]


def test_a_unit_quotes_the_command_and_waits_for_its_drain_timeout(gpuinfer, empty_folder):
    words = ("serve", "--model", "/srv/my models/100%", "--drain-timeout", "120")
    code, out, _ = gpuinfer("fleet", "systemd", "--program", "/opt/gpuinfer/bin/gpuinfer", "--", *words)
    assert code == 0
    started = re.findall(r"^ExecStart=(.*)$", out, re.M)
    assert started == ['/opt/gpuinfer/bin/gpuinfer serve --model "/srv/my models/100%%" --drain-timeout 120']
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", out, re.M)
    assert int(stop_s) > 120
    for flags, cure in (
        (("--user", "The Server"), "small letters"),
        (("--program", "gpuinfer"), "whole paths"),
        (("--", "selfplay"), "run it by hand"),
        (("--", "serve", "--modle", "x"), "--model"),
    ):
        code, out, err = gpuinfer("fleet", "systemd", *flags)
        assert (code, out) == (2, "")
        assert cure in err


def test_systemd_takes_the_unit_and_finds_little_that_it_may_do(gpuinfer, empty_folder):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    _, out, _ = gpuinfer(
        "fleet", "systemd", "--program", "/bin/true", "--user", "root", "--", "serve", "--model", "a b"
    )
    (empty_folder / "gpuinfer.service").write_text(out)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "./gpuinfer.service"], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert "gpuinfer.service" not in checked.stdout + checked.stderr
    assert checked.returncode == 0


def test_a_launcher_that_starts_nothing_takes_the_key_that_its_nodes_have(tmp_path):
    def make(**options: str):
        return base.make_launcher("external", {key: GivenValue(value, f"-L {key}") for key, value in options.items()})

    launcher = make(bind="0.0.0.0", key_file=str(tmp_path / "key"))
    assert not launcher.starts
    assert (launcher.bind, launcher.key_file) == ("0.0.0.0", tmp_path / "key")
    assert make().reached_at() == make().bind == "127.0.0.1"
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 for all of them"):
        make(bind="everywhere")


@pytest.mark.thorough
def test_nodes_that_others_start_do_the_work_of_a_run_and_leave_when_it_is_over(tmp_path):
    """As the pods of a run have it: a key that lies there, a port that is known, nodes with numbers."""
    write_keys(tmp_path / "key", "a-key-of-the-tests")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "row {number}"}}\n' for number in range(64)))
    address = f"127.0.0.1:{free_port()}"
    words = ["generate", "--model", "tiny", "--input", "prompts.jsonl", "--output", "answers.jsonl", "--no-roofline"]
    words += ["--max-new-tokens", "4", "--launcher", "external", "-L", "key_file=key", "-L", f"coordinator={address}"]
    coordinator = forking.Forked(["gpuinfer", *words, "-L", "nodes=2", "--json", "report.json"], tmp_path, text=True)
    node = ["gpuinfer", "node", address, "--key-file", "key"]
    write_keys(tmp_path / "other", "another-key")
    stranger = forking.run([*node[:-1], "other"], tmp_path)
    assert stranger.returncode == 2
    assert "Give --key-file the file that it names at its start" in stranger.stderr
    nodes = [forking.Forked([*node, "--index", str(number)], tmp_path, text=True) for number in range(2)]
    try:
        said = [one.communicate(timeout=WAIT_S) for one in (coordinator, *nodes)]
        assert [one.returncode for one in (coordinator, *nodes)] == [0, 0, 0], said
        assert f"gpuinfer node {address} --key-file key" in said[0][1]
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 64
        assert json.loads((tmp_path / "report.json").read_text())["status"] == "done"
    finally:
        for one in (coordinator, *nodes):
            one.kill()


@pytest.mark.thorough
def test_a_node_that_cannot_write_into_the_folder_sends_its_records_over_the_wire(tmp_path):
    write_keys(tmp_path / "key", "a-key-of-the-tests")
    address = f"127.0.0.1:{free_port()}"
    words = ["selfplay", "--model", "uniform", "--games", "3000", "--simulations", "8", "--determinizations", "2"]
    words += ["--workers", "1", "--no-roofline", "--out", "games", "--launcher", "external", "-L", "key_file=key"]
    started = ["gpuinfer", *words, "-L", f"coordinator={address}", "--json", "report.json"]
    coordinator = forking.Forked(started, tmp_path, text=True)
    node = forking.Forked(["gpuinfer", "node", address, "--key-file", "key"], tmp_path, text=True)
    try:
        folder = tmp_path / "games" / ".ranges"
        until(lambda: (folder / "node-0.probe").exists() or node.poll() is not None, lambda: "no node has joined")
        folder.rename(folder.with_name(".taken-away"))
        said = [one.communicate(timeout=2 * WAIT_S) for one in (coordinator, node)]
        assert [one.returncode for one in (coordinator, node)] == [0, 0], said
        assert "cannot be written: No such file or directory. Records go over the wire." in said[1][1]
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["status"], report["progress"]["done"]) == ("done", 3000)
    finally:
        for one in (coordinator, node):
            one.kill()


def test_an_address_of_the_coordinator_that_cannot_be_had_is_mended_by_the_option_that_says_it(gpuinfer, empty_folder):
    (empty_folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    words = ("generate", "--model", "tiny", "--input", "prompts.jsonl", "--output", "answers.jsonl")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = gpuinfer(*words, "--launcher", "external", "-L", f"coordinator=127.0.0.1:{port}")
    assert code == 2
    assert "in use" in err
    assert "Use -L coordinator=127.0.0.1:" in err
    code, _, err = gpuinfer(*words, "--launcher", "external", "-L", "coordinator=10.0.0.5:7411")
    assert code == 2
    assert "-L bind=0.0.0.0" in err


def test_replicas_of_a_server_have_to_be_started_by_somebody(gpuinfer, empty_folder):
    code, _, err = gpuinfer("serve", "--model", "tiny", "--port", "0", "--replicas", "2", "--launcher", "external")
    assert code == 2
    assert "starts nothing" in err
