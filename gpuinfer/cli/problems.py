"""Failures for people: one to three lines on standard error that end with the cure, and the exit code."""

from __future__ import annotations

import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpuinfer.config import foreign_names
from gpuinfer.errors import GpuinferError
from gpuinfer.host import error_text

FAILED, USAGE, PARTIAL, CHECK_FAILED = 1, 2, 3, 4

MARGIN = "gpuinfer: "
EXTRA = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.+)\)")
ALONE = ("--prompt", "--game", "--records", "--model", "--env")  # what people write without its flag


def exit_code(error: BaseException) -> int:
    """Ours and Typer's errors carry their own; anything else is a failure of the work."""
    code = getattr(error, "exit_code", FAILED)
    return code if isinstance(code, int) else FAILED


def tell(error: BaseException, words: list[str]) -> None:
    """Print the error for the command line `words`; with -vv the traceback too. Typer has shown help by itself."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return
    if verbosity(words) >= 2:
        traceback.print_exception(error)
    lines = message(error, words).splitlines() or [error_text.type_name(error)]
    print(MARGIN + ("\n" + " " * len(MARGIN)).join(lines), file=sys.stderr)


def message(error: BaseException, words: Sequence[str] = ()) -> str:
    if isinstance(error, GpuinferError):
        return error_text.safe_str(error)
    if hasattr(error, "format_message"):  # Typer's: a flag or argument that it could not read
        said, context = str(getattr(error, "message", "")), getattr(error, "ctx", None)
        command = context.command_path if context else "gpuinfer"
        name = getattr(error, "option_name", None)
        params = context.command.params if context else ()
        known = [flag for parameter in params for flag in (*parameter.opts, *parameter.secondary_opts)]
        if context is None or name is None or "No such option" not in said:
            extra = EXTRA.search(said)
            hint = _as_flag(extra[1].split()[0], known) if extra else ""
            return f"{error.format_message().rstrip('.')}. {hint}See {command} --help."
        if not name.startswith("--"):  # Typer reads -ngl as -n -g -l
            name = next((word for word in words if word.startswith(name)), name)
        hint = foreign_names.flag_hint(name, known)
        return f"{command} has no flag '{name}'. {hint}{' ' if hint else ''}See {command} --help."
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(error, pydantic.ValidationError):
        lines = []
        for detail in error.errors(include_url=False)[:3]:
            where = ".".join(map(str, detail["loc"])) or error.title
            lines.append(f"{where}: {str(detail.get('ctx', {}).get('error', detail['msg'])).rstrip('.')}.")
        return "\n".join(lines)
    return (
        f"{error_text.short_message(error)}.\nThis was not foreseen. Run it again with -vv to see where it comes from."
    )


def verbosity(words: list[str]) -> int:
    """How often -v was given, read from the raw words: the error may be that they could not be parsed."""
    given = sum(word.count("v") for word in words if re.fullmatch("-v+", word)) + words.count("--verbose")
    named = os.environ.get("GPUINFER_VERBOSE", "")
    return max(given, int(named) if named.isdecimal() else 0)


def _as_flag(word: str, known: Sequence[str]) -> str:
    """The flag that a word which stands alone may be the value of: of a command that has words only behind flags."""
    file, folder = Path(word).is_file(), Path(word).is_dir() or foreign_names.HUB_NAME.fullmatch(word)
    first = ("--input", "--records") if file else ("--model", "--records") if folder else ()
    flag = next((one for one in (*first, *ALONE) if one in known), None)
    return f"Did you mean {flag} {shlex.quote(word)}? " if flag else ""
