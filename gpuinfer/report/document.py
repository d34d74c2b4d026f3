"""The fields of a report: what each section holds, in which unit. `report.schema.json` is written from these types
(`make reference`), and a test holds it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict, get_type_hints

import msgspec
from msgspec import Meta

from gpuinfer.rollouts.steps import StallCause

Amount = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Portion = Annotated[float, Meta(ge=0, le=1.000001)]  # a share that rounding may carry over 1


def about(text: str, **limits: Any) -> Meta:
    """What a field means, and the values that it may have."""
    return Meta(description=text, **limits)


class ReportProgress(TypedDict):
    done: Amount
    total: Amount | None
    unit: str
    before: NotRequired[Annotated[Amount, about("of `done`, by an earlier run")]]


class EnvironmentSection(TypedDict):
    gpuinfer: str | None
    python: str
    torch: str | None
    device: str
    device_name: str | None
    cpu_count: Positive
    dtype: str
    computes_in: Annotated[
        str,
        about("the number format of the arithmetic: not that of the weights where the processor has no products of it"),
    ]
    compile: Annotated[str | None, about("the mode of torch.compile (-B compile); null where nothing is compiled")]
    seed: int


class CutReasons(TypedDict):
    full: Count
    deadline: Count
    waited: Count
    clients: Count
    gain: Count
    cap: Count
    free: Count
    drain: Count


class BatchesSection(TypedDict):
    count: Count
    rows_mean: Amount | None
    rows_p50: Count | None
    rows_max: Count | None
    slots: NotRequired[
        Annotated[
            Positive | None,
            about("rows that may be generated at once: batches are then forward steps; null: there are no slots"),
        ]
    ]
    occupancy: NotRequired[Annotated[Amount | None, about("rows_mean / slots")]]
    sizes: NotRequired[
        Annotated[
            dict[str, Positive],
            about("powers of two → how many batches had at most so many rows, and more than half as many"),
        ]
    ]
    seconds: Annotated[
        dict[str, Amount], about("mean rows → mean seconds in the backend of batches of about that size")
    ]
    reasons: CutReasons


class FallbackSection(TypedDict):
    backend: Annotated[str, about("as --fallback names it")]
    why: Annotated[str, about("the error of the server that is gone")]
    processes: Annotated[Positive, about("that went on with a model of their own")]
    requests: Annotated[Count, about("that it answered")]
    rows: Count
    batches: Count
    rows_mean: Annotated[Amount | None, about("rows a batch; null: it has computed none")]


class UnmaskingSection(TypedDict):
    forwards: Annotated[Amount, about("rows, summed over steps")]
    idle_forwards: Annotated[Amount, about("of these, those that committed nothing")]
    committed_tokens: Annotated[Amount, about("masks that became tokens")]
    useful_tokens: Annotated[
        Amount, about("tokens of answers: nothing of a prompt, nothing after the end of an answer, no mask")
    ]
    positions: Annotated[Amount, about("of the canvases of all forwards")]
    computed_positions: Annotated[Amount, about("of these, those that were computed anew")]
    tokens_per_forward: Annotated[Amount, about("useful ones")]
    idle_share: Annotated[Share, about("of the forwards")]
    computed_share: Annotated[Share, about("of the positions")]


class SpeculationSection(TypedDict):
    proposed_tokens: Annotated[Amount, about("tokens that were proposed to come next, and computed at once")]
    accepted_tokens: Annotated[Amount, about("of these, those that were drawn")]
    acceptance: Annotated[Share, about("of the proposed tokens, those that were drawn")]
    tokens_per_step: Annotated[Amount, about("that a row drew in a step without prompts")]
    gain: Annotated[
        Amount, about("how many times as long all steps would have taken without, by the times of the run's steps")
    ]


class PagesSection(TypedDict):
    waited_rows: Annotated[Amount, about("rows that there were no pages for when it was their turn")]
    preempted_rows: Annotated[
        Amount, about("rows that gave back their pages, for older rows, and were computed again later")
    ]
    recomputed_tokens: Annotated[Amount, about("tokens that were computed again for it")]


class StageLine(TypedDict):
    layers: Annotated[list[Count], about("the first and the last", min_length=2, max_length=2)]
    device: str
    threads: Positive
    weights_mb: Amount
    busy_share: Annotated[Share, about("of the run's clock, in which it computed")]


class StagesSection(TypedDict):
    parallel: Literal["layers", "pipeline"]
    stages: Annotated[list[StageLine], Meta(min_length=2)]
    batches: Count
    micro_batches: Count
    active_share: Annotated[Share, about("of the run's clock, in which there was a batch in the stages")]
    bubble_share: Annotated[Share, about("of the stages' time while there was a batch, in which they did not compute")]
    fits_one: Annotated[bool, about("whether each device has room for the whole model")]


class SpreadSection(TypedDict, total=False):
    mean: Amount
    p50: Amount
    p95: Amount
    p99: Amount
    max: Amount


class ErrorCounts(TypedDict):
    failed: Count
    retried: Count
    rejected: Count
    expired: Count
    cancelled: Count


class PriorityClass(SpreadSection):
    requests: Count
    rows: Count
    errors: ErrorCounts
    queue_wait_s: SpreadSection


class ClassesSection(TypedDict, total=False):
    high: PriorityClass
    normal: PriorityClass
    low: PriorityClass


class CoresSection(TypedDict):
    count: Positive
    busy_s: Annotated[Amount, about("this program and all that it started")]
    waiting_s: Annotated[Amount, about("its threads were ready to run and had no core: beside the sum")]
    threads_waited_s: Annotated[
        Amount,
        about(
            "of busy_s: threads of a model of text that waited, actively, for the other threads "
            "of a step. With idle_s it is what the verdict calls idle cores"
        ),
    ]
    others_s: Annotated[Amount | None, about("other programs")]
    stolen_s: Annotated[Amount | None, about("wanted here, and given away by the machine below")]
    idle_s: Amount | None
    stations: Annotated[
        dict[str, Amount], about("of busy_s, what each station of the lanes had; the rest went to threads in no lane")
    ]


class StationTotals(TypedDict):
    visits: Annotated[Count, about("how often a lane was there and has left again")]
    busy_s: Annotated[Amount, about("the seconds of all lanes in it")]
    servers: Annotated[Positive, about("lanes that were ever in it")]


class RooflineSection(TypedDict):
    rows_per_s: Annotated[float, Meta(gt=0)]
    at_rows: Positive
    arrangement: str
    efficiency: Amount
    measured: Annotated[
        list[float], about("rows per second of each measurement, before the run first: the highest counts")
    ]
    raised: Annotated[bool, about("the run did more than the bare model in any measurement, and its own rate counts")]


class TextRooflineSection(TypedDict):
    tokens_per_s: Annotated[Amount, about("of answers, had each step taken the least that it can")]
    at_rows: Annotated[int, about("rows of a step in which products were measured: as this run's, on average", ge=1)]
    least_s: Annotated[
        Amount,
        about(
            "that this run's steps take here at the least: each kind of them its operations or "
            "its bytes, whichever is longer"
        ),
    ]
    flops: Annotated[Amount, about("operations of all steps: products, attention over the positions seen, the head")]
    bytes: Annotated[
        Amount, about("that all steps read and write at the least: weights once a step, keys and values of their rows")
    ]
    gflops_per_s: Annotated[
        Amount, about("of products at `at_rows`, 10^9: the decoder's own or a library's, the better one")
    ]
    own_gflops_per_s: Annotated[Amount, about("the decoder's own")]
    prompt_gflops_per_s: Annotated[Amount, about("in steps of prompts")]
    gbytes_per_s: Annotated[Amount, about("read from memory by all cores")]
    efficiency: Annotated[float, about("least_s / wall_s", ge=0, le=1.000001)]
    limited_by: Literal["products", "memory"]
    remembered: Annotated[bool, about("measured by an earlier run: this one was too short, or was stopped")]
    raised: Annotated[bool, about("the run took less: what was measured was too low, and its own time counts")]


class ChangeSection(TypedDict):
    flag: Literal["-B", "-S", "-L", "--"]
    name: str
    value: float | str
    without: NotRequired[
        Annotated[list[str], about("options that the command no longer has, since they go with the old value alone")]
    ]


class TrialSection(TypedDict):
    measured: Annotated[float, Meta(gt=0)]
    low: Amount
    high: Annotated[float, Meta(gt=0)]
    seconds: Annotated[float, Meta(gt=0)]
    turns: Annotated[int, Meta(ge=4)]
    command: str


class GainSection(TypedDict):
    low: Annotated[float, Meta(ge=1)]
    high: Annotated[float, Meta(ge=1)]
    expected: Annotated[float, Meta(ge=1)] | None


class NodeLine(TypedDict):
    node: Annotated[str, about("the number that its launcher has for it; +1, +2, … of nodes that were started by hand")]
    host: str
    cpu: str
    cores: Positive
    gpuinfer: Annotated[str, about("its version")]
    state: Annotated[
        Literal["starting", "working", "waiting", "silent", "left", "lost"],
        about("waiting: for units; silent: it has not been heard for seconds; left: in order; lost: it died or hung"),
    ]
    joined_s: Annotated[
        Amount, about("seconds after the coordinator's start; of the last process, where it was restarted")
    ]
    start_up_s: Annotated[
        Amount | None, about("from when the first node joined until this one had units; null: it had none")
    ]
    left_s: Annotated[Amount | None, about("seconds after the coordinator's start; null: it is there")]
    why: Annotated[str | None, about("why it left")]
    restarts: Count
    units: Annotated[Count, about("of which its records were kept: those of all nodes add up to the run's")]
    units_per_s: Annotated[Amount, about("while it worked")]
    rows_per_s: Annotated[Amount, about("while it worked")]
    relative: Annotated[
        Amount | None, about("its speed over that of the median of the others; null: nothing to compare")
    ]
    starved_share: Annotated[Share, about("of its time, in which it waited for units, the end of the run left out")]
    records_share: Annotated[Share, about("of its time, in which it waited since its records were not taken")]
    records: Annotated[Literal["folder", "wire"], about("the way of its records")]
    efficiency: Annotated[Amount | None, about("of the bare model on its machine, while it worked; null: not measured")]
    rows_mean: Annotated[Amount | None, about("rows in a batch")]
    latency_s: SpreadSection
    others_cores: Annotated[Amount | None, about("cores that other programs had, on average; null: not known")]
    waited_share: Annotated[Share, about("of the time in which its threads were ready to run, without a core")]
    clock_share: Annotated[Share | None, about("of the highest clock of its cores; null: not known")]
    clock_offset_s: Annotated[float, about("its wall clock minus the coordinator's")]


class NodeTime(TypedDict):
    working: Portion
    starting: Annotated[Portion, about("from when the first node joined until it had units")]
    starved: Annotated[
        Portion, about("it waited for units while there were some, by the share of its places that were empty")
    ]
    records: Annotated[Portion, about("it waited since its records were not taken")]
    tail: Annotated[
        Portion, about("it waited at the end, when no units were left, by the share of its places that were empty")
    ]
    gone: Annotated[Portion, about("after it had left or was lost, before the end")]


class RangesSection(TypedDict):
    count: Annotated[Count, about("of which all records are kept")]
    units_mean: Annotated[Amount | None, about("units of one")]
    mean_s: Annotated[Amount | None, about("from when one was leased until it was kept")]
    returned: Annotated[Count, about("that came back from nodes that left or were lost")]
    stolen: Annotated[Count, about("of which a node released units for others")]
    copied: Annotated[Count, about("leased to a second node as well")]
    duplicates: Annotated[Count, about("units whose records came when they were kept already")]


class RecordsSection(TypedDict):
    bytes: Amount
    through_folder: Annotated[Share, about("of the bytes, in files that nodes wrote; the rest came over the wire")]
    sending_s: Annotated[Amount | None, about("mean of one range")]


class CoordinatorLine(TypedDict):
    host: str
    cpu_share: Annotated[Amount, about("of one core, that its loop has run on since the first node joined")]
    reading_share: Annotated[Share, about("of the time, in which it read the input")]
    keeping_share: Annotated[
        Share, about("of the time, in which it wrote records, or took files that nodes had written")
    ]


class TwiceSection(TypedDict):
    nodes: Positive
    factor: Annotated[float, about("times as fast", gt=0)]
    wall_s: Annotated[Amount, about("from the first node's joining to the end")]
    why: str


class ClusterSection(TypedDict):
    unit: str
    wall_s: Annotated[Amount, about("from the first node's joining to the end")]
    nodes: list[NodeLine]
    slowest: Annotated[str | None, about("the node of the lowest relative speed; null: nothing to compare")]
    time: Annotated[NodeTime, about("shares of wall_s × nodes")]
    start_up_s: Annotated[Amount, about("from the coordinator's start until a node had units, on average")]
    tail_s: Annotated[Amount, about("from when the first node had nothing left to do, to the end")]
    tail_cost_s: Annotated[Amount, about("of these, what the run would have been shorter had all worked to the end")]
    ranges: RangesSection
    records: RecordsSection
    coordinator: CoordinatorLine
    wanted_cores: Annotated[
        Amount | None,
        about("cores that nodes which share a host would use at once, over those that it has; null: they share none"),
    ]
    twice: Annotated[TwiceSection | None, about("what twice as many nodes would bring; null: too little is known")]


VerdictClass = Literal[
    "device-saturated",
    "arrival-bound",
    "client-bound",
    "imbalance between workers",
    "search-bound",
    "too few rows outstanding",
    "timer-bound",
    "batch cap too small",
    "transfer-bound",
    "pipeline bubbles",
    "oversubscribed CPUs",
    "few tokens a forward",
    "recomputation",
    "sampling-bound",
    "host-bound",
    "trainer-bound",
    StallCause,
    "idle cores",
    "memory bandwidth",
    "first touch",
    "below the roofline",
    "too few pages",
    "waiting for the folder",
    "waiting for the coordinator",
    "coordinator saturated",
    "slow node",
    "lost nodes",
    "too many nodes",
    "ranges too large",
    "inconclusive",
]
BottleneckSection = TypedDict(
    "BottleneckSection",
    {
        "class": VerdictClass,
        "station": str,
        "share": Portion,
        "why": str,
        "advice": str,
        "change": Annotated[ChangeSection | None, about("the option that the advice sets, as the command does")],
        "command": str | None,
        "trial": Annotated[
            TrialSection | None,
            about(
                "how many times as fast the change was when it was tried beside the setting in force,"
                " in turns of so many seconds"
            ),
        ],
        "not_tried": Annotated[str | None, about("why a trial that was wanted was not made")],
        "gain": GainSection,
        "healthy": bool,
        "bounds": dict[str, Annotated[float, Meta(gt=0)]],
        "unexplained": Portion,
    },
)


class TrainingSection(TypedDict):
    steps: Annotated[Amount, about("done, by earlier runs of the same training too")]
    batch_size: Annotated[Amount, about("positions in each step")]
    positions: Annotated[Amount, about("that are trained on")]
    validation_positions: Annotated[Amount, about("that are kept apart")]
    checkpoint: Annotated[Amount, about("the step of the last one")]
    epochs: Annotated[Amount | None, about("of all steps")]
    learning_rate: Annotated[Amount | None, about("of the last step")]
    gradient_norm: Annotated[Amount | None, about("of the last step, before it was clipped")]
    first_loss: Annotated[float | None, about("of this run's first step")]
    forward_s: Annotated[Amount | None, about("all of this run's steps")]
    backward_s: Annotated[Amount | None, about("all of this run's steps")]
    optimizer_s: Annotated[Amount | None, about("all of this run's steps")]
    loss: Annotated[
        Annotated[
            dict[str, float],
            Meta(extra_json_schema={"properties": {"total": {"type": "number"}}, "required": ["total"]}),
        ]
        | None,
        about("mean over the last hundred steps, with its parts by name"),
    ]
    validation: Annotated[
        Annotated[
            dict[str, float],
            Meta(extra_json_schema={"properties": {"total": {"type": "number"}}, "required": ["total"]}),
        ]
        | None,
        about("at the last validation, with its parts by name"),
    ]
    activation_mb: Annotated[
        Amount | None, about("held at most for the way back, in MiB, without the gradients of parameters")
    ]


class TokenRates(TypedDict):
    wall: Amount
    inference: Amount | None


class BufferSection(TypedDict):
    depth: Amount
    batch: Amount
    waiting: Amount


class StalenessSection(TypedDict):
    mean: Amount
    max: Amount
    allowed: Amount


class RolloutTrainerSection(TypedDict):
    steps: Amount
    trained_groups: Amount
    wait_s: Annotated[Amount, about("it waited for rollouts")]
    train_s: Amount
    absent_s: Annotated[Amount, about("no trainer asked for anything, and none was at work")]
    adapter_load_s: Amount
    wait_share: Annotated[float, about("of the time that it was there", ge=0, le=1.000001)]
    version: Annotated[Amount, about("of its weights")]
    buffer: Annotated[BufferSection, about("in groups")]
    groups_dropped: Annotated[Amount, about("as too old")]
    staleness: Annotated[StalenessSection, about("in versions")]
    kl: Annotated[float | None, about("from the reference, for each token, in the last step that had one")]
    kl_coefficient: float | None
    stalls: Annotated[dict[str, Portion], about("kind → the share of the trainer's time that it cost")]


class RolloutsSection(TypedDict):
    calls: Annotated[Amount, about("answers that came")]
    games_failed: Annotated[Amount, about("that were played again")]
    groups_in_flight: Annotated[Amount, about("on average")]
    tokens_per_game: Amount | None
    tokens_per_call: Amount | None
    inference_s: Annotated[Amount, about("that the busiest engine was at work")]
    input_tokens_per_s: Annotated[TokenRates, about("by the run's clock, and by the time that the engine was at work")]
    output_tokens_per_s: Annotated[TokenRates, about("likewise")]
    environment_share: Annotated[float, about("of a game's time, in its environment", ge=0, le=1.000001)]
    reference_share: Annotated[float, about("of a group's time, in its reference pass", ge=0, le=1.000001)]
    adapter_loads: Amount
    trainer: RolloutTrainerSection | None


class ResignationSection(TypedDict):
    threshold: Annotated[
        float, about("a player resigns whose root and best move are both worth minus this or less", gt=0, le=1)
    ]
    games: Positive
    resigned: Annotated[Count, about("games that ended so; of those that are not checked")]
    checked: Annotated[Count, about("games that nobody was allowed to resign")]
    would_have_resigned: Annotated[Count, about("checked games that somebody would have resigned")]
    false: Annotated[Count, about("of these, games that the same player did not lose")]
    false_rate: Annotated[Share | None, about("false over would_have_resigned; null where that is 0")]
    false_rate_ci95: Annotated[
        Annotated[list[Share], Meta(min_length=2, max_length=2)] | None, about("95 % interval (Wilson)")
    ]
    advised: Annotated[
        Share | None, about("where more than 5 % are false, the threshold at which no more would have been; null: none")
    ]
    advice: Annotated[str | None, about("what to do where more than 5 % are false")]


class StrengthSection(TypedDict):
    games: Annotated[int, about("an earlier run's too, where this one has gone on with its records", ge=1)]
    pairs: Annotated[Count, about("dealt alike with the sides swapped, both games ended")]
    wins: Count
    draws: Count
    losses: Count
    score: Annotated[Share, about("points a game: 1 for a win, a half for a draw")]
    score_ci95: Annotated[list[Share], about("95 % interval", min_length=2, max_length=2)]
    elo: Annotated[float | None, about("how far the model is above the opponent; null where the score is 0 or 1")]
    elo_ci95: Annotated[list[float | None], about("95 % interval; null: no bound", min_length=2, max_length=2)]


class FailuresSection(TypedDict):
    count: Positive
    of: Count
    share: Amount
    allowed: Annotated[Share, about("--max-failures: a larger share, and the run has failed")]
    first: Annotated[str | None, about("what the first one was told")]


class MemorySection(TypedDict):
    rss_peak_mb: Amount
    device_peak_mb: Amount | None
    fragmentation: Annotated[
        Share | None, about("share of what torch's allocator reserved on the device that no tensor ever filled")
    ]
    freed_mb: Annotated[
        Amount, about("given back while the run went on, as it was not in use (`-B keep_free`, a request)")
    ]
    shortages: Annotated[Amount, about("times that the device had less free than `-B keep_free`")]
    resized: Annotated[Amount, about("times that a model of text had fewer slots and pages for it, or more again")]


class ModelLine(TypedDict):
    name: str
    kind: Literal["text", "rows"]
    share: Annotated[Amount, about("of the device, beside those of the others, while all want it")]
    requests: Amount
    rows: Amount
    rows_per_s: Amount
    input_tokens: Amount
    output_tokens: Amount
    device_s: Annotated[Amount, about("device time that it had, in seconds of all of the device")]
    device_share: Annotated[Amount, about("of the device time that all of them had")]
    turn_wait_s: Annotated[Amount, about("for how long its forwards waited while others had the device")]
    queue_wait_s: SpreadSection
    latency_s: SpreadSection
    waiting_rows: Amount
    errors: ErrorCounts


class DeviceReading(TypedDict):
    name: str | None
    utilisation: Share | None
    allocated_mb: Amount | None
    reserved_mb: Amount | None


class DeviceLine(DeviceReading):
    rows: Annotated[Count, about("answered, or in forward steps of text")]
    batches: Count
    busy: Annotated[Share, about("share of the time in which it had a batch")]
    failed: Annotated[str | None, about("why it was given up")]


class DeviceNeighbour(TypedDict):
    pid: Count
    name: Annotated[str, about("empty where the system does not tell")]
    mb: Amount | None


class DeviceSection(DeviceReading):
    utilisation_mean: NotRequired[
        Annotated[Share | None, about("of the readings while the clock ran, NVML's; null: it is not known")]
    ]
    copies_hidden: Annotated[
        Share | None,
        about(
            "of the time that copies between host and device took, the share in which another batch was computed "
            "there: of models of rows on CUDA, from a sample of batches; null: there are no copies, or too few batches"
        ),
    ]
    devices: Annotated[
        dict[str, DeviceLine],
        about("each of several devices that have a copy of the model, by name; empty where there is one"),
    ]
    others: Annotated[
        list[DeviceNeighbour], about("processes on the device that are none of this run's, as NVML tells them")
    ]


class ReportDocument(TypedDict):
    schema: Literal["gpuinfer.report/1"]
    workload: str
    backend: str
    strategy: str
    started_at: Annotated[str, about("ISO 8601, UTC")]
    setup_s: Annotated[Amount, about("seconds before the clock started: roofline, start-up, compiling")]
    wall_s: Annotated[Amount, about("seconds on the run's clock")]
    settings: dict[str, Any]
    status: Literal["done", "partial", "failed"]
    progress: ReportProgress
    environment: EnvironmentSection
    throughput: Annotated[
        dict[str, Amount],
        about(
            "those that apply; a workload may add rates of its own, named …_per_s",
            extra_json_schema={
                "properties": {
                    "rows_per_s": {"type": "number", "minimum": 0},
                    "games_per_min": {"type": "number", "minimum": 0},
                    "simulations_per_s": {"type": "number", "minimum": 0},
                    "evaluations_per_s": {"type": "number", "minimum": 0},
                    "requests_per_s": {"type": "number", "minimum": 0},
                    "input_tokens_per_s": {"type": "number", "minimum": 0},
                    "output_tokens_per_s": {"type": "number", "minimum": 0},
                }
            },
        ),
    ]
    batches: BatchesSection
    unmasking: NotRequired[
        Annotated[UnmaskingSection | None, about("what came of the forwards of a diffusion model; null of others")]
    ]
    speculation: NotRequired[
        Annotated[
            SpeculationSection | None,
            about("of text: what came of tokens that were proposed (-B speculate); null where none was"),
        ]
    ]
    pages: NotRequired[
        Annotated[
            PagesSection | None,
            about("of text: what it came to that pages of keys and values ran short; null of others"),
        ]
    ]
    stages: NotRequired[
        Annotated[
            StagesSection | None,
            about("of a model that is cut into stages (-B parallel=layers or pipeline); null of others"),
        ]
    ]
    latency_s: SpreadSection
    queue_wait_s: SpreadSection
    first_token_s: Annotated[
        SpreadSection,
        about("Of each answer in text: from when it was asked for to its first token. Empty where none was made."),
    ]
    between_tokens_s: Annotated[
        SpreadSection, about("Of each answer in text: the mean time from one token to the next.")
    ]
    classes: Annotated[ClassesSection, about("latency by priority, where classes are told apart")]
    time_s: Annotated[
        dict[str, Amount],
        about(
            "seconds by station, summed over the lanes: together wall_s × lanes",
            extra_json_schema={"properties": {"idle": {"type": "number", "minimum": 0}}, "required": ["idle"]},
        ),
    ]
    lanes: Count
    cores: Annotated[
        CoresSection,
        about(
            "whose the cores were while the clock ran: busy, others, stolen and idle sum to "
            "wall_s × count; null where the system does not tell"
        ),
    ]
    stations: Annotated[dict[str, StationTotals], about("every station but idle")]
    roofline: dict[str, Any] | None  # a `RooflineSection`, of a model of text a `TextRooflineSection`
    bottleneck: BottleneckSection
    cluster: NotRequired[Annotated[ClusterSection | None, about("of a run over nodes (--launcher); null of others")]]
    training: NotRequired[Annotated[TrainingSection | None, about("of a run that trains a network; null of others")]]
    rollouts: NotRequired[
        Annotated[RolloutsSection | None, about("of a run that plays games for training; null of others")]
    ]
    resignation: NotRequired[
        Annotated[
            ResignationSection | None,
            about(
                "of games in which players may resign, an earlier run's too, where this one has gone "
                "on with its records; null of others"
            ),
        ]
    ]
    strength: NotRequired[
        Annotated[
            StrengthSection | None,
            about(
                "of games between the run's model and an opponent, by the points of the model's seats; null of others"
            ),
        ]
    ]
    errors: ErrorCounts
    failures: NotRequired[
        Annotated[
            FailuresSection | None,
            about("what failed, of what the workload counts, else of the requests; null where nothing did"),
        ]
    ]
    memory: MemorySection
    model: Annotated[
        Annotated[
            dict[str, str | float | bool | None],
            Meta(
                extra_json_schema={
                    "properties": {
                        "slots": {"type": "integer", "minimum": 1, "description": "rows that may be generated at once"},
                        "pages": {"type": "integer", "minimum": 1, "description": "that keys and values have room in"},
                        "page_positions": {
                            "type": "integer",
                            "minimum": 1,
                            "description": "tokens that a page has room for",
                        },
                        "context": {"type": "integer", "minimum": 1, "description": "tokens of prompt and answer"},
                        "estimated_bytes": {
                            "type": ["integer", "null"],
                            "minimum": 0,
                            "description": "weights, cache and the largest step, before anything was loaded",
                        },
                        "measured_bytes": {
                            "type": ["integer", "null"],
                            "minimum": 0,
                            "description": "the same, as the device was found to hold them; null where that "
                            "was not tried",
                        },
                    }
                }
            ),
        ]
        | None,
        about("what serves, as a backend that generates tells it; null of others"),
    ]
    models: NotRequired[Annotated[list[ModelLine], about("a line each, where a run has several")]]
    beside: NotRequired[Annotated[dict[str, dict[str, Any]], about("models beside it, by name, each as it is told")]]
    notices: Annotated[list[str], about("what the strategy has to say to the user")]
    fallback: Annotated[
        FallbackSection | None,
        about("who went on when the server of a remote backend was gone for good (--fallback); null: nobody had to"),
    ]
    device: DeviceSection


NAMED = {
    "SpreadSection": "spread",
    "ErrorCounts": "errors",
    "PriorityClass": "class",
}  # definitions that fields refer to
DESCRIPTIONS = {
    "spread": "seconds; empty when nothing was answered",
    "class": "latency of the requests of one class in seconds, and what became of them",
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a report, from its types."""
    either = (RooflineSection, TextRooflineSection)
    _, parts = msgspec.json.schema_components([ReportDocument, *either], ref_template="{name}")
    plain = _Plain(parts)
    whole = plain.of(parts["ReportDocument"])
    rows, text = (plain.of(parts[one.__name__]) for one in either)
    whole["properties"]["roofline"] = {"anyOf": [{"type": "null"}, rows, {**text, "description": "of a model of text"}]}
    named = {short: plain.of(parts[name]) for name, short in NAMED.items()}
    for short, text in DESCRIPTIONS.items():
        named[short]["description"] = text
    about_it = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "The report of one gpuinfer run"}
    return {**about_it, **whole, "$defs": named}


