"""Installs and removes packages of plugins.

A package is fetched or built in a folder of its own, looked at without importing it, then put in its place; one is
removed with what it brought and nobody else needs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpuinfer.config import registry
from gpuinfer.config.packages import package_info, places
from gpuinfer.config.packages import places as user_folder
from gpuinfer.config.packages.package_info import PackageOffer, PackageSource
from gpuinfer.config.packages.pip import IndexUnreachable, Installer, PackageLookup, PackageNotFound
from gpuinfer.config.packages.places import InstallPlace, make_folder, packages_in
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host import installation
from gpuinfer.host.installation import plugin_folder

OURS = "gpuinfer"
LEFT_OUT = {
    "build",
    "dist",
    ".venv",
    "venv",
    ".tox",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}  # of a source folder

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PreparedPackage:
    """A package that may be installed: nothing has been changed for it yet, and nothing of it was imported."""

    offer: PackageOffer
    staged: Path  # where it lies, installed, without what it needs
    requirement: str  # by which pip or uv finds it: `name==version`, or a wheel
    needed: list[str]  # packages that are not here yet, `name==version`
    replaces: str  # the version that is here, or ""
    origin: Path | None  # of what was built


class PackagePreparation:
    """Fetches and judges one package in a folder `work`, which is the caller's to remove."""

    def __init__(self, place: InstallPlace, program: Installer, lookup: PackageLookup, work: Path, tell: Tell) -> None:
        self._place, self._program, self._lookup = place, program, lookup
        self._work, self._tell, self._count = work, tell, 0

    def prepare(self, source: PackageSource) -> PreparedPackage:
        """Raises `UsageError` for what cannot be used, or is at odds with what is here, and `WorkError` for what cannot
        be had. Of a name wheels alone are taken: source would run a script of its own before anybody is asked.
        """
        offer, staged, requirement = self._had(source)
        package_info.refuse_unusable(offer)
        here = self._place.here()
        there = here.pop(offer.plain, None)
        self._refuse_hidden(offer, there)
        found = package_info.needs_of(
            (line for line in offer.requires if registry.wanted_versions([line]) is None), here
        )
        if found.odds:
            raise UsageError(
                f"{offer.package} cannot be used beside what is here: {'; '.join(found.odds)}. What is here is not "
                "changed for it: take another version of it, or an environment of its own."
            )
        held = {name: one.version for name, one in here.items()}
        needed = self._needed(offer, found.missing, held) if found.missing else []
        origin = source.path if source.is_built else None
        return PreparedPackage(offer, staged, requirement, needed, there.version if there else "", origin)

    def _needed(self, offer: PackageOffer, missing: Sequence[str], held: Mapping[str, str]) -> list[str]:
        try:
            return self._program.plan(missing, held, self._lookup)
        except (PackageNotFound, IndexUnreachable) as error:
            why = (
                "no package index can be reached"
                if isinstance(error, IndexUnreachable)
                else "not all of that is to be had"
            )
            raise type(error)(
                f"{offer.package} needs {', '.join(missing)}, and {why} from here. Name a folder with these packages, "
                "and those that they need: --find-links DIR."
            ) from error

    def _had(self, source: PackageSource) -> tuple[PackageOffer, Path, str]:
        """What it offers, where it was put, and how it is named to pip or uv."""
        if source.kind == "name":
            return self._of_name(source.names)
        wheel = str(source.path)
        if source.path is not None and source.is_built:
            self._tell(f"Building {source.path.name}, which runs its own build script.")
            copy = self._copied(source.path)
            wheel = str(self._program.build(copy, self._aside(), self._lookup, isolated=self._isolated(source)))
        staged = self._aside()
        self._program.stage([wheel], staged, replace(self._lookup, index=False))
        return package_info.offer_in(staged), staged, wheel

    def _of_name(self, names: tuple[str, ...]) -> tuple[PackageOffer, Path, str]:
        absent: PackageNotFound | None = None
        for number, name in enumerate(names):
            staged = self._aside()
            try:
                self._program.stage([name], staged, self._lookup)
            except PackageNotFound as error:
                absent = absent or error
                continue
            if len(names) > 1:
                said = f"Taking {name}." if number == 0 else f"There is no {names[0]}; taking {name} itself."
                self._tell(said)
            offer = package_info.offer_in(staged)
            if not registry.fits_version(offer.contract):
                offer, staged = self._for_this_contract(name, offer, staged)
            return offer, staged, f"{offer.name}=={offer.version}"
        if near := next((name for name in reversed(names) if Path(name).is_dir()), None):
            raise PackageNotFound(
                f"no package {near} is to be had by its name. For the folder here: ./{near}"
            ) from absent
        raise PackageNotFound(
            f"no wheel of {' or '.join(names)} is to be had for this Python. Look at the name; of what there is as "
            "source alone, fetch it, look at it, and give the folder or the archive."
        ) from absent

    def _for_this_contract(self, name: str, newest: PackageOffer, staged: Path) -> tuple[PackageOffer, Path]:
        """An older version that is for this gpuinfer, where there is one; else the newest, to be refused by name."""
        held = {OURS: registry.own_version()}
        try:
            pins = self._program.plan([name], held, self._lookup)
        except (UsageError, PackageNotFound):
            return newest, staged
        pin = next((one for one in pins if registry.plain(one.partition("==")[0]) == newest.plain), None)
        if pin is None:  # what is here already is as new as can be
            there = self._place.here().get(newest.plain)
            return (package_info.offer_of(there), staged) if there is not None else (newest, staged)
        older = self._aside()
        self._program.stage([pin], older, self._lookup)
        self._tell(
            f"{registry.contract_error(newest.package, newest.contract or '')}: taking {pin}, which is for this one."
        )
        return package_info.offer_in(older), older

    def _copied(self, path: Path) -> Path:
        """Where it is built: a build leaves traces, and takes up those of earlier ones. Raises `UsageError`."""
        if path.is_file():
            return path
        copy = self._aside() / path.name

        def left_out(folder: str, names: list[str]) -> set[str]:
            return LEFT_OUT.intersection(names) if Path(folder) == path else set()

        try:
            shutil.copytree(path, copy, symlinks=True, ignore=left_out)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be copied, to be built aside: {error}. Make all of it readable."
            ) from error
        return copy

    def _isolated(self, source: PackageSource) -> bool:
        """Whether its build needs what is not here. Of an archive that is not known: it is asked of the index."""
        if source.kind != "folder" or source.path is None:
            return self._lookup.index
        found = package_info.needs_of(package_info.build_needs(source.path), self._place.here())
        return bool(found.missing or found.odds)

    def _refuse_hidden(self, offer: PackageOffer, there: Distribution | None) -> None:
        """What lies in the folder comes last: an older one in the environment would be found first."""
        folder = self._place.folder
        if folder is not None and there is not None and offer.plain not in packages_in(folder):
            raise UsageError(
                f"{there.name} {there.version} is in the environment already, where it would hide one in {folder}. "
                "Install there (--into environment), or remove that first."
            )

    def _aside(self) -> Path:
        self._count += 1
        folder = self._work / str(self._count)
        folder.mkdir()
        return folder


