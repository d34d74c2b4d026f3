"""The plugin contract: all that the author of a backend, a strategy, a workload or a routing policy reads.

A workload makes requests, a strategy decides which of the waiting ones become a batch, a backend answers it. The three
never import one another; they meet here. Times are seconds on the engine's monotonic clock, sizes are counted in rows.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict

from gpuinfer.errors import BackendDied, UsageError

if TYPE_CHECKING:
    from gpuinfer.division import Division, RangeFeed
    from gpuinfer.generation import Part

Result = Any
"""What a backend answers to one request: an array [rows, ...], a tuple or dict of such arrays, or any other object."""


class Priority(enum.IntEnum):
    """The class of a request; the lower the number, the sooner it is served."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Reason(enum.StrEnum):
    """Why a batch was cut when it was."""

    FULL = "full"  # no more rows fit
    DEADLINE = "deadline"  # the oldest deadline is near
    WAITED = "waited"  # the oldest request has waited as long as it may
    CLIENTS = "clients"  # every live client that is not being served already waits
    GAIN = "gain"  # waiting costs more than it saves
    CAP = "cap"  # the size that the strategy allows itself is reached
    FREE = "free"  # the backend had room, and there was nothing to wait for
    DRAIN = "drain"  # the engine is closing


@dataclass(slots=True, eq=False)  # not frozen, which would make a request cost half as much again
class Request:
    """What a workload submits at once: one row, or a block of rows that travel together. Read-only for plugins."""

    payload: Any
    rows: int = 1
    arrived: float = 0.0
    priority: Priority = Priority.NORMAL
    deadline: float = math.inf  # past it the request fails before it costs anything
    group: Hashable = None  # only requests of one group may share a batch
    client: Hashable = None  # who asked: lets a strategy see that every live client already waits
    parts: bool = False  # someone reads along: a backend that can make parts of the answer yields them


@dataclass(frozen=True, slots=True)
class Limits:
    """What a backend can take."""

    max_rows: int  # in one batch
    in_flight: int = 1  # batches at once
    slots: int | None = None  # rows admitted and not yet finished, for backends that generate
    enough_rows: int | None = None  # a batch of more is no faster a row: nothing to wait for, better use another lane
    devices: Sequence[str] = ()
    """Where there are several: the device of each lane, `in_flight` of them, to which all its batches go
    (`lane_device`). With slots there is one lane for each (`forward_lanes`)."""


