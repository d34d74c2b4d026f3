"""The `gpuinfer` command: what it is made of, and how it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from gpuinfer.cli.commands import Commands
from gpuinfer.cli.problems import PARTIAL, exit_code, tell

app = typer.Typer(
    name="gpuinfer",
    cls=Commands,
    help="A great many model answers from the accelerators you have.",
    epilog="To begin: `gpuinfer selfplay --games 300 --model blobnet-small` plays card games while you watch, "
    "`gpuinfer docs` lists the documentation, `gpuinfer docs WORD` answers a question, `gpuinfer doctor` "
    "looks at this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from gpuinfer import __version__

        typer.echo(f"gpuinfer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
    ),
) -> None:
    """A great many model answers from the accelerators you have."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 bad usage, 3 stopped with work left, 4 a check did not hold."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_ended(words))


def _ended(words: list[str]) -> int:
    try:
        code = run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _let_go_of_stdout()
        return 1
    except KeyboardInterrupt:
        return PARTIAL
    except Exception as error:  # noqa: BLE001 (a user gets a sentence, never a traceback, unless asked for)
        tell(error, words)
        return exit_code(error)


def run(words: list[str]) -> int:
    """The exit code of one command line. Raises what the command raises."""
    command: Any = typer.main.get_command(app)
    code = command.main(args=words, prog_name="gpuinfer", standalone_mode=False)
    if code == 130:  # Typer's own for Ctrl-C
        return PARTIAL
    return code if isinstance(code, int) else 0


def _let_go_of_stdout() -> None:
    """Nobody reads: keep Python from complaining when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