def install(
    prepared: PreparedPackage, place: InstallPlace, program: Installer, lookup: PackageLookup, work: Path
) -> None:
    """Put it in its place, with what it needs. A Ctrl-C before anything has been changed leaves everything as it was;
    one afterwards is heard when all is in place.
    """
    if place.folder is not None:
        make_folder(place.folder)
        with user_folder.locked_folder(place.folder) as staged:
            beside = staged / "needed"
            beside.mkdir()
            if prepared.needed:
                program.stage(prepared.needed, beside, lookup)
            _note_origin(prepared.staged, prepared)
            own = staged / "own"
            shutil.copytree(prepared.staged, own)  # onto the same disk
            with uninterrupted():
                user_folder.move_in(beside, place.folder)
                user_folder.move_in(own, place.folder)
        installation.add_plugin_folder()
    else:
        fetched = work / "fetched"
        fetched.mkdir()
        wanted = list(prepared.needed)
        if "==" in prepared.requirement:
            wanted.append(prepared.requirement)
        nearby = program.fetch(wanted, fetched, lookup) if wanted else replace(lookup, index=False)
        with uninterrupted():
            program.install([*prepared.needed, prepared.requirement], nearby)
    importlib.invalidate_caches()
    registry.refresh()
    if place.folder is None and prepared.origin is not None:
        site = place.here()[prepared.offer.plain]
        _write_origin(user_folder.metadata_of(site), prepared.origin)


def _note_origin(staged: Path, prepared: PreparedPackage) -> None:
    if prepared.origin is not None:
        for metadata in staged.glob("*.dist-info"):
            _write_origin(metadata, prepared.origin)


