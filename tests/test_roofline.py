"""The roofline: the search for the best arrangement, and the process of its own that it runs in."""

import multiprocessing
import socket
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from gpuinfer.api import ModelSpec, Roofline
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.models import roofline_process
from gpuinfer.models.roofline_measurement import (
    Arrangement,
    LookMark,
    Timed,
    cpu_arrangements,
    cpu_looks,
    look_rates,
    measure,
    search_arrangements,
    stands,
    sustained,
)
from gpuinfer.models.roofline_process import RooflineProcess, measurement_outcome, roofline_from
from gpuinfer.runtime.run_roofline import LONGER, reconciled

pytestmark = pytest.mark.usefixtures("children_forked")

ONE, TWO = Arrangement(1, 2), Arrangement(2, 1)
SIZES = (64, 128, 256, 512, 1024, 2048)
ON = {"devices": ["cpu"], "dtype": "float32", "seed": 0, "cores": 1}
RUN = {**ON, "budget_s": 0.1}
AFTER, LONGER_AFTER = 1.0, LONGER  # of a run of ten seconds


def spec(name="blobnet-small"):
    return ModelSpec(name, inputs=16, arguments={"actions": 5, "seats": 2})


# The search, with rates from a table


def peaked(best_rows, height):
    """A machine whose rate grows up to `best_rows` and falls beyond."""

    def look(arrangement, rows, seconds):
        return [height[arrangement] * min(rows, best_rows) / max(rows, best_rows) ** 0.5]

    return look


@pytest.mark.parametrize(
    ("best_rows", "height", "expected"),
    [
        pytest.param(256, {ONE: 1, TWO: 2}, (TWO, 256), id="several forwards are faster"),
        pytest.param(512, {ONE: 3, TWO: 2}, (ONE, 512), id="one forward is faster"),
        pytest.param(64, {ONE: 1, TWO: 3}, (TWO, 64), id="the smallest batch is best"),
        pytest.param(2048, {ONE: 1, TWO: 3}, (TWO, 2048), id="the largest batch is best"),
    ],
)
def test_the_search_finds_the_peak(best_rows, height, expected):
    found = search_arrangements(peaked(best_rows, height), [ONE, TWO], SIZES, budget_s=1.0)
    assert (found.arrangement, found.rows) == expected
    assert [found.rate] == peaked(best_rows, height)(found.arrangement, found.rows, 1.0)


def test_the_search_keeps_to_its_budget():
    spent = []

    def look(arrangement, rows, seconds):
        spent.append(seconds)
        return [float(rows)]

    search_arrangements(look, [ONE, TWO], SIZES, budget_s=2.0)
    assert sum(spent) <= 2.0 + 1e-9
    assert max(spent) > 2 * min(spent), "the best are measured for longer"


def test_a_batch_that_does_not_fit_ends_the_climb_and_is_not_chosen():
    def look(arrangement, rows, seconds):
        return [float(rows) if rows <= 128 else 0.0]

    assert search_arrangements(look, [ONE], SIZES, 1.0) == Timed(ONE, 128, 128.0)


@pytest.mark.parametrize(
    ("cores", "single_threaded", "names"),
    [
        pytest.param(1, False, ["1 forward × 1 thread"], id="one core"),
        pytest.param(2, False, ["2 forwards × 1 thread", "1 forward × 2 threads"], id="two cores"),
        pytest.param(2, True, ["2 forwards × 1 thread"], id="deterministic"),
        pytest.param(
            16,
            False,
            ["16 forwards × 1 thread", "1 forward × 16 threads", "4 forwards × 4 threads"],
            id="many cores",
        ),
    ],
)
def test_arrangements_use_all_cores(cores, single_threaded, names):
    assert [str(arrangement) for arrangement in cpu_arrangements(cores, single_threaded)] == names


# Measuring for real


def test_the_rate_counts_the_rows_of_all_forwards():
    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.01)
            return x

    rates = cpu_looks(Slow(), torch.ones(10, 3), Arrangement(3, 1), 0.05)
    assert all(0 < rate <= 3 * 10 / 0.01 for rate in rates)


