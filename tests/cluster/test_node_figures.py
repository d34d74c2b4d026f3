"""What nodes report of themselves, added up: restarts, hosts that nodes share, where the nodes' time went."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from cluster.made_up_nodes import ROWS, MadeUpNode, MadeUpRun
from gpuinfer.api import Roofline
from gpuinfer.cluster.cluster_section import TIMES
from gpuinfer.cluster.node_feed import NodeFeed
from gpuinfer.cluster.node_figures import ClusterFigures, merge_facts
from gpuinfer.cluster.node_report import NodeMachine, NodeReport, packed
from gpuinfer.division import WorkRange
from gpuinfer.report.report import time_s
from gpuinfer.stats import Snapshot, merge_snapshots

HOST = NodeMachine(host="here", cores=2, cpu="one", cpus=(0, 1))


def a_report(**given) -> NodeReport:
    return NodeReport(**{"setup": False, "elapsed_s": 10.0, **given})


def test_a_report_travels_as_it_is():
    report = MadeUpNode().report(10.0)
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=NodeReport)
    assert msgspec.msgpack.encode(there) == msgspec.msgpack.encode(report)
    counted = Snapshot.from_wire(msgspec.msgpack.decode(there.snapshot))
    assert (counted.rows, counted.batches) == (10 * ROWS, {ROWS: 10})


def test_the_sum_is_that_of_all_nodes_and_its_lanes_have_their_names():
    run = MadeUpRun(MadeUpNode(speed=1.0), MadeUpNode(speed=2.0), end_s=10.0).go_on()
    total = run.figures.snapshot(run.now)
    assert (total.requests, total.rows) == (30, 30 * ROWS)
    assert {lane["name"].split(":")[0] for lane in total.lanes} == {"node 0", "node 1"}
    assert len(total.lanes) == 4
    assert sum(time_s(total.lanes, 10.0).values()) == pytest.approx(40.0)  # lanes × seconds


def test_what_a_node_counted_before_it_died_stays_and_its_successor_begins_anew():
    figures = ClusterFigures(0.0)
    snapshot = packed(Snapshot(requests=5, rows=50, lanes=({"name": "forward 0", "stations": {"forward": 4.0}},)))
    figures.joined(1, HOST, 0.0, index=3)
    figures.heard(1, a_report(done=5, counts={"games": 5.0}, failed=1, snapshot=snapshot), 10.0)
    figures.gone(1, 12.0, "killed by signal 9", lost=True)
    figures.joined(2, HOST, 15.0, index=3)
    assert figures.snapshot(15.0).requests == 5
    figures.heard(2, a_report(done=2, counts={"games": 2.0}, failed=0, snapshot=snapshot), 20.0)
    (account,) = figures.accounts.values()
    assert (account.restarts, account.gone_s, account.starting_s, account.failed) == (1, 5.0, 5.0, 1)
    total, progress = figures.snapshot(20.0), figures.progress(6, total=10, unit="games")
    assert (total.requests, total.rows, len(total.lanes)) == (10, 100, 1)
    assert total.lanes[0]["stations"] == {"forward": 8.0}
    assert (progress.done, progress.counts, progress.failed) == (6, {"games": 6}, 1)
    assert progress.begun == 1.0  # seven were finished, and six are kept


def test_a_report_without_a_snapshot_leaves_the_one_before():
    figures = ClusterFigures(0.0)
    figures.joined(1, HOST, 0.0)
    figures.heard(1, a_report(snapshot=packed(Snapshot(requests=5))), 1.0)
    figures.heard(1, a_report(done=3), 2.0)
    figures.heard(7, a_report(done=3), 2.0)  # of no node that is known
    assert (figures.snapshot(2.0).requests, figures.accounts["+1"].total("done")) == (5, 3)


def test_facts_are_added_up_but_for_those_of_each_node():
    parts = [{"workers": 2.0, "blocks": 2.0, "environment_share": 0.2}, {"workers": 4.0, "environment_share": 0.4}]
    assert merge_facts(parts) == {"workers": 6.0, "blocks": 2.0, "environment_share": pytest.approx(0.3)}


def test_one_node_of_each_kind_of_machine_measures_the_roofline_for_all():
    figures = ClusterFigures(0.0)
    for number, cpu in enumerate(("one", "one", "other")):
        figures.joined(number, NodeMachine(host=f"{number}", cores=2, cpu=cpu), 0.0, index=number)
    assert [figures.measures_roofline(number) for number in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("cpus", "together"),
    [
        pytest.param([(0, 1), (2, 3)], 200.0, id="nodes with cores of their own"),
        pytest.param([(0, 1), (0, 1)], 100.0, id="nodes that share all cores"),
        pytest.param([(0, 1), (1, 2)], 150.0, id="nodes that share one core"),
    ],
)
def test_rooflines_are_added_up_as_far_as_nodes_have_cores_of_their_own(cpus, together):
    nodes = [MadeUpNode(host="here", cores=2, cpus=own, roofline=100.0) for own in cpus]
    found = MadeUpRun(*nodes, end_s=10.0).finished()
    assert found.roofline == Roofline(together, 256, "2 nodes × 1 forward × 1 thread", (together,))
    assert found.cores["count"] == len({core for own in cpus for core in own})


def test_there_is_no_roofline_as_long_as_one_of_a_kind_is_not_known():
    assert MadeUpRun(MadeUpNode(roofline=100.0), MadeUpNode(cpu="other"), end_s=5.0).finished().roofline is None


def test_neighbours_of_one_run_are_no_other_programs():
    nodes = [MadeUpNode(host="here", cores=2, cpus=(0, 1), others=1.0) for _ in range(2)]
    found = MadeUpRun(*nodes, end_s=10.0).finished()
    assert [line["others_cores"] for line in found.section["nodes"]] == [0.0, 0.0]
    apart = MadeUpRun(*(MadeUpNode(cores=2, cpus=(0, 1), others=1.0) for _ in range(2)), end_s=10.0).finished()
    assert [line["others_cores"] for line in apart.section["nodes"]] == [pytest.approx(1.0), pytest.approx(1.0)]
    shares = apart.core_shares(10.0)
    assert sum(shares[f"{what}_s"] for what in ("busy", "others", "stolen", "idle")) == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        pytest.param(MadeUpNode(ready_at=30.0), {"starting": 0.3, "working": 0.7}, id="a late start"),
        pytest.param(MadeUpNode(idle_from=80.0), {"tail": 0.2, "working": 0.8}, id="out of work at the end"),
        pytest.param(MadeUpNode(starved=0.25), {"starved": 0.25, "working": 0.75}, id="waiting for units"),
        pytest.param(MadeUpNode(with_records=0.5), {"records": 0.5, "working": 0.5}, id="waiting with records"),
        pytest.param(MadeUpNode(dies_at=60.0), {"gone": 0.4, "working": 0.6}, id="dead before the end"),
    ],
)
def test_each_moment_of_a_node_is_spent_in_one_way(node, expected):
    found = MadeUpRun(node, end_s=100.0).finished().section["time"]
    assert sum(found.values()) == pytest.approx(1.0)
    assert found == pytest.approx({**dict.fromkeys(TIMES, 0.0), **expected}, abs=0.025)


def test_what_is_waited_for_records_once_all_units_are_done_is_no_tail():
    run = MadeUpRun(MadeUpNode(idle_from=50.0), MadeUpNode(idle_from=60.0), end_s=100.0)
    run.figures.progress(0, total=110, unit="games")
    found = run.finished().section
    assert found["time"]["records"] == pytest.approx(0.4, abs=0.02)
    assert found["time"]["tail"] == pytest.approx(0.05, abs=0.02)
    assert found["tail_s"] == pytest.approx(10.0, abs=1.0)


def test_the_tail_costs_what_the_run_would_have_been_shorter():
    """Of four nodes three have nothing left to do for the last 40 s: the fourth has 10 s of work for all four."""
    nodes = [MadeUpNode(idle_from=None if index == 0 else 60.0) for index in range(4)]
    found = MadeUpRun(*nodes, end_s=100.0).finished().section
    assert found["tail_s"] == pytest.approx(40.0)
    assert found["tail_cost_s"] == pytest.approx(30.0, abs=1.5)


def test_nothing_is_counted_of_the_time_after_the_end():
    run = MadeUpRun(MadeUpNode(), MadeUpNode(idle_from=50.0), end_s=60.0)
    before = run.finished().section
    run.now = 90.0
    run.figures.heard(0, a_report(done=60, idle_s=30.0, starved_s=30.0), 90.0)
    run.figures.gone(0, 90.0)
    after = run.state().section
    assert (after["time"], after["wall_s"], after["tail_s"]) == (before["time"], before["wall_s"], before["tail_s"])


def test_lines_are_of_the_middle_of_the_others():
    lines = MadeUpRun(*(MadeUpNode(speed=speed) for speed in (1.0, 1.0, 0.4, 2.0)), end_s=50.0).finished().section
    assert [round(line["relative"], 1) for line in lines["nodes"]] == [1.0, 1.0, 0.4, 2.0]
    assert lines["slowest"] == "2"
    alone = MadeUpRun(MadeUpNode(), end_s=10.0).finished().section
    assert (alone["slowest"], alone["nodes"][0]["relative"]) == (None, None)


def test_a_thousand_nodes_are_added_up_within_moments():
    """By the operations that it takes: each node's counters are read once a report, however often they are added up."""
    run = MadeUpRun(*(MadeUpNode() for _ in range(1000)), end_s=2.0).go_on()
    read = [account.own_snapshot() for account in run.figures.accounts.values()]
    run.figures.snapshot(run.now)
    assert all(one is account.own_snapshot() for one, account in zip(read, run.figures.accounts.values(), strict=True))
    assert run.figures.snapshot(run.now).requests == merge_snapshots(read).requests


def test_a_node_that_waits_for_units_while_some_are_under_way_is_starved_by_its_empty_places(monkeypatch):
    """Of four places three are empty for 8 s, and all of them for 2 s: it has lost 8 of the 10 s that it waited."""
    now = 0.0
    monkeypatch.setattr("gpuinfer.cluster.node_feed.time.monotonic", lambda: now)

    async def follow():
        nonlocal now
        feed = NodeFeed()
        feed.add([WorkRange(0, 4)])
        await feed.take(4)
        for number in range(3):
            feed.done(number, b"")
        waiting = asyncio.create_task(feed.take(4))
        await asyncio.sleep(0)
        now = 8.0
        feed.done(3, b"")
        now = 10.0
        found = feed.idle_s, feed.empty_s
        feed.add([WorkRange(4, 5)])
        await waiting
        return found, feed.starved_s, feed.empty_s

    assert asyncio.run(follow()) == ((10.0, pytest.approx(8.0)), pytest.approx(8.0), 0.0)
