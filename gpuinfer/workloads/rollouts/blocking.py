"""How long something that is awaited keeps the event loop, and with it all other games."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Blocking(Awaitable[T]):
    """Awaits something else, and tells how long each of its pieces between two waits took."""

    def __init__(self, own: Awaitable[T], tell: Callable[[float], None]) -> None:
        self._own, self._tell = own, tell

    def __await__(self) -> Generator[Any, Any, T]:
        inner = self._own.__await__()
        send: Callable[[], Any] = functools.partial(next, inner)
        while True:
            began = time.monotonic()
            try:
                waits_for = send()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._tell(time.monotonic() - began)
            try:
                yield waits_for
                send = functools.partial(next, inner)
            except BaseException as error:  # noqa: BLE001  it is thrown where it belongs
                send = functools.partial(inner.throw, error)  # type: ignore[attr-defined]
