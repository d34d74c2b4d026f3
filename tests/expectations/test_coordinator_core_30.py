"""What issue 30 promises of a divided run, as far as the coordinator decides it: nothing lost, nothing twice, no node
dry before the end, no node that holds the end up. No clock, no process: the core, and the simulator that drives it.
"""

from __future__ import annotations

import random
import tracemalloc

import pytest

from gpuinfer.cluster.coordinator_core import CoordinatorCore
from gpuinfer.cluster.range_policy import RangePolicy
from gpuinfer.division import WorkRange
from gpuinfer.lab.simulate.simulated_cluster import ClusterScenario, Faults, simulate_cluster

SEEDS = 20  # of each of ten kinds of schedule
GAMES = 20_000


def fresh(core, node, now, unread):
    """What a driver does with a grant: reads as much as it says, and leases it. The ranges that the node has got."""
    grant = core.grant(node, now)
    ranges = list(grant.ranges)
    if grant.fresh and unread:
        start, stop = unread[0], min(unread[0] + grant.fresh, unread[1])
        unread[0] = stop
        ranges.append(WorkRange(start, stop, tuple(b"row %d" % unit for unit in range(start, stop))))
        core.lease(node, ranges[-1], now)
        if stop == unread[1]:
            core.ended_input(stop)
    return ranges


def keep(core, node, ranges, now):
    for one in ranges:
        assert core.may_keep(node, one.start, one.stop)
        core.kept(node, one.start, one.stop, now)


# Sizes


def sizes_of_one_node(units, rate, **policy):
    """The sizes of the ranges that a lone node is given, which finishes each before it exchanges again."""
    core, unread, sizes, done, now = CoordinatorCore(RangePolicy(**policy), total=units), [0, units], [], 0, 0.0
    core.join(0, now, name="a node")
    while not core.over:
        ranges = fresh(core, 0, now, unread)
        sizes += map(len, ranges)
        now += sum(map(len, ranges)) / rate
        done += sum(map(len, ranges))
        keep(core, 0, ranges, now)
        core.heard(0, now, done, 0)
    return sizes


