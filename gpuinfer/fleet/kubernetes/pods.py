"""What all pods have in common: labels, resources, volumes, and rights that are as few as a container needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from gpuinfer.config.registry import own_version
from gpuinfer.fleet.kubernetes.manifest_options import ManifestOptions, Mount

USER = 10001  # of the image, deploy/Dockerfile
HOME = "/home/gpuinfer"
KEYS_FOLDER = "/etc/gpuinfer"
GROUP_READS = 0o440  # of files from a secret, which belong to root and the pod's group

Manifest = dict[str, Any]


def selector_labels(options: ManifestOptions, component: str) -> dict[str, str]:
    """The labels by which the pods of a component are found. They stay the same from one version to the next."""
    return {
        "app.kubernetes.io/name": "gpuinfer",
        "app.kubernetes.io/instance": options.name,
        "app.kubernetes.io/component": component,
    }


def metadata(options: ManifestOptions, name: str, component: str) -> Manifest:
    """Of an object, with the labels that Kubernetes recommends and those of the person."""
    own = dict(label.split("=", 1) for label in options.label)
    labels = {**selector_labels(options, component), "app.kubernetes.io/version": own_version(), **own}
    return {"name": name, **({"namespace": options.namespace} if options.namespace else {}), "labels": labels}


def claims(options: ManifestOptions, component: str) -> list[Manifest]:
    """The claims whose size is set: one for several pods can be mounted by several machines at once."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata(options, mount.claim, component),
            "spec": {
                "accessModes": ["ReadWriteOnce" if mount.coordinator else "ReadWriteMany"],
                "resources": {"requests": {"storage": mount.size}},
            },
        }
        for mount in options.mounts()
        if mount.size is not None
    ]


def resources(cpu: str, memory: str, gpus: int = 0, gpu_resource: str = "") -> Manifest:
    """Cores are what a pod gets at least, memory and devices what it has: beyond its memory a container is killed."""
    limits: Manifest = {"memory": memory}
    if gpus:
        limits[gpu_resource] = str(gpus)
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": limits}


def pod(
    options: ManifestOptions,
    component: str,
    container: Manifest,
    mounts: Sequence[Mount],
    secret: str | None,
    gpus: int = 0,
    **more: Any,
) -> Manifest:
    """A pod's template around one container. `secret`: whose files lie in `KEYS_FOLDER`; None: no secret."""
    volumes: list[Manifest] = []
    seen: list[Manifest] = []

    def mount(name: str, path: str, source: Manifest, read_only: bool = False) -> None:
        if name not in (volume["name"] for volume in volumes):
            volumes.append({"name": name, **source})
        seen.append({"name": name, "mountPath": path, **({"readOnly": True} if read_only else {})})

    for number, one in enumerate(mounts):
        before = next((index for index, other in enumerate(mounts) if other.claim == one.claim), number)
        source = {"persistentVolumeClaim": {"claimName": one.claim}}
        mount(f"claim-{before}", one.path, source, one.read_only)
    if secret is not None:
        mount("keys", KEYS_FOLDER, {"secret": {"secretName": secret, "defaultMode": GROUP_READS}}, True)
    mount("home", HOME, {"emptyDir": {}})
    mount("tmp", "/tmp", {"emptyDir": {}})
    mount("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}})  # a container's own has 64 MiB
    seen.sort(key=lambda one: len(PurePosixPath(one["mountPath"]).parts))  # a volume in another's folder comes after it
    selector = dict(one.split("=", 1) for one in options.node_selector)
    tolerated = {"tolerations": [{"key": options.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]}
    return {
        "metadata": {"labels": {**selector_labels(options, component), "app.kubernetes.io/version": own_version()}},
        "spec": {
            **more,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # GPUINFER_PORT=tcp://… in the environment would be a setting of ours
            **({"nodeSelector": selector} if selector else {}),
            **(tolerated if gpus else {}),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    **container,
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": seen,
                }
            ],
            "volumes": volumes,
        },
    }


def arguments(words: Sequence[str]) -> list[str]:
    """As a container's `args`: Kubernetes puts a variable's value in the place of `$(NAME)`, and takes `$$` for `$`."""
    return [word.replace("$", "$$") for word in words]


def image_of(options: ManifestOptions) -> str:
    return options.image or ("gpuinfer:cuda" if options.gpus else "gpuinfer:cpu")


def keys_secret(options: ManifestOptions) -> str:
    return options.keys_secret or f"{options.name}-keys"
