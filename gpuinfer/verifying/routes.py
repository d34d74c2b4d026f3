"""The ways to ask. Each must give the answers that a prompt gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gpuinfer.generation import Sampling
from gpuinfer.verifying.asking import Ask, Route
from gpuinfer.verifying.prompts import Item
from gpuinfer.verifying.rig import Rig

SAMPLES = 3
SOME = 8  # rows at once where the number does not matter
SHARED = 24  # tokens that a prompt must have to lend its beginning
MOST_STEPS = 16  # that the longest prompt is cut into
ODD_CHUNK = 7


@dataclass(frozen=True)
class Plan:
    """The reference of several routes, and what each route shows."""

    reference: Route
    routes: list[tuple[str, Route]]


def likeliest(rig: Rig) -> Plan:
    """All the ways to ask for the likeliest tokens."""
    sampling = Sampling(max_tokens=rig.options.new_tokens, temperature=0.0, ignore_eos=True)
    items, shared = rig.items, shared_beginnings(rig.items)
    some = min(SOME, rig.decoder.slots)
    draw = np.random.default_rng(rig.setup.seed)
    mixed = [items[i] for i in draw.permutation(len(items))]
    places = np.arange(rig.decoder.slots, dtype=np.int32)[::-1]
    alone = Route("alone", asks(items) + asks(shared, first=len(items)), sampling, alone=True)
    return Plan(
        alone,
        [
            *((f"{size} at once = alone", filled(rig, sampling, size)) for size in rig.options.batch_sizes),
            ("any order = alone", Route("another order", asks(mixed, items), sampling, some)),
            ("any slot = alone", Route("other slots", asks(items), sampling, some, order=places)),
            ("in chunks = whole", Route("in chunks", asks(items), sampling, some, step_tokens=chunk(rig.longest))),
            ("shared beginning = own", Route("shared", lent(items, shared), sampling, some)),
        ],
    )


def drawn(rig: Rig) -> Iterator[Plan]:
    """The same for tokens that are drawn, and for several answers to one prompt."""
    sampling = Sampling(max_tokens=rig.options.new_tokens, temperature=0.9, top_p=0.95, ignore_eos=True)
    samples = min(SAMPLES, rig.decoder.slots)
    singly = [replace_sample(ask, j) for ask in asks(rig.items) for j in range(samples)]
    several = [ask._replace(samples=samples) for ask in asks(rig.items)]
    some = max(samples, min(SOME, rig.decoder.slots))
    routes = [("drawn, at once = alone", Route("drawn at once", singly, sampling, some))]
    if samples > 1:
        routes.append((f"{samples} samples = one by one", Route("several samples", several, sampling, some)))
    yield Plan(Route("drawn alone", singly, sampling, alone=True), routes)


def filled(rig: Rig, sampling: Sampling, size: int) -> Route:
    """So many rows at once; prompts come several times when there are too few."""
    known = asks(rig.items)
    return Route(f"{size} at once", [known[i % len(known)] for i in range(max(size, len(known)))], sampling, size)


def asks(items: list[Item], numbered: list[Item] | None = None, first: int = 0) -> list[Ask]:
    """One for each item; its number is its place in `numbered`."""
    places = {id(item): number for number, item in enumerate(numbered or items, first)}
    return [Ask(item, places[id(item)]) for item in items]


def replace_sample(ask: Ask, sample: int) -> Ask:
    return ask._replace(first_sample=sample)


def shared_beginnings(items: list[Item]) -> list[Item]:
    """For each prompt that is long enough another one, which begins like it and ends with its end turned round."""
    return [
        replace(item, text=f"… {item.text}", tokens=np.concatenate([item.tokens[:cut], item.tokens[cut:][::-1]]))
        for item in items
        if (cut := 3 * len(item.tokens) // 4) and len(item.tokens) >= SHARED
    ]


def lent(items: list[Item], shared: list[Item]) -> list[Ask]:
    """Each prompt and the one that begins like it, twice: to take over from rows under way, and from those done."""
    own, others = asks(items), iter(asks(shared, first=len(items)))
    found = []
    for ask in own:
        found.append(ask)
        if len(ask.item.tokens) >= SHARED:
            found.append(next(others))
    return found + found[::-1]


def chunk(longest: int) -> int:
    return max(ODD_CHUNK, longest // MOST_STEPS | 1)
