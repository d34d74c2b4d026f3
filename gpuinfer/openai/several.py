"""Several models in one flag: `chat=DIR,small=DIR`, a name and a place each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gpuinfer.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")  # what stands in requests, in logs and as a metric's label
WHAT = "letters, digits and any of . _ @ + -, a letter or a digit first, 100 at most"
FORM = "--model NAME=DIR,NAME=DIR"


def models_in(text: str) -> dict[str, str] | None:
    """Places by name, in their order; None where it is the place of one model, which may have a `=` in it.

    A path that is there is a path, and so is what has a `/` before its first `=`. Raises `UsageError` for a list that
    is none: a name that is empty, odd or there twice, a name without a place, a place without a name.
    """
    if "=" not in text or _is_place(text):
        return None
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, place = word.partition("=")
        name, place = name.strip(), place.strip()
        if not equals:
            raise UsageError(
                f"--model {text}: commas stand between models, and '{word}' has no name. Write {FORM}; a folder with a "
                "comma in its path needs a link without one."
            )
        if not NAME.fullmatch(name):
            what = f"'{name}' is no name for one" if name else f"'{word}' has no name"
            raise UsageError(f"--model {text}: {what}. Write {FORM}, names of {WHAT}.")
        if not place:
            raise UsageError(f"--model {text}: '{name}' has no model. Write {FORM}.")
        if name in found:
            raise UsageError(f"--model {text}: '{name}' is there twice. Give each model a name of its own.")
        found[name] = place
    return found


def _is_place(text: str) -> bool:
    """Whether it is one model's."""
    if "/" in text.partition("=")[0]:
        return "," not in text or Path(text).exists()
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False


def by_name(flag: str, text: str, models: Mapping[str, str], form: str) -> dict[str, str]:
    """What a flag says of some of these models: `a=2,b=1`. Raises `UsageError`, which shows the form."""
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise UsageError(f"{flag} {text}: not of the form {form}. Write {flag} {form}.")
        if name not in models:
            raise UsageError(f"{flag} {text}: there is no model '{name}'. Choose from {', '.join(models)}.")
        if name in found:
            raise UsageError(f"{flag} {text}: '{name}' is there twice. Leave one of them out.")
        found[name] = value
    return found


def refuse_several(text: str | None, command: str, cure: str = "") -> None:
    """Raises `UsageError` where a command that runs one model is given several. `cure`: what it has in their place."""
    if text is not None and (found := models_in(text)) is not None:
        name, place = next(iter(found.items()))
        raise UsageError(
            f"{command} runs one model, and --model {text} names {' and '.join(found)}. Give one, such as --model "
            f"{place}{cure}. Several are served together, gpuinfer serve --model {text}, and asked one by one: "
            f"--backend fleet -B endpoint=URL -B model={name}"
        )
