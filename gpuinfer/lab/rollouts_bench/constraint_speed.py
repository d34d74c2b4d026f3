"""What constrained decoding costs, piece by piece: build, advance, mask, apply.

The vocabulary and the legal orders are made up from a seed, of the size that large models and large games such as
Diplomacy have.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gpuinfer.text.language.detokenizer import Encoded
    from gpuinfer.text.language.list_trie import Trie, Tries
    from gpuinfer.text.language.list_walks import ListedMatcher

PLACES = 75  # of the map
UNITS = 17  # that one power may have at most
ORDER_WORDS = (" A", " F", " S", " C", " H", " -", ">\n", "</", "orders")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class SyntheticVocabulary:
    """`size` tokens: the bytes, the words of orders, and words of no order. A `Codec`: the longest token first."""

    def __init__(self, size: int, seed: int = 0) -> None:
        from gpuinfer.text.language.detokenizer import Spelling

        dice = random.Random(seed)
        words = [*(f" {word}" for word in counted_places(dice)), *ORDER_WORDS]
        known = dict.fromkeys([bytes([byte]) for byte in range(256)] + [word.encode() for word in words])
        while len(known) < size:
            known[" ".join("".join(dice.choices(LETTERS, k=3)).lower() for _ in range(2)).encode()] = None
        self.pieces, self.size = list(known), size
        self.tokens = {piece: token for token, piece in enumerate(self.pieces)}
        self.hidden: frozenset[int] = frozenset()
        self.spelling = self.literal = Spelling(True, self.pieces.__getitem__)

    def encode(self, texts: Sequence[str], special_tokens: bool) -> list[Encoded]:
        return [np.array(list(self._tokens(text.encode())), np.int32) for text in texts]

    def decode(self, tokens: Sequence[int], special_tokens: bool = False) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")

    def _tokens(self, text: bytes) -> list[int]:
        found, place = [], 0
        while place < len(text):
            end = min(len(text), place + 8)
            while text[place:end] not in self.tokens:
                end -= 1
            found.append(self.tokens[text[place:end]])
            place = end
        return found


def counted_places(dice: random.Random) -> list[str]:
    return [
        "".join(word) for word in dice.sample([(a, b, c) for a in LETTERS for b in LETTERS for c in "AEIOU"], PLACES)
    ]


def drawn_orders(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """So many orders, with the unit that each is for; no two are alike."""
    names, dice = counted_places(random.Random(seed)), random.Random(seed + 1)
    found: dict[str, str] = {}
    while len(found) < count:
        unit, kind = dice.choice(names[:UNITS]), dice.choice("AF")
        one, other = dice.sample(names, 2)
        text = dice.choice([
            f" {kind} {unit} H", f" {kind} {unit} - {one}", f" {kind} {unit} S A {one}",
            f" {kind} {unit} S A {one} - {other}", f" F {unit} C A {one} - {other}",
        ])  # fmt: skip
        found.setdefault(text, unit)
    return [(unit, text) for text, unit in found.items()]


ROWS, VOCABULARY, ORDERS = 32, 152_064, 2_000
STEPS = 300  # that are timed of each
TURN = 10  # calls of one before the other has its turn


@dataclass(frozen=True, slots=True)
class ConstraintCost:
    """One line of the table. `ratio`: to the time of what `beside` names."""

    name: str
    ms: float  # the median
    beside: str = ""
    beside_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if not self.beside_ms else self.ms / self.beside_ms

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def measure_constraints(
    rows: int = ROWS, vocabulary: int = VOCABULARY, count: int = ORDERS, steps: int = STEPS, *, threads: int = 1
) -> list[ConstraintCost]:
    """For a batch of so many rows, each in a list of `count` orders. Takes some seconds."""
    bench = ConstraintBench(rows, vocabulary, count, threads)
    return [
        bench.build(max(5, steps // 10)),
        *bench.steps(steps),
        *bench.pieces(steps),
        *bench.processor(max(10, steps // 5)),
    ]


class ConstraintBench:
    """One list and its rows. `walks` hold the rows, each at a place of its own in the list."""

    def __init__(self, rows: int, vocabulary: int, count: int, threads: int = 1) -> None:
        from gpuinfer.generation import Listed
        from gpuinfer.text.language.list_trie import Tries
        from gpuinfer.text.language.list_walks import ListedMatcher

        self.codec = SyntheticVocabulary(vocabulary)
        self.listed = Listed(items=tuple(drawn_orders(count)))
        self.tries: Tries = Tries(self.codec, vocabulary)
        self.trie: Trie = self.tries.trie(self.listed)
        self.rows, self.vocabulary, self.threads = rows, vocabulary, threads
        self.slots = np.arange(rows, dtype=np.int32)
        self.start: ListedMatcher = ListedMatcher(self.tries.token_bytes(), self.trie)
        for token in self.codec.encode([self.listed.begin], False)[0]:  # type: ignore[union-attr]
            self.start.advance(int(token))
        self.walks, dice = self.start.new_walks(rows), random.Random(0)
        for row in range(rows):  # inside their lists, each some tokens on
            self.walks.seat(row, self.start)
            own = self.slots[row : row + 1]
            for _ in range(dice.randrange(20)):
                if (rules := self.walks.rules(own)) is None:
                    raise ValueError("a row has left its list.")
                token = dice.choice(rules.ids[: rules.starts[1]].tolist())
                if self.walks.advance(own, np.array([token], np.int32))[0]:
                    self.walks.seat(row, self.start)

    def build(self, times: int) -> ConstraintCost:
        """From the tokens of all lines to the compiled list."""
        from gpuinfer.text.language.list_trie import build_trie, spelt_lines, tag_of

        said = self.tries.token_bytes()
        lines, tag = spelt_lines(self.listed, self.codec, said), tag_of(self.listed.begin, said)
        (taken,) = _in_turns([lambda: build_trie(lines, tag, said, True)], times)
        return ConstraintCost(f"build {len(self.listed.items)} orders", taken)

    def steps(self, times: int) -> Iterator[ConstraintCost]:
        """What the own engine does in a step, with lists of tokens and with masks."""
        import torch

        from gpuinfer.generation import Sampling
        from gpuinfer.text.sampling import Sampler

        logits = torch.randn(self.rows, self.vocabulary, generator=torch.Generator().manual_seed(0))
        sampler = Sampler(
            self.rows, self.vocabulary, "cpu", seed=0, end_tokens=(self.vocabulary - 1,), threads=self.threads
        )
        for slot in range(self.rows):
            sampler.admit(slot, Sampling(), np.zeros(1, np.int32), str(slot))
        masks = np.zeros((self.rows, -(-self.vocabulary // 32)), np.int32)

        def listed() -> None:
            rules = self.walks.rules(self.slots)
            self._go_on(sampler.draw(logits, self.slots, None, rules).tokens)

        def masked() -> None:
            self._mask(masks)
            self._go_on(sampler.draw(logits, self.slots, masks).tokens)

        few, dense = _in_turns([listed, masked], times)
        yield ConstraintCost("one step of the own engine: allowed tokens, draw, advance", few, "with masks", dense)

    def pieces(self, times: int) -> Iterator[ConstraintCost]:
        """The parts of such a step that are the list's."""
        rules = self.walks.rules(self.slots)
        if rules is None:
            raise ValueError("no row is in a list.")
        tokens = rules.ids[rules.starts[:-1]].copy()
        masks = np.zeros((self.rows, -(-self.vocabulary // 32)), np.int32)
        fresh = self.start.new_walks(self.rows)

        def advance() -> None:
            fresh.advance(self.slots, tokens)

        def sit() -> None:
            for row in range(self.rows):
                fresh.take(row, self.walks, row)

        sit()
        times_taken = []
        for _ in range(times):
            sit()
            times_taken.append(_timed(advance))
        yield ConstraintCost("advance", 1e3 * median(times_taken))
        few, dense = _in_turns([lambda: self.walks.rules(self.slots), lambda: self._mask(masks)], times)
        yield ConstraintCost("allowed tokens", few, "as masks", dense)

    def processor(self, times: int) -> Iterator[ConstraintCost]:
        """What vLLM's processors do to the logits."""
        import torch

        from gpuinfer.backends.vllm_engine.list_constraints import mask_logits

        logits = torch.randn(self.rows, self.vocabulary, generator=torch.Generator().manual_seed(0))
        filled = logits.clone()
        rules = self.walks.rules(self.slots)
        if rules is None:
            raise ValueError("no row is in a list.")

        def apply() -> None:
            mask_logits(logits, self.slots, self.walks.rules(self.slots))

        kept, bare = _in_turns([apply, lambda: filled.fill_(-torch.inf)], times)
        yield ConstraintCost("vLLM's processor on the logits", kept, "filling them", bare)

    def _go_on(self, tokens: Any) -> None:
        outcomes = self.walks.advance(self.slots, tokens)
        if outcomes.any():  # the list is complete: another begins
            for row in np.flatnonzero(outcomes).tolist():
                self.walks.seat(row, self.start)

    def _mask(self, into: Any) -> None:
        """One bit for each token, as for grammars."""
        rules = self.walks.rules(self.slots)
        if rules is None:
            raise ValueError("no row is in a list.")
        into.fill(0)
        for row in range(self.rows):
            ids = rules.ids[rules.starts[row] : rules.starts[row + 1]]
            np.bitwise_or.at(
                into[row], ids >> 5, np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32)).view(np.int32)
            )


def _timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _in_turns(runs: Sequence[Callable[[], object]], times: int) -> list[float]:
    """The medians of several in milliseconds, in turns of some calls each: what one leaves in the caches is not counted
    to the other, but to its first call there.
    """
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(-(-times // TURN)):
        for run, column in zip(runs, taken, strict=True):
            run()
            column += [_timed(run) for _ in range(TURN)]
    return [1e3 * median(column) for column in taken]
