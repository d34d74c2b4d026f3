"""Two ways' answers compared: where they part, and whether that is a tie or a fault."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuinfer.generation import Sampling
from gpuinfer.lab.verify.probed_answers import Answers, History, VerifyQuestion, history, probe_answers, redrawn
from gpuinfer.lab.verify.verify_setup import Tolerance, VerifySetup

Row = NDArray[np.float32]
MOST_KEPT = 256 << 20  # bytes of rows of logits that are looked at

Status = Literal["holds", "fails", "differs", "told", "skipped"]
"""`differs`: the other side is wrong. `told`: the sides may differ, and the document says how."""


@dataclass(frozen=True)
class AnswerDivergence:
    """Where two sides part. Each side's logits are those of the first side's token and of the second's."""

    prompt: str
    number: int  # of the prompt, from 0
    sample: int
    position: int  # in the answer, from 0; in prompt and answer where positions are compared
    tokens: tuple[int, int]
    logits: Mapping[str, tuple[float, float]]  # by side
    tie: bool
    why: str
    theirs: bool = False  # the other side is the one that is wrong


@dataclass
class Difference:
    """What came of one check."""

    name: str
    status: Status = "holds"
    why: str = ""
    compared: int = 0  # answers, or positions
    unit: str = "answers"
    difference: float = 0.0  # the largest between two logits
    from_float32: dict[str, float] = field(
        default_factory=dict
    )  # by side: the largest distance, where it was judged by
    divergences: list[AnswerDivergence] = field(default_factory=list)
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "why": self.why,
            "compared": self.compared,
            "unit": self.unit,
            "largest_difference": self.difference,
            "from_float32": self.from_float32,
            "ties": sum(one.tie for one in self.divergences),
            "seconds": self.seconds,
            "divergences": [{**asdict(one), "tokens": list(one.tokens)} for one in self.divergences],
        }


class Parting(NamedTuple):
    """Two answers, and the first place where they differ."""

    ask: VerifyQuestion
    sample: int
    position: int
    first: int
    second: int
    past: History