def _write_origin(metadata: Path, origin: Path) -> None:
    """That it was built from there (PEP 610), and not from where its wheel happened to lie."""
    told = {"url": origin.as_uri(), "dir_info": {}} if origin.is_dir() else {"url": origin.as_uri(), "archive_info": {}}
    with contextlib.suppress(OSError):
        (metadata / "direct_url.json").write_text(json.dumps(told))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A Ctrl-C or SIGTERM in here is heard at its end: what is inside takes a moment, and must be whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, frame: heard.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class InstalledPackage:
    """A package with plugins, as it lies here."""

    offer: PackageOffer
    distribution: Distribution
    place: InstallPlace

    def source(self) -> PackageSource:
        """What renews it: the folder, archive or wheel that it came from (PEP 610), else its name. Raises `UsageError`
        for what came from nowhere that is still there.
        """
        url, is_editable = self._told()
        if not url:
            return PackageSource("name", names=(self.offer.name,))
        parts = urlsplit(url)
        if parts.scheme != "file":
            raise UsageError(
                f"{self.offer.package} came from {url}. Fetch it yourself, look at it, and give the folder or the "
                "wheel: gpuinfer plugins install PATH."
            )
        path = Path(unquote(parts.path))
        if is_editable:
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

    def _told(self) -> tuple[str, bool]:
        """The address in its metadata, "" where there is none, and whether it was left where it lies."""
        try:
            told = json.loads(self.distribution.read_text("direct_url.json") or "{}")
        except ValueError:
            told = {}
        if not isinstance(told, dict):
            return "", False
        about = told.get("dir_info")
        return str(told.get("url", "")), isinstance(about, dict) and about.get("editable") is True


def installed_packages() -> dict[str, InstalledPackage]:
    """Every package with plugins but gpuinfer itself, by its plain name; of one that is in both places the one that is
    found first.
    """
    folder = plugin_folder()
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
    if registry.plain(name) == OURS:
        raise UsageError("gpuinfer itself is no plugin. To remove it too: pip uninstall gpuinfer.")
    known = installed_packages()
    for one in package_info.candidate_names(name, name):
        if registry.plain(one) in known:
            return known[registry.plain(one)]
    here = InstallPlace(None).here()
    if registry.plain(name) in here:
        raise UsageError(f"'{name}' is installed and adds no plugin of gpuinfer. To remove it: pip uninstall {name}.")
    raise UnknownName("package with plugins", name, [one.offer.name for one in known.values()])


def refuse_needed(one: InstalledPackage) -> None:
    """Raises `UsageError` when other packages need it, or it is not ours to remove."""
    here = InstallPlace(plugin_folder()).here()
    if needing := package_info.who_needs(one.offer.plain, here):
        raise UsageError(f"{', '.join(needing)} needs {one.offer.name}. Uninstall what needs it first.")


def refuse_foreign(one: InstalledPackage) -> None:
    """Raises `UsageError` for what lies where nothing of the user's can be changed."""
    if one.place.folder is None and (why := places.why_no_environment()):
        raise UsageError(
            f"{one.offer.package} lies in {one.place.words}, which is not changed: {why}. To do without it: "
            f'disabled_plugins = ["{one.offer.name}"] in gpuinfer.toml.'
        )


def orphans_of(one: InstalledPackage) -> list[Distribution]:
    """What came into the user's folder with it, and nothing else there needs."""
    if one.place.folder is None:
        return []
    there = places.packages_in(one.place.folder)
    there.pop(one.offer.plain, None)
    gone: list[Distribution] = []
    while True:
        bare = [
            name
            for name, each in there.items()
            if not package_info.offer_of(each).plugins and not package_info.who_needs(name, there)
        ]
        if not bare:
            return gone
        gone += [there.pop(name) for name in bare]


def remove(one: InstalledPackage, program: Installer | None, lookup: PackageLookup) -> None:
    """Take it away, with what it leaves over. `program` is asked for what lies in the environment."""
    if one.place.folder is not None:
        with user_folder.locked_folder(one.place.folder), uninterrupted():
            for each in (one.distribution, *orphans_of(one)):
                user_folder.take_out(each, one.place.folder)
    elif program is not None:
        with uninterrupted():
            program.uninstall(one.offer.name, lookup)
    importlib.invalidate_caches()
    registry.refresh()
