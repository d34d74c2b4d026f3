"""One run in numbers, as the verdict looks at it: what was measured, and what follows from it by definition alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.config.change import Change, Flag

LEAST_LEFT = 0.1  # cores that a run has, whatever others take
HERE = 0.3  # of the answering lanes' time, on a core: with less they wait for something else
MOST_WAITED = 0.2  # of a lane's time: so much is taken for work, however long threads have waited

Lane = Mapping[str, Any]  # {name, stations{station: seconds}, visits{station: how often}}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run in numbers. `lanes` named "forward …" serve batches, the others work."""

    wall_s: float = 0.0
    lanes: Sequence[Lane] = ()
    requests: int = 0  # that were answered
    lost: int = 0  # that were turned away, came too late, or failed
    cancelled: int = 0  # under way or waiting when the run was stopped
    rows_per_s: float = 0.0
    rows_mean: float = 0.0  # of a batch
    batch_s: Mapping[int, Sequence[float]] = field(default_factory=dict)  # size → [batches answered, their seconds]
    slots: int = 0  # rows that may be generated at once: the batches are then forward steps. 0: there are no slots
    steps: Mapping[str, float] = field(default_factory=dict)  # with slots: `Backend.device`'s word on its steps
    pages_given: bool = False  # with slots: somebody has said how many pages there are
    model: Mapping[str, Any] = field(default_factory=dict)  # with slots: its word on what it serves
    reasons: Mapping[str, int] = field(default_factory=dict)
    latency_s: float = 0.0  # mean, submit → result
    queue_wait_s: float = 0.0  # mean
    longest_wait_s: float = 0.0  # in the queue, of all but a few
    roofline: Roofline | None = None
    text_roofline: Mapping[str, Any] = field(default_factory=dict)  # of a model of text: the report's `roofline`
    facts: Mapping[str, float] = field(default_factory=dict)  # what the workload says of itself: `Progress.facts`
    total: int | None = None  # of the work that this run began with: `Progress.total` without what was done before
    cores: int = 1
    cpu_s: float = 0.0  # that the processes ran on a core; 0: not known
    cpu_wait_s: float = 0.0  # that they were ready to run and waited for one
    others_cores: float | None = None  # cores that other programs had, on average; None: not known
    stolen_cores: float | None = None  # that the machine below this one gave to others, on average; None: not known
    unused_cores: float | None = None  # that nobody wanted, on average; None: not known
    staged: Mapping[str, Any] = field(default_factory=dict)  # of a model in stages: `report.stages.of_stages`
    on_cpu: bool = True
    dtype: str = "float32"
    computes: bool = True  # there is a model, whose numbers could be smaller
    bfloat16_pays: bool = True  # the device multiplies bfloat16 itself: elsewhere it is no faster, and often slower
    options: Mapping[Flag, Mapping[str, Any]] = field(default_factory=dict)  # name → value in force; None: not known
    command: str = "gpuinfer"  # that does the work again
    models: Sequence[Mapping[str, Any]] = ()  # a line each (`report.models`), where there are several

    @property
    def efficiency(self) -> float:
        return self.rows_per_s / self.roofline.rows_per_s if self.roofline else 0.0

    @property
    def forwards(self) -> list[Lane]:
        return [lane for lane in self.lanes if is_forward(lane["name"])]

    @property
    def stages(self) -> list[Lane]:
        """Of a model that is cut into stages: what computes, while the forward lanes wait for it."""
        return [lane for lane in self.lanes if is_stage(lane["name"])]

    @property
    def answering(self) -> list[Lane]:
        """The lanes whose time is the model's."""
        return self.stages or self.forwards

    @property
    def work(self) -> list[Lane]:
        others = (is_forward, is_stage, is_aside)
        return [lane for lane in self.lanes if not any(is_one(lane["name"]) for is_one in others)]

    @property
    def block_rows(self) -> float:
        """Rows of a request, on average; 0 when nothing was answered."""
        return self.rows_per_s * self.wall_s / self.requests if self.requests else 0.0

    @property
    def rows_usual(self) -> float:
        """Rows of the batch that a row was in, on average: a few small batches at the end count for little."""
        rows = math.fsum(size * count for size, (count, _) in self.batch_s.items())
        squares = math.fsum(size * size * count for size, (count, _) in self.batch_s.items())
        return squares / rows if rows else self.rows_mean

    @property
    def blocks_outstanding(self) -> float | None:
        """Requests that may be under way at once; None when nobody tells: the N of the laws."""
        if "clients" in self.facts:
            return self.facts["clients"]
        return self.facts["workers"] * self.facts.get("blocks", 1) if "workers" in self.facts else None

    @property
    def threads_busy(self) -> float:
        """How many threads were at work at once, on average, by the ledger."""
        each = self.facts.get("threads", 1)
        lanes = [lane for lane in self.lanes if not (self.stages and is_forward(lane["name"]))]
        return (busy_s(self.answering) * (each - 1) + busy_s(lanes)) / self.wall_s

    @property
    def cores_busy(self) -> float:
        """How many cores were at work at once, on average; by the ledger where the system does not tell."""
        return self.cpu_s / self.wall_s if self.cpu_s else min(self.threads_busy, self.cores)

    @property
    def others(self) -> float | None:
        """Cores that were given to anybody else, on average; None where the system does not tell."""
        if self.others_cores is None:
            return None
        return self.others_cores + (self.stolen_cores or 0.0)

    @property
    def cores_left(self) -> float:
        """Cores that others left to this run, on average: those that it had, at least."""
        return max(self.cores - (self.others or 0.0), min(self.cores_busy, self.cores), LEAST_LEFT)

    @property
    def idle_cores(self) -> float:
        """Cores, on average, that computed nothing while nobody else had them: no thread wanted them, or one of ours
        waited there (`threads_waited_s`). 0 where it is not known, or the model is elsewhere.
        """
        if not self._cores_known:
            return 0.0
        unused = self.unused_cores
        if unused is None:
            unused = max(0.0, self.cores - self.cores_busy - (self.others or 0.0))
        return min(unused + self.threads_waited_s / self.wall_s, float(self.cores))

    @property
    def threads_waited_s(self) -> float:
        """Seconds on a core in which a thread of ours waited, actively, for the other threads of a step. While one of
        these is ready and has no core, somebody else's program is why. 0 where it is not known.
        """
        if not self._cores_known:
            return 0.0
        waited, computed = (self.steps.get(f"threads_{what}_s", 0.0) for what in ("waited", "busy"))
        held_up = ((self.threads or 1) - 1) * self.cpu_wait_s
        return min(max(0.0, waited - held_up), max(0.0, self.cores_busy * self.wall_s - computed))

    @property
    def _cores_known(self) -> bool:
        measured = self.wall_s > 0 and (self.cpu_s > 0 or self.unused_cores is not None)
        return measured and self.on_cpu and self.computes_here

    @property
    def computes_here(self) -> bool:
        """Whether the lanes that answer run on cores of this machine while they are busy, and do not wait for another
        process or device; so it is taken where nobody tells.
        """
        if not any("ran" in lane for lane in self.answering):
            return True
        ran = math.fsum(seconds for lane in self.answering for seconds in lane.get("ran", {}).values())
        return ran >= HERE * busy_s(self.answering) / self.stretched

    @property
    def waited(self) -> float:
        """The share of the time in which threads were ready to run that they waited for a core; 0: not known."""
        return self.cpu_wait_s / (self.cpu_s + self.cpu_wait_s) if self.cpu_wait_s else 0.0

    @property
    def stretched(self) -> float:
        """How many times as long the lanes' work took as with a core for each: they count their waits for one as work.

        Of work that computes; work that waits for something else, as for a device, is stretched by less.
        """
        working = self.threads_busy * self.wall_s
        return 1 / max(1 - self.cpu_wait_s / working, MOST_WAITED) if working and self.cpu_wait_s else 1.0

    @property
    def threads(self) -> int | None:
        """Of one forward, as they are set; None: not known."""
        found = self.facts.get("threads") or self.options.get("-B", {}).get("threads")
        return int(found) if found else None

    @property
    def runnable(self) -> float:
        """How many threads wanted a core at once, on average: those that had one, and those that waited for one."""
        return (self.cpu_s + self.cpu_wait_s) / self.wall_s if self.cpu_s else self.threads_busy

    def change(self, flag: Flag, value: float | str, *names: str) -> Change | None:
        """To this value of the first of these options that the plugin in force has; None where it has none of them."""
        name = next((name for name in names if name in self.options.get(flag, ())), None)
        return Change(flag, name, value) if name else None

    def in_force(self, change: Change) -> bool:
        """Whether the option has this value already, set by somebody or left to the plugin."""
        return bool(self.options.get(change.flag, {}).get(change.name) == change.value)

    def largest(self) -> str:
        """The station, other than idle, in which the lanes spent most time."""
        names = {name for lane in self.lanes for name in lane["stations"]} - {"idle"}
        return max(sorted(names), key=self.share, default="idle")

    def share(self, station: str) -> float:
        """The station's share of all lanes' time."""
        return station_s(self.lanes, station) / (self.wall_s * len(self.lanes))

    def busy(self, lanes: Sequence[Lane]) -> float:
        """The share of these lanes' time in which they were not idle: their utilisation."""
        return busy_s(lanes) / (self.wall_s * len(lanes)) if lanes else 0.0

    def cut_by(self, *reasons: str) -> float:
        """The share of batches that were cut for one of these reasons."""
        return sum(self.reasons.get(reason, 0) for reason in reasons) / max(1, sum(self.reasons.values()))


