"""What a batch is said to take, part by part; what somebody measured may be held against it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes."""

    process: int  # the interpreter and the libraries, before there is a model; on CUDA none of them is on the device
    weights: int
    cache: int  # keys and values of all rows, full
    activations: int  # of the widest moment of the largest step
    working: int  # beside them: rows as they come, answers, copies, logits

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def times(self, copies: int) -> Parts:
        """Of so many copies of the model in one process."""
        return Parts(
            self.process, *(copies * part for part in (self.weights, self.cache, self.activations, self.working))
        )


def added(several: Iterable[Parts]) -> Parts:
    """Part by part."""
    each = list(several)
    return Parts(*(sum(getattr(one, field.name) for one in each) for field in fields(Parts)))


@dataclass(frozen=True, slots=True)
class StageParts:
    """What a stage of a model takes, without the process."""

    stage: int
    layers: tuple[int, int]  # the first and the last
    parts: Parts


class Subject(Protocol):
    """A model that can be tried at several batch sizes: one copy of it, or several at once in the same memory. A batch
    counts what goes through one copy at once: rows, of text such as fill their context.
    """

    process: int  # bytes that are held without the model, and what small batches took beyond their estimate
    first: int  # a batch that takes next to nothing
    most: int  # no batch is larger
    usual: int  # where nobody says
    timed: bool  # whether a batch is to be no larger than what takes little time

    def warm_up(self) -> None:
        """Let libraries and compiled kernels take what they take for any model."""
        ...

    def describe(self) -> None:
        """Learn what is to be learnt before anything is tried."""
        ...

    def parts(self, batch: int) -> Parts:
        """What a batch of so many should take of one copy. Loads nothing."""
        ...

    def stages(self, batch: int) -> Sequence[StageParts]:
        """The same by stage, of a model in stages: those that lie in this memory."""
        ...

    def pages(self, free: int) -> Mapping[str, int] | None:
        """Of text: slots, pages, and the bytes of these, that a run has by itself in each copy where so many bytes are
        free. None: of rows, where not one row of text fits, and where devices share the stages.
        """
        ...

    def run(self, batch: int) -> float:
        """Open each copy for such a batch, let all at once do what takes most memory, and let go of them.

        The seconds that the batch took (`Stopwatch`), without the opening. Raises whatever the model raises, and
        `MemoryError` or torch's own errors.
        """
        ...

    def facts(self) -> Mapping[str, Any]:
        """What there is to say of the model, plain values."""
        ...


class Stopwatch:
    """Seconds since it was made: on the clock, or of the processor where they are fewer, as beside busy neighbours."""

    def __init__(self) -> None:
        self._clock, self._ran = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        return min(time.perf_counter() - self._clock, time.process_time() - self._ran)


def at_once(calls: Sequence[Callable[[], float]]) -> float:
    """Call all of them, several each in a thread of its own, begun together; what the largest of them answers. Raises
    what one of them raises.
    """
    if len(calls) == 1:
        return calls[0]()
    ready = threading.Barrier(len(calls), timeout=60.0)

    def begun(call: Callable[[], float]) -> float:
        ready.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return max(threads.map(begun, calls))
