"""The verdict: one constructed run for each class, and what every verdict owes its reader."""

import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.api import Roofline
from gpuinfer.config.options import OptionChange
from gpuinfer.report.evidence import Evidence, is_forward
from gpuinfer.report.report import schema
from gpuinfer.report.verdict import judge

ROOFLINE = Roofline(10_000.0, 512, "2 forwards × 1 thread")
OPTIONS = {
    "-B": {"max_rows": 64, "threads": 8, "in_flight": 1},
    "-S": {"max_wait": 0.01, "max_rows": None},
    "--": {"workers": None, "games_in_flight": 64, "dtype": "float32"},
}
CLASSES = schema()["properties"]["bottleneck"]["properties"]["class"]["enum"]


def lane(name, **stations):
    """A lane of a run of 10 seconds, with a visit for each 10 ms of work; what is not given was idle."""
    visits = {station: round(seconds * 100) for station, seconds in stations.items()}
    return {"name": name, "stations": {**stations, "idle": 10.0 - sum(stations.values())}, "visits": visits}


def a_run(*lanes, **more):
    plain = {
        "wall_s": 10.0,
        "rows_per_s": 5000.0,
        "rows_mean": 512.0,
        "cores": 4,
        "command": "gpuinfer selfplay",
        "options": OPTIONS,
    }
    return Evidence(**{**plain, "lanes": lanes, **more})  # fmt: skip


HALF_BUSY = (lane("search 0", search=4.0), lane("forward 0", forward=4.0))
FULL_LANES = (lane("search 0", search=2.0), lane("forward 0", forward=9.5))
TWO_WORKERS = (
    lane("worker 0: search", search=4.0),
    lane("worker 0: forward 0", forward=5.0),
    lane("worker 1: search", search=4.0),
    lane("worker 1: forward 0", forward=5.0),
)
FACTS = {"workers": 2, "blocks": 2, "rows_outstanding": 384, "games_in_flight": 64}
CLIENTS = {"clients": 8}

SHARED = (
    lane("worker 0: search", search=3.0), lane("worker 0: forward 0", forward=7.0),
    lane("worker 1: search", search=3.0), lane("worker 1: forward 0", forward=7.0),
)  # fmt: skip
SMALL = {
    "cores": 2, "cpu_s": 19.0, "cpu_wait_s": 12.0, "roofline": Roofline(120_000.0, 512, "2 × 1 thread"),
    "requests": 7000, "rows_per_s": 5600.0, "rows_mean": 8.0, "batch_s": {8: (7000, 13.0)},
    "facts": {"workers": 2, "blocks": 2, "rows_outstanding": 384, "games_in_flight": 128},
    "options": {"-B": {"threads": 1, "max_rows": 8}, "-S": {"max_rows": None}, "--": {"games_in_flight": 128}},
}  # fmt: skip
NEIGHBOUR = {"others_cores": 1.1, "cpu_s": 9.0, "cpu_wait_s": 20.0}

STAGED = {
    "parallel": "pipeline", "active_share": 0.95, "bubble_share": 0.2, "fits_one": True,
    "stages": [{"layers": [0, 3], "busy_share": 0.9}, {"layers": [4, 7], "busy_share": 0.62}],
}  # fmt: skip
CUT = {
    "lanes": (lane("worker 0: search", search=2.0), lane("worker 0: forward 0", stages=9.5),
              lane("worker 0: stage 0", forward=9.0), lane("worker 0: stage 1", forward=6.2)),
    "options": {"-B": {"parallel": "layers", "stages": 2}, "-S": {}, "--": {}},
    "command": "gpuinfer selfplay -B stages=2 -B parallel=pipeline",
}  # fmt: skip

