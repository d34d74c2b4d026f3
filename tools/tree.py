"""The command tree as data, of our own package: what the reference and the manual pages are written from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from gpuinfer.cli import subcommands, workload_targets
from gpuinfer.cli.app import app
from gpuinfer.config import registry
from gpuinfer.config.options import accepts

OURS = "gpuinfer"
DEFAULT = re.compile(r"\s*\[default: (.*)\]$", re.S)  # as our flags say it at the end of their help
UNTOLD = (None, False, (), "", [], {})


@dataclass(frozen=True)
class Parameter:
    """An option or an argument."""

    flags: tuple[str, ...]  # `--live`, `--no-live`; of an argument its name as the usage line has it
    metavar: str  # what follows the flag; "" for a switch
    text: str
    default: str  # as a person would type it; "" when there is none to tell
    panel: str  # the group of options that it belongs to; "" for the command's own
    argument: bool


@dataclass(frozen=True)
class Command:
    """One command, with all that its `--help` tells."""

    words: tuple[str, ...]  # `gpuinfer`, `bench`, `serve`
    usage: str  # what follows the words
    text: str  # Markdown
    parameters: tuple[Parameter, ...]
    commands: tuple[str, ...]  # the words that may follow

    @property
    def name(self) -> str:
        return " ".join(self.words)

    @property
    def summary(self) -> str:
        return self.text.partition("\n\n")[0].replace("\n", " ")


def commands() -> list[Command]:
    """All of them: each before those that its words begin."""
    registry.switch_off({record.distribution for record in registry.listing()} - {OURS})
    return list(_below(typer.main.get_command(app), (OURS,), None))


def _below(command: Any, words: tuple[str, ...], parent: Any) -> Iterator[Command]:
    context = command.context_class(command, info_name=words[-1], parent=parent)
    group = hasattr(command, "list_commands")
    names = command.list_commands(context) if group else []
    yield _described(command, words, context, names)
    for name in names:
        yield from _below(command.resolve_command(context, [name])[1], (*words, name), context)
        for word in subcommands.WORDS.get(name, ()) if parent is None else ():
            yield from _below(subcommands.command(name, word), (*words, name, word), context)


def _described(command: Any, words: tuple[str, ...], context: Any, names: list[str]) -> Command:
    parameters = [_parameter(one, context) for one in command.get_params(context) if not getattr(one, "hidden", False)]
    usage = ["[OPTIONS]", *(one.flags[0] for one in parameters if one.argument), *(["COMMAND …"] if names else [])]
    return Command(words, " ".join(usage), _text(command.help or ""), tuple(parameters), tuple(names))


def _parameter(parameter: Any, context: Any) -> Parameter:
    argument = parameter.param_type_name == "argument"
    told = _text(getattr(parameter, "help", None) or "")
    default = DEFAULT.search(told)
    own = parameter.get_default(context, call=False) if getattr(parameter, "show_default", False) else None
    flags = (_named(parameter),) if argument else (*parameter.opts, *parameter.secondary_opts)
    return Parameter(
        flags=tuple(sorted(flags, key=lambda flag: not flag.startswith("--"))),
        metavar="" if argument or parameter.is_flag or parameter.count else _metavar(parameter),
        text=DEFAULT.sub("", told).replace("\n", " "),
        default=default[1] if default else "" if own in UNTOLD or callable(own) else str(own),
        panel=getattr(parameter, "rich_help_panel", None) or "",
        argument=argument,
    )


def _named(argument: Any) -> str:
    """As in the usage: `[WORD]...` where there may be none or several."""
    name = argument.metavar or argument.name.upper()
    if name.startswith("["):
        return str(name)
    several = "..." if argument.nargs == -1 else ""
    return f"{name}{several}" if argument.required else f"[{name}]{several}"


def _metavar(option: Any) -> str:
    """What the flag takes: as the command says it, or by its type."""
    if option.metavar is not None:
        return str(option.metavar)
    kinds = {int: "N", float: "X", Path: "PATH"}
    return next((word for kind, word in kinds.items() if accepts(option.type_descriptor.annotation, kind)), "TEXT")


def _text(help: str) -> str:
    """Without what Typer's markup and Click's formatting need."""
    return help.replace("\\[", "[").replace("\b\n", "").replace("\f", "").strip()


def workload_of(command: Command) -> str:
    """The workload whose own options a command about workloads takes as well; "" for any other command."""
    about = len(command.words) == 3 and command.words[1] in ("bench", "tune")
    called = {shown: name for name, shown in workload_targets.NAMES.items()}
    name = called.get(command.words[-1], command.words[-1])
    return name if about and name in registry.names("workloads") else ""


def own(command: Command, everything: list[Command]) -> list[Parameter]:
    """The parameters of a command without those that the reference tells elsewhere: a workload's, of a command about
    workloads; `--help`, which all have.
    """
    workload = workload_of(command)
    told = next((other.parameters for other in everything if other.words == (OURS, workload)), ())
    return [one for one in command.parameters if one not in told and "--help" not in one.flags]
