"""The user's options for running a model: devices, forward, stages.

Without torch, which takes a second to load: a command line is checked before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator, Field
from pydantic.config import JsonDict

from gpuinfer.api import Setup
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host import machine

EVERY = ("cuda", "all")  # of several: each CUDA device
UNKNOWN = ("auto", "all")  # CPU or CUDA, depending on the machine


def index_of(name: str) -> int | None:
    """The index of a CUDA device (0 for `cuda`); None for a name that is not CUDA's. Raises `UnknownName`."""
    if name in ("cpu", *UNKNOWN):
        return None
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise UnknownName("device", name, ["auto", "all", "cpu", "cuda", "cuda:1"], label="Choices")
    return int(index or 0)


def check_names(names: Sequence[str]) -> None:
    """Check device names without asking the machine. Raises `UsageError` for an unknown name, for CPU and CUDA
    together, and for a device that is named twice.
    """
    numbers = {name: index_of(name) for name in names}
    kinds = {"cpu" if number is None else "cuda" for name, number in numbers.items() if name not in UNKNOWN}
    if len(kinds) > 1:
        raise mixed(names)
    found = [f"cuda:{numbers[name]}" for name in names if numbers[name] is not None and name not in EVERY]
    if twice := next((one for place, one in enumerate(found) if one in found[:place]), None):
        raise named_twice(names, twice)


def may_be_missing(names: Sequence[str]) -> bool:
    """Whether one of them is a CUDA device that this machine seems not to have, so that torch must be asked."""
    numbers = [number for name in names if (number := index_of(name)) is not None]
    return bool(numbers) and (not machine.has_cuda() or max(numbers) >= machine.cuda_devices())


def mixed(names: Sequence[str]) -> UsageError:
    return UsageError(
        f"--device {','.join(names)} mixes the CPU with CUDA devices, beside which it does next to nothing. "
        "Name devices of one kind."
    )


def named_twice(names: Sequence[str], twice: object) -> UsageError:
    return UsageError(f"--device {','.join(names)} names {twice} twice. Name each device once.")


MaxRows = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="rows in one batch; default 4096 on a CPU, more on CUDA"),
]
ChunkRows = Annotated[Annotated[int, Field(ge=1)] | None, Field(description="rows that go through the model at once")]
GradientLoss = Annotated[
    str | None, Field(description="of gradients: module:function of (answers, targets) [policy-value]")
]
CheckpointSegments = Annotated[
    Annotated[int, Field(ge=1)] | Literal["auto"] | None,
    Field(description="of gradients: keep activations of so many segments of the layers alone, or auto"),
]
CompileMode = bool | Literal["default", "reduce-overhead", "max-autotune"]
Compile = Annotated[
    CompileMode,
    Field(
        description="compile the model with torch.compile: true (default), reduce-overhead (CUDA: and launch it as one "
        "graph), max-autotune (try several kernels for each product)"
    ),
]
Graphs = Annotated[bool, Field(description="on CUDA, launch each batch as one captured graph")]


Parallel = Literal["data", "layers", "pipeline"]

STAGED = ("layers", "pipeline")
OF_STAGES = ("stages", "split_points", "micro_batch_rows", "layers")  # options of these two modes only
MOST_STAGES = 1024
WITH_STAGES: JsonDict = {"only_with": {"parallel": list(STAGED)}}
"""For the fields of these options: a comparison leaves them out of `data`."""
PARALLEL = (
    "data: each batch goes through a whole model; layers: the model's layers over the devices, one batch at a time; "
    "pipeline: the same with micro-batches of several batches in flight"
)
LAYERS = (
    "of stages and checkpoint_segments: the attribute with the layers, where they cannot be told, as encoder.blocks"
)


@dataclass(frozen=True, slots=True)
class StageShare:
    """A stage's device, `cpu` or `cuda:1`, and how many layers it has."""

    device: str
    layers: int


SHARE = re.compile(r"(cpu|cuda:\d+):([1-9]\d{0,8})", re.ASCII)
SHARES_CURE = "Write DEVICE:LAYERS for each stage, as cuda:0:12,cuda:1:20 or cpu:12,cpu:20; or a number of stages"


def stage_shares(stages: int | str) -> tuple[StageShare, ...] | None:
    """The stages of `cuda:0:12,cuda:1:20`, in order; a `+` parts them as well as a comma. None for a number and `auto`.
    Raises `ValueError` for what cannot be read, fewer than two stages, and CPU and CUDA together.
    """
    if not isinstance(stages, str) or stages == "auto":
        return None
    found = []
    for part in re.split(r"[,+]", stages):
        read = SHARE.fullmatch(part.strip())
        if read is None:
            raise ValueError(f"'{part.strip()}' names no stage. {SHARES_CURE}")
        found.append(StageShare(read[1], int(read[2])))
    if not 2 <= len(found) <= MOST_STAGES:
        raise ValueError(f"{len(found)} stage{'s' if len(found) > 1 else ''}. {SHARES_CURE}")
    if len({share.device.partition(":")[0] for share in found}) > 1:
        raise ValueError(f"{stages} mixes the CPU with CUDA devices. Name devices of one kind")
    return tuple(found)


