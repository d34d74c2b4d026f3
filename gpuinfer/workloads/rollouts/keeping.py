"""Where finished groups go: files, or nowhere."""

from __future__ import annotations

from typing import Protocol

from gpuinfer.rollouts.record import Group


class Keeper(Protocol):
    """Keeps each group once. `done`: the numbers of those that an earlier run has kept."""

    @property
    def done(self) -> frozenset[int]: ...
    async def add(self, group: Group) -> None: ...
    async def flush(self) -> None: ...
    async def close(self) -> None: ...


class Nowhere:
    """Without `--out`."""

    done: frozenset[int] = frozenset()

    async def add(self, group: Group) -> None:
        pass

    async def flush(self) -> None:
        pass

    async def close(self) -> None:
        pass
