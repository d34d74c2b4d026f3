"""Installs, upgrades and removes packages of plugins: pip does the work, or uv where pip is missing.

What a package adds is read from its metadata in a temporary folder, before the environment or the user's folder
changes. pip and uv run without a shell, with a timeout, in a session of their own: a Ctrl-C ends them with all that
they started.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

from gpuinfer.config import registry
from gpuinfer.config.packages import package_info, places
from gpuinfer.config.packages.package_info import PackageOffer, PackageSource
from gpuinfer.config.packages.places import InstallPlace
from gpuinfer.errors import PluginError, UnknownName, UsageError, WorkError
from gpuinfer.host import children, installation
from gpuinfer.host.terminal import show_status

OURS = "gpuinfer"
WHEELS_ONLY = ("--only-binary", ":all:")
"""For everything that is found by name: source would run a script of its own before the user is asked."""
QUIET = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_USER": "0",  # a folder, or the environment
    "NO_COLOR": "1",
    "UV_NO_PROGRESS": "1",
}


@dataclass(frozen=True, slots=True)
class Installer:
    """pip or uv, with the user's options. `path`: where Python finds packages for what is installed."""

    name: str
    start: tuple[str, ...]  # of its command
    path: Sequence[str]
    limit_s: float  # timeout of each run
    find_links: tuple[str, ...]  # folders with packages, searched as well
    index: bool  # whether a package index is asked

    def plan(self, requirements: Sequence[str], held: Mapping[str, str]) -> dict[str, str]:
        """The versions by plain name that would be installed for these requirements. The packages `held`, versions by
        plain name, keep their versions: requirements that need others fail.
        """
        with tempfile.TemporaryDirectory(prefix="gpuinfer-plan-") as folder:
            constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
            constraints.write_text("".join(f"{name}=={version}\n" for name, version in held.items()))
            words = ["--dry-run", "--upgrade", "--constraint", str(constraints), *WHEELS_ONLY, *requirements]
            if self.name == "pip":
                self.run("install", ["--report", str(report), *words], "looking for what it needs")
                found = [
                    (one["metadata"]["name"], one["metadata"]["version"])
                    for one in json.loads(report.read_text())["install"]
                ]
            else:
                printed = self.run("install", words, "looking for what it needs").err.decode("utf-8", "replace")
                found = re.findall(r"^ \+ (\S+)==(\S+)", printed, re.MULTILINE)
        # uv does not read PYTHONPATH, and plans what lies in the user's folder again
        return {registry.plain_name(name): version for name, version in found if registry.plain_name(name) not in held}

    def run(self, verb: str, words: Sequence[str], doing: str) -> children.FinishedProgram:
        """Run `pip VERB WORDS`. Raises `WorkError` when it fails, with its own words on standard error."""
        more = ["--python", sys.executable] if self.name == "uv" else []
        if verb == "install":
            more += [word for folder in self.find_links for word in ("--find-links", folder)]
            more += [] if self.index else ["--no-index"]
            more += ["--retries", "1", "--timeout", "15"] if self.name == "pip" else []
        environment = {**os.environ, **QUIET}
        if self.path:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, map(os.path.abspath, self.path)))
        show_status(doing)
        try:
            ended = children.run_program([*self.start, verb, *more, *words], self.limit_s, environment=environment)
        finally:
            show_status("")
        if ended.code is None:
            raise WorkError(
                f"{doing}: {self.name} did not end within {self.limit_s:g} s and was killed. Allow more: --limit 30min."
            )
        if ended.code:
            printed = "\n".join(part.decode("utf-8", "replace").strip() for part in (ended.out, ended.err)).strip()
            print(printed, file=sys.stderr)
            errors = [line.strip() for line in printed.splitlines() if re.match(r"\s*(error|ERROR)\b", line)]
            raise WorkError(
                f"{doing}: {self.name} failed: {(errors or [ended.last_words])[-1]} Look at the name and the version; "
                "without a network, give the folder or the wheel itself, and --find-links DIR for what it needs."
            )
        return ended


