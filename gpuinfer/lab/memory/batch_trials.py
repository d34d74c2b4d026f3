"""One memory, and the model's copies or stages in it: what a batch should take, part by part, which batches are tried,
what those took, and the largest that fits. A CUDA device has one copy. On the CPU as many as there are lanes share
one memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from gpuinfer.lab.memory.rows_memory import StagedRows
    from gpuinfer.lab.memory.text_memory import StagedText
    from gpuinfer.models.footprint import MemoryMeter


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes."""

    process: int  # the interpreter and the libraries, before there is a model; on CUDA none of them is on the device
    weights: int
    cache: int  # keys and values of all rows, full
    activations: int  # of the widest moment of the largest step
    working: int  # beside them: rows as they come, answers, copies, logits
    gradients: int = 0  # of training
    optimizer: int = 0  # its state, of training

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def times(self, copies: int) -> MemoryParts:
        """Of so many copies of the model in one process."""
        own = {field.name: copies * getattr(self, field.name) for field in fields(self)}
        return MemoryParts(**{**own, "process": self.process})


@dataclass(frozen=True, slots=True)
class StageParts:
    """What a stage of a model takes, without the process."""

    stage: int
    device: str
    layers: tuple[int, int]  # the first and the last
    parts: MemoryParts


class MemorySubject(Protocol):
    """A model that can be tried at several batch sizes: one copy of it, or several at once in the same memory. A batch
    counts what goes through one copy at once: rows, of text such as fill their context.
    """

    process: int  # bytes that are held without the model, and what small batches took beyond their estimate
    first: int  # a batch that takes next to nothing
    most: int  # no batch is larger
    usual: int  # unless --batch-size is given
    timed: bool  # whether a batch is to be no larger than what takes little time

    def warm_up(self) -> None:
        """Let libraries and compiled kernels take what they take for any model."""
        ...

    def describe(self) -> None:
        """Learn what is to be learnt before anything is tried. Asked again, it knows already."""
        ...

    def parts(self, batch: int) -> MemoryParts:
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
    """Seconds since it was made: on the clock, or of the processor where they are fewer, as on a busy machine."""

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


STEP = 1.1  # between the sizes that are looked at first


