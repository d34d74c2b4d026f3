"""Prompts under way in vLLM, for `text.model.TextModel`: it stands where our own driver does, and has no thread.

Everything happens on one event loop. A prompt is a task, and each of its samples is a request of vLLM's own, so that
one can end before the others do. What vLLM drew becomes `Completion`, `Part` and `Logprob` here: an answer ends, and
says, what one of our own engine would.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from msgspec import structs

from gpuinfer.api import Lane
from gpuinfer.backends.vllm_engine import vllm_requests as mapping
from gpuinfer.backends.vllm_engine.async_llm import VllmEngine
from gpuinfer.backends.vllm_engine.list_constraints import extra_args
from gpuinfer.backends.vllm_engine.lora_versions import VllmAdapter, VllmAdapters
from gpuinfer.backends.vllm_engine.vllm_requests import VllmPrompt, VllmRequest
from gpuinfer.errors import BackendError, GpuinferError, unwrap
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part, Sampling
from gpuinfer.host import error_text
from gpuinfer.text.generator.answer import (
    END_TOKEN,
    FULL,
    NO_COMPLETION,
    START_SPANS,
    Ending,
    Matcher,
    PartEmitter,
    VersionSpans,
    completion,
    find_ending,
    logprob_speller,
    versions_until,
    with_version,
)
from gpuinfer.text.generator.prompts import Prepared
from gpuinfer.text.language import IncrementalDetokenizer, Language
from gpuinfer.text.language.list_walks import ListedMatcher


class VllmAnswer:
    """One sample's answer as its tokens come."""

    def __init__(self, language: Language, prepared: Prepared, number: int) -> None:
        self._language, self.sampling, self._limit = language, prepared.sampling, prepared.limit
        self._ends = frozenset(() if prepared.sampling.ignore_eos else language.end_tokens)
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] | None = None if prepared.sampling.logprobs is None else []
        begun = prepared.begun[number] if prepared.begun else None
        self.processed: list[float] | None = None
        if prepared.sampling.processed_logprobs:
            self.processed = [] if begun is None else list(begun.processed)
        self.begun: list[int] = [] if begun is None else begun.tokens.tolist()
        self.versions: VersionSpans = START_SPANS if begun is None else begun.versions or START_SPANS
        self.growing: IncrementalDetokenizer | None = None
        self.given: PartEmitter | None = None
        sampling = prepared.sampling
        if sampling.stop or prepared.parts:
            growing = language.detokenizer(sampling.stop, not sampling.skip_special_tokens, prepared.parts)
            characters = growing.begin(self.begun)
            self.growing = growing if sampling.stop else None
            if prepared.parts:
                before, spell = (characters, len(self.begun)), logprob_speller(language, sampling)
                self.given = PartEmitter(number, growing, pushed=bool(sampling.stop), before=before, spell=spell)
        matcher = prepared.matcher if begun is None else begun.matcher
        self.matcher: Matcher | None = None if matcher is None else matcher.copy()
        listed = prepared.sampling.constraint is not None and prepared.sampling.constraint.listed is not None
        self.walk = cast(ListedMatcher, prepared.matcher) if listed else None
        self.tokens += self.begun
        self.end: Ending | None = None if begun is None else begun.ending

    @property
    def watched(self) -> bool:
        """Whether it may end at a token at which vLLM would not end it, or somebody reads along."""
        endless = self.walk is not None and not self._ends  # nothing would end it when its list has
        return self.growing is not None or self.given is not None or endless

    def push(self, tokens: Sequence[int]) -> None:
        """These tokens have been drawn; what comes after the answer's end is dropped."""
        for token in tokens:
            if self.end is not None:
                break
            self.tokens.append(token)
            if token in self._ends:
                self.end = END_TOKEN
            else:
                count = len(self.tokens)
                full = count >= self._limit
                self.end = find_ending(self.sampling, self.growing, self.matcher, token, count, full=full)

    def changed(self, version: str, at: int | None = None) -> None:
        """From token `at` on it is computed by these weights; None: from the next that comes."""
        self.versions = with_version(self.versions, len(self.tokens) if at is None else at, version)

    def more(self) -> Part | None:
        """What has become certain since the last time."""
        if self.given is None:
            return None
        return self.given.more(np.asarray(self.tokens, np.int32), self.logprobs, self.processed, self.versions)

    def complete(self) -> tuple[Completion, Part | None]:
        """The whole answer, and the last part where it is given out."""
        growing = self.growing if self.sampling.stop else None
        answer = completion(
            self._language,
            self.sampling,
            growing,
            self.tokens,
            self.logprobs,
            self.end or FULL,
            self.versions,
            self.processed,
            self.walk,
        )
        return answer, None if self.given is None else self.given.rest(answer)

    def nothing(self) -> tuple[Completion, Part | None]:
        """The answer of which no token is wanted."""
        answer = structs.replace(NO_COMPLETION, versions=versions_until(self.versions, 0))
        return answer, None if self.given is None else self.given.finish(answer)


