"""The verdict: constructed runs and the class of each (`runs.json`), and what every verdict owes its reader."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_runs import EXPECTED, RUNS, TABLE, a_run, lane

from gpuinfer.api import Roofline
from gpuinfer.config.options import OptionChange
from gpuinfer.report.evidence import Evidence, is_forward
from gpuinfer.report.report import schema
from gpuinfer.report.verdict import judge
from gpuinfer.stats import DiffusionCounters

CLASSES = schema()["properties"]["bottleneck"]["properties"]["class"]["enum"]
HEALTHY = ("device-saturated", "arrival-bound", "too few rows outstanding", "memory bandwidth", "trainer-bound")
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*(?: \w+=)?")
FEATURES = {
    "stop": "stop string",
    "logprobs": "log-prob",
    "penalties": "penalt",
    "constraints": "constraint",
    "lists": "lists of texts",
}
BUSY = {"prefill": 1.0, "forward": 8.5, "sample": 0.3, "reply": 0.2}
WORK, OPTIONS = TABLE["bases"]["text"]["steps"], TABLE["bases"]["rows"]["options"]
ROOFLINE = Roofline(10_000.0, 512, "2 forwards × 1 thread")


def test_every_class_has_a_run():
    assert {row["class"] for row in EXPECTED.values()} == set(CLASSES)


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict(name):
    run, expected = RUNS[name], EXPECTED[name]
    told = judge(run)
    assert told["class"] == expected["class"], told
    assert expected["said"] in f"{told['why']} {told['advice']}"
    assert (told["command"] or "").endswith(expected["adds"])
    assert bool(told["command"]) is bool(expected["adds"])
    assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"]
    assert told["advice"]
    assert not told["healthy"] or told["class"] in HEALTHY
    assert not run.slots or told["bounds"] == {}

    # What is in force, or no option of the plugin, is never advised.
    bare = judge(replace(run, options={}))
    assert (bare["command"], bare["change"]) == (None, None)
    if told["change"]:
        change = OptionChange(**told["change"])
        forced = {**run.options, change.flag: {**run.options[change.flag], change.name: change.value}}
        assert judge(replace(run, options=forced))["change"] != asdict(change)
    if expected["of"] == "games":
        return

    # Advice names flags that the command has, and features that prompts asked for.
    known = {f"--{name.replace('_', '-')}" for name in run.options.get("--", {})} | {"-B parallel=", "-S max_rows="}
    assert not set(FLAG.findall(told["advice"])) - known - {"--output", "--temperature"}, told["advice"]
    nothing = {**run.steps, **{f"with_{feature}": 0 for feature in FEATURES}, "echoing_s": 0.0}
    told = judge(replace(run, steps=nothing, options={"-B": {}, "-S": {}, "--": {}}))
    assert told["command"] is None
    assert not FLAG.findall(told["advice"]), told["advice"]
    if told["station"] != "constrain":  # that station is entered for constraints alone
        words = ("schema", "pattern", "grammar", *FEATURES.values())
        assert not [word for word in words if word in told["advice"].lower()], told["advice"]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    ("station", "blamed"), [("reply", "stop logprobs constraints"), ("sample", "penalties logprobs")]
)
def test_what_prompts_asked_for_is_blamed_where_it_costs(station, blamed, feature):
    spent = {"forward 0": {**BUSY, "forward": 4.0, station: 4.5}}
    advice = judge(a_run("text", lanes=spent, steps={**WORK, f"with_{feature}": 7}))["advice"].lower()
    assert (FEATURES[feature] in advice) == ("(in 7 prompts)" in advice) == (feature in blamed.split())


def test_numbers_of_a_verdict():
    searching = {"search": {"search": 1.0}, "forward 0": {"forward": 9.0}}
    crowded = judge(a_run("rows", lanes=searching, cpu_s=5.0, cpu_wait_s=595.0))
    assert crowded["gain"]["high"] == pytest.approx(4 / 0.5)  # 60 threads want a core, and 0.5 of 4 are this run's

    flat = {8: [100, 1.0], 32: [100, 1.0], 64: [800, 8.4]}
    seen = judge(a_run("slots", batch_s=flat))["gain"]
    assert seen["low"] <= seen["expected"] <= seen["high"] <= 2.0
    assert seen["expected"] == pytest.approx(1.63, abs=0.02)  # 1.85 times as fast in 85 % of the time
    assert judge(a_run("slots", slots=1, batch_s={1: [2000, 10.0]}))["gain"]["expected"] is None

    cached = judge(RUNS["whole canvases, no cache"])  # a block takes 8 forwards: one of 512 positions, 7 of 32
    assert f"{(512 + 7 * 32) / (8 * 512):.0%}" in cached["why"]
    assert cached["gain"]["expected"] == pytest.approx(1 / (0.07 + 0.93 * 0.1797), rel=0.01)

    idle = RUNS["a cap, where search and model share the cores and take turns"]
    assert "Other programs" not in judge(replace(idle, others_cores=1.0, cpu_s=9.0, cpu_wait_s=0.5))["why"]

    searches = [lane(f"worker {n}: search", search=9.5 if n == 2 else 3.0) for n in range(12)]
    searches[2]["visits"] = searches[0]["visits"]  # it got as much done as the others
    lanes = [one for n in range(12) for one in (searches[n], lane(f"worker {n}: forward 0", forward=2.0))]
    counts = {"requests": 1200, "rows_per_s": 7680.0, "batch_s": {64: (1200, 24.0)}, "facts": {"workers": 12}}
    slow = judge(a_run("rows", lanes=lanes, cores=64, **counts))
    assert "“worker 2: search”" in slow["why"]  # as text, worker 10 stands before it
    assert "3.2 times" in slow["why"]


@pytest.mark.parametrize("changes", [{"active_share": 0.4}, {"bubble_share": 0.01}])
def test_stages_that_wait_for_work_or_are_always_busy_are_no_bubbles(changes):
    run = RUNS["a pipeline, where whole models have room on the same cores"]
    told = judge(replace(run, staged={**run.staged, **changes}, roofline=None))
    assert told["class"] != "pipeline bubbles"
    assert told["station"] != "transfer"  # the forward lanes wait for the stages
    assert "fits whole" in told["why"]
    assert "fits whole" not in judge(replace(run, staged={**run.staged, **changes, "fits_one": False}))["why"]


def test_evidence_counts_cores_threads_and_lanes():
    """Another program had the core of a thread that waits: its share is that program's, and no lack of work."""
    spun = {"steps": {**WORK, "threads_busy_s": 12.0, "threads_waited_s": 5.0}, "unused_cores": 0.0, "cpu_s": 17.0}
    alone, beside = a_run("text", others_cores=0.0, **spun), a_run("text", others_cores=0.3, cpu_wait_s=4.0, **spun)
    assert (alone.idle_cores, beside.idle_cores) == (pytest.approx(0.5), pytest.approx(0.1))
    assert (alone.threads_waited_s, beside.threads_waited_s) == (pytest.approx(5.0), pytest.approx(1.0))

    spent = {"worker 0: search": {"search": 9.8}, "worker 0: records": {"record": 0.5}, "forward 0": {"forward": 5.0}}
    run = a_run("", wall_s=10.0, lanes=spent)
    assert run.busy(run.work) == pytest.approx(0.98)  # a lane that writes records is no sign of idle workers
    assert run.threads_busy == pytest.approx((9.8 + 0.5 + 5.0) / 10.0)
    four = a_run("", wall_s=10.0, lanes={"forward 0": {"forward": 5.0}}, facts={"threads": 4})
    assert four.threads_busy == pytest.approx(2.0)

    names = ("forward 0", "worker 3: forward 1", "search", "worker 0: search forward")
    assert [is_forward(name) for name in names] == [True, True, False, False]
    assert DiffusionCounters.of({**counted(1.0, 1.0), "positions": 0}) is None


