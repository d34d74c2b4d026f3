"""What a batch is said to take, part by part; what somebody measured may be held against it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes."""

    process: int  # the interpreter and the libraries, before there is a model; on CUDA none of them is on the device
    weights: int
    cache: int  # keys and values of all slots
    activations: int  # of the widest moment of the largest step
    working: int  # beside them: rows as they come, answers, copies, logits

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


class Subject(Protocol):
    """A model that can be tried at several batch sizes. A batch counts what goes through the model at once: rows, or
    slots.
    """

    process: int  # bytes that are held without the model, and what small batches took beyond their estimate
    first: int  # a batch that takes next to nothing
    most: int  # no batch is larger
    usual: int  # where nobody says

    def parts(self, batch: int) -> Parts:
        """What a batch of so many should take. Loads nothing."""
        ...

    def run(self, batch: int) -> float:
        """Open the model for such a batch, let it do what takes most memory, and let go of it.

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