def logprob_of(token: int, found: Mapping[int, Any], most: int) -> Logprob:
    """One position of vLLM's: token id → its `Logprob`, those of the `most` likeliest and of the chosen one."""
    chosen = found[token]
    likeliest: tuple[Candidate, ...] = ()
    if most:
        ranked = sorted(found.items(), key=lambda item: item[1].rank)
        likeliest = tuple(Candidate(one, float(of.logprob), int(of.rank)) for one, of in ranked)
        likeliest = tuple(one for one in likeliest if 1 <= one.rank <= most)  # 0: a server has not told it
    return Logprob(Candidate(token, float(chosen.logprob), int(chosen.rank)), likeliest)


Outcome = Generation | Exception
NAMELESS = "default"  # vLLM's name for the weights of the start
CLOSE_S = 10.0  # for vLLM to hear that nobody wants its answers any more


class VllmDriver:
    """Asks the engine, and delivers to `deliver` as our own driver does."""

    def __init__(
        self, engine: VllmEngine, generator: Any, adapters: VllmAdapters, *, seed: int, processed: bool
    ) -> None:
        self.generator, self.adapters = generator, adapters
        self.deliver: Callable[[Sequence[tuple[int, Part]], Sequence[tuple[int, Outcome]]], None] | None = None
        self._engine, self._seed, self._processed = engine, seed, processed
        self._tickets = itertools.count()
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Task[None]] = {}
        self._works: dict[int, _Work] = {}
        self._loop = asyncio.get_running_loop()
        self.version = ""  # of the weights

    @property
    def lane(self) -> Lane | None:
        return self._engine.counting.lane

    @lane.setter
    def lane(self, lane: Lane | None) -> None:
        self._engine.counting.lane = lane

    @property
    def on_step(self) -> Callable[[int, float], None] | None:
        return self._engine.counting.on_step

    @on_step.setter
    def on_step(self, told: Callable[[int, float], None]) -> None:
        self._engine.counting.on_step = told

    def submit_all(self, prompts: Sequence[VllmPrompt]) -> Sequence[int]:
        """Answer these; returns their tickets. Raises `BackendDied`."""
        if (dead := self._engine.dead) is not None:
            raise dead
        tickets = [next(self._tickets) for _ in prompts]
        for ticket, asked in zip(tickets, prompts, strict=True):
            self._engine.counting.begin()
            self._open[ticket] = self._loop.create_task(self._serve(ticket, asked))
        return tickets

    def cancel(self, ticket: int) -> None:
        if (task := self._open.get(ticket)) is not None:
            task.cancel()

    def change_version(self, version: str) -> None:
        """What the weights are called that compute from now on."""
        self.version = version
        for work in self._works.values():
            work.change_version(version)

    async def _serve(self, ticket: int, asked: VllmPrompt) -> None:
        outcome: Outcome
        try:
            work = self._works[ticket] = _Work(self, ticket, asked)
            outcome = await work.generation()
        except GpuinferError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  whatever it is, whoever asked must hear of it
            outcome = BackendError(f"vLLM failed on this prompt ({error_text.full_message(error)}). Leave it out.")
        finally:
            del self._open[ticket]
            self._works.pop(ticket, None)
            if not self._open:
                self._engine.counting.rest()
        self.tell((), ((ticket, outcome),))

    def tell(self, parts: Sequence[tuple[int, Part]], outcomes: Sequence[tuple[int, Outcome]]) -> None:
        if self.deliver is not None:
            self.deliver(parts, outcomes)

    def counters(self) -> dict[str, Any]:
        return self._engine.counting.counters()

    def close(self) -> None:
        """Drop what is under way, and end the engine. From another thread than the loop's."""

        async def drop() -> None:
            tasks = tuple(self._open.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(drop(), self._loop).result(CLOSE_S)
        self._engine.close()

    def number(self, ticket: int, sample: int) -> str:
        return f"{ticket}-{sample}-{next(self._numbers)}"


class _Work:
    """One prompt: its samples side by side."""

    def __init__(self, driver: VllmDriver, ticket: int, asked: VllmPrompt) -> None:
        self._driver, self._ticket, self._asked = driver, ticket, asked
        self._engine = driver._engine
        self._prepared = replace(asked.prepared, parts=asked.parts)
        self._sampling: Sampling = self._prepared.sampling
        self._tokens: list[int] = self._prepared.tokens.tolist()
        self._cached = 0
        self._echo: tuple[Logprob | None, ...] | None = None
        self._started = self._first = time.monotonic()
        self._adapter: VllmAdapter | None = None
        raw = self._sampling.logprobs is not None  # and a step gives others
        self._again = raw and driver._processed and not mapping.is_plain(self._sampling)
        self._answers: list[VllmAnswer] = []

    async def generation(self) -> Generation:
        if (name := self._asked.adapter) is not None:
            self._adapter = self._driver.adapters.use(name)
        embedding: bytes | None = None
        try:
            if self._asked.embeds:
                completions, embedding = [NO_COMPLETION], await self._embedding()
            else:
                completions = list(await self._samples())
        finally:
            if self._adapter is not None:
                await self._driver.adapters.release(self._adapter)
        now = time.monotonic()
        return Generation(
            completions=tuple(completions),
            prompt_tokens=len(self._tokens),
            cached_tokens=self._cached,
            prompt_logprobs=self._echo,
            first_token_s=self._first - self._started,
            seconds=now - self._started,
            versions=tuple(dict.fromkeys(version for one in completions for _, version in one.versions)),
            embedding=embedding,
        )

    async def _embedding(self) -> bytes:
        """The pooled state, of length 1."""
        request = VllmRequest(self._driver.number(self._ticket, 0), self._tokens, {}, self._adapter)
        found = np.asarray(await self._engine.embed(request), np.float64)
        return (found / (float(np.linalg.norm(found)) or 1.0)).astype("<f4").tobytes()

    def change_version(self, version: str) -> None:
        """Other weights compute its answers from the next step on."""
        if self._adapter is None:
            for answer in self._answers:
                answer.changed(version)

    async def _samples(self) -> Sequence[Completion]:
        if self._prepared.samples == 1:
            return [await self._sample(0)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._sample(number)) for number in range(self._prepared.samples)]
        except ExceptionGroup as errors:
            raise unwrap(errors) from None
        return [task.result() for task in tasks]

    async def _sample(self, number: int) -> Completion:
        answer = VllmAnswer(self._asked.language, self._prepared, number)
        answer.changed(self._driver.version if self._adapter is None else self._adapter.called)
        self._answers.append(answer)
        completion, part = await self._drawn(answer, number)
        if part is not None:
            self._driver.tell(((self._ticket, part),), ())
        return completion

    async def _drawn(self, answer: VllmAnswer, number: int) -> tuple[Completion, Part | None]:
        """The whole answer, and its last part."""
        drawing = self._prepared.limit > 0
        if not self._prepared.computes(number):
            return answer.nothing() if answer.end is None else answer.complete()
        request = VllmRequest(
            self._driver.number(self._ticket, number),
            self._tokens + answer.begun,
            self._fields(answer, number),
            self._adapter,
            self._asked.grammar,
            growing=answer.watched and drawing,
        )
        async for output in self._engine.generate(request):
            self._take(answer, number, output)
            if answer.end is not None:
                break
            if not self._again and (part := answer.more()) is not None:
                self._driver.tell(((self._ticket, part),), ())
        if self._again and answer.tokens:
            await self._score(answer, number)
        return answer.complete() if drawing or answer.end is not None else answer.nothing()

    def _fields(self, answer: VllmAnswer, number: int) -> dict[str, Any]:
        wanted, begun, prepared = self._sampling, len(answer.begun), self._prepared
        logprobs = None if self._again else wanted.logprobs
        if logprobs is None and wanted.processed_logprobs and wanted.temperature > 0.0:
            logprobs = 0
        sample = prepared.first_sample + number
        fields = mapping.sampling_parameters(
            wanted,
            limit=prepared.limit - begun,
            seed=mapping.vllm_seed(self._driver._seed, wanted, prepared.key, sample, begun),
            ends=self._asked.language.end_tokens,
            logprobs=logprobs,
            growing=answer.watched,
        )
        if begun:
            fields["min_tokens"] = max(0, wanted.min_tokens - begun)
        if self._asked.listed is not None:
            fields["extra_args"] = extra_args(self._asked.listed, answer.begun)
        if number == 0 and wanted.prompt_logprobs is not None:
            fields["prompt_logprobs"] = wanted.prompt_logprobs
        if begun and wanted.logprobs is not None and not self._again:
            fields["prompt_logprobs"] = max(wanted.logprobs, fields.get("prompt_logprobs", 0))
        return fields

    def _take(self, answer: VllmAnswer, number: int, output: Any) -> None:
        """What has come of one sample: tokens, their log-probabilities, and the weights that computed them."""
        (drawn,) = output.outputs
        wanted, count = self._sampling, len(self._tokens)
        if self._first == self._started:  # by vLLM's own clock where its outputs come together at the end
            latency = getattr(output.metrics, "first_token_latency", 0.0) or 0.0
            now = time.monotonic()
            self._first = min(now, self._started + latency) if latency > 0.0 else now
            self._cached = min(int(output.num_cached_tokens or 0), count)
        if (echo := output.prompt_logprobs) is not None:
            if number == 0 and (most := wanted.prompt_logprobs) is not None and self._echo is None:
                pairs = zip(self._tokens, echo[:count], strict=False)
                self._echo = tuple(None if of is None else logprob_of(token, of, most) for token, of in pairs)
            if answer.begun and answer.logprobs is not None and not self._again and not answer.logprobs:
                begun = zip(answer.begun, echo[count:], strict=True)
                answer.logprobs += [logprob_of(token, of, wanted.logprobs or 0) for token, of in begun]
        if self._prepared.limit <= 0 or answer.end is not None:
            return
        tokens, found = list(drawn.token_ids), drawn.logprobs
        if self._adapter is None and not answer.watched:  # where its weights changed while nobody looked
            for span in getattr(drawn, "weight_versions", None) or ():
                if span.start and span.version != NAMELESS:
                    answer.changed(span.version, len(answer.begun) + span.start)
        if answer.logprobs is not None and not self._again and found is not None:
            each = zip(tokens, found, strict=True)
            answer.logprobs += [logprob_of(token, of, wanted.logprobs or 0) for token, of in each]
        if answer.processed is not None:  # of what was drawn from; the likeliest token is taken for certain
            certain = wanted.temperature == 0.0 or found is None
            logprobs = [0.0] * len(tokens)
            if not certain:
                logprobs = [float(of[token].logprob) for token, of in zip(tokens, found, strict=True)]
            answer.processed += logprobs
        answer.push(tokens)

    async def _score(self, answer: VllmAnswer, number: int) -> None:
        """Raw log-probabilities of what was drawn from another distribution, by one more pass over it."""
        most = self._sampling.logprobs or 0
        fields = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": most}
        name = self._driver.number(self._ticket, number)
        request = VllmRequest(name, self._tokens + answer.tokens, fields, self._adapter)
        async for output in self._engine.generate(request):
            found = output.prompt_logprobs[len(self._tokens) :]
            answer.logprobs = [logprob_of(token, of, most) for token, of in zip(answer.tokens, found, strict=True)]
