"""A generator that does not go from left to right stands in the place of ours: the driver and the backend need no more
than the protocol says.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import torch
from text.toy import Generating

from gpuinfer.engine.engine import Engine
from gpuinfer.errors import UsageError
from gpuinfer.generation import Completion, Generation, Prompt, Sampling
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.text.generator import Prepared, Stepped

MASK = "_"


class Canvas:
    """`TextGenerator` that begins with nothing but masks, and lifts one of each row in a step, anywhere."""

    slots = 3
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.facts = {"model": "canvas"}
        self.enter = lambda station: None
        self._rows: dict[int, tuple[list[str], list[int]]] = {}
        self._version = ""

    @property
    def free_slots(self):
        return self.slots - len(self._rows)

    @property
    def busy(self):
        return bool(self._rows)

    def prepare(self, prompts, enter=lambda station: None):
        return [
            Prepared(np.zeros(1, np.int32), one.sampling, one.sampling.max_tokens, 1, 0, one.key, None)
            for one in prompts
        ]

    def add(self, ticket, prepared):
        places = list(range(prepared.limit))
        random.Random(prepared.key).shuffle(places)
        self._rows[ticket] = [MASK] * prepared.limit, places

    def cancel(self, ticket):
        return self._rows.pop(ticket, None) is not None

    def step(self):
        rows = len(self._rows)
        for canvas, places in self._rows.values():
            place = places.pop()
            canvas[place] = "abc"[place % 3]
        done = [ticket for ticket, (_, places) in self._rows.items() if not places]
        return Stepped(
            [(ticket, self._answer(self._rows.pop(ticket)[0])) for ticket in done], rows=rows, output_tokens=rows
        )

    def _answer(self, canvas):
        whole = Completion(text="".join(canvas), tokens=tuple(range(len(canvas))), finish_reason="length")
        return Generation(completions=(whole,), prompt_tokens=1, versions=(self._version,))

    def read_weights(self, place):
        raise UsageError("a canvas has no weights.")

    def update(self, version, weights):
        self._version = version

    def close(self):
        self._rows.clear()


async def answered():
    engine = Engine(Generating(Canvas()), Dynamic())
    await engine.start()
    try:
        prompts = [Prompt(text="x", key=str(number), sampling=Sampling(max_tokens=number)) for number in range(1, 10)]
        found = await asyncio.wait_for(asyncio.gather(*map(engine.submit, prompts)), 30)
        return [one.completions[0].text for one in found], engine.snapshot()
    finally:
        await engine.close(drain=False)


def test_answers_that_grow_anywhere_come_through_the_same_driver_and_backend():
    texts, snapshot = asyncio.run(answered())
    assert texts == [("abc" * 3)[:number] for number in range(1, 10)]
    assert sum(rows * steps for rows, steps in snapshot.batches.items()) == sum(range(1, 10))
