"""`gpuinfer plugins install`, `upgrade` and `uninstall`: the question before, and the report afterwards."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gpuinfer.cli.problems import FAILED
from gpuinfer.config import registry, settings
from gpuinfer.errors import GpuinferError, UsageError, WorkError

if TYPE_CHECKING:
    from gpuinfer.config.packages.installer import InstalledPackage
    from gpuinfer.config.packages.package_info import PackageSource
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


def install_plugins(
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
    place, options = places.choose_place(into), _options(limit, find_links, index)
    for source in [package_info.read_source(text) for text in what]:
        if there := _there_already(source):
            typer.echo(f"{there.offer.package} is installed already, in {there.place.words}.")
            typer.echo(f"To renew it: gpuinfer plugins upgrade {there.offer.name}")
        else:
            _install_one(source, place, options, yes)


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
    options = _options(limit, find_links, index)
    meant = (
        list(installer.installed_packages().values())
        if every
        else [installer.find_installed(name) for name in names or []]
    )
    failed: list[str] = []
    for one in meant:
        try:
            _upgrade_one(one, options, yes, every)
        except (GpuinferError, typer.Exit) as error:
            if len(meant) == 1:
                raise
            if isinstance(error, GpuinferError):
                typer.echo(f"{one.offer.package} stays as it is: {error}")
            failed.append(one.offer.package)
    if failed:
        raise WorkError(
            f"{len(failed)} of {len(meant)} packages stay as they are: {', '.join(failed)}. What keeps each is said "
            "above; upgrade it by its name when that is mended."
        )


def _upgrade_one(one: InstalledPackage, options: dict[str, Any], yes: bool, every: bool) -> None:
    from gpuinfer.config.packages import installer

    try:
        source = one.source()
    except UsageError as error:
        if not every:
            raise
        typer.echo(str(error))
        return
    installer.refuse_foreign(one)
    _install_one(source, one.place, options, yes, one)


def uninstall(
    name: Annotated[str, typer.Argument(help="as `plugins list` names the package", autocompletion=installed_names)],
    yes: Yes = False,
    limit: Limit = "10min",
) -> None:
    """Remove a package with plugins. What came with it stays."""
    from gpuinfer.cli.workload_targets import parse_seconds
    from gpuinfer.config.packages import installer

    settings.load()
    _refuse_unasked(yes)
    one = installer.find_installed(name)
    installer.refuse_foreign(one)
    typer.echo(f"{one.offer.package} adds {one.offer.words}; it is in {one.place.words}.")
    _ask("Remove it?", yes)
    installer.remove(one, parse_seconds("limit", limit, 0.01))
    typer.echo(f"Removed {one.offer.package}.")


def _install_one(
    source: PackageSource,
    place: InstallPlace,
    options: dict[str, Any],
    yes: bool,
    old: InstalledPackage | None = None,
) -> None:
    """`old`: what is installed of it and is to be upgraded."""
    from gpuinfer.config.packages import installer

    program = installer.find_installer(place.path, **options)
    with tempfile.TemporaryDirectory(prefix="gpuinfer-plugin-") as folder:
        staged = Path(folder, "staged")
        prepared = installer.PackagePreparation(place, program, staged, typer.echo).prepare(source)
        offer = prepared.offer
        if old is not None and source.path is None and not prepared.words:
            typer.echo(f"{old.offer.package} is the newest that is to be had for this gpuinfer.")
            return
        if old is not None and offer.plain != old.offer.plain:
            typer.echo(f"{old.offer.package} came from {source.path}, where there is {offer.package} now.")
            return
        typer.echo(f"{offer.package}: {offer.summary or 'no description'}\n  adds      {offer.words}")
        if offer.contract:
            typer.echo(f"  for       gpuinfer {offer.contract}")
        if prepared.needed:
            needed = ", ".join(prepared.needed).replace("==", " ")
            typer.echo(f"  needs     {needed}, which will be installed with it")
        if prepared.replaces:
            typer.echo(f"  replaces  {offer.name} {prepared.replaces}")
        typer.echo(f"  goes to   {place.words}\n{RIGHTS}")
        _ask("Install it?", yes)
        installer.install_package(prepared, place, program, staged)
    typer.echo(f"Installed {offer.package}. To see whether it holds: gpuinfer plugins check {offer.name}.")


def _there_already(source: PackageSource) -> InstalledPackage | None:
    """Of a name: what it means is here, in a version that will do."""
    from packaging.requirements import Requirement

    from gpuinfer.config.packages import installer

    known = installer.installed_packages()
    for text in source.names:
        wanted = Requirement(text)
        one = known.get(registry.plain_name(wanted.name))
        if one is not None and wanted.specifier.contains(one.offer.version, prereleases=True):
            return one
    return None


def _options(limit: str, find_links: Sequence[Path] | None, index: bool) -> dict[str, Any]:
    """Of `installer.find_installer`."""
    from gpuinfer.cli.workload_targets import parse_seconds

    for folder in find_links or ():
        if not folder.is_dir():
            raise UsageError(f"--find-links: there is no folder {folder}. Give one that holds packages.")
    links = [str(one.resolve()) for one in find_links or ()]
    return {"limit_s": parse_seconds("limit", limit, 0.01), "find_links": links, "index": index}


def _refuse_unasked(yes: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise UsageError(
            "standard input is no terminal to ask the user at, and nothing is installed or removed unasked. Add --yes."
        )


def _ask(question: str, yes: bool) -> None:
    if not yes and not typer.confirm(question, err=True):
        typer.echo("Nothing was changed.")
        raise typer.Exit(FAILED)
