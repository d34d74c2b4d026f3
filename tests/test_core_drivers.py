"""The three drivers of the queue core agree: the same batches, reasons, times, counts and refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from drivers import CLIENTS, Ask, Schedule, by_the_engine, by_the_server, by_the_simulation
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import Limits, Priority, Reason, Strategy
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.errors import StrategyError
from gpuinfer.lab.simulate import ClosedLoop, simulate
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority

UNIT_S = 1 / 1024
NEVER = 10**6  # of such units


class Picky(Strategy):
    """Waits for half a batch or a while, cuts the newest first, and turns the largest away when there is no room."""

    def cut_at(self, queue):
        return queue.now if 2 * queue.rows >= queue.limits.max_rows else queue.waiting[0].arrived + 20 * UNIT_S

    def reason(self, queue):
        return Reason.CAP if 2 * queue.rows >= queue.limits.max_rows else Reason.WAITED

    def select(self, queue):
        chosen, rows = [], 0
        for request in reversed(queue.waiting):
            if rows + request.rows <= queue.limits.max_rows:
                chosen.append(request)
                rows += request.rows
        return chosen

    def shed(self, queue, arriving):
        return [max(queue.waiting, key=lambda request: request.rows)]

    def retry_after(self, queue, request):
        return 0.25


class Reluctant(Picky):
    """Never cuts less than a full batch."""

    def cut_at(self, queue):
        return -math.inf if queue.rows >= queue.limits.max_rows else math.inf


STRATEGIES = {
    "dynamic": Dynamic,
    "dynamic that waits": lambda: Dynamic(max_wait=0.01),
    "adaptive": Adaptive,
    "adaptive with a target": lambda: Adaptive(latency_target=0.02),
    "priority": ByPriority,
    "picky": Picky,
    "reluctant": Reluctant,
}

asks = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 2, 5, 10, 40, 200]),  # units since the one before
        st.integers(1, 6),
        st.sampled_from(Priority),
        st.sampled_from([NEVER, NEVER, 4, 15, 60]),
        st.sampled_from([None, None, "a", "b"]),
        st.sampled_from([None, *range(CLIENTS)]),
    ),
    min_size=1,
    max_size=40,
)


@st.composite
def schedules(draw):
    """No two things happen at the same instant but arrivals: what comes first then is the drivers' own affair."""
    dice = random.Random(draw(st.integers(0, 2**16)))
    max_rows = draw(st.integers(1, 8))
    slots = draw(st.sampled_from([None, None, max_rows, max_rows + 3]))
    now, made = 0.0, [Ask(0.0, 1, Priority.NORMAL, math.inf, None, client) for client in range(CLIENTS)]
    for units, rows, priority, timeout, group, client in draw(asks):
        now += (units + 0.5 * dice.random()) * UNIT_S if units else 0.0
        left = math.inf if timeout == NEVER else (timeout + dice.random()) * UNIT_S
        made.append(Ask(now, rows, priority, left, group, client))
    service = draw(st.lists(st.sampled_from([1, 5, 20, 50]), min_size=1, max_size=6))
    return Schedule(
        Limits(max_rows, draw(st.integers(1, 3)), slots),
        max_rows + CLIENTS + draw(st.integers(0, 12)),
        made,
        [(units + dice.random()) * UNIT_S for units in service for _ in range(7)],
        draw(st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=4)),
    )


def near(value):
    return pytest.approx(value, abs=1e-9)