def test_a_command_says_each_option_once():
    command = "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b'"
    changes = ("-B", "max_rows", 64), ("-S", "max_rows", 64), ("--", "rows", 64), ("--", "games_in", 2)
    assert [OptionChange(*change).in_command(command) for change in changes] == [
        "gpuinfer load --rows=8 -B threads=2 -S max_rows=8 --name 'a b' -B max_rows=64",
        "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 --name 'a b' -S max_rows=64",
        "gpuinfer load -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b' --rows 64",
        "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b' --games-in 2",
    ]  # fmt: skip


# Properties

SATURATED = [name for name, row in EXPECTED.items() if row["of"] == "slots" and row["class"] == "device-saturated"]


@pytest.mark.parametrize("name", SATURATED)
@pytest.mark.parametrize("idle", [0.35, 1.0])
def test_no_run_with_idle_cores_is_called_saturated(name, idle):
    case = RUNS[name]
    for run in (replace(case, unused_cores=idle), replace(case, cpu_s=case.wall_s * (case.cores - idle))):
        told = judge(replace(run, cores=2, others_cores=None))
        assert told["class"] != "device-saturated"
        assert not told["healthy"] or told["class"] == "too few rows outstanding"


SPENT = st.lists(st.floats(0, 2.5), min_size=4, max_size=4).map(
    lambda spent: {"forward 0": dict(zip(BUSY, spent, strict=True))}
)


def against(efficiency):
    plain = {"tokens_per_s": 1000.0, "at_rows": 64, "least_s": 10.0 * efficiency, "gflops_per_s": 200.0}
    return {
        **plain,
        "own_gflops_per_s": 200.0,
        "gbytes_per_s": 20.0,
        "efficiency": efficiency,
        "limited_by": "products",
    }