CASES = [
    pytest.param(
        a_run(**CUT, staged=STAGED, roofline=ROOFLINE),
        "pipeline bubbles",
        "The 2 stages were busy 90%, 62% of the time, and 20% of what they had was bubbles: a batch was there, and not "
        "with them. Stage 0 takes longest. It is 50% of what whole models do beside one another",
        "gpuinfer selfplay -B parallel=data",
        id="a pipeline, where whole models have room on the same cores",
    ),
    pytest.param(
        a_run(**CUT, staged={**STAGED, "parallel": "layers", "fits_one": False}, on_cpu=False),
        "pipeline bubbles",
        "Of layers one stage at a time computes.",
        "gpuinfer selfplay -B stages=2 -B parallel=pipeline",
        id="layers of a model that fits on no device",
    ),
    pytest.param(
        a_run(**CUT, staged={**STAGED, "fits_one": False}, on_cpu=False),
        "pipeline bubbles",
        "20% of what they had was bubbles",
        None,
        id="a pipeline of a model that fits on no device",
    ),
    pytest.param(
        a_run(*SHARED, **{**SMALL, "reasons": {"full": 99, "clients": 1}}),
        "batch cap too small",
        "99% of the batches were cut because no more rows may go in, 8 on average",
        "gpuinfer selfplay -B max_rows=512",
        id="a cap, where search and model share the cores and take turns",
    ),
    pytest.param(
        a_run(*SHARED, **{**SMALL, **NEIGHBOUR, "reasons": {"full": 99, "clients": 1}}),
        "batch cap too small",
        "Other programs took 1.1 of 2 cores. 99% of the batches were cut because no more rows may go in",
        "gpuinfer selfplay -B max_rows=512",
        id="a cap, and a neighbour on the cores",
    ),
    pytest.param(
        a_run(*SHARED, **{**SMALL, "facts": {"workers": 2, "blocks": 2, "rows_outstanding": 24, "games_in_flight": 8}}),
        "too few rows outstanding",
        "2 workers × 2 blocks × 6 rows = 24 rows outstanding, batches of 8",
        "gpuinfer selfplay --games-in-flight 214",
        id="few games in flight, where search and model share the cores",
    ),
    pytest.param(
        a_run(*SHARED, **{**SMALL, **NEIGHBOUR, "rows_mean": 512.0, "batch_s": {512: (100, 13.0)}}),
        "oversubscribed CPUs",
        "Other programs took 1.1 of 2 cores. Ready to run, threads of this run waited 69% of their time.",
        None,
        id="a neighbour on the cores, and nothing else",
    ),
    pytest.param(
        a_run(*HALF_BUSY, rows_per_s=9500.0, roofline=ROOFLINE),
        "device-saturated",
        "95% of what the bare model does",
        "gpuinfer selfplay --dtype bfloat16",
        id="at the roofline",
    ),
    pytest.param(
        a_run(*HALF_BUSY, rows_per_s=9500.0, roofline=ROOFLINE, dtype="bfloat16"),
        "device-saturated",
        "10,000 rows/s at 512 rows, 2 forwards × 1 thread",
        None,
        id="at the roofline in bfloat16 already",
    ),
    pytest.param(
        a_run(*HALF_BUSY, rows_per_s=9500.0, roofline=ROOFLINE, bfloat16_pays=False),
        "device-saturated",
        "95% of what the bare model does",
        None,
        id="at the roofline of a processor without bfloat16",
    ),
    pytest.param(
        a_run(lane("search", search=1.0), lane("forward 0", forward=9.5), on_cpu=False, dtype="bfloat16"),
        "device-saturated",
        "busy 95% of the time",
        None,
        id="forward lanes without a pause, no roofline known",
    ),
    pytest.param(
        a_run(
            lane("search", search=4.0),
            *(lane(f"forward {number}", forward=4.1, transfer=3.3, reply=0.9, idle=1.7) for number in range(2)),
            on_cpu=False,
            dtype="bfloat16",
            cores=16,
        ),
        "transfer-bound",
        "all of them together computed for 82% of it",
        "gpuinfer selfplay -B in_flight=3",
        id="two busy forward lanes on a device that they leave idle",
    ),
    pytest.param(
        a_run(lane("search", search=5.0), lane("forward 0", forward=3.0, other=2.0)),
        "inconclusive",
        "10% of the lanes' time is in no known station",
        None,
        id="the numbers do not add up",
    ),
    pytest.param(
        a_run(lane("forward 0", forward=3.0), rows_per_s=990.0, facts={"offered_rows_per_s": 1000.0}),
        "arrival-bound",
        "1,000 rows/s arrived and 990 were answered; the forward lanes were busy 30%",
        None,
        id="all that is offered is answered",
    ),
    pytest.param(
        a_run(lane("forward 0", forward=3.0), requests=500, latency_s=0.011, queue_wait_s=0.001),
        "arrival-bound",
        "idle 70% of the time, and requests hardly waited",
        None,
        id="idle lanes and clients that nobody knows",
    ),
    pytest.param(
        a_run(lane("search", search=5.0), lane("forward 0", forward=5.0), reasons={"waited": 8, "full": 2},
              latency_s=0.02, queue_wait_s=0.01),
        "timer-bound",
        "waited 10.0 ms on average for company while the forward lanes were idle 50% of the time; 80% of the batches",
        "gpuinfer selfplay -S max_wait=0",
        id="batches wait for a timer",
    ),
    pytest.param(
        a_run(*FULL_LANES, rows_mean=96.0, roofline=ROOFLINE, facts=FACTS, rows_per_s=3000.0, requests=312,
              batch_s={96: (312, 9.5)}),
        "too few rows outstanding",
        "2 workers × 2 blocks × 96 rows = 384 rows outstanding, batches of 96; the model is 2.9 times as fast with 419",
        "gpuinfer selfplay --games-in-flight 280",
        id="too few rows can be outstanding, with the arithmetic",
    ),
    pytest.param(
        a_run(*TWO_WORKERS, rows_mean=96.0, roofline=ROOFLINE, facts=FACTS, total=64),
        "too few rows outstanding",
        "= 384 rows outstanding",
        None,
        id="too few rows, and no more games to play",
    ),
    pytest.param(
        a_run(*HALF_BUSY, facts={"workers": 1, "games_in_flight": 64}),
        "too few rows outstanding",
        "each waited for the other",
        "gpuinfer selfplay --games-in-flight 128",
        id="search and forward take turns",
    ),
    pytest.param(
        a_run(*FULL_LANES, rows_mean=64.0, roofline=ROOFLINE, facts={"rows_outstanding": 4096}, requests=500,
              rows_per_s=3200.0, reasons={"full": 9, "clients": 1}, batch_s={64: (500, 9.5)}),
        "batch cap too small",
        "no more rows may go in, 64 on average; the model is 3.0 times as fast at 512",
        "gpuinfer selfplay -B max_rows=512",
        id="the backend's cap keeps batches small",
    ),
    pytest.param(
        a_run(*FULL_LANES, rows_mean=64.0, roofline=ROOFLINE, facts={"rows_outstanding": 4096}, requests=500,
              rows_per_s=3200.0, reasons={"cap": 9, "clients": 1}, batch_s={64: (500, 9.5)}),
        "batch cap too small",
        "no more rows may go in",
        "gpuinfer selfplay -S max_rows=512",
        id="the strategy's cap keeps batches small",
    ),
    pytest.param(
        a_run(lane("search", search=2.0), lane("forward 0", forward=3.0, transfer=6.0), on_cpu=False),
        "transfer-bound",
        "6.0 s moving rows and 3.0 s computing",
        "gpuinfer selfplay -B in_flight=2",
        id="moving takes longer than computing",
    ),
    pytest.param(
        a_run(lane("forward 0", forward=3.0, transfer=6.0), lane("forward 1", forward=3.0, transfer=6.0), on_cpu=False),
        "transfer-bound",
        "12.0 s moving rows",
        None,
        id="moving takes longer although it overlaps",
    ),
    pytest.param(
        a_run(*(lane(f"worker {n}: search", search=9.5) for n in range(4)), cores=2, facts={"workers": 4}),
        "oversubscribed CPUs",
        "3.8 threads wanted a core at once and there are 2",
        "gpuinfer selfplay --workers 2",
        id="more busy workers than cores",
    ),
    pytest.param(
        a_run(lane("search", search=1.0), lane("forward 0", forward=9.0), facts={"threads": 8}),
        "oversubscribed CPUs",
        "7.3 threads wanted a core at once and there are 4",
        "gpuinfer selfplay -B threads=4",
        id="forwards of too many threads, by the ledger",
    ),
    pytest.param(
        a_run(lane("search", search=1.0), lane("forward 0", forward=9.0), cpu_s=39.0, cpu_wait_s=39.0),
        "oversubscribed CPUs",
        "7.8 threads wanted a core at once and there are 4, so they took turns: ready to run, they waited 50%",
        "gpuinfer selfplay -B threads=4",
        id="forwards of too many threads, by what the system tells",
    ),
    pytest.param(
        a_run(lane("worker 0: search", search=9.5), *(lane(f"worker {n}: search", search=3.0) for n in (1, 2, 3)),
              lane("forward 0", forward=4.0), facts={"workers": 4}),
        "imbalance between workers",
        "“worker 0: search” was busy 95% of the time, the others 30% on average",
        None,
        id="one worker holds the others up",
    ),
    pytest.param(
        a_run(lane("search", search=9.5), lane("forward 0", forward=2.0), facts={"workers": 1}),
        "search-bound",
        "busy 95% of the time, most of it with search; the forward lanes 20%.",
        "gpuinfer selfplay --workers 3",
        id="the model waits for the search, and cores are free",
    ),
    pytest.param(
        a_run(*(lane(f"search {n}", search=9.9) for n in range(4)), facts={"workers": 4}),
        "search-bound",
        "answer themselves",
        None,
        id="a search without a model on all cores",
    ),
    pytest.param(
        a_run(lane("worker 0: client", encode=9.0, search=0.5), lane("forward 0", forward=2.0), facts={"workers": 1}),
        "client-bound",
        "most of it with encode",
        "gpuinfer selfplay --workers 3",
        id="the workers do something other than searching",
    ),
    pytest.param(
        a_run(lane("forward 0", forward=2.0), requests=1000, facts=CLIENTS, latency_s=0.01, batch_s={64: (1000, 2.0)}),
        "client-bound",
        "a client takes 70.0 ms, and waits for an answer 10.0 ms",
        None,
        id="clients think for longer than they wait",
    ),
    pytest.param(
        a_run(*(lane(f"w{n}", search=2.4) for n in range(2)), *(lane(f"forward {n}", forward=7.4) for n in range(2)),
              cores=2, dtype="bfloat16", roofline=ROOFLINE, rows_per_s=7400.0),
        "device-saturated",
        "2.0 of 2 cores were at work; 74% of the roofline",
        None,
        id="search and model share full cores, and the model takes most",
    ),
    pytest.param(
        a_run(lane("reader", search=0.5), lane("forward 0", forward=0.1)),
        "inconclusive",
        "idle",
        None,
        id="everybody waits for something that is not here",
    ),
    pytest.param(a_run(), "inconclusive", "Nothing was measured", None, id="nothing ran"),
    pytest.param(
        a_run(lane("forward 0", forward=0.1), rows_per_s=0.0, total=0, others_cores=3.9, cpu_s=0.1, cpu_wait_s=3.0),
        "inconclusive",
        "There was nothing to do",
        None,
        id="no rows, while others had the cores",
    ),
]  # fmt: skip


