"""`gpuinfer plugins new`: a package with a plugin, to start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gpuinfer.config import registry


def kinds_that_begin(incomplete: str) -> list[str]:
    """For completion."""
    return [kind for kind in registry.KINDS.values() if kind.startswith(incomplete)]


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help="backend, strategy, workload, game, decoder or environment", autocompletion=kinds_that_begin
        ),
    ],
    name: Annotated[str, typer.Argument(help="what it will be called, such as my-plugin")],
    path: Annotated[Path, typer.Option(metavar="DIR", help="Where to put the folder gpuinfer-NAME.")] = Path(),
) -> None:
    """Write a package with a plugin: code, options, tests, README. It works as it is; nothing is overwritten."""
    from gpuinfer.config import settings
    from gpuinfer.packages import writing

    settings.load()  # they may switch plugins off
    package = writing.named(kind, name)
    folder = writing.write(package, path)
    typer.secho(f"{folder}{os.sep}", bold=True)
    for file, _ in sorted(writing.files(package)):
        typer.echo(f"  {file}")
    typer.echo("Install it, see that it works, then make it yours:")
    for line in [f"gpuinfer plugins install {_as_path(folder)}", *package.commands]:
        typer.echo(f"  {line}")


def _as_path(folder: Path) -> str:
    """So that it is taken for a folder, and not for a package's name."""
    text = str(folder)
    return text if os.sep in text else f".{os.sep}{text}"
