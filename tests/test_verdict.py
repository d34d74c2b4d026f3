"""The verdict: one constructed run for each class, and what every verdict owes its reader."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import Roofline
from gpuinfer.evidence import Evidence, is_forward
from gpuinfer.report import schema
from gpuinfer.verdict import judge

ROOFLINE = Roofline(10_000.0, 512, "2 forwards × 1 thread")
CLASSES = schema()["properties"]["bottleneck"]["properties"]["class"]["enum"]


def lane(name, **stations):
    """A lane of a run of 10 seconds; what is not given was idle."""
    return {"name": name, "stations": {**stations, "idle": 10.0 - sum(stations.values())}}


def a_run(*lanes, **more):
    plain = {"wall_s": 10.0, "rows_per_s": 5000.0, "rows_mean": 512.0, "cores": 4, "command": "gpuinfer selfplay"}
    return Evidence(**{**plain, "lanes": lanes, **more})


HALF_BUSY = (lane("search 0", search=4.0), lane("forward 0", forward=4.0))
TWO_WORKERS = (
    lane("worker 0: search", search=4.0),
    lane("worker 0: forward 0", forward=5.0),
    lane("worker 1: search", search=4.0),
    lane("worker 1: forward 0", forward=5.0),
)
FACTS = {"workers": 2, "blocks": 2, "rows_outstanding": 384, "games_in_flight": 64}

CASES = [
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
        a_run(lane("search", search=1.0), lane("forward 0", forward=9.5), on_cpu=False, dtype="bfloat16"),
        "device-saturated",
        "busy 95% of the time",
        None,
        id="forward lanes without a pause, no roofline known",
    ),
    pytest.param(
        a_run(lane("search", search=5.0), lane("forward 0", forward=3.0, other=2.0)),
        "inconclusive",
        "10% of the lanes' time is in no known station",
        None,
        id="the numbers do not add up",
    ),
    pytest.param(
        a_run(lane("search", search=5.0), lane("forward 0", forward=5.0), reasons={"waited": 8, "full": 2},
              latency_s=0.02, queue_wait_s=0.01),
        "timer-bound",
        "80% of the batches were cut because the oldest request had waited",
        "gpuinfer selfplay -S max_wait=0",
        id="batches wait for a timer",
    ),
    pytest.param(
        a_run(*TWO_WORKERS, rows_mean=96.0, roofline=ROOFLINE, facts=FACTS),
        "too few rows outstanding",
        "2 workers × 2 blocks × 96 rows = 384 rows outstanding; the roofline needs 512 a batch, 1,024 for 2 forwards",
        "gpuinfer selfplay --games-in-flight 171",
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
        a_run(*HALF_BUSY, facts={"games_in_flight": 64}),
        "too few rows outstanding",
        "each waited for the other",
        "gpuinfer selfplay --games-in-flight 128",
        id="search and forward take turns",
    ),
    pytest.param(
        a_run(*HALF_BUSY, rows_mean=64.0, roofline=ROOFLINE, facts={"rows_outstanding": 4096},
              reasons={"full": 9, "clients": 1}),
        "batch cap too small",
        "no more rows may go in, 64 on average; the model is fastest at 512",
        "gpuinfer selfplay -B max_rows=512",
        id="the cap keeps batches small",
    ),
    pytest.param(
        a_run(lane("search", search=2.0), lane("forward 0", forward=3.0, transfer=6.0), on_cpu=False),
        "transfer-bound",
        "6.0 s moving rows and 3.0 s computing",
        "gpuinfer selfplay -B in_flight=2",
        id="moving takes longer than computing",
    ),
    pytest.param(
        a_run(*(lane(f"worker {n}: search", search=9.5) for n in range(4)), cores=2, facts={"workers": 4}),
        "oversubscribed CPUs",
        "3.8 threads were busy at once on 2 cores",
        "gpuinfer selfplay --workers 2",
        id="more busy threads than cores",
    ),
    pytest.param(
        a_run(lane("search", search=1.0), lane("forward 0", forward=9.0), facts={"threads": 8}),
        "oversubscribed CPUs",
        "7.3 threads were busy at once on 4 cores",
        None,
        id="forwards of too many threads",
    ),
    pytest.param(
        a_run(lane("search", search=9.5), lane("forward 0", forward=2.0), facts={"workers": 1}),
        "search-bound",
        "The search was busy 95% of the time; the forward lanes 20%.",
        "gpuinfer selfplay --workers 3",
        id="the model waits for the search, and cores are free",
    ),
    pytest.param(
        a_run(*(lane(f"search {n}", search=9.9) for n in range(4)), facts={"workers": 4}),
        "search-bound",
        "answers itself",
        None,
        id="a search without a model on all cores",
    ),
    pytest.param(
        a_run(*(lane(f"w{n}", search=2.4) for n in range(2)), *(lane(f"forward {n}", forward=7.4) for n in range(2)),
              cores=2, dtype="bfloat16", roofline=ROOFLINE, rows_per_s=7400.0),
        "device-saturated",
        "2.0 of 2 cores in all; 74% of the roofline",
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
]  # fmt: skip


@pytest.mark.parametrize(("run", "kind", "why", "command"), CASES)
def test_the_verdict_names(run, kind, why, command):
    told = judge(run)
    assert told["class"] == kind
    assert why in told["why"]
    assert told["command"] == command
    assert told["advice"]
    assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"]


def test_every_class_of_the_schema_has_a_case():
    assert {case.values[1] for case in CASES} == set(CLASSES)


def test_the_gain_of_more_rows_is_bounded_by_what_the_roofline_leaves():
    told = judge(a_run(*TWO_WORKERS, rows_mean=96.0, roofline=ROOFLINE, facts=FACTS))
    assert told["gain"]["high"] == pytest.approx(2.0)


stations = st.dictionaries(st.sampled_from(["search", "forward", "transfer", "other", "idle"]), st.floats(0, 10))
names = st.sampled_from(["search", "forward 0", "worker 1: forward 1", "worker 0: search"])
lanes = st.lists(st.builds(lambda name, times: {"name": name, "stations": times}, names, stations), max_size=6)
evidence = st.builds(
    Evidence,
    wall_s=st.floats(0, 100),
    lanes=lanes,
    rows_per_s=st.floats(0, 1e6),
    rows_mean=st.floats(0, 5000),
    reasons=st.dictionaries(st.sampled_from(["full", "waited", "clients", "cap"]), st.integers(0, 100)),
    latency_s=st.floats(0, 10),
    queue_wait_s=st.floats(0, 10),
    roofline=st.none() | st.just(ROOFLINE),
    facts=st.dictionaries(
        st.sampled_from(["workers", "blocks", "rows_outstanding", "games_in_flight", "threads"]), st.integers(1, 10_000)
    ),
    cores=st.integers(1, 64),
    on_cpu=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@given(evidence)
def test_any_run_gets_a_verdict_of_a_known_class_with_a_sane_gain(run):
    told = judge(run)
    assert told["class"] in CLASSES
    assert told["why"].endswith(".")
    assert told["advice"].endswith(".")
    assert 1.0 <= told["gain"]["low"] <= told["gain"]["high"] < float("inf")
    if told["unexplained"] > 0.05:
        assert told["class"] == "inconclusive"


@pytest.mark.parametrize(
    ("name", "forward"),
    [("forward 0", True), ("worker 3: forward 1", True), ("search", False), ("worker 0: search forward", False)],
)
def test_lanes_that_serve_batches_are_told_by_their_name(name, forward):
    assert is_forward(name) is forward
