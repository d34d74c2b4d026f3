"""Prompts asked in one way, through the same generator that serves everybody else.

The ways to ask. Each must give the answers that a prompt gets alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import WorkError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.text.step import PAGE
from gpuinfer.verifying.rig import Item, Rig
from gpuinfer.verifying.witness import History, Sight, Witness

if TYPE_CHECKING:
    from gpuinfer.text.generator import Generator
    from gpuinfer.text.step import Decoder

IDLE_STEPS = 1000  # that bring nothing, one after another: it will never end


class Question(NamedTuple):
    """One prompt, and which of its answers are wanted."""

    item: Item
    number: int  # the item's: answers to the same number are compared
    first_sample: int = 0
    samples: int = 1


@dataclass(frozen=True)
class Route:
    """One way to ask. `alone`: each prompt has a generator of its own, so that nothing is shared or left over."""

    name: str
    asks: Sequence[Question]
    sampling: Sampling
    batch: int = 1
    alone: bool = False
    step_tokens: int | None = None  # None: whole prompts
    order: NDArray[np.int32] | None = None  # of the pages
    pages: int | None = None  # None: all that there are
    decoder: Decoder | None = None  # None: the rig's


@dataclass
class Answers:
    """What came of a route. `tokens[i][j]` is sample j of ask i."""

    route: Route
    tokens: list[list[tuple[int, ...]]] = field(default_factory=list)
    sights: dict[History, list[Sight]] = field(default_factory=dict)
    rows: dict[History, list[NDArray[np.float32]]] = field(default_factory=dict)
    cached: int = 0  # prompt tokens that were taken over from other prompts


def asked(rig: Rig, route: Route, watched: Collection[History] = ()) -> Answers:
    """Ask everything on the route. Raises `WorkError` when a prompt fails."""
    witness = Witness(route.decoder or rig.decoder, route.order, watched, route.pages)
    answers = Answers(route, sights=witness.sights, rows=witness.rows)
    for asks in [[ask] for ask in route.asks] if route.alone else [route.asks]:
        generator = _generator(rig, witness, route.step_tokens or rig.longest + rig.largest_batch)
        try:
            answers.tokens += _through(generator, asks, route, answers)
        finally:
            generator.sampler.close()
    return answers


def redrawn(rig: Rig, sampling: Sampling, ask: Question, sample: int, position: int, row: NDArray[np.float32]) -> int:
    """The token that one row of logits gives at this position of an answer, drawn with nothing else about."""
    import torch

    from gpuinfer.text.sampling import Sampler

    device, vocabulary, slot = rig.decoder.device, rig.decoder.shape.vocabulary, np.zeros(1, np.int32)
    ends = rig.language.end_tokens
    sampler = Sampler(
        1, vocabulary, device, seed=rig.setup.seed, end_tokens=ends, threads=1, deterministic=rig.setup.deterministic
    )
    try:
        sampler.admit(0, sampling, ask.item.tokens, _key(ask), sample)
        for _ in range(position):  # whatever is drawn, the next number is the next position's
            sampler.draw(torch.zeros((1, vocabulary), device=device), slot, None)
        return int(sampler.draw(torch.from_numpy(row.copy())[None].to(device), slot, None).tokens[0])
    finally:
        sampler.close()


def _generator(rig: Rig, witness: Witness, step_tokens: int) -> Generator:
    """A new one over the old decoder: it knows of nothing that the pages hold."""
    from gpuinfer.text.generator import Generator

    return Generator(
        witness,
        rig.language,
        seed=rig.setup.seed,
        end_tokens=rig.language.end_tokens,
        step_tokens=step_tokens,
        threads=rig.threads,
        deterministic=rig.setup.deterministic,
    )


def _through(
    generator: Generator, asks: Sequence[Question], route: Route, answers: Answers
) -> list[list[tuple[int, ...]]]:
    prepared = generator.prepare([_prompt(ask, route.sampling) for ask in asks])
    for one in prepared:
        if isinstance(one, Exception):
            raise WorkError(f"{route.name}: a prompt was refused: {one}") from one
    waiting, rows, idle = deque(enumerate(prepared)), 0, 0
    found: dict[int, list[tuple[int, ...]]] = {}
    while waiting or generator.busy:
        while waiting and (not rows or rows + asks[waiting[0][0]].samples <= route.batch):
            ticket, one = waiting.popleft()
            generator.add(ticket, one)  # type: ignore[arg-type]  # the refused ones are gone
            rows += asks[ticket].samples
        stepped = generator.step()
        answers.cached += stepped.cached
        for done, outcome in stepped.finished:
            number = cast(int, done)  # the tickets are ours
            found[number] = _tokens(route, outcome)
            rows -= asks[number].samples
        idle = 0 if stepped.tokens or stepped.finished else idle + 1
        if idle > IDLE_STEPS:
            raise WorkError(f"{route.name}: the generator goes on without doing anything. Please report this.")
    return [found[number] for number in range(len(asks))]


def _tokens(route: Route, outcome: Generation | Exception) -> list[tuple[int, ...]]:
    if isinstance(outcome, Exception):
        raise WorkError(f"{route.name}: a prompt failed: {outcome}") from outcome
    return [completion.tokens for completion in outcome.completions]


def _prompt(ask: Question, sampling: Sampling) -> Prompt:
    return Prompt(
        tokens=tuple(ask.item.tokens.tolist()),
        sampling=sampling,
        samples=ask.samples,
        first_sample=ask.first_sample,
        key=_key(ask),
    )


def _key(ask: Question) -> str:
    return f"verify-{ask.number}"


SAMPLES = 3
SOME = 8  # rows at once where the number does not matter
SHARED = 24  # tokens that a prompt must have to lend its beginning
MOST_STEPS = 16  # that the longest prompt is cut into
ODD_CHUNK = 7


@dataclass(frozen=True)
class Way:
    """The reference of several routes, and what each route shows."""

    reference: Route
    routes: list[tuple[str, Route]]


def likeliest(rig: Rig) -> Way:
    """All the ways to ask for the likeliest tokens."""
    sampling = Sampling(max_tokens=rig.options.new_tokens, temperature=0.0, ignore_eos=True)
    items, shared = rig.items, shared_beginnings(rig.items)
    some = min(SOME, rig.decoder.slots)
    draw = np.random.default_rng(rig.setup.seed)
    mixed = [items[i] for i in draw.permutation(len(items))]
    places = np.arange(rig.decoder.pages, dtype=np.int32)[::-1]
    alone = Route("alone", asks(items) + asks(shared, first=len(items)), sampling, alone=True)
    return Way(
        alone,
        [
            *((f"{size} at once = alone", filled(rig, sampling, size)) for size in rig.options.batch_sizes),
            ("any order = alone", Route("another order", asks(mixed, items), sampling, some)),
            ("any page = alone", Route("other pages", asks(items), sampling, some, order=places)),
            ("few pages = alone", Route("few pages", asks(items), sampling, some, pages=few_pages(rig))),
            ("in chunks = whole", Route("in chunks", asks(items), sampling, some, step_tokens=chunk(rig.longest))),
            ("shared beginning = own", Route("shared", lent(items, shared), sampling, some)),
        ],
    )


def drawn(rig: Rig) -> Iterator[Way]:
    """The same for tokens that are drawn, and for several answers to one prompt."""
    sampling = Sampling(max_tokens=rig.options.new_tokens, temperature=0.9, top_p=0.95, ignore_eos=True)
    samples = min(SAMPLES, rig.decoder.slots)
    singly = [replace_sample(ask, j) for ask in asks(rig.items) for j in range(samples)]
    several = [ask._replace(samples=samples) for ask in asks(rig.items)]
    some = max(samples, min(SOME, rig.decoder.slots))
    routes = [("drawn, at once = alone", Route("drawn at once", singly, sampling, some))]
    if samples > 1:
        routes.append((f"{samples} samples = one by one", Route("several samples", several, sampling, some)))
    yield Way(Route("drawn alone", singly, sampling, alone=True), routes)


def filled(rig: Rig, sampling: Sampling, size: int) -> Route:
    """So many rows at once; prompts come several times when there are too few."""
    known = asks(rig.items)
    return Route(f"{size} at once", [known[i % len(known)] for i in range(max(size, len(known)))], sampling, size)


def asks(items: list[Item], numbered: list[Item] | None = None, first: int = 0) -> list[Question]:
    """One for each item; its number is its place in `numbered`."""
    places = {id(item): number for number, item in enumerate(numbered or items, first)}
    return [Question(item, places[id(item)]) for item in items]


def replace_sample(ask: Question, sample: int) -> Question:
    return ask._replace(first_sample=sample)


def shared_beginnings(items: list[Item]) -> list[Item]:
    """For each prompt that is long enough another one, which begins like it and ends with its end turned round."""
    return [
        replace(item, text=f"… {item.text}", tokens=np.concatenate([item.tokens[:cut], item.tokens[cut:][::-1]]))
        for item in items
        if (cut := 3 * len(item.tokens) // 4) and len(item.tokens) >= SHARED
    ]


def lent(items: list[Item], shared: list[Item]) -> list[Question]:
    """Each prompt and the one that begins like it, twice: to take over from rows under way, and from those done."""
    own, others = asks(items), iter(asks(shared, first=len(items)))
    found = []
    for ask in own:
        found.append(ask)
        if len(ask.item.tokens) >= SHARED:
            found.append(next(others))
    return found + found[::-1]


def few_pages(rig: Rig) -> int:
    """Hardly more than one row takes, so that others wait, or give theirs back and are computed again."""
    return min(rig.decoder.pages, -(-rig.decoder.length // PAGE) + 1)


def chunk(longest: int) -> int:
    return max(ODD_CHUNK, longest // MOST_STEPS | 1)
