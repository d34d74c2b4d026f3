"""Who thinks, and for how long: the clients that a strategy may wait for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.engine.queue import DORMANT, DORMANT_S, Clients

NAMES = ("ann", "bob", "cat")


def round_trips(clients, client, thinks, service_s=1.0, now=0.0):
    """One request after another, each answered after `service_s`; returns when the last was answered."""
    clients.join(client, now)
    for think in [0.0, *thinks]:
        clients.asked(client, now + think)
        now += think + service_s
        clients.answered(client, now)
    return now


def test_no_think_time_is_known_before_an_answer_and_a_request():
    clients = Clients()
    round_trips(clients, "ann", [])
    assert clients.think_s == math.inf


@pytest.mark.parametrize(
    ("thinks", "low", "high"),
    [
        pytest.param([0.002] * 30, 0.00199, 0.00201, id="always the same"),
        pytest.param([0.001, 0.003] * 30, 0.0017, 0.0023, id="now more, now less"),
        pytest.param([0.001] * 30 + [60.0], 0.001, 0.0013, id="one long pause hardly counts"),
        pytest.param([0.0] * 30 + [0.001] * 60, 0.0008, 0.0011, id="it grows even from nothing"),
    ],
)
def test_the_think_time_is_a_moving_average(thinks, low, high):
    clients = Clients()
    round_trips(clients, "ann", thinks)
    assert low <= clients.think_s <= high


def test_a_client_with_a_request_left_does_not_think():
    clients = Clients()
    clients.join("ann", 0.0)
    clients.asked("ann", 0.0)
    clients.asked("ann", 0.0)
    clients.answered("ann", 1.0)
    assert (clients.thinking_at(1.0), clients.outstanding) == (0, 1)
    clients.answered("ann", 1.0)
    assert (clients.thinking_at(1.0), clients.outstanding) == (1, 0)


def test_a_client_is_dormant_after_many_think_times_and_counts_again_once_it_has_asked():
    clients = Clients()
    now = round_trips(clients, "ann", [0.01] * 5)
    limit = DORMANT * clients.think_s
    assert clients.next_dormant() == pytest.approx(now + limit)
    assert [clients.thinking_at(now + share * limit) for share in (0.0, 0.9, 1.1)] == [1, 1, 0]
    clients.asked("ann", now + 2 * limit)
    clients.answered("ann", now + 2 * limit)
    assert clients.thinking_at(now + 2 * limit) == 1


def test_a_client_that_joins_without_a_time_is_not_waited_for_until_it_has_asked():
    clients = Clients()
    clients.join("ann")
    assert (len(clients), clients.thinking_at(0.0)) == (1, 0)
    clients.asked("ann", 0.0)
    clients.answered("ann", 0.0)
    assert clients.thinking_at(0.0) == 1


def test_a_client_that_cannot_be_hashed_leaves_nothing_behind():
    clients = Clients()
    with pytest.raises(TypeError):
        clients.asked([], 0.0)
    assert clients.outstanding == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "asked", "answered"]),
            st.sampled_from(NAMES),
            st.sampled_from([0.0, 0.001, 0.015, 0.1]),
        )
    )
)
def test_whatever_happens_it_counts_as_a_plain_count_would(events):
    clients, now = Clients(), 0.0
    live, open_requests, since = set(), dict.fromkeys(NAMES, 0), {}
    dormant = set()
    for event, name, later in events:
        now += later
        if event == "answered" and not open_requests[name]:
            continue
        arguments = () if event == "leave" else (now,)
        getattr(clients, event)(name, *arguments)
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
