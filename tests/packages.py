"""Installs small real packages into a folder: modules, and the metadata that pip would write."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

COUNT = '''
"""A workload, a backend and a strategy that a third party could have written."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Literal

from pydantic import Field

from gpuinfer.api import Backend, Limits, Options, Progress, Strategy, Workload
from gpuinfer.errors import UsageError, WorkError


class Count(Workload):
    """Counts to a number and asks for each."""

    class Options(Options):
        games: int = Field(3, ge=1, description="how many [at most]")
        order: Literal["up", "down"] = Field("up", description="which way")
        workers: int | None = Field(None, description="processes")
        resume: bool = Field(False, description="go on")
        out: Path | None = Field(None, description="folder")
        signal_at: int | None = None
        fail_at: int | None = None

    def __init__(self, setup=None, /, **options):
        super().__init__(setup, **options)
        if self.options.games == 13:
            raise UsageError("13 brings bad luck. Try --games 12.")

    async def run(self, infer):
        total = self.options.games
        yield Progress(0, total, "games", note="warming up", setup=True)
        for done in range(1, total + 1):
            assert await infer([done], rows=1) == [done]
            if done == self.options.signal_at:
                os.kill(os.getpid(), signal.SIGINT)
                await infer.stopping.wait()
            if done == self.options.fail_at:
                raise WorkError("the work broke. Try fewer games.")
            yield Progress(done, total, "games", {"games": done})
            if infer.stopping.is_set():
                return


class Parrot(Backend):
    """Answers each row with itself."""

    class Options(Options):
        seconds: float = Field(0.0, ge=0, description="that one batch takes")
        max_rows: int = Field(64, ge=1, description="rows in a batch")

    limits = Limits(64)

    async def infer(self, batch):
        await asyncio.sleep(self.options.seconds)
        return [request.payload for request in batch]


class AtOnce(Strategy):
    """Never waits."""

    def cut_at(self, queue):
        return queue.now
'''

COUNT_POINTS = {
    "workloads": {"count": "count_package:Count"},
    "backends": {"parrot": "count_package:Parrot"},
    "strategies": {"at-once": "count_package:AtOnce"},
}


def install(
    folder: Path,
    name: str,
    points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "1.0",
    metadata: str = "dist-info",
    requires: Sequence[str] = (),
) -> None:
    """Put a package into `folder` as pip would: `points` are its entry points by kind, `modules` its files by name."""
    plain = name.replace("-", "_")
    place, file = folder / f"{plain}-{version}.dist-info", "METADATA"
    if metadata != "dist-info":
        place, file = folder / f"{plain}.egg-info", "PKG-INFO"
    place.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    (place / file).write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    groups = [
        f"[gpuinfer.{kind}]\n" + "".join(f"{n} = {t}\n" for n, t in each.items()) for kind, each in points.items()
    ]
    (place / "entry_points.txt").write_text("\n".join(groups))
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(textwrap.dedent(source))


def install_count(folder: Path) -> None:
    """The package `gpuinfer-count`: workload `count`, backend `parrot`, strategy `at-once`."""
    install(folder, "gpuinfer-count", COUNT_POINTS, {"count_package": COUNT}, version="1.2")