def is_forward(name: str) -> bool:
    """Whether a lane of this name serves batches: "forward 0", or "worker 1: forward 0"."""
    return name.rpartition(": ")[2].startswith("forward")


def is_stage(name: str) -> bool:
    """Whether a lane of this name is a stage of a model: "stage 0", or "worker 1: stage 0"."""
    return name.rpartition(": ")[2].startswith("stage ")


ASIDE = ("records", "input", "output", "prompts")


def is_aside(name: str) -> bool:
    """Whether a lane of this name only brings rows, or writes down what becomes of them: idle, it holds nothing up."""
    return name.rpartition(": ")[2].startswith(ASIDE)


def place(name: str) -> str:
    """The process of a lane: "worker 1" for "worker 1: forward 0", "" for this one's own and for a server's."""
    return name.rpartition(": ")[0]


def station_s(lanes: Sequence[Lane], station: str) -> float:
    return math.fsum(lane["stations"].get(station, 0.0) for lane in lanes)


def busy_s(lanes: Sequence[Lane]) -> float:
    return math.fsum(seconds for lane in lanes for name, seconds in lane["stations"].items() if name != "idle")


def visits(lane: Lane) -> int:
    """How many pieces of work a lane has seen: the visits to the station that it entered most."""
    return max((count for name, count in lane.get("visits", {}).items() if name != "idle"), default=0)
