"""The verdict: constructed runs and the class of each, and what every verdict owes its reader."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_runs import (
    BUSY,
    CUT,
    EXPECTED,
    FLAGS,
    FLAT,
    FULL_LANES,
    GENERATION,
    MASKS,
    NOTHING_ASKED,
    OPTIONS,
    ROOFLINE,
    RUNS,
    SHARED,
    SMALL,
    STAGED,
    WORK,
    a_lane,
    a_roofline,
    counted,
    lane,
    masks_run,
    rows_run,
    slots_run,
    steps,
    text_run,
    waiting,
)

from gpuinfer.config.options import OptionChange
from gpuinfer.report.evidence import Evidence, is_forward
from gpuinfer.report.report import schema
from gpuinfer.report.verdict import judge
from gpuinfer.stats import DiffusionCounters

CLASSES = schema()["properties"]["bottleneck"]["properties"]["class"]["enum"]
VERDICTS = [[cell.strip() for cell in f"{line}|||".split("|")[:4]] for line in EXPECTED.splitlines() if line]
HEALTHY = ("device-saturated", "arrival-bound", "too few rows outstanding", "memory bandwidth")
EVERY_RUN = pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in RUNS.items()])


@pytest.mark.parametrize(("name", "kind", "number", "added"), VERDICTS, ids=[row[0] for row in VERDICTS])
def test_the_verdict_names(name, kind, number, added):
    run = RUNS[name]
    told = judge(run)
    assert told["class"] == kind, told
    assert number in told["why"]
    assert (told["command"] or "").endswith(added)
    assert bool(told["command"]) is bool(added)
    assert told["advice"]
    assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"]
    assert not told["healthy"] or kind in HEALTHY
    assert not run.slots or told["bounds"] == {}


def test_every_run_has_an_expected_verdict_and_every_class_a_run():
    assert sorted(row[0] for row in VERDICTS) == sorted(RUNS)
    of_games = {  # see rollouts_verdict/
        *("trainer-bound", "starvation", "reference pass", "adapter load", "constraint"),
        *("engine saturated", "too little concurrency", "environment slow"),
    }
    assert {row[1] for row in VERDICTS} | of_games == set(CLASSES)


@EVERY_RUN
def test_what_is_in_force_or_no_option_of_the_plugin_is_never_advised(run):
    told = judge(run)
    bare = judge(replace(run, options={}))
    assert (bare["command"], bare["change"]) == (None, None)
    if told["change"]:
        change = OptionChange(**told["change"])
        forced = {**run.options, change.flag: {**run.options[change.flag], change.name: change.value}}
        assert judge(replace(run, options=forced))["change"] != asdict(change)


# What advice may name: flags that the command has, features that prompts asked for.

FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*(?: \w+=)?")
FEATURES = {
    "stop": "stop string",
    "logprobs": "log-prob",
    "penalties": "penalt",
    "constraints": "constraint",
    "lists": "lists of texts",
}


@EVERY_RUN
def test_advice_names_only_what_is_in_use(run):
    known = {f"--{name.replace('_', '-')}" for name in run.options.get("--", {})} | {"-B parallel=", "-S max_rows="}
    advice = judge(run)["advice"]
    assert not set(FLAG.findall(advice)) - known, advice
    bare = replace(run, steps={**run.steps, **NOTHING_ASKED, "echoing_s": 0.0}, options={"-B": {}, "-S": {}, "--": {}})
    told = judge(bare)
    assert told["command"] is None
    assert not FLAG.findall(told["advice"]), told["advice"]
    if told["station"] != "constrain":  # that station is entered for constraints alone
        words = ("schema", "pattern", "grammar", *FEATURES.values())
        assert not [word for word in words if word in told["advice"].lower()], told["advice"]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("station", ["reply", "sample"])
def test_what_prompts_asked_for_is_blamed_where_it_costs(station, feature):
    run = text_run({**BUSY, "forward": 4.0, station: 4.5}, steps={**WORK, f"with_{feature}": 7})
    blamed = {"reply": ("stop", "logprobs", "constraints"), "sample": ("penalties", "logprobs")}[station]
    advice = judge(run)["advice"].lower()
    assert (FEATURES[feature] in advice) == (feature in blamed)
    assert ("(in 7 prompts)" in advice) == (feature in blamed)


SLOW = {**BUSY, "forward": 4.0}


def flagged(run, **flags):
    return replace(run, options={"-B": {}, "--": flags})


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        (text_run({**SLOW, "constrain": 4.5}, steps={**WORK, "with_constraints": 7}), "Simpler constraints (in 7"),
        (text_run({**SLOW, "constrain": 4.5}, steps={**WORK, "with_lists": 9}), "Shorter lists of texts (in 9"),
        (text_run({**SLOW, "sample": 4.5}), "Chance costs"),
        (text_run({**SLOW, "sample": 4.5}, options={"--": {"temperature": 1.0, "top_k": 0}}), "Chance costs"),
        (text_run({**SLOW, "sample": 4.5}, options={"--": {"temperature": 1.0, "top_k": 40}}), "Filters and chance"),
        (text_run({**SLOW, "sample": 4.5}, options={"--": {"temperature": 1.0, "min_p": 0.1}}), "Filters and chance"),
        (flagged(waiting(a_lane("input", read=9.0)), input="-"), "--input with a local file"),
        (flagged(waiting(a_lane("input", read=9.0)), input="rows.jsonl"), "local disk"),
        (flagged(waiting(a_lane("input", read=9.0))), "local file"),
        (flagged(waiting(a_lane("output", write=9.0)), output="-"), "--output FILE"),
        (flagged(waiting(a_lane("output", write=9.0)), output="a.jsonl"), "--output on a local disk"),
        (flagged(waiting(a_lane("output", write=9.0))), "read faster"),
    ],
)
def test_advice_is_of_what_is_in_force(run, advice):
    assert advice in judge(run)["advice"]


SEARCH = lane("search", search=9.5)
FORWARDS = {"lanes": (lane("search", search=1.0), lane("forward 0", forward=9.0))}
ALL_IN_FLIGHT = {"facts": {"workers": 2, "blocks": 1, "rows_outstanding": 180, "games_in_flight": 60}}
BLOCKS_OF_90 = {**SMALL, **ALL_IN_FLIGHT, "rows_mean": 90.0, "batch_s": {90: (900, 13.0)}}


@pytest.mark.parametrize(
    ("run", "kind", "said"),
    [
        pytest.param(
            rows_run(lane("forward 0", forward=9.9), cores=2, cpu_s=2.0, rows_mean=64.0),
            "oversubscribed CPUs",
            "only 0.2 of 2 cores were at work",
            id="no device is saturated where hardly a core was at work",
        ),
        pytest.param(
            rows_run(SEARCH, lane("forward 0", forward=2.0), cpu_s=5.0, cpu_wait_s=20.0),
            "search-bound",
            "",
            id="threads of others are not this run's",
        ),
        pytest.param(
            rows_run(**FORWARDS, cpu_s=3.0, cpu_wait_s=60.0),
            "oversubscribed CPUs",
            "6.3 threads wanted a core at once, and this run had 0.3 of 4",
            id="others leave no cores",
        ),
        pytest.param(
            rows_run(SEARCH, lane("forward 0", forward=2.0), cpu_s=10.0),
            "search-bound",
            "Only 1.0 of 4 cores are busy",
            id="cores are free",
        ),
        pytest.param(
            rows_run(SEARCH, lane("forward 0", forward=2.0), cpu_s=39.0),
            "search-bound",
            "All cores are at work",
            id="no core is free",
        ),
        pytest.param(
            rows_run(
                lane("worker 0: search", search=9.8), lane("forward 0", forward=9.5), rows_per_s=3200.0,
                rows_mean=64.0, requests=500, roofline=ROOFLINE, facts={"workers": 1, "blocks": 8},
                batch_s={64: (500, 9.5)},
            ),
            "search-bound",
            "",
            id="lanes that are busy with small batches for want of more",
        ),
        pytest.param(
            rows_run(*SHARED, **{**BLOCKS_OF_90, "total": 60}),
            "too few rows outstanding",
            "All 60 games are in flight at once",
            id="games that are all in flight",
        ),
        pytest.param(
            rows_run(
                *SHARED,
                **{**BLOCKS_OF_90, "options": {**SMALL["options"], "-S": {"max_rows": 8}}},
                reasons={"cap": 93, "clients": 7},
            ),
            "too few rows outstanding",
            "Leave -S max_rows=8 out then",
            id="a cap that would keep larger batches small",
        ),
        pytest.param(
            rows_run(*SHARED, **{**SMALL, "cpu_wait_s": 60.0, "reasons": {"full": 99, "clients": 1}}),
            "batch cap too small",
            "",
            id="one thread in each forward is never too many",
        ),
        pytest.param(
            rows_run(
                *FULL_LANES, rows_mean=16.0, rows_per_s=800.0, requests=8000, roofline=ROOFLINE,
                facts={"clients": 16}, reasons={"cap": 9, "free": 1}, batch_s={16: (500, 9.5)}, latency_s=0.019,
            ),
            "too few rows outstanding",
            "25 in each request",
            id="what a share of few rows fills is no cap",
        ),
        pytest.param(
            rows_run(
                {**lane("forward 0", forward=9.5), "ran": {"forward": 9.4}}, cpu_s=10.0, batch_s={512: (900, 9.4)},
                options={"-B": {"threads": 1}}, facts={"clients": 8},
            ),
            "idle cores",
            "3.0 of 4 cores were idle",
            id="forwards of rows with too few threads",
        ),
        pytest.param(
            replace(
                text_run(unused_cores=1.9, cpu_s=0.5), lanes=[{**a_lane("forward 0", **BUSY), "ran": {"forward": 0.2}}]
            ),
            "device-saturated",
            "",
            id="a model that computes elsewhere",
        ),
        pytest.param(slots_run(cpu_s=18.0, cpu_wait_s=12.0), "device-saturated", "", id="threads by default"),
        pytest.param(
            text_run(
                batch_s=steps((3, 4, 0.06)), wall_s=0.26, requests=3, others_cores=1.7, cpu_s=0.07, cpu_wait_s=0.4
            ),
            "inconclusive",
            "4 steps",
            id="a few steps beside other programs",
        ),
    ],
)  # fmt: skip
def test_causes_that_look_alike_are_told_apart(run, kind, said):
    told = judge(run)
    assert told["class"] == kind, told
    assert said in f"{told['why']} {told['advice']}"


def test_alone_on_its_machine_a_run_would_have_all_cores_at_most():
    told = judge(rows_run(**FORWARDS, cpu_s=5.0, cpu_wait_s=595.0))  # 60 threads want a core, and 0.5 of 4 are theirs
    assert told["gain"]["high"] == pytest.approx(4 / 0.5)


def test_a_neighbour_on_idle_cores_is_none():
    told = judge(rows_run(*SHARED, **{**SMALL, "others_cores": 1.0, "cpu_s": 9.0, "cpu_wait_s": 0.5}))
    assert "Other programs" not in told["why"]


@pytest.mark.parametrize("changes", [{"active_share": 0.4}, {"bubble_share": 0.01}])
def test_stages_that_wait_for_work_or_are_always_busy_are_no_bubbles(changes):
    told = judge(rows_run(**CUT, staged={**STAGED, **changes}))
    assert told["class"] != "pipeline bubbles"
    assert told["station"] != "transfer"  # the forward lanes wait for the stages
    assert "fits whole" in told["why"]
    assert "fits whole" not in judge(rows_run(**CUT, staged={**STAGED, **changes, "fits_one": False}))["why"]


def test_the_worker_that_is_slow_is_named_however_many_there_are():
    """Each with a forward of its own: as text, worker 10 stands before worker 2."""
    searches = [lane(f"worker {n}: search", search=9.5 if n == 2 else 3.0) for n in range(12)]
    searches[2]["visits"] = searches[0]["visits"]  # it got as much done as the others
    lanes = [one for n in range(12) for one in (searches[n], lane(f"worker {n}: forward 0", forward=2.0))]
    given = {"requests": 1200, "rows_per_s": 7680.0, "batch_s": {64: (1200, 24.0)}, "facts": {"workers": 12}}
    told = judge(rows_run(*lanes, cores=64, **given))
    assert "“worker 2: search”" in told["why"]
    assert "3.2 times" in told["why"]


@pytest.mark.parametrize(
    ("lanes", "facts", "threads", "others", "advice"),
    [
        (["worker 0: search", "worker 1: search"], {"workers": 2}, None, 2.9, ", or with 1 worker: 1 core is left."),
        (["worker 0: search"], {"workers": 1}, None, 2.9, "."),
        (["forward 0"], {}, 1, 2.9, "."),
        (["forward 0"], {}, 2, 2.9, ", or with 1 thread: 1 core is left."),
        (["forward 0"], {}, 4, 1.9, ", or with 2 threads: 2 cores are left."),
        (["forward 0"], {}, 2, 1.9, "."),
        (["forward 0"], {}, 2, 3.7, "."),
    ],
)
def test_beside_other_programs_only_what_there_is_and_can_be_fewer_is_advised(lanes, facts, threads, others, advice):
    busy = [lane(name, **{"forward" if "forward" in name else "search": 1.0}) for name in lanes]
    given = {"cores": 4, "cpu_s": 10.0 * (4 - others) - 1.0, "cpu_wait_s": 16.0, "others_cores": others}
    told = judge(rows_run(*busy, **given, facts=facts, options={"-B": {"threads": threads} if threads else {}}))
    assert told["class"] == "oversubscribed CPUs"
    assert told["advice"] == f"Let it run alone{advice}"


def test_a_thread_that_waits_for_one_without_a_core_is_no_idle_core():
    """Another program had the core: its share is that program's, and the wait for it is no lack of work."""
    spun = {"steps": {**WORK, "threads_busy_s": 12.0, "threads_waited_s": 5.0}, "unused_cores": 0.0}
    alone = text_run(cpu_s=17.0, others_cores=0.0, **spun)
    beside = text_run(cpu_s=17.0, others_cores=0.3, cpu_wait_s=4.0, **spun)
    assert (alone.idle_cores, beside.idle_cores) == (pytest.approx(0.5), pytest.approx(0.1))
    assert (alone.threads_waited_s, beside.threads_waited_s) == (pytest.approx(5.0), pytest.approx(1.0))


