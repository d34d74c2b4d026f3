"""What a package needs, against what is here: met, missing, or at odds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution

from packaging.requirements import InvalidRequirement, Requirement

from gpuinfer.config import registry


@dataclass(slots=True)
class Needs:
    """Requirements that nothing here meets, and sentences about those that something here cannot meet."""

    missing: list[str] = field(default_factory=list)
    odds: list[str] = field(default_factory=list)


def of(requires: Iterable[str], here: Mapping[str, Distribution]) -> Needs:
    """What these requirements come to; of what is here already its own needs are taken to be met, but those of extras
    that are asked for.
    """
    needs, seen = Needs(), set[str]()
    left = [(line, "") for line in requires]
    while left:
        line, extra = left.pop(0)
        if f"{line} {extra}" in seen:
            continue
        seen.add(f"{line} {extra}")
        try:
            one = Requirement(line)
        except InvalidRequirement:
            needs.odds.append(f"it needs '{line}', which nobody can read")
            continue
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        found = here.get(registry.plain(one.name))
        if found is None:
            needs.missing.append(_bare(one))
        elif not one.specifier.contains(found.version, prereleases=True):
            needs.odds.append(f"it needs {one.name} {one.specifier}, and here is {found.version}")
        else:
            left += [(more, wanted) for wanted in sorted(one.extras) for more in found.requires or ()]
    return needs


def _bare(one: Requirement) -> str:
    """Without its marker, which holds here."""
    extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
    return f"{one.name}{extras} @ {one.url}" if one.url else f"{one.name}{extras}{one.specifier}"


def who_needs(name: str, here: Mapping[str, Distribution]) -> list[str]:
    """The packages here that need this one, whatever extras aside."""
    found = []
    for other, distribution in here.items():
        if other != name and any(_means(line, name) for line in distribution.requires or ()):
            found.append(f"{distribution.name} {distribution.version}")
    return sorted(found)


def _means(line: str, name: str) -> bool:
    try:
        one = Requirement(line)
    except InvalidRequirement:
        return False
    return registry.plain(one.name) == name and (one.marker is None or one.marker.evaluate({"extra": ""}))
