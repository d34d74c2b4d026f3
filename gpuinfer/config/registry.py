"""Plugins by entry point (ours come by the same road as anyone's), and for which versions of gpuinfer each was written.
Listing reads package metadata alone and imports nothing; only `load` and `inspect` run a plugin's code. A plugin
runs with the user's rights, so each one says which package it came from, and can be switched off. The contract has
the version of gpuinfer: a package says which it is for in its dependency, such as `gpuinfer>=0.1,<0.2`, so that a
plugin for another contract is named before anything of it is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.metadata import Distribution, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from gpuinfer.errors import PluginError, UnknownName
from gpuinfer.host import error_text
from gpuinfer.host.extras import require_extra
from gpuinfer.host.installation import plugin_folder

UNKNOWN_VERSION = "0.0.0"  # what gpuinfer calls itself where it was never installed
OUR_REQUIREMENT = re.compile(r"gpuinfer\s*(?![\w.-])", re.IGNORECASE)  # how a requirement of gpuinfer itself begins


@cache
def own_version() -> str:
    """The version of gpuinfer that runs here: `gpuinfer.__version__`, which imports what imports this."""
    try:
        return version("gpuinfer")
    except PackageNotFoundError:
        return UNKNOWN_VERSION


def wanted_versions(requires: Iterable[str] | None) -> str | None:
    """The range of gpuinfer's versions among the requirements of a package, such as `>=0.1,<0.2`; "" for any version.
    None where it does not say that it needs gpuinfer.
    """
    mine = [line for line in requires or () if OUR_REQUIREMENT.match(line.strip())]
    if not mine:
        return None
    require_extra("plugins", "a package that adds plugins")
    from packaging.requirements import InvalidRequirement, Requirement  # some milliseconds

    meant, ranges = False, list[str]()
    for line in mine:
        try:
            one = Requirement(line)
        except InvalidRequirement:
            continue
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            meant = True
            ranges += sorted(map(str, one.specifier), key=lambda each: each.startswith("<"))
    return ",".join(ranges) if meant else None


@lru_cache(maxsize=256)
def fits_version(wanted: str | None, here: str | None = None) -> bool:
    """Whether a package that wants these versions can be used with this one. One that says nothing may be."""
    here = here or own_version()
    if not wanted or here == UNKNOWN_VERSION:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(wanted).contains(here, prereleases=True)
    except InvalidSpecifier:
        return True


def contract_range(here: str | None = None) -> str:
    """The versions of gpuinfer that keep this one's contract: before 1.0 those of one minor version, afterwards of one
    major version (Semantic Versioning 2.0.0).
    """
    major, minor = map(int, (here or own_version()).split(".")[:2])
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def contract_error(package: str, wanted: str) -> str:
    """What to say of a package for another contract; the cure is the caller's."""
    return f"{package} is for gpuinfer {wanted}, and this is gpuinfer {own_version()}"


KINDS = {
    "backends": "backend",
    "strategies": "strategy",
    "workloads": "workload",
    "games": "game",
    "environments": "environment",
    "decoders": "decoder",
    "routing": "policy",
    "launchers": "launcher",
}
"""Each kind of plugin and the word for one of it. `gpuinfer.<kind>` is its entry-point group."""

BASES = {
    "backends": "gpuinfer.api:Backend",
    "strategies": "gpuinfer.api:Strategy",
    "workloads": "gpuinfer.api:Workload",
    "decoders": "gpuinfer.text.diffusion.unmasking_decoder:UnmaskingDecoder",
    "routing": "gpuinfer.api:RoutingPolicy",
    "launchers": "gpuinfer.launchers.base:Launcher",
}
"""What plugins of a kind derive from. By name: some stand above us, and pydantic is slow for who only lists."""

COMMANDS = (
    "chat",
    "serve",
    "fleet",
    "node",
    "bench",
    "tune",
    "verify",
    "memory",
    "models",
    "simulate",
    "loop",
    "play",
    "export",
    "plugins",
    "doctor",
    "config",
    "docs",
)  # our own, whatever plugins are installed
SETTINGS = (
    "backend", "fallback", "strategy", "device", "dtype", "seed", "json", "trace", "profile", "profile_seconds",
    "track", "live", "quiet", "verbose", "roofline", "trial", "patience", "give_up", "max_failures", "max_queue_rows",
    "launcher", "nodes_min", "deadline", "disabled_plugins", "backends", "strategies", "launchers",
)  # fmt: skip
"""Names that a workload cannot have: it would be a command, a table of the settings and a prefix of variables."""

