"""What decoding between tags costs, piece by piece: build, advance, mask, apply.

In the own engine a step is what may come in each row, a draw among that alone, and the advance of all rows; beside it
the same with a mask over the whole vocabulary. In vLLM it is what the processor does to a batch of logits; beside it
filling them with one value, which any mask must do at least. Both of a pair are timed in turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuinfer.bench.rollouts.orders import Vocabulary, orders

if TYPE_CHECKING:
    from gpuinfer.text.language.trie.matcher import ListedMatcher, SeatedWalks
    from gpuinfer.text.language.trie.trie import Trie, Tries

ROWS, VOCABULARY, ORDERS = 32, 152_064, 2_000
STEPS = 300  # that are timed of each
TURN = 10  # calls of one before the other has its turn


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the table. `ratio`: to what stands beside it, for which `beside` says what it is."""

    name: str
    ms: float  # the median
    beside: str = ""
    beside_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if not self.beside_ms else self.ms / self.beside_ms

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


def measure(
    rows: int = ROWS, vocabulary: int = VOCABULARY, count: int = ORDERS, steps: int = STEPS, *, threads: int = 1
) -> list[Cost]:
    """For a batch of so many rows, each in a list of `count` orders. Takes some seconds."""
    bench = Bench(rows, vocabulary, count, threads)
    return [
        bench.build(max(5, steps // 10)),
        *bench.steps(steps),
        *bench.pieces(steps),
        *bench.processor(max(10, steps // 5)),
    ]


class Bench:
    """One list and its rows. `walks` hold the rows, each at a place of its own in the list."""

    def __init__(self, rows: int, vocabulary: int, count: int, threads: int = 1) -> None:
        from gpuinfer.generation import Listed
        from gpuinfer.text.language.trie.matcher import ListedMatcher
        from gpuinfer.text.language.trie.trie import Tries

        self.codec = Vocabulary(vocabulary)
        self.listed = Listed(items=tuple(orders(count)))
        self.tries: Tries = Tries(self.codec, vocabulary)
        self.trie: Trie = self.tries.trie(self.listed)
        self.rows, self.vocabulary, self.threads = rows, vocabulary, threads
        self.slots = np.arange(rows, dtype=np.int32)
        self.start: ListedMatcher = ListedMatcher(self.tries.said(), self.trie)
        for token in self.codec.encode([self.listed.begin], False)[0]:  # type: ignore[union-attr]
            self.start.advance(int(token))
        self.walks = self._scattered()

    def _scattered(self) -> SeatedWalks:
        """All rows inside their lists, each some tokens on."""
        walks, dice = self.start.many(self.rows), random.Random(0)
        for row in range(self.rows):
            walks.sit(row, self.start)
            for _ in range(dice.randrange(20)):
                self._say(walks, row, dice)
        return walks

    def _say(self, walks: SeatedWalks, row: int, dice: random.Random) -> None:
        rules = walks.rules(self.slots[row : row + 1])
        if rules is None:
            raise ValueError("a row has left its list.")
        token = dice.choice(rules.ids[: rules.starts[1]].tolist())
        if walks.advance(self.slots[row : row + 1], np.array([token], np.int32))[0]:
            walks.sit(row, self.start)

    def build(self, times: int) -> Cost:
        """From the tokens of all lines to the compiled list."""
        from gpuinfer.text.language.trie.lines import lines_of
        from gpuinfer.text.language.trie.tag import tag_of
        from gpuinfer.text.language.trie.trie import build

        said = self.tries.said()
        lines, tag = lines_of(self.listed, self.codec, said), tag_of(self.listed.begin, said)
        return Cost(f"build {len(self.listed.items)} orders", _median(lambda: build(lines, tag, said, True), times))

    def steps(self, times: int) -> Iterator[Cost]:
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
        yield Cost("one step of the own engine: allowed tokens, draw, advance", few, "with masks", dense)

    def pieces(self, times: int) -> Iterator[Cost]:
        """The parts of such a step that are the list's."""
        rules = self.walks.rules(self.slots)
        if rules is None:
            raise ValueError("no row is in a list.")
        tokens = rules.ids[rules.starts[:-1]].copy()
        masks = np.zeros((self.rows, -(-self.vocabulary // 32)), np.int32)
        fresh = self.start.many(self.rows)

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
        yield Cost("advance", 1e3 * median(times_taken))
        few, dense = _in_turns([lambda: self.walks.rules(self.slots), lambda: self._mask(masks)], times)
        yield Cost("allowed tokens", few, "as masks", dense)

    def processor(self, times: int) -> Iterator[Cost]:
        """What vLLM's processors do to the logits."""
        import torch

        from gpuinfer.vllm.applying import keep

        logits = torch.randn(self.rows, self.vocabulary, generator=torch.Generator().manual_seed(0))
        filled = logits.clone()
        rules = self.walks.rules(self.slots)
        if rules is None:
            raise ValueError("no row is in a list.")

        def apply() -> None:
            keep(logits, self.slots, self.walks.rules(self.slots))

        kept, bare = _in_turns([apply, lambda: filled.fill_(-torch.inf)], times)
        yield Cost("vLLM's processor on the logits", kept, "filling them", bare)

    def _go_on(self, tokens: Any) -> None:
        outcomes = self.walks.advance(self.slots, tokens)
        if outcomes.any():  # the list is complete: another begins
            for row in np.flatnonzero(outcomes).tolist():
                self.walks.sit(row, self.start)

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


def _median(run: Callable[[], object], times: int) -> float:
    """In milliseconds."""
    run()
    return 1e3 * median(_timed(run) for _ in range(times))


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
