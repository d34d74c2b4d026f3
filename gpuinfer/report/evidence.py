"""One run in numbers, as the verdict looks at it, and the most rows per second that each part of it allows, by the
operational laws. Utilisation law: U = X D, so that a part which was busy a share U of the time allows X / U at most;
interactive response time law: with N requests outstanding, each of which takes ΣD seconds of service and thinks for
Z, X ≤ N / (ΣD + Z). They assume only that what was counted flows: Denning and Buzen, "The Operational Analysis of
Queueing Network Models" (1978); Lazowska, Zahorjan, Graham and Sevcik, "Quantitative System Performance" (1984),
chapters 3 and 5. How long a batch takes by its size: what the run itself has shown, and what the bare model does at
its best.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.config.options import OptionChange, OptionFlag
from gpuinfer.report import thresholds
from gpuinfer.report.document import ClusterSection

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
    steps: Mapping[str, float] = field(default_factory=dict)  # with slots: `Backend.device`'s steps
    pages_given: bool = False  # with slots: the number of pages was set
    model: Mapping[str, Any] = field(default_factory=dict)  # with slots: `Backend.device`'s model
    reasons: Mapping[str, int] = field(default_factory=dict)
    latency_s: float = 0.0  # mean, submit → result
    queue_wait_s: float = 0.0  # mean
    longest_wait_s: float = 0.0  # in the queue, of all but a few
    roofline: Roofline | None = None
    text_roofline: Mapping[str, Any] = field(default_factory=dict)  # of a model of text: the report's `roofline`
    facts: Mapping[str, float] = field(default_factory=dict)  # `Progress.facts` of the workload
    total: int | None = None  # of the work that this run began with: `Progress.total` without what was done before
    cores: int = 1
    cpu_s: float = 0.0  # that the processes ran on a core; 0: not known
    cpu_wait_s: float = 0.0  # that they were ready to run and waited for one
    others_cores: float | None = None  # cores of other programs, on average; None: unknown
    stolen_cores: float | None = None  # cores that the hypervisor gave to others, on average; None: unknown
    unused_cores: float | None = None  # idle cores, on average; None: unknown
    staged: Mapping[str, Any] = field(default_factory=dict)  # of a model in stages: `causes_devices.of_stages`
    on_cpu: bool = True
    dtype: str = "float32"
    computes: bool = True  # there is a model, whose numbers could be smaller
    bfloat16_pays: bool = True  # the device multiplies bfloat16 itself: elsewhere it is no faster, and often slower
    options: Mapping[OptionFlag, Mapping[str, Any]] = field(
        default_factory=dict
    )  # name → value in force; None: unknown
    command: str = "gpuinfer"  # that does the work again
    models: Sequence[Mapping[str, Any]] = ()  # a line each (`report_sections.model_lines`), where there are several
    cluster: ClusterSection | None = None  # of a run over nodes
    stopped: bool = False  # before all of its work was done
    node: str = ""  # of such a run the node that all other fields are of

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
        return max(self.cores - (self.others or 0.0), min(self.cores_busy, self.cores), thresholds.LEAST_CORES_LEFT)

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
        return ran >= thresholds.COMPUTES_HERE * busy_s(self.answering) / self.stretched

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
        return 1 / max(1 - self.cpu_wait_s / working, thresholds.MOST_STRETCHED) if working and self.cpu_wait_s else 1.0

    @property
    def threads(self) -> int | None:
        """Of one forward, as they are set; None: not known."""
        found = self.facts.get("threads") or self.options.get("-B", {}).get("threads")
        return int(found) if found else None

    @property
    def runnable(self) -> float:
        """How many threads wanted a core at once, on average: those that had one, and those that waited for one."""
        return (self.cpu_s + self.cpu_wait_s) / self.wall_s if self.cpu_s else self.threads_busy

    def change(self, flag: OptionFlag, value: float | str, *names: str) -> OptionChange | None:
        """To this value of the first of these options that the plugin in force has; None where it has none of them."""
        name = next((name for name in names if name in self.options.get(flag, ())), None)
        return OptionChange(flag, name, value) if name else None

    def in_force(self, change: OptionChange) -> bool:
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


HALVINGS = 30


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (rows, seconds), both rising: straight lines between them, no better rate beyond the last.

    Below the first the line of the first two goes on, down to a fixed cost that even an empty batch would have.
    """

    points: Sequence[tuple[float, float]]

    def seconds(self, rows: float) -> float:
        first, last = self.points[0], self.points[-1]
        if rows >= last[0] or first is last:
            return rows * last[1] / last[0]
        index = max(1, bisect.bisect_left(self.points, (rows, math.inf)))
        (low, low_s), (high, high_s) = self.points[index - 1 : index + 1]
        return max(0.0, low_s + (rows - low) * (high_s - low_s) / (high - low))

    def best(self) -> float:
        """The smallest size known that no other beats by much."""
        most = max(self.rate(rows) for rows, _ in self.points)
        return next(rows for rows, _ in self.points if self.rate(rows) >= thresholds.AS_GOOD * most)

    def enough(self) -> float:
        """The smallest size that is nearly as good as the best, also between the sizes that are known."""
        low, high = 0.0, self.best()
        wanted = thresholds.NEARLY_AS_GOOD * self.rate(high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.rate(middle) >= wanted else (middle, high)
        return high

    def rate(self, rows: float) -> float:
        """Rows per second of one lane that serves batches of so many rows, one after the other."""
        return rows / max(self.seconds(rows), 1e-12)


def curve_of(run: Evidence) -> Curve | None:
    """None when no batch was timed. A lane's own work around each batch (replies) counts as part of it."""
    total = math.fsum(count for count, _ in run.batch_s.values())
    common = [one for one in size_classes(run.batch_s) if one[0] >= thresholds.RARE_BATCH * total]
    if not common:
        return None
    spent = math.fsum(seconds for _, seconds in run.batch_s.values())
    around = max(1.0, busy_s(run.forwards) / spent) if spent else 1.0
    points = [(rows / count, seconds / count * around) for count, rows, seconds in common]
    best = run.roofline
    if best is not None and not any(
        1 / thresholds.NEAR_ROOFLINE < rows / best.at_rows < thresholds.NEAR_ROOFLINE for rows, _ in points
    ):
        alone = len(run.forwards) * best.at_rows / best.rows_per_s
        points.append((best.at_rows, alone * run.stretched))
    risen: list[tuple[float, float]] = []
    for rows, seconds in sorted(points):  # a larger batch takes no less time: where noise says otherwise
        risen.append((rows, max(seconds, risen[-1][1]) if risen else seconds))  # the earlier point holds
    return Curve(risen)


def size_classes(batch_s: Mapping[int, Sequence[float]]) -> list[list[float]]:
    """[count, rows, seconds] of the batches of about one size, summed; the smallest size first."""
    classes: dict[int, list[float]] = {}
    for rows, (count, seconds) in batch_s.items():
        sums = classes.setdefault(round(thresholds.CLASSES_PER_DOUBLING * math.log2(max(rows, 1))), [0.0, 0.0, 0.0])
        for index, value in enumerate((count, count * rows, seconds)):
            sums[index] += value
    return [sums for _, sums in sorted(classes.items())]


def bounds(run: Evidence, curve: Curve | None) -> dict[str, float]:
    """Rows per second at most, by what limits them: those that are known.

    What the lanes allow depends on the batches that they get: of the best size ("forward"), of the largest that a cap
    lets through, of all rows that may be outstanding. That they were busy says little: one batch, however small, is cut
    as soon as a lane is free.
    """
    found = {
        "roofline": run.roofline.rows_per_s if run.roofline else 0.0,
        "forward": _served(run, curve, math.inf),
        "cap": _served(run, curve, cap(run)) if math.isfinite(cap(run)) else 0.0,
        "outstanding": _served(run, curve, outstanding(run) / max(1, len(run.forwards))),
        "search": _by_use(run, run.busy(run.work)),
        "cores": _by_use(run, run.cores_busy / run.cores_left if run.on_cpu else 0.0),
        "arrival": run.facts.get("offered_rows_per_s", 0.0),
        "concurrency": concurrency(run, waiting_s=0.0),
        "timer": concurrency(run, waiting_s=run.queue_wait_s) if run.cut_by("waited") >= 0.5 else 0.0,
    }
    return {name: bound for name, bound in found.items() if bound > 0 and math.isfinite(bound)}


def _served(run: Evidence, curve: Curve | None, rows: float) -> float:
    """By all forward lanes, with batches of so many rows or of fewer where that is better."""
    if curve is None:
        return _by_use(run, run.busy(run.forwards))
    return len(run.forwards) * curve.rate(min(rows, curve.best())) if rows > 0 else 0.0


def cap(run: Evidence) -> float:
    """The most rows that a batch may have, as far as it shows; inf where batches are cut for other reasons.

    Where all that is outstanding would not fill the lanes with larger ones, their share of it is no cap.
    """
    most = max(run.batch_s, default=math.inf)
    felt = run.cut_by("full", "cap") >= thresholds.CAPPED and outstanding(run) > thresholds.ROOMY * most * len(
        run.forwards
    )
    return most if felt else math.inf


def outstanding(run: Evidence) -> float:
    """Rows that may be under way at once; by Little's law (N = X R) those that were, when the workload does not say."""
    told = run.facts.get("rows_outstanding")
    if told is None and run.blocks_outstanding is not None:
        told = run.blocks_outstanding * run.block_rows
    return told or run.rows_per_s * run.latency_s


def _by_use(run: Evidence, utilisation: float) -> float:
    return run.rows_per_s / utilisation if utilisation > 0 else 0.0


def concurrency(run: Evidence, waiting_s: float) -> float:
    """N / (ΣD + Z) in rows per second, for requests that wait so long in the queue; 0 when N is not known."""
    blocks, cycle = run.blocks_outstanding, search_s(run) + served_s(run) + waiting_s
    return blocks * run.block_rows / cycle if blocks and cycle > 0 else 0.0


def search_s(run: Evidence) -> float:
    """Seconds of work for each request, in the lanes that make them; where there are none, all that clients think."""
    if run.work or not run.requests:
        return busy_s(run.work) / run.requests if run.requests else 0.0
    return think_s(run)


def think_s(run: Evidence) -> float:
    """From an answer to the same client's next request, by the interactive response time law: Z = N / X - R."""
    blocks = run.blocks_outstanding
    return max(0.0, blocks * run.wall_s / run.requests - run.latency_s) if blocks and run.requests else 0.0


def served_s(run: Evidence) -> float:
    """Seconds that the batch of a request takes: of a row's batch, since larger ones serve more requests."""
    rows = math.fsum(rows * count for rows, (count, _) in run.batch_s.items())
    if not rows:
        return max(0.0, run.latency_s - run.queue_wait_s)
    return math.fsum(rows * seconds for rows, (_, seconds) in run.batch_s.items()) / rows
