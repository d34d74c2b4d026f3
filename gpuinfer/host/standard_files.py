"""Standard input, output and error are there, also for a program that was started with one of them closed."""

from __future__ import annotations

import os
import sys

NAMES = ("stdin", "stdout", "stderr")

closed: set[str] = set()
"""Those of `NAMES` that were closed when the program began."""


def keep_open() -> None:
    """Lead standard files that are closed (`gpuinfer … >&-`) to nobody.

    Else the next pipe or socket has one of their numbers, and a child that sends its output to standard error closes
    the line to its parent.
    """
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115  to the end
            closed.add(name)
