"""Whose turn at the device it is: shares, idle models and ends, on a virtual clock; and threads at a real arbiter."""

from __future__ import annotations

import heapq
import math
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.models.device_arbiter import PRESENT_S, STATION, DeviceArbiter, FairScheduler

CORES = 2


@dataclass(frozen=True)
class Model:
    """Each of `lanes` runs forwards of `step_s` on one core, `gain` times as fast on all, with a pause after each."""

    share: float = 1.0
    step_s: float = 0.01
    pause_s: float = 1e-4
    gain: float = 1.0
    width: int = CORES
    least: int = 1
    lanes: int = 1
    until: float = math.inf  # no forward begins after this


def simulate(*models: Model, room: int = CORES, seconds: float = 20.0, at_once: bool | None = False):
    """For each model, forwards done and its part of the device time."""
    scheduler = FairScheduler(room, at_once=at_once)
    members = [scheduler.join(model.share) for model in models]
    order, now, running, done = iter(range(1 << 40)), 0.0, 0, [0] * len(models)
    events = [(0.0, next(order), "ask", index) for index, model in enumerate(models) for _ in range(model.lanes)]
    heapq.heapify(events)
    owners: dict = {}
    while events and now < seconds:
        now, _, kind, what = heapq.heappop(events)
        if kind == "ask" and now < models[what].until:
            owners[scheduler.ask(members[what], models[what].width, now, least=models[what].least)] = what
        elif kind == "end":
            index = owners.pop(what)
            running -= what.width
            done[index] += 1
            scheduler.done(what, now)
            heapq.heappush(events, (now + models[index].pause_s, next(order), "ask", index))
        begun, again_at = scheduler.due(now)
        for turn in begun:
            model = models[owners[turn]]
            running += turn.width
            step_s = model.step_s / (model.gain if turn.width == room else 1)
            heapq.heappush(events, (now + step_s, next(order), "end", turn))
        assert running <= room or len(models) == 1
        if again_at < math.inf:
            heapq.heappush(events, (again_at + 1e-9, next(order), "check", None))
    assert now >= seconds or not owners, "a forward waits for ever"
    return done, [member.had_s / now for member in members]


TEXT = Model(step_s=0.020)


@pytest.mark.parametrize(
    ("models", "parts"),
    [
        ([TEXT, TEXT], [0.5, 0.5]),
        ([Model(2), Model()], [2 / 3, 1 / 3]),
        ([Model(1, 0.02), Model(4, 0.002)], [0.2, 0.8]),  # forwards of unlike length
        ([TEXT, Model(step_s=0.005, pause_s=5e-4)], [0.5, 0.45]),  # of device time, not of forwards
        ([Model(3, lanes=2, width=1), Model(lanes=2, width=1)], [0.75, 0.25]),  # a core each
        ([TEXT, Model(pause_s=1.0)], [0.98, 0.01]),  # a model that seldom asks delays no other
        ([TEXT, Model(until=0.0)], [0.99, 0.0]),  # an idle model gives its share away
        ([TEXT, Model(until=10.0)], [0.75, 0.25]),
    ],
)
def test_the_device_is_shared(models, parts):
    assert simulate(*models)[1] == pytest.approx(parts, abs=0.04)


MODELS = st.builds(
    Model,
    share=st.sampled_from([0.5, 1.0, 3.0]),
    step_s=st.floats(1e-4, 0.05),
    pause_s=st.floats(0, 0.05),
    width=st.integers(1, 5),
    lanes=st.integers(1, 3),
)


@given(st.lists(MODELS, min_size=2, max_size=4), st.integers(1, 4), st.sampled_from([True, False, None]))
def test_no_model_starves_and_the_device_is_never_overfull(models, room, at_once):
    seconds = 1.0 + 40 * max(one.step_s for one in models)
    assert all(part > 0 for part in simulate(*models, room=room, seconds=seconds, at_once=at_once)[1])


@given(st.floats(1e-3, 0.03), st.floats(1e-3, 0.03), st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.0, 4.0)]))
def test_two_models_that_always_have_work_get_their_shares(first, second, shares):
    _, parts = simulate(Model(shares[0], first), Model(shares[1], second), seconds=10.0)
    assert parts[0] / sum(parts) == pytest.approx(shares[0] / sum(shares), abs=0.03)


@pytest.mark.parametrize(
    ("models", "rates"),
    [
        ([Model(), Model()], [100, 100]),  # equal shares: a core each
        ([Model(gain=1.9), Model(pause_s=0.1)], [180, 9]),  # none is reserved for one that seldom asks
        ([Model(2, gain=1.8), Model(gain=1.8)], [120, 60]),  # two thirds of two cores: in turns
        ([Model(gain=1.8, least=2), Model(gain=1.8, least=2)], [90, 90]),  # fixed threads: in turns
        ([Model(), Model(), Model()], [66, 66, 66]),
        ([Model(gain=1.5), Model(gain=1.5, until=0)], [150, 0]),  # alone: all cores
    ],
)
def test_models_run_at_once_where_shares_are_whole_cores(models, rates):
    done, _ = simulate(*models, at_once=None)
    assert [count / 20.0 for count in done] == pytest.approx(rates, rel=0.1, abs=1)


def test_cores_are_reserved_for_a_model_that_asks_again_at_once_but_not_for_long():
    scheduler = FairScheduler(2)
    first, second = scheduler.join(1.0), scheduler.join(1.0)
    now = 0.0
    for _ in range(5):
        turns = [scheduler.ask(first, 2, now), scheduler.ask(second, 2, now)]
        scheduler.due(now)
        assert [turn.width for turn in turns] == [1, 1]
        now += 0.01
        for turn in turns:
            scheduler.done(turn, now)
    for after, width in ((PRESENT_S / 2, 1), (2 * PRESENT_S, 2)):
        turn = scheduler.ask(first, 2, now + after)
        scheduler.due(now + after)
        assert turn.width == width
        scheduler.done(turn, now + after)


def test_threads_take_turns_at_an_arbiter():
    arbiter, inside, most = DeviceArbiter(CORES, at_once=False), [0], [0]

    def work(slot) -> None:
        for _ in range(50):
            with slot.turn(CORES, lambda station: None):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(arbiter.join(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [1]


def test_a_waiting_forward_is_in_its_station_and_a_closed_slot_waits_no_more():
    arbiter, stations, through, waiting = DeviceArbiter(1), [], threading.Event(), threading.Event()
    first, second = arbiter.join(), arbiter.join()
    held = first.begin(1, stations.append)

    def wait() -> None:
        second.end(second.begin(1, lambda station: (stations.append(station), waiting.set())))
        through.set()

    threading.Thread(target=wait, daemon=True).start()
    assert waiting.wait(60)
    second.close()
    assert through.wait(60)
    first.end(held)
    assert stations == [STATION]
    assert second.begin(1, stations.append) is None
