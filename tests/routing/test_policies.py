"""Which replica: what each policy promises, whatever the loads are."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import ReplicaLoad, RoutedRequest
from gpuinfer.config import registry
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.fleet.routing_policies import check_policy_options, make_policy

loads_st = st.lists(
    st.builds(ReplicaLoad, st.integers(0, 500), st.integers(0, 1000), st.floats(0.01, 8.0)),
    min_size=1,
    max_size=16,
    unique_by=lambda load: load.member,
)
askings = st.builds(RoutedRequest, st.floats(1, 1e5), st.none() | st.binary(max_size=40))
FAVOURITES = [1, 5, 7, 7, 0, 5, 3, 5, 0, 2]  # of ten users among eight replicas, in every process and version


def policy(name, seed=1, **options):
    return make_policy(name, seed, **options)


def fleet(*in_flight):
    return [ReplicaLoad(number, now) for number, now in enumerate(in_flight)]


def user(number):
    return RoutedRequest(1, b"user %d" % number)


@given(st.lists(loads_st, min_size=1, max_size=8), askings, st.sampled_from(registry.names("routing")))
def test_nobody_who_is_absent_is_chosen_whoever_comes_and_goes(times, asking, name):
    chooser = policy(name)
    for loads in times:
        chosen, why = chooser.choose(loads, asking)
        assert any(chosen is load for load in loads)
        assert why.isascii()
        assert why.isprintable()
        assert len(why) < 60


@given(loads_st, askings)
def test_least_loaded_finds_nobody_with_less(loads, asking):
    chosen = policy("least-loaded").choose(loads, asking).load
    assert chosen.in_flight / chosen.speed == min(load.in_flight / load.speed for load in loads)


@pytest.mark.parametrize(
    ("name", "loads", "member", "why"),
    [
        ("least-loaded", [ReplicaLoad(1, 5), ReplicaLoad(2, 3)], 2, "least-loaded 3<5"),
        ("least-loaded", [ReplicaLoad(1, 5, 2.0), ReplicaLoad(2, 3)], 1, "least-loaded 2.5<3"),
        ("least-loaded", [ReplicaLoad(1, 4, 0.1), ReplicaLoad(2, 30)], 2, "least-loaded 30<40"),
        ("least-loaded", [ReplicaLoad(7, 4)], 7, "least-loaded alone"),
        ("sticky", [ReplicaLoad(0, 3), ReplicaLoad(1, 1)], 1, "least-loaded 1<3"),  # without an affinity
    ],
)
def test_least_loaded_says_why(name, loads, member, why):
    chosen, said = policy(name).choose(loads, RoutedRequest())
    assert (chosen.member, said) == (member, why)


@pytest.mark.parametrize("name", ["least-loaded", "power-of-two", "random", "round-robin"])
def test_of_equals_each_has_its_share(name):
    for loads, times, members in ((fleet(2, 2, 2, 2), 8000, {0, 1, 2, 3}), (fleet(1, 0, 5, 0), 1000, {1, 3})):
        if name == "least-loaded" or len(members) == 4:
            chooser = policy(name)
            found = Counter(chooser.choose(loads, RoutedRequest()).load.member for _ in range(times))
            assert found.keys() == members
            assert min(found.values()) > 0.8 * times / len(members)


def test_round_robin_goes_on_after_the_last_when_one_has_left():
    chooser, loads = policy("round-robin"), fleet(0, 0, 0, 0)
    seen = [chooser.choose(loads, RoutedRequest()).load.member for _ in range(2)]
    seen += [chooser.choose([loads[3], loads[0], loads[1]], RoutedRequest()).load.member for _ in range(4)]
    assert seen == [0, 1, 3, 0, 1, 3]


@pytest.mark.parametrize("members", [2, 5, 16])
def test_sticky_spreads_affinities_evenly(members):
    chooser, loads = policy("sticky"), fleet(*[0] * members)
    found = Counter(chooser.choose(loads, user(number)).load.member for number in range(2000 * members))
    assert all(1750 < found[member] < 2250 for member in range(members))


@given(st.sets(st.integers(0, 10**6), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_when_one_leaves_only_what_was_its_own_moves(members, dice):
    loads = [ReplicaLoad(member) for member in members]
    dice.shuffle(loads)
    gone, chooser = loads[0], policy("sticky")
    for number in range(60):
        before, after = (chooser.choose(here, user(number)).load for here in (loads, loads[1:]))
        assert before is after or before is gone


def test_routers_agree_on_the_favourites_or_a_restart_would_empty_every_cache():
    one, other, loads = policy("sticky", 1), policy("sticky", 2), fleet(*[0] * 8)
    assert [one.choose(loads, user(number)).load.member for number in range(10)] == FAVOURITES
    assert [other.choose(loads[::-1], user(number)).load.member for number in range(10)] == FAVOURITES


@pytest.mark.parametrize(("ahead", "why"), [(4, "sticky"), (5, "sticky-broken 5>0")])
def test_sticky_breaks_by_its_margin(ahead, why):
    chooser, loads = policy("sticky", margin=4.0), fleet(0, 0, 0)
    favourite = chooser.choose(loads, user(1)).load
    favourite.in_flight = ahead
    chosen, said = chooser.choose(loads, user(1))
    assert (said, chosen is favourite) == (why, ahead <= 4)


def test_two_choices_bound_the_imbalance_where_one_does_not():
    """Balls into bins: the fullest holds ln n / ln ln n too many of n by chance, and ln ln n of the better of two."""

    def fullest(name):
        chooser, loads = policy(name), fleet(*[0] * 64)
        for _ in range(64 * 50):
            chooser.choose(loads, RoutedRequest()).load.in_flight += 1
        return max(load.in_flight for load in loads)

    assert fullest("least-loaded") == 50
    assert fullest("power-of-two") <= 54
    assert fullest("random") >= 60


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("least-load", {}, UnknownName, "Did you mean 'least-loaded'"),
        ("sticky", {"margins": 3}, UsageError, r"-R margins.*Did you mean 'margin'|margins.*margin"),
        ("random", {"margin": 3}, UsageError, "margin"),
        ("sticky", {"margin": -1}, UsageError, "-R margin"),
        ("sticky", {"margin": "far"}, UsageError, "-R margin: 'far' is not a number"),
        ("sticky", {"margin": "nan"}, UsageError, "-R margin: 'nan'"),
    ],
)
def test_what_is_none_is_refused(name, options, error, said):
    with pytest.raises(error, match=said):
        check_policy_options(name, {key: GivenValue(value, f"-R {key}") for key, value in options.items()})
