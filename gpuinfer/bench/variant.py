"""One of the ways that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.run import Plan


@dataclass(frozen=True)
class Variant:
    """A way to do the work: its name among the others, and how it is built anew for each run."""

    name: str
    build: Callable[[int], Plan]  # from a seed
    settings: Mapping[str, Any]  # those that tell it from the others, such as {"backend": "central", "workers": "2"}
    command: str  # runs it by itself
    flags: Mapping[str, Any] = field(default_factory=dict)  # that command's
