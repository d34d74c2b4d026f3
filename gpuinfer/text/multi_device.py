"""A text model on several devices: a generator on each, one queue before them.

A prompt goes to the device with most free slots, preferably to one that has computed the prompt's beginning. Answers
under way on a device that fails go on at another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Event, Lane, Limits, ModelSpec, Request, Setup, forward_lane, forward_lanes
from gpuinfer.errors import BackendDied, DeviceLost
from gpuinfer.generation import Prompt
from gpuinfer.text.answer_frames import DeliveredAnswer
from gpuinfer.text.model import TextModel

if TYPE_CHECKING:
    from gpuinfer.models.device_arbiter import DeviceSlot
    from gpuinfer.text.text_options import TorchModelOptions

MOST_REMEMBERED = 8192  # prefixes that are remembered, the most recent ones
CHARACTERS, TOKENS = 256, 64  # by which each prefix is longer than the one before
MOST_OF_PROMPT = 32  # prefixes of one prompt


class PrefixAffinity:
    """Remembers which device computed which prefix. The device may have evicted it since, which costs nothing."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, str] = OrderedDict()

    def find(self, prompt: Prompt) -> str | None:
        """The device with the longest remembered prefix of this prompt; None: no device."""
        found = None
        for key in _keys(prompt):
            if (who := self._seen.get(key)) is None:
                break
            found = who
        return found

    def note(self, prompt: Prompt, who: str) -> None:
        for key in _keys(prompt):
            self._seen[key] = who
            self._seen.move_to_end(key)
        while len(self._seen) > MOST_REMEMBERED:
            self._seen.popitem(last=False)

    def forget(self) -> None:
        """The weights have changed: no cached prefix serves a prompt any more."""
        self._seen.clear()


def _keys(prompt: Prompt) -> Iterator[int]:
    """A key for each prefix, the shortest first."""
    known: Hashable = prompt.adapter
    for number, piece in enumerate(_pieces(prompt)):
        if number == MOST_OF_PROMPT:
            return
        yield (known := hash((known, piece)))


def _pieces(prompt: Prompt) -> Iterator[Hashable]:
    if prompt.messages is not None:
        for message in prompt.messages:
            yield repr(message)
    elif prompt.text is not None:
        yield from (prompt.text[at : at + CHARACTERS] for at in range(0, len(prompt.text), CHARACTERS))
    elif prompt.tokens is not None:
        yield from (tuple(prompt.tokens[at : at + TOKENS]) for at in range(0, len(prompt.tokens), TOKENS))


logger = logging.getLogger("gpuinfer")

FULLER = 1 / 8  # of its slots: a device that knows a prefix may have so many more rows than the emptiest one
MOST_LOST = 2  # devices that may fail with one prompt: after them the prompt may be the cause


async def open_text(
    spec: ModelSpec,
    setup: Setup,
    options: TorchModelOptions,
    stepped: Callable[[int, float], None],
    place: DeviceSlot | None = None,
    lane: Callable[[str], Lane] | None = None,
    resized: Callable[[int], None] = lambda slots: None,
) -> TextModel | TextDevices:
    """The model on `setup.devices`, a copy on each, or its stages on all of them; see `TextModel.open`. `options` are
    of one copy.

    Raises `UsageError` when it cannot be had on one of them.
    """
    if options.parallel != "data":
        return await TextModel.open(spec, setup, options, stepped, place, lane, resized)

    def setups() -> dict[str, Setup]:
        import gpuinfer.text.torch_import  # noqa: F401  before torch
        from gpuinfer.models.device import device_labels, resolve_devices, setups_of

        devices = resolve_devices(setup.devices)
        return dict(zip(device_labels(devices), setups_of(setup, devices), strict=True))

    each = await asyncio.to_thread(setups)
    if len(each) == 1:
        return await TextModel.open(spec, setup, options, stepped, place, resized=resized)
    models: dict[str, TextModel] = {}
    several: list[TextDevices] = []

    def resized_one(label: str, slots: int) -> None:
        for devices in several:  # once all are open
            resized(devices.resize(label, slots))

    try:
        for label, of_one in each.items():  # in turn: each finds less memory than the one before
            resizing = partial(resized_one, label)
            models[label] = await TextModel.open(spec, of_one, options, stepped, place, resized=resizing)
    except BaseException:
        for model in models.values():
            await model.close()
        raise
    several.append(TextDevices(models))
    return several[0]


@dataclass
class _RoutedPrompt:
    """One request, and the device that computes it."""

    request: Request
    label: str
    had: DeliveredAnswer | None  # of a request that is read while it grows
    losses: int = 0  # devices that failed with it
    released: bool = False


