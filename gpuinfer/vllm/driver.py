"""Prompts under way in vLLM, for `text.model.TextModel`: it stands where our own driver does, and has no thread.

Everything happens on one event loop. A prompt is a task; each of its samples is a request of vLLM's own, so that one
can end before the others do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gpuinfer.api import Lane
from gpuinfer.errors import BackendError, GpuinferError
from gpuinfer.generation import Completion, Generation, Logprob, Part, Sampling
from gpuinfer.host import spoken
from gpuinfer.vllm import sampling as mapping
from gpuinfer.vllm.adapters import Adapters, Loaded
from gpuinfer.vllm.answers import Answer, echo_of, logprob_of, processed_of
from gpuinfer.vllm.asking import Asked
from gpuinfer.vllm.engine import Engine
from gpuinfer.vllm.listed import extra_args

Outcome = Generation | Exception
NAMELESS = "default"  # vLLM's name for the weights of the start
CLOSE_S = 10.0  # for vLLM to hear that nobody wants its answers any more


class Driver:
    """Asks the engine, and delivers to `deliver` as our own driver does."""

    def __init__(self, engine: Engine, generator: Any, adapters: Adapters, *, seed: int, processed: bool) -> None:
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

    def submit_all(self, prompts: Sequence[Asked]) -> Sequence[int]:
        """Answer these; returns their tickets. Raises `BackendDied`."""
        if (dead := self._engine.dead) is not None:
            raise dead
        return [self._submit(one) for one in prompts]

    def _submit(self, asked: Asked) -> int:
        ticket = next(self._tickets)
        self._engine.counting.begin()
        self._open[ticket] = self._loop.create_task(self._serve(ticket, asked))
        return ticket

    def cancel(self, ticket: int) -> None:
        if (task := self._open.get(ticket)) is not None:
            task.cancel()

    def change_version(self, version: str) -> None:
        """What the weights are called that compute from now on."""
        self.version = version
        for work in self._works.values():
            work.change_version(version)

    async def _serve(self, ticket: int, asked: Asked) -> None:
        outcome: Outcome
        try:
            work = self._works[ticket] = _Work(self, ticket, asked)
            outcome = await work.generation()
        except GpuinferError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  whatever it is, whoever asked must hear of it
            outcome = BackendError(f"vLLM failed on this prompt ({spoken.in_full(error)}). Leave it out.")
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
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result(CLOSE_S)
        self._engine.close()

    async def _drop(self) -> None:
        tasks = tuple(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def number(self, ticket: int, sample: int) -> str:
        return f"{ticket}-{sample}-{next(self._numbers)}"


class _Work:
    """One prompt: its samples side by side."""

    def __init__(self, driver: Driver, ticket: int, asked: Asked) -> None:
        self._driver, self._ticket, self._asked = driver, ticket, asked
        self._engine = driver._engine
        self._prepared = replace(asked.prepared, parts=asked.parts)
        self._sampling: Sampling = self._prepared.sampling
        self._tokens: list[int] = self._prepared.tokens.tolist()
        self._cached = 0
        self._echo: tuple[Logprob | None, ...] | None = None
        self._started = self._first = time.monotonic()
        self._adapter: Loaded | None = None
        self._again = self._needs_scoring()
        self._answers: list[Answer] = []

    def _needs_scoring(self) -> bool:
        """Whether raw log-probabilities are wanted, and a step gives others."""
        wanted = self._sampling.logprobs is not None
        return wanted and self._driver._processed and not mapping.is_plain(self._sampling)

    async def generation(self) -> Generation:
        if (name := self._asked.adapter) is not None:
            self._adapter = self._driver.adapters.use(name)
        try:
            completions = await self._samples()
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
        )

    def change_version(self, version: str) -> None:
        """Other weights compute its answers from the next step on."""
        if self._adapter is None:
            for answer in self._answers:
                answer.changed(version)

    async def _samples(self) -> Sequence[Completion]:
        count = self._prepared.samples
        if count == 1:
            return [await self._sample(0)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._caught(number)) for number in range(count)]
        outcomes = [task.result() for task in tasks]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return [one for one in outcomes if isinstance(one, Completion)]

    async def _caught(self, number: int) -> Completion | Exception:
        try:
            return await self._sample(number)
        except Exception as error:  # noqa: BLE001  a group of errors says less than the first of them
            return error

    async def _sample(self, number: int) -> Completion:
        answer = Answer(self._asked.language, self._prepared, number)
        answer.changed(self._driver.version if self._adapter is None else self._adapter.called)
        self._answers.append(answer)
        if not self._prepared.computes(number):
            return self._finished(*(answer.nothing() if answer.end is None else answer.complete()))
        growing = answer.watched and self._prepared.limit > 0
        fields = self._fields(answer, number)
        known = self._tokens + answer.begun
        done = False
        async for output in self._asking(number, known, fields, growing):
            if self._took(answer, number, output):
                done = True
                break
            if not self._again and (part := answer.more()) is not None:
                self._driver.tell(((self._ticket, part),), ())
        if self._again and answer.tokens:
            await self._score(answer, number)
        return self._finished(*(answer.complete() if done or self._prepared.limit > 0 else answer.nothing()))

    def _asking(self, number: int, known: Sequence[int], fields: Any, growing: bool) -> Any:
        return self._engine.generate(
            self._driver.number(self._ticket, number),
            known,
            fields,
            adapter=self._adapter,
            grammar=self._asked.grammar,
            growing=growing,
        )

    def _fields(self, answer: Answer, number: int) -> dict[str, Any]:
        wanted, begun = self._sampling, len(answer.begun)
        seed = mapping.seed_of(
            self._driver._seed, wanted, self._prepared.key, self._prepared.first_sample + number, begun
        )
        logprobs = None if self._again else wanted.logprobs
        if logprobs is None and wanted.processed_logprobs and wanted.temperature > 0.0:
            logprobs = 0
        fields = mapping.parameters(
            wanted,
            limit=self._prepared.limit - begun,
            seed=seed,
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

    def _took(self, answer: Answer, number: int, output: Any) -> bool:
        """What has come of one sample. Whether its answer is complete."""
        (drawn,) = output.outputs
        if self._first == self._started:
            self._first = self._first_token(output)
            self._cached = min(int(output.num_cached_tokens or 0), len(self._tokens))
        if output.prompt_logprobs is not None:
            self._note(answer, number, output.prompt_logprobs)
        if self._prepared.limit <= 0 or answer.end is not None:
            return answer.end is not None
        tokens = list(drawn.token_ids)
        if self._adapter is None and not answer.watched:
            self._note_versions(answer, drawn)
        self._note_drawn(answer, tokens, drawn.logprobs)
        return answer.push(tokens)

    def _first_token(self, output: Any) -> float:
        """When it came: by vLLM's own clock where its outputs come together at the end."""
        latency = getattr(output.metrics, "first_token_latency", 0.0) or 0.0
        now = time.monotonic()
        return min(now, self._started + latency) if latency > 0.0 else now

    def _note(self, answer: Answer, number: int, found: Sequence[Any]) -> None:
        """Log-probabilities of the prompt, and of the tokens that the answer had begun with."""
        wanted, count = self._sampling, len(self._tokens)
        if number == 0 and wanted.prompt_logprobs is not None and self._echo is None:
            self._echo = echo_of(self._tokens, found[:count], wanted.prompt_logprobs)
        if answer.begun and answer.logprobs is not None and not self._again and not answer.logprobs:
            most = wanted.logprobs or 0
            pairs = zip(answer.begun, found[count:], strict=True)
            answer.logprobs += [logprob_of(token, of, most) for token, of in pairs]

    def _note_versions(self, answer: Answer, drawn: Any) -> None:
        """Where its weights changed while nobody looked: vLLM's own spans, of the tokens that it drew."""
        for span in getattr(drawn, "weight_versions", None) or ():
            if span.start and span.version != NAMELESS:
                answer.changed(span.version, len(answer.begun) + span.start)

    def _note_drawn(self, answer: Answer, tokens: Sequence[int], found: Sequence[Any] | None) -> None:
        wanted = self._sampling
        if answer.logprobs is not None and not self._again and found is not None:
            answer.logprobs += [
                logprob_of(token, of, wanted.logprobs or 0) for token, of in zip(tokens, found, strict=True)
            ]
        if answer.processed is not None:
            each = found if found is not None else [None] * len(tokens)
            answer.processed += [processed_of(wanted, token, of) for token, of in zip(tokens, each, strict=True)]

    async def _score(self, answer: Answer, number: int) -> None:
        """Raw log-probabilities of what was drawn from another distribution, by one more pass over it."""
        whole = self._tokens + answer.tokens
        most = self._sampling.logprobs or 0
        fields = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": most}
        async for output in self._engine.generate(
            self._driver.number(self._ticket, number), whole, fields, adapter=self._adapter
        ):
            found = output.prompt_logprobs[len(self._tokens) :]
            answer.logprobs = [logprob_of(token, of, most) for token, of in zip(answer.tokens, found, strict=True)]

    def _finished(self, completion: Completion, part: Part | None) -> Completion:
        if part is not None:
            self._driver.tell(((self._ticket, part),), ())
        return completion
