"""What people name when they want a package: a name, a folder with its source, a wheel, an archive of the source."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from gpuinfer.errors import UsageError

ARCHIVES = (".tar.gz", ".tgz", ".zip")
CHOICES = "Give a package's name, a folder with its pyproject.toml, or a wheel"
SHORT = "gpuinfer-"


@dataclass(frozen=True, slots=True)
class Source:
    """`path` of all but names; `names` in the order in which they are looked for, with their versions if any."""

    kind: Literal["name", "folder", "wheel", "archive"]
    path: Path | None = None
    names: tuple[str, ...] = ()

    @property
    def is_built(self) -> bool:
        """Whether a script of its own runs before it can be said what it adds."""
        return self.kind in ("folder", "archive")


def read(text: str) -> Source:
    """What is meant, as pip would take it: a path has a separator, begins with a dot or ends like a file of a package.

    Raises `UsageError` for what is nothing of it.
    """
    if not text or text.startswith("-"):
        raise UsageError(f"'{text}' names no package. {CHOICES}.")
    if "://" in text or text.startswith(("git+", "file:")):
        raise UsageError(f"'{text}' is an address. Fetch it yourself, look at it, and give the folder or the wheel.")
    if os.sep in text or text.startswith((".", "~")) or text.endswith((".whl", *ARCHIVES)):
        return of_path(Path(text).expanduser())
    try:
        named = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(f"'{text}' names no package. {CHOICES}.") from error
    if named.url or named.marker:
        raise UsageError(f"'{text}' is more than a name. {CHOICES}.")
    return Source("name", names=tuple(names_of(text, named.name)))


def names_of(text: str, name: str) -> list[str]:
    """`echo` is `gpuinfer-echo` first: a short name means a plugin, and what it alone names may be anything."""
    return [text] if name.lower().replace("_", "-").startswith("gpuinfer") else [f"{SHORT}{text}", text]


def of_path(path: Path) -> Source:
    """What lies there. Raises `UsageError` for what is no package."""
    if path.is_dir():
        if not ((path / "pyproject.toml").is_file() or (path / "setup.py").is_file()):
            raise UsageError(f"{path} holds no package: there is no pyproject.toml. {CHOICES}.")
        return Source("folder", path.resolve())
    if not path.is_file():
        raise UsageError(f"there is no file or folder {path}. {CHOICES}.")
    if path.suffix == ".whl":
        return Source("wheel", path.resolve())
    if path.name.endswith(ARCHIVES):
        return Source("archive", path.resolve())
    raise UsageError(f"{path} is no package. {CHOICES}.")


def build_needs(folder: Path) -> list[str]:
    """What its build needs; of a folder without a say that is setuptools (PEP 518). Raises `UsageError`."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return ["setuptools"]
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}. Correct it.") from error
    found = told.get("build-system", {})
    needs = found.get("requires", ["setuptools"]) if isinstance(found, dict) else ["setuptools"]
    return [str(need) for need in needs]
