"""Where gpuinfer runs from: the one file that `make binary` builds, and the user's own folders of plugins and caches.

The one file unpacks itself into a folder (`one_file/stub.c`) with a lock file beside it: each process that runs from
the folder holds it shared, whoever removes the folder holds it alone. The folder of plugins comes last on Python's
path, so that it never hides what gpuinfer itself brings.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import stat
import sys
import time
from pathlib import Path

ONE_FILE_VARIABLE = "GPUINFER_ONE_FILE"
ONE_FILE_MARK = "one-file.json"  # in the folder that is unpacked
CARRIED_KERNELS = "kernels"  # beside it
KEPT_S = 24 * 3600.0
"""Unused for so long, another version is removed: who goes back and forth between two need not unpack each time."""


def one_file() -> Path | None:
    """The one file that this process was started from; None where gpuinfer was installed in another way.

    A Python of the user's that inherits the variable is not inside.
    """
    named = os.environ.get(ONE_FILE_VARIABLE)
    return Path(named) if named and (Path(sys.base_prefix) / ONE_FILE_MARK).exists() else None


def carried_kernels() -> Path | None:
    """The folder of compiled kernels that the one file brings, by the names of their folders; None outside of it."""
    return Path(sys.base_prefix, CARRIED_KERNELS) if one_file() is not None else None


def remove_old_versions() -> None:
    """Remove other versions that no process uses and nobody has started for a day. What cannot be removed stays."""
    if one_file() is None:
        return
    ours = Path(sys.base_prefix)
    for part in ours.parent.glob("*.part"):  # of one who was killed where files cannot be locked
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > KEPT_S:
                shutil.rmtree(part, ignore_errors=True)
    for lock in ours.parent.glob("*.lock"):
        folder = lock.with_suffix("")
        with contextlib.suppress(OSError):
            if folder != ours and time.time() - lock.stat().st_mtime > KEPT_S:
                descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while another process has it
                    part = folder.with_name(f"{folder.name}.part")
                    shutil.rmtree(part, ignore_errors=True)
                    if folder.exists():
                        folder.rename(part)  # its name goes first: nobody may find a part of it
                        shutil.rmtree(part)
                    lock.unlink()
                finally:
                    os.close(descriptor)


PLUGIN_FOLDER_VARIABLE = "GPUINFER_PLUGINS"  # in the environment: another folder
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def plugin_folder() -> Path:
    """Where plugins of this Python's version lie; it need not be there. `GPUINFER_PLUGINS` names another."""
    if named := os.environ.get(PLUGIN_FOLDER_VARIABLE):
        return Path(os.path.abspath(Path(named).expanduser()))
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _user_folder("XDG_DATA_HOME", ".local/share") / "plugins" / version


def user_cache_folder() -> Path:
    """Where this user's caches of gpuinfer lie; it need not be there."""
    return _user_folder("XDG_CACHE_HOME", ".cache")


def _user_folder(variable: str, default: str) -> Path:
    """gpuinfer's own in a base directory, as the XDG Base Directory Specification 0.8 has it: a relative one is
    ignored. `default`: below the home folder.
    """
    named = os.environ.get(variable, "").strip()
    return (Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~"), default)) / "gpuinfer"


def add_plugin_folder() -> str | None:
    """Have Python find what is in the folder, from here on and in processes that are spawned from here.

    Returns what keeps a folder that is there from being used, with the cure.
    """
    folder = plugin_folder()
    if str(folder) in sys.path or not os.path.isdir(folder):
        return None
    if danger := danger_of(folder):
        return f"the plugins in {folder} are not used: {danger}"
    sys.path.append(str(folder))
    return None


def danger_of(folder: Path) -> str | None:
    """Who but this user (and root) could put code into this folder, with the cure; None where nobody can.

    Raises nothing: a folder that cannot be looked at is not safe.
    """
    try:
        whole = folder.resolve(strict=True)
        found = [(place, place.stat()) for place in (whole, *whole.parents)]
    except (OSError, RuntimeError) as error:
        return f"it cannot be looked at ({error}). Make it yours, or name another: {PLUGIN_FOLDER_VARIABLE}=FOLDER."
    for place, status in found:
        if status.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to another user. Name a folder of yours: {PLUGIN_FOLDER_VARIABLE}=FOLDER."
        # Of a folder above, those of the user's own group may, as many systems set it up, and all where only owners
        # remove (the sticky bit of /tmp): what they put in its place would belong to them.
        others = OTHERS_WRITE if place == whole or status.st_gid not in (os.getegid(), 0) else stat.S_IWOTH
        if status.st_mode & others and (place == whole or not status.st_mode & stat.S_ISVTX):
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
            return f"others may write to {place} ({mode}). Take that from them: chmod go-w {shlex.quote(str(place))}."
    return None