@dataclass(frozen=True, slots=True)
class Event:
    """A part of an answer, or its end. `last` settles the request with `value`, or with `error` when there is one.

    Before it, and only for a request that wants `parts`, come any number of events with `last=False`, each with a
    `generation.Part` as its value. Joined sample by sample they are the whole answer, which comes last all the same.
    """

    request: Request
    value: Result = None
    error: BaseException | None = None
    last: bool = True


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch that ran, for the strategy to learn from."""

    rows: int
    requests: int
    started: float
    seconds: float  # in the backend
    queue_wait_s: float  # of its oldest request, until the cut
    reason: Reason


@dataclass(frozen=True, slots=True)
class QueueView:
    """The waiting requests of one group, as a strategy may see them. Never empty when a strategy is asked."""

    waiting: Sequence[Request]  # oldest first
    rows: int  # the sum over `waiting`
    now: float
    limits: Limits
    live: int = 0  # clients that have joined and not left
    thinking: int = 0  # live clients that neither wait nor are being served, and were not away for unusually long
    arrival_rate: float = 0.0  # rows per second, a moving average
    think_s: float = math.inf  # from an answer to the same client's next request, a moving average; inf: not known
    outstanding: int = 0  # requests of all groups that wait or are being served
    deadline: float = math.inf  # no request that waits has an earlier one
    class_rows: Sequence[int] = (0, 0, 0)  # of `rows`, those of each class, by `Priority`

    @property
    def all_clients_wait(self) -> bool:
        """Whether waiting longer can bring nothing: each live client waits already or is being served."""
        return self.live > 0 and self.thinking == 0


ModelKind = Literal["rows", "text", "gradients"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How to build a model. It is picklable and holds no weights, so that each process can build its own."""

    name: str  # a built-in network, `module:factory`, or a checkpoint folder
    weights: str | None = None  # a safetensors file, or a torch file that is read with weights_only=True
    inputs: int = 0  # features per row, for models that take rows
    input_dtype: str = "float32"  # as the rows arrive; the backend casts them to the run's dtype
    arguments: Mapping[str, Any] = field(default_factory=dict)  # passed to the factory as far as it takes them
    kind: ModelKind = "rows"
    """text: payloads are `generation.Prompt`, results `generation.Generation`. gradients: a model of rows in training,
    payloads are `gradients.TrainingBatch`, results `gradients.Gradients`."""
    strict: bool = False  # whether a factory that does not take every one of `arguments` is refused
    layout: Any = None
    """`models.row_layout.RowLayout` of rows that are no flat features. In this process payloads are then
    `models.row_layout.SingleRow` or `RowBatch`; to others they travel packed, `input_dtype` "packed"."""
    source: Any = None  # a model that the program has made (`models.model_object`); `name` is what it is called


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run tells every plugin that it builds."""

    model: ModelSpec | None = None
    devices: Sequence[str] = ("auto",)  # each auto, all, cpu, cuda or cuda:1
    dtype: str = "float32"
    seed: int = 0
    processes: int = 1  # how many processes share this machine's cores, each with its own copy of the backend
    deterministic: bool = False  # same answer for a row whatever it shares its batch with
    trace: str | None = None  # where each engine records what happens (`gpuinfer.trace`); None: nowhere
    profile: str | None = None  # a folder, to which each process writes a profile of so many seconds of its work
    profile_s: float = 5.0
    patience: float = 10.0  # seconds for which a plugin may hold something before it is named
    give_up: float = 600.0  # the same before it is given up, and the run with it (`gpuinfer.engine.watchdog`)
    max_queue_rows: int | None = None  # rows that may wait in each queue; None: as many as the engine thinks right
    share: float = 1.0  # of the device, beside those of other models in the same run

    @property
    def device(self) -> str:
        """The device, of a plugin that serves one. Raises `UsageError` for several."""
        if len(self.devices) != 1 or self.devices[0] == "all":
            count = "all" if self.devices == ("all",) else f"{len(self.devices)} devices ({', '.join(self.devices)})"
            one = next((name for name in self.devices if name != "all"), "auto")
            raise UsageError(f"--device names {count}, and only one can be served. Name one: --device {one}.")
        return self.devices[0]


BETWEEN_DEVICES = " + "  # in the arrangement of a roofline


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the bare model does on this machine with nothing else running: the most that any run can reach."""

    rows_per_s: float
    at_rows: int  # the batch size that reached it
    arrangement: str  # such as "2 forwards × 1 thread"; one for each device, with `BETWEEN_DEVICES` between them
    measured: Sequence[float] = ()  # rows per second of each measurement, before the run first; the highest counts
    raised: bool = False  # the run itself did more than the bare model in any of them, and its own rate counts

    @property
    def devices(self) -> int:
        """How many it was measured on."""
        return 1 + self.arrangement.count(BETWEEN_DEVICES)


