"""The flags of `gpuinfer fleet kubernetes`. What Kubernetes would refuse is refused here, with the cure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"  # RFC 1123
LABEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
QUANTITY = re.compile(r"(?=.*[1-9])(\d{1,15}(\.\d{1,9})?|\.\d{1,9})(m|k|[MGTPE]|[KMGTPE]i)?")
MEMORY = re.compile(r"(?=.*[1-9])\d{1,15}(\.\d{1,9})?(k|[MGTPE]|[KMGTPE]i)?")
DOMAIN = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)*[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?::\d{1,5})?"
PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
IMAGE = re.compile(rf"(?:{DOMAIN}/)?{PART}(?:/{PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?", re.ASCII)
URL = re.compile(r"https?://[^\s\"'<>]+")
MOST_NAME = 40  # of 63, which a pod's name may have: "-coordinator" and a number follow it
READ_ONLY, COORDINATOR = "ro", "coordinator"  # words behind a mount's path


def _name(value: str) -> str:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", value) or len(value) > MOST_NAME:
        cure = "small letters, digits and '-', first a letter and last none of '-'"
        raise ValueError(f"no name for objects of Kubernetes (RFC 1035). Write at most {MOST_NAME} of {cure}")
    return value


def _namespace(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value) or len(value) > 63:
        raise ValueError("no namespace (RFC 1123). Write at most 63 small letters, digits and '-' between them")
    return value


def _object_name(value: str) -> str:
    if not re.fullmatch(SUBDOMAIN, value) or len(value) > 253:
        raise ValueError("no object's name (RFC 1123). Write small letters, digits, and '-' or '.' between them")
    return value


def _image(value: str) -> str:
    if not IMAGE.fullmatch(value) or len(value) > 512:
        raise ValueError("no image. Write NAME:TAG in small letters, such as registry.example.org/gpuinfer:0.1")
    return value


def _cores(value: str) -> str:
    if not QUANTITY.fullmatch(value):
        raise ValueError("no number of cores. Write 4, 0.5 or 500m")
    return value


def _memory(value: str) -> str:
    if not MEMORY.fullmatch(value):
        raise ValueError("no amount of memory. Write it as 16Gi or 512Mi")
    return value


def _resource(value: str) -> str:
    prefix, slash, name = value.partition("/")
    if not slash or not re.fullmatch(SUBDOMAIN, prefix) or not LABEL_NAME.fullmatch(name):
        raise ValueError("no resource of devices. Write nvidia.com/gpu, amd.com/gpu or nvidia.com/mig-1g.10gb")
    return value


def _url(value: str) -> str:
    if not URL.fullmatch(value):
        raise ValueError("no address. Write http://HOST:PORT")
    return value


def _labels(values: list[str]) -> list[str]:
    for one in values:
        key, equals, value = one.partition("=")
        prefix, slash, name = key.rpartition("/")
        prefix_fits = re.fullmatch(SUBDOMAIN, prefix) if slash else True
        if not (equals and prefix_fits and LABEL_NAME.fullmatch(name) and (not value or LABEL_NAME.fullmatch(value))):
            raise ValueError(f"'{one}' is no label. Write KEY=VALUE, each at most 63 letters, digits, '-', '_' and '.'")
    return values


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume of the pods: the claim, where it is seen, and the size with which the claim is printed too (None: it is
    there already). `coordinator`: of a run, by the coordinator alone.
    """

    claim: str
    path: str
    read_only: bool = False
    size: str | None = None
    coordinator: bool = False

    @classmethod
    def of(cls, text: str) -> Mount:
        """`CLAIM:/PATH`, then any of `:ro`, `:SIZE` and `:coordinator`. Raises ValueError."""
        claim, _, rest = text.partition(":")
        path, *words = rest.split(":")
        sizes = [word for word in words if word not in (READ_ONLY, COORDINATOR)]
        fits = re.fullmatch(r"(/[A-Za-z0-9_.-]+)+", path) and ".." not in path.split("/")
        if not fits or len(words) != len({*words}) or len(sizes) > 1 or not all(map(MEMORY.fullmatch, sizes)):
            raise ValueError(f"'{text}' is no mount. Write CLAIM:/PATH, then :ro, :SIZE such as :50Gi, or :coordinator")
        return cls(_object_name(claim), path, READ_ONLY in words, sizes[0] if sizes else None, COORDINATOR in words)

    def holds(self, path: str) -> bool:
        """Whether this absolute path is in it."""
        return f"{path.rstrip('/')}/".startswith(f"{self.path}/")


