"""Which clients think, and for how long: those that a strategy may wait for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.engine.queue import DORMANT, DORMANT_S, Clients

NAMES = ("ann", "bob", "cat")
EVENTS = st.tuples(
    st.sampled_from(["join", "leave", "asked", "answered"]),
    st.sampled_from(NAMES),
    st.sampled_from([0.0, 0.001, 0.015, 0.1]),
)


@pytest.mark.parametrize(
    ("thinks", "low", "high"),
    [
        pytest.param([], math.inf, math.inf, id="before an answer and a request"),
        pytest.param([0.002] * 30, 0.00199, 0.00201, id="always the same"),
        pytest.param([0.001, 0.003] * 30, 0.0017, 0.0023, id="now more, now less"),
        pytest.param([0.001] * 30 + [60.0], 0.001, 0.0013, id="one long pause hardly counts"),
        pytest.param([0.0] * 30 + [0.001] * 60, 0.0008, 0.0011, id="it grows even from nothing"),
    ],
)
def test_the_think_time_is_a_moving_average(thinks, low, high):
    clients, now = Clients(), 0.0
    clients.join("ann", now)
    for think in [0.0, *thinks]:
        clients.asked("ann", now + think)
        now += think + 1.0
        clients.answered("ann", now)
    assert low <= clients.think_s <= high
    if thinks:
        assert clients.next_dormant() == pytest.approx(now + max(DORMANT * clients.think_s, DORMANT_S))


def test_a_client_that_joins_without_a_time_or_cannot_be_hashed_is_not_waited_for():
    clients = Clients()
    clients.join("ann")
    assert (len(clients), clients.thinking_at(0.0)) == (1, 0)
    with pytest.raises(TypeError):
        clients.asked([], 0.0)
    assert clients.outstanding == 0
    clients.asked("ann", 0.0)
    clients.answered("ann", 0.0)
    assert clients.thinking_at(0.0) == 1


@given(st.lists(EVENTS))
def test_whatever_happens_it_counts_as_a_plain_count_would(events):
    clients, now = Clients(), 0.0
    live, open_requests, since = set(), dict.fromkeys(NAMES, 0), {}
    dormant = set()
    for event, name, later in events:
        now += later
        if event == "answered" and not open_requests[name]:
            continue
        getattr(clients, event)(name, *(() if event == "leave" else (now,)))
        if event == "join" and name not in live:
            live.add(name)
            since[name] = now
            dormant.discard(name)
        if event == "leave":
            live.discard(name)
        if event in ("asked", "answered"):
            open_requests[name] += 1 if event == "asked" else -1
            since[name] = now
            dormant.discard(name)
        idle = {one for one in live if not open_requests[one]} - dormant
        dormant |= {one for one in idle if since[one] + max(DORMANT * clients.think_s, DORMANT_S) <= now}
        assert clients.thinking_at(now) == len(idle - dormant)
        assert clients.outstanding == sum(open_requests.values())
        assert len(clients) == len(live)
