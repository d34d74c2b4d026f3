"""Worker processes, servers of `central` and measurers of the roofline that need not load torch and Numba first.

Where this is in force `gpuinfer.host.children` starts them by multiprocessing's forkserver instead of by spawn: with
the same pickled arguments and the same preparation, but forked from a process that has loaded what takes seconds. What
a child loads by itself, and that it is a child of the one that started it, is left to the tests that spawn.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gpuinfer.host import children

LOADED = (
    "gpuinfer.backends.inprocess",
    "gpuinfer.models.forward_cpu",
    "gpuinfer.models.load",
    "gpuinfer.text.generator",
    "gpuinfer.workloads.selfplay.player",
)


def preload(*modules: str) -> None:
    """Say what the process loads that is forked. Before it starts, which the first child does."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*modules, *LOADED])


def start(target: Callable[..., None], *arguments: Any, name: str, daemon: bool = False) -> BaseProcess:
    """`gpuinfer.host.children.spawn`, by the forkserver."""
    given = (dict(os.environ), os.getpid(), target, *arguments)
    process = multiprocessing.get_context("forkserver").Process(target=enter, args=given, name=name, daemon=daemon)
    with children.ignoring_interrupts():
        process.start()
    return process


def enter(environment: Mapping[str, str], starter: int, target: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment has it
    os.getppid = lambda: starter if alive(starter) else 1
    target(*arguments)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def in_force() -> Iterator[None]:
    preload("programs")  # of the tests of the central server, which start theirs in the same way
    before, children.spawn = children.spawn, start
    try:
        yield
    finally:
        children.spawn = before


def fork_server_here() -> None:
    """In a process that has loaded all of that and done nothing yet: its children are forked from a copy of it."""

    def copied(path: bytes, words: Sequence[str], kept: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        with contextlib.suppress(SystemExit):
            exec(words[-1], {})  # noqa: S102 (what multiprocessing would have had a new Python run)
        os._exit(0)

    before, multiprocessing.util.spawnv_passfds = multiprocessing.util.spawnv_passfds, copied
    multiprocessing.get_context("forkserver").set_forkserver_preload([])
    multiprocessing.forkserver.ensure_running()
    multiprocessing.util.spawnv_passfds = before
    children.spawn = start
