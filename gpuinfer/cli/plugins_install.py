"""`gpuinfer plugins install`, `upgrade` and `uninstall`: what is asked before, and what is said afterwards."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpuinfer.cli.problems import FAILED
from gpuinfer.config import registry, settings
from gpuinfer.errors import GpuinferError, UsageError, WorkError

if TYPE_CHECKING:
    from gpuinfer.config.packages.installer import InstalledPackage, PreparedPackage
    from gpuinfer.config.packages.package_info import PackageSource
    from gpuinfer.config.packages.pip import PackageLookup
    from gpuinfer.config.packages.places import InstallPlace

RIGHTS = "A plugin is code that runs with your rights: it can read and change all that you can."

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask: for scripts.")]
Into = Annotated[
    Literal["environment", "folder"] | None,
    typer.Option(
        metavar="environment|folder", help="Where to. Else into the environment where that can be, or your own folder."
    ),
]
Links = Annotated[list[Path] | None, typer.Option("--find-links", metavar="DIR", help="Look here too; repeatable.")]
Index = Annotated[bool, typer.Option("--index/--no-index", help="Whether a package index is asked.")]
Limit = Annotated[str, typer.Option(metavar="TIME", help="For one step, such as a download.")]


def installed_names(incomplete: str) -> list[str]:
    """For completion."""
    names = {record.distribution for record in registry.listing() if record.place != registry.BUILT_IN}
    return sorted(name for name in names if name.startswith(incomplete))


def install(
    what: Annotated[list[str], typer.Argument(metavar="NAME|PATH|WHEEL", help="A name, a folder, or a wheel.")],
    yes: Yes = False,
    into: Into = None,
    find_links: Links = None,
    index: Index = True,
    limit: Limit = "10min",
) -> None:
    """Install packages with plugins, after saying what each adds. `echo` means gpuinfer-echo."""
    from gpuinfer.config.packages import package_info, places

    settings.load()  # they may switch plugins off
    _refuse_unasked(yes)
    place, lookup = places.choose_place(into), _lookup(limit, find_links, index)
    for source in [package_info.read_source(text) for text in what]:
        if there := _there_already(source):
            _say(f"{there.offer.package} is installed already, in {there.place.words}.")
            _say(f"To renew it: gpuinfer plugins upgrade {there.offer.name}")
            continue
        _install_one(source, place, lookup, yes, lambda prepared: None)


def upgrade(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="as `plugins list` names packages", autocompletion=installed_names),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every package with plugins.")] = False,
    yes: Yes = False,
    find_links: Links = None,
    index: Index = True,
    limit: Limit = "10min",
) -> None:
    """Install newer versions of packages with plugins, where there are some for this gpuinfer; what came from a folder
    or a wheel, from there again.
    """
    from gpuinfer.config.packages import installer

    settings.load()
    _refuse_unasked(yes)
    if bool(names) == every:
        raise UsageError("say what to upgrade: gpuinfer plugins upgrade NAME, or --all.")
    lookup = _lookup(limit, find_links, index)
    meant = (
        list(installer.installed_packages().values())
        if every
        else [installer.find_installed(name) for name in names or []]
    )
    left: list[str] = []
    for one in meant:
        try:
            _upgrade_one(one, lookup, yes, every)
        except (GpuinferError, typer.Exit) as error:
            if len(meant) == 1:
                raise
            if isinstance(error, GpuinferError):
                _say(f"{one.offer.package} stays as it is: {error}")
            left.append(one.offer.package)
    if left:
        raise WorkError(
            f"{len(left)} of {len(meant)} packages stay as they are: {_listed(left)}. What keeps each is said above; "
            "upgrade it by its name when that is mended."
        )


def _upgrade_one(one: InstalledPackage, lookup: PackageLookup, yes: bool, every: bool) -> None:
    from gpuinfer.config.packages import installer

    try:
        source = one.source()
    except UsageError as error:
        if not every:
            raise
        _say(str(error))
        return
    installer.refuse_foreign(one)
    _install_one(source, one.place, lookup, yes, _unless_newer(one) if source.kind == "name" else _unless_other(one))


def uninstall(
    name: Annotated[str, typer.Argument(help="as `plugins list` names the package", autocompletion=installed_names)],
    yes: Yes = False,
    limit: Limit = "10min",
) -> None:
    """Remove a package with plugins, and what came into your folder with it."""
    from gpuinfer.config.packages import installer, pip

    settings.load()
    _refuse_unasked(yes)
    one = installer.find_installed(name)
    installer.refuse_foreign(one)
    installer.refuse_needed(one)
    program = pip.find_installer(one.place.path) if one.place.folder is None else None
    _say(f"{one.offer.package} adds {one.offer.words}; it is in {one.place.words}.")
    if others := installer.orphans_of(one):
        _say(f"With it goes what nothing else there needs: {_listed([f'{e.name} {e.version}' for e in others])}.")
    _ask("Remove it?", yes)
    installer.remove(one, program, _lookup(limit, None, True))
    _say(f"Removed {one.offer.package}.")


def _install_one(
    source: PackageSource,
    place: InstallPlace,
    lookup: PackageLookup,
    yes: bool,
    why_not: Callable[[PreparedPackage], str | None],
) -> None:
    from gpuinfer.config.packages import installer, pip

    program = pip.find_installer(place.path)
    with tempfile.TemporaryDirectory(prefix="gpuinfer-plugin-") as folder:
        work = Path(folder)
        prepared = installer.PackagePreparation(place, program, lookup, work, _say).prepare(source)
        if reason := why_not(prepared):
            _say(reason)
            return
        for line in _told_of(prepared, place):
            _say(line)
        _ask("Install it?", yes)
        installer.install(prepared, place, program, lookup, work)
    _say(f"Installed {prepared.offer.package}. To see whether it holds: gpuinfer plugins check {prepared.offer.name}.")


def _told_of(prepared: PreparedPackage, place: InstallPlace) -> list[str]:
    offer = prepared.offer
    lines = [f"{offer.package}: {offer.summary or 'no description'}", f"  adds      {offer.words}"]
    if offer.contract:
        lines.append(f"  for       gpuinfer {offer.contract}")
    if prepared.needed:
        lines.append(f"  needs     {_listed(prepared.needed)}, which will be installed with it")
    if prepared.replaces:
        lines.append(f"  replaces  {offer.name} {prepared.replaces}")
    return [*lines, f"  goes to   {place.words}", RIGHTS]


def _unless_newer(one: InstalledPackage) -> Callable[[PreparedPackage], str | None]:
    def why_not(prepared: PreparedPackage) -> str | None:
        from packaging.version import InvalidVersion, Version

        try:
            newer = Version(prepared.offer.version) > Version(one.offer.version)
        except InvalidVersion:
            newer = prepared.offer.version != one.offer.version
        return None if newer else f"{one.offer.package} is the newest that is to be had for this gpuinfer."

    return why_not


def _unless_other(one: InstalledPackage) -> Callable[[PreparedPackage], str | None]:
    """Of a path: whatever version lies there now."""

    def why_not(prepared: PreparedPackage) -> str | None:
        if prepared.offer.plain == one.offer.plain:
            return None
        return f"{one.offer.package} came from {prepared.origin}, where there is {prepared.offer.package} now."

    return why_not


def _there_already(source: PackageSource) -> InstalledPackage | None:
    """Of a name: what it means is here, in a version that will do."""
    from packaging.requirements import Requirement

    from gpuinfer.config.packages import installer

    known = installer.installed_packages()
    for text in source.names:
        wanted = Requirement(text)
        one = known.get(registry.plain(wanted.name))
        if one is not None and wanted.specifier.contains(one.offer.version, prereleases=True):
            return one
    return None


def _lookup(limit: str, find_links: Sequence[Path] | None, index: bool) -> PackageLookup:
    from gpuinfer.cli.workload_targets import seconds
    from gpuinfer.config.packages.pip import PackageLookup

    for folder in find_links or ():
        if not folder.is_dir():
            raise UsageError(f"--find-links: there is no folder {folder}. Give one that holds packages.")
    return PackageLookup(seconds("limit", limit, 0.01), tuple(str(one.resolve()) for one in find_links or ()), index)


def _refuse_unasked(yes: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked, and nothing is installed or removed unasked. Add --yes.")


def _ask(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question, err=True):
        _say("Nothing was changed.")
        raise typer.Exit(FAILED)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.replace("==", " ") for name in names)


def _say(line: str) -> None:
    typer.echo(line)
