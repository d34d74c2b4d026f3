"""For which versions of gpuinfer a package of plugins was written: the range of its dependency on gpuinfer.

The contract has the version of gpuinfer, and a package says in its metadata what it is for, as it does for pip:
`dependencies = ["gpuinfer>=0.1,<0.2"]`. So a plugin for another contract is named before anything of it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0.0.0"  # what gpuinfer calls itself where it was never installed
OURS = re.compile(r"gpuinfer\s*(?![\w.-])", re.IGNORECASE)  # how a requirement of gpuinfer itself begins


@cache
def own() -> str:
    """The version of gpuinfer that runs here: `gpuinfer.__version__`, which imports what imports this."""
    try:
        return version("gpuinfer")
    except PackageNotFoundError:
        return UNKNOWN


def wanted(requires: Iterable[str] | None) -> str | None:
    """The range of gpuinfer's versions among the requirements of a package, such as `>=0.1,<0.2`; "" for any version.
    None where it does not say that it needs gpuinfer.
    """
    mine = [line for line in requires or () if OURS.match(line.strip())]
    if not mine:
        return None
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
def fits(wanted: str | None, here: str | None = None) -> bool:
    """Whether a package that wants these versions can be used with this one. One that says nothing may be."""
    here = here or own()
    if not wanted or here == UNKNOWN:
        return True
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(wanted).contains(here, prereleases=True)
    except InvalidSpecifier:
        return True


def span(here: str | None = None) -> str:
    """The versions of gpuinfer that keep this one's contract: before 1.0 those of one minor version, afterwards of one
    major version (Semantic Versioning 2.0.0).
    """
    from packaging.version import Version

    major, minor = (*Version(here or own()).release, 0)[:2]
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"


def complaint(package: str, wanted: str) -> str:
    """What to say of a package for another contract; the cure is the caller's."""
    return f"{package} is for gpuinfer {wanted}, and this is gpuinfer {own()}"
