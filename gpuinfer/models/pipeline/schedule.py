"""Runs stages: a thread each, bounded queues between them that can be closed, and micro-batches that pass in order.

The schedule is the forward half of GPipe's (Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
Pipeline Parallelism", NeurIPS 2019): of m micro-batches over s equal stages a stage computes m of m + s - 1 steps. A
batch may follow the one before at once, so that consecutive batches pay the s - 1 only once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from gpuinfer.api import Lane
from gpuinfer.errors import BackendDied
from gpuinfer.models.out_of_memory import raised_in
from gpuinfer.models.pipeline.stage import CpuStage, CudaStage

Item = TypeVar("Item")


class StageQueueClosed(Exception):
    """The queue is closed."""


class StageQueue(Generic[Item]):
    """A FIFO queue of at most `room` items, for any number of threads at either end."""

    def __init__(self, room: int) -> None:
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        for _ in range(room):
            self._places.put(None)

    def __len__(self) -> int:
        return self._items.qsize()

    def put(self, item: Item) -> None:
        """Wait for room. Raises `StageQueueClosed`."""
        self._places.get()
        if self._closed:
            self._places.put(None)  # for the next who waits
            raise StageQueueClosed
        self._items.put(item)

    def get(self) -> Item:
        """Wait for an item. Raises `StageQueueClosed`, even if items are left."""
        item: Item = self._items.get()
        if self._closed:
            self._items.put(None)
            raise StageQueueClosed
        self._places.put(None)
        return item

    def close(self) -> None:
        self._closed = True
        self._items.put(None)
        self._places.put(None)


log = logging.getLogger("gpuinfer")

ROOM = 2  # micro-batches before each stage: one to go on with at once, and one behind it
CLOSE_S = 5.0  # for the threads to end
OPEN_S = 60.0  # for them to begin


class MicroBatch:
    """A micro-batch in the pipeline."""

    __slots__ = ("batch", "index", "value")

    def __init__(self, batch: Underway, index: int, value: Any) -> None:
        self.batch, self.index, self.value = batch, index, value


class Underway:
    """A batch in the pipeline, and the results of its micro-batches."""

    def __init__(self, count: int) -> None:
        self.outcomes: list[Any] = [None] * count
        self.dropped = False  # nobody waits for the rest
        self._left = count
        self._lock, self._over = threading.Lock(), threading.Event()

    def settle(self, index: int, outcome: Any) -> None:
        with self._lock:
            if self.dropped:
                return
            self.outcomes[index] = outcome
            self._left -= 1
            if not self._left:
                self._over.set()

    def fail(self, error: BaseException) -> None:
        """Fail the remaining micro-batches."""
        with self._lock:
            self.dropped = True
            self.outcomes = [error if outcome is None else outcome for outcome in self.outcomes]
        self._over.set()

    def wait(self) -> list[Any]:
        self._over.wait()
        return self.outcomes


class Pipeline:
    """Stages in a row. Any number of threads may call `run`; `lane` makes a lane of the time ledger by name."""

    def __init__(self, stages: Sequence[CpuStage | CudaStage], lane: Callable[[str], Lane]) -> None:
        self.stages = stages
        self._queues: list[StageQueue[MicroBatch]] = [StageQueue(ROOM) for _ in stages]
        self._feeding = threading.Lock()  # one batch behind the other: none is held up by a later one
        self._counting = threading.Lock()
        self._underway: set[Underway] = set()
        self._since = self._active_s = 0.0
        self._batches = self._micro_batches = 0
        self._closed = False
        self._begun = [threading.Event() for _ in stages]
        self._computing_since: list[float | None] = [None] * len(stages)
        self._failure: BaseException | None = None
        lanes = [lane(f"stage {number}") for number in range(len(stages))]
        self._threads = [
            threading.Thread(
                target=self._work, args=(number, lanes[number]), name=f"gpuinfer-stage-{number}", daemon=True
            )
            for number in range(len(stages))
        ]
        for thread, begun in zip(self._threads, self._begun, strict=True):
            # One after the other: how many threads a stage computes with is told to torch for all that begin later.
            thread.start()
            begun.wait(OPEN_S)
        if self._failure is not None:
            self.close()
            raise self._failure

    def run(self, values: Iterable[Any], count: int) -> list[Any]:
        """The last stage's value of each of these `count` micro-batches, or the exception that it raised.

        Micro-batches are made one by one, as there is room for them. Blocks until all are through, or one has failed:
        the rest is then dropped, with the same exception. Raises `BackendDied` when the pipeline is closed meanwhile.
        """
        batch = Underway(count)
        with self._counting:
            if self._closed:
                raise _closed()
            if not self._underway:
                self._since = time.monotonic()
            self._underway.add(batch)
        try:
            with self._feeding:
                self._feed(batch, values)
            return batch.wait()
        except StageQueueClosed:
            raise _closed() from None
        finally:
            with self._counting:
                self._underway.discard(batch)
                self._batches += 1
                self._micro_batches += count
                if not self._underway:
                    self._active_s += time.monotonic() - self._since

    def _feed(self, batch: Underway, values: Iterable[Any]) -> None:
        try:
            for index, value in enumerate(values):
                if batch.dropped:
                    return
                self._queues[0].put(MicroBatch(batch, index, value))
        except StageQueueClosed:
            raise
        except Exception as error:  # noqa: BLE001 (memory for one, say: as if the first stage had raised it)
            batch.fail(error)

    @property
    def under_way(self) -> int:
        """The number of batches in the stages."""
        return len(self._underway)

    def counts(self) -> dict[str, float]:
        """{batches, micro_batches, active_s (seconds with a batch in the pipeline)} so far."""
        with self._counting:
            under_way_s = time.monotonic() - self._since if self._underway else 0.0
            return {
                "batches": self._batches,
                "micro_batches": self._micro_batches,
                "active_s": self._active_s + under_way_s,
            }

    def _work(self, number: int, lane: Lane) -> None:
        """A stage's thread."""
        stage = self.stages[number]
        try:
            with stage.at_work():
                self._begun[number].set()
                while True:
                    if not len(self._queues[number]):
                        stage.settle()
                        lane.enter("idle")
                    self._pass_on(number, self._queues[number].get(), lane)
        except StageQueueClosed:
            pass
        except BaseException as error:  # noqa: BLE001 (a stage that cannot begin: whoever opens the pipeline is told)
            self._failure = error
        finally:
            self._begun[number].set()
            lane.enter("idle")

    def _pass_on(self, number: int, micro: MicroBatch, lane: Lane) -> None:
        """Compute and pass the value on. An exception of the stage fails that batch alone."""
        batch, index, value = micro.batch, micro.index, micro.value
        micro.value = None  # what the stage before it made is not needed for longer
        if batch.dropped:
            return
        self._computing_since[number] = time.monotonic()
        try:
            value = self.stages[number].compute(value, lane)
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, and the pipeline goes on)
            raised_in(error, self._called(number))
            batch.fail(error)
            return
        finally:
            self._computing_since[number] = None
        if number + 1 < len(self.stages):
            lane.enter("idle")  # if it has to wait for the next stage
            self._queues[number + 1].put(MicroBatch(batch, index, value))
        else:
            batch.settle(index, value)

    def waits_for(self) -> str:
        """The stage that has been computing longest; "" if none is. From any thread."""
        since = [(at, number) for number, at in enumerate(self._computing_since) if at is not None]
        return self._called(min(since)[1]) if since else ""

    def _called(self, number: int) -> str:
        return f"stage {number}, {self.stages[number].name}"

    def close(self, within_s: float = CLOSE_S) -> None:
        """Fail all batches and end the threads; a thread that does not end in time is logged and left behind."""
        with self._counting:
            self._closed = True
            underway = list(self._underway)
        for queue in self._queues:
            queue.close()
        for batch in underway:
            batch.fail(_closed())
        ends = time.monotonic() + within_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, ends - time.monotonic()))
        for stage, thread in zip(self.stages, self._threads, strict=True):
            if thread.is_alive():
                log.warning("the stage with %s is still at its last micro-batch, and is left behind.", stage.name)


def _closed() -> BackendDied:
    return BackendDied("the stages of the model are closed. Start the backend again.")
