"""A text model beside an event loop: prompts in, answers out, the model in a thread of its own.

Backends that generate are made of it, in whichever process they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuinfer import stats
from gpuinfer.api import Event, Lane, Limits, ModelSpec, Request, Setup, TextRoofline, forward_lane, prompts_lane
from gpuinfer.errors import BackendError, GpuinferError
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.host import error_text
from gpuinfer.models.memory_watch import MemoryWatch
from gpuinfer.text.answer_frames import no_prompt

if TYPE_CHECKING:
    from gpuinfer.models.device_arbiter import DeviceSlot
    from gpuinfer.text.generator import Driver, Prepared
    from gpuinfer.text.generator.memory_fitting import MemoryFitter
    from gpuinfer.text.text_options import TorchModelOptions

Outcome = Generation | Exception
FEW = 8  # short prompts that are prepared where they arrive: another thread costs more
SHORT = 4096  # characters of a short prompt: about a millisecond
LONG = 100_000  # characters of a prompt for which others do not wait
COMPILERS = 4  # threads for prompts that may take seconds: long ones, and those with a constraint
# Facts that are the values of a backend's options.
OPTIONS = ("slots", "pages", "context", "step_tokens", "weights", "compile", "speculate", "threads", "stages")
REPORTED = (  # counters; those of diffusion models come besides
    *("steps", "seconds", "prompt_tokens", "output_tokens", "held_s", "echoing_s", "faults", "first_touch_s"),
    *("flops", "bytes", "attention_flops", "prefill_flops", "prefill_bytes"),
    *("with_constraints", "with_lists", "with_stop", "with_logprobs", "with_penalties", "read_as_they_grow"),
    *("waited_rows", "preempted_rows", "recomputed_tokens"),
    *stats.SPECULATION_COUNTS,
)
FITTED = ("freed_bytes", "shortages", "resized")  # likewise, of `FittingCounters`
STEPS = 64  # reported to the loop at once, when no answer is due before
REPORT_S = 0.2  # or after so long, for the live view


class TextModel:
    """Answers requests whose payloads are prompts. All methods belong to the event loop that opened it."""

    def __init__(
        self,
        driver: Driver,
        stepped: Callable[[int, float], None],
        gauge: Callable[[], Mapping[str, Any]] = dict,
        waits_for: Callable[[], str] = lambda: "",
        fitting: tuple[MemoryFitter, MemoryWatch | None] | None = None,
        resized: Callable[[int], None] = lambda slots: None,
    ) -> None:
        """`gauge` and `waits_for` are for the backend's `device` and `waits_for`. `resized`: as of `open`."""
        self._fitter: MemoryFitter | None
        self._watch: MemoryWatch | None
        self._fitter, self._watch = fitting or (None, None)
        if self._fitter is not None:
            self._fitter.resized = partial(self._tell_slots, resized)
        self._driver, self._stepped, self._gauge, self.waits_for = driver, stepped, gauge, waits_for
        self._loop = asyncio.get_running_loop()
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="gpuinfer-prompts")
        self._slowly = ThreadPoolExecutor(COMPILERS, thread_name_prefix="gpuinfer-constraints")
        self._early: set[Request] = set()  # whose prompts are being prepared
        self._understood = 0  # batches of them
        self._updating = asyncio.Lock()
        self._tickets: dict[Request, int] = {}
        self._asked: dict[int, tuple[Request, _Answers]] = {}
        self._steps: list[tuple[int, float]] = []  # not reported to the loop yet; the driver's own
        self._reported_at = time.monotonic()  # likewise
        driver.deliver, driver.on_step = self._deliver, self._count

    @classmethod
    async def open(
        cls,
        spec: ModelSpec,
        setup: Setup,
        options: TorchModelOptions,
        stepped: Callable[[int, float], None],
        place: DeviceSlot | None = None,
        lane: Callable[[str], Lane] | None = None,
        resized: Callable[[int], None] = lambda slots: None,
    ) -> TextModel:
        """Load the model. `stepped` is called, on the loop, with the rows and seconds of each forward step; each takes
        a turn at `place`, which other models share. `lane` makes a lane of the ledger for each stage. `resized` is
        called, on the loop, with the slots when there are others (`memory_fitting`).

        Raises `UsageError` when the model cannot be opened on this device.
        """
        driver, gauge, waits_for, fitting = await asyncio.to_thread(_drive, spec, setup, options, place, lane)
        return cls(driver, stepped, gauge, waits_for, fitting, resized)

    @property
    def limits(self) -> Limits:
        slots = self._driver.generator.slots
        return Limits(slots, in_flight=slots, slots=slots)

    @property
    def facts(self) -> Mapping[str, Any]:
        """Estimated and actual sizes."""
        return self._driver.generator.facts

    @property
    def computed_by(self) -> str:
        """Whose code computes its layers: native or transformers."""
        return str(self._driver.generator.decoder.shape.decoder)

    def counted(self) -> Mapping[str, float]:
        """Totals of its steps until now: `generator.driver.DriverCounters`."""
        return self._driver.counters()

    def device(self) -> Mapping[str, Any]:
        """As `Backend.device`."""
        counted = self._driver.counters()
        drawn = {"input": counted["prompt_tokens"] + counted["cached_tokens"], "output": counted["output_tokens"]}
        steps = {name: counted[name] for name in (*REPORTED, *stats.DIFFUSION_COUNTS) if name in counted}
        usage: Mapping[str, float] = getattr(getattr(self._driver.generator, "decoder", None), "usage", dict)()
        steps |= {f"threads_{name}": usage[name] for name in ("busy_s", "waited_s") if name in usage}
        if self._fitter is not None:
            fitted = self._fitter.counted()
            steps |= {name: fitted[name] for name in FITTED}
        found = {
            "model": {**self.facts, **({"decoder_threads": usage["threads"]} if "threads" in usage else {})},
            "computes_in": self.facts.get("computes_in"),
            "tokens": drawn,
            "steps": steps,
            "in_force": {name: value for name, value in self.facts.items() if name in OPTIONS},
        }
        return {**self._gauge(), **found}

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes, in parts where they are wanted. A prompt that cannot be served gets an error; one
        that takes long to prepare keeps no other waiting.
        """
        if self._driver.lane is None:
            self._driver.lane = forward_lane.get()
        answers = _Answers(self._loop)
        self._early.update(batch)
        beside: list[asyncio.Task[None]] = []
        try:
            here, *groups = _sorted(batch)
            with self._understanding():
                self._submit(here, self._understood_all(here), answers)
            for group in filter(None, groups):
                pool = self._preparing if group is groups[0] else self._slowly
                beside.append(self._loop.create_task(self._prepare(group, pool, answers)))
            left = len(batch)
            while left:
                for request, news in await answers.take():
                    if isinstance(news, Part):
                        yield Event(request, news, last=False)
                        continue
                    left -= 1
                    yield Event(request, error=news) if isinstance(news, Exception) else Event(request, news)
        finally:
            for task in beside:
                task.cancel()
            self._early.difference_update(batch)
            for request in batch:
                if request in self._tickets:  # the stream was left before its end
                    self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Stop computing this answer: its slots are free for others."""
        self._early.discard(request)
        ticket = self._tickets.get(request)
        if ticket is not None:
            self._driver.cancel(ticket)
            self._settle(ticket, _cancelled())

    async def update(self, version: str, weights: str, *, drain: bool) -> None:
        """As `Backend.update`. Updates come one after another."""
        async with self._updating:
            await self.take_weights(version, await self.read_weights(weights), drain=drain)

    async def read_weights(self, place: str) -> object:
        """Weights as `take_weights` takes them, read beside the steps. Raises `UsageError`."""
        return await asyncio.to_thread(self._driver.generator.read_weights, place)

    async def take_weights(self, version: str, weights: object, *, drain: bool) -> None:
        await asyncio.wrap_future(self._driver.update(version, weights, drain=drain))

    @property
    def adapters(self) -> Sequence[str]:
        """As `Backend.adapters`."""
        return self._driver.generator.adapters

    async def load_adapter(self, name: str, version: str, place: str) -> None:
        """As `Backend.update` of an adapter, which is read and packed beside the steps."""
        async with self._updating:
            found = await asyncio.to_thread(self._driver.generator.read_adapter, name, place)
            await asyncio.wrap_future(self._driver.load_adapter(name, version, found))

    async def unload_adapter(self, name: str) -> None:
        """As `Backend.unload`."""
        async with self._updating:
            await asyncio.wrap_future(self._driver.unload_adapter(name))

    async def measure(self, rows: int, seconds: float) -> TextRoofline | None:
        """As `Backend.measure`; None for a model in stages."""
        if self.facts.get("stages"):
            return None
        return await asyncio.wrap_future(self._driver.measure(rows, seconds))

    async def free_memory(self) -> Mapping[str, int]:
        """As `Backend.free_memory`."""
        if self._fitter is None:
            return {}
        return asdict(await asyncio.wrap_future(self._driver.between_steps(self._fitter.give_back)))

    def _tell_slots(self, resized: Callable[[int], None], slots: int) -> None:
        """From the driver's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(resized, slots)

    async def close(self) -> None:
        """Stop after the step under way; unfinished requests fail."""
        if self._watch is not None:
            self._watch.stop()
        await asyncio.to_thread(self._driver.close)
        await asyncio.to_thread(self._preparing.shutdown, cancel_futures=True)
        self._slowly.shutdown(wait=False, cancel_futures=True)  # constraints have their own timeout

    def _submit(self, batch: Sequence[Request], prepared: Sequence[Prepared | Exception], answers: _Answers) -> None:
        good: list[tuple[Request, Prepared]] = []
        for request, one in zip(batch, prepared, strict=True):
            if isinstance(one, Exception):
                answers.put(request, one)
            elif request not in self._early:
                answers.put(request, _cancelled())
            else:
                good.append((request, replace(one, parts=True) if request.parts else one))
        try:
            tickets = self._driver.submit_all([one for _, one in good])  # all at once: the thread is woken once
        except GpuinferError as error:  # it is gone
            for request, _ in good:
                answers.put(request, error)
            return
        for ticket, (request, _) in zip(tickets, good, strict=True):
            self._tickets[request] = ticket
            self._asked[ticket] = request, answers

    async def _prepare(self, group: Sequence[Request], pool: ThreadPoolExecutor, answers: _Answers) -> None:
        """Prepare these prompts beside the loop, and submit them. Each gets an answer or an error in any case."""
        prepared: list[Prepared | Exception]
        try:
            with self._understanding() as enter:
                prepared = await self._loop.run_in_executor(pool, self._understood_all, group, enter)
        except asyncio.CancelledError:  # the stream was left, or the model is being closed
            prepared = [_cancelled()] * len(group)
        except Exception as error:  # noqa: BLE001  whatever it is, each request must get an outcome
            prepared = [error if isinstance(error, GpuinferError) else _broken(error)] * len(group)
        self._submit(group, prepared, answers)

    def _understood_all(
        self, group: Sequence[Request], enter: Callable[[str], None] = lambda station: None
    ) -> list[Prepared | Exception]:
        payloads = [request.payload for request in group]
        prompts = [payload for payload in payloads if isinstance(payload, Prompt)]
        found = iter(self._driver.generator.prepare(prompts, enter) if prompts else ())
        return [next(found) if isinstance(payload, Prompt) else no_prompt(payload) for payload in payloads]

    @contextlib.contextmanager
    def _understanding(self) -> Iterator[Callable[[str], None]]:
        """Books the time in the lane of prompts; yields the lane's `enter`. Several batches at once are one visit."""
        lane = prompts_lane.get()
        enter: Callable[[str], None] = (lambda station: None) if lane is None else lane.enter
        if not self._understood:
            enter("understand")
        self._understood += 1
        try:
            yield enter
        finally:
            self._understood -= 1
            if not self._understood:
                enter("idle")

    # In the driver's thread

    def _count(self, rows: int, seconds: float) -> None:
        self._steps.append((rows, seconds))
        if len(self._steps) >= STEPS or time.monotonic() - self._reported_at >= REPORT_S:
            self._deliver((), ())

    def _deliver(self, parts: Sequence[tuple[int, Part]], outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Hand steps, answers and parts to the loop, in one call a step."""
        steps, self._steps, self._reported_at = self._steps, [], time.monotonic()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived, steps, parts, outcomes)

    # On the loop

    def _arrived(
        self,
        steps: Sequence[tuple[int, float]],
        parts: Sequence[tuple[int, Part]],
        outcomes: Sequence[tuple[int, Outcome]],
    ) -> None:
        for rows, seconds in steps:
            self._stepped(rows, seconds)
        for ticket, part in parts:
            if (asked := self._asked.get(ticket)) is not None:  # else it was cancelled
                request, answers = asked
                answers.put(request, part)
        for ticket, outcome in outcomes:
            self._settle(ticket, outcome)

    def _settle(self, ticket: int, outcome: Outcome) -> None:
        asked = self._asked.pop(ticket, None)
        if asked is not None:  # else it was cancelled
            request, answers = asked
            self._tickets.pop(request, None)
            answers.put(request, outcome)


def _sorted(batch: Sequence[Request]) -> list[list[Request]]:
    """The requests that are prepared at once, on the loop; those that are prepared together, beside the loop; and each
    that may take long by itself.
    """
    here, together, alone = list[Request](), list[Request](), list[list[Request]]()
    for request in batch:
        length = _length(request.payload)
        if length > LONG:
            alone.append([request])
        else:
            (here if length <= SHORT else together).append(request)
    return [here, together, *alone] if len(here) <= FEW else [[], here + together, *alone]


def _length(payload: Any) -> int:
    """In characters; over `LONG` for a prompt that may take seconds to prepare, over `SHORT` for milliseconds."""
    if not isinstance(payload, Prompt):
        return 0
    if payload.sampling.constraint is not None:
        return LONG + 1
    if payload.messages is not None:
        contents = [message.get("content") for message in payload.messages if isinstance(message, Mapping)]
        return SHORT + 1 + sum(len(one) for one in contents if isinstance(one, str | list))
    length = max(len(one) for one in (payload.text, payload.tokens, "") if isinstance(one, str | tuple | list))
    return max(length, SHORT + 1) if payload.begun else length


class _Answers:
    """Answers and parts of one stream that its reader has not taken."""

    __slots__ = ("_arrived", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: list[tuple[Request, Outcome | Part]] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, request: Request, news: Outcome | Part) -> None:
        self._arrived.append((request, news))
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[tuple[Request, Outcome | Part]]:
        """All that have arrived; waits for the first."""
        if not self._arrived:
            self._waiting = self._loop.create_future()
            await self._waiting
        arrived, self._arrived = self._arrived, []
        return arrived


def _drive(
    spec: ModelSpec,
    setup: Setup,
    options: TorchModelOptions,
    place: DeviceSlot | None,
    lane: Callable[[str], Lane] | None,
) -> tuple[Driver, Callable[[], Mapping[str, Any]], Callable[[], str], tuple[MemoryFitter, MemoryWatch | None]]:
    """The driver of an opened model, the functions for `gauge` and `waits_for`, and what fits its memory."""
    import gpuinfer.text.torch_import  # noqa: F401  before torch
    from gpuinfer.models.device import Gauge, free_bytes, resolve_dtype
    from gpuinfer.text.generator import Driver, open_generator
    from gpuinfer.text.generator.memory_fitting import MemoryFitter
    from gpuinfer.text.stages.staged_decoder import StagedDecoder
    from gpuinfer.text.text_roofline import StepCost

    generator = open_generator(spec, setup, options, lane)
    decoder = generator.decoder
    driver = Driver(generator, place=place, cost=StepCost(decoder.shape, resolve_dtype(setup.dtype).itemsize))
    staged = decoder if isinstance(decoder, StagedDecoder) else None
    devices = [generator.device] if staged is None else staged.devices
    free = partial(free_bytes, devices)
    fitter = MemoryFitter(generator, free, options.keep_free, options.min_slots)
    watch = None
    if options.keep_free is not None:
        watch = MemoryWatch(lambda: fitter.is_due, lambda: driver.between_steps(fitter.fit).result())
    fitting = fitter, watch
    if staged is not None:
        return driver, staged.reading, staged.waits_for, fitting
    return driver, Gauge(generator.device).read, lambda: "", fitting


def _broken(error: Exception) -> BackendError:
    return BackendError(f"this prompt could not be understood ({error_text.full_message(error)}). Report this.")


def _cancelled() -> BackendError:
    return BackendError("this answer was cancelled. Ask again.")
