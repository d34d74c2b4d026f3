"""The user's own folder of plugins: for the one file and for Pythons whose packages are not the user's to change.

What lies in it comes last on the path that Python searches, so that it never hides what gpuinfer itself brings.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

PLACE = "GPUINFER_PLUGINS"  # in the environment: another folder
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def plugin_folder() -> Path:
    """Where plugins of this Python's version lie; it need not be there. `GPUINFER_PLUGINS` names another."""
    if named := os.environ.get(PLACE):
        return Path(os.path.abspath(Path(named).expanduser()))
    import platformdirs  # some milliseconds, which the variable saves

    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(platformdirs.user_data_dir("gpuinfer", appauthor=False), "plugins", version)


def see_plugins() -> str | None:
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
        return f"it cannot be looked at ({error}). Make it yours, or name another: {PLACE}=FOLDER."
    for place, status in found:
        if status.st_uid not in (os.geteuid(), 0):
            return f"{place} belongs to another user. Name a folder of yours: {PLACE}=FOLDER."
        if _others_write(status, above=place != whole):
            mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
            return f"others may write to {place} ({mode}). Take that from them: chmod go-w {shlex.quote(str(place))}."
    return None


def _others_write(status: os.stat_result, above: bool) -> bool:
    """Of a folder above, those of the user's own group may, as many systems set it up, and all where only owners remove
    (the sticky bit of /tmp): what they put in its place would belong to them.
    """
    if not above:
        return bool(status.st_mode & OTHERS_WRITE)
    if status.st_mode & stat.S_ISVTX:
        return False
    group = status.st_mode & stat.S_IWGRP and status.st_gid not in (os.getegid(), 0)
    return bool(group or status.st_mode & stat.S_IWOTH)
