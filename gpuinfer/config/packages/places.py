"""Where plugins are installed: the environment that gpuinfer runs in, or a folder of the user's.

Packages are moved into that folder whole, and taken out by their own list of files, by one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path
from typing import Literal

from gpuinfer.config import registry
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import installation
from gpuinfer.host.installation import one_file

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
        return dict(_by_name(self.path))


def packages_in(folder: Path) -> dict[str, Distribution]:
    """What lies in the folder itself."""
    return dict(_by_name([str(folder)]))


def _by_name(path: list[str]) -> Iterator[tuple[str, Distribution]]:
    seen = set[str]()
    for one in distributions(path=path):
        name = one.name
        if name and registry.plain(name) not in seen:
            seen.add(registry.plain(name))
            yield registry.plain(name), one


def choose_place(into: Into | None = None) -> InstallPlace:
    """The environment where there is one that packages can be installed into, else the user's folder; or what is asked
    for. Raises `UsageError` when that cannot be.
    """
    why = why_no_environment()
    if into == "environment" and why:
        raise UsageError(f"nothing can be installed into this environment: {why}. Leave out --into environment.")
    if into == "folder" or (into is None and why):
        return InstallPlace(installation.plugin_folder())
    return InstallPlace(None)


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


def make_folder(folder: Path) -> None:
    """Have the folder there, for its user alone. Raises `UsageError` when it cannot be, or others may write to it."""
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


WAIT_S = 60.0  # for another process that installs there
LOOK_S = 0.1
TORN = ".new-"  # how a folder begins whose packages are not in place yet


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """A new folder inside, on the same disk, for what is to be moved in; gone afterwards. Nobody else changes anything
    meanwhile. Raises `WorkError` when another process takes too long.
    """
    with (folder / ".lock").open("w") as lock:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise WorkError(
                        f"another gpuinfer is installing into {folder}. Try again when it is done."
                    ) from None
                time.sleep(LOOK_S)
        for torn in folder.glob(f"{TORN}*"):  # of one that was killed
            shutil.rmtree(torn, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=TORN, dir=folder) as staged:
            yield Path(staged)


def files_of(distribution: Distribution, folder: Path) -> list[Path]:
    """What it has installed in the folder and nowhere else, relative to it."""
    listed = [Path(os.path.normpath(str(one))) for one in distribution.files or ()]
    return [path for path in listed if not path.is_absolute() and ".." not in path.parts and (folder / path).is_file()]


def metadata_of(distribution: Distribution) -> Path:
    """Where its metadata lie. Raises `WorkError` for what is no folder."""
    path = getattr(distribution, "_path", None) if isinstance(distribution, PathDistribution) else None
    if not (isinstance(path, Path) and path.is_dir()):
        raise WorkError(f"{distribution.name} {distribution.version} has no folder of metadata. Remove it by hand.")
    return path


def move_in(staged: Path, folder: Path) -> None:
    """Every package of `staged`, in the place of other versions of it. Its metadata come last: until then it is not
    installed. Raises `UsageError` before anything has changed when a file would hide another package's.
    """
    new = list(distributions(path=[str(staged)]))
    names = {registry.plain(one.name) for one in new}
    old = [one for one in distributions(path=[str(folder)]) if registry.plain(one.name) in names]
    others = [one for one in distributions(path=[str(folder)]) if registry.plain(one.name) not in names]
    taken = {path: one for one in others for path in files_of(one, folder)}
    for one in new:
        for path in files_of(one, staged):
            if path in taken:
                owner = taken[path]
                raise UsageError(
                    f"{one.name} {one.version} brings {path}, which is {owner.name}'s already. Remove that first: "
                    f"gpuinfer plugins uninstall {owner.name}."
                )
    for one in old:
        take_out(one, folder)
    for one in new:
        metadata = metadata_of(one)
        for path in files_of(one, staged):
            if metadata.name != path.parts[0]:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged / path, folder / path)
        shutil.rmtree(folder / metadata.name, ignore_errors=True)
        os.rename(metadata, folder / metadata.name)


def take_out(distribution: Distribution, folder: Path) -> None:
    """Remove it; its metadata first, so that it is not half there."""
    files, metadata = files_of(distribution, folder), metadata_of(distribution)
    gone = Path(tempfile.mkdtemp(prefix=TORN, dir=folder))
    os.rename(metadata, gone / metadata.name)
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            (folder / path).unlink()
        _forget_compiled(folder / path)
    for parent in sorted({each for path in files for each in path.parents}, key=lambda each: -len(each.parts)):
        if parent != Path():
            shutil.rmtree(folder / parent / "__pycache__", ignore_errors=True) if _is_bare(folder / parent) else None
            with contextlib.suppress(OSError):
                (folder / parent).rmdir()
    shutil.rmtree(gone, ignore_errors=True)


def _forget_compiled(path: Path) -> None:
    if path.suffix == ".py":
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)


def _is_bare(folder: Path) -> bool:
    """Whether nothing but compiled code is left in it."""
    return folder.is_dir() and all(one.name == "__pycache__" for one in folder.iterdir())
