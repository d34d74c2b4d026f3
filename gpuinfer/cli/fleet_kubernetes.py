"""`gpuinfer fleet kubernetes`: a server, or a run on many nodes, as manifests."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from gpuinfer.cli import flags
from gpuinfer.cli.building import plain_flags
from gpuinfer.config import options, registry
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.fleet.kubernetes.manifest_options import ManifestOptions
from gpuinfer.host.files import write_whole

NAME = "fleet kubernetes"
SERVE = "serve"
DEFAULT = ("serve", "--model", "/models/default")
TEXT = """A server, or a run on many nodes, as manifests of Kubernetes, on standard output or as files.

Behind -- stands the command as it would be typed on one machine:
`gpuinfer fleet kubernetes --gpus 1 -- serve --model /models/default | kubectl apply -f -`.
Of selfplay, generate and rollouts a job of nodes and one of their coordinator are made.
"""
OURS = {  # flags of the command that the manifests set, and what to do in their place
    "host": "pods listen at all their addresses",
    "port": "the service's port is 80",
    "api_key_file": "the keys are those of --keys-secret, before the --",
    "tls_cert": "an Ingress or a Gateway speaks TLS",
    "tls_key": "an Ingress or a Gateway speaks TLS",
    "launcher": "Kubernetes starts the pods: --replicas or --nodes, before the --",
    "launcher_options": "Kubernetes starts the pods: --replicas or --nodes, before the --",
    "config": "no settings file is in the pods: give flags",
}
OF_SERVER = ("replicas", "max_replicas", "autoscaler", "target_queue", "prometheus", "monitor", "start_timeout")
OF_RUN = ("nodes", "coordinator_memory")


@dataclass(frozen=True, slots=True)
class PodCommand:
    """A command line for pods, read as the command itself reads it: nothing of this machine has a say in it."""

    name: str
    words: tuple[str, ...]
    values: Mapping[str, Any]  # of its flags, as passed
    options: BaseModel  # its own, checked


def parse_command(words: Sequence[str]) -> PodCommand:
    """Raises `UsageError`, or Typer's error, for what the command would refuse whatever machine it runs on."""
    name, *rest = words
    runs = [record.name for record in registry.listing("workloads")]
    if name not in (SERVE, *runs):
        raise UnknownName("command for pods", name, [SERVE, *runs], label="Commands")
    if name == SERVE:
        from gpuinfer.cli import serve
        from gpuinfer.cli.serve_fleet import ServeFleetOptions

        command, model = typer.main.get_command(serve.app), ServeFleetOptions
    else:
        from gpuinfer.cli.workload import command as workload_command

        command, model = workload_command(name), registry.load("workloads", name).Options
    context = command.make_context(f"gpuinfer {name}", list(rest))
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in context.params.items()}
    passed = plain_flags(name, values)
    own = {key.removeprefix(f"{name}."): one for key, one in passed.items() if key.startswith(f"{name}.")}
    own = {key: one for key, one in own.items() if key in options.fields_of(model)}
    return PodCommand(name, tuple(rest), values, model(**options.check(model, own, name)))


def refuse_manifests_flags(command: PodCommand) -> None:
    """Raises `UsageError` for flags of the command that the manifests set."""
    for key, instead in OURS.items():
        if command.values.get(key) not in (None, []):
            flag = flags.SHORTS.get(key) or flags.flag(key)
            raise UsageError(f"{flag} is for the manifests to say: {instead}. Leave it out.")


def execute(values: Mapping[str, Any]) -> int:
    """Write the manifests. The exit code."""
    folder: Path | None = values["output"]
    words = tuple(values["words"] or DEFAULT)
    passed = {
        key: GivenValue(options.GivenValues(value) if isinstance(value, list) else value, flags.flag(key))
        for key, value in values.items()
        if key not in ("words", "output") and value is not None and value != []
    }
    own = ManifestOptions(**options.check(ManifestOptions, passed, NAME))
    command = parse_command(words)
    refuse_manifests_flags(command)
    from gpuinfer.fleet.kubernetes.yaml_text import yaml_text

    manifests, notices = (_server if command.name == SERVE else _run)(own, command, passed)
    line = shlex.join(["gpuinfer", *NAME.split(), *_spelled(passed), "--", *words])
    head = [f"Written by {line}", *notices] if line.isprintable() else list(notices)
    if folder is None:
        print(yaml_text(manifests, head), end="")
    else:
        _write_files(folder, {file_name(one): yaml_text([one], head) for one in manifests})
    for notice in notices:
        print(f"gpuinfer: {notice}", file=sys.stderr)
    return 0


