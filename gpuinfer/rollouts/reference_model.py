"""Log-probabilities of the policy's tokens under a reference model: one pass over each context, nothing is drawn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from msgspec import structs

from gpuinfer.api import Infer, ModelSpec, Priority
from gpuinfer.errors import BackendError, BadPrompt, BadResult, PromptTooLong, QueueFull, UsageError, WorkError, unwrap
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.rollouts.record import Group, Turn

AHEAD = 2  # contexts asked for at once, for each slot: one that becomes free finds the next
BESIDE = 8  # of the slots, the part that deferred passes take at most
BACKLOG = 16  # groups that wait for deferred passes, at most: play waits for more
AGAIN_S, TRIES = 0.05, 12_000  # between two tries at a queue that is full, and how many
PROBES = 512  # tokens whose texts are compared


class ReferenceModel:
    """Adds `reference_logprobs` to the turns of trainable trajectories.

    The whole context goes through the model as a prompt (teacher forcing), so that all of it is computed at once and
    contexts of many games share a step. The model is `model`, beside the run's own, or else the run's own without any
    adapter: its base. That one must be what it was at the start: a pass that other weights have computed raises.

    `inline` passes are requests as any other, and a group keeps its place among those that are played until it is
    scored. Those that are not (deferred) give way to play: they are of the lowest class, and have a part of the slots
    at most. A group that cannot be scored raises `WorkError`.
    """

    def __init__(self, infer: Infer, *, inline: bool = True, model: ModelSpec | None = None) -> None:
        self._infer = infer if model is None else infer.beside(model)
        self.inline, self._own = inline, model is None
        self._apart = model is not None  # play does not need these slots
        self._name = "the base model" if model is None else f"'{model.name}'"
        self._room: asyncio.Semaphore | None = None
        self._backlog = asyncio.Semaphore(BACKLOG)
        self._under_way, self._since, self._seconds = 0, 0.0, 0.0
        self.groups = self.tokens = 0  # scored, and how many tokens went through for that

    @property
    def seconds(self) -> float:
        """How long any group has waited for the reference so far."""
        return self._seconds + (time.monotonic() - self._since if self._under_way else 0.0)

    async def ready(self) -> None:
        """Load the model, if it is not the run's own."""
        limits = await self._infer.ready()
        slots = limits.slots or limits.max_rows
        self._room = asyncio.Semaphore(AHEAD * slots if self.inline or self._apart else max(1, slots // BESIDE))

    async def admit(self) -> None:
        """Wait until one more group may be given to `add`, which makes room again."""
        await self._backlog.acquire()

    async def add(self, group: Group) -> Group:
        """The group with the reference's log-probabilities, and `reference_s`. After `admit`."""
        began = time.monotonic()
        self._since = self._since if self._under_way else began
        self._under_way += 1
        try:
            if self._room is None:
                await self.ready()
            trained = [one for game in group.games for one in game.trajectories if one.trainable]
            scores = await _all([self._context(*context) for one in trained for context in one.contexts()])
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._seconds += time.monotonic() - self._since
            self._backlog.release()
        self.groups += 1
        turns, games = chain.from_iterable(scores), []
        for game in group.games:
            trajectories = tuple(
                structs.replace(one, turns=tuple(islice(turns, len(one.turns)))) if one.trainable else one
                for one in game.trajectories
            )
            games.append(structs.replace(game, trajectories=trajectories))
        return structs.replace(group, games=tuple(games), reference_s=time.monotonic() - began)

    async def _context(self, tokens: tuple[int, ...], turns: tuple[Turn, ...]) -> list[Turn]:
        start = len(turns[0].prompt_tokens)
        if start == len(tokens) and len(turns) == 1:  # no token was generated
            return [structs.replace(turns[0], reference_logprobs=())]
        sampling = Sampling(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=start)
        generation = await self._ask(Prompt(tokens=tokens, sampling=sampling, key="reference"))
        self.tokens += len(tokens)
        return list(scored(turns, generation))

    async def _ask(self, prompt: Prompt) -> Generation:
        if self._room is None:
            raise RuntimeError("`ready` comes first")
        async with self._room:
            try:
                found = await self._patiently(prompt)
            except PromptTooLong as error:
                raise WorkError(
                    f"the reference, {self._name}, cannot take a whole game: {error} --context of both must do."
                ) from error
            except (BadPrompt, BackendError) as error:
                raise WorkError(f"the reference, {self._name}, could not score a game: {error}") from error
        if type(found) is not Generation:
            raise BadResult(f"the backend answered a prompt with {found!r:.80}. Use another backend.")
        if self._own and found.versions != ("",):
            raise WorkError(
                f"the reference is the base model, and its weights are those of version '{found.version}' by now. "
                "Name the reference: --ref-model DIR."
            )
        return found

    async def _patiently(self, prompt: Prompt) -> object:
        """Retries at a full queue: play fills the queue too."""
        full = QueueFull()
        for _ in range(TRIES):
            try:
                return await self._infer(prompt, priority=Priority.NORMAL if self.inline else Priority.LOW)
            except QueueFull as error:
                full = error
                await asyncio.sleep(error.retry_after_s or AGAIN_S)
        raise full


async def _all(work: Sequence[Coroutine[Any, Any, list[Turn]]]) -> list[list[Turn]]:
    """Run all at once. The first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            doing = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as group:
        raise unwrap(group) from group
    return [task.result() for task in doing]


def scored(turns: Sequence[Turn], generation: Generation) -> Iterator[Turn]:
    """A context's turns with their reference's log-probabilities, from those of all its tokens.

    Raises `BadResult` where that does not fit.
    """
    known, at = generation.prompt_logprobs or (), 0
    for turn in turns:
        at += len(turn.prompt_tokens)
        of_turn = known[at : at + len(turn.completion_tokens)]
        at += len(turn.completion_tokens)
        chosen = tuple(one.chosen for one in of_turn if one is not None)
        if tuple(one.token for one in chosen) != turn.completion_tokens:
            raise BadResult(
                "the backend told no log-probabilities of these prompt tokens, or those of others. "
                "Use another backend, or --reference none."
            )
        yield structs.replace(turn, reference_logprobs=tuple(one.logprob for one in chosen))


def check_tokens(policy: ModelSpec, reference: ModelSpec) -> None:
    """Raises `UsageError` unless both models mean the same by their tokens, as far as a sample of them shows.

    Reads both tokenizers: not for an event loop.
    """
    from gpuinfer.text.language.transformers_tokenizer import open_model_language

    ways = [open_model_language(spec) for spec in (policy, reference)]
    sizes = [way.vocabulary for way in ways]
    step = max(1, min(sizes) // PROBES)
    texts = [[way.decode([token], True) for token in range(0, min(sizes), step)] for way in ways]
    if sizes[0] > sizes[1] or texts[0] != texts[1]:
        raise UsageError(
            f"--ref-model {reference.name} has other tokens than {policy.name}, so it cannot tell what it thinks of "
            "the same ones. Name a model with the same tokenizer."
        )