def test_no_command_names_an_option_that_the_plugin_in_force_has_not():
    told = [judge(replace(case.values[0], options={})) for case in CASES]
    assert [one["class"] for one in told] == [case.values[1] for case in CASES]
    assert not [one for one in told if one["command"] or one["change"]]


@pytest.mark.parametrize("run", [pytest.param(case.values[0], id=case.id) for case in CASES if case.values[3]])
def test_what_is_in_force_already_is_never_advised(run):
    change = OptionChange(**judge(run)["change"])
    forced = {**run.options, change.flag: {**run.options[change.flag], change.name: change.value}}
    assert judge(replace(run, options=forced))["change"] != asdict(change)


def test_a_command_says_each_option_once():
    command = "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b'"
    changes = ("-B", "max_rows", 64), ("-S", "max_rows", 64), ("--", "rows", 64), ("--", "games_in", 2)
    assert [OptionChange(*change).in_command(command) for change in changes] == [
        "gpuinfer load --rows=8 -B threads=2 -S max_rows=8 --name 'a b' -B max_rows=64",
        "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 --name 'a b' -S max_rows=64",
        "gpuinfer load -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b' --rows 64",
        "gpuinfer load --rows=8 -B max-rows=8 -B threads=2 -S max_rows=8 --name 'a b' --games-in 2",
    ]  # fmt: skip