def test_gains_are_promised_by_what_was_seen_and_by_nothing_else():
    by_evidence = judge(slots_run(batch_s=FLAT))["gain"]
    assert by_evidence["low"] <= by_evidence["expected"] <= by_evidence["high"] <= 2.0
    assert by_evidence["expected"] == pytest.approx(1.63, abs=0.02)  # 1.85 times as fast in 85 % of the time
    assert judge(slots_run(slots=1, batch_s=steps((1, 2000, 0.005))))["gain"]["expected"] is None
    cached = judge(MASKS["whole canvases, no cache"])  # a block takes 8 forwards: one of 512 positions, 7 of 32
    assert f"{(512 + 7 * 32) / (8 * 512):.0%}" in cached["why"]
    assert cached["gain"]["expected"] == pytest.approx(1 / (0.07 + 0.93 * 0.1797), rel=0.01)


def test_a_command_says_each_option_once():
    command = "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b'"
    changes = ("-B", "max_rows", 64), ("-S", "max_rows", 64), ("--", "rows", 64), ("--", "games_in", 2)
    assert [OptionChange(*change).in_command(command) for change in changes] == [
        "gpuinfer load --rows=8 -B threads=2 -S max_rows=8 --name 'a b' -B max_rows=64",
        "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 --name 'a b' -S max_rows=64",
        "gpuinfer load -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b' --rows 64",
        "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b' --games-in 2",
    ]  # fmt: skip