@dataclass(frozen=True, slots=True)
class TextRoofline:
    """What this machine does at best with a model of text and nothing else running, all cores taken: the two sides of
    a roofline. A step lasts no shorter than its operations at `flops_per_s`, nor than its bytes at `bytes_per_s`.
    """

    flops_per_s: float  # of products in steps of `at_rows` rows, the decoder's own or a library's, the better one
    prompt_flops_per_s: float  # the same in steps of `at_tokens` tokens of prompts
    bytes_per_s: float  # read from memory, one after another
    at_rows: int
    at_tokens: int
    own_flops_per_s: float  # the decoder's own at `at_rows`: where it is less than `flops_per_s`, its products are slow
    remembered: bool = False  # an earlier run has measured it


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What a run gives its backend at the start, beside the `Setup` that every plugin is built with."""

    strategy: Strategy | None = None  # the run's: a remote backend takes it to where batches form
    roofline: Roofline | None = None  # what the bare model was measured to do here, if it was
    stepped: Callable[[int, float], None] = lambda rows, seconds: None
    """A backend with slots tells it the rows and seconds of each forward step, on the event loop: those are the run's
    batches, not what was admitted at once."""
    resized: Callable[[int], None] = lambda slots: None
    """A backend with slots calls it with their number when that changes, on the event loop; never more than in its
    `limits`."""
    lane: Callable[[str], Lane] = lambda name: _Untold()
    """A new lane of this name in the ledger, for a thread of the backend's own beside those that serve batches. Of a
    model in stages each has one: "stage 0", "stage 1", …"""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a workload has come. Every field is a total since the start, not a difference.

    `facts` that the verdict knows, those that apply: `workers` (processes that make requests), `blocks` (requests that
    each keeps under way), `clients` (requests under way at most, of clients without lanes), `rows_outstanding` (rows
    under way at most), `games_in_flight` (when a flag of that name sets it), `threads` (of one forward),
    `offered_rows_per_s` (the load, where it comes from outside).
    """

    done: int
    total: int | None = None
    unit: str = "rows"
    counts: Mapping[str, float] = field(default_factory=dict)  # games, simulations, evaluations, … for the rates
    facts: Mapping[str, float] = field(default_factory=dict)  # for the verdict; no rates
    note: str = ""  # what is going on, when it is not the work itself
    setup: bool = False  # still preparing: the run's clock starts at the first Progress without it
    before: int = 0  # of `done`, by an earlier run: no part of this run's pace
    begun: float = 0.0  # how much is done of what is under way: two games half played make 1.0
    failed: int | None = None  # of `done`, how many ended in an error; None: what counts are the requests that did
    failure: str = ""  # what the first of them was told; "": what the first request was told whose batch failed
    figures: Sequence[tuple[int, Mapping[str, float]]] = ()
    """Of steps that have ended since the Progress before, each with its number: the loss of a training step, the reward
    of a group. For trackers (`--track`); a name with a slash stays as it is, others get the workload's before them."""


class Options(BaseModel):
    """A plugin's options. Its fields become `-B key=value`, `-S key=value`, table entries and environment variables."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Plugin:
    """What backends, strategies and workloads share: typed options and the run's setup.

    Raises `pydantic.ValidationError` for an unknown or ill-typed option.
    """

    class Options(Options):
        """No options unless a plugin declares some."""

    options: Any

    @property
    def acts_for(self) -> type[Plugin] | None:
        """Of one that only passes on to another plugin: that one's class, which messages name. None of all others."""
        return None

    @classmethod
    def missing(cls) -> str | None:
        """What keeps it from being used here, such as a library that is not installed, with the cure. Nothing heavy is
        imported for it.
        """
        return None

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        self.setup = setup or Setup()
        self.options = self.Options(**options)