DISABLED = "GPUINFER_DISABLED_PLUGINS"  # in the environment, so that worker processes inherit it
LACKS = "cannot be used yet: "  # how the reason of a plugin begins whose library is not installed
OURSELVES = "gpuinfer"  # the package that the built-in plugins are of
BUILT_IN, ENVIRONMENT, FOLDER = "built in", "environment", "folder"  # where packages come from


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin as a package offers it. `ok` is None until it was loaded."""

    kind: str
    name: str
    distribution: str
    version: str
    module: str  # the `module:attribute` of its entry point
    ok: bool | None = None
    reason: str = ""  # why it cannot be used
    place: str = ENVIRONMENT  # of its package: built in, environment, or folder
    contract: str | None = None  # versions of gpuinfer that its package is for, as `wanted_versions` has them

    @property
    def package(self) -> str:
        return f"{self.distribution} {self.version}".strip()


def names(kind: str) -> list[str]:
    """The names that are installed, allowed and not switched off, sorted. Imports nothing."""
    usable = (
        record
        for record in _offers(plural(kind))
        if not (_switched_off(record) or _taken(record) or not fits_version(record.contract))
    )
    return sorted({record.name for record in usable})


def load(kind: str, name: str) -> Any:
    """The plugin class of that name.

    Raises `UnknownName` when no package offers it, and `PluginError` when it is switched off, offered by two packages,
    for another version of the contract, named like a command of ours, cannot be imported or is no class of its kind.
    """
    return _load(_only_offer(plural(kind), name))


def find(kind: str, name: str) -> PluginRecord:
    """The record of one plugin, which is not imported. Raises like `load`, as far as metadata can tell."""
    return _only_offer(plural(kind), name)


def listing(kind: str | None = None) -> list[PluginRecord]:
    """Every plugin that is offered, sorted by kind and name; imports nothing.

    `ok` is False, with the reason, for those that are switched off or for another version of the contract, for a name
    that two packages offer, and for a workload that is named like a command or a setting of ours.
    """
    kinds = [plural(kind)] if kind else list(KINDS)
    offers = (sorted(_offers(each), key=lambda record: (record.name, record.distribution)) for each in kinds)
    return [_judged(record) for sorted_offers in offers for record in sorted_offers]


def inspect(record: PluginRecord) -> PluginRecord:
    """The same record with `ok` known, by loading the plugin. One that fails harms no other."""
    record = _judged(record)
    if record.ok is False:
        return record
    try:
        plugin = _load(record)
    except PluginError as error:
        cause = error.__cause__
        return replace(record, ok=False, reason=error_text.short_message(cause) if cause else str(error))
    problem = missing_library(plugin)
    return replace(record, ok=True, reason=f"{LACKS}{problem}" if problem else "")


def missing_library(plugin: Any) -> str | None:
    """As `Plugin.missing`; games and environments say nothing of it."""
    from gpuinfer.api import Plugin  # as above

    return plugin.missing() if isinstance(plugin, type) and issubclass(plugin, Plugin) else None


def base_of(kind: str) -> Any:
    """The class that plugins of one of the `BASES` derive from."""
    return _import(BASES[kind])


def switch_off(plugins: Iterable[str]) -> None:
    """Use none of these, in this process and in those that it starts: package names, or `backends.echo`."""
    if entries := ",".join(plugins):
        os.environ[DISABLED] = entries
    else:
        os.environ.pop(DISABLED, None)


def switched_off() -> list[str]:
    """Package names, or `backends.echo`: what the environment says, as `a,b` or as the JSON `["a", "b"]`."""
    text = os.environ.get(DISABLED, "").strip()
    if text.startswith("["):
        try:
            return [str(entry) for entry in json.loads(text)]
        except ValueError:  # settings complain about it, by name
            return []
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def unknown_of(entries: Iterable[str]) -> list[str]:
    """Those of `entries` that name neither an installed package nor a plugin of one."""
    offers = [record for kind in KINDS for record in _offers(kind)]
    known = {name for record in offers for name in (record.distribution, f"{record.kind}.{record.name}")}
    return [entry for entry in entries if entry not in known]


def search_again() -> None:
    """Look for packages anew, after one was installed into a folder that has been searched before."""
    _discover.cache_clear()


def is_reserved(name: str) -> bool:
    """Whether it is the name of a command or a setting of ours, which no workload can have."""
    return name.replace("-", "_").lower() in (*COMMANDS, *SETTINGS)


def plural(kind: str) -> str:
    """`backends` for `backend` or `backends`. Raises `UnknownName`."""
    for many, one in KINDS.items():
        if kind in (many, one):
            return many
    raise UnknownName("kind of plugin", kind, KINDS, label="Kinds")


def _offers(kind: str) -> list[PluginRecord]:
    return [record for record in _discover(tuple(sys.path)) if record.kind == kind]


@lru_cache(maxsize=4)
def _discover(path: tuple[str, ...]) -> tuple[PluginRecord, ...]:
    """All offers on this `sys.path`. Of a distribution that is found twice, importlib.metadata takes the first."""
    points, folder = entry_points(), plugin_folder()
    known: dict[int, tuple[str, str, str, str | None]] = {}  # reading a package's metadata takes longer than all else
    found = []
    for kind in KINDS:
        for point in points.select(group=f"gpuinfer.{kind}"):
            if id(point.dist) not in known:
                known[id(point.dist)] = _origin_of(point.dist, folder)
            name, version, place, wanted = known[id(point.dist)]
            found.append(PluginRecord(kind, point.name, name, version, point.value, place=place, contract=wanted))
    return tuple(dict.fromkeys(found))


def _origin_of(distribution: Distribution | None, folder: Path) -> tuple[str, str, str, str | None]:
    """Name, version, place and contract."""
    if distribution is None:
        return "unknown package", "", ENVIRONMENT, None
    name = distribution.name
    place = FOLDER if Path(str(distribution.locate_file(""))) == folder else ENVIRONMENT
    if plain_name(name) == OURSELVES:
        place = BUILT_IN
    wanted = None if place == BUILT_IN else wanted_versions(distribution.requires)
    return name, distribution.version, place, wanted


def plain_name(name: str) -> str:
    """A package's name as packages are compared by (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _switched_off(record: PluginRecord) -> bool:
    return any(entry in (f"{record.kind}.{record.name}", record.distribution) for entry in switched_off())


