"""Other weights and adapters for a server that runs: what its owner asks for, and what becomes of it in the process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from msgspec import Struct, structs

from gpuinfer.errors import BackendError, GpuinferError
from gpuinfer.host import spoken
from gpuinfer.host.error_wire import error_to_wire


class Change(Struct, frozen=True):
    """As `Backend.update`; without `weights` as `Backend.unload` of `adapter`."""

    version: str = ""
    weights: str | None = None
    adapter: str | None = None
    drain: bool = True

    def told(self) -> dict[str, Any]:
        return structs.asdict(self)


class Pending:
    """Changes that are under way in the server process; each is answered when it is done."""

    def __init__(self) -> None:
        self._futures: dict[int, Future[Sequence[str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._futures)

    def add(self, number: int, future: Future[Sequence[str]]) -> None:
        """`future` gives what `Prompt.adapter` may be afterwards."""
        self._futures[number] = future

    def done(self) -> Iterator[dict[str, Any]]:
        """The messages that say what has come of those that are over."""
        for number in [number for number, future in self._futures.items() if future.done()]:
            yield {"changed": number, **_outcome(self._futures.pop(number))}


def _outcome(future: Future[Sequence[str]]) -> dict[str, Any]:
    try:
        return {"adapters": list(future.result())}
    except GpuinferError as error:
        return {"refused": error_to_wire(error)}
    except BaseException as error:  # noqa: BLE001 (whatever it is, whoever asked must hear of it)
        return {
            "refused": error_to_wire(
                BackendError(f"the weights could not be changed: {spoken.in_full(error)}. Report this.")
            )
        }


def standing(changes: Sequence[Change], change: Change, at_start: Collection[str]) -> list[Change]:
    """What a server that is started again has to be told, after one more change. `at_start`: the adapters that each
    start brings back, their names and their names with versions.
    """
    if change.weights is not None:  # an older version of the same is asked for by nobody who comes later
        return [*(one for one in changes if not _is_replaced(one, change.adapter, at_start)), change]
    asked = change.adapter or ""
    name = _name_of(asked)
    if asked == name:
        return [*(one for one in changes if _name_of(one.adapter) != name), *([change] if name in at_start else [])]
    if name not in at_start:
        return [one for one in changes if _label(one) != asked]
    there = asked in at_start or any(_label(one) == asked for one in changes)
    return [*(one for one in changes if one != change), *([change] if there else [])]


def _is_replaced(one: Change, adapter: str | None, at_start: Collection[str]) -> bool:
    """By another version of this adapter; None: of the model itself."""
    if one.weights is not None:
        return one.adapter == adapter
    return _name_of(one.adapter) == adapter and one.adapter not in at_start


def _name_of(asked: str | None) -> str | None:
    """`policy` of `policy@v7`."""
    return asked if asked is None else asked.partition("@")[0]


def _label(one: Change) -> str | None:
    """`policy@v7`, of a change that loads it."""
    return None if one.adapter is None or one.weights is None else f"{one.adapter}@{one.version}"
