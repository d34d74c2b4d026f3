"""What a package is, needs and adds, read from its name, its files and its metadata: nothing of it is imported."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement

from gpuinfer.config import registry
from gpuinfer.errors import PluginError, UsageError

GROUPS = {f"gpuinfer.{many}": many for many in registry.KINDS}


@dataclass(frozen=True, slots=True)
class PackageOffer:
    """A package as its metadata describes it."""

    name: str
    version: str
    summary: str
    plugins: tuple[tuple[str, str], ...]  # kind (`backends`) and name, sorted
    others: tuple[str, ...]  # groups of its entry points that are none of ours
    requires: tuple[str, ...]  # requirements, as pip reads them
    contract: str | None  # versions of gpuinfer that it is for

    @property
    def package(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def plain(self) -> str:
        return registry.plain_name(self.name)

    @property
    def words(self) -> str:
        """Its plugins: `backend echo, workload ping`."""
        return ", ".join(f"{registry.KINDS[kind]} {name}" for kind, name in self.plugins)


def offer_of(distribution: Distribution) -> PackageOffer:
    points = distribution.entry_points
    plugins = {(GROUPS[point.group], point.name) for point in points if point.group in GROUPS}
    order = list(registry.KINDS)
    return PackageOffer(
        distribution.name,
        distribution.version,
        (distribution.metadata["Summary"] or "").strip(),
        tuple(sorted(plugins, key=lambda one: (order.index(one[0]), one[1]))),
        tuple(sorted({point.group for point in points if point.group not in GROUPS})),
        tuple(distribution.requires or ()),
        registry.wanted_versions(distribution.requires),
    )


def offer_in(folder: Path) -> PackageOffer:
    """Of the one package that was installed into this folder. Raises `PluginError` when there is none."""
    found = list(distributions(path=[str(folder)]))
    if len(found) != 1 or not found[0].name:
        raise PluginError("it holds no package that can be read: its metadata is missing. Build it anew.")
    return offer_of(found[0])


def refuse_unusable(offer: PackageOffer) -> None:
    """Raises `PluginError` for a package that adds no plugin, or adds them for another contract, or under names that
    are taken.
    """
    if not offer.plugins:
        has = f"entry points of {', '.join(offer.others)}" if offer.others else "no entry points at all"
        raise PluginError(
            f"{offer.package} adds no plugin of gpuinfer: it has {has}. Name a package with entry points such as "
            "gpuinfer.backends, or install it with pip."
        )
    if not registry.fits_version(offer.contract):
        raise PluginError(
            f"{registry.contract_error(offer.package, offer.contract or '')}. Take a version of it for this one "
            f"({offer.name}==…), or the gpuinfer that it is for."
        )
    for kind, name in offer.plugins:
        if kind == "workloads" and registry.is_reserved(name):
            raise PluginError(
                f"{offer.package} adds a workload '{name}', and that is a command or a setting of gpuinfer. "
                "Rename its entry point."
            )
        for record in registry.listing(kind):
            if record.name == name and registry.plain_name(record.distribution) != offer.plain:
                raise PluginError(
                    f"{offer.package} adds a {registry.KINDS[kind]} '{name}', which {record.package} offers already. "
                    f"Remove that first (gpuinfer plugins uninstall {record.distribution}), or rename the entry point."
                )


ARCHIVES = (".tar.gz", ".tgz", ".zip")
CHOICES = "Give a package's name, a folder with its pyproject.toml, or a wheel"
SHORT = "gpuinfer-"


@dataclass(frozen=True, slots=True)
class PackageSource:
    """`path` of all but names; `names` in the order in which they are looked for, with their versions if any."""

    kind: Literal["name", "folder", "wheel", "archive"]
    path: Path | None = None
    names: tuple[str, ...] = ()


def read_source(text: str) -> PackageSource:
    """What is meant, as pip would take it: a path has a separator, begins with a dot or ends like a file of a package.

    Raises `UsageError` for what is nothing of it.
    """
    if not text or text.startswith("-"):
        raise UsageError(f"'{text}' names no package. {CHOICES}.")
    if "://" in text or text.startswith(("git+", "file:")):
        raise UsageError(f"'{text}' is an address. Fetch it yourself, look at it, and give the folder or the wheel.")
    if os.sep in text or text.startswith((".", "~")) or text.endswith((".whl", *ARCHIVES)):
        return source_at(Path(text).expanduser())
    try:
        named = Requirement(text)
    except InvalidRequirement as error:
        raise UsageError(f"'{text}' names no package. {CHOICES}.") from error
    if named.url or named.marker:
        raise UsageError(f"'{text}' is more than a name. {CHOICES}.")
    return PackageSource("name", names=tuple(candidate_names(text, named.name)))


def candidate_names(text: str, name: str) -> list[str]:
    """`echo` is `gpuinfer-echo` first: a short name means a plugin, and what it alone names may be anything."""
    return [text] if name.lower().replace("_", "-").startswith("gpuinfer") else [f"{SHORT}{text}", text]


def source_at(path: Path) -> PackageSource:
    """What lies there. Raises `UsageError` for what is no package."""
    if path.is_dir():
        if not ((path / "pyproject.toml").is_file() or (path / "setup.py").is_file()):
            raise UsageError(f"{path} holds no package: there is no pyproject.toml. {CHOICES}.")
        return PackageSource("folder", path.resolve())
    if not path.is_file():
        raise UsageError(f"there is no file or folder {path}. {CHOICES}.")
    if path.suffix == ".whl":
        return PackageSource("wheel", path.resolve())
    if path.name.endswith(ARCHIVES):
        return PackageSource("archive", path.resolve())
    raise UsageError(f"{path} is no package. {CHOICES}.")


def build_needs(folder: Path) -> list[str]:
    """The requirements of its build; setuptools where the folder names none (PEP 518). Raises `UsageError`."""
    file = folder / "pyproject.toml"
    try:
        read = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}. Correct it.") from error
    system = read.get("build-system", {})
    return [str(need) for need in (system.get("requires", ["setuptools"]) if isinstance(system, dict) else ())]