class DivergenceJudge:
    """Compares routes with the answers to each prompt alone. `sides` are the two sides' names."""

    def __init__(self, opened: VerifySetup, tolerance: Tolerance) -> None:
        self._rig, self.tolerance = opened, tolerance
        self._bitwise = opened.setup.deterministic

    def compare(self, name: str, reference: Answers, other: Answers, sides: tuple[str, str]) -> Difference:
        """Whether `other` has the reference's answers. Where not, both sides are asked again, and watched."""
        finding = Difference(name)
        known = {(ask.number, ask.first_sample + j): one for ask, j, one in _answers(reference)}
        partings: dict[tuple[int, int, int, int], Parting] = {}  # equal prompts that part alike part once
        for ask, place, tokens in _answers(other):
            finding.compared += 1
            sample = ask.first_sample + place
            expected = known[ask.number, sample]
            if tokens == expected:
                continue
            unequal = (at for at, pair in enumerate(zip(expected, tokens, strict=False)) if pair[0] != pair[1])
            position = next(unequal, min(len(expected), len(tokens)))
            past = history([*ask.item.tokens.tolist(), *expected[:position]])
            first, second = ((*side[position:], -1)[0] for side in (expected, tokens))  # -1: the answer is over
            partings[ask.number, sample, position, second] = Parting(ask, sample, position, first, second, past)
        finding.difference = self._largest_difference(reference, other, finding, sides)
        finding.divergences += self._judged([*partings.values()], reference, other, sides)
        faults = [one for one in finding.divergences if not one.tie]
        if faults:
            finding.status, finding.why = "fails", faults[0].why
        return finding

    def _largest_difference(
        self, reference: Answers, other: Answers, finding: Difference, sides: tuple[str, str]
    ) -> float:
        """The largest difference of the two largest logits, wherever both sides saw the same tokens. One that is too
        large is a fault, although no answer need have changed.
        """
        worst, place, unequal = 0.0, None, None
        for past, sights in other.sights.items():
            for known in reference.sights.get(past, ())[:1]:
                for sight in sights:
                    off = max(abs(known.largest - sight.largest), abs(known.second - sight.second))
                    off = math.inf if math.isnan(off) else off
                    if off > worst:
                        worst, place = off, (past, known.largest, sight.largest)
                    if known.bits != sight.bits:
                        unequal = unequal or (past, known.largest, sight.largest)
        allowed = float(self.tolerance.allowed(np.array(place[1:2] if place else [0.0], np.float32))[0])
        if worst > allowed:
            why = f"the logits differ by {worst:.2g}, and {allowed:.2g} is allowed"
        else:
            place, why = unequal if self._bitwise else None, "the logits are not the same bits"
        if place is not None:  # the likeliest token's logits differ where the answers need not
            ask, position, token = _place(reference, place[0])
            logits = {side: (value, value) for side, value in zip(sides, place[1:], strict=True)}
            finding.divergences.append(
                AnswerDivergence(ask.item.text, ask.number, 0, position, (token, token), logits, False, why)
            )
        return worst

    def _judged(
        self, partings: Sequence[Parting], reference: Answers, other: Answers, sides: tuple[str, str]
    ) -> Iterator[AnswerDivergence]:
        """Each parting with the logits of both sides, as they come when both are asked once more."""
        if not partings:
            return
        most = max(1, MOST_KEPT // (8 * self._rig.decoder.shape.vocabulary))
        watched = {parting.past for parting in partings[:most]}
        concerned = {parting.ask.number for parting in partings[:most]}
        few = replace(reference.route, asks=[ask for ask in reference.route.asks if ask.number in concerned])
        ours, theirs = (probe_answers(self._rig, route, watched).rows for route in (few, other.route))
        drawn = reference.route.sampling if reference.route.sampling.temperature > 0 else None
        for parting in partings:
            tokens, logits = (parting.first, parting.second), dict[str, tuple[float, float]]()
            mine, others = ours.get(parting.past, [])[:1], theirs.get(parting.past, [])
            if not mine or not others:
                tie, why = False, "asked once more they did not part there: an answer is not the same each time"
            else:
                # Of several rows with that past, the one that parted.
                row = next((row for row in others if self._chosen(parting, row, drawn) == parting.second), others[0])
                for side, values in zip(sides, (mine[0], row), strict=True):
                    first, second = (float(values[token]) if token >= 0 else math.nan for token in tokens)
                    logits[side] = (first, second)
                tie, why = self._verdict(parting, mine[0], row, drawn)
            if self._bitwise and tie:
                tie, why = False, f"{why}, but with --deterministic there is none"
            ask = parting.ask
            yield AnswerDivergence(
                ask.item.text, ask.number, parting.sample, parting.position, tokens, logits, tie, why
            )

    def _verdict(self, parting: Parting, mine: Row, other: Row, drawn: Sampling | None) -> tuple[bool, str]:
        """Whether two rows of logits tie, and why.

        Drawn tokens may differ when the logits do, by as much as is allowed: the draw fell on a border. Drawn once
        more, all alone, each side's logits must give that side's token.
        """
        if drawn is None:
            first, second = parting.first, parting.second
            gaps = [float(mine[first] - mine[second]), float(other[second] - other[first])]
            if all(abs(gap) <= self.tolerance.least for gap in gaps):
                return True, f"a tie: the two logits are {max(map(abs, gaps)):.2g} apart"
            return False, f"the two logits are {gaps[0]:.2g} and {gaps[1]:.2g} apart: no tie"
        apart = np.abs(mine - other)
        worst = float(np.nan_to_num(apart, nan=math.inf).max())
        if not (apart <= self.tolerance.allowed(mine)).all():
            return False, f"the logits are up to {worst:.2g} apart"
        for row, token in ((mine, parting.first), (other, parting.second)):
            if self._chosen(parting, row, drawn) != token:
                return False, f"alone, token {token} is not what these logits and this seed give"
        return True, f"a draw on the border: the logits are up to {worst:.2g} apart"

    def _chosen(self, parting: Parting, row: Row, sampling: Sampling | None) -> int:
        """The token that a row of logits gives at this place: the likeliest, or the one that is drawn."""
        if sampling is None:
            return int(row.argmax())
        return redrawn(self._rig, sampling, parting.ask, parting.sample, parting.position, row)


def _answers(answers: Answers) -> Iterator[tuple[VerifyQuestion, int, tuple[int, ...]]]:
    for ask, completions in zip(answers.route.asks, answers.tokens, strict=True):
        for sample, tokens in enumerate(completions):
            yield ask, sample, tokens


def _place(reference: Answers, past: History) -> tuple[VerifyQuestion, int, int]:
    """Which prompt, which position of its answer, and which token came there."""
    for ask, _, tokens in _answers(reference):
        before = history(ask.item.tokens.tolist())
        for position, token in enumerate(tokens):
            if before == past:
                return ask, position, token
            before = history((token,), before)
    return reference.route.asks[0], 0, -1