@given(SPENT, st.floats(0.31, 2.0), st.integers(1, 128), st.floats(0.01, 1.0), st.floats(0.01, 0.59))
def test_neither_idle_cores_nor_half_of_the_roofline_look_well(spent, idle, slots, efficiency, half):
    run = a_run("text", lanes=spent, unused_cores=idle, slots=slots, text_roofline=against(efficiency))
    assert judge(run)["class"] != "device-saturated"
    assert judge(a_run("text", lanes=spent, text_roofline=against(half)))["class"] != "device-saturated"


def counted(tokens_per_forward, computed_share, useful=1.0):
    """Of 200 answers of 256 tokens on canvases of 512, `useful` of them before an end."""
    drawn, forwards = 200 * 256, 200 * 256 / tokens_per_forward
    steps = {"steps": forwards / 16, "seconds": 9.0, "rows": forwards, "positions": forwards * 512, "idle": 0}
    return {**steps, "tokens": forwards * 512 * computed_share, "committed": drawn, "output_tokens": drawn * useful}


@given(
    st.tuples(st.floats(0.05, 32), st.floats(0.01, 1), st.floats(0, 1)),
    st.sampled_from([None, "none", "prefix", "dual", "vicinity", "exact"]),
    st.sampled_from([None, "threshold", "random", "dream", "else"]),
    st.sampled_from([None, 0.5, 0.95]),
    st.sampled_from([None, 1, 32, 4096]),
    st.booleans(),
)
def test_no_diffusion_run_is_promised_less_than_it_has(work, cache, decoder, threshold, block, causal):
    flags = {"cache": cache, "decoder": decoder, "threshold": threshold, "block_length": block, "steps": None}
    model = {"decoder": "low-confidence", "cache": "none", "block": None, "block_causal": causal}
    options = {"-B": {"slots": 16}, "--": {**flags, "batch_size": 16}}
    told = judge(a_run("masks", steps=counted(*work), model=model, options=options))
    gain = told["gain"]
    assert 1 <= gain["low"] <= (gain["expected"] or gain["high"]) <= gain["high"]
    if told["change"] and told["change"]["name"] in flags:
        assert told["change"]["value"] != flags[told["change"]["name"]]


LANES = st.builds(
    lambda name, times, visits: {"name": name, "stations": times, "visits": visits},
    st.sampled_from(["search", "forward 0", "worker 1: forward 1", "worker 0: search"]),
    st.dictionaries(st.sampled_from(["search", "forward", "transfer", "other", "idle"]), st.floats(0, 10)),
    st.dictionaries(st.sampled_from(["search", "forward", "idle"]), st.integers(0, 1000)),
)
FACT_NAMES = ["workers", "blocks", "rows_outstanding", "games_in_flight", "threads", "clients"]
EVIDENCE = st.builds(
    Evidence,
    wall_s=st.just(0.0) | st.floats(0.001, 100),
    lanes=st.lists(LANES, max_size=6),
    requests=st.integers(0, 10_000),
    slots=st.just(0) | st.integers(0, 8),
    rows_per_s=st.floats(0, 1e6),
    rows_mean=st.just(0.0) | st.floats(1, 5000),
    batch_s=st.dictionaries(st.integers(1, 5000), st.tuples(st.integers(1, 1000), st.floats(1e-6, 100)), max_size=4),
    reasons=st.dictionaries(st.sampled_from(["full", "waited", "clients", "cap"]), st.integers(0, 100)),
    **dict.fromkeys(("latency_s", "queue_wait_s", "longest_wait_s"), st.floats(0, 10)),
    roofline=st.none() | st.just(ROOFLINE),
    facts=st.dictionaries(st.sampled_from(FACT_NAMES), st.integers(0, 1000)),
    cores=st.integers(1, 64),
    cpu_s=st.just(0.0) | st.floats(0, 100),
    cpu_wait_s=st.floats(0, 100),
    **dict.fromkeys(("others_cores", "stolen_cores"), st.none() | st.floats(0, 64)),
    on_cpu=st.booleans(),
    options=st.sampled_from([{}, OPTIONS]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@settings(deadline=None)
@given(EVIDENCE)
def test_any_run_gets_a_verdict_of_a_known_class_with_a_sane_gain(run):
    run = replace(run, batch_s={min(size, run.slots or size): seen for size, seen in run.batch_s.items()})
    told = judge(run)
    gain = told["gain"]
    assert told["class"] in CLASSES
    assert told["why"].endswith(".")
    assert told["advice"].endswith(".")
    assert 1.0 <= gain["low"] <= gain["high"] < float("inf")
    assert gain["expected"] is None or gain["low"] <= gain["expected"] <= gain["high"]
    assert all(bound > 0 and math.isfinite(bound) for bound in told["bounds"].values())
    if told["unexplained"] > 0.05:
        assert told["class"] == "inconclusive"
