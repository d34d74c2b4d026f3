"""Packages in the user's folder: moved in whole, taken out by their own list of files, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path

from gpuinfer.config import registry
from gpuinfer.errors import UsageError, WorkError

WAIT_S = 60.0  # for another process that installs there
LOOK_S = 0.1
TORN = ".new-"  # how a folder begins whose packages are not in place yet


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
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