@pytest.mark.parametrize(
    ("rows", "arrangement"), [pytest.param(256, "9 forwards", id="arrangement"), pytest.param(77, None, id="rows")]
)
def test_what_no_search_would_try_is_looked_for(rows, arrangement):
    found = measure(spec(), **RUN, only=Roofline(1.0, rows, arrangement or "1 forward × 1 thread"))
    assert found.at_rows in (*SIZES, 4096)
    assert found.arrangement == "1 forward × 1 thread"


def test_the_search_ends_once_the_best_have_shown_what_they_sustain():
    def look(arrangement, rows, seconds):
        looked.append(seconds)
        return [rows * 1.0] * 4

    looked: list[float] = []
    search_arrangements(look, [ONE], SIZES, budget_s=2.0)
    assert looked[len(SIZES) :] == [pytest.approx(0.2)] * 2
    assert not stands([1.0] * 7), "too few"
    assert not stands([1.0] * 10 + [1.2] * 2), "a third one may come as high"


# Looking at it for short


def steady(passes_per_s, seconds, *stalls, waits=False):
    """The marks of a thread that runs at one pace, but in those stalls: (from, to). It may say that it waited then."""
    marks, passes, waited = [], 0.0, 0.0
    for step in range(round(seconds / 0.01) + 1):
        at = step * 0.01
        marks.append(LookMark(at, waited, passes))
        if any(start <= at + 1e-9 < stop for start, stop in stalls):
            waited += 0.01 if waits else 0.0
        else:
            passes += passes_per_s * 0.01
    return marks


NOW_AND_THEN = [(tenth / 10, tenth / 10 + 0.03) for tenth in range(20)]


@pytest.mark.parametrize(
    ("threads", "rate"),
    [
        pytest.param([steady(100, 2.0)], 100, id="one thread"),
        pytest.param([steady(100, 2.0), steady(50, 2.0)], 150, id="two threads"),
        pytest.param([steady(100, 2.0, (0.3, 0.7), (1.0, 1.1))], 100, id="stalls that nobody knows of"),
        pytest.param([steady(100, 2.0, (0.0, 0.5)), steady(100, 2.0, (0.5, 0.9))], 200, id="one, then the other"),
        pytest.param([steady(100, 0.5, (0.0, 0.4), waits=True)], 100, id="a neighbour that has most of the core"),
        pytest.param([steady(100, 2.0, *NOW_AND_THEN, waits=True)], 100, id="a neighbour now and then"),
    ],
)
def test_a_stall_lowers_no_rate(threads, rate):
    assert sustained(look_rates(threads)) == pytest.approx(rate, rel=0.01)


def test_a_single_look_that_is_higher_than_all_others_does_not_count():
    assert sustained([10.0] * 9 + [30.0]) == 10.0
    assert sustained([30.0, 29.0, 28.0] + [10.0] * 9) == 28.0
    assert sustained([3.0]) == 3.0


# Before the run, and after it


def again(*rates):
    """Measures these, one after another, and remembers for how long it was asked to."""
    left, asked = list(rates), []

    def measured(seconds):
        asked.append(seconds)
        return Roofline(left.pop(0), 64, "one") if left else None

    return measured, asked