def test_a_left_to_right_model_has_no_canvas():
    assert DiffusionCounters.of({**counted(1.0, 1.0), "positions": 0}) is None


@pytest.mark.parametrize(
    ("name", "forward"),
    [("forward 0", True), ("worker 3: forward 1", True), ("search", False), ("worker 0: search forward", False)],
)
def test_lanes_that_serve_batches_are_told_by_their_name(name, forward):
    assert is_forward(name) is forward


def test_lanes_count_as_busy_threads():
    lanes = [
        lane("worker 0: search", search=9.8),
        lane("worker 0: records", record=0.5),
        lane("forward 0", forward=5.0),
    ]
    run = Evidence(wall_s=10.0, lanes=lanes)
    assert run.busy(run.work) == pytest.approx(0.98)  # a lane that writes records is no sign of idle workers
    assert run.threads_busy == pytest.approx((9.8 + 0.5 + 5.0) / 10.0)
    four = Evidence(wall_s=10.0, lanes=[lane("forward 0", forward=5.0)], facts={"threads": 4})
    assert four.threads_busy == pytest.approx(2.0)


# Properties

SATURATED = [
    pytest.param(GENERATION[row[0]], id=row[0]) for row in VERDICTS if row[0] in GENERATION and "satur" in row[1]
]


