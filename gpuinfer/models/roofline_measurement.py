"""Measures the bare model: the most rows per second that this machine computes with nothing else running.

No engine, no queue, no copies: inputs lie ready in the run's dtype. A run's rate is compared with this one. The rate
comes from many short looks, so that neither other programs nor a machine that stalls lower it.

The time that other programs take of the cores is known to the system and left out. The time that a hypervisor takes is
not; it only ever lowers a rate, so that the highest looks are the least disturbed. A single look may be high by the
clock's rounding, which is why several must be as high.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gpuinfer.api import BETWEEN_DEVICES, ModelSpec, Roofline
from gpuinfer.host import machine
from gpuinfer.models.cuda_graphs import captured, new_stream, wait_for_device
from gpuinfer.models.device import resolve_devices, resolve_dtype
from gpuinfer.models.load import build
from gpuinfer.models.out_of_memory import is_out_of_memory, keep_freed_memory
from gpuinfer.models.processor import computed_in
from gpuinfer.models.row_layout import FLOATS

LOOK_S = 0.1  # contains some forwards of most models, and fits between two stalls
MARK_S = 0.02  # between two marks: one costs as much as some hundred rows of a small model
PASSES = 2  # of each thread in one look, at least
REPEATED = 3  # looks that must be as high, if there are enough
STANDING, STANDS = 8, 0.99  # looks after which it may be enough, if the third highest is so near to the highest
SERVED = 0.5  # of a look that each thread must have had a core for: with less of it too little is left to go by


class LookMark(NamedTuple):
    """A thread's progress at one moment."""

    at: float
    waited: float  # seconds for a core, so far
    passes: int  # done so far


def marked(once: Callable[[], object], seconds: float) -> list[LookMark]:
    """Call `once` repeatedly for so many seconds, at least once, and mark the progress."""
    marks = [LookMark(time.perf_counter(), machine.thread_waited_s(), 0)]
    passes, ends = 0, marks[0].at + seconds
    while passes == 0 or marks[-1].at < ends:
        once()
        passes += 1
        now = time.perf_counter()
        if now >= marks[-1].at + MARK_S or now >= ends:
            marks.append(LookMark(now, machine.thread_waited_s(), passes))
    return marks


def look_rates(threads: Sequence[Sequence[LookMark]], look_s: float = LOOK_S) -> list[float]:
    """Passes per second of all threads together, in consecutive stretches of the time in which all of them ran.

    Threads are not looked at one by one: while one stands still, others may have its share of the machine.
    """
    start, stop = max(marks[0].at for marks in threads), min(marks[-1].at for marks in threads)
    if stop <= start:  # they took turns: what each did in its own time is all that is known
        return [_rate(threads, [marks[0].at for marks in threads], [marks[-1].at for marks in threads])]
    # Seconds in which a thread did not wait for a core, for each of its passes.
    pass_s = max((last.at - first.at - (last.waited - first.waited)) / last.passes for first, *_, last in threads)
    edges = np.linspace(start, stop, 1 + max(1, int((stop - start) / max(look_s, PASSES * pass_s))))
    found = [
        # The share of this stretch in which the thread that waited most had a core, and the rate.
        (
            1 - max(_between(marks, a, b)[1] for marks in threads) / (b - a),
            _rate(threads, [a] * len(threads), [b] * len(threads)),
        )
        for a, b in pairwise(edges)
    ]
    fair = [rate for served, rate in found if served >= SERVED]
    return fair or [_rate(threads, [start] * len(threads), [stop] * len(threads))]


