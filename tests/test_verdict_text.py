"""What holds a model of text back on the cores: idle ones, memory, first touch, compiling, and what no advice names."""

import re
from dataclasses import replace

import pytest
import test_verdict
import test_verdict_generation as generation
import test_verdict_unmasking as unmasking
from hypothesis import given
from hypothesis import strategies as st
from test_verdict_generation import BUSY, COMMAND, SUBLINEAR, a_lane, a_run, steps

from gpuinfer.report.verdict import judge

NOTHING_ASKED = {f"with_{name}": 0 for name in ("constraints", "lists", "stop", "logprobs", "penalties")}
OPTIONS = {"-B": {"slots": 64, "threads": 2}, "--": {"batch_size": 64, "dtype": "bfloat16", "temperature": 1.0}}
ONE_THREAD = {**OPTIONS, "-B": {"slots": 64, "threads": 1}}
WORK = {**NOTHING_ASKED, "flops": 900e9, "prefill_flops": 100e9, "bytes": 30e9, "prefill_bytes": 1e9}


def a_roofline(efficiency, **more):
    plain = {
        "tokens_per_s": 1000.0,
        "at_rows": 64,
        "least_s": 10.0 * efficiency,
        "gflops_per_s": 200.0,
        "own_gflops_per_s": 200.0,
        "gbytes_per_s": 20.0,
        "efficiency": efficiency,
        "limited_by": "products",
    }
    return {**plain, **more}


def a_text_run(stations=BUSY, **more):
    """Full slots and full cores, of which nothing was asked beside tokens."""
    return a_run(stations, **{"options": OPTIONS, "steps": WORK, "batch_s": SUBLINEAR, **more})