def test_the_first_range_is_small_and_later_ones_last_ten_seconds():
    sizes = sizes_of_one_node(10_000, rate=50.0)
    assert sizes[0] == 2
    assert sizes[1] == pytest.approx(500, rel=0.05)
    assert sizes[len(sizes) // 2] == pytest.approx(500, rel=0.05)


def test_near_the_end_a_range_is_a_share_of_what_is_left_and_never_less_than_the_least():
    sizes = sizes_of_one_node(10_000, rate=50.0, exchange_s=0.02, least=7)
    assert sizes[-4:] == sorted(sizes[-4:], reverse=True)
    assert sizes[-3] < 100
    assert min(sizes[1:-1]) >= 7


def test_ranges_are_cut_at_multiples_of_the_block():
    assert {size % 64 for size in sizes_of_one_node(10_000, rate=50.0, block=64)[:-1]} == {0}


# The end


def scenario(**more):
    return ClusterScenario(**{"units": GAMES, "nodes": 4, "rate": 50.0, "parallel": 16, "seed": 1, **more})


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_twenty_thousand_games_on_few_nodes_take_hardly_longer_than_they_must(nodes):
    assert simulate_cluster(scenario(nodes=nodes)).efficiency > 0.97


def test_nodes_of_unlike_speed_end_at_one_time():
    outcome = simulate_cluster(scenario(nodes=8, spread=0.7))
    assert outcome.efficiency > 0.95
    assert max(outcome.idle_end_s) < 5


def test_a_node_ten_times_as_slow_holds_up_nobody():
    outcome = simulate_cluster(scenario(nodes=4, slow=1, slowness=10.0))
    assert outcome.seconds < 1.05 * GAMES / (3.1 * 50)


def test_a_node_that_never_finishes_a_unit_holds_up_nobody():
    outcome = simulate_cluster(scenario(nodes=4, slow=1, slowness=1e9))
    assert outcome.seconds < 1.1 * GAMES / (3 * 50)
    assert outcome.kept == [(0, GAMES)]


def test_no_node_runs_dry_before_the_end():
    """Nodes that have begun all that they hold wait for the next exchange: with units of a second that would show."""
    outcome = simulate_cluster(scenario(units=4_000, rate=5.0, parallel=5))
    assert outcome.computed / outcome.capacity > 0.97


def test_a_node_that_joins_late_is_given_what_others_have_not_begun():
    core, unread = CoordinatorCore(total=400), [0, 400]
    core.join(0, 0.0, name="early", parallel=400)
    held = fresh(core, 0, 0.0, unread) + fresh(core, 0, 0.0, unread) + fresh(core, 0, 0.0, unread)
    while unread[0] < unread[1]:
        held += fresh(core, 0, 0.0, unread)
    core.join(1, 1.0, name="late")
    core.heard(0, 1.0, 0, 400)
    assert fresh(core, 1, 1.0, unread) == []
    release = core.grant(0, 1.1).release
    assert 150 <= release <= 250
    core.released(0, 400 - release, 400)
    core.heard(0, 1.2, 0, 400 - release)
    (given, *_) = core.grant(1, 1.3).ranges
    assert given.start == 400 - release
    assert given.items[0] == b"row %d" % given.start, "what is given on keeps its items"


# Nothing lost, nothing twice


def test_what_a_lost_node_held_is_given_to_others_with_its_items():
    core, unread = CoordinatorCore(total=10), [0, 10]
    core.join(0, 0.0, name="node a", parallel=5)
    held = fresh(core, 0, 0.0, unread)
    for now in range(1, 31):
        assert core.expire(float(now)) == []
    (lost,) = core.expire(31.0)
    assert (lost.node, lost.presence, lost.units) == (0, "lost", sum(map(len, held)))
    assert lost.reason == "no word from it for 31 s"
    core.join(1, 31.0, name="node b", parallel=5)
    assert core.grant(1, 31.0).ranges == held


def test_a_node_that_makes_no_progress_counts_as_hung_although_it_answers():
    core, unread = CoordinatorCore(total=1_000), [0, 1_000]
    core.join(0, 0.0, name="node a")
    held = fresh(core, 0, 0.0, unread)
    keep(core, 0, held, 1.0)
    core.heard(0, 1.0, len(held[0]), 0)
    fresh(core, 0, 1.0, unread)
    found = []
    for now in range(2, 400):
        core.heard(0, float(now), len(held[0]), 5)
        found += core.expire(float(now))
    (hung,) = found
    assert hung.presence == "hung"
    assert hung.reason.startswith("no unit finished for 301 s, though one took ")
    assert core.counts.leased == 0


def test_a_coordinator_that_was_suspended_accuses_no_node():
    core = CoordinatorCore(total=10)
    core.join(0, 0.0, name="node a")
    assert core.expire(1.0) == []
    assert core.expire(3_601.0) == []
    assert core.knows(0)


def test_who_comes_first_is_kept_and_who_comes_second_is_refused():
    core, unread = CoordinatorCore(RangePolicy(least=2, lost_s=5), total=2), [0, 2]
    core.join(0, 0.0, name="slow")
    (work,) = fresh(core, 0, 0.0, unread)
    core.join(1, 6.0, name="quick")
    core.expire(6.0)
    assert core.grant(1, 6.0).ranges == [work]
    assert core.may_keep(0, 0, 2), "a lost node comes back before another one is through"
    assert not core.may_keep(1, 0, 2), "while it is being kept"
    core.kept(0, 0, 2, 7.0)
    assert not core.may_keep(1, 0, 2)
    assert core.over
    assert core.counts.duplicates == 4


def test_of_a_range_that_is_kept_in_part_the_rest_may_be_sent_alone():
    core, unread = CoordinatorCore(RangePolicy(least=10), total=10), [0, 10]
    core.join(0, 0.0, name="node a")
    fresh(core, 0, 0.0, unread)
    core.released(0, 6, 10)
    core.join(1, 0.0, name="node b")
    (work,) = core.grant(1, 0.0).ranges
    keep(core, 1, [work], 1.0)
    assert not core.may_keep(0, 0, 10)
    assert core.missing(0, 10) == [(0, 6)]
    assert core.may_keep(0, 0, 6)


def test_records_that_break_off_are_not_lost_even_if_their_node_is():
    core, unread = CoordinatorCore(RangePolicy(least=2), total=2), [0, 2]
    core.join(0, 0.0, name="node a")
    held = fresh(core, 0, 0.0, unread)
    assert core.may_keep(0, 0, 2)
    core.leave(0, 1.0)
    assert core.counts.pending == 0
    core.not_kept(0, 0, 2)
    core.join(1, 1.0, name="node b")
    assert core.grant(1, 1.0).ranges == held


def test_a_resumed_run_knows_what_is_kept():
    core = CoordinatorCore(total=100, kept=[(0, 40), (60, 100)])
    core.join(0, 0.0, name="node a", parallel=100)
    assert core.grant(0, 0.0).fresh == 10
    core.lease(0, WorkRange(40, 60), 0.0)
    with pytest.raises(ValueError, match="read some of them twice"):
        core.lease(0, WorkRange(99, 101), 0.0)
    assert not core.may_keep(0, 39, 60)
    keep(core, 0, [WorkRange(40, 60)], 1.0)
    assert core.over


SCHEDULES = {
    "nodes die": {"deaths": 1 / 40},
    "nodes hang for a while": {"hangs": 1 / 40, "hang_s": 20.0},
    "nodes hang for good": {"hangs": 1 / 100},
    "nodes fall silent": {"silences": 1 / 40, "silence_s": 10.0},
    "lost nodes come back": {"silences": 1 / 60, "silence_s": 45.0},
    "messages are lost": {"lost_requests": 0.2, "lost_replies": 0.2},
    "replies are lost for good": {"lost_replies": 0.1, "replayed": False},
    "records break off and come twice": {"lost_uploads": 0.2, "lost_receipts": 0.2, "doubled_uploads": 0.2},
    "units are released late": {"late_releases": 0.8, "deaths": 1 / 100},
    "the coordinator is killed": {"coordinator_ends": (10.0, 25.0, 60.0), "deaths": 1 / 100},
}
EVERYTHING = {
    key: value for one in SCHEDULES.values() for key, value in one.items() if key not in ("hang_s", "replayed")
}
EVERYTHING |= {"hang_s": 20.0, "silence_s": 35.0}


@pytest.mark.parametrize("kind", [*SCHEDULES, "everything at once"])
def test_two_hundred_schedules_lose_nothing_and_keep_nothing_twice(kind):
    """The simulator itself raises `WorkError` for a unit that is kept twice, and for a run that does not end."""
    for seed in range(SEEDS):
        draw = random.Random(f"{kind} {seed}")
        one = ClusterScenario(
            units=draw.randint(50, 3_000),
            nodes=draw.randint(1, 8),
            rate=draw.choice([2.0, 10.0, 50.0]),
            spread=draw.choice([0.0, 0.5]),
            parallel=draw.choice([1, 4, 32]),
            slow=draw.choice([0, 0, 1]),
            known=draw.random() < 0.5,
            seed=seed,
            faults=Faults(until=300.0, **SCHEDULES.get(kind, EVERYTHING)),
            limit_s=50_000.0,
        )
        policy = RangePolicy(nodes=one.nodes, hung_least_s=60.0, first_unit_s=120.0)
        assert simulate_cluster(one, policy).kept == [(0, one.units)], f"{kind}, seed {seed}"


def test_what_goes_wrong_now_and_then_costs_little():
    faults = Faults(lost_requests=0.01, lost_replies=0.01, doubled_uploads=0.05, lost_receipts=0.05, late_releases=0.2)
    assert simulate_cluster(scenario(faults=faults)).efficiency > 0.95


def test_nodes_that_die_cost_what_they_had_computed_and_not_sent():
    outcome = simulate_cluster(scenario(nodes=8, units=80_000, faults=Faults(deaths=1 / 600)))
    assert outcome.efficiency > 0.9


# Sizes of runs


def memory_of_a_core(size):
    """Bytes, once half of 4,000 ranges of so many units are kept in random order, each by one of 300 nodes."""
    draw = random.Random(0)
    tracemalloc.start()
    core, held = CoordinatorCore(total=4_000 * size), []
    for node in range(300):
        core.join(node, 0.0, name=f"node {node}")
    for number in range(2_300):
        work = WorkRange(number * size, (number + 1) * size)
        core.lease(number % 300, work, 0.0)
        held.append((number % 300, work))
        if len(held) > 300:
            node, work = held.pop(draw.randrange(len(held)))
            keep(core, node, [work], 1.0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert core.counts.kept == 2_000 * size
    return used


def test_memory_depends_on_what_nodes_hold_and_not_on_the_length_of_the_run():
    small, large = memory_of_a_core(10), memory_of_a_core(25_000)
    assert large < 1.2 * small
    assert large < 3_000_000


def test_the_simulator_drives_a_thousand_nodes():
    outcome = simulate_cluster(ClusterScenario(units=2_000_000, nodes=1_000, rate=100.0, parallel=64, spread=0.1))
    assert outcome.kept == [(0, 2_000_000)]
    assert outcome.efficiency > 0.75, "a run of twenty seconds ends within a few of the first node's end"
    assert outcome.ranges < 20_000
