"""Launchers by name. None is imported before it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from gpuinfer.config import options
from gpuinfer.config.options import Given
from gpuinfer.errors import UnknownName
from gpuinfer.fleet.launchers.launcher import Launcher

LAUNCHERS = {
    "local": "gpuinfer.fleet.launchers.local:Local",
    "slurm": "gpuinfer.fleet.launchers.slurm:Slurm",
    "ray": "gpuinfer.fleet.launchers.ray:Ray",
}


def make(name: str, given: Mapping[str, Given]) -> Launcher:
    """The launcher of this name with these options. Raises `UnknownName`; `UsageError` for options, or where it
    cannot work here.
    """
    if name not in LAUNCHERS:
        raise UnknownName("launcher", name, LAUNCHERS, label="Launchers")
    module, _, attribute = LAUNCHERS[name].partition(":")
    kind: type[Launcher] = getattr(importlib.import_module(module), attribute)
    launcher = kind(kind.Options(**options.check(kind.Options, given, f"launcher '{name}'")))
    launcher.check()
    return launcher