def find_installer(
    path: Sequence[str] = (), limit_s: float = 600.0, find_links: Sequence[str] = (), index: bool = True
) -> Installer:
    """pip, else uv, with these fields of `Installer`. Raises `UsageError` where there is neither."""
    if find_spec("pip") is not None:
        return Installer("pip", (sys.executable, "-m", "pip"), path, limit_s, tuple(find_links), index)
    if uv := shutil.which("uv"):
        return Installer("uv", (uv, "pip"), path, limit_s, tuple(find_links), index)
    raise UsageError("neither pip nor uv is here. Install one: python -m ensurepip.")


@dataclass(frozen=True, slots=True)
class PreparedPackage:
    """A package that may be installed: nothing was changed for it yet, and nothing of it was imported."""

    offer: PackageOffer
    words: list[str]  # by which pip or uv installs it
    needed: list[str] = field(default_factory=list)  # packages that are not here yet, `name==version`
    replaces: str = ""  # the version that is here


class PackagePreparation:
    """Reads what a package adds from a copy in the temporary folder `staged`, which the caller removes."""

    def __init__(self, place: InstallPlace, program: Installer, staged: Path, tell: Callable[[str], None]) -> None:
        self._place, self._program, self._staged, self._tell = place, program, staged, tell
        self._here = place.here()
        self._held = {name: one.version for name, one in self._here.items()}

    def prepare(self, source: PackageSource) -> PreparedPackage:
        """Raises `UsageError` for what cannot be used here, and `WorkError` for what cannot be had."""
        if source.path is not None:
            words = [str(source.path)]
            if source.kind in ("folder", "archive"):
                self._tell(f"Building {Path(words[0]).name}, which runs its own build script.")
                builds_here = not self._program.index  # all that the build needs is installed: no index is asked
                if source.kind == "folder":
                    needs = [Requirement(line) for line in package_info.build_needs(source.path)]
                    held = [(one, self._held.get(registry.plain_name(one.name))) for one in needs]
                    builds_here = all(version and one.specifier.contains(version, True) for one, version in held)
                if builds_here:
                    words.insert(0, "--no-build-isolation")
            offer, words = self._read(words)
            there, others = self._here.get(offer.plain), {n: v for n, v in self._held.items() if n != offer.plain}
            planned = self._program.plan(offer.requires, others) if offer.requires else {}
            return PreparedPackage(offer, words, _pinned(planned), there.version if there is not None else "")
        errors: list[UsageError | WorkError] = []
        for name in source.names:
            try:
                plain = registry.plain_name(Requirement(name).name)
                planned = self._program.plan([name], {one: held for one, held in self._held.items() if one != plain})
                there = self._here.get(plain)
                if plain not in planned and there is not None:  # no newer version is for this gpuinfer
                    return PreparedPackage(package_info.offer_of(there), [], replaces=there.version)
                offer, words = self._read([*WHEELS_ONLY, f"{plain}=={planned.pop(plain)}"])
                self._tell(f"Taking {offer.package}.")
                return PreparedPackage(offer, words, _pinned(planned), there.version if there is not None else "")
            except (UsageError, WorkError) as error:
                errors.append(error)
        if near := next((name for name in source.names if Path(name).is_dir()), None):
            raise WorkError(f"no package {near} was found by its name. For the folder here: ./{near}") from errors[0]
        raise next((error for error in errors if isinstance(error, PluginError)), errors[0])

    def _read(self, words: list[str]) -> tuple[PackageOffer, list[str]]:
        """Install a package alone into the temporary folder, and read what it adds. Raises `UsageError`."""
        shutil.rmtree(self._staged, ignore_errors=True)
        self._program.run("install", ["--no-deps", "--target", str(self._staged), *words], f"fetching {words[-1]}")
        offer = package_info.offer_in(self._staged)
        package_info.refuse_unusable(offer)
        folder, there = self._place.folder, self._here.get(offer.plain)
        if folder is not None and there is not None and offer.plain not in places.packages_in(folder):
            raise UsageError(
                f"{there.name} {there.version} is in the environment already, where it would hide one in {folder}. "
                "Install there (--into environment), or remove that first."
            )
        return offer, words


def _pinned(planned: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in planned.items()]


