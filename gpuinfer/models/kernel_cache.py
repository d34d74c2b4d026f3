"""Where the machine code of compiled kernels is kept between runs: a folder named by all that it was made from.

Numba itself looks at the date of the one file that a function stands in: a change in a file that it calls into would go
unnoticed, and the old code be run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import platformdirs
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from gpuinfer.errors import UsageError
from gpuinfer.host.files import make_ours
from gpuinfer.models.compiled_once import compiled_once


def cache_folder(parts: Iterable[bytes]) -> Path:
    """The folder for code made from these parts, such as source files; a temporary one if need be."""
    digest = hashlib.sha256()
    for version in (numba.__version__, llvmlite.__version__, np.__version__):
        digest.update(version.encode())
    for part in parts:
        digest.update(part)
    for root in (
        Path(platformdirs.user_cache_dir("gpuinfer")),
        Path(tempfile.gettempdir()) / f"gpuinfer-{os.getuid()}",
    ):
        folder = root / "kernels" / digest.hexdigest()[:16]
        if make_ours(root) and make_ours(folder.parent) and make_ours(folder):
            return folder
    raise UsageError("no folder for compiled kernels can be written. Set XDG_CACHE_HOME to one that can.")


@contextlib.contextmanager
def caching_in(folder: Path) -> Iterator[None]:
    """What is decorated meanwhile with `cache=True` is kept there."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def compiler(files: Iterable[Path], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles with these options of `numba.njit`, and keeps the code as long as none of the files
    changes.
    """
    folder = folder_for(files)

    def decorate(function: Callable[..., Any]) -> Any:
        with caching_in(folder):
            return compiled_once(numba.njit(cache=True, **options)(function), folder)

    return decorate


def c_compiler(files: Iterable[Path], signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """The same for a function of this signature that other code calls by its `address`. It is compiled at once."""
    folder = folder_for(files)

    def decorate(function: Callable[..., Any]) -> Any:
        with caching_in(folder):
            made = CFunc(function, normalize_signature(signature), locals={}, options=options)
            made.enable_caching()
            compiled_once(made, folder).compile()
            return made

    return decorate


def folder_for(files: Iterable[Path]) -> Path:
    return cache_folder(file.name.encode() + file.read_bytes() for file in sorted(files))
