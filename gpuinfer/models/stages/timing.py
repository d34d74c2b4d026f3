"""How long each layer takes where a stage would run, for a split by what was measured."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

from gpuinfer.models.capturing import wait_for_device
from gpuinfer.models.stages.stage import mapped, settle_on

BUDGET_S = 0.4  # for all layers together, beside the first pass
LEAST, MOST = 3, 30  # passes
Found = TypeVar("Found")


def seconds_of(segments: Sequence[nn.Module], features: torch.Tensor, place: torch.device, threads: int) -> list[float]:
    """Of each segment at `place`: the least of several passes, since a neighbour only ever adds to it.

    A segment is there only while it computes: the device need not have room for all of them. Raises what one raises.
    """

    def measure() -> list[list[float]]:
        with torch.inference_mode():
            return list(_passes(segments, features, place))

    found = in_thread(measure, threads)
    return [min(of_one) for of_one in zip(*found[1:], strict=True)]  # the first pass lays weights out


def in_thread(measure: Callable[[], Found], threads: int) -> Found:
    """What `measure` finds in a thread that computes with so many threads, as a stage's does. Raises what it raises."""

    def measured() -> Found:
        settle_on(threads, None)
        return measure()

    with ThreadPoolExecutor(1, thread_name_prefix="gpuinfer-layers") as thread:  # threads are a thread's own
        return thread.submit(measured).result()


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
        wait_for_device(place)
