"""What a package adds, read from its metadata: nothing of it is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from gpuinfer.config import contract, registry
from gpuinfer.errors import PluginError

GROUPS = {f"gpuinfer.{many}": many for many in registry.KINDS}


@dataclass(frozen=True, slots=True)
class Offer:
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
        return registry.plain(self.name)

    @property
    def words(self) -> str:
        """Its plugins: `backend echo, workload ping`."""
        return ", ".join(f"{registry.KINDS[kind]} {name}" for kind, name in self.plugins)


def of(distribution: Distribution) -> Offer:
    points = distribution.entry_points
    plugins = {(GROUPS[point.group], point.name) for point in points if point.group in GROUPS}
    order = list(registry.KINDS)
    return Offer(
        distribution.name,
        distribution.version,
        (distribution.metadata["Summary"] or "").strip(),
        tuple(sorted(plugins, key=lambda one: (order.index(one[0]), one[1]))),
        tuple(sorted({point.group for point in points if point.group not in GROUPS})),
        tuple(distribution.requires or ()),
        contract.wanted(distribution.requires),
    )


def in_folder(folder: Path) -> Offer:
    """Of the one package that was installed into this folder. Raises `PluginError` when there is none."""
    found = list(distributions(path=[str(folder)]))
    if len(found) != 1 or not found[0].name:
        raise PluginError("it holds no package that can be read: its metadata is missing. Build it anew.")
    return of(found[0])


def refuse_unusable(offer: Offer) -> None:
    """Raises `PluginError` for a package that adds no plugin, or adds them for another contract, or under names that
    are taken.
    """
    if not offer.plugins:
        has = f"entry points of {', '.join(offer.others)}" if offer.others else "no entry points at all"
        raise PluginError(
            f"{offer.package} adds no plugin of gpuinfer: it has {has}. Name a package with entry points such as "
            "gpuinfer.backends, or install it with pip."
        )
    if not contract.fits(offer.contract):
        raise PluginError(
            f"{contract.complaint(offer.package, offer.contract or '')}. Take a version of it for this one "
            f"({offer.name}==…), or the gpuinfer that it is for."
        )
    for kind, name in offer.plugins:
        if kind == "workloads" and registry.is_ours(name):
            raise PluginError(
                f"{offer.package} adds a workload '{name}', and that is a command or a setting of gpuinfer. "
                "Rename its entry point."
            )
        for record in registry.listing(kind):
            if record.name == name and registry.plain(record.distribution) != offer.plain:
                raise PluginError(
                    f"{offer.package} adds a {registry.KINDS[kind]} '{name}', which {record.package} offers already. "
                    f"Remove that first (gpuinfer plugins uninstall {record.distribution}), or rename the entry point."
                )
