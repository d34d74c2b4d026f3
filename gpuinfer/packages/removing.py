"""Plugins that go: which package is meant, who still needs it, what it leaves that nobody needs."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpuinfer.config import registry
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host.plugin_folder import plugin_folder
from gpuinfer.packages import folder as user_folder
from gpuinfer.packages import needs, offers, places, sources
from gpuinfer.packages.installing import OURS, uninterrupted
from gpuinfer.packages.offers import Offer
from gpuinfer.packages.places import Place
from gpuinfer.packages.programs import Lookup, Program
from gpuinfer.packages.sources import Source


@dataclass(frozen=True, slots=True)
class Installed:
    """A package with plugins, as it lies here."""

    offer: Offer
    distribution: Distribution
    place: Place

    def source(self) -> Source:
        """What renews it: the folder, archive or wheel that it came from (PEP 610), else its name. Raises `UsageError`
        for what came from nowhere that is still there.
        """
        url, is_editable = self._told()
        if not url:
            return Source("name", names=(self.offer.name,))
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
            return sources.of_path(path)
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


def installed() -> dict[str, Installed]:
    """Every package with plugins but gpuinfer itself, by its plain name; of one that is in both places the one that is
    found first.
    """
    folder = plugin_folder()
    found: dict[str, Installed] = {}
    for place, here in ((Place(None), Place(None).here()), (Place(folder), places.of_folder(folder))):
        for name, distribution in here.items():
            if name not in found and name != OURS and (offer := offers.of(distribution)).plugins:
                found[name] = Installed(offer, distribution, place)
    return found


def meant(name: str) -> Installed:
    """The installed package of that name, or that short name. Raises `UsageError` when there is none to remove."""
    if registry.plain(name) == OURS:
        raise UsageError("gpuinfer itself is no plugin. To remove it too: pip uninstall gpuinfer.")
    known = installed()
    for one in sources.names_of(name, name):
        if registry.plain(one) in known:
            return known[registry.plain(one)]
    here = Place(None).here()
    if registry.plain(name) in here:
        raise UsageError(f"'{name}' is installed and adds no plugin of gpuinfer. To remove it: pip uninstall {name}.")
    raise UnknownName("package with plugins", name, [one.offer.name for one in known.values()])


def refuse_needed(one: Installed) -> None:
    """Raises `UsageError` when other packages need it, or it is not ours to remove."""
    here = Place(plugin_folder()).here()
    if needing := needs.who_needs(one.offer.plain, here):
        raise UsageError(f"{', '.join(needing)} needs {one.offer.name}. Uninstall what needs it first.")


def refuse_foreign(one: Installed) -> None:
    """Raises `UsageError` for what lies where nothing of the user's can be changed."""
    if one.place.folder is None and (why := places.why_no_environment()):
        raise UsageError(
            f"{one.offer.package} lies in {one.place.words}, which is not changed: {why}. To do without it: "
            f'disabled_plugins = ["{one.offer.name}"] in gpuinfer.toml.'
        )


def left_over(one: Installed) -> list[Distribution]:
    """What came into the user's folder with it, and nothing else there needs."""
    if one.place.folder is None:
        return []
    there = places.of_folder(one.place.folder)
    there.pop(one.offer.plain, None)
    gone: list[Distribution] = []
    while True:
        bare = [
            name for name, each in there.items() if not offers.of(each).plugins and not needs.who_needs(name, there)
        ]
        if not bare:
            return gone
        gone += [there.pop(name) for name in bare]


def remove(one: Installed, program: Program | None, lookup: Lookup) -> None:
    """Take it away, with what it leaves over. `program` is asked for what lies in the environment."""
    if one.place.folder is not None:
        with user_folder.held(one.place.folder), uninterrupted():
            for each in (one.distribution, *left_over(one)):
                user_folder.take_out(each, one.place.folder)
    elif program is not None:
        with uninterrupted():
            program.uninstall(one.offer.name, lookup)
    importlib.invalidate_caches()
    registry.refresh()
