"""Where the machine code of compiled kernels is kept between runs: a folder named by all that it was made from.

Numba itself looks at place and date of the one file that a function stands in: a change in a file that it calls into
would go unnoticed, and the old code be run; a copy of the same files elsewhere would be compiled again. Which processor
code is for Numba keeps beside it, and compiles anew for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
import platformdirs
from numba.core.caching import UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature

from gpuinfer.errors import UsageError
from gpuinfer.host.files import make_ours
from gpuinfer.host.one_file import carried_kernels
from gpuinfer.models.compiled_once import compiled_once

PROCESSOR = "processor"
"""The file beside the folders that are carried, which names whom their code is for."""


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
        if make_ours(root) and make_ours(folder.parent):
            take_carried(folder)
            if make_ours(folder):
                return folder
    raise UsageError("no folder for compiled kernels can be written. Set XDG_CACHE_HOME to one that can.")


def load_compiler() -> None:
    """What Numba needs once before it loads the first kernel. It takes part of a second, which another thread can
    spend while this one waits for a disk.
    """
    with global_compiler_lock:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def take_carried(folder: Path) -> None:
    """Put the code that the one file carries for this folder there, whole or not at all, unless it is there already, or
    for another processor.
    """
    carried = carried_kernels()
    if carried is None or folder.exists() or not (carried / folder.name).is_dir():
        return
    if (carried / PROCESSOR).read_text() != processor():
        return
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as part:
        whole = shutil.copytree(carried / folder.name, Path(part, folder.name))
        os.rename(whole, folder)  # which fails where another process was first


def processor() -> str:
    """Whom Numba compiles for here, in its words: code for another is not run."""
    return repr(cpu_target.target_context.codegen().magic_tuple())


class ByContent(UserProvidedCacheLocator):  # type: ignore[misc]
    """For Numba: the folder's name says what code was made from, so neither place nor date of the source counts."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return Path(py_file).parent.name

    def get_source_stamp(self) -> str:
        return "by content"


@contextlib.contextmanager
def caching_in(folder: Path) -> Iterator[None]:
    """What is decorated meanwhile with `cache=True` is kept there."""
    told = {"CACHE_DIR": str(folder), "CACHE_LOCATOR_CLASSES": f"{__name__}.{ByContent.__name__}"}
    before = {name: getattr(numba.config, name) for name in told}
    try:
        vars(numba.config).update(told)
        yield
    finally:
        vars(numba.config).update(before)


def compiler(files: Iterable[Path], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles with these options of `numba.njit`, and keeps the code as long as none of the files
    changes.
    """
    folder = folder_for(files)

    def decorate(function: Callable[..., Any]) -> Any:
        with caching_in(folder):
            return compiled_once(numba.njit(cache=True, no_cfunc_wrapper=True, **options)(function), folder)

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
