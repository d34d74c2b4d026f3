"""Failures for people: one to three lines on standard error that end with the cure, and the exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from difflib import get_close_matches
from typing import Any

from gpuinfer.errors import GpuinferError

FAILED, USAGE, PARTIAL, CHECK_FAILED = 1, 2, 3, 4

MARGIN = "gpuinfer: "


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
    lines = message(error).splitlines() or [type(error).__name__]
    print(MARGIN + ("\n" + " " * len(MARGIN)).join(lines), file=sys.stderr)


def message(error: BaseException) -> str:
    if isinstance(error, GpuinferError):
        return str(error)
    if hasattr(error, "format_message"):  # Typer's: a flag or argument that it could not read
        return _usage(error)
    if _is_validation(error):
        return _refused(error)
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {first}\nThis was not foreseen. Run it again with -vv to see where it comes from."


def verbosity(words: list[str]) -> int:
    """How often -v was given, read from the raw words: the error may be that they could not be parsed."""
    given = sum(word.count("v") for word in words if re.fullmatch("-v+", word)) + words.count("--verbose")
    named = os.environ.get("GPUINFER_VERBOSE", "")
    return max(given, int(named) if named.isdecimal() else 0)


def _usage(error: Any) -> str:
    """Typer's complaint with the nearest flag, and where to read on."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "gpuinfer"
    name = getattr(error, "option_name", None)
    if context is None or name is None or "No such option" not in str(error.message):
        return f"{error.format_message().rstrip('.')}. See {command} --help."
    known = [flag for parameter in context.command.params for flag in (*parameter.opts, *parameter.secondary_opts)]
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"{command} has no flag '{name}'.{hint} See {command} --help."


def _is_validation(error: BaseException) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(error, pydantic.ValidationError)


def _refused(error: Any) -> str:
    """A plugin that refused its options itself."""
    lines = []
    for detail in error.errors(include_url=False)[:3]:
        where = ".".join(map(str, detail["loc"])) or error.title
        lines.append(f"{where}: {str(detail.get('ctx', {}).get('error', detail['msg'])).rstrip('.')}.")
    return "\n".join(lines)
