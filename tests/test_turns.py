"""Whose turn at the device it is: shares, idleness and ends, on a virtual clock; and threads at a real gate."""

from __future__ import annotations

import heapq
import math
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.models.device_arbiter import PRESENT, PRESENT_S, STATION, DeviceArbiter, DeviceSlot, FairScheduler
from gpuinfer.models.sharing_experiment import SharingWay

CORES = 2


@dataclass(frozen=True)
class Model:
    """One that always has work: each of `lanes` runs forwards of `step_s`, with a pause after each."""

    share: float = 1.0
    step_s: float = 0.01
    pause_s: float = 1e-4
    again: bool = False
    width: int = CORES
    lanes: int = 1
    until: float = math.inf  # it wants nothing after this


def had(*models: Model, room: int = CORES, seconds: float = 20.0) -> list[float]:
    """The part of the device that each model has had."""
    turns = FairScheduler(room)
    members = [turns.join(model.share) for model in models]
    events: list = []
    order = iter(range(1 << 30))
    for index, model in enumerate(models):
        for _ in range(model.lanes):
            heapq.heappush(events, (0.0, next(order), "ask", index))
    owners: dict = {}
    running = now = 0.0
    while events and now < seconds:
        now, _, kind, what = heapq.heappop(events)
        if kind == "ask" and now < models[what].until:
            owners[turns.ask(members[what], models[what].width, now)] = what
        elif kind == "end":
            index = owners.pop(what)
            running -= what.width
            turns.done(what, now, again=models[index].again)
            heapq.heappush(events, (now + models[index].pause_s, next(order), "ask", index))
        begun, again_at = turns.due(now)
        for turn in begun:
            running += turn.width
            heapq.heappush(events, (now + models[owners[turn]].step_s, next(order), "end", turn))
        assert running <= room or len(models) == 1
        if again_at < math.inf:
            heapq.heappush(events, (again_at + 1e-9, next(order), "look", None))
    assert now >= seconds or not owners, "somebody waits for ever"
    return [member.had_s / now for member in members]


TEXT = Model(step_s=0.020, again=True)
ROWS = Model(step_s=0.005, pause_s=5e-4)


@pytest.mark.parametrize(
    ("models", "parts"),
    [
        pytest.param([TEXT, TEXT], [0.5, 0.5], id="equal shares by default"),
        pytest.param([Model(2, again=True), Model(again=True)], [2 / 3, 1 / 3], id="by weights"),
        pytest.param([TEXT, ROWS], [0.5, 0.45], id="of device time, not of forwards: the short ones come more often"),
        pytest.param([Model(3, lanes=2, width=1), Model(lanes=2, width=1)], [0.75, 0.25], id="a core each"),
        pytest.param([TEXT, Model(pause_s=1.0)], [0.98, 0.01], id="one that most often wants nothing holds nobody up"),
        pytest.param([TEXT, Model(until=0.0)], [0.99, 0.0], id="an idle model gives its share away"),
        pytest.param([TEXT, Model(until=10.0, again=True)], [0.75, 0.25], id="and so does one that ends"),
    ],
)
def test_the_device_is_shared(models, parts):
    assert had(*models) == pytest.approx(parts, abs=0.04)


@given(
    st.lists(
        st.builds(
            Model,
            share=st.sampled_from([0.5, 1.0, 3.0]),
            step_s=st.floats(1e-4, 0.05),
            pause_s=st.floats(0, 0.05),
            again=st.booleans(),
            width=st.integers(1, 5),
            lanes=st.integers(1, 3),
        ),
        min_size=2,
        max_size=4,
    ),
    st.integers(1, 4),
)
def test_nobody_starves_and_the_device_is_never_overfull(models, room):
    assert all(part > 0 for part in had(*models, room=room, seconds=1.0 + 40 * max(one.step_s for one in models)))


@given(st.floats(1e-3, 0.03), st.floats(1e-3, 0.03), st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.0, 4.0)]))
def test_two_that_always_want_more_have_what_their_shares_say(first, second, shares):
    parts = had(Model(shares[0], first, again=True), Model(shares[1], second, again=True), seconds=10.0)
    assert parts[0] / sum(parts) == pytest.approx(shares[0] / sum(shares), abs=0.03)


