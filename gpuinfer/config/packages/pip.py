"""pip, or uv where that is missing: what is asked of them, and what they answer in words for people.

Both are run without a shell, within a time, in a session of their own: a Ctrl-C ends them with all that they started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gpuinfer.config import registry
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children
from gpuinfer.host.terminal import show_status

QUIET = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_USER": "0",  # a folder, or the environment
    "NO_COLOR": "1",
    "UV_NO_PROGRESS": "1",
}
OFFLINE = re.compile(
    r"Failed to establish a new connection|Name or service not known|name resolution|ConnectTimeout|Network is "
    r"unreachable|Connection refused|ProxyError|dns error|error sending request|network was disabled",
    re.IGNORECASE,
)
ABSENT = re.compile(
    r"No matching distribution found|Could not find a version|not found in the package registry|there are no versions|"
    r"no version of|not found in the provided package locations|were not found in the cache",
    re.IGNORECASE,
)
AT_ODDS = re.compile(r"ResolutionImpossible|conflicting dependencies|No solution found|constraint", re.IGNORECASE)
CAUSES = re.compile(r"^\s*(?:The user requested )?(.+ depends on .+|\(constraint\) .+)$", re.MULTILINE)


class PackageNotFound(WorkError):
    """No package of that name is to be had."""


class IndexUnreachable(WorkError):
    """It may be there, and nothing could be reached."""


@dataclass(frozen=True, slots=True)
class PackageLookup:
    """Where packages are looked for, and for how long."""

    limit_s: float = 600.0  # for one step
    find_links: tuple[str, ...] = ()  # folders with packages, looked into as well
    index: bool = True  # whether an index is asked at all

    @property
    def words(self) -> list[str]:
        found = [word for folder in self.find_links for word in ("--find-links", folder)]
        return found if self.index else [*found, "--no-index"]


@dataclass(frozen=True, slots=True)
class Installer:
    """`path` is where Python finds packages for what is installed: see `places.Place.path`."""

    name: Literal["pip", "uv"]
    start: tuple[str, ...]
    path: Sequence[str] = field(default=(), repr=False)

    def stage(self, requirements: Sequence[str], into: Path, lookup: PackageLookup) -> None:
        """Install packages without what they need into a folder of their own, from wheels."""
        words = ["--no-deps", "--target", str(into), "--only-binary", ":all:", *lookup.words]
        if self.name == "pip":
            words.append("--no-compile")
        self._run("install", [*words, *requirements], lookup, f"fetching {_short(requirements)}")

    def fetch(self, requirements: Sequence[str], into: Path, lookup: PackageLookup) -> PackageLookup:
        """Have all of them near, so that installing them takes a moment. Returns where they are looked for then."""
        if self.name == "uv":  # keeps what it has fetched
            self.stage(requirements, into, lookup)
            return lookup
        words = ["--no-deps", "--dest", str(into), "--only-binary", ":all:", *lookup.words]
        self._run("download", [*words, *requirements], lookup, f"fetching {_short(requirements)}")
        return PackageLookup(lookup.limit_s, (str(into),), index=False)

    def build(self, source: Path, into: Path, lookup: PackageLookup, *, isolated: bool) -> Path:
        """The wheel of a folder or an archive of source. `isolated`: in an environment of its own, else with what is
        here.
        """
        alone = [] if isolated else ["--no-build-isolation"]
        if self.name == "pip":
            words = ["--no-deps", "--wheel-dir", str(into), *alone, *lookup.words, str(source)]
            self._run("wheel", words, lookup, f"building {source.name}")
        else:
            words = ["uv", "build", "--wheel", "--out-dir", str(into), "--python", sys.executable, *alone, str(source)]
            self._ended([*self.start[:1], *words[1:]], lookup, f"building {source.name}")
        [wheel] = into.glob("*.whl")
        return wheel

    def plan(self, requirements: Sequence[str], constraints: Mapping[str, str], lookup: PackageLookup) -> list[str]:
        """What would be installed for these requirements beside what is here, as `name==version`. `constraints` are
        versions that may not change, by plain name. Raises `UsageError` when that cannot be.
        """
        with tempfile.TemporaryDirectory(prefix="gpuinfer-plan-") as folder:
            held, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
            held.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
            words = ["--dry-run", "--upgrade", "--constraint", str(held), *lookup.words, "--only-binary", ":all:"]
            if self.name == "pip":
                words += ["--report", str(report)]
            ended = self._run("install", [*words, *requirements], lookup, "looking for what it needs")
            if self.name == "pip":
                told = json.loads(report.read_text())["install"]
                return [f"{one['metadata']['name']}=={one['metadata']['version']}" for one in told]
        found = re.findall(r"^ \+ (\S+)==(\S+)", ended.err.decode("utf-8", "replace"), re.MULTILINE)
        # uv does not look at the path: what is on it is there, in the version that it was held to
        return [f"{name}=={version}" for name, version in found if registry.plain(name) not in constraints]

    def install(self, requirements: Sequence[str], lookup: PackageLookup) -> None:
        """Into the environment, without what they need, in the place of other versions of them."""
        again = ["--force-reinstall"] if self.name == "pip" else ["--reinstall"]
        self._run("install", ["--no-deps", *again, *lookup.words, *requirements], lookup, "installing")

    def uninstall(self, name: str, lookup: PackageLookup) -> None:
        """Out of the environment."""
        words = ["--yes", name] if self.name == "pip" else [name]
        self._run("uninstall", words, lookup, f"removing {name}")

    def _run(self, verb: str, words: Sequence[str], lookup: PackageLookup, doing: str) -> children.FinishedProgram:
        more = ["--python", sys.executable] if self.name == "uv" else []
        if self.name == "pip" and verb != "uninstall":
            more = ["--retries", "1", "--timeout", "15"]
        return self._ended([*self.start, verb, *more, *words], lookup, doing)

    def _ended(self, command: Sequence[str], lookup: PackageLookup, doing: str) -> children.FinishedProgram:
        show_status(doing)
        environment = {**os.environ, **QUIET}
        if self.path:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, map(os.path.abspath, self.path)))
        try:
            ended = children.run_program(command, lookup.limit_s, environment=environment)
        finally:
            show_status("")
        if ended.code is None:
            raise WorkError(
                f"{doing}: {self.name} did not end within {lookup.limit_s:g} s and was ended; nothing was installed. "
                "Allow it more: --limit 30min."
            )
        if ended.code:
            raise self._failure(ended, doing)
        return ended

    def _failure(self, ended: children.FinishedProgram, doing: str) -> WorkError | UsageError:
        said = "\n".join(part.decode("utf-8", "replace") for part in (ended.out, ended.err))
        if OFFLINE.search(said):
            return IndexUnreachable(
                f"{doing}: no package index can be reached from here. Give the folder or the wheel itself, and with "
                "--find-links DIR a folder with the packages that it needs."
            )
        if AT_ODDS.search(said) and (causes := list(dict.fromkeys(CAUSES.findall(said)))):
            return UsageError(
                f"it needs what is at odds with what is here: {'; '.join(each.strip() for each in causes[:4])}. "
                "What is here is not changed: take another version of it, or an environment of its own."
            )
        if ABSENT.search(said):
            return PackageNotFound(
                f"{doing}: there is nothing of that name for this Python. Look at the name and its version."
            )
        lines = [line.strip() for line in said.splitlines() if re.match(r"\s*(error|ERROR)\b", line)]
        last = (lines or [ended.last_words])[-1]
        return WorkError(f"{doing}: {self.name} failed: {last}. Nothing was installed; mend that, and try again.")


def _short(requirements: Sequence[str]) -> str:
    names = [Path(one).name for one in requirements]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} packages"


def find_installer(path: Sequence[str] = ()) -> Installer:
    """Raises `UsageError` where there is neither."""
    if find_spec("pip") is not None:
        return Installer("pip", (sys.executable, "-m", "pip"), path)
    if uv := shutil.which("uv"):
        return Installer("uv", (uv, "pip"), path)
    raise UsageError("neither pip nor uv is here. Install one: python -m ensurepip.")