def _mounts(values: list[str]) -> list[str]:
    paths = [Mount.of(one).path for one in values]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ValueError(f"two volumes cannot both be at {twice}. Name another path for one")
    return values


Name = Annotated[str, AfterValidator(_name)]
Quantity = Annotated[str, AfterValidator(_cores)]
Memory = Annotated[str, AfterValidator(_memory)]
Labels = Annotated[list[str], AfterValidator(_labels)]
Mounts = Annotated[list[str], AfterValidator(_mounts)]


class ManifestOptions(BaseModel):
    """What the manifests say apart from the command that the pods run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name = Field("gpuinfer", description="of the objects, and what theirs begin with")
    namespace: Annotated[str, AfterValidator(_namespace)] | None = Field(
        None, description="where they are put [that of kubectl]"
    )
    image: Annotated[str, AfterValidator(_image)] | None = Field(
        None, description="of the containers [gpuinfer:cpu, with --gpus gpuinfer:cuda]"
    )
    replicas: int | None = Field(
        None, ge=1, le=10_000, description="pods of a server [2]; with --max-replicas the least"
    )
    nodes: int | None = Field(None, ge=1, le=10_000, description="pods of a run that work, without its coordinator [2]")
    gpus: int = Field(0, ge=0, le=64, description="devices of each pod")
    gpu_resource: Annotated[str, AfterValidator(_resource)] = Field(
        "nvidia.com/gpu", description="how the cluster calls them"
    )
    cpu: Quantity = Field("4", description="cores of each pod")
    memory: Memory = Field("16Gi", description="of each pod")
    coordinator_memory: Memory = Field("4Gi", description="of a run's coordinator")
    mount: Mounts = Field(
        [],
        max_length=64,
        description="a volume, as CLAIM:/PATH, read alone with :ro; with a size, :50Gi, its claim is printed too; "
        "with :coordinator the nodes of a run do not see it; repeatable",
        json_schema_extra={"repeatable": True},
    )
    keys_secret: Annotated[str, AfterValidator(_object_name)] | None = Field(
        None, description="the secret with the keys, which you create [the name and -keys]"
    )
    max_replicas: int | None = Field(None, ge=1, le=10_000, description="more pods up to these while rows wait")
    autoscaler: Literal["hpa", "keda"] | None = Field(
        None, description="by Kubernetes' own, with a Prometheus adapter, or by KEDA [hpa with --max-replicas]"
    )
    target_queue: int = Field(16, ge=1, le=1 << 30, description="rows that wait per pod, above which there are more")
    prometheus: Annotated[str, AfterValidator(_url)] = Field(
        "http://prometheus-operated.monitoring.svc:9090", description="which KEDA asks"
    )
    monitor: bool = Field(True, description="a ServiceMonitor, for Prometheus' operator")
    start_timeout: int = Field(
        600, ge=5, le=86_400, description="seconds for a model to load, then the pod starts anew"
    )
    label: Labels = Field(
        [],
        max_length=64,
        description="KEY=VALUE on every object, such as release=prometheus; repeatable",
        json_schema_extra={"repeatable": True},
    )
    node_selector: Labels = Field(
        [],
        max_length=64,
        description="KEY=VALUE of the machines that pods may run on; repeatable",
        json_schema_extra={"repeatable": True},
    )

    def mounts(self) -> Sequence[Mount]:
        return [Mount.of(one) for one in self.mount]
