"""What a backend promises, tried with real batches: answers in order and of the right number of rows, parts of text,
facts about its device.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, get_args

import numpy as np
from msgspec import structs

from gpuinfer.api import Backend, BackendContext, Event, Limits, ModelKind, Request, Result
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.results import find_fault
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.models.row_format import BITS
from gpuinfer.stats import Snapshot
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import text_backends
from gpuinfer.testing.findings import Examination, Finding, check_build, check_options, run_bounded

TOLERANCE = 1e-6


def answer_distance(first: Any, second: Any) -> float:
    """The largest difference anywhere in two answers; inf when they are not of one shape, 0 when they are equal."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        if first.keys() != second.keys():
            return math.inf
        return max((answer_distance(first[key], second[key]) for key in first), default=0.0)
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        if len(first) != len(second):
            return math.inf
        return max(map(answer_distance, first, second), default=0.0)
    if hasattr(first, "shape") and hasattr(second, "shape"):
        # torch: from any device, and from types that NumPy does not have
        one, other = (
            np.asarray(array.detach().cpu().double() if hasattr(array, "detach") else array, np.float64)
            for array in (first, second)
        )
        if one.shape != other.shape:
            return math.inf
        with np.errstate(invalid="ignore"):
            gaps = np.where(one == other, 0.0, np.abs(one - other))  # -inf equals -inf
        return float(gaps.max(initial=0.0))
    return 0.0 if first == second else math.inf


DEVICE = {"utilisation": (0.0, 1.0), "allocated_mb": (0.0, 1e9), "reserved_mb": (0.0, 1e9)}
UNITS = {"utilisation": "0 to 1", "allocated_mb": "MB", "reserved_mb": "MB"}


def fault_of_generation(result: Result, prompt: Prompt) -> str | None:
    if not isinstance(result, Generation):
        return f"a prompt was answered with {result!r:.60}. Answer with a gpuinfer.generation.Generation"
    if len(result.completions) != prompt.samples:
        return f"{len(result.completions)} completions for {prompt.samples} samples. Give one for each"
    longest = max(len(answer.tokens) for answer in result.completions)
    if longest > prompt.sampling.max_tokens:
        return f"an answer of {longest} tokens, where max_tokens is {prompt.sampling.max_tokens}. Stop there"
    if any(answer.text and not answer.tokens for answer in result.completions):
        return "an answer has a text and no tokens. Give Completion.tokens, of which the text is made"
    return None


def _fault_of_device(facts: Any) -> str | None:
    """It goes into reports and onto the screen four times a second."""
    if not isinstance(facts, Mapping):
        return f"device() gave {facts!r:.60}. Return a dict; an empty one when nothing is known."
    wrong = next(
        (key for key, (low, high) in DEVICE.items() if key in facts and not _between(facts[key], low, high)), None
    )
    if wrong is not None:
        return f"device() says {wrong} = {facts[wrong]!r}. Leave it out, or give a number in {UNITS[wrong]}."
    if not isinstance(facts.get("model", {}), Mapping) or not isinstance(facts.get("tokens", {}), Mapping):
        return "device() says model or tokens otherwise than as a dict. Give plain facts by name, and {input, output}."
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"device() gave what no report can hold: {error}. Return numbers and texts alone."
    return None


def _between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low <= value <= high


MOST_ROWS = 4096  # the widest batch that is tried
CROWD = 64  # requests at once

MakePayload = Callable[[int, int], Any]
"""From a number of rows and a seed to a payload; other seeds give other payloads."""


def check_backend(
    backend_factory: Callable[[], Backend],
    make_payload: MakePayload | None = None,
    timeout_s: float = 30.0,
    *,
    examiner: Examination | None = None,
) -> list[Finding]:
    """Every promise of `api.Backend`; each check may take `timeout_s`, or what `examiner` allows.

    Without `make_payload` a payload is float32 [rows, inputs], with the inputs of the backend's model, or else 8. When
    its model is one of text, or text is all that it `serves`, a payload is a `generation.Prompt` that wants `rows`
    short answers.
    """

    def check(examiner: Examination) -> None:
        if (backend := check_build(backend_factory, Backend, examiner)) is not None:
            asyncio.run(_BackendExamination(backend, make_payload, examiner).run())

    return run_bounded(check, examiner or Examination(timeout_s))


