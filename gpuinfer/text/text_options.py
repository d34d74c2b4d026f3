"""The options of a text model that all backends of text share: name, adapters, numbers of rows and pages. Neither numpy
nor torch is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gpuinfer import api
from gpuinfer.errors import UsageError
from gpuinfer.models.model_options import (
    PARALLEL,
    ChunkRows,
    Compile,
    Graphs,
    MaxRows,
    MicroBatchRows,
    Parallel,
    SplitPoints,
    Stages,
    complaint_of,
)
from gpuinfer.models.processor import COMPUTE, Compute
from gpuinfer.text.hub_cache import absence_of, cached_model, hub_model_of
from gpuinfer.text.packaged_models import PACKAGED, packaged_files
from gpuinfer.units import size

MAX_ADAPTERS, MOST_ADAPTERS = 8, 1024
ADAPTERS_HELP = "of text: LoRA adapters that are there from the start, as name=DIR,name=DIR"
MAX_ADAPTERS_HELP = "of text: adapters that are loaded at once, versions that are not the newest included"
FIRST_VERSION = "0"  # the version of an adapter that is there from the start


def adapter_folders_of(given: Any) -> Any:
    """Folders by name, from `name=DIR,name=DIR`, a list of such texts, or a mapping. What is none stays as it is."""
    if isinstance(given, Mapping) or given is None:
        return given
    texts = given.split(",") if isinstance(given, str) else list(given)
    found: dict[str, str] = {}
    for text in texts:
        name, sign, folder = text.strip().partition("=")
        if not (sign and name and folder):
            raise ValueError(f"'{text}' is not name=DIR")
        if name in found:
            raise ValueError(f"'{name}' is named twice")
        found[name] = folder
    return found


def adapter_folders_given(options: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Those of a backend's options, then those that come with the model. Raises `UsageError` for a name in both."""
    own = dict(options or {})
    try:
        more = adapter_folders_of(arguments.get("adapters")) or {}
    except ValueError as error:
        raise UsageError(f"adapters: {error}. Give name=DIR.") from None
    if both := own.keys() & more.keys():
        raise UsageError(f"the adapter '{min(both)}' is named twice. Leave one of them out.")
    return own | more


AdapterFolders = Annotated[dict[str, str] | None, BeforeValidator(adapter_folders_of)]


SlotsOption = Annotated[
    Annotated[int, Field(ge=1, le=65_536)] | None,
    Field(description="of text: rows generated at once; default 64 on a CPU"),
]
PagesOption = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="of text: pages of 32 tokens for keys and values; default what all rows need, or memory allows"),
]
ContextOption = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="of text: most tokens of prompt and answer; default 4096"),
]
DecoderChoice = Literal["native", "transformers"] | None
DECODER_HELP = (
    "of text: whose code computes the layers: native (ours) or transformers (the model's own); default native where "
    "the family is"
)
StepTokensOption = Annotated[
    Annotated[int, Field(ge=1)] | None, Field(description="of text: most tokens that go through at once")
]
SPECULATE_TOKENS = 15  # with the last one of the row they are 16: a step of so many is hardly slower than one of 9
Speculate = Annotated[
    Literal["off", "lookup", "draft"] | None,
    Field(
        description="of text: propose tokens that are likely to come next, and compute several in one step; "
        "lookup: those that came after the same tokens before; draft: a smaller model's. No answer changes"
    ),
]
Draft = Annotated[
    str | None, Field(description="of text: the smaller model of `speculate=draft`: a folder, file or name")
]
SpeculateTokens = Annotated[
    int, Field(ge=1, le=31, description="of text: most tokens proposed for a row in a step of `speculate`")
]


def refuse_half_a_draft(speculate: str | None, draft: str | None) -> None:
    """Raises `ValueError` for a draft model that is not used, and where none is named."""
    if speculate is not None and (speculate == "draft") != (draft is not None):
        raise ValueError("speculate=draft and draft=DIR belong together: give both, or draft=DIR alone")


def changed_arithmetic(options: api.Options) -> str:
    """Options of a backend that change what a model computes, as they were given: "weights=int8 compute=float32"."""
    given = {name: getattr(options, name) for name in ("weights", "decoder", "compute")}
    return " ".join(f"{name}={value}" for name, value in given.items() if value not in (None, "auto"))


