"""How long each layer takes where a stage would run, for a split by what was measured."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gpuinfer.models.stages.stage import mapped, settle_on

BUDGET_S = 0.4  # for all layers together, beside the first pass
LEAST, MOST = 3, 30  # passes


def seconds_of(segments: Sequence[nn.Module], features: torch.Tensor, place: torch.device, threads: int) -> list[float]:
    """Of each segment at `place`: the least of several passes, since a neighbour only ever adds to it.

    A segment is there only while it computes: the device need not have room for all of them. Raises what one raises.
    """
    found: list[list[float]] = []
    raised: list[BaseException] = []

    def measure() -> None:
        try:
            settle_on(threads, None)
            with torch.inference_mode():
                found.extend(_passes(segments, features, place))
        except BaseException as error:  # noqa: BLE001 (handed to the caller)
            raised.append(error)

    thread = threading.Thread(target=measure, name="gpuinfer-layers")  # threads and cores are a thread's own
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return [min(of_one) for of_one in zip(*found[1:], strict=True)]  # the first pass lays weights out


def _passes(segments: Sequence[nn.Module], features: torch.Tensor, place: torch.device) -> Iterator[list[float]]:
    started = time.perf_counter()
    for done in range(MOST + 1):
        if done > LEAST and time.perf_counter() - started > BUDGET_S:
            break
        yield list(_pass(segments, mapped(features, lambda tensor: tensor.to(place, copy=True))))


def _pass(segments: Sequence[nn.Module], value: Any) -> Iterator[float]:
    place = value.device
    for segment in segments:
        there = segment if place.type == "cpu" else copy.deepcopy(segment).to(place)
        _wait_for(place)
        before = time.perf_counter()
        value = there(value)
        _wait_for(place)
        yield time.perf_counter() - before


def _wait_for(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
