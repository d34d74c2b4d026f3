"""Which of the served names a client means by the one that it writes: case and the organisation in front may differ."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpuinfer.config.foreign_names import HUB_NAME

MOST_LISTED = 20  # names in an error
MOST_LETTERS = 256  # of a name that can be one of ours


def meant_names(asked: str, served: Collection[str]) -> list[str]:
    """The names among `served` that `asked` means: the one that is equal; else those that are in another case; else
    those that are so once OWNER/ is taken off one of both, or the .gguf of a file's name. Empty: none.
    """
    if asked in served:
        return [asked]
    if len(asked) > MOST_LETTERS:
        return []
    folded = asked.casefold()
    if found := [one for one in served if one.casefold() == folded]:
        return found
    asked_of_owner = HUB_NAME.fullmatch(folded)
    if "/" in folded and (asked_of_owner is None or asked_of_owner["repository"] != folded):
        return []  # a path, or of a revision
    last = _bare_name(folded)
    found = [one for one in served if _bare_name(one.casefold()) == last]
    if "/" in folded and any("/" in one for one in found):
        return []  # two owners are two models
    return found


def _bare_name(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".gguf")


def name_at_hub(model: str) -> tuple[str, ...]:
    """A served model's name on the hub, and the same without its revision; empty for a path and a built-in model."""
    found = HUB_NAME.fullmatch(model)
    return tuple(dict.fromkeys([model, found["repository"]])) if found else ()


def listed_names(names: Sequence[str]) -> str:
    """'a', 'b' and 3 more."""
    shown = ", ".join(f"'{one}'" for one in names[:MOST_LISTED])
    return f"{shown} and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else shown
