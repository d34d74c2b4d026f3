"""Where plugins are installed: the environment that gpuinfer runs in, or a folder of the user's."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

from gpuinfer.config import registry
from gpuinfer.errors import UsageError
from gpuinfer.host import installation

UV_TOOL = "uv-receipt.toml"  # lies in an environment that `uv tool install` has made
Into = Literal["environment", "folder"]


@dataclass(frozen=True, slots=True)
class InstallPlace:
    """`folder` is the user's, or None for the environment."""

    folder: Path | None

    @property
    def words(self) -> str:
        return f"your folder {self.folder}" if self.folder else f"the environment {sys.prefix}"

    @property
    def path(self) -> list[str]:
        """Where Python finds packages for what is installed here, in its order. The folder does not count for the
        environment: another Python may not see it.
        """
        own = str(installation.plugin_folder())
        seen = [entry for entry in sys.path if entry != own]
        return [*seen, str(self.folder)] if self.folder else seen

    def here(self) -> dict[str, Distribution]:
        """What is installed, by its plain name (PEP 503): the first of each that Python finds."""
        return _by_name(self.path)


def packages_in(folder: Path) -> dict[str, Distribution]:
    """The packages in this folder, by their plain names."""
    return _by_name([str(folder)])


def _by_name(path: list[str]) -> dict[str, Distribution]:
    found: dict[str, Distribution] = {}
    for one in distributions(path=path):
        if one.name:
            found.setdefault(registry.plain_name(one.name), one)
    return found


def choose_place(into: Into | None = None) -> InstallPlace:
    """The environment where packages can be installed into it, else the user's folder; or what the user named. Raises
    `UsageError` when that cannot be.
    """
    why = why_no_environment()
    if into == "environment" and why:
        raise UsageError(f"nothing can be installed into this environment: {why}. Leave out --into environment.")
    if into == "folder" or (into is None and why):
        return InstallPlace(installation.plugin_folder())
    return InstallPlace(None)


def why_no_environment() -> str | None:
    """What keeps packages from being installed into the Python that runs gpuinfer."""
    # of the smaller file the environment lies in a cache, which Pex marks: the next version has another
    if installation.one_file() is not None or Path(sys.prefix, "PEX-INFO").exists():
        return "gpuinfer runs from one file"
    if Path(sys.prefix, UV_TOOL).exists():
        return "it is one of `uv tool`, whose next upgrade takes out what uv has not put there itself"
    if sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():
        return "this Python is managed by the system (PEP 668)"
    site = sysconfig.get_path("purelib")
    return None if os.access(site, os.W_OK) else f"{site} is not yours to write to"


def make_folder(folder: Path) -> None:
    """Create the folder for its user alone. Raises `UsageError` when that fails, or others may write to it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder for plugins, {folder}, cannot be made: {error.strerror or error}. Name another: "
            f"{installation.PLUGIN_FOLDER_VARIABLE}=FOLDER."
        ) from error
    if danger := installation.danger_of(folder):
        raise UsageError(f"nothing is installed into {folder}: {danger}")
    if not os.access(folder, os.W_OK):
        raise UsageError(
            f"{folder} is not yours to write to. Name another folder: {installation.PLUGIN_FOLDER_VARIABLE}=FOLDER."
        )


def files_of(distribution: Distribution, folder: Path) -> list[Path]:
    """The files that a package has installed inside the folder, relative to it. Paths that lead out do not count."""
    listed = [Path(os.path.normpath(str(one))) for one in distribution.files or ()]
    return [path for path in listed if not path.is_absolute() and ".." not in path.parts and (folder / path).is_file()]


def put_in(staged: Path, folder: Path) -> None:
    """Copy every package of `staged` into the folder, in the place of other versions of it.

    Raises `UsageError`, before anything has changed, when a file would overwrite another package's.
    """
    new, old = packages_in(staged), packages_in(folder)
    owners = {path: one for name, one in old.items() if name not in new for path in files_of(one, folder)}
    for one in new.values():
        for path in files_of(one, staged):
            if path in owners:
                raise UsageError(
                    f"{one.name} {one.version} brings {path}, which is {owners[path].name}'s already. Remove that "
                    f"first: gpuinfer plugins uninstall {owners[path].name}."
                )
    for name in new.keys() & old.keys():
        take_out(old[name], folder)
    for entry in staged.iterdir():  # not the folder itself, whose mode the user has set
        if entry.is_dir():
            shutil.copytree(entry, folder / entry.name, dirs_exist_ok=True)
        else:
            shutil.copy2(entry, folder / entry.name)


def take_out(distribution: Distribution, folder: Path) -> None:
    """Remove a package from the user's folder, where pip cannot: pip removes from environments alone."""
    files = files_of(distribution, folder)
    for path in files:
        (folder / path).unlink(missing_ok=True)
        if path.suffix == ".py":
            for compiled in (folder / path).parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                compiled.unlink(missing_ok=True)
    for parent in sorted({each for path in files for each in path.parents}, key=lambda each: -len(each.parts)):
        with contextlib.suppress(OSError):  # others' files are in it
            (folder / parent / "__pycache__").rmdir()
        with contextlib.suppress(OSError):
            (folder / parent).rmdir() if parent != Path() else None
