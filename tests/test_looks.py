"""Which way of sharing a device is the faster one, by looks at both: on a virtual clock, with models of known speed."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from random import Random

import pytest

from gpuinfer.models.device_arbiter import FairScheduler
from gpuinfer.models.sharing_experiment import (
    LEAST_PAIRS,
    LONGEST,
    LOOK_S,
    MOST_PAIRS,
    REST,
    SharingExperiment,
    SharingWay,
)

CORES, SECONDS = 2, 20.0


@dataclass(frozen=True)
class Model:
    """One that always has work between `since` and `until`: a forward takes `step_s` on one core, and gets faster by
    `gain` on both. `crowded`: times as long while another one runs.
    """

    step_s: float = 0.01
    gain: float = 1.0
    share: float = 1.0
    crowded: float = 1.0
    since: float = 0.0
    until: float = math.inf
    least: int = 1
    pause_s: float = 1e-5
    noise: float = 0.0  # of a forward's time: e to the power of a normal deviate, times this


def run(models, looks, seconds=SECONDS):
    """Forwards of each model, and the share of time in which they ran at once."""
    turns = FairScheduler(CORES, looks, SharingWay.TURNS if looks is None else looks.way)
    members = [turns.join(model.share) for model in models]
    order, now, done = iter(range(1 << 40)), 0.0, [0] * len(models)
    events = [(model.since, next(order), "ask", index) for index, model in enumerate(models)]
    heapq.heapify(events)
    owners, running, random = {}, [], Random(1)
    while events and now < seconds:
        now, _, kind, what = heapq.heappop(events)
        if kind == "ask" and now < models[what].until:
            owners[turns.ask(members[what], CORES, now, least=models[what].least)] = what
        elif kind == "end":
            index = owners.pop(what)
            running.remove(what)
            done[index] += 1
            turns.done(what, now, again=True, work=1.0)
            heapq.heappush(events, (now + models[index].pause_s, next(order), "ask", index))
        begun, again_at = turns.due(now)
        for turn in begun:
            model = models[owners[turn]]
            running.append(turn)
            seconds_of = model.step_s / (model.gain if turn.width == CORES else 1)
            seconds_of *= math.exp(model.noise * random.gauss(0, 1))
            heapq.heappush(
                events, (now + seconds_of * (model.crowded if len(running) > 1 else 1), next(order), "end", turn)
            )
        if looks is None or looks.way is not SharingWay.FREELY:
            assert sum(turn.width for turn in running) <= CORES
        if again_at < math.inf:
            heapq.heappush(events, (again_at + 1e-9, next(order), "look", None))
    return done, turns.at_once_s / turns.together_s if turns.together_s else 0.0


def shared(*models, **arguments):
    return run(models, on_cores(), **arguments)


def on_cores():
    """As on a CPU."""
    return SharingExperiment(SharingWay.TURNS, SharingWay.SHARES, likely=SharingWay.SHARES)


@pytest.mark.parametrize(
    ("models", "at_once"),
    [
        pytest.param([Model(), Model()], True, id="forwards that a second core makes no faster run at once"),
        pytest.param([Model(gain=1.7), Model(gain=1.7)], True, id="and so do those that it makes not twice as fast"),
        pytest.param(
            [Model(gain=1.9, crowded=1.4), Model(gain=1.9, crowded=1.4)],
            False,
            id="in turns where they disturb another",
        ),
        pytest.param([Model(), Model(step_s=0.03, gain=1.9)], True, id="small ones beside a large one"),
        pytest.param(
            [Model(gain=1.8, share=2), Model(gain=1.8)], False, id="whoever is to have more would have less at once"
        ),
        pytest.param([Model(gain=1.2, share=2), Model(gain=1.2)], True, id="unless its turns bring it less"),
    ],
)
def test_the_faster_way_is_gone_for_nearly_all_of_the_time(models, at_once):
    looks = on_cores()
    _, part = run(models, looks)
    assert part > 0.9 if at_once else part < 0.1
    assert all(one.pairs >= LEAST_PAIRS for one in looks.judged.values())


def test_long_forwards_are_looked_at_too():
    looks = SharingExperiment(SharingWay.TURNS, SharingWay.SHARES)
    run([Model(step_s=1.0), Model(step_s=1.0)], looks, seconds=60.0)
    assert all(one.pairs >= LEAST_PAIRS for one in looks.judged.values())
    assert looks.way is SharingWay.SHARES


def test_looks_find_how_many_times_as_fast_it_is():
    looks = SharingExperiment(SharingWay.TURNS, SharingWay.SHARES)
    run([Model(), Model(gain=1.6)], looks)
    small, large = (math.exp(one.logs / one.pairs) for one in looks.judged.values())
    assert (small, large) == pytest.approx((2.0, 2 / 1.6), rel=0.25)  # fair turns are of time, not of forwards


def test_two_small_models_get_as_much_done_as_on_half_of_the_cores_each():
    done, _ = shared(Model(), Model())
    assert min(done) >= 0.95 * SECONDS / 0.01


def test_alone_a_model_has_all_cores_again():
    done, _ = shared(Model(gain=1.5), Model(gain=1.5, until=5.0))
    assert done[0] >= 0.95 * (5 + 1.5 * (SECONDS - 5)) / 0.01


def test_weights_hold_where_turns_are_taken():
    done, _ = shared(Model(gain=1.9, share=3), Model(gain=1.9))
    assert done[0] / sum(done) == pytest.approx(0.75, abs=0.03)


def test_a_model_that_keeps_its_threads_takes_turns():
    done, _ = shared(Model(gain=1.9, least=CORES), Model(gain=1.9, least=CORES))
    assert min(done) >= 0.95 * 1.9 / 2 * SECONDS / 0.01


def test_what_is_usual_stays_but_for_the_looks():
    looks = SharingExperiment(SharingWay.TURNS, SharingWay.FREELY, SharingWay.FREELY)
    _, part = run([Model(crowded=3.0), Model(crowded=3.0)], looks)
    assert part > 0.9
    assert all(one.pairs >= LEAST_PAIRS and one.logs < 0 for one in looks.judged.values())


def test_one_that_comes_and_goes_is_never_looked_at_for_long():
    looks = SharingExperiment(SharingWay.TURNS, SharingWay.SHARES)
    now = 0.0
    for _ in range(1000):
        for _ in range(20):
            now += 0.004
            looks.ended("a", now - 0.004, now, 1.0, {"a": 0.5, "b": 0.5})
        now += 0.2
        looks.ended("a", now - 0.004, now, 1.0, {"a": 1.0})
    assert not looks.judged
    assert looks.way is SharingWay.TURNS


def test_another_company_is_looked_at_anew():
    looks = SharingExperiment(SharingWay.TURNS, SharingWay.SHARES)
    run([Model(), Model(), Model(since=5.0)], looks)
    assert len(looks.judged) == 3


def test_until_something_is_known_they_go_the_way_that_is_likely():
    for likely in (SharingWay.TURNS, SharingWay.SHARES):
        looks = SharingExperiment(SharingWay.TURNS, SharingWay.SHARES, likely=likely)
        looks.ended("a", 0.0, 0.1, 1.0, {"a": 1.0})
        assert looks.way is likely


def test_shares_that_are_no_whole_cores_are_likely_to_be_kept_by_turns():
    looks = on_cores()
    _, part = run([Model(gain=1.9, share=2), Model(gain=1.9)], looks, seconds=0.1)  # less than a look
    assert looks.way is SharingWay.TURNS
    assert part < 0.1


def test_noise_does_not_have_them_leave_the_likely_way():
    """By the mean of a few pairs one model in two would seem to lose."""
    _, part = shared(Model(gain=1.96, noise=1.0), Model(gain=1.96, noise=1.0), seconds=60.0)
    assert part > 0.85


def test_what_clearly_is_faster_is_gone_though_it_was_not_likely():
    disturbed = Model(gain=1.9, crowded=1.4, noise=0.3)
    _, part = shared(disturbed, disturbed, seconds=30.0)
    assert part < 0.2


def test_finding_out_takes_a_moment_and_ever_less_later():
    looks = on_cores()
    slow = Model(step_s=0.1, gain=1.3)
    _, part = run([slow, slow], looks, seconds=1000.0)
    pairs = looks.judged.popitem()[1].pairs
    assert LEAST_PAIRS < pairs <= LEAST_PAIRS + math.log2(LONGEST) + 1000.0 / (REST * LONGEST * 2 * LOOK_S)
    assert part > 0.99


def test_looks_have_an_end_where_ways_cannot_be_told_apart():
    looks = on_cores()
    same = Model(gain=2.0, noise=1.5)
    seconds = 100.0
    run([same, same], looks, seconds=seconds)
    assert looks.judged.popitem()[1].pairs <= MOST_PAIRS + seconds / (2 * LOOK_S * REST)


def test_cores_are_not_kept_for_a_model_that_seldom_wants_them():
    """Its forwards are 10 of 110 ms: for so long the other has one core, and for the rest both."""
    busy, seldom = Model(gain=2.0), Model(pause_s=0.1)
    done, _ = shared(busy, seldom, seconds=20.0)
    assert done[0] >= 0.85 * 2 * 20.0 / 0.01


@pytest.mark.parametrize(
    ("gain", "seconds"),
    [
        pytest.param(1.0, 10.0, id="at a way by which half as much gets done"),
        pytest.param(1.5, 10.0, id="and at one by which a quarter less does"),
        pytest.param(1.9, 10.0, id="and at one that is nearly as fast, where looks may come often"),
        pytest.param(1.5, 100.0, id="in the long run"),
    ],
)
def test_looks_cost_a_hundredth_of_the_work_and_a_first_one(gain, seconds):
    model = Model(gain=gain)
    done, _ = shared(model, model, seconds=seconds)
    lost_s = seconds - sum(done) * model.step_s / CORES
    assert lost_s <= 1.25 * (0.01 * seconds + (1 - gain / 2) * LOOK_S)


def test_looks_at_a_way_that_seems_faster_wait_for_nothing():
    """Of what is gone meanwhile, nothing is lost by them."""
    looks = on_cores()
    disturbed = Model(gain=1.9, crowded=1.4, noise=0.1)
    run([disturbed, disturbed], looks, seconds=2 * LEAST_PAIRS * 2 * LOOK_S)
    assert looks.way is SharingWay.TURNS