def rounded(value):
    """The same, with all times to a nanosecond."""
    if isinstance(value, float) and math.isfinite(value):
        return near(value)
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def plain(diary):
    """What a driver wrote down, as lists and numbers."""
    seen, snapshot = diary.observed, diary.snapshot
    errors = {kind: count for kind, count in snapshot.errors.items() if count}
    classes = {}
    for name, one in snapshot.classes.items():
        times = [[sum(one[kind]["counts"].values()), one[kind]["total"]] for kind in ("latency", "queue_wait")]
        failed = {kind: count for kind, count in one["errors"].items() if count}
        classes[name] = [one["requests"], one["rows"], failed, *times]
    return {
        "arrivals": list(diary.arrivals),
        "cuts": [list(cut) for cut in diary.cuts],
        "ends": {number: list(end) for number, end in diary.ends.items()},
        "runs": [list(run) for run in diary.runs],
        "accounted": [batch for _, batch in diary.accounted],
        "observed": [[one.rows, one.requests, one.reason, one.started, one.seconds, one.queue_wait_s] for one in seen],
        "counted": [snapshot.requests, snapshot.rows, snapshot.waiting, dict(snapshot.batches), dict(snapshot.reasons)],
        "ran": {rows: list(spent) for rows, spent in snapshot.batch_s.items()},
        "errors": errors,
        "classes": classes,
        "held": [held.doing for held in diary.held],
    }


def assert_alike(one, other):
    assert plain(one) == rounded(plain(other))


@given(schedules(), st.sampled_from(list(STRATEGIES)), st.randoms(use_true_random=False))
def test_engine_and_server_agree_when_requests_that_wait_are_cancelled(schedule, name, dice):
    def late():
        return dice.choice([math.inf, 0.3, 30]) * dice.uniform(0.1, 1) * UNIT_S

    regretted = [replace(ask, cancel_at=ask.at + late()) for ask in schedule.asks]
    schedule = replace(schedule, asks=regretted)
    engine, server = by_the_engine(schedule, STRATEGIES[name]()), by_the_server(schedule, STRATEGIES[name]())
    assert_alike(server, engine)
    assert server.told == engine.told


@given(schedules(), st.sampled_from(list(STRATEGIES)))
def test_the_three_drivers_agree_on_any_schedule(schedule, name):
    engine = by_the_engine(schedule, STRATEGIES[name]())
    assert_alike(by_the_simulation(schedule, STRATEGIES[name]()), engine)
    server = by_the_server(schedule, STRATEGIES[name]())
    assert_alike(server, engine)
    assert server.told == engine.told


# A strategy that does not cut


class Never(Strategy):
    """Cuts the first batch, and then always wants to cut at another time."""

    def __init__(self, later):
        super().__init__()
        self.later, self.has_cut = later, False

    def cut_at(self, queue):
        return queue.now + self.later if self.has_cut else queue.now

    def account(self, batch, now):
        self.has_cut = True


LATER = pytest.mark.parametrize("later", [math.inf, 1e300, 1e7, 0.01, 1e-5])  # never … very soon
WAITS = "does not cut: 3 requests wait"


@LATER
def test_a_strategy_that_does_not_cut_is_named_alike_by_every_driver(later):
    plain = Ask(0.0, 1, Priority.NORMAL, math.inf, None, None)
    schedule = Schedule(Limits(1), 8, [plain] * 4, [0.001], [False], after_s=0.02)
    for drive in (by_the_engine, by_the_simulation, by_the_server):
        strategy = Never(later)
        (held,) = drive(schedule, strategy).held
        assert (held.key, held.doing, held.plugin) == (("cut", 1), f"{WAITS}, for {{age}} now", strategy)


@LATER
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_simulation_ends_with_the_name_of_a_strategy_that_does_not_cut(later, in_flight):
    said = r"^strategy 'Never' \(module .*\) does not cut: \d requests? waits?, and (nothing else|it has put that off)"
    with pytest.raises(StrategyError, match=said):
        simulate(ClosedLoop(4), ServiceModel(beta=10.0), lambda: Never(later), Limits(1, in_flight), requests=10)


def test_what_a_strategy_raises_in_observe_is_told_once_by_every_driver(caplog):
    plain = Ask(0.0, 1, Priority.NORMAL, math.inf, None, None)
    schedule = Schedule(Limits(1), 8, [plain] * 4, [0.001], [False])
    for drive in (by_the_engine, by_the_simulation, by_the_server):
        caplog.clear()
        assert len(drive(schedule, Deaf()).ends) == 4
        assert [message for message in caplog.messages if "observe raised ZeroDivisionError" in message] != []
        assert len(caplog.messages) == 1


class Deaf(Dynamic):
    def observe(self, batch):
        raise ZeroDivisionError
