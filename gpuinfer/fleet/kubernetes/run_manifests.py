"""A run on many nodes: an Indexed Job of nodes, and a Job of the coordinator that they dial, behind a Service."""

from __future__ import annotations

from dataclasses import dataclass

from gpuinfer.fleet.kubernetes.manifest_options import ManifestOptions
from gpuinfer.fleet.kubernetes.pods import (
    KEYS_FOLDER,
    Manifest,
    arguments,
    claims,
    image_of,
    keys_secret,
    metadata,
    pod,
    resources,
    selector_labels,
)

COORDINATOR, NODE = "coordinator", "node"
NODES = 2
PORT = 7411
CORES = "1"  # of the coordinator
COORDINATOR_STARTS, NODE_STARTS = 20, 10  # of pods that fail by themselves; evictions are not counted
STOP_S, LEAVE_S = 90, 60  # to keep what is finished, before a pod is killed
BAD_SETTINGS = 2  # exit code


@dataclass(frozen=True, slots=True)
class RunCommand:
    """What the coordinator runs: a workload and these words, without its launcher."""

    words: tuple[str, ...]


def run_manifests(options: ManifestOptions, command: RunCommand) -> list[Manifest]:
    """Claims, the coordinator's Service and Job, and the Job of nodes."""
    return [
        *claims(options, COORDINATOR),
        _service(options),
        _coordinator(options, command),
        _nodes(options),
    ]


def _host(options: ManifestOptions) -> str:
    return f"{options.name}-coordinator"


def _service(options: ManifestOptions) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options, _host(options), COORDINATOR),
        "spec": {
            "selector": selector_labels(options, COORDINATOR),
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }


def _coordinator(options: ManifestOptions, command: RunCommand) -> Manifest:
    """One pod at a time writes the records: the next begins once the one before is gone, and resumes."""
    words = [*command.words, "--launcher=external", "-L", f"nodes={options.nodes or NODES}"]
    words += ["-L", f"coordinator={_host(options)}:{PORT}", "-L", "bind=0.0.0.0", "-L", f"key_file={KEYS_FOLDER}/key"]
    container = {
        "name": "gpuinfer",
        "image": image_of(options),
        "args": arguments(words),
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": resources(CORES, options.coordinator_memory),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(options, _host(options), COORDINATOR),
        "spec": {
            "completions": 1,
            "backoffLimit": COORDINATOR_STARTS,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": _failures("FailJob"),
            "template": pod(
                options,
                COORDINATOR,
                container,
                options.mounts(),
                keys_secret(options),
                restartPolicy="Never",
                terminationGracePeriodSeconds=STOP_S,
            ),
        },
    }


def _nodes(options: ManifestOptions) -> Manifest:
    """A pod that is gone is replaced under its number. More join, or some leave, when completions and parallelism are
    set together.
    """
    count = options.nodes or NODES
    words = arguments(["node", f"{_host(options)}:{PORT}", "--key-file", f"{KEYS_FOLDER}/key"])
    container = {
        "name": "gpuinfer",
        "image": image_of(options),
        "args": [*words, "--index=$(JOB_COMPLETION_INDEX)"],
        "resources": resources(options.cpu, options.memory, options.gpus, options.gpu_resource),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(options, f"{options.name}-nodes", NODE),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimitPerIndex": NODE_STARTS,
            "podFailurePolicy": _failures("FailIndex"),
            "template": pod(
                options,
                NODE,
                container,
                [mount for mount in options.mounts() if not mount.coordinator],
                keys_secret(options),
                options.gpus,
                restartPolicy="Never",
                terminationGracePeriodSeconds=LEAVE_S,
            ),
        },
    }


def _failures(bad_settings: str) -> Manifest:
    """Bad settings stay bad; a pod that was evicted, or whose machine is gone, has not failed."""
    codes = {"containerName": "gpuinfer", "operator": "In", "values": [BAD_SETTINGS]}
    return {
        "rules": [
            {"action": bad_settings, "onExitCodes": codes},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
    }
