"""What this process compiles now, or waits for another to have compiled, so that whoever waits can be told why.

Compiled code is kept on the disk, and is found there by any later run: whether it will be is known only once it was
looked for, hence kept here by whoever looks (`gpuinfer/models/compiled_once.py`).
"""

from __future__ import annotations

from collections.abc import Hashable

NOTE = "compiling kernels: once on this machine, a minute or two"  # for people

_under_way: set[Hashable] = set()


def begin(what: Hashable) -> None:
    """It was not on the disk. Ends with `end`; from any thread."""
    _under_way.add(what)


def end(what: Hashable) -> None:
    """It is there, or could not be compiled. May be called for what was never begun."""
    _under_way.discard(what)


def under_way() -> bool:
    """Whether there is anything."""
    return bool(_under_way)
