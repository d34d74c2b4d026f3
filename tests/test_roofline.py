"""The roofline: the search for the best arrangement, and the process of its own that it runs in."""

import multiprocessing
import socket
import subprocess
import sys

import pytest

from gpuinfer.api import ModelSpec, Roofline
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.models import roofline_process
from gpuinfer.models.roofline_measurement import (
    Arrangement,
    LookMark,
    Timed,
    cpu_arrangements,
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


def spec(name="blobnet-small"):
    return ModelSpec(name, inputs=16, arguments={"actions": 5, "seats": 2})


# The search, with rates from a table


@pytest.mark.parametrize(
    ("best_rows", "height", "expected"),
    [
        (256, {ONE: 1, TWO: 2}, (TWO, 256)),
        (512, {ONE: 3, TWO: 2}, (ONE, 512)),
        (64, {ONE: 1, TWO: 3}, (TWO, 64)),
        (2048, {ONE: 1, TWO: 3}, (TWO, 2048)),
    ],
)
def test_the_search_finds_the_peak_within_its_budget(best_rows, height, expected):
    spent = []

    def look(arrangement, rows, seconds):
        """A machine whose rate grows up to `best_rows` and falls beyond."""
        spent.append(seconds)
        return [height[arrangement] * min(rows, best_rows) / max(rows, best_rows) ** 0.5]

    found = search_arrangements(look, [ONE, TWO], SIZES, budget_s=2.0)
    assert (found.arrangement, found.rows) == expected
    assert sum(spent) <= 2.0 + 1e-9
    assert max(spent) > 2 * min(spent), "the best are measured for longer"
    assert [found.rate] == look(*expected, 1.0)


def test_a_batch_that_does_not_fit_ends_the_climb_and_is_not_chosen():
    found = search_arrangements(lambda _, rows, seconds: [float(rows) if rows <= 128 else 0.0], [ONE], SIZES, 1.0)
    assert found == Timed(ONE, 128, 128.0)


def test_the_search_ends_once_the_best_have_shown_what_they_sustain():
    looked = []

    def look(arrangement, rows, seconds):
        looked.append(seconds)
        return [rows * 1.0] * 4

    search_arrangements(look, [ONE], SIZES, budget_s=2.0)
    assert looked[len(SIZES) :] == [pytest.approx(0.2)] * 2
    assert not stands([1.0] * 7), "too few"
    assert not stands([1.0] * 10 + [1.2] * 2), "a third one may come as high"


@pytest.mark.parametrize(
    ("cores", "single_threaded", "names"),
    [
        (1, False, ["1 forward × 1 thread"]),
        (2, False, ["2 forwards × 1 thread", "1 forward × 2 threads"]),
        (2, True, ["2 forwards × 1 thread"]),
        (16, False, ["16 forwards × 1 thread", "1 forward × 16 threads", "4 forwards × 4 threads"]),
    ],
)
def test_arrangements_use_all_cores(cores, single_threaded, names):
    assert [str(arrangement) for arrangement in cpu_arrangements(cores, single_threaded)] == names


@pytest.mark.parametrize(("rows", "arrangement"), [(256, "9 forwards"), (77, "1 forward × 1 thread")])
def test_what_no_search_would_try_is_looked_for(rows, arrangement):
    found = measure(spec(), **RUN, only=Roofline(1.0, rows, arrangement))
    assert found.at_rows in (*SIZES, 4096)
    assert found.arrangement == "1 forward × 1 thread"


# Short looks


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


@pytest.mark.parametrize(
    ("threads", "rate"),
    [
        ([steady(100, 2.0)], 100),
        ([steady(100, 2.0), steady(50, 2.0)], 150),
        ([steady(100, 2.0, (0.3, 0.7), (1.0, 1.1))], 100),  # stalls that nobody knows of
        ([steady(100, 2.0, (0.0, 0.5)), steady(100, 2.0, (0.5, 0.9))], 200),  # one, then the other
        ([steady(100, 0.5, (0.0, 0.4), waits=True)], 100),  # a neighbour that has most of the core
        ([steady(100, 2.0, *[(n / 10, n / 10 + 0.03) for n in range(20)], waits=True)], 100),  # now and then
    ],
)
def test_a_stall_lowers_no_rate(threads, rate):
    assert sustained(look_rates(threads)) == pytest.approx(rate, rel=0.01)


def test_a_single_look_that_is_higher_than_all_others_does_not_count():
    assert sustained([10.0] * 9 + [30.0]) == 10.0
    assert sustained([30.0, 29.0, 28.0] + [10.0] * 9) == 28.0
    assert sustained([3.0]) == 3.0


@pytest.mark.parametrize(
    ("run", "rates", "expected"),
    [
        (80.0, [90.0], (100.0, [100.0, 90.0], False)),
        (80.0, [110.0], (110.0, [100.0, 110.0], False)),
        (105.0, [110.0], (110.0, [100.0, 110.0], False)),
        (120.0, [110.0, 130.0], (130.0, [100.0, 110.0, 130.0], False)),
        (120.0, [110.0, 115.0], (120.0, [100.0, 110.0, 115.0], True)),
        (120.0, [], (120.0, [100.0], True)),  # it is not measured again
        (80.0, [], (100.0, [100.0], False)),
        (0.0, None, (100.0, [100.0], False)),  # of nothing any rate is the same share
    ],
)
def test_no_run_does_more_than_its_roofline(run, rates, expected):
    """`rates` are measured after a run of ten seconds, the first for a tenth of them, a second for longer."""
    left, asked = list(rates or ()), []

    def measured(seconds):
        asked.append(seconds)
        return Roofline(left.pop(0), 64, "one") if left else None

    found = reconciled(Roofline(100.0, 64, "one", (100.0,)), run, 10.0, measured)
    assert (found.rows_per_s, list(found.measured), found.raised) == expected
    assert asked == pytest.approx([1.0, LONGER][: 0 if rates is None else max(1, len(rates))])


# In a process of its own


def test_the_parent_needs_no_torch():
    code = "import sys, gpuinfer.models.roofline_process; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


@pytest.fixture
def hangs(tmp_path, monkeypatch):
    (tmp_path / "a_bad_model.py").write_text(
        "import time\ndef hangs(): time.sleep(600)\ndef raises(): raise ValueError('no such layer')\n"
    )
    monkeypatch.chdir(tmp_path)
    return RooflineProcess(spec("a_bad_model:hangs"), **ON)


@pytest.mark.parametrize(
    ("name", "said"), [("blobnett", "Did you mean 'blobnet'"), ("a_bad_model:raises", "no such layer")]
)
def test_what_the_child_says_of_a_model_that_cannot_be_had_is_raised(name, said, hangs):
    with pytest.raises(UsageError, match=said):
        roofline_from(measurement_outcome(spec(name), RUN))


def children():
    return [child for child in multiprocessing.active_children() if child.name == "gpuinfer-roofline"]


def test_one_child_measures_as_often_as_it_is_asked_and_another_once_it_is_killed():
    measurer = RooflineProcess(spec(), **ON)
    try:
        first = measurer.measure(0.1)
        (child,) = children()
        again = measurer.measure(0.05, only=first)
        assert (again.at_rows, again.arrangement) == (first.at_rows, first.arrangement)
        assert again.rows_per_s > 0
        assert [one.pid for one in children()] == [child.pid]
        assert measurer.peak_mb > 0
        child.kill()
        with pytest.raises(BackendError, match="SIGKILL"):
            measurer.measure(0.05, only=first)
        assert measurer.measure(0.05, only=first).rows_per_s > 0
    finally:
        measurer.close()
    assert not children()


@pytest.mark.parametrize("way", ["killed", "hangs", "stopped"])
def test_a_child_that_does_not_answer_is_told_of_and_ended(way, hangs):
    """It would take ten minutes; the second question whether it is still wanted ends it."""
    answers = iter([False, True])

    def killed():
        for child in children():
            child.kill()
        return False

    said, told = {
        "killed": (r"SIGKILL.* --no-roofline", {"stopped": killed}),
        "hangs": (r"longer than 0\.2 s", {"timeout_s": 0.2}),
        "stopped": ("was stopped", {"stopped": lambda: next(answers)}),
    }[way]
    with pytest.raises(BackendError, match=said):
        hangs.measure(0.1, **told)
    assert not children()


def test_a_child_ends_by_itself_when_nobody_asks(monkeypatch):
    monkeypatch.setattr(roofline_process, "IDLE_S", 0.0)
    monkeypatch.setattr(roofline_process.children, "set_up_child", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        roofline_process.answer_measurements(theirs, spec(), ON)  # returns: there was no question