def _taken(record: PluginRecord) -> bool:
    """Whether it is a workload that would stand in the way of a command or a setting of everyone's."""
    return record.kind == "workloads" and is_reserved(record.name)


def _judged(record: PluginRecord) -> PluginRecord:
    if _switched_off(record):
        return replace(record, ok=False, reason="switched off by disabled_plugins")
    if _taken(record):
        return replace(record, ok=False, reason=_named_like_ours(record))
    if not fits_version(record.contract):
        return replace(record, ok=False, reason=_of_another_contract(record))
    try:
        _only_offer(record.kind, record.name)
    except PluginError as error:
        return replace(record, ok=False, reason=str(error))
    return record


def _only_offer(kind: str, name: str) -> PluginRecord:
    offers = [record for record in _offers(kind) if record.name == name]
    active = [record for record in offers if not _switched_off(record)]
    if not offers:
        raise UnknownName(KINDS[kind], name, names(kind))
    if not active:
        raise PluginError(
            f"{KINDS[kind]} '{name}' is switched off. To use it, take '{kind}.{name}' or '{offers[0].distribution}' "
            "out of disabled_plugins."
        )
    if _taken(active[0]):
        raise PluginError(_named_like_ours(active[0]))
    fitting = [record for record in active if fits_version(record.contract)]
    if not fitting:
        raise PluginError(f"{KINDS[kind]} '{name}': {_of_another_contract(active[0])}")
    active = fitting
    if len(active) > 1:
        clashing = sorted(active, key=lambda offer: (offer.distribution != "gpuinfer", offer.distribution))
        sources = " and ".join(f"{offer.package} ({offer.module})" for offer in clashing)
        spare = clashing[-1].distribution
        raise PluginError(
            f"{KINDS[kind]} '{name}' is offered by {sources}. Uninstall one (gpuinfer plugins uninstall {spare}), "
            f'or switch one off: disabled_plugins = ["{spare}"] in gpuinfer.toml.'
        )
    return active[0]


def _named_like_ours(record: PluginRecord) -> str:
    what = "command" if record.name in COMMANDS else "setting"
    return (
        f"workload '{record.name}' of {record.package} has the name of a {what} of gpuinfer and is not used. "
        f"Rename its entry point, such as {record.name}-{record.distribution.removeprefix('gpuinfer-')}."
    )


def _of_another_contract(record: PluginRecord) -> str:
    """Said before anything of it has been imported."""
    return (
        f"{contract_error(record.package, record.contract or '')}. Install a version of it for this one (gpuinfer "
        f"plugins upgrade {record.distribution}), or the gpuinfer that it is for."
    )


def _load(record: PluginRecord) -> Any:
    try:
        plugin = _import(record.module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything at all, SystemExit too
        if record.place != FOLDER:
            repair = f"Repair it (pip install --force-reinstall {record.distribution})"
        else:
            repair = (
                f"Mend it where it came from and renew it (gpuinfer plugins upgrade {record.distribution}), or take "
                f"another version (gpuinfer plugins uninstall {record.distribution}, then install NAME==VERSION)"
            )
        raise PluginError(
            f"{KINDS[record.kind]} '{record.name}' of {record.package} cannot be imported: "
            f"{error_text.short_message(error)}. "
            f'{repair}, or switch it off: disabled_plugins = ["{record.kind}.{record.name}"] in gpuinfer.toml.'
        ) from error
    if record.kind in BASES and not (isinstance(plugin, type) and issubclass(plugin, base_of(record.kind))):
        raise PluginError(
            f"{KINDS[record.kind]} '{record.name}' of {record.package}: {record.module} is no subclass of "
            f"{BASES[record.kind].replace(':', '.')}. Point its entry point at such a class."
        )
    return plugin


def _import(target: str) -> Any:
    module, _, attributes = target.partition("[")[0].strip().partition(":")
    found: Any = importlib.import_module(module)
    for attribute in filter(None, attributes.strip().split(".")):
        found = getattr(found, attribute)
    return found
