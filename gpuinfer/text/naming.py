"""Whether the name of a model of text is that of something that is there. Nothing of the model is read, nor torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path

from gpuinfer.config.foreign import hub_hint
from gpuinfer.errors import UsageError

NEAR = 3


def what_is(name: str) -> tuple[Path, str]:
    """The path that a name makes, and "folder", "file" or "nothing"."""
    path = Path(name)
    try:
        path = path.expanduser()
        kind = "folder" if name and path.is_dir() else "file" if path.is_file() else "nothing"
    except (OSError, RuntimeError, ValueError):  # no such user, or no name that a file can have
        kind = "nothing"
    return path, kind


def refuse_absent(name: str, built_in: Collection[str]) -> None:
    """Raises `UsageError` where it is neither built in nor a path."""
    path, kind = what_is(name)
    if kind == "nothing" and name not in built_in:
        raise absent(name, path, built_in)


def absent(name: str, path: Path, built_in: Iterable[str]) -> UsageError:
    """No such folder: those beside it that are called alike, and the built-in models."""
    found = near(path, built_in)
    hint = f" Did you mean {' or '.join(found)}?" if found else ""
    if not found and (hub := hub_hint(name)):
        return UsageError(f"there is no model folder '{name}', and nothing is downloaded.\n{hub}")
    return UsageError(
        f"there is no model folder '{name}', and nothing is downloaded.{hint} "
        f"Give a Hugging Face folder, or one of: {', '.join(sorted(built_in))}."
    )


def near(path: Path, built_in: Iterable[str]) -> list[str]:
    try:
        beside = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except (OSError, ValueError):
        return []
    names = [*beside, *built_in] if len(path.parts) == 1 else beside
    alike = difflib.get_close_matches(path.name, names, n=NEAR, cutoff=0.6)
    return [f"'{path.parent / one}'" for one in dict.fromkeys(alike)]