class TextDevices:
    """`TextModel` for several devices, each a model by its name. All methods belong to the event loop."""

    def __init__(self, models: Mapping[str, TextModel]) -> None:
        self._models = dict(models)
        self._slots = {label: model.limits.max_rows for label, model in models.items()}
        self._rows = dict.fromkeys(models, 0)  # under way
        self._failed: dict[str, str] = {}  # the reason of each failed device
        self._asked: dict[Request, _RoutedPrompt] = {}  # by the request as its device got it
        self._of: dict[Request, Request] = {}  # by the request as it came, the one that its device got
        self._beginnings = PrefixAffinity()
        self._updating = asyncio.Lock()

    @property
    def limits(self) -> Limits:
        """Limits over all devices; a request must fit in the slots of one."""
        slots = sum(self._slots.values())
        return Limits(min(self._slots.values()), in_flight=slots, slots=slots, devices=tuple(self._models))

    def resize(self, label: str, slots: int) -> int:
        """A device has so many slots now; all of them together."""
        self._slots[label] = slots
        return sum(self._slots.values())

    async def free_memory(self) -> Mapping[str, int]:
        """See `TextModel.free_memory`: of all devices together, free of the fullest."""
        each = [await model.free_memory() for label, model in self._models.items() if label not in self._failed]
        summed = {name: sum(one[name] for one in each) for name in ("freed_bytes", "freed_pages")}
        return {**summed, "free_bytes": min((one["free_bytes"] for one in each), default=0)}

    @property
    def computed_by(self) -> str:
        """See `TextModel.computed_by`."""
        return next(iter(self._models.values())).computed_by

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """As `TextModel.stream`. A moved answer goes on after the parts that its reader has had."""
        news: asyncio.Queue[Event] = asyncio.Queue()
        lanes = forward_lanes.get()
        following: list[asyncio.Task[None]] = []

        def follow(groups: Mapping[str, Sequence[Request]]) -> None:
            for label, group in groups.items():
                following.append(asyncio.create_task(self._follow(label, group, news, lanes)))

        try:
            follow(self._shared_out(batch))
            left = len(batch)
            while left:
                event = await news.get()
                asked = self._asked[event.request]
                if not event.last:
                    part = event.value if asked.had is None else asked.had.fresh(event.value)
                    if part is not None:
                        yield Event(asked.request, part, last=False)
                    continue
                if isinstance(event.error, BackendDied):
                    self._lose(asked.label, event.error)
                    if (sub := self._moved(event.request, asked)) is not None:
                        follow({asked.label: [sub]})
                        continue
                left -= 1
                self._forget(event.request, asked)
                error = event.error
                if asked.losses >= MOST_LOST and isinstance(error, BackendDied):
                    error = DeviceLost(
                        f"{asked.losses} devices failed while they had this prompt ({error}). "
                        "Leave it out, and try again."
                    )
                yield replace(event, request=asked.request, error=error)
        finally:
            for task in following:
                task.cancel()
            for request in batch:
                if (sub := self._of.get(request)) is not None:  # the stream was left before its end
                    self._forget(sub, self._asked[sub])

    def cancel(self, request: Request) -> None:
        if (sub := self._of.get(request)) is not None:
            asked = self._asked[sub]
            self._release(asked)
            self._models[asked.label].cancel(sub)

    async def _follow(
        self, label: str, group: Sequence[Request], news: asyncio.Queue[Event], lanes: Sequence[Lane]
    ) -> None:
        place = list(self._models).index(label)
        if place < len(lanes):
            forward_lane.set(lanes[place])
        open_ones = set(group)
        try:
            async for event in self._models[label].stream(group):
                news.put_nowait(event)
                if event.last:
                    open_ones.discard(event.request)
        except Exception as error:  # noqa: BLE001 (whatever it is, each request must get an outcome)
            for request in open_ones:
                news.put_nowait(Event(request, error=error))

    # Which device has which request

    def _shared_out(self, batch: Sequence[Request]) -> dict[str, list[Request]]:
        groups: dict[str, list[Request]] = {}
        for request in batch:
            label = self._take(request)
            wants_parts = request.parts and isinstance(request.payload, Prompt)
            self._asked[request] = _RoutedPrompt(
                request, label, DeliveredAnswer(request.payload) if wants_parts else None
            )
            self._of[request] = request
            groups.setdefault(label, []).append(request)
        return groups

    def _take(self, request: Request) -> str:
        """Choose the device for a request, and count its rows there."""
        free = {label: self._slots[label] - rows for label, rows in self._rows.items() if label not in self._failed}
        label = max(free, key=lambda one: free[one], default=next(iter(self._models)))
        if isinstance(request.payload, Prompt):
            known = self._beginnings.find(request.payload)
            if (
                known in free
                and free[known] >= request.rows
                and free[label] - free[known] <= max(1, self._slots[known] * FULLER)
            ):
                label = known
            self._beginnings.note(request.payload, label)
        self._rows[label] += request.rows
        return label

    def _moved(self, sub: Request, asked: _RoutedPrompt) -> Request | None:
        """The request for another device, from where its reader is; None: there is none, or too many have failed."""
        asked.losses += 1
        if asked.released or asked.losses >= MOST_LOST or len(self._failed) == len(self._models):
            return None
        del self._asked[sub]
        self._release(asked)
        again = sub if asked.had is None else replace(sub, payload=asked.had.rest())
        asked.label, asked.released = self._take(again), False
        self._asked[again], self._of[asked.request] = asked, again
        return again

    def _forget(self, sub: Request, asked: _RoutedPrompt) -> None:
        self._release(asked)
        self._asked.pop(sub, None)
        self._of.pop(asked.request, None)

    def _release(self, asked: _RoutedPrompt) -> None:
        if not asked.released:
            asked.released = True
            self._rows[asked.label] -= asked.request.rows

    def _lose(self, label: str, error: BackendDied) -> None:
        if label not in self._failed:
            self._failed[label] = str(error)
            logger.error("device %s failed: %s Its prompts go to the others.", label, error)

    # Weights

    @property
    def _working(self) -> dict[str, TextModel]:
        return {label: model for label, model in self._models.items() if label not in self._failed}

    async def update(self, version: str, weights: str, *, drain: bool) -> None:
        """As `Backend.update`: read for each device before any has them."""
        async with self._updating:
            found = {label: await model.read_weights(weights) for label, model in self._working.items()}
            await self._on_all(
                {label: self._models[label].take_weights(version, one, drain=drain) for label, one in found.items()}
            )
            self._beginnings.forget()

    @property
    def adapters(self) -> Sequence[str]:
        return next(iter((self._working or self._models).values())).adapters

    async def load_adapter(self, name: str, version: str, place: str) -> None:
        async with self._updating:
            await self._on_all(
                {label: model.load_adapter(name, version, place) for label, model in self._working.items()}
            )

    async def unload_adapter(self, name: str) -> None:
        async with self._updating:
            await self._on_all({label: model.unload_adapter(name) for label, model in self._working.items()})

    async def _on_all(self, work: Mapping[str, Any]) -> None:
        """Do the work on each device; one that dies at it is given up. Raises what the others refuse."""
        outcomes = await asyncio.gather(*work.values(), return_exceptions=True)
        for label, outcome in zip(work, outcomes, strict=True):
            if isinstance(outcome, BackendDied):
                self._lose(label, outcome)
        if errors := [one for one in outcomes if isinstance(one, BaseException)]:
            refused = [error for error in errors if not isinstance(error, BackendDied)]
            if refused or len(errors) == len(outcomes):
                raise (refused or errors)[0]

    # Reports

    def device(self) -> Mapping[str, Any]:
        """Sums over all devices, and each device under `devices`."""
        from gpuinfer.models.device import merged_readings

        found = {label: model.device() for label, model in self._models.items()}
        first = next(iter(found.values()))
        return {
            **merged_readings(list(found.values())),
            "model": _facts([one["model"] for one in found.values()], list(found)),
            "computes_in": first["computes_in"],
            "in_force": first["in_force"],
            **{what: _sums([one[what] for one in found.values()]) for what in ("tokens", "steps")},
            "devices": {label: self._of_one(label, one) for label, one in found.items()},
        }

    def _of_one(self, label: str, found: Mapping[str, Any]) -> dict[str, Any]:
        counted = self._models[label].counted()
        read = {key: value for key, value in found.items() if key in ("name", "utilisation") or key.endswith("_mb")}
        done = {"rows": counted["rows"], "batches": counted["steps"], "busy_s": counted["seconds"], "copies": 1}
        return {**read, **done, "failed": self._failed.get(label, "")}

    def waits_for(self) -> str:
        """As `TextModel.waits_for`."""
        return ""

    async def close(self) -> None:
        await asyncio.gather(*(model.close() for model in self._models.values()))


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        name: sum(part.get(name, 0) for part in parts) for name in dict.fromkeys(key for part in parts for key in part)
    }


def _facts(parts: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> dict[str, Any]:
    """Facts of one model on several devices: slots, pages and bytes add up."""
    added = {
        name: sum(part[name] for part in parts)
        for name in parts[0]
        if (name in ("slots", "pages") or name.endswith("_bytes"))
        and all(isinstance(part.get(name), int) for part in parts)
    }
    least = {name: min(part[name] for part in parts) for name in ("context",) if name in parts[0]}
    return {**parts[0], **added, **least, "device": ",".join(labels)}
