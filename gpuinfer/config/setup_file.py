"""A server as a file describes it: what is served, by whom and how, in place of flags.

A supervisor writes one file for all its replicas, which read it with `serve --setup-file`. JSON, every field typed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gpuinfer.api import Backend, ModelSpec, Setup, Strategy
from gpuinfer.config import blame, registry
from gpuinfer.config.foreign_names import HUB_NAME
from gpuinfer.errors import UsageError, naming
from gpuinfer.generation import Unmasking
from gpuinfer.host.files import write_whole

MOST_BYTES = 1 << 20

ToolFormatName = Literal["auto", "hermes", "llama3", "mistral", "mistral-args", "mistral-ids", "qwen3-coder", "glm4"]
"""How a model writes calls of tools; auto: as its chat template shows."""


class AdditionalModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another model that the same server serves, with an engine, a queue and a strategy of its own."""

    name: str  # by which clients name it
    model: ModelSpec
    share: float = 1.0  # of the device, where several want it: `Setup.share` is the first one's
    unmasking: Unmasking | None = None


class ServerSetup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one server serves. Options are plain values, as the plugins' `Options` take them."""

    setup: Setup  # with its model
    backend: str = "inprocess"
    backend_options: Mapping[str, Any] = {}
    strategy: str = "dynamic"
    strategy_options: Mapping[str, Any] = {}
    unmasking: Unmasking | None = None  # how masks are filled in where a request does not say
    tool_format: ToolFormatName = "auto"  # of calls in answers to chats
    reasoning: Literal["auto", "none"] = "auto"  # whether thoughts are told apart from these
    served_model_name: str | None = None  # by which clients name the model; None: see `name`
    aliases: tuple[str, ...] = ()  # its other names for clients
    beside: tuple[AdditionalModel, ...] = ()  # the others that are served

    @property
    def name(self) -> str:
        """By which clients name the model: of a path only its last part, of a hub's name without the revision."""
        if self.served_model_name:
            return self.served_model_name
        model = self.setup.model
        if model is None:
            return "none"
        if model.kind != "text":
            return model.name
        name = model.weights or model.name
        hub = None if os.path.exists(os.path.expanduser(name)) else HUB_NAME.fullmatch(name)
        return Path(hub["file"] or hub["repository"]).name if hub else Path(name).resolve().name

    @property
    def names(self) -> tuple[str, ...]:
        """Of all models."""
        return (self.name, *(one.name for one in self.beside))

    @property
    def models(self) -> tuple[tuple[str, ModelSpec], ...]:
        """All of them, each with its name."""
        first = () if self.setup.model is None else ((self.name, self.setup.model),)
        return (*first, *((one.name, one.model) for one in self.beside))

    @property
    def kind(self) -> str:
        """text or rows."""
        return "rows" if self.setup.model is None else self.setup.model.kind

    def plugins(self) -> tuple[Backend, Strategy]:
        """The backend and the strategy. Raises `UsageError` or `ValidationError` for what they refuse."""
        backend = blame.make(registry.load("backends", self.backend), self.setup, dict(self.backend_options))
        strategy = registry.load("strategies", self.strategy)
        for one in self.beside:  # made again once there is something to stand beside: here it is refused in time
            with self.naming(one.name), blame.blaming(backend, "beside"):
                backend.beside(one.model, one.share)
        return backend, blame.make(strategy, self.setup, dict(self.strategy_options))

    def naming(self, name: str) -> AbstractContextManager[None]:
        """Of several models, a `UsageError` that is raised inside says which one it is of."""
        return naming(name if self.beside else None)

    def write(self, path: Path) -> None:
        """For the owner's eyes alone."""
        write_whole(path, msgspec.json.encode(self))


def read_setup_file(path: Path) -> ServerSetup:
    """Raises `UsageError` for a file that cannot be read, or describes no server."""
    cure = "Give --setup-file a file that a supervisor wrote, or --model."
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"the setup file {path} has more than {MOST_BYTES:,} bytes. {cure}")
        return _with_layouts(msgspec.json.decode(path.read_bytes(), type=ServerSetup))
    except OSError as error:
        raise UsageError(f"the setup file {path} cannot be read: {error.strerror}. {cure}") from error
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise UsageError(f"the setup file {path} describes no server: {error}. {cure}") from error


def _with_layouts(described: ServerSetup) -> ServerSetup:
    """The layouts of rows, which are plain values in the file. Raises `ValueError` for one that is none."""

    def restored(spec: ModelSpec) -> ModelSpec:
        if spec.layout is None:
            return spec
        from gpuinfer.models.row_layout import RowLayout

        layout = spec.layout
        return replace(spec, layout=RowLayout.from_wire(layout.get("leaves") if isinstance(layout, dict) else None))

    model = described.setup.model
    setup = described.setup if model is None else replace(described.setup, model=restored(model))
    beside = tuple(msgspec.structs.replace(one, model=restored(one.model)) for one in described.beside)
    return msgspec.structs.replace(described, setup=setup, beside=beside)
