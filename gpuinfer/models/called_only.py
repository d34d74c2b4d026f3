"""Functions that compiled code calls, and Python does not. They cost a kernel that calls them least time to compile.

Of a function that is decorated with `njit` Numba makes three: itself, what Python calls, and what C calls. Into each of
them goes all that is inlined, so that most of what is compiled is never run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable


def called_only(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: compiled code that calls the function has it compiled with these options of `numba.njit`. To Python
    it is the function that it was.
    """
    decorate: Callable[[Callable[..., Any]], Callable[..., Any]] = register_jitable(no_cfunc_wrapper=True, **options)
    return decorate
