"""Updates of weights and adapters of a fleet: sent to each replica of ours, and to replicas that start later.

An update goes to one replica first: if that refuses it, nothing is changed anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuinfer.errors import BackendDied, UsageError
from gpuinfer.fleet.worker import Worker
from gpuinfer.http.client import HttpClient, error_words
from gpuinfer.text.text_options import FIRST_VERSION

ANSWER_S = 3600.0  # weights are read from disks that may be slow, and answers under way may have to end
UPDATE, UNLOAD, FREE = "/v1/update_weights", "/v1/unload_lora_adapter", "/v1/free_memory"
Life = tuple[int, int]  # id and number of start
Whose = tuple[str | None, str | None]  # model (None: the only one), and adapter (None: the model itself)


@dataclass(frozen=True)
class WeightUpdate:
    """An update in force: `body` goes to `path`. Later ones have higher numbers."""

    number: int
    path: str
    body: Mapping[str, Any]


class WeightUpdates:
    """The updates that all replicas are to have. `admin_key`: the replicas' key."""

    def __init__(self, admin_key: str) -> None:
        self.headers = [("Authorization", f"Bearer {admin_key}"), ("Content-Type", "application/json")]
        self._standing: dict[Whose, WeightUpdate] = {}
        self._unloaded: dict[Whose, WeightUpdate] = {}  # adapters that a start may load again
        self._had: dict[Life, int] = {}  # the number of the latest update that a replica has
        self._number = 0
        self._one_at_a_time = asyncio.Lock()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Adapters that were loaded since the start, and their newest versions."""
        named = [(name, one.body["version"]) for (_, name), one in self._standing.items() if name is not None]
        return tuple(sorted({text for name, version in named for text in (name, f"{name}@{version}")}))

    async def update(self, workers: Iterable[Worker], body: Mapping[str, Any]) -> None:
        """Update all replicas that are up, and those that come up later. Raises `UsageError` when the first one
        refuses, and `BackendDied` when none is up.
        """
        async with self._one_at_a_time:
            first, *others = self._there(workers)
            await self._ask(first, UPDATE, body)
            self._number += 1
            self._standing[body.get("model"), body.get("adapter")] = WeightUpdate(self._number, UPDATE, body)
            await self._all((first, *others), others, UPDATE, body)

    async def unload(self, workers: Iterable[Worker], adapter: str, model: str | None = None) -> None:
        """Unload an adapter from all replicas; `model`: of which one, of several models."""
        async with self._one_at_a_time:
            first, *others = self._there(workers)
            body = {"lora_name": adapter, **({} if model is None else {"model": model})}
            await self._ask(first, UNLOAD, body)
            name, _, version = adapter.partition("@")
            if (one := self._standing.get((model, name))) is not None and version in ("", one.body["version"]):
                del self._standing[model, name]
            self._number += 1
            if version in ("", FIRST_VERSION):
                self._unloaded[model, adapter] = WeightUpdate(self._number, UNLOAD, body)
            await self._all((first, *others), others, UNLOAD, body)

    async def free_memory(self, workers: Iterable[Worker], body: Mapping[str, Any]) -> dict[str, int]:
        """Have all replicas that are up give memory back; the sums of what they say, and of what is free the least."""
        fields = {name: value for name, value in body.items() if value is not None}
        up = [one for one in workers if one.ours and one.state == "up"]
        each = await asyncio.gather(*(self._ask(one, FREE, fields) for one in up), return_exceptions=True)
        answers = [one for one in each if not isinstance(one, BaseException)]
        if not answers:
            raise next(
                (one for one in each if isinstance(one, BaseException)),
                BackendDied("no replica is up that could give memory back. Ask again when one is."),
            )
        names = [name for name in ("freed_bytes", "freed_pages") if any(name in one for one in answers)]
        summed = {name: sum(int(one.get(name, 0)) for one in answers) for name in names}
        free = [int(one["free_bytes"]) for one in answers if "free_bytes" in one]
        return {**summed, **({"free_bytes": min(free)} if free else {}), "replicas": len(answers)}

    async def catch_up(self, worker: Worker) -> None:
        """Send a replica all updates in force that it does not have; one that has just started has none."""
        async with self._one_at_a_time:
            had = self._had.get(_life(worker), 0)
            for change in sorted((*self._standing.values(), *self._unloaded.values()), key=lambda one: one.number):
                if change.number <= had:
                    continue
                try:
                    await self._ask(worker, change.path, change.body)
                except UsageError:
                    if change.path == UPDATE:
                        raise
                    self._unloaded.pop(
                        (change.body.get("model"), change.body["lora_name"]), None
                    )  # not loaded at start
            self._had[_life(worker)] = self._number

    def next_version(self) -> str:
        """The version of an adapter that is loaded without one, the same at all replicas."""
        return str(self._number + 1)

    def _there(self, workers: Iterable[Worker]) -> list[Worker]:
        """The replicas that have all updates, those that are up first. Raises `BackendDied` when none is up."""
        ours = [one for one in workers if one.ours and (one.state == "up" or _life(one) in self._had)]
        ours.sort(key=lambda one: one.state != "up")
        if not ours or ours[0].state != "up":
            raise BackendDied("no replica is up that could change its weights. Ask again when one is.")
        return ours

    async def _all(self, there: Iterable[Worker], others: Iterable[Worker], path: str, body: Mapping[str, Any]) -> None:
        """Update the others too. One that is gone meanwhile is updated when it is back."""
        told = await asyncio.gather(*(self._ask(one, path, body) for one in others), return_exceptions=True)
        self._had |= {_life(one): self._number for one in there}
        for outcome in told:
            if isinstance(outcome, UsageError):
                raise outcome

    async def _ask(self, worker: Worker, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What it answers. Raises `UsageError` where it refuses, and `BackendDied` for other failures."""
        client = HttpClient(worker.url, connections=1, timeout_s=ANSWER_S, headers=self.headers)
        try:
            response = await client.request("POST", path, msgspec.json.encode(body))
        finally:
            await client.close()
        if response.status != 200:
            words = error_words(response.status, response.body)
            raise UsageError(words) if response.status in (400, 401, 403, 404) else BackendDied(words)
        found: Mapping[str, Any] = msgspec.json.decode(response.body)
        return found


def _life(worker: Worker) -> Life:
    return worker.id, worker.attempts
