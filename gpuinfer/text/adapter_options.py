"""How a user names adapters: `policy=DIR`, one or several; the options that all backends of text have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from gpuinfer.errors import UsageError

MAX_ADAPTERS, MOST_ADAPTERS = 8, 1024
ADAPTERS = "of text: LoRA adapters that are there from the start, as name=DIR,name=DIR"
MAX_ADAPTERS_SAID = "of text: adapters that are loaded at once, versions that are not the newest included"
FIRST = "0"  # the version of an adapter that is there from the start


def folders_of(given: Any) -> Any:
    """Folders by name, from `name=DIR,name=DIR`, a list of such texts, or a mapping. What is none stays as it is."""
    if isinstance(given, Mapping) or given is None:
        return given
    texts = given.split(",") if isinstance(given, str) else list(given)
    found: dict[str, str] = {}
    for text in texts:
        name, sign, folder = text.strip().partition("=")
        if not (sign and name and folder):
            raise ValueError(f"'{text}' is not name=DIR")
        if name in found:
            raise ValueError(f"'{name}' is named twice")
        found[name] = folder
    return found


def folders_given(options: Mapping[str, str] | None, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Those of a backend's options, then those that come with the model. Raises `UsageError` for a name in both."""
    own = dict(options or {})
    try:
        more = folders_of(arguments.get("adapters")) or {}
    except ValueError as error:
        raise UsageError(f"adapters: {error}. Give name=DIR.") from None
    if both := own.keys() & more.keys():
        raise UsageError(f"the adapter '{min(both)}' is named twice. Leave one of them out.")
    return own | more


AdapterFolders = Annotated[dict[str, str] | None, BeforeValidator(folders_of)]