SHORT_OF_PAGES = {
    "slots": 8,
    "batch_s": steps((3, 900, 0.01)),
    "steps": {**WORK, "waited_rows": 158, "preempted_rows": 133, "recomputed_tokens": 2261},
    "pages_given": True,
    "model": {"pages": 8, "context": 128, "page_positions": 32, "cache_bytes": 16 << 20},
    "options": {**OPTIONS, "-B": {"slots": 8, "pages": 8, "threads": 2}},
}
CASES = [
    pytest.param(
        a_text_run(cpu_s=10.0, options=ONE_THREAD),
        "idle cores",
        "1.0 of 2 cores were idle. The decoder has 1 thread for 2 cores.",
        "Let it compute on all cores.",
        f"{COMMAND} -B threads=2",
        id="fewer threads than cores",
    ),
    pytest.param(
        a_text_run(cpu_s=10.0, model={"decoder_threads": 1}),
        "idle cores",
        "The model's shape is shared out between 1 of 2 threads.",
        "Report it",
        None,
        id="a shape that leaves a core idle",
    ),
    pytest.param(
        a_text_run({**BUSY, "forward": 6.5, "sample": 2.3}, cpu_s=16.0, unused_cores=0.4),
        "idle cores",
        "One thread alone worked 25% of the time, most of it at “sample”.",
        "steps of more rows make it matter less",
        f"{COMMAND} --batch-size 128",
        id="a step's serial part",
    ),
    pytest.param(
        a_text_run(cpu_s=19.0, steps={**WORK, "threads_busy_s": 12.0, "threads_waited_s": 7.0}, unused_cores=0.05),
        "idle cores",
        "0.8 of 2 cores were idle. Threads waited for one another 35% of the time",
        "Steps of more rows have larger parts.",
        f"{COMMAND} --batch-size 128",
        id="threads that wait for one another, actively",
    ),
    pytest.param(
        a_text_run(unused_cores=0.9, cpu_s=11.0),
        "idle cores",
        "0.9 of 2 cores were idle. Nothing here says what its threads waited for.",
        "larger parts",
        f"{COMMAND} --batch-size 128",
        id="idle cores that nothing explains",
    ),
    pytest.param(
        a_text_run({**BUSY, "forward": 4.5, "first touch": 4.0}, steps={**WORK, "faults": 3500}),
        "first touch",
        "40% of the time went into memory that was touched for the first time (3,500 page faults).",
        "It is paid once",
        None,
        id="first touch of memory",
    ),
    pytest.param(
        a_text_run({"prefill": 1.0, "forward": 3.0, "compile": 5.5}),
        "cold start",
        "55% of the time went into loading and compiling kernels",
        "It is paid once",
        None,
        id="kernels are compiled in the midst of a run",
    ),
    pytest.param(
        a_text_run(steps={**WORK, "bytes": 141e9}, text_roofline=a_roofline(0.7)),
        "memory bandwidth",
        "at 82% of the 20 GB/s that memory gives here",
        "More rows in a step share what it reads",
        None,
        id="memory gives no more",
    ),
    pytest.param(
        a_text_run(steps={**WORK, "bytes": 300e9}, text_roofline=a_roofline(0.7)),
        "memory bandwidth",
        "faster than the 20 GB/s that memory gave when it was measured",
        "More rows in a step share what it reads",
        None,
        id="memory gave less when it was measured",
    ),
    pytest.param(
        a_text_run(
            steps={**WORK, "bytes": 141e9},
            text_roofline=a_roofline(0.7),
            dtype="float32",
            bfloat16_pays=False,
            options={**OPTIONS, "--": {"dtype": "float32"}},
        ),
        "memory bandwidth",
        "at 82%",
        "Weights of bfloat16 are half as many bytes.",
        f"{COMMAND} --dtype bfloat16",
        id="memory gives no more, of weights that could be smaller",
    ),
    pytest.param(
        a_text_run(text_roofline=a_roofline(0.4, own_gflops_per_s=80.0)),
        "below the roofline",
        "The run did 40% of what this machine can do with this model at 64 rows. Products that a library computes",
        "report it",
        None,
        id="products are slow",
    ),
    pytest.param(
        a_text_run(text_roofline=a_roofline(0.4), steps={**WORK, "attention_flops": 200e9}),
        "below the roofline",
        "Attention took 50% of the time",
        "Shorter prompts and answers have less of it",
        None,
        id="attention takes long",
    ),
    pytest.param(
        a_text_run(text_roofline=a_roofline(0.5)),
        "below the roofline",
        "What lies between products within a step took 40% of the time",
        "Steps of more rows share it",
        None,
        id="what is between products takes long",
    ),
    pytest.param(
        a_text_run({**BUSY, "forward": 5.7, "sample": 2.8, "reply": 0.4}, text_roofline=a_roofline(0.55)),
        "below the roofline",
        "Sampling took 28% of the time",
        "steps of more rows make it matter less",
        None,
        id="sampling takes more than anything else",
    ),
    pytest.param(
        a_text_run(text_roofline=a_roofline(0.85)),
        "device-saturated",
        "The run did 85% of what this machine can do with this model.",
        "Only a smaller model or a faster device makes this faster.",
        None,
        id="near the roofline",
    ),
    pytest.param(
        a_text_run(requests=3, rows_per_s=0.8, wall_s=4.0, others_cores=1.2, cpu_s=4.0, cpu_wait_s=3.0),
        "inconclusive",
        "3 rows in 4 s, while other programs took 1.2 of 2 cores: too short and too disturbed to judge by.",
        "let it run alone",
        None,
        id="three prompts beside other programs",
    ),
    pytest.param(
        a_text_run(batch_s=steps((3, 100, 0.09)), requests=3, rows_per_s=0.3, queue_wait_s=0.0),
        "too few rows outstanding",
        "All 3 rows were under way at once: 3.0 of 64 slots were in use",
        "more rows in one run would share its steps",
        None,
        id="three prompts",
    ),
    pytest.param(
        a_text_run(
            batch_s=steps((1, 900, 0.01)),
            requests=1,
            rows_per_s=0.1,
            queue_wait_s=0.0,
            steps={**WORK, "bytes": 120e9},
            text_roofline=a_roofline(0.7),
        ),
        "too few rows outstanding",
        "a step read memory at 70% of what it gives",
        "more rows in one run would share its steps",
        None,
        id="one row",
    ),
    pytest.param(
        a_text_run(batch_s=steps((37, 100, 0.09)), requests=13, rows_per_s=1.3, cancelled=28, queue_wait_s=0.0),
        "too few rows outstanding",
        "All 41 rows were under way at once: 37.0 of 64 slots were in use",
        "more rows in one run would share its steps",
        None,
        id="few rows, stopped before most were answered",
    ),
    pytest.param(
        a_text_run(batch_s=steps((37, 100, 0.09)), requests=13, rows_per_s=1.3, cancelled=90),
        "inconclusive",
        "The run was stopped with 90 rows under way or waiting: 37.0 of 64 slots were in use",
        "Let it go on to its end",
        None,
        id="stopped before its slots were full for long",
    ),
    pytest.param(
        a_text_run(**SHORT_OF_PAGES),
        "too few pages",
        "Pages of keys and values ran short: 158 rows waited for some, 133 times a row gave its own back, 2,261 tokens "
        "were computed again; 3.0 of 8 slots were in use.",
        "256 pages (512 MiB) are enough for 64 rows at once; with the option left out there are as many as all rows",
        f"{COMMAND} -B pages=256",
        id="fewer pages than rows need",
    ),
    pytest.param(
        a_text_run(**{**SHORT_OF_PAGES, "slots": 4, "batch_s": steps((2, 900, 0.01))}),
        "too few pages",
        "2.0 of 4 slots were in use",
        "16 pages (32 MiB) are enough for 4 rows at once",
        f"{COMMAND} -B pages=16",
        id="fewer pages than the rows need that may be there at once",
    ),
    pytest.param(
        a_text_run(**{**SHORT_OF_PAGES, "pages_given": False}),
        "too few pages",
        "ran short",
        "Memory has no room for more: a shorter context, or fewer rows at once, need fewer.",
        None,
        id="fewer pages than rows need, as memory has no room for more",
    ),
    pytest.param(
        a_text_run({"prefill": 9.0, "forward": 0.6}, batch_s=steps((60, 900, 0.01))),
        "device-saturated",
        "90% on prompts",
        "Only a smaller model",
        None,
        id="prompts above all, on all cores",
    ),
    pytest.param(
        a_text_run({"prefill": 9.0, "forward": 0.6}, batch_s=steps((60, 900, 0.01)), unused_cores=0.9, cpu_s=11.0),
        "idle cores",
        "0.9 of 2 cores were idle.",
        "Steps of more tokens have larger parts.",
        None,
        id="prompts above all, on one core of two",
    ),
]


