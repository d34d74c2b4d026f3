"""Where plugins are installed: the environment that gpuinfer runs in, or a folder of the user's."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

from gpuinfer.config import registry
from gpuinfer.errors import UsageError
from gpuinfer.host import plugin_folder
from gpuinfer.host.one_file import one_file

UV_TOOL = "uv-receipt.toml"  # lies in an environment that `uv tool install` has made
Into = Literal["environment", "folder"]


@dataclass(frozen=True, slots=True)
class Place:
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
        own = str(plugin_folder.plugin_folder())
        seen = [entry for entry in sys.path if entry != own]
        return [*seen, str(self.folder)] if self.folder else seen

    def here(self) -> dict[str, Distribution]:
        """What is installed, by its plain name (PEP 503): the first of each that Python finds."""
        return dict(_by_name(self.path))


def of_folder(folder: Path) -> dict[str, Distribution]:
    """What lies in the folder itself."""
    return dict(_by_name([str(folder)]))


def _by_name(path: list[str]) -> Iterator[tuple[str, Distribution]]:
    seen = set[str]()
    for one in distributions(path=path):
        name = one.name
        if name and registry.plain(name) not in seen:
            seen.add(registry.plain(name))
            yield registry.plain(name), one


def choose(into: Into | None = None) -> Place:
    """The environment where there is one that packages can be installed into, else the user's folder; or what is asked
    for. Raises `UsageError` when that cannot be.
    """
    why = why_no_environment()
    if into == "environment" and why:
        raise UsageError(f"nothing can be installed into this environment: {why}. Leave out --into environment.")
    if into == "folder" or (into is None and why):
        return Place(plugin_folder.plugin_folder())
    return Place(None)


def in_one_file() -> bool:
    """Or in the smaller one, whose environment lies in a cache, as Pex marks it: the next version has another."""
    return one_file() is not None or Path(sys.prefix, "PEX-INFO").exists()


def why_no_environment() -> str | None:
    """What keeps packages from being installed into the Python that runs gpuinfer."""
    if in_one_file():
        return "gpuinfer runs from one file"
    if Path(sys.prefix, UV_TOOL).exists():
        return "it is one of `uv tool`, whose next upgrade takes out what uv has not put there itself"
    if sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():
        return "this Python is managed by the system (PEP 668)"
    site = sysconfig.get_path("purelib")
    return None if os.access(site, os.W_OK) else f"{site} is not yours to write to"


def make(folder: Path) -> None:
    """Have the folder there, for its user alone. Raises `UsageError` when it cannot be, or others may write to it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder for plugins, {folder}, cannot be made: {error.strerror or error}. Name another: "
            f"{plugin_folder.PLACE}=FOLDER."
        ) from error
    if danger := plugin_folder.danger_of(folder):
        raise UsageError(f"nothing is installed into {folder}: {danger}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} is not yours to write to. Name another folder: {plugin_folder.PLACE}=FOLDER.")
