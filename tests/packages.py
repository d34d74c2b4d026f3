"""Small real packages, installed into a folder or as wheels (PEP 427): nothing is built for them."""

from __future__ import annotations

import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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

BACKEND = '''
    """A backend for tests."""
    from gpuinfer.api import Backend, Limits
    class Good(Backend):
        """Answers each row with itself."""
        limits = Limits(64)
        async def infer(self, batch):
            return [request.payload for request in batch]
'''
NEVER = "raise SystemExit('imported')"


def package_files(
    name: str,
    groups: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None,
    *,
    version: str,
    metadata: str = "dist-info",
    requires: Sequence[str] = (),
) -> dict[str, str]:
    """The files of an installed package: `groups` are entry points, `modules` sources by name."""
    plain = name.replace("-", "_")
    place = f"{plain}-{version}.dist-info/METADATA" if metadata == "dist-info" else f"{plain}.egg-info/PKG-INFO"
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {f"{module}.py": textwrap.dedent(source) for module, source in (modules or {}).items()}
    files[place] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Made.\n{needs}"
    files[f"{place.partition('/')[0]}/entry_points.txt"] = "\n".join(
        f"[{group}]\n" + "".join(f"{key} = {target}\n" for key, target in each.items())
        for group, each in groups.items()
    )
    return files


def install(
    folder: Path,
    name: str,
    points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "1.0",
    **more: Any,
) -> None:
    """Put a package into `folder` as pip would: `points` are its entry points by kind, `modules` its files by name."""
    groups = {f"gpuinfer.{kind}": each for kind, each in points.items()}
    for place, text in package_files(name, groups, modules, version=version, **more).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)


def install_count(folder: Path) -> None:
    """The package `gpuinfer-count`: workload `count`, backend `parrot`, strategy `at-once`."""
    install(folder, "gpuinfer-count", COUNT_POINTS, {"count_package": COUNT}, version="1.2")


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    points: Mapping[str, Mapping[str, str]] | None = None,
    requires: Sequence[str] = (),
    modules: Mapping[str, str] | None = None,
) -> Path:
    """A wheel of pure Python in `folder`: `points` are entry points by group, `modules` sources by name."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    files = package_files(name, points or {}, modules, version=version, requires=requires)
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for place, text in files.items():
            wheel.writestr(place, text)
    return path


def plugin_wheel(folder: Path, name: str, version: str = "1.0", *, backend: str, **more: object) -> Path:
    """With one backend of this name."""
    module = name.replace("-", "_")
    said = {"requires": ["gpuinfer>=0.1"], "modules": {module: BACKEND}, **more}
    return make_wheel(folder, name, version, points={"gpuinfer.backends": {backend: f"{module}:Good"}}, **said)  # type: ignore[arg-type]
