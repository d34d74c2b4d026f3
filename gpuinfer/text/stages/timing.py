"""How long each layer of a transformer takes where a stage would run, for a split by what was measured."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable
from functools import partial

import numpy as np
import torch

from gpuinfer.models.capturing import wait_for_device
from gpuinfer.models.stages.timing import in_thread
from gpuinfer.text.shape import Shape
from gpuinfer.text.stages.decoder import PortionDecoder
from gpuinfer.text.stages.portions import Portion
from gpuinfer.text.step import Step

ROWS = 16  # that are one token further: a usual step
PASSES = 5
Make = Callable[[Portion, int, int], PortionDecoder]
"""A decoder of some layers with so many slots and pages."""


def seconds_of(shape: Shape, make: Make, threads: int) -> list[float]:
    """Of each layer, the embedding with the first and the head with the last: the least of several passes. Layers that
    are alike are measured once.
    """
    known: dict[Hashable, float] = {}
    found = []
    for layer in range(shape.layers):
        portion = Portion(shape, layer, layer + 1)
        alike = portion.first, portion.last, shape.mixed(layer), shape.windows[layer : layer + 1]
        if alike not in known:
            known[alike] = in_thread(partial(_seconds, portion, make), threads)
        found.append(known[alike])
    return found


def _seconds(portion: Portion, make: Make) -> float:
    rows = np.arange(ROWS, dtype=np.int32)
    zeros = np.zeros(ROWS, np.int32)
    step = Step(zeros, rows[:, None].copy(), zeros, np.ones(ROWS, np.int32), rows)
    taken = []
    with contextlib.closing(make(portion, ROWS, ROWS)) as decoder, torch.no_grad():
        compute = decoder.forward if portion.last else decoder.hidden
        for _ in range(1 + PASSES):  # the first compiles, and finds its memory
            before = time.perf_counter()
            compute(step)
            if decoder.device.type == "cuda":
                wait_for_device(decoder.device)
            taken.append(time.perf_counter() - before)
    return min(taken[1:])