def test_no_device_is_saturated_where_hardly_a_core_was_at_work():
    told = judge(a_run(lane("forward 0", forward=9.9), cores=2, cpu_s=2.0, rows_mean=64.0))
    assert told["class"] == "oversubscribed CPUs"
    assert "only 0.2 of 2 cores were at work" in told["why"]
    assert told["command"] == "gpuinfer selfplay -B threads=1"
    assert (
        judge(a_run(lane("forward 0", forward=9.9), cores=2, cpu_s=12.0, rows_mean=64.0))["class"] == "device-saturated"
    )


@pytest.mark.parametrize(("run", "kind", "why", "command"), CASES)
def test_the_verdict_names(run, kind, why, command):
    told = judge(run)
    assert told["class"] == kind
    assert why in told["why"]
    assert told["command"] == command
    assert told["advice"]
    assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"]


def test_every_class_of_the_schema_has_a_case():
    of_generation = {  # see test_verdict_generation.py and test_verdict_text.py
        *("sampling-bound", "host-bound", "idle cores", "memory bandwidth", "first touch", "below the roofline"),
        "too few pages",
    }
    of_masks = {"few tokens a forward", "recomputation"}  # see test_verdict_unmasking.py
    of_games = {  # see rollouts_verdict/test_told.py
        *("trainer-bound", "starvation", "reference pass", "adapter load", "cold start", "constraint"),
        *("engine saturated", "too little concurrency", "environment slow"),
    }
    assert {case.values[1] for case in CASES} | of_generation | of_masks | of_games == set(CLASSES)