class _BackendExamination:
    """One backend, from start to close."""

    def __init__(self, backend: Backend, make_payload: MakePayload | None, examiner: Examination) -> None:
        self.backend = backend
        self.examiner = examiner
        self._make_payload = make_payload or (_prompt if self._is_of_text else self._features)
        self._steps: list[tuple[int, float, bool]] = []  # rows, seconds, reported on the event loop

    async def run(self) -> None:
        examiner = self.examiner
        check_options(self.backend, examiner)
        examiner.check("says what it serves", self._serves)
        if await examiner.check_async("starts", self._starts):
            await examiner.check_async("connects from another process", self._connects)
            hung = ""
            for name, check in self._promises().items():
                if hung:
                    examiner.skip(name, f"'{hung}' did not end")
                    continue
                await examiner.check_async(name, check)
                hung = name if examiner.hung else ""
            await examiner.check_async("tells its measurements", self._measures)
        await examiner.check_async("closes", self.backend.close)

    def _promises(self) -> dict[str, Callable[[], Awaitable[str | None]]]:
        promises: dict[str, Callable[[], Awaitable[str | None]]] = {
            "answers each request with its own rows": self._answers,
            "answers in order": self._keeps_order,
            "takes a batch as wide as its limits say": self._takes_the_widest,
            "answers a crowd through the engine": self._serves_a_crowd,
            "lets a request be cancelled": self._cancels,
        }
        if self._is_of_text and isinstance(self._make_payload(1, 0), Prompt):
            for name, fault_of in text_backends.PROMISES.items():
                promises[name] = functools.partial(fault_of, self.backend, self._make_payload)
        if self._is_of_text:
            promises["refuses an adapter that it has not"] = self._refuses_adapters
        if self.backend.adapters:
            promises["answers with each of its adapters"] = self._answers_with_adapters
        if self.backend.streams and self.backend.limits.slots is not None and not self.backend.remote:
            promises["tells its forward steps"] = self._tells_steps
        if self.backend.updates and self._is_of_text:
            promises["changes its weights"] = self._updates
        return promises

    @property
    def _is_of_text(self) -> bool:
        model = self.backend.setup.model
        return model.kind == "text" if model else tuple(self.backend.serves) == ("text",)

    def _features(self, rows: int, seed: int) -> Any:
        model = self.backend.setup.model
        inputs = (model.inputs if model else 0) or 8
        features = np.random.default_rng(seed).random((rows, inputs), dtype=np.float32)
        if model and model.input_dtype == BITS:
            return np.packbits(features > 0.5, axis=1, bitorder="little")
        return features.astype(model.input_dtype) if model else features

    def _request(self, rows: int, seed: int) -> Request:
        return Request(self._make_payload(rows, seed), rows)

    def _serves(self) -> str | None:
        kinds = self.backend.serves
        if isinstance(kinds, tuple | list) and kinds and set(kinds) <= set(get_args(ModelKind)):
            return None
        return f"it serves {kinds!r}. Set `serves` to a tuple of kinds of model: {', '.join(get_args(ModelKind))}."

    async def _connects(self) -> str | None:
        """After the start: a remote backend connects to what it has started."""
        connector = self.backend.connect()
        ForkingPickler.dumps(connector)  # as a spawned process would be given it
        other = connector.open()
        return None if isinstance(other, Backend) else f"connect().open() gave {other!r}. Return a Backend."

    async def _starts(self) -> str | None:
        thread = threading.current_thread()

        def stepped(rows: int, seconds: float) -> None:
            self._steps.append((rows, seconds, threading.current_thread() is thread))

        await self.backend.start(BackendContext(strategy=Dynamic(), stepped=stepped))
        limits = getattr(self.backend, "limits", None)
        if not isinstance(limits, Limits):
            return f"its limits are {limits!r}. Set `limits = Limits(max_rows=…)`, at the latest in start()."
        counts = [limits.max_rows, limits.in_flight, 1 if limits.slots is None else limits.slots]
        return None if min(counts) >= 1 else f"it takes nothing: {limits}. Make every limit at least 1."

    async def _ask(self, requests: Sequence[Request]) -> list[Result]:
        """One batch, as the engine asks it. Raises `ValueError` for what the engine would refuse."""
        answered: dict[Request, list[Result]] = {request: [] for request in requests}
        async for event in self.backend.stream(tuple(requests)):
            if event.last and event.error is not None:
                raise event.error
            if event.last:
                answered[event.request].append(event.value)
        for request, results in answered.items():
            if len(results) != 1:
                raise ValueError(f"a request got {len(results)} results. Return one for each request")
            if fault := find_fault(results[0], request.rows):
                raise ValueError(fault)
            if isinstance(request.payload, Prompt) and (fault := fault_of_generation(results[0], request.payload)):
                raise ValueError(fault)
        return [_comparable(results[0]) for results in answered.values()]

    async def _answers(self) -> str | None:
        batch: list[Request] = []
        for seed, rows in enumerate((1, 3, 2, 1, 2)):
            if sum(request.rows for request in batch) + rows <= self.backend.limits.max_rows:
                batch.append(self._request(rows, seed))
        await self._ask(batch)
        return None

    async def _keeps_order(self) -> str | None:
        """Each answer must lie nearest to the one that its request gets alone. Random answers cannot be compared."""
        fits = min(8, self.backend.limits.max_rows)
        batch = [self._request(1, seed) for seed in range(fits)]
        together = await self._ask(batch)
        alone = [(await self._ask([request]))[0] for request in batch]
        if answer_distance((await self._ask(batch[:1]))[0], alone[0]) > TOLERANCE:
            return None
        for number, answer in enumerate(together):
            own = answer_distance(answer, alone[number])
            if any(answer_distance(answer, other) < own for other in alone):
                return f"request {number} of a batch got another one's answer. Return the results in the batch's order."
        return None

    async def _takes_the_widest(self) -> str | None:
        await self._ask([self._request(min(self.backend.limits.max_rows, MOST_ROWS), 0)])
        return None

    async def _serves_a_crowd(self) -> str | None:
        engine = Engine(_Borrowed(self.backend), Dynamic())
        await engine.start()
        try:
            await asyncio.gather(*(engine.submit(self._make_payload(1, seed)) for seed in range(CROWD)))
        finally:
            await engine.close(drain=False)
        return None

    async def _cancels(self) -> str | None:
        self.backend.cancel(self._request(1, 0))  # it may have been answered a moment ago
        return None

    async def _refuses_adapters(self) -> str | None:
        prompt = self._make_payload(1, 0)
        if not isinstance(prompt, Prompt):
            return None
        request = Request(structs.replace(prompt, adapter="no-such-adapter"))
        try:
            answers = [event.error or event.value async for event in self.backend.stream((request,)) if event.last]
        except GpuinferError:
            return None
        if any(isinstance(one, Exception) for one in answers):
            return None
        return "it answered a prompt whose adapter it has not. Refuse one whose `adapter` is not None with BadPrompt."

    async def _answers_with_adapters(self) -> str | None:
        """Each answer names the adapter that it was computed with, and its version."""
        for name in self.backend.adapters:
            prompt = structs.replace(_prompt(1, 0), adapter=name)
            answer = await self._whole(Request(prompt))
            own = name if "@" in name else f"{name}@"
            if not answer.version.startswith(own) or any(
                not one.versions[-1][1].startswith(own) for one in answer.completions
            ):
                return f"an answer of the adapter '{name}' says {answer.versions}. Name it with its version: '{own}…'."
        return None

    async def _updates(self) -> str | None:
        """With the weights that it has, where those are files: the answers stay what they were, under another name."""
        model = self.backend.setup.model
        if model is None or not os.path.exists(model.name):  # noqa: ASYNC240  a moment
            return None
        sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
        request = Request(Prompt(text="the same beginning of every prompt", key="0", sampling=sampling))
        before = await self._whole(request)
        for version, drain in (("again", True), ("once more", False)):
            await self.backend.update(version, model.name, drain=drain)
            after = await self._whole(request)
            if after.versions != (version,):
                return f"after update('{version}') an answer says {after.versions}. Name what it was computed with."
            if any(one.versions != ((0, version),) for one in after.completions):
                spans = after.completions[0].versions
                return f"after update('{version}') a completion says {spans}. Name what drew it: ((0, '{version}'),)."
            if after.cached_tokens:
                return f"{after.cached_tokens} tokens that old weights cached served another prompt. Forget them."
            if _comparable(after) != _comparable(before):
                return "after an update to the weights that it had an answer is another one. Read them as before."
        try:
            await self.backend.update("nowhere", os.path.join(model.name, "no-such-folder"))
        except UsageError:
            return None
        return "update() took weights that are not there. Raise UsageError, and keep those in force."

    async def _whole(self, request: Request) -> Generation:
        answers = [event.value async for event in self.backend.stream((request,)) if event.last]
        if len(answers) != 1 or not isinstance(answers[0], Generation):
            raise ValueError(f"a prompt was answered with {answers!r:.60}. Answer with one Generation")
        return answers[0]

    async def _tells_steps(self) -> str | None:
        """The steps of all requests so far."""
        if not self._steps:
            return "it has answered, and reported no step. Call context.stepped(rows, seconds) after each forward step."
        slots = self.backend.limits.slots
        for rows, seconds, on_the_loop in self._steps:
            if not on_the_loop:
                return "a step was reported in another thread. Use loop.call_soon_threadsafe(stepped, rows, seconds)."
            if not (0 < rows <= (slots or 0) and seconds >= 0):
                return f"a step had {rows} rows and took {seconds} s, with {slots} slots. Tell what it had and took."
        return None

    async def _measures(self) -> str | None:
        if fault := _fault_of_device(self.backend.device()):
            return fault
        wire = await self.backend.stats()
        if wire is not None:
            Snapshot.from_wire(dict(wire))
        return None


class _Borrowed(Backend):
    """A backend that is already running, and that goes on when the engine closes."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend.setup)
        self.limits = backend.limits
        self._backend = backend

    @property
    def streams(self) -> bool:
        return self._backend.streams

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return await self._backend.infer(batch)

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        async for event in self._backend.stream(batch):
            yield event

    def cancel(self, request: Request) -> None:
        self._backend.cancel(request)


def _prompt(rows: int, seed: int) -> Prompt:
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    return Prompt(text=f"prompt {seed}", key=str(seed), samples=rows, sampling=sampling)


def _comparable(result: Result) -> Result:
    """What must be the same for the same request: of an answer in text, not how long it took."""
    return [answer.text for answer in result.completions] if isinstance(result, Generation) else result
