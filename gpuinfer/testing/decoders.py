"""What a decoder of diffusion models promises, tried on blocks of every kind, with a stand-in for a model.

Blocks as a decoder sees them: `viewed` makes one from its confidences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.testing.findings import Examination, Finding, check_build, check_unknown_options, run_bounded
from gpuinfer.text.diffusion.unmasking_decoder import MOST_IDLE, Decision, Edited, UnmaskingDecoder, View

VOCABULARY = 50
BLOCKS = 3  # of a row that is filled in
SIZES = (1, 2, 7, 32)  # masks of a block
MOST_WEIGHT = 1e3  # of a blend: more would leave nothing of the mask
FILLS = "fills every block in"
COMMITS = "commits masks and nothing else"
SAME = "decides the same about the same block"
APART = "keeps what it knows of a row to itself"
ADJUSTS = "leaves logits that are numbers"
BLENDS = "blends by a share"
THRESHOLD = "takes any threshold, or says that it has none"

Make = Callable[[], UnmaskingDecoder]


def check_decoder(make: Make, timeout_s: float = 30.0, *, examiner: Examination | None = None) -> list[Finding]:
    """Every promise of `text.diffusion.unmasking_decoder.UnmaskingDecoder`; `make` makes a new one
    whenever one is needed. Each check may take `timeout_s`, or what `examiner` allows.
    """
    return run_bounded(functools.partial(_check, make), examiner or Examination(timeout_s))


def viewed(confidence: Sequence[float], *, positions: Sequence[int] | None = None, seed: int = 0, **more: Any) -> View:
    """A block whose masks have these confidences, at positions 0, 1, … unless others are given. `more`: what else is
    to be otherwise than in the first step of a first block with one step for each mask. Its arrays are read-only.
    """
    count, dice = len(confidence), np.random.default_rng(seed)
    sure = np.array(confidence, np.float64)
    drawn = dice.random(count)
    view = View(
        positions=np.arange(count, dtype=np.int32) if positions is None else np.array(positions, np.int32),
        tokens=dice.integers(0, VOCABULARY, count).astype(np.int32),
        confidence=sure,
        margin=sure / 2,
        entropy=np.maximum(1 - sure, 0.0),
        step=0,
        steps=max(count, 1),
        block=0,
        blocks=1,
        masks=max(count, 1),
        threshold=1.0,
        uniform=lambda: drawn.copy(),
    )
    return locked(replace(view, **more))


def locked(view: View) -> View:
    """The same, with arrays that cannot be written to."""
    arrays: list[NDArray[Any] | None] = [view.positions, view.tokens, view.confidence, view.margin, view.entropy]
    if view.edited is not None:
        arrays += [view.edited.positions, view.edited.tokens, view.edited.likeliest, view.edited.confidence]
    for array in arrays:
        if array is not None:
            array.setflags(write=False)
    return view


def _check(make: Make, examiner: Examination) -> None:
    if (decoder := check_build(make, UnmaskingDecoder, examiner)) is None:
        return
    check_unknown_options(type(decoder).Options, decoder.options, type(decoder).Options, examiner)
    examiner.check("needs what there is", lambda: _fault_of_needs(decoder))
    broken = "" if examiner.check(COMMITS, lambda: _first_fault(make, _fault_of_deciding)) else COMMITS
    for name, fault_of in PROMISES.items():
        if broken:
            examiner.skip(name, f"'{broken}' does not hold")
        elif not examiner.check(name, functools.partial(fault_of, make)) and name == SAME:
            broken = SAME


def _fault_of_needs(decoder: UnmaskingDecoder) -> str | None:
    odd = sorted(set(decoder.needs) - {"margin", "entropy"})
    return f"it needs {', '.join(odd)}, which no view has. Needs are margin and entropy." if odd else None


def block_cases(edits: bool, seed: int = 0) -> Iterator[tuple[str, View]]:
    """Blocks that a decoder must cope with; where it `edits`, with tokens that were committed before."""
    for name, view in _blocks(seed):
        yield name, replace(view, edited=edited_of(3, seed)) if edits else view
    if edits:
        yield "a block without a mask", viewed([], edited=edited_of(4, seed), masks=4, step=2, steps=4)
        yield "a block of which nothing was committed", viewed([0.5, 0.6], edited=edited_of(0, seed))


def _blocks(seed: int) -> Iterator[tuple[str, View]]:
    dice = np.random.default_rng(seed)
    yield "one mask", viewed([0.5])
    yield "one mask, as sure as can be", viewed([1.0])
    yield "one mask that may be anything", viewed([1e-30])
    yield "masks that are all alike", viewed([0.25] * 8)
    yield "masks of no confidence", viewed([0.0] * 8)
    yield "masks that are certain", viewed([1.0] * 8)
    yield "masks here and there", viewed([0.2, 0.95, 0.1, 0.7], positions=[1, 2, 5, 9], masks=12, step=8, steps=12)
    yield "more steps than masks", viewed([0.3, 0.6, 0.4], steps=100)
    yield "the steps used up", viewed([0.3, 0.6, 0.4], masks=8, step=9, steps=4)
    yield "a thousand masks in one step", viewed(dice.random(1000).tolist(), steps=1)
    yield "a million steps", viewed(dice.random(32).tolist(), steps=1_000_000)
    for count in SIZES:
        yield (
            f"{count} masks",
            viewed(dice.random(count).tolist(), seed=seed, block=1, blocks=4, steps=max(count // 2, 1)),
        )


def edited_of(count: int, seed: int = 0) -> Edited:
    """Tokens of a block that were committed before, some of which the model has come to doubt."""
    dice = np.random.default_rng(seed)
    tokens = dice.integers(0, VOCABULARY, count).astype(np.int32)
    likeliest = np.where(dice.random(count) < 0.5, tokens, (tokens + 1) % VOCABULARY).astype(np.int32)
    return Edited(np.arange(100, 100 + count, dtype=np.int32), tokens, likeliest, dice.random(count))


def _first_fault(make: Make, fault_of: Callable[[UnmaskingDecoder, View], str | None]) -> str | None:
    """With each block: the first fault, and in which of them."""
    decoder = make()
    for name, view in block_cases(decoder.edits):
        for threshold in thresholds(decoder):
            if fault := fault_of(make(), replace(view, threshold=threshold)):
                return f"with {name}: {fault}"
    return None


def thresholds(decoder: UnmaskingDecoder) -> Sequence[float]:
    return (1.0,) if decoder.default_threshold is None else (decoder.default_threshold, 0.0, 0.5, 1.0)


def _fault_of_deciding(decoder: UnmaskingDecoder, view: View) -> str | None:
    return fault_of_decision(decoder.decide(decoder.begin(), locked(view)), view)


def fault_of_decision(decision: Any, view: View) -> str | None:
    """What is wrong with an answer to this view."""
    if not isinstance(decision, Decision):
        return f"decide returned {type(decision).__name__}. Return a Decision."
    if fault := _fault_of_choice("commit", decision.commit, len(view.positions), "mask"):
        return fault
    if decision.edit is None:
        return None
    if view.edited is None:
        return "it edits tokens that it was not shown. Set `edits = True` on the class."
    return _fault_of_choice("edit", decision.edit, len(view.edited.positions), "committed token")


def _fault_of_choice(name: str, chosen: Any, count: int, what: str) -> str | None:
    if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.shape == (count,):
        return None
    kind = f"{chosen.dtype} {list(chosen.shape)}" if isinstance(chosen, np.ndarray) else type(chosen).__name__
    return f"`{name}` is {kind}. Return an array of bool [{count}], one for each {what} of the view."


def _fault_of_sameness(make: Make) -> str | None:
    for name, view in block_cases(make().edits):
        found = [_lists(decoder.decide(decoder.begin(), view)) for decoder in (make(), make())]
        if found[0] != found[1]:
            return f"with {name}: two answers. Decide by the view alone, and draw from view.uniform."
    return None


def _lists(decision: Decision) -> tuple[Any, Any]:
    return decision.commit.tolist(), None if decision.edit is None else decision.edit.tolist()


def _fault_of_filling(make: Make) -> str | None:
    """Whether blocks come to an end, whatever the confidences are."""
    decoder = make()
    for threshold in thresholds(decoder):
        for count in SIZES:
            for steps in (1, count, 3 * count):
                if fault := DecoderRow(make(), count, steps, threshold).fill():
                    return f"with {count} masks in {steps} steps, threshold {threshold}: {fault}"
    return None


@dataclass(slots=True)
class DecoderRow:
    """A row of some blocks of which a decoder decides, with confidences that mean nothing."""

    decoder: UnmaskingDecoder
    count: int
    steps: int
    threshold: float
    seed: int = 0

    def fill(self) -> str | None:
        """What goes wrong."""
        return next((fault for fault in self.decisions(self.decoder.begin(), lambda decision: None) if fault), None)

    def decisions(self, kept: Any, tell: Callable[[Any], None]) -> Iterator[str | None]:
        """Decide step after step: `tell` gets each decision, and what is wrong with it is yielded."""
        dice = np.random.default_rng(self.seed)
        for block in range(BLOCKS):
            left = np.arange(block * self.count, (block + 1) * self.count, dtype=np.int32)
            step = idle = 0
            while len(left):
                view = viewed(
                    dice.random(len(left)).tolist(), positions=left.tolist(), seed=step, step=step, steps=self.steps,
                    block=block, blocks=BLOCKS, masks=self.count, threshold=self.threshold,
                )  # fmt: skip
                decision = self.decoder.decide(
                    kept, replace(view, edited=edited_of(3, step)) if self.decoder.edits else view
                )
                tell(_lists(decision) if isinstance(decision, Decision) else decision)
                if fault := fault_of_decision(decision, viewed([0.5] * len(left), edited=edited_of(3, step))):
                    yield fault
                    return
                idle = 0 if decision.commit.any() else idle + 1
                left, step = left[~decision.commit], step + 1
                if idle == MOST_IDLE:
                    yield f"it committed none of {len(left)} masks in {MOST_IDLE} steps on end. Commit the surest then."
                    return
                yield None


def _fault_of_company(make: Make) -> str | None:
    """Two rows in turns, against each alone."""
    shared = make()
    rows = [DecoderRow(shared, 7, 4, thresholds(shared)[0], seed) for seed in (1, 2)]
    together: list[list[Any]] = [[], []]
    turns = [row.decisions(shared.begin(), decisions.append) for row, decisions in zip(rows, together, strict=True)]
    while turns:
        turns = [turn for turn in turns if next(turn, STOP) is not STOP]
    for row, found in zip(rows, together, strict=True):
        alone: list[Any] = []
        own = make()
        list(replace(row, decoder=own).decisions(own.begin(), alone.append))
        if found != alone:
            return "a row is decided otherwise beside another. Keep what belongs to a row in what `begin` returns."
    return None


STOP = object()


def _fault_of_adjusting(make: Make) -> str | None:
    decoder = make()
    if type(decoder).adjust is UnmaskingDecoder.adjust:
        return None
    kept, dice = decoder.begin(), np.random.default_rng(0)
    positions = np.arange(8, dtype=np.int32)
    while len(positions):
        logits = dice.normal(0, 5, (len(positions), VOCABULARY)).astype(np.float32)
        logits[:, 0] = -np.inf
        decoder.adjust(kept, positions, logits)
        if np.isnan(logits).any() or (logits == np.inf).any():
            return "after adjust some logits are NaN or +inf. Bound what is added to them."
        positions = positions[1:]
    return None


def _fault_of_blending(make: Make) -> str | None:
    decoder = make()
    kept = decoder.begin()
    for step in range(100):
        share = decoder.blend(kept, step)
        if not (isinstance(share, int | float) and 0 <= share <= MOST_WEIGHT):
            return f"blend returned {share!r} for step {step}. Return a number of 0 or more."
    return None


def _fault_of_threshold(make: Make) -> str | None:
    own = type(make()).default_threshold
    if own is None or (isinstance(own, int | float) and 0 <= own <= 1):
        return None
    return f"its default_threshold is {own!r}. Give a probability, or None where it has none."


PROMISES: dict[str, Callable[[Make], str | None]] = {
    THRESHOLD: _fault_of_threshold,
    ADJUSTS: _fault_of_adjusting,
    BLENDS: _fault_of_blending,
    FILLS: _fault_of_filling,
    SAME: _fault_of_sameness,
    APART: _fault_of_company,
}
