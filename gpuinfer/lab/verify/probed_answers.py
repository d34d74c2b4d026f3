"""Prompts answered by one route through the generator that serves everybody, with a decoder that is watched: its inputs
and logits, by the tokens that came before. Each route must give the answers that a prompt gets alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import WorkError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.lab.verify.verify_setup import Item, VerifySetup
from gpuinfer.text.transformer import PAGE, Adapter, Decoder, Step, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from gpuinfer.text.generator import Generator

History = int
"""A fingerprint of tokens in their order."""


class ProbedStep(NamedTuple):
    """One row of logits as it left the decoder."""

    largest: float
    second: float
    bits: int  # the sum of the row's bit patterns: unequal sums, unequal bits


def history(tokens: Iterable[int], before: History = 0) -> History:
    """The fingerprint of `tokens` after those of `before`."""
    for token in tokens:
        before = hash((before, int(token)))
    return before


class DecoderProbe:
    """A `step.Decoder` that passes everything on to another one, which it does not own, and remembers.

    `order` gives the pages other places: page i is the other decoder's `order[i]`. Of the histories in `watched` whole
    rows of logits are kept. `pages`: no more than the first so many.
    """

    def __init__(
        self,
        decoder: Decoder,
        order: NDArray[np.int32] | None = None,
        watched: Collection[History] = (),
        pages: int | None = None,
    ) -> None:
        self._decoder, self._watched = decoder, watched
        self._order = np.arange(decoder.pages, dtype=np.int32) if order is None else order
        self._told: list[list[History]] = [
            [0] * PAGE for _ in range(decoder.pages)
        ]  # of each page, after each position
        self.sights: dict[History, list[ProbedStep]] = defaultdict(list)
        self.rows: dict[History, list[NDArray[np.float32]]] = defaultdict(list)
        self.shape, self.slots, self.length = decoder.shape, decoder.slots, decoder.length
        self.pages = decoder.pages if pages is None else pages
        self.device: Any = decoder.device
        self.computes_in, self.reads_drawn = decoder.computes_in, False

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        logits = self._decoder.forward(
            Step(step.tokens, self._order[step.pages], step.starts, step.lengths, step.wanted, step.adapters)
        )
        self._note(self._heard(step), logits)
        return logits

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._told[target][:] = self._told[source]
        self._decoder.copy_pages(self._order[list(sources)].tolist(), self._order[list(targets)].tolist())

    def embedding(self) -> Tensor:
        return self._decoder.embedding()

    def weight_tensors(self) -> Sequence[Tensor]:
        return self._decoder.weight_tensors()

    def pack(self, weights: Weights) -> object:
        return self._decoder.pack(weights)

    def swap(self, packed: object) -> None:
        self._decoder.swap(packed)

    def pack_adapter(self, adapter: Adapter) -> object:
        return self._decoder.pack_adapter(adapter)

    def load(self, number: int, packed: object) -> None:
        self._decoder.load(number, packed)

    def unload(self, number: int) -> None:
        self._decoder.unload(number)

    def cache_bytes(self) -> int:
        return self._decoder.cache_bytes()

    def use(self, threads: int) -> None:
        self._decoder.use(threads)

    def rest(self) -> None:
        self._decoder.rest()

    def close(self) -> None:
        """The decoder is somebody else's."""

    def _heard(self, step: Step) -> list[History]:
        """The history of each token whose logits are asked for."""
        found: list[History] = []
        first = 0
        for pages, start, length in zip(step.pages.tolist(), step.starts.tolist(), step.lengths.tolist(), strict=True):
            before = self._told[pages[(start - 1) // PAGE]][(start - 1) % PAGE] if start else 0
            for at, token in enumerate(step.tokens[first : first + length].tolist(), start):
                before = self._told[pages[at // PAGE]][at % PAGE] = history((token,), before)
                found.append(before)
            first += length
        return [found[index] for index in step.wanted.tolist()]

    def _note(self, heard: list[History], logits: Tensor) -> None:
        if not heard:
            return
        import torch

        largest = logits.topk(2, dim=1).values.tolist()
        bits = logits.contiguous().view(torch.int32).sum(dim=1, dtype=torch.int64).tolist()
        for number, (one, (first, second), sum_of_bits) in enumerate(zip(heard, largest, bits, strict=True)):
            self.sights[one].append(ProbedStep(first, second, sum_of_bits))
            if one in self._watched:
                self.rows[one].append(logits[number].float().cpu().numpy().copy())


IDLE_STEPS = 1000  # that bring nothing, one after another: it will never end


class VerifyQuestion(NamedTuple):
    """One prompt, and which of its answers are wanted."""

    item: Item
    number: int  # the item's: answers to the same number are compared
    first_sample: int = 0
    samples: int = 1


@dataclass(frozen=True)
class RouteOptions:
    """One way to ask. `alone`: each prompt has a generator of its own, so that nothing is shared or left over."""

    name: str
    asks: Sequence[VerifyQuestion]
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

    route: RouteOptions
    tokens: list[list[tuple[int, ...]]] = field(default_factory=list)
    sights: dict[History, list[ProbedStep]] = field(default_factory=dict)
    rows: dict[History, list[NDArray[np.float32]]] = field(default_factory=dict)
    cached: int = 0  # prompt tokens that were taken over from other prompts


def probe_answers(opened: VerifySetup, route: RouteOptions, watched: Collection[History] = ()) -> Answers:
    """Ask everything on the route. Raises `WorkError` when a prompt fails."""
    witness = DecoderProbe(route.decoder or opened.decoder, route.order, watched, route.pages)
    answers = Answers(route, sights=witness.sights, rows=witness.rows)
    for asks in [[ask] for ask in route.asks] if route.alone else [route.asks]:
        generator = _generator(opened, witness, route.step_tokens or opened.longest + opened.largest_batch)
        try:
            answers.tokens += _through(generator, asks, route, answers)
        finally:
            generator.sampler.close()
    return answers


def redrawn(
    opened: VerifySetup, sampling: Sampling, ask: VerifyQuestion, sample: int, position: int, row: NDArray[np.float32]
) -> int:
    """The token that one row of logits gives at this position of an answer, drawn with nothing else about."""
    import torch

    from gpuinfer.text.sampling import Sampler

    device, vocabulary, slot = opened.decoder.device, opened.decoder.shape.vocabulary, np.zeros(1, np.int32)
    ends = opened.language.end_tokens
    sampler = Sampler(
        1,
        vocabulary,
        device,
        seed=opened.setup.seed,
        end_tokens=ends,
        threads=1,
        deterministic=opened.setup.deterministic,
    )
    try:
        sampler.admit(0, sampling, ask.item.tokens, _key(ask), sample)
        for _ in range(position):  # whatever is drawn, the next number is the next position's
            sampler.draw(torch.zeros((1, vocabulary), device=device), slot, None)
        return int(sampler.draw(torch.from_numpy(row.copy())[None].to(device), slot, None).tokens[0])
    finally:
        sampler.close()


def _generator(opened: VerifySetup, witness: DecoderProbe, step_tokens: int) -> Generator:
    """A new one over the old decoder: it knows of nothing that the pages hold."""
    from gpuinfer.text.generator import Generator

    return Generator(
        witness,
        opened.language,
        seed=opened.setup.seed,
        end_tokens=opened.language.end_tokens,
        step_tokens=step_tokens,
        threads=opened.threads,
        deterministic=opened.setup.deterministic,
    )


def _through(
    generator: Generator, asks: Sequence[VerifyQuestion], route: RouteOptions, answers: Answers
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


def _tokens(route: RouteOptions, outcome: Generation | Exception) -> list[tuple[int, ...]]:
    if isinstance(outcome, Exception):
        raise WorkError(f"{route.name}: a prompt failed: {outcome}") from outcome
    return [completion.tokens for completion in outcome.completions]


def _prompt(ask: VerifyQuestion, sampling: Sampling) -> Prompt:
    return Prompt(
        tokens=tuple(ask.item.tokens.tolist()),
        sampling=sampling,
        samples=ask.samples,
        first_sample=ask.first_sample,
        key=_key(ask),
    )


def _key(ask: VerifyQuestion) -> str:
    return f"verify-{ask.number}"


SAMPLES = 3
SOME = 8  # rows at once where the number does not matter
SHARED = 24  # tokens that a prompt must have to lend its beginning
MOST_STEPS = 16  # that the longest prompt is cut into
ODD_CHUNK = 7


@dataclass(frozen=True)
class AnswerRoute:
    """The reference of several routes, and what each route shows."""

    reference: RouteOptions
    routes: list[tuple[str, RouteOptions]]


def likeliest_route(opened: VerifySetup) -> AnswerRoute:
    """All the ways to ask for the likeliest tokens."""
    sampling = Sampling(max_tokens=opened.options.new_tokens, temperature=0.0, ignore_eos=True)
    items, shared = opened.items, shared_beginnings(opened.items)
    some = min(SOME, opened.decoder.slots)
    draw = np.random.default_rng(opened.setup.seed)
    mixed = [items[i] for i in draw.permutation(len(items))]
    places = np.arange(opened.decoder.pages, dtype=np.int32)[::-1]
    alone = RouteOptions(
        "alone", verify_questions(items) + verify_questions(shared, first=len(items)), sampling, alone=True
    )
    return AnswerRoute(
        alone,
        [
            *((f"{size} at once = alone", filled_route(opened, sampling, size)) for size in opened.options.batch_sizes),
            ("any order = alone", RouteOptions("another order", verify_questions(mixed, items), sampling, some)),
            ("any page = alone", RouteOptions("other pages", verify_questions(items), sampling, some, order=places)),
            (
                "few pages = alone",
                RouteOptions("few pages", verify_questions(items), sampling, some, pages=few_pages(opened)),
            ),
            (
                "in chunks = whole",
                RouteOptions("in chunks", verify_questions(items), sampling, some, step_tokens=chunk(opened.longest)),
            ),
            ("shared beginning = own", RouteOptions("shared", shared_questions(items, shared), sampling, some)),
        ],
    )


def drawn_routes(opened: VerifySetup) -> Iterator[AnswerRoute]:
    """The same for tokens that are drawn, and for several answers to one prompt."""
    sampling = Sampling(max_tokens=opened.options.new_tokens, temperature=0.9, top_p=0.95, ignore_eos=True)
    samples = min(SAMPLES, opened.decoder.slots)
    singly = [replace_sample(ask, j) for ask in verify_questions(opened.items) for j in range(samples)]
    several = [ask._replace(samples=samples) for ask in verify_questions(opened.items)]
    some = max(samples, min(SOME, opened.decoder.slots))
    routes = [("drawn, at once = alone", RouteOptions("drawn at once", singly, sampling, some))]
    if samples > 1:
        routes.append((f"{samples} samples = one by one", RouteOptions("several samples", several, sampling, some)))
    yield AnswerRoute(RouteOptions("drawn alone", singly, sampling, alone=True), routes)


def filled_route(opened: VerifySetup, sampling: Sampling, size: int) -> RouteOptions:
    """So many rows at once; prompts come several times when there are too few."""
    known = verify_questions(opened.items)
    return RouteOptions(
        f"{size} at once", [known[i % len(known)] for i in range(max(size, len(known)))], sampling, size
    )


def verify_questions(items: list[Item], numbered: list[Item] | None = None, first: int = 0) -> list[VerifyQuestion]:
    """One for each item; its number is its place in `numbered`."""
    places = {id(item): number for number, item in enumerate(numbered or items, first)}
    return [VerifyQuestion(item, places[id(item)]) for item in items]


def replace_sample(ask: VerifyQuestion, sample: int) -> VerifyQuestion:
    return ask._replace(first_sample=sample)


def shared_beginnings(items: list[Item]) -> list[Item]:
    """For each prompt that is long enough another one, which begins like it and ends with its end turned round."""
    return [
        replace(item, text=f"… {item.text}", tokens=np.concatenate([item.tokens[:cut], item.tokens[cut:][::-1]]))
        for item in items
        if (cut := 3 * len(item.tokens) // 4) and len(item.tokens) >= SHARED
    ]


def shared_questions(items: list[Item], shared: list[Item]) -> list[VerifyQuestion]:
    """Each prompt and the one that begins like it, twice: to take over from rows under way, and from those done."""
    own, others = verify_questions(items), iter(verify_questions(shared, first=len(items)))
    found = []
    for ask in own:
        found.append(ask)
        if len(ask.item.tokens) >= SHARED:
            found.append(next(others))
    return found + found[::-1]


def few_pages(opened: VerifySetup) -> int:
    """Hardly more than one row takes, so that others wait, or give theirs back and are computed again."""
    return min(opened.decoder.pages, -(-opened.decoder.length // PAGE) + 1)


def chunk(longest: int) -> int:
    return max(ODD_CHUNK, longest // MOST_STEPS | 1)
