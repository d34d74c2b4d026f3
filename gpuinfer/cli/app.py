"""The `gpuinfer` command: its list of commands, our own and one for each installed workload, none imported before it is
used; and how it ends.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from gpuinfer.cli import subcommands
from gpuinfer.cli.problems import PARTIAL, exit_code, tell
from gpuinfer.config import foreign_names, registry
from gpuinfer.config.registry import COMMANDS as OWN
from gpuinfer.errors import UnknownName

SENTENCE = re.compile(r".+?[.!?](?=\s+[A-Z`]|$)|.+")  # no name of an author ends one: Wu et al. 2025


class Commands(TyperGroup):
    """Our commands and the workloads, each loaded when it is called and only named when they are listed."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*registry.names("workloads"), *OWN]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """A stand-in that knows the command's name and one line about it: enough for --help and completion."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return command_named(cmd_name, f"gpuinfer.cli.{cmd_name}") if cmd_name in OWN else workload_stand_in(cmd_name)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str, Any, list[str]]:  # type: ignore[override]
        """The real command. Raises `UnknownName`, or `PluginError` when it cannot be loaded."""
        name = args[0]
        if name.startswith("-"):  # a flag of no command: Typer says so
            return super().resolve_command(ctx, args)  # type: ignore[return-value]
        if (word := subcommands.word_of(args)) is not None:
            return f"{name} {word}", subcommands.command(name, word), args[2:]
        if name in OWN:
            return name, typer.main.get_command(importlib.import_module(f"gpuinfer.cli.{name}").app), args[1:]
        if not [record for record in registry.listing("workloads") if record.name == name]:
            raise UnknownName(
                "command", name, self.list_commands(ctx), label="Commands", hint=foreign_names.command_hint(name)
            )
        from gpuinfer.cli.workload import command

        return name, command(name), args[1:]


def workload_stand_in(name: str, called: str | None = None) -> Any:
    """A workload's name, or what it is called here, and one line about it: a command that does nothing.

    Imports no plugin.
    """
    module = next(record.module for record in registry.listing("workloads") if record.name == name)
    return command_named(called or name, module)


def command_named(name: str, target: str) -> Any:
    stand_in = typer.Typer(add_completion=False)
    stand_in.command(name, help=first_sentence(target))(lambda: None)
    return typer.main.get_command(stand_in)


def first_sentence(target: str) -> str:
    """The first sentence of the docstring of `module:Class`, or the first line of its module's, without importing it;
    empty if unknown.
    """
    module, _, name = target.partition(":")
    path = _source(module)
    if path is None:
        return ""
    try:
        source = path.read_bytes()
        if not name and source.startswith(b'"""'):  # to read the rest of the file as Python takes some milliseconds
            return source[3:].partition(b"\n")[0].decode().removesuffix('"""').strip()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return ""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    text = (ast.get_docstring(classes[0]) if classes else None) or ast.get_docstring(tree) or ""
    found = SENTENCE.match(" ".join(text.partition("\n\n")[0].split()))
    return found[0] if found else ""


def _source(module: str) -> Path | None:
    """The file of a module's source. Only the top package's finder is asked, since that runs no code of the package."""
    top, *rest = module.split(".")
    try:
        spec = getattr(sys.modules.get(top), "__spec__", None) or find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin.endswith(".py") else None
    bases = [Path(folder, *rest) for folder in spec.submodule_search_locations or []]
    candidates = [path for base in bases for path in (base.with_suffix(".py"), base / "__init__.py")]
    return next((path for path in candidates if path.is_file()), None)


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
        # the reader is gone: Python would complain when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
