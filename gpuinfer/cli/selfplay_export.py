"""The records of self-play as one file that other programs read (`gpuinfer selfplay export`)."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from gpuinfer.cli.subcommands import WORDS
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host.files import no_folder

FORMATS = ("parquet",)
FOLDER = typer.Argument(help="what --out of the run named", metavar="DIR")
TO = typer.Option("parquet", "--to", metavar="FORMAT", help="parquet.", autocompletion=lambda: list(FORMATS))
OUT = typer.Option(..., "--out", metavar="FILE", help="Write it to this file, which must not be there.")


def export_positions(folder: Path = FOLDER, to: str = TO, out: Path = OUT) -> None:
    from gpuinfer.models.positions_parquet import write_parquet

    if to not in FORMATS:
        raise UnknownName("format", to, FORMATS, label="Formats")
    if out.exists():
        raise UsageError(f"{out} exists already. Give another --out.")
    if not out.parent.is_dir():
        raise no_folder("--out", out)
    rows = write_parquet(folder, out)
    print(f"gpuinfer: {out} holds {rows:,} positions of {folder}", file=sys.stderr)


_app = typer.Typer(add_completion=False, rich_markup_mode="rich")
_help = WORDS["selfplay"]["export"]
_app.command("export", help=_help, context_settings={"help_option_names": ["-h", "--help"]})(export_positions)
COMMANDS = {"export": _app}