def _server(
    own: ManifestOptions, command: PodCommand, passed: Mapping[str, GivenValue]
) -> tuple[list[dict[str, Any]], list[str]]:
    from gpuinfer.cli.serve_fleet import MAKE_A_FLEET, ServeFleetOptions
    from gpuinfer.fleet.kubernetes.pods import keys_secret
    from gpuinfer.fleet.kubernetes.server_manifests import ServerCommand, server_manifests

    _refuse_flags_of(OF_RUN, passed, "a server", "a run, such as -- selfplay")
    serving = command.options
    assert isinstance(serving, ServeFleetOptions)
    if serving.model is None and serving.checkpoint is None and serving.dcp_path is None and serving.setup_file is None:
        raise UsageError("serve needs a model. Give one behind the --, such as -- serve --model /models/default.")
    if own.max_replicas is None and (idle := next((name for name in ("autoscaler",) if name in passed), None)):
        raise UsageError(f"--{idle} has no effect without --max-replicas. Add --max-replicas N, or leave it out.")
    if own.max_replicas is not None and own.max_replicas < (own.replicas or 1):
        raise UsageError(
            f"--max-replicas {own.max_replicas} is less than --replicas {own.replicas}. Give as many or more."
        )
    words = ["serve", *command.words]
    defaults = {"log_format": "--log-format=json", "drain_timeout": f"--drain-timeout={serving.drain_timeout:g}"}
    words += [flag for name, flag in defaults.items() if name not in serving.model_fields_set]
    pods_command = ServerCommand(
        tuple(words),
        drain_s=serving.drain_timeout,
        fleet=any(getattr(serving, name) is not None for name in MAKE_A_FLEET),
        router_queue=serving.queue == "global",
        open=serving.insecure,
    )
    space = f" -n {own.namespace}" if own.namespace else ""
    notices = list(_unseen(own, {"--model": serving.model, "--weights": serving.weights}))
    if not serving.insecure:
        also = " --from-file=metrics" if own.monitor else ""
        about = "keys: those of clients, one a line" + ("; metrics: one of them, for Prometheus" if also else "")
        notices.append(f"kubectl create secret generic {keys_secret(own)}{space} --from-file=keys{also}   ({about})")
    if own.monitor:
        notices.append("A ServiceMonitor wants Prometheus' operator in the cluster; --no-monitor leaves it out.")
    return server_manifests(own, pods_command), notices


def _run(
    own: ManifestOptions, command: PodCommand, passed: Mapping[str, GivenValue]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Raises `UsageError` where the records would be lost with the coordinator's pod."""
    from gpuinfer.api import Workload
    from gpuinfer.fleet.kubernetes.pods import keys_secret
    from gpuinfer.fleet.kubernetes.run_manifests import RunCommand, run_manifests

    _refuse_flags_of(OF_SERVER, passed, "a run", "a server")
    workload: type[Workload] = registry.load("workloads", command.name)
    named = {name: getattr(command.options, name) for name in workload.writes_to}
    named["json"] = command.values.get("report") or command.values.get("json")
    written = {flags.flag(name): str(place) for name, place in named.items() if place not in (None, "-")}
    for flag, place in written.items():
        if not any(mount.holds(place) and not mount.read_only for mount in own.mounts()):
            folder = Path(place).parent if len(Path(place).parts) > 2 else place
            raise UsageError(
                f"{flag} {place} would be gone with the coordinator's pod. Mount a volume there, before the --, "
                f"such as --mount records:{folder}:100Gi."
            )
    read: dict[str, object] = {flags.flag(name): value for name, value in command.options if isinstance(value, Path)}
    read["--model"] = getattr(command.options, "model", None)
    words = [command.name, *command.words]
    if "resume" in workload.goes_on_by and written and not getattr(command.options, "resume", False):
        words.append("--resume")
    space = f" -n {own.namespace}" if own.namespace else ""
    secret = f'kubectl create secret generic {keys_secret(own)}{space} --from-literal=key="$(openssl rand -hex 32)"'
    notices = [*_unseen(own, {flag: path for flag, path in read.items() if flag not in written}), secret]
    return run_manifests(own, RunCommand(tuple(words))), notices


def _unseen(own: ManifestOptions, paths: Mapping[str, object]) -> list[str]:
    """Of the files that the command names those that no volume has, unless the image brings them."""
    return [
        f"{flag} {path} must be in the image: no --mount CLAIM:/PATH has it."
        for flag, path in paths.items()
        if str(path).startswith("/") and not any(mount.holds(str(path)) for mount in own.mounts())
    ]


def _refuse_flags_of(names: Sequence[str], passed: Mapping[str, GivenValue], these: str, other: str) -> None:
    if idle := next((name for name in names if name in passed), None):
        raise UsageError(f"{flags.flag(idle)} is of {other}, and this is {these}. Leave it out.")


def _spelled(passed: Mapping[str, GivenValue]) -> list[str]:
    """The flags as they would be typed."""
    words = []
    for key, one in passed.items():
        if isinstance(one.value, bool):
            words.append(flags.flag(key if one.value else f"no_{key}"))
        else:
            for value in one.value if isinstance(one.value, list) else [one.value]:
                words += [flags.flag(key), str(value)]
    return words


def file_name(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['metadata']['name']}-{manifest['kind'].lower()}.yaml"


def _write_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Raises `UsageError` where a file with another content is in the way: it may hold somebody's changes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            if (folder / name).exists() and (folder / name).read_text() != text:
                raise UsageError(
                    f"{folder / name} is there, and says something else. Take it away, or name a new folder."
                )
        for name, text in texts.items():
            write_whole(folder / name, text.encode())
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}. Name a folder that can be written to.") from None
    for name in texts:
        print(folder / name)


def add_to(app: typer.Typer) -> None:
    """As a command of `gpuinfer fleet`."""

    def call(**values: Any) -> None:
        raise typer.Exit(execute(values))

    own = flags.of(ManifestOptions, NAME)
    about = "A folder for a file of each manifest; none is written over [standard output]."
    words = f"The command as on one machine, behind --: serve, selfplay, generate or rollouts [{shlex.join(DEFAULT)}]."
    more: dict[str, Any] = {
        "output": Annotated[Path | None, typer.Option(metavar="DIR", help=flags.escape_markup(about))],
        "words": Annotated[list[str] | None, typer.Argument(metavar="[-- COMMAND …]", help=flags.escape_markup(words))],
    }
    parameters = [
        *own.values(),
        *(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in more.items()
        ),
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    text = flags.escape_markup(TEXT)
    app.command("kubernetes", help=text, context_settings={"help_option_names": ["-h", "--help"]})(call)
