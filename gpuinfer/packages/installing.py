"""From what people name to a plugin that is there: fetched or built aside, looked at without importing it, then put in
its place.
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

from gpuinfer.config import contract, registry
from gpuinfer.errors import UsageError
from gpuinfer.host import plugin_folder
from gpuinfer.packages import folder as user_folder
from gpuinfer.packages import needs, offers, sources
from gpuinfer.packages.offers import Offer
from gpuinfer.packages.places import Place, make, of_folder
from gpuinfer.packages.programs import Lookup, NotFound, Offline, Program
from gpuinfer.packages.sources import Source

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
class Prepared:
    """A package that may be installed: nothing has been changed for it yet, and nothing of it was imported."""

    offer: Offer
    staged: Path  # where it lies, installed, without what it needs
    requirement: str  # by which pip or uv finds it: `name==version`, or a wheel
    needed: list[str]  # packages that are not here yet, `name==version`
    replaces: str  # the version that is here, or ""
    origin: Path | None  # of what was built


class Preparation:
    """Fetches and judges one package in a folder `work`, which is the caller's to remove."""

    def __init__(self, place: Place, program: Program, lookup: Lookup, work: Path, tell: Tell) -> None:
        self._place, self._program, self._lookup = place, program, lookup
        self._work, self._tell, self._count = work, tell, 0

    def prepare(self, source: Source) -> Prepared:
        """Raises `UsageError` for what cannot be used, or is at odds with what is here, and `WorkError` for what cannot
        be had. Of a name wheels alone are taken: source would run a script of its own before anybody is asked.
        """
        offer, staged, requirement = self._had(source)
        offers.refuse_unusable(offer)
        here = self._place.here()
        there = here.pop(offer.plain, None)
        self._refuse_hidden(offer, there)
        found = needs.of((line for line in offer.requires if contract.wanted([line]) is None), here)
        if found.odds:
            raise UsageError(
                f"{offer.package} cannot be used beside what is here: {'; '.join(found.odds)}. What is here is not "
                "changed for it: take another version of it, or an environment of its own."
            )
        held = {name: one.version for name, one in here.items()}
        needed = self._needed(offer, found.missing, held) if found.missing else []
        origin = source.path if source.is_built else None
        return Prepared(offer, staged, requirement, needed, there.version if there else "", origin)

    def _needed(self, offer: Offer, missing: Sequence[str], held: Mapping[str, str]) -> list[str]:
        try:
            return self._program.plan(missing, held, self._lookup)
        except (NotFound, Offline) as error:
            why = "no package index can be reached" if isinstance(error, Offline) else "not all of that is to be had"
            raise type(error)(
                f"{offer.package} needs {', '.join(missing)}, and {why} from here. Name a folder with these packages, "
                "and those that they need: --find-links DIR."
            ) from error

    def _had(self, source: Source) -> tuple[Offer, Path, str]:
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
        return offers.in_folder(staged), staged, wheel

    def _of_name(self, names: tuple[str, ...]) -> tuple[Offer, Path, str]:
        absent: NotFound | None = None
        for number, name in enumerate(names):
            staged = self._aside()
            try:
                self._program.stage([name], staged, self._lookup)
            except NotFound as error:
                absent = absent or error
                continue
            if len(names) > 1:
                said = f"Taking {name}." if number == 0 else f"There is no {names[0]}; taking {name} itself."
                self._tell(said)
            offer = offers.in_folder(staged)
            if not contract.fits(offer.contract):
                offer, staged = self._for_this_contract(name, offer, staged)
            return offer, staged, f"{offer.name}=={offer.version}"
        if near := next((name for name in reversed(names) if Path(name).is_dir()), None):
            raise NotFound(f"no package {near} is to be had by its name. For the folder here: ./{near}") from absent
        raise NotFound(
            f"no wheel of {' or '.join(names)} is to be had for this Python. Look at the name; of what there is as "
            "source alone, fetch it, look at it, and give the folder or the archive."
        ) from absent

    def _for_this_contract(self, name: str, newest: Offer, staged: Path) -> tuple[Offer, Path]:
        """An older version that is for this gpuinfer, where there is one; else the newest, to be refused by name."""
        held = {OURS: contract.own()}
        try:
            pins = self._program.plan([name], held, self._lookup)
        except (UsageError, NotFound):
            return newest, staged
        pin = next((one for one in pins if registry.plain(one.partition("==")[0]) == newest.plain), None)
        if pin is None:  # what is here already is as new as can be
            there = self._place.here().get(newest.plain)
            return (offers.of(there), staged) if there is not None else (newest, staged)
        older = self._aside()
        self._program.stage([pin], older, self._lookup)
        self._tell(f"{contract.complaint(newest.package, newest.contract or '')}: taking {pin}, which is for this one.")
        return offers.in_folder(older), older

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

    def _isolated(self, source: Source) -> bool:
        """Whether its build needs what is not here. Of an archive that is not known: it is asked of the index."""
        if source.kind != "folder" or source.path is None:
            return self._lookup.index
        found = needs.of(sources.build_needs(source.path), self._place.here())
        return bool(found.missing or found.odds)

    def _refuse_hidden(self, offer: Offer, there: Distribution | None) -> None:
        """What lies in the folder comes last: an older one in the environment would be found first."""
        folder = self._place.folder
        if folder is not None and there is not None and offer.plain not in of_folder(folder):
            raise UsageError(
                f"{there.name} {there.version} is in the environment already, where it would hide one in {folder}. "
                "Install there (--into environment), or remove that first."
            )

    def _aside(self) -> Path:
        self._count += 1
        folder = self._work / str(self._count)
        folder.mkdir()
        return folder


def install(prepared: Prepared, place: Place, program: Program, lookup: Lookup, work: Path) -> None:
    """Put it in its place, with what it needs. A Ctrl-C before anything has been changed leaves everything as it was;
    one afterwards is heard when all is in place.
    """
    if place.folder is not None:
        make(place.folder)
        with user_folder.held(place.folder) as staged:
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
        plugin_folder.see_plugins()
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


def _note_origin(staged: Path, prepared: Prepared) -> None:
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