@pytest.mark.parametrize(("run", "kind", "why", "advice", "command"), CASES)
def test_the_verdict_names(run, kind, why, advice, command):
    told = judge(run)
    assert (told["class"], told["command"]) == (kind, command), told
    assert why in told["why"]
    assert advice in told["advice"]


MASKED = [
    pytest.param(unmasking.a_run(unmasking.counted(4.0, 1.0), decoder="threshold", threshold=0.9), id="no cache"),
    pytest.param(unmasking.a_run(unmasking.counted(1.0, 0.2), decoder="random", cache="dual"), id="one a step"),
    pytest.param(
        unmasking.a_run(unmasking.counted(1.2, 0.2), decoder="threshold", threshold=0.99, cache="dual"),
        id="a high threshold",
    ),
    *unmasking.HEALTHY,
]
SATURATED = [case for case in generation.CASES if case.values[1] == "device-saturated"]


@pytest.mark.parametrize("case", [pytest.param(case.values[0], id=case.id) for case in SATURATED])
@pytest.mark.parametrize("idle", [0.35, 0.5, 1.0])
def test_no_run_with_idle_cores_is_called_saturated(case, idle):
    for run in (replace(case, unused_cores=idle), replace(case, cpu_s=case.wall_s * (case.cores - idle))):
        told = judge(replace(run, cores=2, others_cores=None))
        assert told["class"] != "device-saturated"
        assert not told["healthy"] or told["class"] == "too few rows outstanding"


@given(
    st.lists(st.floats(0, 2.5), min_size=4, max_size=4),
    st.floats(0.31, 2.0),
    st.integers(1, 128),
    st.floats(0.01, 1.0),
)
def test_idle_cores_are_seen_whatever_the_stations_are(spent, idle, slots, efficiency):
    run = a_text_run(dict(zip(BUSY, spent, strict=True)), unused_cores=idle, slots=slots)
    assert judge(replace(run, text_roofline=a_roofline(efficiency)))["class"] != "device-saturated"


@given(st.floats(0.01, 0.59), st.lists(st.floats(0, 2.5), min_size=4, max_size=4))
def test_half_of_the_roofline_never_looks_well(efficiency, spent):
    told = judge(a_text_run(dict(zip(BUSY, spent, strict=True)), text_roofline=a_roofline(efficiency)))
    assert told["class"] != "device-saturated"


def test_a_thread_that_waits_for_one_without_a_core_is_no_idle_core():
    """Another program had the core: its share is that program's, and the wait for it is no lack of work."""
    waiting = {"steps": {**WORK, "threads_busy_s": 12.0, "threads_waited_s": 5.0}, "unused_cores": 0.0}
    alone = a_text_run(cpu_s=17.0, others_cores=0.0, **waiting)
    beside = a_text_run(cpu_s=17.0, others_cores=0.3, cpu_wait_s=4.0, **waiting)
    assert alone.idle_cores == pytest.approx(0.5)
    assert beside.idle_cores == pytest.approx(0.1)
    assert (alone.threads_waited_s, beside.threads_waited_s) == (pytest.approx(5.0), pytest.approx(1.0))


