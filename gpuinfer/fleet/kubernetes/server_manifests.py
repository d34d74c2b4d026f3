"""`gpuinfer serve` for many clients: a Deployment, since one pod is as good as another and none keeps anything."""

from __future__ import annotations

import math
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

SERVER, PORT = "server", 8000
REPLICAS = 2
NOTICED_S = 5  # from a pod's end being decided until no client sends it requests
ROOM_S = 15  # added to that and --drain-timeout, until a pod is killed
EVERY_S = 5  # between two probes of a pod that starts
CALM_S = 300  # without need of a pod until it leaves


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What the pods run: `gpuinfer serve` and these words, without its address and keys."""

    words: tuple[str, ...]
    drain_s: float = 30.0
    fleet: bool = False  # whether each pod has several replicas and a router
    router_queue: bool = False  # whether requests wait in that router
    open: bool = False  # --insecure: it takes no keys

    @property
    def live_path(self) -> str:
        """A single server that is stuck is started anew; a fleet heals its own replicas, and is not killed for them."""
        return "/v2/health/live" if self.fleet else "/health"

    @property
    def queue_metric(self) -> str:
        return "gpuinfer_router_queue_length" if self.router_queue else "gpuinfer_waiting_rows"


def server_manifests(options: ManifestOptions, command: ServerCommand) -> list[Manifest]:
    """Claims, Deployment, Service, disruption budget, autoscaling and monitoring."""
    found = [*claims(options, SERVER), _deployment(options, command), _service(options), _budget(options)]
    if options.max_replicas is not None:
        found.append(_keda(options, command) if options.autoscaler == "keda" else _autoscaler(options, command))
    if options.monitor:
        found.append(_monitor(options, command))
    return found


def _deployment(options: ManifestOptions, command: ServerCommand) -> Manifest:
    secret = None if command.open else keys_secret(options)
    words = [*command.words, "--host=0.0.0.0", f"--port={PORT}"]
    if secret is not None:
        words.append(f"--api-key-file={KEYS_FOLDER}/keys")
    probe = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    container = {
        "name": "gpuinfer",
        "image": image_of(options),
        "args": arguments(words),
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": resources(options.cpu, options.memory, options.gpus, options.gpu_resource),
        "startupProbe": {
            **probe,
            "periodSeconds": EVERY_S,
            "failureThreshold": math.ceil(options.start_timeout / EVERY_S),
        },
        "readinessProbe": {**probe, "periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {
            **probe,
            "httpGet": {"path": command.live_path, "port": "http"},
            "periodSeconds": 10,
            "failureThreshold": 3,
        },
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(NOTICED_S)]}}},
    }
    # A device is seldom free for a pod more than there are: then one leaves before its successor comes.
    update = {"maxUnavailable": 1, "maxSurge": 0} if options.gpus else {"maxUnavailable": 0, "maxSurge": 1}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector_labels(options, SERVER)},
    }
    # Where an autoscaler chooses, a number here would be put in its place at each `kubectl apply`.
    replicas = {} if options.max_replicas is not None else {"replicas": options.replicas or REPLICAS}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(options, options.name, SERVER),
        "spec": {
            **replicas,
            "selector": {"matchLabels": selector_labels(options, SERVER)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": update},
            "progressDeadlineSeconds": options.start_timeout + 60,
            "template": pod(
                options,
                SERVER,
                container,
                options.mounts(),
                secret,
                options.gpus,
                terminationGracePeriodSeconds=NOTICED_S + math.ceil(command.drain_s) + ROOM_S,
                topologySpreadConstraints=[spread],
            ),
        },
    }


def _service(options: ManifestOptions) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(options, options.name, SERVER),
        "spec": {
            "selector": selector_labels(options, SERVER),
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _budget(options: ManifestOptions) -> Manifest:
    """One pod at a time may go, also the only one: else its machine could never be drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(options, options.name, SERVER),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector_labels(options, SERVER)}},
    }


def _autoscaler(options: ManifestOptions, command: ServerCommand) -> Manifest:
    """By a metric of each pod, as a Prometheus adapter has it."""
    metric = {"name": command.queue_metric}
    target = {"type": "AverageValue", "averageValue": str(options.target_queue)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(options, options.name, SERVER),
        "spec": {
            "scaleTargetRef": _target(options),
            "minReplicas": options.replicas or 1,
            "maxReplicas": options.max_replicas,
            "metrics": [{"type": "Pods", "pods": {"metric": metric, "target": target}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": CALM_S}},
        },
    }


def _keda(options: ManifestOptions, command: ServerCommand) -> Manifest:
    """By a query of Prometheus. `namespace` and `service` are labels that a ServiceMonitor gives."""
    labels = {**({"namespace": options.namespace} if options.namespace else {}), "service": options.name}
    chosen = ",".join(f'{key}="{value}"' for key, value in labels.items())
    trigger = {
        "serverAddress": options.prometheus,
        "query": f"sum({command.queue_metric}{{{chosen}}})",
        "threshold": str(options.target_queue),
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(options, options.name, SERVER),
        "spec": {
            "scaleTargetRef": _target(options),
            "minReplicaCount": options.replicas or 1,
            "maxReplicaCount": options.max_replicas,
            "cooldownPeriod": CALM_S,
            "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": trigger}],
        },
    }


def _target(options: ManifestOptions) -> Manifest:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": options.name}


def _monitor(options: ManifestOptions, command: ServerCommand) -> Manifest:
    key = {"type": "Bearer", "credentials": {"name": keys_secret(options), "key": "metrics"}}
    endpoint = {"port": "http", "path": "/metrics", "interval": "15s"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata(options, options.name, SERVER),
        "spec": {
            "selector": {"matchLabels": selector_labels(options, SERVER)},
            "endpoints": [endpoint if command.open else {**endpoint, "authorization": key}],
        },
    }
