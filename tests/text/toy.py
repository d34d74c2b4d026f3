"""A decoder whose logits depend on every token before, its position and nothing else; a language of letters;
generators, drivers and backends of them; and the plain loop that judges their answers.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from msgspec import structs

from gpuinfer.api import Backend
from gpuinfer.generation import Completion, Part, Prompt, Sampling
from gpuinfer.text.generator import Driver, Generator
from gpuinfer.text.generator.answer import versions_until
from gpuinfer.text.generator.page_pool import pages_for
from gpuinfer.text.language.grammar import words_of
from gpuinfer.text.language.language import Language
from gpuinfer.text.language.vocabulary import Vocabulary
from gpuinfer.text.model import TextModel
from gpuinfer.text.multi_device import TextDevices
from gpuinfer.text.sampling import Sampler
from gpuinfer.text.transformer import PAGE, Shape, Step

LETTERS = "abcdefghijklmnopqrstuvwxyz .,!?"
END = len(LETTERS)
VOCABULARY = END + 1
SHAPE = Shape(
    family="toy", vocabulary=VOCABULARY, hidden=1, layers=1, heads=1, kv_heads=1, head_dim=1, intermediate=1,
    positions=64, end_tokens=(END,),
)  # fmt: skip
WAIT_S = 60.0
AHEAD = False  # what generators do that are not told
NO_NUMBER = np.uint64(0)  # what is computed of it is not either
NOWHERE = np.uint64(0x9E3779B97F4A7C15)


def mixed(history: np.uint64, token: int, position: int, weights: int = 0) -> np.uint64:
    """SplitMix64 (Steele et al. 2014) over what was before, the token, its place and the weights."""
    with np.errstate(over="ignore"):
        x = (
            history
            ^ np.uint64(weights)
            ^ (np.uint64(token + 1) * np.uint64(0xBF58476D1CE4E5B9))
            ^ (np.uint64(position) << np.uint64(40))
        )
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.uint64(x ^ (x >> np.uint64(31)))


class ToyDecoder:
    """`step.Decoder`. The cache holds two numbers for a position, of all tokens up to it and of all before it: a wrong
    page, position or copy is found, as these form no chain. It checks what a step must be.
    """

    def __init__(self, slots: int, length: int, pages: int | None = None, reads_drawn: bool = False) -> None:
        self.reads_drawn = reads_drawn
        self.shape, self.slots, self.length, self.device = SHAPE, slots, length, torch.device("cpu")
        self.pages = 2 * slots * pages_for(length) if pages is None else pages
        self.cache = np.random.default_rng(0).integers(0, 2**63, (self.pages * PAGE, 2)).astype(np.uint64)
        self.steps: list[Step] = []
        self.copied = 0  # pages
        self.ahead = 0  # steps whose tokens the host had not seen
        self.closed = False
        self.poison: int | None = None  # a token that no step survives
        self.nan: int | None = None  # a token that turns into NaN, with all that its segment brings
        self.room: int | None = None  # tokens of a step for which there is memory
        self.weights = 0  # whatever they are, they change all that is computed
        self.loaded: dict[int, int] = {}  # adapters: numbers that change it too
        self.unloaded: list[int] = []

    def forward(self, step: Step) -> torch.Tensor:
        if step.drawn is not None:
            step = self.looked_up(step)
        self.check(step)
        if self.room is not None and len(step.tokens) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.poison is not None and self.poison in step.tokens:
            raise RuntimeError("a token that this model cannot stand")
        found, place = [], 0
        adapters = np.zeros_like(step.starts) if step.adapters is None else step.adapters
        for pages, start, length, adapter in zip(step.pages, step.starts, step.lengths, adapters.tolist(), strict=True):
            at = places(pages, start + length)
            history = self.cache[at[start - 1], 0] if start else NOWHERE
            weights = self.weights ^ (self.loaded[adapter] if adapter else 0)
            spoilt = history == NO_NUMBER or self.nan in step.tokens[place : place + length]
            for position in range(start, start + length):
                before, history = history, mixed(history, int(step.tokens[place]), position, weights)
                history = NO_NUMBER if spoilt else history
                self.cache[at[position]] = history, before
                found.append(history)
                place += 1
        self.steps.append(
            Step(*(part.copy() for part in (step.tokens, step.pages, step.starts, step.lengths, step.wanted)))
        )
        return logits_of(np.array(found, np.uint64)[step.wanted])

    def looked_up(self, step: Step) -> Step:
        assert self.reads_drawn
        assert len(step.drawn) <= self.slots
        drawn, tokens = np.maximum(step.drawn.numpy(), 0), step.tokens.copy()
        unseen = tokens < 0
        tokens[unseen] = drawn[-1 - tokens[unseen]]
        self.ahead += int(unseen.any())
        return replace(step, tokens=tokens, drawn=None)

    def check(self, step: Step) -> None:
        for part in (step.tokens, step.pages, step.starts, step.lengths, step.wanted):
            assert part.dtype == np.int32
            assert part.flags.c_contiguous
        assert len(step.pages) == len(step.starts) == len(step.lengths) <= self.slots
        assert step.lengths.min() >= 1
        assert step.lengths.sum() == len(step.tokens)
        assert (step.starts >= 0).all()
        assert (step.starts + step.lengths).max() <= self.length
        assert (np.diff(step.wanted) > 0).all()
        assert ((step.tokens >= 0) & (step.tokens < VOCABULARY)).all()
        assert ((step.pages >= 0) & (step.pages < self.pages)).all()
        self.check_pages(step)

    def check_pages(self, step: Step) -> None:
        """Rows share their first pages alone, none that is written, and what the cache holds of a row is whole."""
        before: dict[int, tuple[int, ...]] = {}  # each page, and those before it
        used, written = Counter(), []
        for pages, start, end in zip(step.pages, step.starts, step.starts + step.lengths, strict=True):
            own = pages[: pages_for(end)].tolist()
            for column, page in enumerate(own):
                assert before.setdefault(page, tuple(own[:column])) == tuple(own[:column])
            used.update(own)
            written += own[start // PAGE :]
            chain = self.cache[places(pages, start)]
            assert (chain[:-1, 0] == chain[1:, 1]).all()
            assert not start or chain[0, 1] == NOWHERE
        assert all(used[page] == 1 for page in written)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(sources) == len(targets) == len(set(targets))
        assert not set(sources) & set(targets)
        for source, target in zip(sources, targets, strict=True):
            self.cache[places([target], PAGE)] = self.cache[places([source], PAGE)]
        self.copied += len(targets)

    def pack(self, weights: int) -> int:
        return weights

    def swap(self, packed: int) -> None:
        self.weights = packed

    def pack_adapter(self, adapter: int) -> int:
        return adapter

    def load(self, number: int, packed: int) -> None:
        assert number not in self.loaded
        assert number > 0
        self.loaded[number] = packed

    def unload(self, number: int) -> None:
        del self.loaded[number]
        self.unloaded.append(number)

    def cache_bytes(self) -> int:
        return int(self.cache.nbytes)

    def close(self) -> None:
        self.closed = True

    @property
    def computed(self) -> int:
        """Tokens of all steps."""
        return sum(len(step.tokens) for step in self.steps)


def places(pages: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    """Where the first `count` positions of these pages lie in the cache."""
    positions = np.arange(count)
    return np.asarray(pages)[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE


def logits_of(histories: np.ndarray) -> torch.Tensor:
    """Float32 [histories, vocabulary] from 0 to 6, or NaN."""
    with np.errstate(over="ignore"):
        bits = histories[:, None] * (2 * np.arange(VOCABULARY, dtype=np.uint64) + 1)
    found = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**24 / 6)
    found[histories == NO_NUMBER] = np.nan
    return torch.from_numpy(found)


def toy_language() -> Language:
    return Language(Vocabulary(tuple(LETTERS)), VOCABULARY, (END,), beginning=LETTERS.index(" "))


def toy_generator(
    slots: int = 4,
    length: int = 64,
    step_tokens: int = 32,
    seed: int = 7,
    pages: int | None = None,
    ahead: bool | None = None,
    **more: Any,
) -> Generator:
    """`ahead`: the next step is composed before the tokens are known that the last one draws, as on a CUDA device."""
    decoder = ToyDecoder(slots, length, pages, AHEAD if ahead is None else ahead)
    how = {"seed": seed, "end_tokens": (END,), "step_tokens": step_tokens, "threads": 1, "deterministic": True}
    given = {"gather_steps": 0, "most_parts_s": math.inf, "max_adapters": 8, "read_adapter": int, **more}
    return Generator(decoder, toy_language(), **how, **given)


def prompt(text: str, max_tokens: int = 6, samples: int = 1, **given: object) -> Prompt:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, **given)
    return Prompt(text=text, key=text, samples=samples, sampling=sampling)


def add(generator: Any, *prompts: Prompt, first: int = 0, parts: bool = False) -> None:
    """Under their numbers, from `first` on."""
    for number, prepared in enumerate(generator.prepare(prompts), first):
        generator.add(number, replace(prepared, parts=parts))


def finish(generator: Any, watch: Callable[[Any], object] = lambda stepped: None) -> dict[Any, Any]:
    """The outcomes of all that is under way, by ticket; `watch` is called with each step."""
    outcomes: dict[Any, Any] = {}
    while generator.busy:
        stepped = generator.step()
        watch(stepped)
        for ticket, outcome in stepped.finished:
            assert ticket not in outcomes
            outcomes[ticket] = outcome
    return outcomes


def run(
    generator: Any,
    prompts: Sequence[Prompt],
    parts: list[tuple[int, Part]] | None = None,
    watch: Callable[[Any], object] = lambda stepped: None,
) -> list[Any]:
    """The outcomes of all prompts, as many at once as there are slots for. `parts` is given (number, part), `watch`
    each step.
    """
    outcomes: list[Any] = [None] * len(prompts)
    waiting = []
    for number, prepared in enumerate(generator.prepare(prompts)):
        if isinstance(prepared, Exception):
            outcomes[number] = prepared
        else:
            waiting.append((number, replace(prepared, parts=parts is not None)))
    while waiting or generator.busy:
        while waiting and waiting[0][1].samples <= generator.free_slots:
            generator.add(*waiting.pop(0))
        stepped = generator.step()
        watch(stepped)
        if parts is not None:
            parts.extend(stepped.parts)
        for number, outcome in stepped.finished:
            assert outcomes[number] is None
            outcomes[number] = outcome
    assert generator.free_slots == generator.slots
    return outcomes


class Gate:
    """Holds the decoder before its next step, or the one after so many, until it is opened."""

    def __init__(self, generator: Any, after: int = 0) -> None:
        self.reached, self.open, self._free = threading.Event(), threading.Event(), iter(range(after))
        self._forward = generator.decoder.forward
        generator.decoder.forward = self._held

    def _held(self, step: Step) -> torch.Tensor:
        if next(self._free, None) is None:
            self.reached.set()
            assert self.open.wait(WAIT_S)
        return self._forward(step)


def submitted(driver: Driver, *prompts: Prompt) -> list[Future]:
    futures = []
    for prepared in driver.generator.prepare(prompts):
        futures.append(future := Future())
        driver.submit(prepared, future.set_result)
    return futures


def closing_in_a_thread(driver: Driver) -> threading.Thread:
    """A thread that closes it, once the driver knows."""
    closing = threading.Thread(target=driver.close)
    closing.start()
    until = time.monotonic() + WAIT_S
    while driver.alive:
        assert time.monotonic() < until
        time.sleep(0.001)
    return closing


def alone(
    prompt: Prompt, length: int = 64, seed: int = 7, weights: int = 0, version: str = ""
) -> tuple[Completion, ...]:
    """What a plain loop answers: one row, a fresh cache, the whole prompt at once, then token after token."""
    numbers = range(prompt.first_sample, prompt.first_sample + prompt.samples)
    found = (plain_answer(prompt, number, length, seed, weights) for number in numbers)
    return tuple(structs.replace(one, versions=((0, version),)) for one in found)


def plain_answer(prompt: Prompt, number: int, length: int = 64, seed: int = 7, weights: int = 0) -> Completion:
    """One sample, with the masks of a matcher where the prompt has a constraint."""
    language, sampling = toy_language(), prompt.sampling
    [tokens] = language.encode([prompt])
    assert not isinstance(tokens, Exception)
    answer: list[int] = []
    logprobs: list[Any] = []

    def said(text: str, reason: Any, cause: Any = None, kept: int | None = None) -> Completion:
        tokens = tuple(answer[:kept])
        told = None if sampling.logprobs is None else tuple(logprobs[: len(tokens)])
        return Completion(text=text, tokens=tokens, finish_reason=reason, stop_reason=cause, logprobs=told)

    if not sampling.max_tokens:
        return said("", "length")
    sampler = Sampler(1, VOCABULARY, "cpu", seed=seed, end_tokens=(END,), threads=1, deterministic=True)
    sampler.admit(0, sampling, tokens, prompt.key, number)
    growing, history = language.detokenizer(sampling.stop), NOWHERE
    matcher = None if sampling.constraint is None else language.matcher(sampling.constraint)
    masks = None if matcher is None else np.zeros((1, words_of(VOCABULARY)), np.int32)
    for position, token in enumerate(tokens.tolist()):
        history = mixed(history, token, position, weights)
    while len(answer) < min(sampling.max_tokens, length - len(tokens)):
        if matcher is not None:
            matcher.mask(masks[0])
        drawn = sampler.draw(logits_of(np.array([history], np.uint64)), np.zeros(1, np.int32), masks)
        answer.append(token := int(drawn.tokens[0]))
        logprobs.append(drawn.logprobs[0])
        if token == END and not sampling.ignore_eos:
            return said(language.decode(answer[:-1]), "stop")
        if token in sampling.stop_token_ids:
            return said(language.decode(answer[:-1]), "stop", token)
        stop = growing.push(token)
        if stop is not None and len(answer) >= sampling.min_tokens:
            return said(growing.text, "stop", stop, growing.kept)
        if matcher is not None:
            matcher.advance(token)
            if matcher.complete:
                return said(language.decode(answer), "stop")
        history = mixed(history, token, len(tokens) + len(answer) - 1, weights)
    return said(language.decode(answer), "length")


def joined(parts: Sequence[Part]) -> list[Completion]:
    """The answers that these parts are of, in the order of their numbers. Each ends with its one last part."""
    own: dict[int, list[Part]] = {}
    for part in parts:
        own.setdefault(part.sample, []).append(part)
    assert sorted(own) == list(range(len(own)))
    for one in own.values():
        assert one[-1].finish_reason is not None
        assert all(part.finish_reason is part.stop_reason is None for part in one[:-1])
        assert all(part.text or part.tokens for part in one[:-1])
        assert all(part.logprobs is None or len(part.logprobs) == len(part.tokens) for part in one)
    return [_whole(own[sample]) for sample in sorted(own)]


def _whole(parts: Sequence[Part]) -> Completion:
    def all_of(name: str) -> Any:
        return None if getattr(parts[-1], name) is None else tuple(one for part in parts for one in getattr(part, name))

    return Completion(
        text="".join(part.text for part in parts),
        tokens=all_of("tokens"),
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
        logprobs=all_of("logprobs"),
        processed=all_of("processed"),
        versions=versions_until(all_of("versions"), 1 << 30),
    )


class OfText(Backend):
    """A backend that hands all to `self.text`, which whoever starts it sets."""

    text: TextModel | TextDevices

    async def infer(self, batch):
        raise NotImplementedError

    def stream(self, batch):
        return self.text.stream(batch)

    def cancel(self, request):
        self.text.cancel(request)

    async def close(self):
        await self.text.close()


class Generating(OfText):
    """A backend around one generator."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    async def start(self, context):
        self.driver = Driver(self.generator)
        self.text = TextModel(self.driver, context.stepped)
        self.limits = self.text.limits
