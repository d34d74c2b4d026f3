"""Prompts answered by one route through the generator that serves everybody, with a decoder that is watched: its inputs
and logits, by the tokens that came before. Each route must give the answers that a prompt gets alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import WorkError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.lab.verify.verify_setup import Item, VerifySetup
from gpuinfer.text.transformer import PAGE, Decoder, Step

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
    """A decoder that passes everything on to another one, which it does not own, and remembers.

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
        self._histories: list[list[History]] = [[0] * PAGE for _ in range(decoder.pages)]  # after each position
        self.sights: dict[History, list[ProbedStep]] = defaultdict(list)
        self.rows: dict[History, list[NDArray[np.float32]]] = defaultdict(list)
        self.pages = decoder.pages if pages is None else pages
        self.reads_drawn = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def close(self) -> None:
        """The decoder is somebody else's."""

    def forward(self, step: Step) -> Tensor:
        """See `Decoder.forward`."""
        import torch

        logits = self._decoder.forward(
            Step(step.tokens, self._order[step.pages], step.starts, step.lengths, step.wanted, step.adapters)
        )
        found: list[History] = []  # the history of each token
        for pages, start, length in zip(step.pages.tolist(), step.starts.tolist(), step.lengths.tolist(), strict=True):
            before = self._histories[pages[(start - 1) // PAGE]][(start - 1) % PAGE] if start else 0
            for at, token in enumerate(step.tokens[len(found) : len(found) + length].tolist(), start):
                before = self._histories[pages[at // PAGE]][at % PAGE] = history((token,), before)
                found.append(before)
        wanted = step.wanted.tolist()
        if not wanted:
            return logits
        largest = logits.topk(2, dim=1).values.tolist()
        bits = logits.contiguous().view(torch.int32).sum(dim=1, dtype=torch.int64).tolist()
        for number, (index, (first, second), sum_of_bits) in enumerate(zip(wanted, largest, bits, strict=True)):
            self.sights[found[index]].append(ProbedStep(first, second, sum_of_bits))
            if found[index] in self._watched:
                self.rows[found[index]].append(logits[number].float().cpu().numpy().copy())
        return logits

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._histories[target][:] = self._histories[source]
        self._decoder.copy_pages(self._order[list(sources)].tolist(), self._order[list(targets)].tolist())


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
    from gpuinfer.text.generator import Generator

    probe = DecoderProbe(route.decoder or opened.decoder, route.order, watched, route.pages)
    answers = Answers(route, sights=probe.sights, rows=probe.rows)
    for asks in [[ask] for ask in route.asks] if route.alone else [route.asks]:
        generator = Generator(  # a new one over the old decoder: it knows of nothing that the pages hold
            cast("Decoder", probe),
            opened.language,
            seed=opened.setup.seed,
            end_tokens=opened.language.end_tokens,
            step_tokens=route.step_tokens or opened.longest + max(opened.options.batch_sizes),
            threads=opened.threads,
            deterministic=opened.setup.deterministic,
        )
        try:
            answers.tokens += _through(generator, asks, answers)
        finally:
            generator.sampler.close()
    return answers


def _through(generator: Generator, asks: Sequence[VerifyQuestion], answers: Answers) -> list[list[tuple[int, ...]]]:
    route = answers.route
    prepared = generator.prepare(
        [
            Prompt(
                tokens=tuple(ask.item.tokens.tolist()),
                sampling=route.sampling,
                samples=ask.samples,
                first_sample=ask.first_sample,
                key=_key(ask),
            )
            for ask in asks
        ]
    )
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
            if isinstance(outcome, Exception):
                raise WorkError(f"{route.name}: a prompt failed: {outcome}") from outcome
            found[number] = [completion.tokens for completion in outcome.completions]
            rows -= asks[number].samples
        idle = 0 if stepped.tokens or stepped.finished else idle + 1
        if idle > IDLE_STEPS:
            raise WorkError(f"{route.name}: the generator goes on without doing anything. Please report this.")
    return [found[number] for number in range(len(asks))]


def _key(ask: VerifyQuestion) -> str:
    return f"verify-{ask.number}"


def redrawn(
    opened: VerifySetup, sampling: Sampling, ask: VerifyQuestion, sample: int, position: int, row: NDArray[np.float32]
) -> int:
    """The token that one row of logits gives at this position of an answer, drawn with nothing else about."""
    import torch

    from gpuinfer.text.sampling import Sampler

    device, vocabulary, slot = opened.decoder.device, opened.decoder.shape.vocabulary, np.zeros(1, np.int32)
    sampler = Sampler(
        1,
        vocabulary,
        device,
        seed=opened.setup.seed,
        end_tokens=opened.language.end_tokens,
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
    items, decoder, some = opened.items, opened.decoder, min(SOME, opened.decoder.slots)
    questions = [VerifyQuestion(item, number) for number, item in enumerate(items)]
    shared, both = list[VerifyQuestion](), list[VerifyQuestion]()  # that begin like another; each behind that other
    for ask in questions:
        both.append(ask)
        tokens = ask.item.tokens
        if len(tokens) >= SHARED:  # ends with its end turned round
            cut = 3 * len(tokens) // 4
            like = replace(
                ask.item, text=f"… {ask.item.text}", tokens=np.concatenate([tokens[:cut], tokens[cut:][::-1]])
            )
            shared.append(VerifyQuestion(like, len(items) + len(shared)))
            both.append(shared[-1])
    mixed = [questions[i] for i in np.random.default_rng(opened.setup.seed).permutation(len(items))]
    places = np.arange(decoder.pages, dtype=np.int32)[::-1]
    few = min(decoder.pages, -(-decoder.length // PAGE) + 1)  # hardly more than one row takes, so that others wait
    step_tokens = max(ODD_CHUNK, opened.longest // MOST_STEPS | 1)
    ways = {
        "any order = alone": RouteOptions("another order", mixed, sampling, some),
        "any page = alone": RouteOptions("other pages", questions, sampling, some, order=places),
        "few pages = alone": RouteOptions("few pages", questions, sampling, some, pages=few),
        "in chunks = whole": RouteOptions("in chunks", questions, sampling, some, step_tokens=step_tokens),
        # twice: to take over from rows under way, and from those done
        "shared beginning = own": RouteOptions("shared", both + both[::-1], sampling, some),
    }
    sizes = {f"{size} at once = alone": filled_route(opened, sampling, size) for size in opened.options.batch_sizes}
    return AnswerRoute(RouteOptions("alone", questions + shared, sampling, alone=True), [*(sizes | ways).items()])


def drawn_route(opened: VerifySetup) -> AnswerRoute:
    """The same for tokens that are drawn, and for several answers to one prompt."""
    sampling = Sampling(max_tokens=opened.options.new_tokens, temperature=0.9, top_p=0.95, ignore_eos=True)
    samples = min(SAMPLES, opened.decoder.slots)
    singly = [VerifyQuestion(item, n, j) for n, item in enumerate(opened.items) for j in range(samples)]
    several = [VerifyQuestion(item, n, 0, samples) for n, item in enumerate(opened.items)]
    some = max(samples, min(SOME, opened.decoder.slots))
    routes = [("drawn, at once = alone", RouteOptions("drawn at once", singly, sampling, some))]
    if samples > 1:
        routes.append((f"{samples} samples = one by one", RouteOptions("several samples", several, sampling, some)))
    return AnswerRoute(RouteOptions("drawn alone", singly, sampling, alone=True), routes)


def filled_route(opened: VerifySetup, sampling: Sampling, size: int) -> RouteOptions:
    """So many rows at once; prompts come several times when there are too few."""
    known = [VerifyQuestion(item, number) for number, item in enumerate(opened.items)]
    asks = [known[i % len(known)] for i in range(max(size, len(known)))]
    return RouteOptions(f"{size} at once", asks, sampling, size)
