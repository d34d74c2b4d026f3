"""`gpuinfer fleet systemd`: a server as a unit."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuinfer.cli import flags
from gpuinfer.cli.fleet_kubernetes import SERVE, parse_command
from gpuinfer.errors import UsageError
from gpuinfer.host.installation import one_file

NAME = "fleet systemd"
DEFAULT = ("serve", "--config", "/etc/gpuinfer/gpuinfer.toml", "--log-format", "json")


def systemd(
    user: Annotated[str, typer.Option(metavar="NAME", help="Who runs it.")] = "gpuinfer",
    program: Annotated[
        str | None, typer.Option(metavar="PATH", help=flags.escape_markup("Which gpuinfer it is [this one]."))
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND …]",
            help=flags.escape_markup(f"The command, behind --, such as serve --model DIR [{shlex.join(DEFAULT)}]."),
        ),
    ] = None,
) -> None:
    """A server as a unit of systemd, on standard output: systemd-analyze verify FILE checks it."""
    command = parse_command(words or DEFAULT)
    if command.name != SERVE:
        raise UsageError(
            f"a unit is for what runs for good, and {command.name} ends. Write -- serve …, or run it by hand."
        )
    from gpuinfer.fleet.systemd_unit import render_unit

    own = [*(["--user", user] if user != "gpuinfer" else []), *(["--program", program] if program else [])]
    source = shlex.join(["gpuinfer", *NAME.split(), *own, *(["--", *words] if words else [])])
    print(
        render_unit(program or _this_program(), [SERVE, *command.words], user, command.options.drain_timeout, source),  # type: ignore[attr-defined]
        end="",
    )


def _this_program() -> str:
    """The path of the gpuinfer that runs."""
    carried = one_file()
    installed = Path(sys.executable).with_name("gpuinfer")
    found = carried or (installed if installed.exists() else shutil.which("gpuinfer"))
    if found is None:
        raise UsageError("no program gpuinfer is found here. Name the one of the server: --program /PATH/gpuinfer.")
    return str(Path(found).absolute())
