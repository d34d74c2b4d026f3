"""Prompts that come and go in the company of others: what both kinds of generators are held to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from text.toy import joined

from gpuinfer.generation import Completion, Generation, Part, Prompt


@dataclass(frozen=True)
class Arrival:
    """A prompt, the step before which it comes, and the step before which it is cancelled; whether its answer is given
    out in parts.
    """

    prompt: Prompt
    step: int
    cancelled: int | None
    parts: bool


def arrivals(prompts: st.SearchStrategy[Prompt], steps: int) -> st.SearchStrategy[Arrival]:
    cancelled = st.one_of(st.none(), st.none(), st.none(), st.integers(0, steps * 3 // 2))
    return st.builds(Arrival, prompts, step=st.integers(0, steps), cancelled=cancelled, parts=st.booleans())


def check_company(
    generator: Any,
    coming: Sequence[Arrival],
    alone: Callable[[Prompt], tuple[Completion, ...]],
    watch: Callable[[Any], object] = lambda stepped: None,
) -> tuple[dict[int, Generation], set[int]]:
    """Each answer, and its parts, are those that it has alone. Returns outcomes, and the numbers of those
    that were cancelled.
    """
    waiting = sorted(enumerate(coming), key=lambda entry: entry[1].step)
    prepared = generator.prepare([arrival.prompt for arrival in coming])
    outcomes: dict[int, Any] = {}
    given: dict[int, list[Part]] = defaultdict(list)
    dropped: set[int] = set()
    step = 0
    while waiting or generator.busy:
        while waiting and waiting[0][1].step <= step and waiting[0][1].prompt.samples <= generator.free_slots:
            number, _ = waiting.pop(0)
            generator.add(number, replace(prepared[number], parts=coming[number].parts))
        dropped |= {n for n, arrival in enumerate(coming) if arrival.cancelled == step and generator.cancel(n)}
        stepped = generator.step()
        watch(stepped)
        for number, part in stepped.parts:
            assert number not in outcomes
            given[number].append(part)
        for number, outcome in stepped.finished:
            assert number not in outcomes
            outcomes[number] = outcome
        step += 1
        assert step < 5000
    assert outcomes.keys() == set(range(len(coming))) - dropped
    for number, outcome in outcomes.items():
        assert isinstance(outcome, Generation), outcome
        assert outcome.completions == alone(coming[number].prompt)
        assert outcome.prompt_tokens == len(prepared[number].tokens)
        assert joined(given[number]) == (list(outcome.completions) if coming[number].parts else [])
    assert generator.free_slots == generator.slots
    return outcomes, dropped