def sustained(rates: Sequence[float]) -> float:
    """The rate that several looks reached: the third highest of eight or more, the second of four, else the highest."""
    highest_first = sorted(rates, reverse=True)
    return highest_first[min(REPEATED - 1, len(highest_first) // 4)]


def stands(rates: Sequence[float]) -> bool:
    """Whether enough looks are so near to the highest that more of them would hardly raise `sustained`."""
    return len(rates) >= STANDING and STANDS * max(rates) <= sorted(rates)[-REPEATED]


def _rate(threads: Sequence[Sequence[LookMark]], starts: Sequence[float], stops: Sequence[float]) -> float:
    """The rate of all threads together, each between its own two moments, without waiting for cores."""
    total = 0.0
    for marks, start, stop in zip(threads, starts, stops, strict=True):
        passes, waited = _between(marks, start, stop)
        total += passes / max(stop - start - waited, 1e-9)
    return total


def _between(marks: Sequence[LookMark], start: float, stop: float) -> tuple[float, float]:
    """A thread's passes, and its seconds of waiting, between two moments: steady from one mark to the next."""
    at = [mark.at for mark in marks]
    passes = np.interp([start, stop], at, [mark.passes for mark in marks])
    waited = np.interp([start, stop], at, [mark.waited for mark in marks])
    return float(passes[1] - passes[0]), float(waited[1] - waited[0])


MOST_LAUNCHES = 20_000
MOST_LOOKS = 100


def cuda_looks(module: nn.Module, inputs: Tensor, streams: int, seconds: float) -> list[float]:
    """Rows per second, in each look, of `streams` streams that replay a CUDA graph of one forward over `inputs`."""
    with torch.inference_mode(), torch.cuda.device(inputs.device):
        launches = [launcher(module, inputs.clone()) for _ in range(streams)]
        once = min(timed(launches, 1) for _ in range(3))
        rounds = min(max(1, int(min(LOOK_S, seconds) / once)), MOST_LAUNCHES)
        times = max(1, round(seconds / (rounds * once)))
        return [rounds * streams * len(inputs) / timed(launches, rounds) for _ in range(min(times, MOST_LOOKS))]


def timed(launches: Sequence[Callable[[], None]], rounds: int) -> float:
    """Seconds for `rounds` rounds of all `launches`."""
    wait_for_device()
    started = time.perf_counter()
    for _ in range(rounds):
        for launch in launches:
            launch()
    wait_for_device()
    return time.perf_counter() - started


def launcher(module: nn.Module, inputs: Tensor) -> Callable[[], None]:
    """A function that queues one forward on a stream of its own, as a graph or, if it cannot be captured, kernel by
    kernel.
    """
    stream = new_stream()
    wait_for_device()

    def eager() -> None:
        with torch.cuda.stream(stream):
            module(inputs)

    for _ in range(2):
        eager()
    wait_for_device()
    try:
        with captured(stream, torch.cuda.graph_pool_handle()) as graph:
            answers = module(inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return eager

    def replay(answers: object = answers) -> None:  # the answers' memory must live as long as the graph
        with torch.cuda.stream(stream):
            graph.replay()

    return replay


CPU_SIZES = tuple(64 << doubling for doubling in range(7))  # 64 to 4,096 rows
MOST_BYTES = 1 << 28  # of a batch: rows may be images
CUDA_SIZES = tuple(256 << doubling for doubling in range(9))  # 256 to 65,536 rows
WORTH = 1.03  # a gain below this is noise
STALE = 2  # doublings without a gain that end an arrangement
COARSE_SHARE = 0.5  # of the budget, for finding the best; the rest measures the best two well
FINAL_ROUNDS = 5
THREADS_TOGETHER_S = 60.0  # for all forwards to have warmed up


@dataclass(frozen=True)
class Arrangement:
    """How a device is used: `forwards` at once, each with `threads` threads (CPU) or a stream (CUDA)."""

    forwards: int
    threads: int = 0

    def __str__(self) -> str:
        if not self.threads:
            return f"{with_number(self.forwards, 'stream')}, CUDA graph"
        return f"{with_number(self.forwards, 'forward')} × {with_number(self.threads, 'thread')}"


@dataclass(frozen=True)
class Timed:
    arrangement: Arrangement
    rows: int
    rate: float  # rows per second


Look = Callable[[Arrangement, int, float], Sequence[float]]
"""Rows per second of an arrangement at a batch size in each of some looks, for about so many seconds in all; 0 when it
does not fit."""


def with_number(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def measure(
    spec: ModelSpec,
    *,
    devices: Sequence[str],
    dtype: str,
    seed: int,
    cores: int,
    budget_s: float = 3.0,
    deterministic: bool = False,
    compute: str = "auto",
    only: Roofline | None = None,
) -> Roofline:
    """The most rows per second over batch sizes and over threads × concurrent forwards; takes about `budget_s`.

    `only` measures just the batch size and arrangement of an earlier measurement, if a search would try them. Several
    CUDA devices are measured in turn and their rates added up, as if none slowed the others. Stand-ins on the CPU are
    measured as the one CPU that they are.

    Sets torch's thread count and the allocator for the whole process, so `RooflineProcess` runs it in its own. Raises
    `UsageError` when the model cannot be built.
    """
    keep_freed_memory()
    places = resolve_devices(devices)
    if places[0].type == "cpu":
        places = places[:1]
    found = [
        measured_on(place, spec, dtype, seed, cores, budget_s / len(places), deterministic, compute, earlier)
        for place, earlier in zip(places, separated(only, len(places)), strict=True)
    ]
    return combined(found)


def combined(found: Sequence[Roofline]) -> Roofline:
    """The rooflines of several devices as one; `at_rows` is the largest of their best batches."""
    arrangements = BETWEEN_DEVICES.join(one.arrangement for one in found)
    return Roofline(sum(one.rows_per_s for one in found), max(one.at_rows for one in found), arrangements)


def separated(only: Roofline | None, count: int) -> Sequence[Roofline | None]:
    """The inverse of `added`: one roofline for each device."""
    if only is None:
        return [None] * count
    return [replace(only, arrangement=arrangement) for arrangement in only.arrangement.split(BETWEEN_DEVICES)]


def measured_on(
    place: torch.device,
    spec: ModelSpec,
    dtype: str,
    seed: int,
    cores: int,
    budget_s: float,
    deterministic: bool,
    compute: str,
    only: Roofline | None,
) -> Roofline:
    """The roofline of one device."""
    computed = resolve_dtype(computed_in(dtype, compute, place.type == "cpu"))
    module = build(spec, device=place, dtype=resolve_dtype(dtype), seed=seed, compute=computed)
    shape: tuple[int, ...] = (spec.inputs,)
    kind = computed
    if spec.layout is not None:
        leaf = spec.layout.leaves[0]
        shape, kind = leaf.shape, computed if leaf.dtype in FLOATS else getattr(torch, leaf.dtype)
    sizes = CUDA_SIZES if place.type == "cuda" else CPU_SIZES
    row_bytes = kind.itemsize * math.prod(shape)
    sizes = tuple(size for size in sizes if size * row_bytes <= MOST_BYTES) or sizes[:1]
    inputs = torch.ones(sizes[-1], *shape, dtype=kind).to(place)

    def look(arrangement: Arrangement, rows: int, seconds: float) -> Sequence[float]:
        try:
            if place.type == "cuda":
                return cuda_looks(module, inputs[:rows], arrangement.forwards, seconds)
            return cpu_looks(module, inputs[:rows], arrangement, seconds)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return [0.0]

    cuda = place.type == "cuda"
    arrangements = [Arrangement(1), Arrangement(2)] if cuda else cpu_arrangements(cores, deterministic)
    known = [one for one in arrangements if only is not None and str(one) == only.arrangement and only.at_rows in sizes]
    if only is not None and known:
        return Roofline(sustained(look(known[0], only.at_rows, budget_s)), only.at_rows, only.arrangement)
    best = search_arrangements(look, arrangements, sizes, budget_s)
    return Roofline(best.rate, best.rows, str(best.arrangement))


def cpu_arrangements(cores: int, single_threaded: bool) -> list[Arrangement]:
    """One forward for each core, one forward on all cores, and on larger machines something in between."""
    arrangements = [Arrangement(cores, 1)]
    if cores > 1 and not single_threaded:
        arrangements.append(Arrangement(1, cores))
        if cores >= 8:
            arrangements.append(Arrangement(cores // 4, 4))
    return arrangements


def search_arrangements(
    look: Look, arrangements: Sequence[Arrangement], sizes: Sequence[int], budget_s: float
) -> Timed:
    """Try each arrangement briefly at growing batch sizes until nothing is gained, then the best two for longer, in
    turn, until their rates are settled.

    Returns the best rate, with the smallest batch that comes as near to it as noise allows to tell.
    """
    coarse_s = COARSE_SHARE * budget_s / (len(arrangements) * len(sizes))
    found: list[Timed] = []
    for arrangement in arrangements:
        best, stale = 0.0, 0
        for rows in sizes:
            found.append(Timed(arrangement, rows, sustained(look(arrangement, rows, coarse_s))))
            stale = 0 if found[-1].rate > WORTH * best else stale + 1
            best = max(best, found[-1].rate)
            if stale == STALE:
                break
    finalists = list(dict.fromkeys([smallest_of_the_best(found), fastest(found)]))
    final_s = (1 - COARSE_SHARE) * budget_s / (FINAL_ROUNDS * len(finalists))
    seen: list[list[float]] = [[] for _ in finalists]
    for _ in range(FINAL_ROUNDS):
        for candidate, rates in zip(finalists, seen, strict=True):
            rates.extend(look(candidate.arrangement, candidate.rows, final_s))
        if all(map(stands, seen)):
            break
    settled = [replace(c, rate=sustained(rates)) for c, rates in zip(finalists, seen, strict=True)]
    return replace(smallest_of_the_best(settled), rate=fastest(settled).rate)


def smallest_of_the_best(candidates: Sequence[Timed]) -> Timed:
    best = fastest(candidates).rate
    return min((c for c in candidates if c.rate * WORTH >= best), key=lambda candidate: candidate.rows)


def fastest(candidates: Sequence[Timed]) -> Timed:
    return max(candidates, key=lambda candidate: candidate.rate)


def cpu_looks(module: nn.Module, inputs: torch.Tensor, arrangement: Arrangement, seconds: float) -> list[float]:
    """Rows per second of all forwards together, in each look."""
    # OpenMP keeps a team size for each calling thread, taken over when the thread first computes: hence fresh threads.
    torch.set_num_threads(arrangement.threads)
    together = threading.Barrier(arrangement.forwards)

    def forwards() -> list[LookMark]:
        try:
            own = inputs.clone()
            with torch.inference_mode():
                module(own)  # allocates, and lays weights out
                together.wait(THREADS_TOGETHER_S)
                return marked(lambda: module(own), seconds)
        except BaseException:
            together.abort()  # the others must not wait for a forward that failed
            raise

    with ThreadPoolExecutor(arrangement.forwards) as pool:
        futures = [pool.submit(forwards) for _ in range(arrangement.forwards)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [len(inputs) * rate for rate in look_rates([future.result() for future in futures])]