def test_stages_that_wait_for_work_or_are_always_busy_are_no_bubbles():
    for changes in ({"active_share": 0.4}, {"bubble_share": 0.01}):
        told = judge(a_run(**CUT, staged={**STAGED, **changes}))
        assert told["class"] != "pipeline bubbles"
        assert told["station"] != "transfer"  # the forward lanes wait for the stages
        assert told["why"].endswith(
            "The model is cut into 2 stages and fits whole: parallel=data on the same cores is the better choice."
        )
        told = judge(a_run(**CUT, staged={**STAGED, **changes, "fits_one": False}))
        assert "fits whole" not in told["why"]


def test_threads_of_others_are_not_laid_at_this_runs_door():
    quiet = a_run(lane("search", search=9.5), lane("forward 0", forward=2.0), cpu_s=5.0, cpu_wait_s=20.0)
    assert judge(quiet)["class"] == "search-bound"


def test_a_run_that_others_leave_no_cores_says_so():
    run = a_run(lane("search", search=1.0), lane("forward 0", forward=9.0), cpu_s=3.0, cpu_wait_s=60.0)
    told = judge(run)
    assert told["class"] == "oversubscribed CPUs"
    assert "6.3 threads wanted a core at once, and this run had 0.3 of 4: other programs had the rest." in told["why"]


def test_alone_on_its_machine_a_run_would_have_all_cores_at_most():
    run = a_run(lane("search", search=1.0), lane("forward 0", forward=9.0), cpu_s=5.0, cpu_wait_s=595.0)
    told = judge(run)  # 60 threads want a core, and 0.5 of 4 are this run's
    assert "other programs had the rest" in told["why"]
    assert told["gain"]["high"] == pytest.approx(4 / 0.5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        pytest.param({"cpu_s": 10.0}, "Only 1.0 of 4 cores are busy: use more workers, or more clients.", id="room"),
        pytest.param({"cpu_s": 39.0}, "All cores are at work", id="none"),
    ],
)
def test_all_cores_are_said_to_be_at_work_only_when_they_are(more, said):
    told = judge(a_run(lane("search", search=9.5), lane("forward 0", forward=2.0), **more))  # workers: nobody tells
    assert (told["class"], told["command"]) == ("search-bound", None)
    assert said in told["advice"]


def test_the_worker_that_is_slow_is_named_however_many_there_are():
    """Each with a forward of its own: as text, worker 10 stands before worker 2."""
    searches = [lane(f"worker {n}: search", search=9.5 if n == 2 else 3.0) for n in range(12)]
    searches[2]["visits"] = searches[0]["visits"]  # it got as much done as the others
    lanes = [one for n in range(12) for one in (searches[n], lane(f"worker {n}: forward 0", forward=2.0))]
    counted = {"requests": 1200, "rows_per_s": 7680.0, "batch_s": {64: (1200, 24.0)}}
    told = judge(a_run(*lanes, cores=64, facts={"workers": 12}, **counted))
    assert "“worker 2: search”" in told["why"]
    assert "a block takes it 3.2 times as long" in told["why"]


def test_lanes_that_are_busy_with_small_batches_for_want_of_more_are_not_what_binds():
    """As soon as a lane is free it takes whatever is there: being busy says nothing of how much more it could do."""
    run = a_run(
        lane("worker 0: search", search=9.8),
        lane("forward 0", forward=9.5),
        rows_per_s=3200.0,
        rows_mean=64.0,
        requests=500,
        roofline=ROOFLINE,
        facts={"workers": 1, "blocks": 8},
        batch_s={64: (500, 9.5)},
    )
    assert judge(run)["class"] == "search-bound"


def test_games_that_are_all_in_flight_are_too_few_and_the_number_that_would_do_is_said():
    facts = {"workers": 2, "blocks": 1, "rows_outstanding": 180, "games_in_flight": 60}
    told = judge(
        a_run(*SHARED, **{**SMALL, "facts": facts, "total": 60, "rows_mean": 90.0, "batch_s": {90: (900, 13.0)}})
    )
    assert told["class"] == "too few rows outstanding"
    assert "2 workers × 1 block × 90 rows = 180 rows outstanding" in told["why"]
    assert told["advice"].startswith("All 60 games are in flight at once: play 2")
    assert told["command"] is None


