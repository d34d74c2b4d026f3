"""The pauses of Python's garbage collector, kept short in processes of ours that serve requests.

A full collection walks over every object there is: with torch and a few thousand requests loaded that is 20 to 50 ms in
which nothing is answered, several times a second under load, and most of a 99th percentile. Objects that are there when
serving begins stay anyway, so they are set aside (`gc.freeze`), and full collections become rare; young objects are
collected as ever.
"""

from __future__ import annotations

import gc

STARTING = 50_000  # new objects between two collections while imports make them, which all stay; Python's choice is 700
RARELY = 1000  # younger collections between two full ones; Python's own choice is 10

_usual = gc.get_threshold()

_before: list[tuple[int, int, int]] = []  # thresholds to go back to, one for each who serves


def collect_seldom() -> None:
    """The process starts: collections while torch and Numba are imported find nothing, and take a fifth of the time."""
    gc.set_threshold(STARTING, *_usual[1:])


def keep_short() -> None:
    """Serving begins. Ends with `restore`, once for each call."""
    _before.append(gc.get_threshold())
    if len(_before) == 1:
        gc.freeze()  # with what garbage there is: to collect it now would be such a pause
        gc.set_threshold(*_usual[:2], RARELY)


def restore() -> None:
    """Serving has ended: when nobody serves any more all is as before."""
    thresholds = _before.pop()
    if not _before:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
