"""The thread that steps a generator as long as there is work."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

from gpuinfer.api import Lane, TextRoofline
from gpuinfer.errors import BackendDied, Closed, UsageError
from gpuinfer.generation import Generation, Part
from gpuinfer.host import compile_status
from gpuinfer.host.process_memory import FirstTouchCost
from gpuinfer.models.cuda_graphs import own_stream
from gpuinfer.models.device_arbiter import DeviceSlot, UnsharedSlot
from gpuinfer.models.out_of_memory import first_line
from gpuinfer.stats import Lane as LedgerLane
from gpuinfer.text.generator.prompts import Prepared
from gpuinfer.text.generator.slotted import SlottedGenerator, Stepped
from gpuinfer.text.text_roofline import StepCost

logger = logging.getLogger("gpuinfer")

CLOSE_S = 10.0  # how long `close` waits for the step under way
FIRST_TOUCH = "first touch"  # of the ledger
Outcome = Generation | Exception
T = TypeVar("T")
Done = Callable[[Outcome], None]
Deliver = Callable[[Sequence[tuple[int, Part]], Sequence[tuple[int, Outcome]]], None]


@dataclass(slots=True)
class DriverCounters:
    """Totals since the start."""

    steps: int = 0
    seconds: float = 0.0  # in steps
    rows: int = 0  # summed over steps
    tokens: int = 0  # through the decoder
    prompt_tokens: int = 0  # of them, those of prompts
    cached_tokens: int = 0  # prompt tokens taken over from another prompt
    recomputed_tokens: int = 0  # computed again, as their pages had been needed elsewhere
    waited_rows: int = 0  # for pages
    preempted_rows: int = 0  # that gave back their pages
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    held_s: float = 0.0  # in steps that had no room for all tokens of the prompts that were there
    echoing_s: float = 0.0  # in steps that had none for the logits that prompts' log-probabilities need
    proposed: int = 0  # tokens
    accepted: int = 0  # of them, those that were drawn
    decode_rows: int = 0  # summed over steps without prompts
    decode_tokens: int = 0  # drawn in those
    spared_s: float = 0.0  # how much longer steps without proposals would have taken, as far as is known
    positions: int = 0  # of canvases, summed over steps: `tokens` are those of them that were computed
    committed: int = 0  # masks that became tokens
    idle: int = 0  # of `rows`, those that committed nothing
    flops: float = 0.0  # of the decoder, the least that its steps take: `text_roofline.StepCost`
    bytes: float = 0.0  # likewise
    attention_flops: float = 0.0  # of `flops`
    prefill_flops: float = 0.0  # of `flops`, those of steps that were mostly prompts
    prefill_bytes: float = 0.0
    faults: int = 0  # pages that the process touched first while it was in steps
    first_touch_s: float = 0.0  # of the driver's thread, that those took
    with_constraints: int = 0  # prompts that ask for it
    with_lists: int = 0  # constraints that are lists of texts
    with_stop: int = 0
    with_logprobs: int = 0  # of answers or of prompts
    with_penalties: int = 0
    read_as_they_grow: int = 0

    def add(self, stepped: Stepped, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds
        self.rows += stepped.rows
        self.tokens += stepped.tokens
        self.prompt_tokens += stepped.prompt_tokens
        self.cached_tokens += stepped.cached
        self.recomputed_tokens += stepped.recomputed
        self.waited_rows += stepped.waited
        self.preempted_rows += stepped.preempted
        self.output_tokens += stepped.output_tokens
        self.held_s += seconds * stepped.held
        self.echoing_s += seconds * stepped.echoing
        self.proposed += stepped.proposed
        self.accepted += stepped.accepted
        self.spared_s += stepped.spared_s
        if not stepped.prompt_tokens and not stepped.recomputed:
            self.decode_rows += stepped.rows
            self.decode_tokens += stepped.output_tokens
        self.positions += stepped.positions
        self.committed += stepped.committed
        self.idle += stepped.idle


@dataclass(frozen=True, slots=True)
class _Change:
    """A change to the generator between two steps; `drain`: once nothing is under way."""

    apply: Callable[[], None]
    drain: bool
    done: Future[None]


class Driver:
    """Owns a generator: its thread makes all calls that may not come from any thread.

    Outcomes are delivered in that thread: those of a step in one call of `deliver` as (ticket, outcome), with the
    (ticket, part) before them; or one by one to the `done` of their submission, which gets no parts. Neither may block.
    `on_step` is called with the rows and seconds of each step. With `place` each step waits for its turn at the device.
    `cost` computes the least cost of steps.
    """

    def __init__(
        self,
        generator: SlottedGenerator[Any],
        *,
        lane: Lane | None = None,
        deliver: Deliver | None = None,
        on_step: Callable[[int, float], None] | None = None,
        place: DeviceSlot | None = None,
        cost: StepCost | None = None,
    ) -> None:
        self.generator, self.on_step = generator, on_step
        self._cost, self._first_touch = cost, FirstTouchCost()
        self._place = place or UnsharedSlot()
        self._width = self._used = 1 if place is None else int(generator.facts.get("threads") or 1)
        self.deliver = deliver
        self._lane: Lane | None = None
        self._wake = threading.Condition()
        self._cancelled: list[int] = []
        self._waiting: deque[tuple[int, Prepared]] = deque()  # prompts without slots
        self._updates: deque[_Change] = deque()
        self._open: dict[int, Done | None] = {}  # tickets without an outcome
        self._tickets = 0
        self._asleep = self._closing = False
        self._gone: Exception | None = None  # why nothing can be submitted any more
        self._counters = DriverCounters()
        self.lane = lane
        self._thread = threading.Thread(target=self._run, name="gpuinfer-generator", daemon=True)
        self._thread.start()

    @property
    def lane(self) -> Lane | None:
        """The ledger's lane for this thread's time; it may be set later."""
        return self._lane

    @lane.setter
    def lane(self, lane: Lane | None) -> None:
        self._lane = lane
        self.generator.enter = (lambda station: None) if lane is None else lane.enter

    @property
    def alive(self) -> bool:
        """Whether prompts can be submitted."""
        return self._gone is None and not self._closing

    def submit(self, prepared: Prepared, done: Done | None = None) -> int:
        """Answer this prompt; returns its ticket. From any thread. A prompt without free slots waits in the queue.

        Raises `BackendDied` or `Closed`; `ValueError` for more samples than slots, which no generator prepares.
        """
        if prepared.samples > self.generator.slots:
            raise ValueError(f"{prepared.samples} samples and {self.generator.slots} slots.")
        return self.submit_all((prepared,), done)[0]

    def submit_all(self, prompts: Sequence[Prepared], done: Done | None = None) -> range:
        """Answer these prompts; returns their tickets. The thread is woken once for all of them."""
        with self._wake:
            self._refuse_if_gone()
            tickets = range(self._tickets, self._tickets + len(prompts))
            self._tickets = tickets.stop
            self._open.update(dict.fromkeys(tickets, done))
            self._waiting.extend(zip(tickets, prompts, strict=True))
            self._rouse()
        return tickets

    def cancel(self, ticket: int) -> None:
        """Stop computing this answer. From any thread; an outcome that is on its way may still come."""
        with self._wake:
            if ticket in self._open:
                self._cancelled.append(ticket)
                self._rouse()

    def update(self, version: str, weights: object, *, drain: bool) -> Future[None]:
        """Change to these weights (`SlottedGenerator.read_weights`) between two steps; from any thread.

        With `drain` answers under way are completed first, and prompts that are not under way wait until the change.
        The future can be cancelled until then. It and this call raise `BackendDied` or `Closed`.
        """
        return self._between_steps(lambda: self.generator.update(version, weights), drain)

    def load_adapter(self, name: str, version: str, adapter: object) -> Future[None]:
        """`SlottedGenerator.load_adapter` between two steps, from any thread."""
        return self._between_steps(lambda: self.generator.load_adapter(name, version, adapter))

    def unload_adapter(self, name: str) -> Future[None]:
        """`SlottedGenerator.unload_adapter` between two steps, from any thread."""
        return self._between_steps(lambda: self.generator.unload_adapter(name))

    def _between_steps(self, apply: Callable[[], None], drain: bool = False) -> Future[None]:
        change = _Change(apply, drain, Future())
        with self._wake:
            self._refuse_if_gone()
            self._updates.append(change)
            self._rouse()
        return change.done

    def measure(self, rows: int, seconds: float) -> Future[TextRoofline]:
        """`SlottedGenerator.measure` once nothing is under way; from any thread."""
        return self.between_steps(lambda: self.generator.measure(rows, seconds), drain=True)

    def between_steps(self, work: Callable[[], T], *, drain: bool = False) -> Future[T]:
        """Do something with the generator between two of its steps, or with `drain` once nothing is under way; from any
        thread. The future, which can be cancelled, has what it answers or raises.
        """
        done: Future[T] = Future()

        def apply() -> None:
            if not done.set_running_or_notify_cancel():  # it was cancelled
                return
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001  whatever it is, answers can go on
                done.set_exception(error)

        def failed(change: Future[None]) -> None:
            if not done.done():
                done.cancel() if change.cancelled() else done.set_exception(change.exception() or _closed())

        self._between_steps(apply, drain).add_done_callback(failed)
        return done

    def counters(self) -> dict[str, float]:
        """The fields of `DriverCounters`."""
        return asdict(self._counters)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop after the step under way, fail unfinished prompts with `Closed`, close the generator.

        A step that takes longer than `timeout_s` is left running, and not waited for.
        """
        with self._wake:
            self._closing = True
            self._rouse()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("a generation step has not ended within %g s of closing: it is left behind.", timeout_s)
            self._fail_all(_closed())

    def _refuse_if_gone(self) -> None:
        if self._gone is not None:
            raise self._gone
        if self._closing:
            raise _closed()

    def _rouse(self) -> None:
        if self._asleep:
            self._wake.notify()

    def _run(self) -> None:
        compile_status.set_lane(lambda: self._lane)
        try:
            with own_stream(self.generator.device):
                while self._fetch():
                    self._step()
            reason: Exception = _closed()
        except BaseException as error:  # noqa: BLE001  whatever it is, no caller may wait for this thread for ever
            reason = (
                error
                if isinstance(error, BackendDied)
                else BackendDied(
                    f"the generator's thread ended ({type(error).__name__}: {first_line(error)}). "
                    "Start again; -vv shows where it happened."
                )
            )
            logger.error("%s", reason)
        self._fail_all(reason)
        try:
            self.generator.close()
        except Exception as error:  # noqa: BLE001  it is closed anyway
            logger.warning("the decoder could not be closed: %s", first_line(error))

    def _fetch(self) -> bool:
        """Cancel, change and add what callers have asked for; wait while there is nothing to do. False: closing."""
        with self._wake:
            while not (self._cancelled or self._closing or self._waiting or self._updates or self.generator.busy):
                self.generator.enter("idle")
                self._asleep = True
                self._wake.wait()
                self._asleep = False
            if self._closing:
                return False
            cancelled, self._cancelled = set(self._cancelled), []
            if cancelled:
                self._waiting = deque(entry for entry in self._waiting if entry[0] not in cancelled)
                for ticket in cancelled:
                    self._open.pop(ticket, None)
        for ticket in cancelled:
            self.generator.cancel(ticket)
        self._change_weights()
        while not self._updates:
            with self._wake:  # the next prompt, when there are slots for all its samples
                if not self._waiting or self._waiting[0][1].samples > self.generator.free_slots:
                    break
                ticket, prepared = self._waiting.popleft()
            self._count_prompt(prepared)
            self.generator.add(ticket, prepared)
        return True

    def _count_prompt(self, prepared: Prepared) -> None:
        """Count what a prompt wants beside its tokens."""
        counters, own = self._counters, prepared.sampling
        listed = own.constraint is not None and own.constraint.listed is not None
        counters.with_constraints += own.constraint is not None and not listed
        counters.with_lists += listed
        counters.with_stop += bool(own.stop)
        counters.with_logprobs += own.logprobs is not None or own.prompt_logprobs is not None or own.processed_logprobs
        counters.with_penalties += own.repetition_penalty != 1 or bool(own.presence_penalty or own.frequency_penalty)
        counters.read_as_they_grow += prepared.parts

    def _change_weights(self) -> None:
        """Make the changes that are due. One that has to drain first stays, and so do all that came after it."""
        while self._updates and not (self._updates[0].drain and self.generator.busy):
            update = self._updates[0]
            if update.done.set_running_or_notify_cancel():
                try:
                    update.apply()
                except UsageError as error:  # with nothing changed
                    update.done.set_exception(error)
                else:  # other exceptions end the thread, as some weights may have changed: `_fail_all`
                    update.done.set_result(None)
            self._updates.popleft()

    def _step(self) -> None:
        if not self.generator.busy:
            return
        turn = self._place.begin(self._width, self.generator.enter)
        try:
            threads = self._place.cores_of(turn, self._width)
            if threads != self._used:
                self.generator.use(threads)
                self._used = threads
            self.generator.goes_ahead = not self._place.has_all(turn)
            self._first_touch.begin()
            started = time.perf_counter()
            stepped = self.generator.step()
            seconds = time.perf_counter() - started
        finally:
            if self._place.end(turn):
                self.generator.rest()
        if stepped.rows:
            self._count(stepped, seconds)
            if self.on_step is not None:
                self._notify(self.on_step, stepped.rows, seconds)
        if stepped.finished or stepped.parts:
            outcomes = [(ticket, outcome) for ticket, outcome in stepped.finished if isinstance(ticket, int)]
            self._hand_out(outcomes, cast(Sequence[tuple[int, Part]], stepped.parts))

    def _count(self, stepped: Stepped, seconds: float) -> None:
        """Count a step, its least cost, and the part of its time that first touches of memory took."""
        counters, prompts = self._counters, 2 * stepped.prompt_tokens > stepped.tokens
        counters.add(stepped, seconds)
        if self._cost is not None and stepped.extent is not None:
            cost = self._cost.of(stepped.extent)
            counters.flops += cost.flops
            counters.bytes += cost.bytes
            counters.attention_flops += cost.attention
            if prompts:
                counters.prefill_flops += cost.flops
                counters.prefill_bytes += cost.bytes
        touching = self._first_touch.end()
        counters.faults, counters.first_touch_s = self._first_touch.faults, counters.first_touch_s + touching
        if touching and isinstance(self._lane, LedgerLane):
            self._lane.rebook("prefill" if prompts else "forward", FIRST_TOUCH, touching)

    def _hand_out(self, outcomes: Sequence[tuple[int, Outcome]], parts: Sequence[tuple[int, Part]] = ()) -> None:
        with self._wake:
            # tickets that closing has failed in the meantime are no longer open
            wanted = [(ticket, outcome, self._open.pop(ticket)) for ticket, outcome in outcomes if ticket in self._open]
        for _, outcome, _ in wanted:
            if isinstance(outcome, Generation):
                self._counters.finished += 1
            else:
                self._counters.failed += 1
        if self.deliver is not None:
            self._notify(self.deliver, parts, [(ticket, outcome) for ticket, outcome, done in wanted if done is None])
        for _, outcome, done in wanted:
            if done is not None:
                self._notify(done, outcome)

    def _notify(self, listener: Callable[..., None], *news: object) -> None:
        try:
            listener(*news)
        except Exception as error:  # noqa: BLE001  a listener's fault harms no other row
            logger.warning("an answer could not be handed over: %s", first_line(error))

    def _fail_all(self, reason: Exception) -> None:
        with self._wake:
            self._gone = reason
            tickets = list(self._open)
            self._waiting.clear()
            updates = [update.done for update in self._updates]
        for done in updates:
            if done.running() or (not done.done() and done.set_running_or_notify_cancel()):
                done.set_exception(reason)
        if tickets:
            self._hand_out([(ticket, reason) for ticket in tickets])


def _closed() -> Closed:
    return Closed("the model was closed before the answer was complete. Submit it again.")