class _Plain:
    """Schemas with their parts in place, objects closed to other keys, and `type` lists for what may be null."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts
        for name, part in parts.items():  # in the order of their types, which msgspec sorts
            order = list(get_type_hints(globals()[name]))
            part["properties"] = dict(sorted(part["properties"].items(), key=lambda item: order.index(item[0])))
            part["required"] = sorted(part["required"], key=order.index)

    def of(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.of(one) for one in value]
        if not isinstance(value, dict):
            return value
        if (name := value.get("$ref")) is not None:
            rest = {key: text for key, text in value.items() if key != "$ref"}
            if name in NAMED:
                return {"$ref": f"#/$defs/{NAMED[name]}", **rest}
            return {**self.of(self._parts[name]), **rest}
        found = {key: self.of(one) for key, one in value.items() if key != "properties"}
        if "properties" in value:
            fields = {name: self.of(field) for name, field in value["properties"].items()}
            found = {key: fields if key == "properties" else found[key] for key in value if key != "title"}
            found.setdefault("additionalProperties", False)
        # `{"type": ["number", "null"]}` in place of a choice of two where the other one is plain.
        kinds = found.get("anyOf", ())
        plain = [kind for kind in kinds if isinstance(kind.get("type"), str) and "properties" not in kind]
        if not kinds or len(plain) < len(kinds) or any(kind["type"] in ("object", "array") for kind in kinds):
            return found
        merged = {key: value for kind in kinds for key, value in kind.items()}
        rest = {key: value for key, value in found.items() if key != "anyOf"}
        return {**merged, **rest, "type": [kind["type"] for kind in kinds]}