WeightFormat = Literal["int8", "int4"]
WeightsOption = Annotated[
    WeightFormat | None,
    Field(description="of text: matrices are rounded to 8 or 4 bits when they are loaded; default as --dtype"),
]


KeepFree = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(lambda value: size(value) if isinstance(value, str) else value),
    Field(
        description="memory of the device that others are to find free, as 2GiB: below it what is not in use goes "
        "back, and text has fewer slots until there is room again"
    ),
]


class TorchModelOptions(api.Options):
    """How a model of ours runs, of rows or of text: the options that backends share, from the flags to its opening."""

    max_rows: MaxRows = None
    slots: SlotsOption = None
    pages: PagesOption = None
    context: ContextOption = None
    step_tokens: StepTokensOption = None
    weights: WeightsOption = None
    decoder: DecoderChoice = Field(default=None, description=DECODER_HELP)
    speculate: Speculate = None
    draft: Draft = None
    speculate_tokens: SpeculateTokens = SPECULATE_TOKENS
    adapters: AdapterFolders = Field(default=None, description=ADAPTERS_HELP)
    max_adapters: int = Field(default=MAX_ADAPTERS, ge=1, le=MOST_ADAPTERS, description=MAX_ADAPTERS_HELP)
    threads: int | None = Field(
        default=None, ge=1, description="torch threads in one forward; default its share of cores"
    )
    in_flight: int | None = Field(
        default=None, ge=1, description="batches at once on a device; default 1 on a CPU, 2 on CUDA"
    )
    chunk_rows: ChunkRows = None
    compute: Compute = Field(default="auto", description=COMPUTE)
    compile: Compile = False
    graphs: Graphs = True
    parallel: Parallel = Field(default="data", description=PARALLEL)
    stages: Stages = "auto"
    split_points: SplitPoints = None
    micro_batch_rows: MicroBatchRows = None
    keep_free: KeepFree = None
    min_slots: int = Field(default=1, ge=1, description="of text with keep_free: never fewer slots")

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if complaint := complaint_of(self, getattr(self, "checkpoint_segments", None) is not None):
            raise ValueError(complaint)
        refuse_half_a_draft(self.speculate, self.draft)
        return self

    @property
    def speculation(self) -> str:
        """What proposes tokens: "off", "lookup" or "draft"."""
        return self.speculate or ("off" if self.draft is None else "draft")


MOST_SIMILAR = 3


def path_kind(name: str) -> tuple[Path, str]:
    """The path that a model's name makes, and "folder", "file" or "nothing". A folder or a file of that name goes
    before a model of the hub, whose path is that in the local cache.
    """
    path = Path(name)
    try:
        path = path.expanduser()
        kind = "folder" if name and path.is_dir() else "file" if path.is_file() else "nothing"
    except (OSError, RuntimeError, ValueError):  # no such user, or no name that a file can have
        kind = "nothing"
    if kind == "nothing" and (cached := cached_model(name)) is not None:
        return cached, "folder" if cached.is_dir() else "file"
    return path, kind


def refuse_absent(name: str, built_in: Collection[str]) -> None:
    """Raises `UsageError` where it is neither built in, nor in an installed package, nor a path."""
    path, kind = path_kind(name)
    if kind == "nothing" and name in PACKAGED:
        packaged_files(name)
    elif kind == "nothing" and name not in built_in:
        raise no_such_model(name, path, built_in)


def no_such_model(name: str, path: Path, built_in: Iterable[str]) -> UsageError:
    """No such folder: those beside it that are called alike, and the built-in models."""
    found = similar_names(path, built_in)
    hint = f" Did you mean {' or '.join(found)}?" if found else ""
    if not found and (hub := hub_model_of(name)) is not None:
        return absence_of(hub)
    return UsageError(
        f"there is no model folder '{name}', and nothing is downloaded.{hint} "
        f"Give a Hugging Face folder, OWNER/NAME of the hub, or one of: {', '.join(sorted(built_in))}."
    )


def similar_names(path: Path, built_in: Iterable[str]) -> list[str]:
    try:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except (OSError, ValueError):
        return []
    names = [*beside, *built_in] if len(path.parts) == 1 else beside
    alike = difflib.get_close_matches(path.name, names, n=MOST_SIMILAR, cutoff=0.6)
    return [f"'{path.parent / one}'" for one in dict.fromkeys(alike)]