def test_a_strategys_cap_that_would_keep_larger_batches_small_is_to_go_with_the_cure():
    options = {**SMALL["options"], "-S": {"max_rows": 8}}
    facts = {"workers": 2, "blocks": 1, "rows_outstanding": 180, "games_in_flight": 60}
    capped = {**SMALL, "facts": facts, "options": options, "reasons": {"cap": 93, "clients": 7}}
    told = judge(a_run(*SHARED, **{**capped, "rows_mean": 90.0, "batch_s": {90: (900, 13.0)}}))
    assert told["class"] == "too few rows outstanding"  # a block of 90 rows goes alone, cap or not
    assert "Leave -S max_rows=8 out then" in told["advice"]


def test_a_neighbour_that_takes_what_nobody_wanted_is_none():
    """Its cores would have been idle: this run's threads hardly waited."""
    told = judge(a_run(*SHARED, **{**SMALL, "others_cores": 1.0, "cpu_s": 9.0, "cpu_wait_s": 0.5}))
    assert "Other programs" not in told["why"]


def test_one_thread_in_each_forward_is_never_too_many():
    """Event loops and Python's lock make more threads ready to run than lanes are busy: that is no thread too many."""
    told = judge(a_run(*SHARED, **{**SMALL, "cpu_wait_s": 60.0, "reasons": {"full": 99, "clients": 1}}))
    assert told["class"] == "batch cap too small"


def test_what_a_share_of_few_rows_fills_is_no_cap():
    run = a_run(
        *FULL_LANES, rows_mean=16.0, rows_per_s=800.0, requests=8000, roofline=ROOFLINE, facts={"clients": 16},
        reasons={"cap": 9, "free": 1}, batch_s={16: (500, 9.5)}, latency_s=0.019,
    )  # fmt: skip
    told = judge(run)
    assert told["class"] == "too few rows outstanding"
    assert "25 in each request" in told["advice"]


def test_only_what_needs_no_mending_is_healthy():
    healthy = {told["class"] for told in (judge(case.values[0]) for case in CASES) if told["healthy"]}
    assert healthy == {"device-saturated", "arrival-bound"}


stations = st.dictionaries(st.sampled_from(["search", "forward", "transfer", "other", "idle"]), st.floats(0, 10))
visits = st.dictionaries(st.sampled_from(["search", "forward", "idle"]), st.integers(0, 1000))
names = st.sampled_from(["search", "forward 0", "worker 1: forward 1", "worker 0: search"])
lanes = st.lists(
    st.builds(lambda name, times, counts: {"name": name, "stations": times, "visits": counts}, names, stations, visits),
    max_size=6,
)
sums = st.tuples(st.integers(1, 1000), st.floats(1e-6, 100))
evidence = st.builds(
    Evidence,
    wall_s=st.just(0.0) | st.floats(0.001, 100),
    lanes=lanes,
    requests=st.integers(0, 10_000),
    rows_per_s=st.floats(0, 1e6),
    rows_mean=st.just(0.0) | st.floats(1, 5000),
    batch_s=st.dictionaries(st.integers(1, 5000), sums, max_size=4),
    reasons=st.dictionaries(st.sampled_from(["full", "waited", "clients", "cap"]), st.integers(0, 100)),
    latency_s=st.floats(0, 10),
    queue_wait_s=st.floats(0, 10),
    longest_wait_s=st.floats(0, 10),
    roofline=st.none() | st.just(ROOFLINE),
    facts=st.dictionaries(
        st.sampled_from(["workers", "blocks", "rows_outstanding", "games_in_flight", "threads", "clients"]),
        st.integers(0, 1000),
    ),
    cores=st.integers(1, 64),
    cpu_s=st.just(0.0) | st.floats(0, 100),
    cpu_wait_s=st.floats(0, 100),
    others_cores=st.none() | st.floats(0, 64),
    stolen_cores=st.none() | st.floats(0, 64),
    on_cpu=st.booleans(),
    options=st.sampled_from([{}, OPTIONS]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@settings(deadline=None)
@given(evidence)
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


@pytest.mark.parametrize(
    ("name", "forward"),
    [("forward 0", True), ("worker 3: forward 1", True), ("search", False), ("worker 0: search forward", False)],
)
def test_lanes_that_serve_batches_are_told_by_their_name(name, forward):
    assert is_forward(name) is forward