@pytest.mark.parametrize("case", SATURATED)
@pytest.mark.parametrize("idle", [0.35, 1.0])
def test_no_run_with_idle_cores_is_called_saturated(case, idle):
    for run in (replace(case, unused_cores=idle), replace(case, cpu_s=case.wall_s * (case.cores - idle))):
        told = judge(replace(run, cores=2, others_cores=None))
        assert told["class"] != "device-saturated"
        assert not told["healthy"] or told["class"] == "too few rows outstanding"


SPENT = st.lists(st.floats(0, 2.5), min_size=4, max_size=4).map(lambda spent: dict(zip(BUSY, spent, strict=True)))


@given(SPENT, st.floats(0.31, 2.0), st.integers(1, 128), st.floats(0.01, 1.0), st.floats(0.01, 0.59))
def test_neither_idle_cores_nor_half_of_the_roofline_look_well(spent, idle, slots, efficiency, half):
    run = text_run(spent, unused_cores=idle, slots=slots, text_roofline=a_roofline(efficiency))
    assert judge(run)["class"] != "device-saturated"
    assert judge(text_run(spent, text_roofline=a_roofline(half)))["class"] != "device-saturated"


@given(
    SPENT,
    st.dictionaries(st.integers(1, 8), st.tuples(st.integers(1, 1000), st.floats(0, 100)), max_size=4),
    st.integers(1, 8),
    st.integers(0, 500),
)
def test_any_run_with_slots_gets_a_verdict_of_the_schema(spent, batch_s, slots, rows):
    batch_s = {min(size, slots): list(seen) for size, seen in batch_s.items()}
    run = slots_run(spent, batch_s=batch_s, slots=slots, requests=rows, rows_per_s=rows / 10)
    for one in (run, replace(run, lanes=[], wall_s=0.0)):
        told = judge(one)
        assert told["class"] in CLASSES
        assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"]
        assert 0.0 <= told["share"] <= 1.000001


@given(
    st.tuples(st.floats(0.05, 32), st.floats(0.01, 1), st.floats(0, 1)),
    st.sampled_from([None, "none", "prefix", "dual", "vicinity", "exact"]),
    st.sampled_from([None, "threshold", "random", "dream", "else"]),
    st.sampled_from([None, 0.5, 0.95]),
    st.sampled_from([None, 1, 32, 4096]),
    st.booleans(),
)
def test_no_diffusion_run_is_promised_less_than_it_has(work, cache, decoder, threshold, block, causal):
    flags = {"cache": cache, "decoder": decoder, "threshold": threshold, "block_length": block}
    run = masks_run(counted(*work), None, {"block_causal": causal}, **flags)
    told = judge(run)
    gain = told["gain"]
    assert 1 <= gain["low"] <= (gain["expected"] or gain["high"]) <= gain["high"]
    if told["change"] and told["change"]["name"] in FLAGS:
        assert told["change"]["value"] != run.options["--"][told["change"]["name"]]


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