class Backend(Plugin, ABC):
    """Turns a batch into results, here or elsewhere. `limits` and `infer` are enough."""

    limits: Limits
    serves: ClassVar[Sequence[ModelKind]] = ("rows",)  # the kinds of model whose payloads it answers
    several_devices: ClassVar[bool] = False  # whether more than one of `Setup.devices` may be given
    remote_code: ClassVar[bool] = False  # whether it runs code that comes with a checkpoint, where a user says so
    finds_models: ClassVar[bool] = False  # whether it looks for a model of text itself, where no folder has its name
    remote: ClassVar[bool] = False  # batches are formed beside the model, over there: the engine here passes through
    counts_requests: ClassVar[bool] = False  # of a remote one: requests are made over there too, and counted in `stats`
    notices: Sequence[str] = ()  # what the user should know before the run: each is shown once

    @property
    def compute(self) -> str:
        """The number format that its model computes in: float32, bfloat16, float16, or auto for what is quickest here.
        The roofline is measured in it.
        """
        return "auto"

    @property
    def arithmetic(self) -> str:
        """Those of its options that change what it computes, as they were given, such as "weights=int8"; empty: none.
        What a run with others has answered is not gone on with.
        """
        return ""

    async def check(self) -> None:
        """Raise `UsageError` for what cannot be served, as far as that is known within seconds. The default knows of
        nothing.

        A run asks once, in the process that the user has started, before it measures anything or starts a process; a
        server asks of all its models before it loads the first. It is asked in a thread with an event loop of its own,
        and waited for a minute: leave nothing open. `start` refuses it again.
        """

    async def start(self, context: BackendContext) -> None:
        """Make ready: load the model, connect. `limits` must be final when it returns. Called once.

        With worker processes a remote backend is started in the process that starts them, and before them.
        """

    def block(self, rows: int) -> Any:
        """Room for `rows` rows, an array [rows, ...], that this backend reads where it lies when a payload is a view of
        it. None, the default: payloads may lie anywhere.

        The caller owns it as long as the backend is open. The answer to such a payload may lie in the backend's own
        memory, and is overwritten when a view of the same block is submitted again.
        """
        return None

    @abstractmethod
    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        """Answer every request of the batch: one result for each, in order. An exception fails this batch alone; one in
        the place of a result fails that request alone.
        """

    @property
    def streams(self) -> bool:
        """Whether answers come through `stream`. The default one only wraps `infer`, which is quicker called itself."""
        return type(self).stream is not Backend.stream

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Answer in parts as they come, requests in any order. Override it for a backend that generates.

        With `limits.slots` it is called as often as there are free slots, whatever is under way; `forward_lane` is then
        the one lane of the forward, whose stations the backend sets itself.
        """
        for request, result in zip(batch, await self.infer(batch), strict=True):
            yield Event(request, result)

    def cancel(self, request: Request) -> None:
        """This answer is not wanted any more. The default does nothing: a late result is dropped."""

    @property
    def updates(self) -> bool:
        """Whether `update` can do anything but refuse. Final once `start` has returned."""
        return type(self).update is not Backend.update

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """Compute with other weights from now on, and name them `version`: a request that comes after the return is
        answered by them alone.

        `weights` is a folder or a safetensors file with weights of the same shape. With `drain` answers under way are
        finished with the old weights, and what comes meanwhile waits for that; without, they go on with the new ones,
        over what the old ones have cached of them. Nothing that old weights have cached serves another request. Each
        answer says in `Generation.versions` what computed it.

        With `adapter` they are those of an adapter (a folder), which is loaded beside the base as `adapter@version`:
        prompts may ask for that as long as it is there, and `adapter` means it from now on. Answers under way keep what
        they began with, and nothing drains.

        Raises `UsageError` for weights that do not fit, with the old ones in force, and where this cannot be done.
        """
        raise UsageError(
            f"the backend '{type(self).__name__.lower()}' cannot change its weights while it runs. "
            "End the run, and start another with the new ones."
        )

    @property
    def adapters(self) -> Sequence[str]:
        """What `Prompt.adapter` may be now: names, and names with versions (`policy`, `policy@v7`)."""
        return ()

    async def unload(self, adapter: str) -> None:
        """No prompt may ask for this adapter any more, all its versions or the one that is named. Answers under way
        keep it. Raises `UsageError` for one that is not there.
        """
        raise UsageError(f"the backend '{type(self).__name__.lower()}' has no adapter '{adapter}'. Name another.")

    def connect(self) -> Connector:
        """A picklable way in for a worker process. The default gives each process its own copy of this backend."""
        return OwnCopy(type(self), self.setup, self.options.model_dump())

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Backend:
        """Another backend of this class and these options, for this other model, not started: for `Infer.beside`.

        `share` becomes its `Setup.share`: of a device that both compute on, where the backend can give each its own.
        Raises `UsageError` where one cannot be had. The default is one for backends whose batches form here.
        """
        if self.remote:
            raise UsageError(
                f"the backend '{type(self).__name__.lower()}' is a way to a server with one model, and "
                f"'{spec.name}' would be another beside it. Let the workload open it before its workers start, or "
                "choose a backend that loads models itself: --backend inprocess."
            )
        setup = replace(self.setup, model=spec, share=share)
        return type(self)(setup, **self.options.model_dump(exclude_unset=True))

    async def stats(self) -> Mapping[str, Any] | None:
        """What the far side has measured until now: `Snapshot.to_wire()` of its queue and forward lanes. None when
        batches are formed here.
        """
        return None

    def counted_here(self) -> Mapping[str, Any] | None:
        """Of a remote backend: what this process has answered itself until now, `Snapshot.to_wire()`, since the far
        side was lost (`--fallback`). None where the far side has answered everything.
        """
        return None

    async def measure(self, rows: int, seconds: float) -> TextRoofline | None:
        """Of a model of text: what this machine does with it at best, in steps of so many rows, measured for about so
        many seconds. Asked once the run is over, with nothing under way. None, the default: it is not known.
        """
        return None

    async def free_memory(self) -> Mapping[str, int]:
        """Release memory that it keeps and no request needs now: `freed_bytes` and, of the device afterwards,
        `free_bytes`; of text `freed_pages`, which had been kept for later prompts. Empty, the default: it keeps none.
        """
        return {}

    def device(self) -> Mapping[str, Any]:
        """The device for the report: name, utilisation (0 to 1), allocated_mb, reserved_mb; those that are known.

        `in_force` may name the values that options took which were left to the backend, such as {threads: 2}.
        `devices` tells of each of several, by name, the same and what it has done (`gpuinfer.stats.DeviceCount`).
        A backend with slots adds `model`, plain facts of what it serves (name, slots, context, estimated_bytes,
        measured_bytes, …), `tokens`, how many it has taken in and drawn until now: {input, output}; and `steps`, what
        they came to: {steps, seconds, prompt_tokens, held_s (in steps without room for all of the prompts' tokens),
        echoing_s (without room for the logits of their log-probabilities), waited_rows (for pages of the cache),
        preempted_rows (that gave theirs back), recomputed_tokens (computed again for that)}, and of diffusion models
        what `gpuinfer.stats` counts.
        """
        return {}

    def waits_for(self) -> str:
        """Whom it waits for while it has a batch: "stage 1, layers 4 to 7 on cuda:1". It is told of a batch that takes
        too long. "" where there is nothing to say. Asked from any thread, and answered at once.
        """
        return ""

    @property
    def lost(self) -> BackendDied | None:
        """Why nothing will be answered any more: a process that it stands on is gone and does not come back. None while
        it serves. Asked several times a second, and answered at once: a server whose model died says so before
        anybody asks for an answer.
        """
        return None

    async def close(self) -> None:
        """Let go of everything. Called once, also after a failed `start`."""


class Connector(Protocol):
    """Opens a backend in another process."""

    def open(self) -> Backend: ...


@dataclass(frozen=True)
class OwnCopy:
    """The default connector: another backend of the same class, setup and options."""

    backend: type[Backend]
    setup: Setup
    options: Mapping[str, Any]

    def open(self) -> Backend:
        return self.backend(self.setup, **self.options)


class Strategy(Plugin, ABC):
    """Decides when the waiting requests become a batch. It never reads a clock and never sleeps.

    `cut_at`, `reason` and `select` may be asked any number of times about one queue and answer the same; what must be
    remembered is remembered in `account` and `observe`.
    """

    notices: Sequence[str] = ()  # what the user should know of what was learnt: each is shown once

    @property
    def latency_target(self) -> float | None:
        """Seconds within which it means 95 of 100 requests to be answered, queue included; None: it has no such aim."""
        return None

    @abstractmethod
    def cut_at(self, queue: QueueView) -> float:
        """When to cut the next batch. A time already past means now.

        The queue is never empty and the backend has room; the engine asks again after each arrival and departure.
        """

    def select(self, queue: QueueView) -> Sequence[Request]:
        """Which requests go in. The default: oldest first, as long as their rows fit."""
        chosen, rows = [], 0
        for request in queue.waiting:
            if rows + request.rows > queue.limits.max_rows:
                break
            chosen.append(request)
            rows += request.rows
        return chosen

    def reason(self, queue: QueueView) -> Reason:
        """Why the batch is cut now; asked just before `select`, with the same view."""
        if queue.rows >= queue.limits.max_rows:
            return Reason.FULL
        return Reason.CLIENTS if queue.all_clients_wait else Reason.FREE

    def account(self, batch: Sequence[Request], now: float) -> None:
        """These requests have been cut, at the same time of the same clock as `select` saw."""

    def observe(self, batch: BatchRecord) -> None:
        """A batch has run: learn from it."""

    def shed(self, queue: QueueView, arriving: Request) -> Sequence[Request]:
        """Which waiting requests to turn away to make room for `arriving`, as the queue is full. None of them, the
        default: then `arriving` itself is turned away, as it is when their rows are too few.
        """
        return ()

    def retry_after(self, queue: QueueView, request: Request) -> float | None:
        """In how many seconds there may be room for a request like this one, which is turned away; None: not known."""
        return None


class ReplicaLoad:
    """One replica as a routing policy sees it. Read-only for policies; the caller keeps the numbers up to date.

    `in_flight`: requests that it has now; `speed`: relative to the others, above 0; a slow start lowers it. `room`:
    requests that it may have under way; inf: no bound. `member` is its number in the fleet, and stays its own; `mark`
    are 64 bits by which it is known in every process and on every machine.
    """

    __slots__ = ("in_flight", "mark", "member", "room", "speed")

    def __init__(self, member: int, in_flight: float = 0, speed: float = 1.0, room: float = math.inf) -> None:
        self.member, self.in_flight, self.speed, self.room = member, in_flight, speed, room
        self.mark = int.from_bytes(hashlib.blake2b(b"%d" % member, digest_size=8).digest(), "little") | 1

    def __repr__(self) -> str:
        return f"ReplicaLoad({self.member}, in_flight={self.in_flight:g}, speed={self.speed:g}, room={self.room:g})"


@dataclass(slots=True)
class RoutedRequest:
    """A request that is to be routed. `affinity` is what its like share: a session, a user, or a hash of how the prompt
    begins; None where there is none, and where the policy does not need it.
    """

    rows: float = 1.0
    affinity: bytes | None = None


_WHY = re.compile(r"[ -:<-~]{0,100}")


class RoutingChoice(NamedTuple):
    """`why` is short, such as `least-loaded 3<5`: answers carry it in a header. Printable ASCII without semicolons, at
    most 100 characters.
    """

    load: ReplicaLoad
    why: str

    def fault(self, loads: Sequence[ReplicaLoad]) -> str | None:
        """Why it is no choice of these; None: it is one."""
        if self.load not in loads:
            return "that is none of the replicas"
        if type(self.why) is not str or not _WHY.fullmatch(self.why):
            return "its reason is no line of at most 100 ASCII characters without semicolons"
        return None


class RoutingPolicy(Plugin, ABC):
    """Chooses which replica a request goes to. It reads no clock and does no I/O, so that router and simulator run the
    same, and takes a few microseconds: it stands in the way of every request.

    Each router process has one of its own. One that raises, or whose choice is none of `loads`, is reported once, and
    the least loaded replica is taken in its place.
    """

    needs_affinity: ClassVar[bool] = False  # whether it reads `affinity`, which is None otherwise
    needs_load: ClassVar[bool] = True  # whether it reads `in_flight`

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.dice = random.Random(self.setup.seed)  # for what it leaves to chance

    @abstractmethod
    def choose(self, loads: Sequence[ReplicaLoad], request: RoutedRequest) -> RoutingChoice:
        """One of `loads`: the replicas that take this request, at least one, in any order. They need not be those of
        the previous call.
        """


class Lane(Protocol):
    """A worker thread or a forward slot; at each instant it is in exactly one station of the time ledger."""

    def enter(self, station: str) -> None:
        """Leave the present station and enter this one: search, encode, transfer, forward, reply, idle, …"""
        ...


class _Untold:
    """A lane where nobody keeps a ledger."""

    def enter(self, station: str) -> None:
        pass


forward_lane: ContextVar[Lane | None] = ContextVar("forward_lane", default=None)
"""The lane of the batch being served. The engine sets it around `infer` and `stream`."""


forward_lanes: ContextVar[Sequence[Lane]] = ContextVar("forward_lanes", default=())
"""With `Limits.slots`: all lanes of the forward, one for each of `Limits.devices`, or one. The engine sets it around
`stream`."""


def lane_device() -> str:
    """Which of `Limits.devices` the batch being served is for; "" where there is one device, and outside of batches."""
    return getattr(forward_lane.get(), "device", "")


def retire_lane() -> None:
    """This batch's lane is to get no other, as its device is gone. Never the last one: nobody would be answered."""
    if (retire := getattr(forward_lane.get(), "retire", None)) is not None:
        retire()


prompts_lane: ContextVar[Lane | None] = ContextVar("prompts_lane", default=None)
"""With `Limits.slots`: the lane in which prompts are made ready, stations understand and constrain. The engine sets it
around `stream`."""


def enter_station(station: str) -> None:
    """Tell the ledger what a backend is doing for its batch now: transfer, forward, reply, … Until it does: forward;
    idle for a backend with slots.

    Works in the coroutine and in any thread that runs in a copy of its context (`asyncio.to_thread` does).
    """
    if (lane := forward_lane.get()) is not None:
        lane.enter(station)


class Stream(ABC):
    """An answer that is read as it grows: an asynchronous iterator of its parts.

    The request is under way from the moment the stream is made. Parts that wait for a slow reader are joined, to one
    for each sample, so that they hold no more than the answer itself. A backend that makes no parts gives none, and
    then there is the result. An error is raised by the reading, as `await infer(…)` would raise it, after the parts
    that came before it.

    Stop reading with `aclose`, or use `async with`; a stream that is dropped or whose reader is cancelled closes
    itself. What was not finished is cancelled, and its slots are free at the next step.
    """

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Part:
        """The next part. One reader at a time: `RuntimeError` for a second."""

    @property
    @abstractmethod
    def result(self) -> Result:
        """The whole answer, once all parts have been read. Raises `RuntimeError` before that."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop reading; cancels the request when it is not finished."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Infer(ABC):
    """A workload's way to answers."""

    limits: Limits  # final once `ready` has returned
    roofline: Roofline | None = None
    stopping: asyncio.Event  # set when the user asks to stop: keep what is finished, then return

    @property
    def has_model(self) -> bool:
        """Whether the backend serves a model: if not, it takes payloads of any shape."""
        return True

    @property
    def arithmetic(self) -> str:
        """`Backend.arithmetic`: belongs to what decides an answer, where answers are kept."""
        return ""

    async def ready(self) -> Limits:
        """Start the backend here, unless something has: `limits` are then final. The first request does it too."""
        return self.limits

    @abstractmethod
    async def __call__(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
    ) -> Result:
        """Submit one request and wait for its result.

        Raises `QueueFull` at once when there is no room, `Expired` when `timeout` seconds pass before it is served,
        `BackendError`, `BadResult`, `StrategyError` or `Closed`. Cancelling the wait cancels the request.
        """

    @abstractmethod
    def stream(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
    ) -> Stream:
        """Submit one request whose answer is read as it grows: `async for part in infer.stream(prompt): …`.

        Needs a running event loop. Arguments and errors are those of a call; the errors come from the reading.
        """

    def block(self, rows: int) -> Any:
        """Room for `rows` rows that travel to the model without a copy, or None: see `Backend.block`. After `ready`."""
        return None

    def beside(self, spec: ModelSpec, share: float = 1.0, name: str | None = None) -> Infer:
        """A way to another model, beside the run's own: a backend of the same class and options, an engine of its own.

        Where both want the device at once, it has `share` of it and the run's own model 1 (`Setup.share`).

        It starts with its first request or at its `ready`, and is closed with this one; the run counts both. The same
        spec gives the same way. Worker processes of a remote backend have those that were there when they started, on
        the server that they share. `name`: what the report calls it. Raises `UsageError` where there can be none.
        """
        raise UsageError(f"there can be no other model, '{spec.name}', beside the run's own here. Leave it out.")

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """Have the backend compute with other weights, under the name `version`: see `Backend.update`.

        What is asked after the return is answered by them alone. It changes the backend of this process and what that
        is connected to: worker processes with a copy of their own keep theirs. Raises `UsageError` for weights that do
        not fit, and where this cannot be done; otherwise as a request does.
        """
        raise UsageError("weights cannot be changed here. Ask the run's own `infer` for it.")

    def watch(self, kind: type) -> None:  # noqa: B027  where nobody watches
        """Objects of this class are called in the workload's place: one that blocks the event loop is named, and given
        up in the end, as a plugin is.
        """

    async def counted(self) -> Mapping[str, Any]:
        """What the run has counted until now, all its processes and the far side together: `stats.Snapshot.to_wire()`.
        Empty where nobody counts.
        """
        return {}

    @abstractmethod
    def client(self) -> AbstractContextManager[Hashable]:
        """Join as a live client: `with infer.client() as me: await infer(x, client=me)`."""

    @abstractmethod
    def lane(self, name: str) -> Lane:
        """A new lane in the run's time ledger, in station `idle`."""

    @abstractmethod
    def workers(self, target: str, arguments: Sequence[Mapping[str, Any]]) -> AbstractAsyncContextManager[Workers]:
        """Start one process for each entry of `arguments`, each with its own way to the backend.

        `target` names `module:function`, an `async def function(infer, channel, arguments)`; arguments and messages
        are plain values (numbers, strings, bytes, lists, dicts).
        """


class Channel(Protocol):
    """A worker process's line to the workload that started it."""

    async def send(self, message: Mapping[str, Any]) -> None: ...

    async def receive(self) -> Mapping[str, Any]:
        """The next message. The process ends when the line does."""
        ...


class Workers(Protocol):
    """The workload's side of its worker processes."""

    async def send(self, worker: int, message: Mapping[str, Any]) -> None:
        """Raises `WorkerDied` when that process is gone."""
        ...

    def __aiter__(self) -> AsyncIterator[tuple[int, Mapping[str, Any] | None]]:
        """Each message with its sender's number; None once when that process has ended."""
        ...


class Workload(Plugin, ABC):
    """The program that wants answers. It knows neither screen nor counters."""

    max_failures: ClassVar[float] = 0.0  # share that may fail before the run has failed, unless the user says another
    goes_on_by: ClassVar[Sequence[str]] = ()  # options that take up what an earlier run left, such as "resume"
    writes_to: ClassVar[Sequence[str]] = ()  # options that name the file or folder that it writes, such as "out"
    writes_answers: ClassVar[bool] = False  # what it writes is the result: with --quiet a run that is done has no panel
    prepares: ClassVar[bool] = False
    """Whether it begins with a `Progress` with `setup`, and nothing of it computes from the first one without until it
    is asked to go on: the bare model may be measured then, while all is ready and waits."""

    def model(self) -> ModelSpec | None:
        """The model that the backend must serve; None when the workload brings its own answers."""
        return None

    @property
    def asks(self) -> bool:
        """Whether it asks a backend at all, with its present options."""
        return True

    @property
    def processes(self) -> int:
        """How many processes will each open the backend: tells a backend its share of the machine."""
        return 1

    @property
    def deterministic(self) -> bool:
        """Whether a row must get the same answer whatever it shares its batch with: becomes `Setup.deterministic`."""
        return False

    @property
    def writes_stdout(self) -> bool:
        """Whether its own output goes to standard output: nothing else is written there then."""
        return False

    @property
    def shows_answers(self) -> bool:
        """Whether a user waits for what it writes to standard output, and reads it there: no live view is drawn over
        it then, a line takes the place of the panel, and when it is stopped it is simply over.
        """
        return False

    def trial(self, setup: Setup, **changes: Any) -> Workload | None:
        """The same work with these options changed, for trying an advice on: it goes on until it is asked to stop, and
        writes nothing. None, the default, where that cannot be had: input that can be read only once, say.
        """
        return None

    @abstractmethod
    def run(self, infer: Infer) -> AsyncIterator[Progress]:
        """Do the work; yield now and then. When `infer.stopping` is set, keep what is finished and return."""

    # One run on many machines (`gpuinfer.division`)

    def division(self) -> Division:
        """The coordinator's side of this run when nodes do the work; nothing is opened yet. Raises `UsageError`, the
        default, where it cannot be divided, with these options or at all.
        """
        raise UsageError(f"{type(self).__name__.lower()} cannot be divided over nodes. Leave --launcher out.")

    def node_options(self) -> Mapping[str, Any]:
        """The options, as JSON, with which each node makes this workload. The default: those that were set."""
        options: Mapping[str, Any] = self.options.model_dump(mode="json", exclude_unset=True)
        return options

    def deciding(self, arithmetic: str) -> Mapping[str, Any]:
        """On a node: all that decides what a record is, as `Division.settings` says on the coordinator. In a thread:
        files may be read. `arithmetic`: `Backend.arithmetic`.
        """
        return {}

    def run_ranges(self, infer: Infer, feed: RangeFeed) -> AsyncIterator[Progress]:
        """On a node: as `run`, with units from `feed` until it has no more, and their records to it. Nothing is written
        to where the options say. `Progress.done` counts this node's units. When `infer.stopping` is set, finish what
        can be finished within seconds, give its records and return.
        """
        raise UsageError(f"{type(self).__name__.lower()} cannot be divided over nodes. Leave --launcher out.")

    def pack_records(self, records: Sequence[Any]) -> bytes:
        """The bytes of a range, of its units' records in order of their numbers. In a thread. The default joins them:
        `bytes` that end where the next may begin, such as lines.
        """
        return b"".join(records)


Factory = Callable[..., Any]
"""What `module:factory` names: returns a torch.nn.Module from features [rows, F] to one tensor, or a tuple or dict of
tensors, of the same rows (self-play: policy logits [rows, actions], values [rows, seats])."""
