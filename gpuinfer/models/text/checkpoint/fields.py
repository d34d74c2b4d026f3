"""Reads fields of a configuration that somebody else wrote: right type, within bounds, or a clear error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError

MOST_JSON_BYTES = 64 << 20
MOST = 1 << 28  # of any size: beyond every model there is, and products of two still fit in 64 bits


@dataclass(frozen=True)
class Fields:
    """A mapping, and what messages call it. null counts as absent, as transformers has it."""

    values: Mapping[str, Any]
    where: str = "config.json"

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Raises `UsageError` when it is absent without a default, no whole number, or out of bounds."""
        value = self._value(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or value <= above:
            raise self.wrong(name, f"a number above {above:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.wrong(name, "a list of texts")
        return tuple(value)

    def ids(self, name: str, default: int | None = None) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.values.get(name, default)  # null says that there is none
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
            raise self.wrong(name, "a token id or a list of them")
        return tuple(dict.fromkeys(listed))

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise UsageError(f"{self.where} has no '{name}'. Copy it again from where the model came.")
        return default if value is None else value

    def wrong(self, name: str, wanted: str) -> UsageError:
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return UsageError(f"{self.where}: '{name}' is {shown}, not {wanted}. Mend it, or copy the file again.")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `UsageError` when it is absent, too large or none."""
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise UsageError(f"{path} is over {MOST_JSON_BYTES >> 20} MiB, too much for what it should be. Check it.")
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no {path}. Copy the whole model folder.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}. Copy it again from where the model came.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not hold a JSON object. Copy it again from where the model came.")
    return value
