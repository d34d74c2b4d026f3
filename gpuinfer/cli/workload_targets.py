"""A command about workloads: a subcommand for each that is installed; without one it is about self-play."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from gpuinfer.cli import flags
from gpuinfer.config import options, registry
from gpuinfer.errors import PluginError, UnknownName, UsageError

DEFAULT = "selfplay"
NAMES = {"load": "engine"}  # targets that are called by what they show, and not by their workload
HELP = ("-h", "--help")


class WorkloadTargets(TyperGroup):
    """Its subcommands take the workload's own flags and some more."""

    text: str  # of a subcommand's help

    @abstractmethod
    def own_flags(self) -> flags.Parameters:
        """The flags of this command alone."""

    def flags_for(self, target: str) -> flags.Parameters:
        """The same for one target, which may have more."""
        return self.own_flags()

    @abstractmethod
    def execute(self, target: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> int:
        """Do it, with the workload's and the common flags (None: not given) and the own ones. The exit code."""

    def workloads(self) -> dict[str, str]:
        """The targets with their workloads."""
        return {target_name(name): name for name in registry.names("workloads")}

    def target(self, name: str) -> Any:
        """The subcommand for this workload. Raises `PluginError` when it cannot be loaded."""
        from gpuinfer.cli.workload import made

        own = self.flags_for(name)

        def call(**values: Any) -> None:
            given = {key: values.pop(key) for key in own}
            raise typer.Exit(self.execute(name, values, given))

        return made(name, parameters(name, registry.load("workloads", name), own), self.text, call)

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(self.workloads())

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        from gpuinfer.cli.app import workload_stand_in

        known = self.workloads()
        return workload_stand_in(known[cmd_name], cmd_name) if cmd_name in known else None

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Flags without a target are those of the default one."""
        if not args or (args[0].startswith("-") and args[0] not in HELP):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)  # type: ignore[arg-type]

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str, Any, list[str]]:  # type: ignore[override]
        name, known = args[0], self.workloads()
        if name not in known:
            raise UnknownName("target", name, self.list_commands(ctx), label="Targets")
        return name, self.target(known[name]), args[1:]


def target_name(workload: str) -> str:
    """The target of this workload."""
    return NAMES.get(workload, workload)


def parameters(name: str, plugin: Any, own: flags.Parameters) -> flags.Parameters:
    """The flags of a workload, of every command, and `own`. Raises `PluginError` for an option with the name of one."""
    taken = sorted(own.keys() & options.fields_of(plugin.Options).keys())
    if taken:
        raise PluginError(f"workload '{name}' has an option '{taken[0]}', which is a flag here. Rename the option.")
    common = flags.common_flags(plugin.max_failures)
    del common["trial"]  # what is compared is run often enough
    return {**flags.of(plugin.Options, f"workload '{name}'"), **common, **own}


def parse_seconds(flag: str, text: str, least: float = 0.0) -> float:
    """A time as people write it: `90`, `60s`, `2m`, `500ms`. Raises `UsageError`."""
    value = options.natural(text.strip() + ("in" if text.strip().endswith("m") else ""), float)
    try:
        found = float(value)
    except ValueError:
        found = float("nan")
    if not least <= found < float("inf"):
        raise UsageError(f"{flag}: '{text}' is no time of {least:g} s or more. Write 90, 60s or 2m.")
    return found
