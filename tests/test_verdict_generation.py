"""The verdict on what generates: one constructed run for each cause, and none judged by what it is not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.report.evidence import Evidence
from gpuinfer.report.report import schema
from gpuinfer.report.verdict import judge

CLASSES = schema()["properties"]["bottleneck"]["properties"]["class"]["enum"]
BUSY = {"prefill": 1.0, "forward": 8.5, "sample": 0.3, "reply": 0.2}
COMMAND = "gpuinfer generate --input p.jsonl"


def steps(*sizes):
    """Of (rows, how many, seconds of each)."""
    return {rows: [count, count * seconds] for rows, count, seconds in sizes}


FULL = steps((64, 900, 0.011))
SUBLINEAR = steps((16, 100, 0.004), (32, 100, 0.005), (64, 800, 0.010))  # with 128 rows it would be 0.020
FLAT = steps((8, 100, 0.010), (32, 100, 0.010), (64, 800, 0.0105))


def a_lane(name, **stations):
    return {"name": name, "stations": {**stations, "idle": 10.0 - sum(stations.values())}, "visits": {}}


def waiting(*lanes, **more):
    """A model that has nothing to do for 45 % of the time, beside these lanes."""
    run = a_run({**BUSY, "forward": 4.0}, cpu_s=12.0, **more)
    return replace(run, lanes=[*run.lanes, *lanes])


def a_run(stations=BUSY, **more):
    """Ten seconds of a model with 64 slots, 400 rows answered, most of which had waited."""
    lane = a_lane("forward 0", **stations)
    plain = {
        "wall_s": 10.0,
        "lanes": [lane],
        "slots": 64,
        "requests": 400,
        "rows_per_s": 40.0,
        "batch_s": FULL,
        "reasons": {"full": 300, "free": 1},
        "latency_s": 5.0,
        "queue_wait_s": 3.5,
        "facts": {"rows_outstanding": 192},
        "cores": 2,
        "cpu_s": 19.0,
        "dtype": "bfloat16",
        "options": {"-B": {"slots": 2, "threads": 2}, "--": {"batch_size": 2, "context": None, "dtype": "float32"}},
        "command": COMMAND,
    }
    return Evidence(**{**plain, **more})


CASES = [
    pytest.param(
        a_run(dtype="float32"),
        "device-saturated",
        "100% of the 64 slots were in use, and the model computed 95% of the time: 10% on prompts, 85% on answers.",
        f"{COMMAND} --dtype bfloat16",
        id="the model computes all the time",
    ),
    pytest.param(a_run(), "device-saturated", "100% of the 64 slots", None, id="in bfloat16 already"),
    pytest.param(
        a_run(dtype="float32", bfloat16_pays=False),
        "device-saturated",
        "100% of the 64 slots",
        None,
        id="on a processor without bfloat16",
    ),
    pytest.param(
        a_run(batch_s=SUBLINEAR),
        "device-saturated",
        "of the 64 slots were in use",
        None,
        id="larger steps would take longer by as much",
    ),
    pytest.param(
        a_run(batch_s=FLAT),
        "batch cap too small",
        "a step of more rows takes hardly longer",
        f"{COMMAND} --batch-size 128",
        id="steps take as long with more rows",
    ),
    pytest.param(
        a_run(batch_s=FLAT, options={"-B": {"slots": 64}}),
        "batch cap too small",
        "a step of more rows",
        f"{COMMAND} -B slots=128",
        id="a workload without a flag for it",
    ),
    pytest.param(
        a_run(slots=1, batch_s=steps((1, 2000, 0.005))),
        "batch cap too small",
        "The only slot was in use, and a step reads all weights, however few rows it has.",
        f"{COMMAND} --batch-size 16",
        id="a single slot",
    ),
    pytest.param(
        a_run(batch_s=FLAT, requests=100, rows_per_s=10.0),
        "device-saturated",
        "slots were in use",
        None,
        id="more slots than there are rows for",
    ),
    pytest.param(
        a_run({**BUSY, "forward": 4.0, "sample": 4.5}),
        "sampling-bound",
        "45% of the time went into drawing tokens, 50% into the model",
        None,
        id="sampling takes long",
    ),
    pytest.param(
        a_run({**BUSY, "forward": 4.0, "reply": 4.5}),
        "host-bound",
        "45% of the time went into what is done with tokens between steps, 53% into them.",
        None,
        id="the work between steps takes long",
    ),
    pytest.param(
        a_run({**BUSY, "forward": 4.0}, cpu_s=12.0),
        "host-bound",
        "The model had nothing to do 45% of the time",
        None,
        id="rows come slowly",
    ),
    pytest.param(
        waiting(a_lane("input", read=9.0, understand=0.2), a_lane("output", write=0.1, sync=0.4)),
        "host-bound",
        "nothing to do 45% of the time: rows come slowly (“read” 90% of the time)",
        None,
        id="slow standard input",
    ),
    pytest.param(
        waiting(a_lane("input", read=9.0), requests=2, rows_per_s=0.2),
        "inconclusive",
        "nothing to do 45% of the time, but 2 rows are too few to tell how fast they come.",
        None,
        id="two rows of standard input",
    ),
    pytest.param(
        waiting(a_lane("input", understand=2.5), a_lane("prompts 0", understand=3.0, constrain=0.2)),
        "host-bound",
        "turning prompts into tokens takes long (“understand” 55% of the time)",
        None,
        id="prompts that are hard to read, in two lanes",
    ),
    pytest.param(
        waiting(a_lane("input", understand=0.5), a_lane("prompts 0", understand=0.5, constrain=4.0)),
        "host-bound",
        "constraints take long to compile",
        None,
        id="a heavy schema for each row",
    ),
    pytest.param(
        waiting(a_lane("input", read=0.2), a_lane("output", write=8.0, sync=0.5)),
        "host-bound",
        "answers are taken slowly (“write” 80% of the time)",
        None,
        id="slow standard output",
    ),
    pytest.param(
        waiting(a_lane("input", read=0.2), a_lane("output", write=0.3, sync=6.0)),
        "host-bound",
        "the disk takes long to say that it has them (fsync)",
        None,
        id="a slow fsync",
    ),
    pytest.param(
        waiting(a_lane("input", read=1.0), a_lane("output", write=0.3, sync=0.5)),
        "host-bound",
        "rows are asked and answers taken more slowly",
        None,
        id="nothing beside the model was busy for as long",
    ),
    pytest.param(
        a_run({**BUSY, "forward": 4.0, "constrain": 4.5}),
        "host-bound",
        "45% of the time went into what constraints allow, token by token",
        None,
        id="a heavy schema for all rows",
    ),
    pytest.param(
        a_run(
            {**BUSY, "prefill": 6.0, "forward": 3.5},
            batch_s=steps((6, 900, 0.01)),
            steps={"seconds": 9.0, "held_s": 8.1, "prompt_tokens": 18_000},
            options={"-B": {"step_tokens": 4}},
        ),
        "batch cap too small",
        "Steps have 4 tokens at most, and 90% of their time that left no room for all of the prompts'.",
        f"{COMMAND} -B step_tokens=512",
        id="prompts in small pieces",
    ),
    pytest.param(
        a_run(
            {**BUSY, "prefill": 9.0, "forward": 0.5},
            batch_s=steps((3, 900, 0.01)),
            queue_wait_s=0.0,
            steps={"seconds": 9.0, "held_s": 8.1, "prompt_tokens": 700_000},
            options={"-B": {"step_tokens": 512}},
        ),
        "device-saturated",
        "Prompts took 90% of the time, with 1,750 tokens on average: a few of them fill a step, so that 3.0 of",
        None,
        id="very long prompts",
    ),
    pytest.param(
        a_run(
            {**BUSY, "prefill": 9.0, "forward": 0.5},
            batch_s=steps((3, 900, 0.01)),
            steps={"seconds": 9.0, "held_s": 8.1, "echoing_s": 8.1, "prompt_tokens": 700_000},
        ),
        "device-saturated",
        "Log-probabilities of the prompt are wanted",
        None,
        id="very long prompts with log-probabilities",
    ),
    pytest.param(
        a_run(batch_s=steps((12, 90, 0.1)), steps={"seconds": 9.0, "held_s": 8.1, "prompt_tokens": 700}),
        "device-saturated",
        "Steps were full with the tokens of 12.0 of 64 slots, and the model computed 95% of the time",
        None,
        id="whole canvases of few rows fill the steps",
    ),
    pytest.param(
        a_run(others_cores=1.1, cpu_s=9.0, cpu_wait_s=9.0),
        "oversubscribed CPUs",
        "Other programs took 1.1 of 2 cores. Ready to run, threads of this run waited 50% of their time.",
        None,
        id="a neighbour on the cores, and nothing else",
    ),
    pytest.param(
        a_run(
            {**BUSY, "prefill": 6.0, "forward": 3.5},
            steps={"seconds": 9.0, "held_s": 8.1},
            options={"-B": {"step_tokens": 4}},
            others_cores=1.1,
            cpu_s=9.0,
            cpu_wait_s=9.0,
        ),
        "batch cap too small",
        "Other programs took 1.1 of 2 cores. Steps have 4 tokens at most",
        f"{COMMAND} -B step_tokens=512",
        id="prompts in small pieces, and a neighbour on the cores",
    ),
    pytest.param(
        a_run(batch_s=steps((1, 80, 0.1), (2, 10, 0.1)), requests=2, rows_per_s=0.2, queue_wait_s=0.0),
        "too few rows outstanding",
        "All 2 rows were under way at once: 1.1 of 64 slots were in use",
        None,
        id="two rows",
    ),
    pytest.param(
        a_run(batch_s=steps((3, 500, 0.01), (64, 400, 0.01))),
        "too few rows outstanding",
        "The last answers went on when no rows were left to begin: 30.1 of 64 slots",
        None,
        id="a long end",
    ),
    pytest.param(
        a_run({**BUSY, "prefill": 8.0, "forward": 1.5}, batch_s=steps((3, 900, 0.011))),
        "device-saturated",
        "5% of the 64 slots were in use, and the model computed 95% of the time: 80% on prompts, 15% on answers.",
        None,
        id="long prompts, a few to a step",
    ),
    pytest.param(
        a_run(batch_s=steps((16, 900, 0.01)), queue_wait_s=0.01),
        "too few rows outstanding",
        "Rows hardly waited for a slot: 16.0 of 64 slots",
        None,
        id="rows that are asked too slowly",
    ),
    pytest.param(
        a_run({"prefill": 0.2}, batch_s=steps((2, 3, 0.07)), requests=2, rows_per_s=0.2),
        "inconclusive",
        "The model took 3 steps: too few to go by.",
        None,
        id="a few steps",
    ),
    pytest.param(
        a_run(batch_s={}, requests=0, rows_per_s=0.0),
        "inconclusive",
        "The model took 0 steps",
        None,
        id="no step at all",
    ),
    pytest.param(
        a_run(cpu_s=3.0, cpu_wait_s=60.0),
        "oversubscribed CPUs",
        "other programs had the rest",
        None,
        id="others have the cores",
    ),
]


@pytest.mark.parametrize(("run", "kind", "why", "command"), CASES)
def test_the_verdict_names(run, kind, why, command):
    told = judge(run)
    assert (told["class"], told["command"]) == (kind, command)
    assert why in told["why"]
    assert told["advice"]
    assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"]
    assert told["bounds"] == {}


def test_more_slots_are_promised_by_what_smaller_steps_took_and_by_nothing_else():
    by_evidence = judge(a_run(batch_s=FLAT))["gain"]
    assert by_evidence["low"] <= by_evidence["expected"] <= by_evidence["high"] <= 2.0
    assert by_evidence["expected"] == pytest.approx(1.63, abs=0.02)  # 1.85 times as fast in 85 % of the time
    assert judge(a_run(slots=1, batch_s=steps((1, 2000, 0.005))))["gain"]["expected"] is None


def test_the_command_names_an_option_once():
    run = a_run(slots=2, batch_s=steps((2, 900, 0.01)), command="gpuinfer generate --batch-size 2 --input p.jsonl")
    assert judge(run)["command"] == f"{COMMAND} --batch-size 16"


def test_prompts_are_named_where_they_take_most():
    assert judge(a_run({**BUSY, "prefill": 8.0, "forward": 1.5}))["station"] == "prefill"


def test_the_number_of_threads_that_a_forward_has_by_default_is_not_laid_at_its_door():
    assert judge(a_run(cpu_s=18.0, cpu_wait_s=12.0))["class"] == "device-saturated"


@given(
    st.lists(st.floats(0, 2.5), min_size=4, max_size=4),
    st.dictionaries(st.integers(1, 8), st.tuples(st.integers(1, 1000), st.floats(0, 100)), max_size=4),
    st.integers(1, 8),
    st.integers(0, 500),
)
def test_any_run_gets_a_verdict_of_the_schema(spent, batch_s, slots, rows):
    batch_s = {min(size, slots): list(seen) for size, seen in batch_s.items()}
    run = a_run(dict(zip(BUSY, spent, strict=True)), batch_s=batch_s, slots=slots, requests=rows, rows_per_s=rows / 10)
    for one in (run, replace(run, lanes=[], wall_s=0.0)):
        told = judge(one)
        assert told["class"] in CLASSES
        assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"]
        assert 0.0 <= told["share"] <= 1.000001