def test_a_model_that_computes_elsewhere_leaves_the_cores_here_idle_as_it_should():
    lane = {**a_lane("forward 0", **BUSY), "ran": {"forward": 0.2}}
    assert judge(replace(a_text_run(unused_cores=1.9, cpu_s=0.5), lanes=[lane]))["class"] == "device-saturated"


def test_forwards_of_rows_with_too_few_threads_leave_cores_idle():
    forward = {**test_verdict.lane("forward 0", forward=9.5), "ran": {"forward": 9.4}}
    run = test_verdict.a_run(
        forward, cpu_s=10.0, batch_s={512: (900, 9.4)}, options={"-B": {"threads": 1}}, facts={"clients": 8}
    )
    told = judge(run)
    assert (told["class"], told["command"]) == ("idle cores", "gpuinfer selfplay -B threads=4")
    assert "3.0 of 4 cores were idle. A forward has 1 thread." in told["why"]


# What advice may name. A flag is one that the command has; a feature is blamed where prompts asked for it.

FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*(?: \w+=)?")
FEATURES = {
    "stop": "stop string",
    "logprobs": "log-prob",
    "penalties": "penalt",
    "constraints": "constraint",
    "lists": "lists of texts",
}
CONSTRAINED = ("schema", "pattern", "grammar")  # kinds of constraints, which nobody counts apart
ALL = [
    *(pytest.param(case.values[0], id=f"rows: {case.id}") for case in test_verdict.CASES),
    *(pytest.param(case.values[0], id=f"text: {case.id}") for case in (*generation.CASES, *CASES)),
    *(pytest.param(case.values[0], id=f"masks: {case.id}") for case in MASKED),
    pytest.param(a_text_run({**BUSY, "forward": 4.0, "sample": 4.5}), id="text: sampling"),
    pytest.param(a_text_run({**BUSY, "forward": 4.0, "reply": 4.5}), id="text: replying"),
    *(
        pytest.param(generation.waiting(a_lane("output", **{name: 9.0}), requests=400), id=f"text: slow {name}")
        for name in ("read", "understand", "write", "sync")
    ),
]


@pytest.mark.parametrize("run", ALL)
def test_no_advice_names_what_is_not_in_use(run):
    """Of the same run with no option but those of its command, and of prompts that asked for nothing beside tokens."""
    bare = replace(run, steps={**run.steps, **NOTHING_ASKED, "echoing_s": 0.0}, options={"-B": {}, "-S": {}, "--": {}})
    told = judge(bare)
    assert told["command"] is None
    assert not FLAG.findall(told["advice"]), told["advice"]
    said = told["advice"].lower()
    assert not [name for name in CONSTRAINED if name in said], told["advice"]
    if told["station"] == "constrain":  # that station is entered for constraints alone
        return
    assert not [name for name in FEATURES.values() if name in said], told["advice"]


@pytest.mark.parametrize("run", ALL)
def test_flags_of_an_advice_are_options_that_the_command_has(run):
    told = judge(run)
    known = {f"--{name.replace('_', '-')}" for name in run.options.get("--", {})} | {"-B parallel=", "-S max_rows="}
    assert not set(FLAG.findall(told["advice"])) - known, told["advice"]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("station", ["reply", "sample"])
def test_what_prompts_asked_for_is_blamed_where_it_costs(station, feature):
    run = a_text_run({**BUSY, "forward": 4.0, station: 4.5}, steps={**WORK, f"with_{feature}": 7})
    blamed = {"reply": ("stop", "logprobs", "constraints"), "sample": ("penalties", "logprobs")}[station]
    advice = judge(run)["advice"].lower()
    assert (FEATURES[feature] in advice) == (feature in blamed)
    assert ("(in 7 prompts)" in advice) == (feature in blamed)


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        pytest.param({"constraints": 7}, "Simpler constraints (in 7 prompts) cost less", id="constraints"),
        pytest.param({"lists": 9}, "Shorter lists of texts (in 9 prompts) cost less", id="lists"),
        pytest.param(
            {"constraints": 7, "lists": 9},
            "Simpler constraints (in 7 prompts) and shorter lists of texts (in 9 prompts) cost less",
            id="both",
        ),
    ],
)
def test_constraints_are_told_apart_from_lists_of_texts(asked, advice):
    counted = {f"with_{name}": count for name, count in asked.items()}
    run = a_text_run({**BUSY, "forward": 4.0, "constrain": 4.5}, steps={**WORK, **counted})
    assert judge(run)["advice"] == f"{advice}; none at all costs nothing."