def largest_batch(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch from 1 to `most` that fits, 0 where none does.

    A larger batch may take less than a smaller one, since allocators treat large pieces otherwise: so it is looked for
    from above, in steps of a tenth, and then between two of them.
    """
    if fits(most):
        return most
    high = most  # which does not fit
    while high > 1:
        low = min(high - 1, int(high / STEP))
        if fits(low):
            break
        high = low
    else:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


SHARE = 0.9  # of what is free: the rest of the program grows too, and so does the machine
PROBED = 1 << 30  # bytes that the batches which are tried take at the most, beside process and weights
PROBED_S = 0.7  # and seconds that one of them should take
MOST_PROBED = 1 << 20  # rows
HEAVY = 1 << 30  # bytes of weights: a model that has them is opened once, where others are for each batch
GRAIN = 32  # batches above it are tried at multiples of it


class MemoryExamination:
    """Of a model that is ready to be tried (`Subject`). Batches are those of one copy."""

    def __init__(
        self,
        subject: MemorySubject,
        meter: MemoryMeter,
        device: torch.device,
        copies: int,
        free: int,
        batches: Sequence[int],
    ) -> None:
        """`free`: bytes to count with; `batches`: those that were asked for, if any, ascending. The last is tried."""
        self._subject, self._meter, self._device = subject, meter, device
        self._copies, self._free = copies, free
        self._batch, self._also = batches[-1] if batches else None, batches[:-1]
        self._room = int(free * SHARE)
        self._on_cpu = device.type != "cuda"
        meter.bound(self._room)
        meter.forget()
        subject.process = meter.held() if self._on_cpu else 0
        self._before = 0 if self._on_cpu else meter.held()
        self._held = meter.held()  # at rest
        self._tried: list[dict[str, Any]] = []
        self._why: str | None = None  # there is nothing more to be tried

    def estimated(self) -> dict[str, Any]:
        """What is known before anything is tried, or with what has been until now."""
        from gpuinfer.models.device import other_processes

        most = fitting = self._largest(1.0)
        measured = None
        if self._tried:
            over = self._tried[-1]["measured_bytes"] / self._tried[-1]["estimated_bytes"]  # the largest says most
            measured = self._largest(over)
            fitting = min(most, measured)
        shown = self._batch or max(1, min(self._subject.usual, most))
        stages = []
        for one in self._subject.stages(shown):
            named = _named(one.parts)
            del named["process_bytes"]  # which all stages here have together
            sizes = {**named, "estimated_bytes": one.parts.total}
            stages.append({"stage": one.stage, "layers": list(one.layers), **sizes})
        bound = "limit" if fitting == self._subject.most else "memory"
        return {
            "device": str(self._device),
            "copies": self._copies,
            "free_bytes": self._free,
            "room_bytes": self._room,
            "batch": self._estimate(shown),
            "stages": stages,
            "pages": self._subject.pages(self._free),
            "also": [self._estimate(batch) for batch in self._also],
            "largest": {"batch": fitting, "by_estimate": most, "by_measurement": measured, "bound": bound},
            "estimated": self._estimate(fitting) if fitting else None,
            "tried": list(self._tried),
            "not_tried": self._why,
            "others": [asdict(one) for one in other_processes(self._device)],
        }

    def measured(self) -> dict[str, Any]:
        """The same, once some batches have been tried."""
        slow = self._calibrate()
        if self._why is None:
            self._probe(slow)
        return self.estimated()

    def _parts(self, rows: int) -> MemoryParts:
        """Of all copies."""
        return self._subject.parts(rows).times(self._copies)

    def _largest(self, over: float) -> int:
        """The largest batch where all take `over` times what they are estimated to."""
        return largest_batch(lambda rows: self._parts(rows).total * over <= self._room, self._subject.most)

    def _estimate(self, batch: int) -> dict[str, int]:
        parts = self._parts(batch)
        return {"batch": batch, **_named(parts), "estimated_bytes": parts.total}

    def _calibrate(self) -> float | None:
        """Take what a small batch takes beyond its estimate for what any batch does: kernels, threads, what libraries
        keep. The seconds that a row of it took, where that is worth knowing.
        """
        subject = self._subject
        first = self._parts(subject.first)
        if first.total > self._room:
            self._why = "not even the smallest batch should fit"
            return None
        if first.weights > HEAVY:
            return None
        self._meter.forget()
        seconds = [self._run(subject.first) for _ in range(2)]  # kernels are made for each shape
        if self._why is not None:
            return None
        subject.process += max(0, self._meter.peak() - self._before - first.total)
        self._meter.forget()
        self._held = self._meter.held()
        return min(one for one in seconds if one is not None) / subject.first

    def _run(self, batch: int) -> float | None:
        """The seconds that it took; None: it cannot be tried, and `_why` says why."""
        from gpuinfer.models.out_of_memory import first_line, is_out_of_memory

        try:
            return self._subject.run(batch)
        except Exception as error:  # noqa: BLE001 (whatever a library raises when memory is refused)
            what = "memory ran out" if is_out_of_memory(error) else type(error).__name__
            self._why = f"at {batch:,} rows {what}: {first_line(error)}"
            return None

    def _probe(self, slow: float | None) -> None:
        """Two batches, the larger as large as the bounds of memory and time let it be; one alone of a model that takes
        long to open.
        """
        at_rest = self._parts(1)
        room = min(self._room, at_rest.process + at_rest.weights + PROBED)
        most = largest_batch(lambda rows: self._parts(rows).total <= room, min(self._subject.most, MOST_PROBED))
        wanted = self._batch if self._batch is not None and self._parts(self._batch).total <= room else most
        top = max(1, min(wanted, most))
        sizes = [top] if at_rest.weights > HEAVY else _series(top)
        if self._subject.timed and slow is not None and slow * top > PROBED_S:
            sizes = _series(_even(max(1, int(PROBED_S / slow))))
        for size in sizes:
            self._meter.forget()
            # Kernels are made for each batch size, and stay: they are the process's. So does what threads have freed of
            # several copies, but that serves the next batch.
            if self._on_cpu and self._copies == 1:
                held = self._meter.held()
                self._subject.process += max(0, held - self._held)
                self._held = held
            seconds = self._run(size)
            if seconds is None:
                return
            took, estimate = self._meter.peak() - self._before, self._estimate(size)
            ratio = estimate["estimated_bytes"] / took if took else None
            self._tried.append({**estimate, "measured_bytes": took, "ratio": ratio, "seconds": seconds})


def _named(parts: MemoryParts) -> dict[str, int]:
    return {f"{name}_bytes": size for name, size in asdict(parts).items()}


def _series(top: int) -> list[int]:
    return sorted({_even(top // 4), top})


def _even(rows: int) -> int:
    return max(1, rows if rows < GRAIN else rows // GRAIN * GRAIN)


class StagesHere:
    """The stages of a model on one device, a `MemorySubject`: they are tried with all the others, and measured here."""

    def __init__(self, model: StagedRows | StagedText, device: str) -> None:
        self._model, self._device = model, device
        self.process = 0
        self.first, self.most, self.usual, self.timed = model.first, model.most, model.usual, model.timed
        self.warm_up, self.describe, self.run, self.facts = model.warm_up, model.describe, model.run, model.facts
        self.pages = model.pages

    def parts(self, batch: int) -> MemoryParts:
        each = [one.parts for one in self.stages(batch)]
        summed = MemoryParts(*(sum(getattr(one, field.name) for one in each) for field in fields(MemoryParts)))
        return replace(summed, process=self.process)

    def stages(self, batch: int) -> Sequence[StageParts]:
        return [one for one in self._model.stages(batch) if one.device == self._device]