def _stages(value: Any) -> Any:
    """A number of stages, also where it is written as text, `auto`, or their shares."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and not 2 <= value <= MOST_STAGES:
        raise ValueError(f"{value} stage{'' if value == 1 else 's'}, and there are 2 to {MOST_STAGES}. {SHARES_CURE}")
    if isinstance(value, str):
        stage_shares(value)
    return value


def with_stage_devices(setup: Setup, stages: int | str) -> Setup:
    """The setup with the devices that `stages` names, each once, if it names any. Raises `UsageError` where the setup
    names others.
    """
    shares = stage_shares(stages)
    if shares is None:
        return setup
    named = list(dict.fromkeys(share.device for share in shares))
    kind = named[0].partition(":")[0]
    selected = {one if (index := index_of(one)) is None or one == kind else f"cuda:{index}" for one in setup.devices}
    if not selected <= {"auto", "all", kind} and selected != set(named):
        raise UsageError(
            f"--device {','.join(setup.devices)}, and stages={stages} puts the layers on {', '.join(named)}. Leave "
            "--device out, or name the same devices."
        )
    return replace(setup, devices=tuple(named))


def _point(value: Any) -> Any:
    """A layer by its number, also where it is written as text, or by its name."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


Stages = Annotated[
    int | str,
    BeforeValidator(_stages),
    Field(
        description="of layers and pipeline: how many; auto: one a device, two on a single CPU; or the device and the "
        "number of layers of each, as cuda:0:12,cuda:1:20",
        json_schema_extra=WITH_STAGES,
    ),
]
SplitPoints = Annotated[
    tuple[Annotated[Annotated[int, Field(ge=1)] | str, BeforeValidator(_point)], ...] | None,
    Field(
        description="of layers and pipeline: the layers at which stages begin, by number or by name, as 2,4 or "
        "layers.2,layers.4; default by measured time and memory",
        json_schema_extra=WITH_STAGES,
    ),
]
MicroBatchRows = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(
        description="of layers and pipeline: rows, of text tokens, that go through a stage at once; default by the "
        "batch",
        json_schema_extra=WITH_STAGES,
    ),
]


class CutOptions(Protocol):
    """Options of stages: how many, where they begin, rows of a micro-batch."""

    @property
    def parallel(self) -> Parallel: ...
    @property
    def stages(self) -> int | str: ...
    @property
    def split_points(self) -> Sequence[int | str] | None: ...
    @property
    def micro_batch_rows(self) -> int | None: ...


class ForwardOptions(CutOptions, Protocol):
    """These, and what does not go with them."""

    @property
    def in_flight(self) -> int | None: ...
    @property
    def compile(self) -> CompileMode: ...


class StageOptions(ForwardOptions, Protocol):
    """What an options class with stages of models of rows has."""

    @property
    def layers(self) -> str | None: ...


def compile_name(wanted: CompileMode) -> str | None:
    """What a user calls this mode; None: nothing is compiled."""
    return "default" if wanted is True else wanted or None


def torch_compile_mode(wanted: CompileMode, device: str, *, graphs: bool, deterministic: bool) -> str | None:
    """The `mode` of torch.compile on a device of this type; None: nothing is compiled.

    CUDA graphs are always ours, which any thread launches: torch keeps its own to the thread that captured them.
    Raises `UsageError` for a mode that cannot be had.
    """
    if wanted == "reduce-overhead" and device == "cpu":
        raise UsageError("-B compile=reduce-overhead launches CUDA graphs, and a CPU has none. Use -B compile=default.")
    if wanted == "reduce-overhead" and not graphs:
        raise UsageError(
            "-B compile=reduce-overhead launches CUDA graphs, and -B graphs=false does not. Leave one of them out."
        )
    if wanted == "max-autotune" and deterministic:
        raise UsageError(
            "-B compile=max-autotune chooses kernels by their time, and the next run may choose others, of other bits. "
            "Use -B compile=default, or leave --deterministic out."
        )
    if wanted == "max-autotune":
        return "max-autotune-no-cudagraphs" if device == "cuda" else "max-autotune"
    return "default" if wanted else None


def complaint_of(given: ForwardOptions, layers_serve: bool = False) -> str | None:
    """What is wrong with these options together, with the cure; None if nothing is. `layers_serve`: the option `layers`
    has a use other than stages.
    """
    said: Mapping[str, Any] = {
        "stages": None if given.stages == "auto" else given.stages,
        "split_points": None if given.split_points is None else ",".join(map(str, given.split_points)),
        "micro_batch_rows": given.micro_batch_rows,
        "layers": None if layers_serve else getattr(given, "layers", None),
    }
    if given.parallel == "data":
        name = next((name for name in OF_STAGES if said[name] is not None), None)
        return name and (
            f"{name}={said[name]} says how a model is cut into stages, and with parallel=data it is not cut. Add "
            f"-B parallel=pipeline or -B parallel=layers, or leave {name} out"
        )
    points, listed = given.split_points, said["split_points"]
    numbers = [point for point in points or () if isinstance(point, int)]  # where names stand only the model knows
    if points is not None and (not points or numbers != sorted(set(numbers)) or len(set(points)) < len(points)):
        return f"split_points={listed} do not ascend. Name the layers at which stages begin in their order, such as 2,4"
    if points is not None and stage_shares(given.stages) is not None:
        return f"split_points={listed} and stages={given.stages} both say where stages begin. Leave one of them out"
    if points is not None and given.stages not in ("auto", len(points) + 1):
        return (
            f"split_points={listed} make {len(points) + 1} stages, and stages={given.stages} asks for another number. "
            "Leave one of them out"
        )
    if given.compile:
        mode = "true" if given.compile is True else given.compile
        return f"compile={mode} compiles a whole model, and parallel={given.parallel} cuts it. Leave one of them out"
    if given.parallel == "layers" and (given.in_flight or 1) > 1:
        return (
            f"in_flight={given.in_flight} batches at once, and with parallel=layers there is one. Use "
            "parallel=pipeline, or leave in_flight out"
        )
    return None