def install_package(prepared: PreparedPackage, place: InstallPlace, program: Installer, staged: Path) -> None:
    """Install it with what it needs. `staged` is the folder that it was read from."""
    what = f"installing {prepared.offer.package}"
    if place.folder is None:
        again = "--force-reinstall" if program.name == "pip" else "--reinstall"
        program.run("install", ["--no-deps", again, *prepared.words, *prepared.needed], what)
    else:
        places.make_folder(place.folder)
        if prepared.needed:
            program.run("install", ["--no-deps", "--target", str(staged), *WHEELS_ONLY, *prepared.needed], what)
        places.put_in(staged, place.folder)
        installation.add_plugin_folder()
    importlib.invalidate_caches()
    registry.search_again()


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """A package with plugins that is installed here."""

    offer: PackageOffer
    distribution: Distribution
    place: InstallPlace

    def source(self) -> PackageSource:
        """What renews it: the folder, archive or wheel that it came from (PEP 610), else its name. Raises `UsageError`
        when that is not there any more.
        """
        try:
            origin = json.loads(self.distribution.read_text("direct_url.json") or "{}")
            url, directory = str(origin.get("url", "")), origin.get("dir_info") or {}
        except (ValueError, AttributeError):
            url, directory = "", {}
        if not url:
            return PackageSource("name", names=(self.offer.name,))
        parts = urlsplit(url)
        if parts.scheme != "file":
            raise UsageError(
                f"{self.offer.package} came from {url}. Fetch it yourself, look at it, and give the folder or the "
                "wheel: gpuinfer plugins install PATH."
            )
        path = Path(unquote(parts.path))
        if directory.get("editable") is True:
            raise UsageError(
                f"{self.offer.package} is used where it lies, in {path}: what is changed there counts at once. After a "
                f"change of its entry points or needs: pip install -e {path}."
            )
        try:
            return package_info.source_at(path)
        except UsageError as error:
            raise UsageError(
                f"{self.offer.package} came from {path}, and that is no package any more. Say where it is now: "
                "gpuinfer plugins install PATH."
            ) from error


def installed_packages() -> dict[str, InstalledPackage]:
    """Every package with plugins but gpuinfer itself, by its plain name; of one that is in both places the one that is
    found first.
    """
    folder = installation.plugin_folder()
    found: dict[str, InstalledPackage] = {}
    for place, here in (
        (InstallPlace(None), InstallPlace(None).here()),
        (InstallPlace(folder), places.packages_in(folder)),
    ):
        for name, distribution in here.items():
            if name not in found and name != OURS and (offer := package_info.offer_of(distribution)).plugins:
                found[name] = InstalledPackage(offer, distribution, place)
    return found


def find_installed(name: str) -> InstalledPackage:
    """The installed package of that name, or that short name. Raises `UsageError` when there is none to remove."""
    if registry.plain_name(name) == OURS:
        raise UsageError("gpuinfer itself is no plugin. To remove it too: pip uninstall gpuinfer.")
    known = installed_packages()
    for one in package_info.candidate_names(name, name):
        if registry.plain_name(one) in known:
            return known[registry.plain_name(one)]
    if registry.plain_name(name) in InstallPlace(None).here():
        raise UsageError(f"'{name}' is installed and adds no plugin of gpuinfer. To remove it: pip uninstall {name}.")
    raise UnknownName("package with plugins", name, [one.offer.name for one in known.values()])


def refuse_foreign(one: InstalledPackage) -> None:
    """Raises `UsageError` for a package in an environment that is not the user's to change."""
    if one.place.folder is None and (why := places.why_no_environment()):
        raise UsageError(
            f"{one.offer.package} lies in {one.place.words}, which is not changed: {why}. To do without it: "
            f'disabled_plugins = ["{one.offer.name}"] in gpuinfer.toml.'
        )


def remove(one: InstalledPackage, limit_s: float) -> None:
    """Remove it, and nothing that came with it."""
    if one.place.folder is not None:
        places.take_out(one.distribution, one.place.folder)
    else:
        program = find_installer(one.place.path, limit_s)
        words = ["--yes", one.offer.name] if program.name == "pip" else [one.offer.name]
        program.run("uninstall", words, f"removing {one.offer.name}")
    importlib.invalidate_caches()
    registry.search_again()