def test_alone_it_waits_for_nobody():
    turns = FairScheduler(1)
    member = turns.join(1.0)
    asked = [turns.ask(member, 1, 0.0) for _ in range(3)]
    assert turns.due(0.0)[0] == asked


def test_at_once_each_has_its_share_of_the_room_and_alone_all_of_it():
    turns = FairScheduler(4, way=SharingWay.SHARES)
    large, small = turns.join(3.0), turns.join(1.0)
    alone = turns.ask(large, 4, 0.0)
    assert turns.due(0.0)[0] == [alone]
    assert alone.width == 4
    turns.done(alone, 1.0)
    both = [turns.ask(small, 4, 1.0), turns.ask(large, 4, 1.0)]
    assert set(turns.due(1.0)[0]) == set(both)
    assert [turn.width for turn in both] == [1, 3]
    for turn in both:
        turns.done(turn, 2.0)
    soon = turns.ask(small, 4, 2.0 + 2 * PRESENT_S)  # a moment is what forwards make of it: these take a second
    assert turns.due(2.0 + 2 * PRESENT_S)[0] == [soon]
    assert soon.width == 1
    turns.done(soon, 3.0)
    later = turns.ask(small, 4, 2.1 + PRESENT)
    assert turns.due(2.1 + PRESENT)[0] == [later]
    assert later.width == 4


@pytest.mark.parametrize(
    ("way", "passed_on"), [(SharingWay.TURNS, True), (SharingWay.SHARES, False), (SharingWay.FREELY, False)]
)
def test_the_room_of_a_turn_is_passed_on_where_the_next_one_takes_all_of_it(way, passed_on):
    turns = FairScheduler(2, way=way)
    first, second = turns.join(1.0), turns.join(1.0)
    ended, other = turns.ask(first, 2, 0.0), turns.ask(second, 2, 0.0)
    turns.due(0.0)
    turns.done(ended, 1.0)
    turns.due(1.0)
    assert other.began_at is not None
    assert turns.has_passed_on(ended) == passed_on


def test_a_forward_that_must_have_its_threads_waits_for_all_of_them():
    turns = FairScheduler(4, way=SharingWay.SHARES)
    first, second = turns.join(1.0), turns.join(1.0)
    held, fixed = turns.ask(first, 4, 0.0), turns.ask(second, 4, 0.0, least=4)
    assert turns.due(0.0)[0] == [held]
    assert held.width == 2
    turns.done(held, 1.0)
    assert turns.due(1.0)[0] == [fixed]
    assert fixed.width == 4


def test_on_a_device_that_takes_whole_forwards_one_takes_all_of_it_in_turns_alone():
    for way, begun in ((SharingWay.TURNS, 1), (SharingWay.SHARES, 2), (SharingWay.FREELY, 2)):
        turns = FairScheduler(2, way=way)
        members = [turns.join(1.0), turns.join(1.0)]
        asked = [turns.ask(member, 2, 0.0, alone=1) for member in members]
        assert turns.due(0.0)[0] == asked[:begun]
        assert asked[0].of_all is (way is SharingWay.TURNS)


def test_freely_nobody_waits():
    turns = FairScheduler(2, way=SharingWay.FREELY)
    members = [turns.join(1.0), turns.join(1.0), turns.join(1.0)]
    asked = [turns.ask(member, 2, 0.0) for member in members]
    assert turns.due(0.0)[0] == asked
    for turn in asked:
        turns.done(turn, 1.0)
    assert [member.had_s for member in members] == [1.0, 1.0, 1.0]


# Threads


def test_threads_take_turns_at_a_gate():
    gate, inside, most = DeviceArbiter(CORES), [0], [0]

    def work(place: DeviceSlot) -> None:
        for _ in range(50):
            with place.turn(CORES, lambda station: None):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(gate.join(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [1]


def test_who_waits_says_so_and_a_model_that_is_closed_waits_for_nobody():
    gate, stations, through = DeviceArbiter(1), [], threading.Event()
    first, second = gate.join(), gate.join()
    held = first.begin(1, stations.append)

    def wait() -> None:
        second.end(second.begin(1, lambda station: (stations.append(station), waiting.set())))
        through.set()

    waiting = threading.Event()
    threading.Thread(target=wait, daemon=True).start()
    assert waiting.wait(60)
    second.leave()
    assert through.wait(60)
    first.end(held)
    assert stations == [STATION]
    assert second.begin(1, stations.append) is None