@pytest.mark.parametrize(
    ("run", "rates", "expected", "asked"),
    [
        pytest.param(80.0, [90.0], (100.0, (100.0, 90.0), False), [AFTER], id="the higher one counts: before"),
        pytest.param(80.0, [110.0], (110.0, (100.0, 110.0), False), [AFTER], id="the higher one counts: after"),
        pytest.param(105.0, [110.0], (110.0, (100.0, 110.0), False), [AFTER], id="only the first was too low"),
        pytest.param(120.0, [110.0, 130.0], (130.0, (100.0, 110.0, 130.0), False), [AFTER, LONGER_AFTER], id="longer"),
        pytest.param(120.0, [110.0, 115.0], (120.0, (100.0, 110.0, 115.0), True), [AFTER, LONGER_AFTER], id="the run"),
        pytest.param(120.0, [], (120.0, (100.0,), True), [AFTER], id="it is not measured again"),
        pytest.param(80.0, [], (100.0, (100.0,), False), [AFTER], id="nor is there a need"),
        pytest.param(0.0, [90.0], (100.0, (100.0,), False), [], id="of nothing any rate is the same share"),
    ],
)
def test_no_run_does_more_than_its_roofline(run, rates, expected, asked):
    measured, seconds = again(*rates)
    found = reconciled(Roofline(100.0, 64, "one", (100.0,)), run, 10.0, measured)
    assert (found.rows_per_s, tuple(found.measured), found.raised) == expected
    assert seconds == pytest.approx(asked)


# In a process of its own


def test_the_parent_needs_no_torch():
    code = "import sys, gpuinfer.models.roofline_process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


FACTORIES = """
import time
def hangs(): time.sleep(600)
def raises(): raise ValueError("no such layer")
"""


@pytest.fixture
def bad_models(tmp_path, monkeypatch):
    (tmp_path / "a_bad_model.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("blobnett", "Did you mean 'blobnet'", id="an unknown model"),
        pytest.param("a_bad_model:raises", "no such layer", id="a factory that raises"),
    ],
)
def test_what_the_child_says_of_a_model_that_cannot_be_had_is_raised(name, said, bad_models):
    with pytest.raises(UsageError, match=said):
        roofline_from(measurement_outcome(spec(name), RUN))


@pytest.fixture
def measurer():
    made = RooflineProcess(spec(), **ON)
    yield made
    made.close()


def children():
    return [child for child in multiprocessing.active_children() if child.name == "gpuinfer-roofline"]


def test_one_child_measures_as_often_as_it_is_asked(measurer):
    first = measurer.measure(0.1)
    (child,) = children()
    again = measurer.measure(0.05, only=first)
    assert (again.at_rows, again.arrangement) == (first.at_rows, first.arrangement)
    assert again.rows_per_s > 0
    assert [one.pid for one in children()] == [child.pid]
    assert measurer.peak_mb > 0
    measurer.close()
    assert not children()


def test_a_child_that_is_killed_is_told_of(bad_models):
    """It hangs, so that it is still there when it is killed."""

    def killed():
        for child in children():
            child.kill()
        return False

    with pytest.raises(BackendError, match=r"SIGKILL.* --no-roofline"):
        RooflineProcess(spec("a_bad_model:hangs"), **ON).measure(0.1, stopped=killed)
    assert not children()


def test_a_child_that_was_killed_in_between_is_told_of_and_the_next_question_starts_another(measurer):
    first = measurer.measure(0.05)
    children()[0].kill()
    with pytest.raises(BackendError, match="SIGKILL"):
        measurer.measure(0.05, only=first)
    assert measurer.measure(0.05, only=first).rows_per_s > 0


def test_a_child_ends_by_itself_when_nobody_asks(monkeypatch):
    monkeypatch.setattr(roofline_process, "IDLE_S", 0.0)
    monkeypatch.setattr(roofline_process.children, "set_up_child", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        roofline_process.answer_measurements(theirs, spec(), ON)  # returns: there was no question


def test_a_child_that_hangs_is_told_of_and_ended(bad_models):
    with pytest.raises(BackendError, match=r"longer than 0\.2 s"):
        RooflineProcess(spec("a_bad_model:hangs"), **ON).measure(0.1, timeout_s=0.2)
    assert not children()


def test_who_stops_it_does_not_wait_for_it(bad_models):
    """The child would take ten minutes; the second question whether it is still wanted ends it."""
    answers = iter([False, True])
    with pytest.raises(BackendError, match="was stopped"):
        RooflineProcess(spec("a_bad_model:hangs"), **ON).measure(0.1, stopped=lambda: next(answers))
    assert not children()
