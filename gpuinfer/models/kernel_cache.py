"""A cache of Numba's machine code between runs, in which each kernel is compiled by one process alone.

A kernel's folder is named by everything that its code depends on: Numba itself checks only the one file that a function
stands in, and would miss a change in a file that the function calls into. Two locks are always taken in the same order,
a callee's file after its caller's: the kernel's file lock, then Numba's own lock, which lets one thread of a process
compile at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import UserProvidedCacheLocator
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature
from numba.extending import register_jitable

from gpuinfer.errors import UsageError
from gpuinfer.host import compile_status
from gpuinfer.host.files import make_ours
from gpuinfer.host.installation import carried_kernels, user_cache_folder

LOOK_S = 0.05
LOOKS = 6000
"""Five minutes, and longer than a kernel takes on a busy machine: counted in looks, so that whoever was suspended does
not find its time over. After them it compiles too."""


class KernelLock:
    """A file lock, held by one process at a time and released when the process ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._held: int | None = None

    def take(self) -> None:
        """Wait for the lock, for a limited time. Without the lock something is compiled twice, which does no harm."""
        if self._held is not None:
            return
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and _locked(descriptor):
                self._held = descriptor
        finally:
            if self._held is None:
                os.close(descriptor)

    def give(self) -> None:
        """Release the lock if this process holds it."""
        if self._held is not None:
            descriptor, self._held = self._held, None
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone leaves the lock to a forked copy
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    for _ in range(LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError:
            return False  # a file system without locks
        else:
            return True
    return False


def compiled_once(function: Any, folder: Path) -> Any:
    """The same Numba function, compiled by one process at a time.

    `function`: a dispatcher or a `CFunc` with its cache enabled that has not been compiled yet; anything else (as where
    Numba is switched off) is returned unchanged. `folder`: where the lock file is; ours alone (`cache_folder`).
    """
    if not hasattr(function, "_cache"):
        return function
    python = function.__wrapped__
    turn = KernelLock(folder / f"{python.__module__}.{python.__qualname__}-{python.__code__.co_firstlineno}.lock")
    load, compile_it = function._cache.load_overload, function.compile

    def load_or_take(signature: Any, context: Any) -> Any:
        found = load(signature, context)
        if found is None:
            compile_status.begin(turn)
            turn.take()
            found = load(signature, context)  # compiled by another process meanwhile
        return found

    def compile_and_give(*signature: Any) -> Any:
        with compile_status.in_compile_station(), global_compiler_lock:
            try:
                return compile_it(*signature)
            finally:
                turn.give()
                compile_status.end(turn)

    function._cache.load_overload = load_or_take
    function.compile = compile_and_give
    return function


PROCESSOR = "processor"
"""The file beside the folders that are carried, which names whom their code is for."""


def cache_folder(parts: Iterable[bytes]) -> Path:
    """The cache folder for code that depends on these parts, such as source files; a temporary folder if the cache
    cannot be used.
    """
    digest = hashlib.sha256()
    for version in (numba.__version__, llvmlite.__version__, np.__version__):
        digest.update(version.encode())
    for part in parts:
        digest.update(part)
    for root in (
        user_cache_folder(),
        Path(tempfile.gettempdir()) / f"gpuinfer-{os.getuid()}",
    ):
        folder = root / "kernels" / digest.hexdigest()[:16]
        if make_ours(root) and make_ours(folder.parent):
            take_carried(folder)
            if make_ours(folder):
                return folder
    raise UsageError("no folder for compiled kernels can be written. Set XDG_CACHE_HOME to one that can.")


def load_compiler() -> None:
    """Load Numba's compiler, which takes part of a second; another thread can do so while this one waits for a disk."""
    with global_compiler_lock:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def take_carried(folder: Path) -> None:
    """Copy the code that the one-file program carries into this folder, completely or not at all; not if it is there,
    or is for another processor.
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
    """The processor that Numba compiles for, in Numba's words."""
    return repr(cpu_target.target_context.codegen().magic_tuple())


class ByContent(UserProvidedCacheLocator):  # type: ignore[misc]
    """For Numba: the folder's name identifies the source, so that neither path nor date of the source file matter."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return Path(py_file).parent.name

    def get_source_stamp(self) -> str:
        return "by content"


@contextlib.contextmanager
def caching_in(folder: Path) -> Iterator[None]:
    """Within this block, functions decorated with `cache=True` are cached in this folder."""
    told = {"CACHE_DIR": str(folder), "CACHE_LOCATOR_CLASSES": f"{__name__}.{ByContent.__name__}"}
    before = {name: getattr(numba.config, name) for name in told}
    try:
        vars(numba.config).update(told)
        yield
    finally:
        vars(numba.config).update(before)


def compiler(files: Iterable[Path], **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that compiles with these options of `numba.njit` and caches the code until one of
    the files changes.
    """
    folder = folder_for(files)

    def decorate(function: Callable[..., Any]) -> Any:
        with caching_in(folder):
            return compiled_once(numba.njit(cache=True, no_cfunc_wrapper=True, **options)(function), folder)

    return decorate


def c_compiler(files: Iterable[Path], signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """The same for a C callback of this signature, called by its `address`. Compiled at once."""
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


def called_only(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for functions that only compiled code calls: compiled into each caller with these options of
    `numba.njit`. Python calls the plain function.
    """
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = register_jitable(no_cfunc_wrapper=True, **options)
    return decorate
