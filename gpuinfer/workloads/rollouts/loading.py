"""Environments by name, and their options: an installed one, or `module:factory`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from gpuinfer.config import blame, registry
from gpuinfer.config.options import Given, check, several
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host import spoken
from gpuinfer.rollouts.environment import Environment

FLAG = "--env-option"
HORIZON = "horizon"
OURS = {"diplomacy": "plugins/gpuinfer-diplomacy"}  # by name, where they lie in our repository


@dataclass(frozen=True)
class EnvironmentMaker:
    """Makes one environment after another, all with the same options."""

    name: str
    factory: Callable[..., Any]
    origin: str  # of what package it is, in words
    options: Mapping[str, Any] = field(default_factory=dict)
    knows_horizon: bool = False  # the environment itself ends a game there

    @property
    def who(self) -> str:
        return f"environment '{self.name}' ({self.origin})" if self.origin else f"environment '{self.name}'"

    def __call__(self) -> Environment:
        """Raises what the factory does; `UsageError` for what is no environment."""
        made = self.factory(**self.options)
        missing = [one for one in ("reset", "observe", "step", "close") if not callable(getattr(made, one, None))]
        if missing:
            raise UsageError(
                f"{self.who} made a {type(made).__name__}, which has no {', '.join(missing)}. "
                "Derive it from gpuinfer.rollouts.environment.Environment."
            )
        return made  # type: ignore[no-any-return]


def open_environment(name: str, given: Sequence[str], horizon: int | None = None) -> EnvironmentMaker:
    """The environment of that name with options `key=value`. Raises `UsageError`."""
    factory = _imported(name) if ":" in name else _installed(name)
    if not callable(factory):
        raise UsageError(f"environment '{name}' is a {type(factory).__name__}, which cannot be called. Name a class.")
    model = _options_of(factory)
    pairs = several(_pair(one) for one in given)
    knows = HORIZON in model.model_fields
    if knows and horizon is not None and HORIZON not in pairs:
        pairs[HORIZON] = Given(horizon, "--horizon")
    return EnvironmentMaker(name, factory, _origin(name, factory), check(model, pairs, f"environment '{name}'"), knows)


def _pair(word: str) -> tuple[str, Given]:
    key, equals, value = word.partition("=")
    key = key.strip().replace("-", "_")
    if not (key and equals):
        raise UsageError(f"{FLAG} {word}: not of the form key=value. Write {FLAG} {key or 'key'}=VALUE.")
    return key, Given(value, f"{FLAG} {key}")


def _options_of(factory: Any) -> type[BaseModel]:
    """Its `Options`; of a plain function those that its parameters tell."""
    own = getattr(factory, "Options", None)
    if isinstance(own, type) and issubclass(own, BaseModel):
        return own
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(factory, eval_str=True).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    return create_model("Options", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)


def _origin(name: str, factory: Any) -> str:
    if ":" not in name:
        return f"package {registry.find('environments', name).package}"
    return blame.owner_of(getattr(factory, "__module__", name.partition(":")[0]))


def _installed(name: str) -> Any:
    try:
        return registry.load("environments", name)
    except UnknownName as error:
        if (package := OURS.get(name)) is None:
            raise
        raise UsageError(f"{error} Ours is in a package of its own: pip install {package}") from None


def _imported(name: str) -> Any:
    """What `module:factory` names; modules in the working folder count, as they do for `python -m`."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"environment '{name}': {spoken.said(error)}. Name it as module:factory, where the module can be imported."
        ) from error
    except Exception as error:
        raise UsageError(
            f"environment '{name}': importing '{module}' raised {spoken.in_short(error)}. "
            f"`python -c 'import {module}'` shows where."
        ) from error