@pytest.mark.parametrize(
    ("flags", "dear"),
    [
        pytest.param({}, "Chance costs", id="none"),
        pytest.param({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, "Chance costs", id="none in force"),
        pytest.param({"top_k": 40}, "Filters and chance cost", id="top-k"),
        pytest.param({"top_p": 0.9}, "Filters and chance cost", id="top-p"),
        pytest.param({"min_p": 0.1}, "Filters and chance cost", id="min-p"),
    ],
)
def test_filters_are_blamed_for_what_drawing_takes_where_some_are_in_force(flags, dear):
    options = {**OPTIONS, "--": {**OPTIONS["--"], **flags}}
    told = judge(a_text_run({**BUSY, "forward": 4.0, "sample": 4.5}, options=options))
    assert told["advice"].startswith(f"{dear} most here: --temperature 0")


def test_answers_that_are_read_as_they_grow_are_no_cost_of_drawing():
    run = a_text_run(
        {**BUSY, "forward": 4.0, "sample": 4.5}, steps={**WORK, "with_penalties": 0, "read_as_they_grow": 9}
    )
    beside = replace(
        run, text_roofline=a_roofline(0.55), lanes=[a_lane("forward 0", **{**BUSY, "forward": 5.7, "sample": 2.8})]
    )
    assert judge(beside)["station"] == "sample"
    assert "read" not in judge(beside)["advice"]


@pytest.mark.parametrize(
    ("lanes", "facts", "threads", "others", "advice"),
    [
        pytest.param(
            ["worker 0: search", "worker 1: search"],
            {"workers": 2},
            None,
            2.9,
            ", or with 1 worker: 1 core is left.",
            id="no model",
        ),
        pytest.param(["worker 0: search"], {"workers": 1}, None, 2.9, ".", id="one worker alone"),
        pytest.param(["forward 0"], {}, 1, 2.9, ".", id="one thread"),
        pytest.param(["forward 0"], {}, 2, 2.9, ", or with 1 thread: 1 core is left.", id="two threads"),
        pytest.param(["forward 0"], {}, 4, 1.9, ", or with 2 threads: 2 cores are left.", id="four threads"),
        pytest.param(["forward 0"], {}, 2, 1.9, ".", id="as many threads as there are cores left"),
        pytest.param(["forward 0"], {}, 2, 3.7, ".", id="no whole core left"),
        pytest.param(
            ["forward 0", "worker 0: search", "worker 1: search"],
            {"workers": 2},
            2,
            2.9,
            ", or with 1 thread and 1 worker: 1 core is left.",
            id="both",
        ),
    ],
)
def test_beside_other_programs_only_what_there_is_and_can_be_fewer_is_advised(lanes, facts, threads, others, advice):
    options = {"-B": {} if threads is None else {"threads": threads}}
    busy = [test_verdict.lane(name, **{"forward" if "forward" in name else "search": 1.0}) for name in lanes]
    run = test_verdict.a_run(
        *busy,
        cores=4,
        cpu_s=10.0 * (4 - others) - 1.0,
        cpu_wait_s=16.0,
        others_cores=others,
        facts=facts,
        options=options,
        roofline=None,
    )
    told = judge(run)
    assert told["class"] == "oversubscribed CPUs"
    assert told["advice"] == f"Let it run alone{advice}"


def test_a_run_of_a_few_steps_is_inconclusive_and_promises_nothing_beside_other_programs_too():
    """Of 4 steps in a quarter of a second nothing follows, not even what others cost it."""
    run = a_text_run(batch_s=steps((3, 4, 0.06)), wall_s=0.26, requests=3, others_cores=1.7, cpu_s=0.07, cpu_wait_s=0.4)
    told = judge(run)
    assert (told["class"], told["gain"]["high"]) == ("inconclusive", 1.0)
    assert told["why"] == "The model took 4 steps: too few to go by."


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        pytest.param({"input": "-"}, "--input with a local file in the place of a pipe", id="from a pipe"),
        pytest.param({"input": "rows.jsonl"}, "put the input on a local disk", id="from a file"),
        pytest.param({}, "from a local file", id="a workload without an input"),
    ],
)
def test_slow_input_is_cured_by_where_it_comes_from(given, cure):
    run = generation.waiting(a_lane("input", read=9.0), options={"-B": {}, "--": given})
    assert cure in judge(run)["advice"]


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        pytest.param({"output": "-"}, "Write to a local file (--output FILE)", id="to a pipe"),
        pytest.param({"output": "answers.jsonl"}, "Put --output on a local disk.", id="to a file"),
        pytest.param({}, "Let whoever reads the answers read faster.", id="a workload without an output"),
    ],
)
def test_slow_output_is_cured_by_where_it_goes(given, cure):
    run = generation.waiting(a_lane("output", write=9.0), options={"-B": {}, "--": given})
    assert cure in judge(run)["advice"]
