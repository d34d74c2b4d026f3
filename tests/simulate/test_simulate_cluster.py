"""`gpuinfer simulate cluster` as people and scripts meet it, and the node that it simulates."""

from __future__ import annotations

import json

import pytest

from gpuinfer.cluster.range_policy import RangePolicy
from gpuinfer.division import WorkRange
from gpuinfer.errors import WorkError
from gpuinfer.lab.simulate.cluster_figures import memory_of
from gpuinfer.lab.simulate.simulated_cluster import ClusterOutcome, ClusterScenario, Faults, simulate_cluster
from gpuinfer.lab.simulate.simulated_node import SimulatedNode

SMALL = ("simulate", "cluster", "--rows", "200k", "--node-rate", "500", "--join", "1s")


@pytest.mark.usefixtures("empty_folder")
def test_one_number_of_nodes_shows_efficiency_memory_and_what_breaks_first(gpuinfer):
    code, out, err = gpuinfer(*SMALL, "--nodes", "20")
    assert (code, err) == (0, "")
    for said in ("efficiency", "CPU", "network", "memory", "a range", "rows on average", "breaks first"):
        assert said in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.usefixtures("empty_folder")
def test_several_numbers_of_nodes_are_a_row_each_and_the_same_again(gpuinfer):
    words = (*SMALL, "--nodes", "40,10", "--seed", "7", "--json", "-")
    code, out, err = gpuinfer(*words)
    assert (code, "2 of 2 · 40 nodes" in err) == (0, True)
    document = json.loads(out)
    assert document["schema"] == "gpuinfer.cluster-simulation/1"
    assert document["command"].startswith("gpuinfer simulate cluster --nodes 40,10")
    assert [run["nodes"] for run in document["runs"]] == [10, 40]
    again = json.loads(gpuinfer(*words)[1])
    measured = ("core_s", "core_s_per_call")
    for one, other in zip(document["runs"], again["runs"], strict=True):
        assert {key: one[key] for key in one if key not in measured} == {
            key: other[key] for key in other if key not in measured
        }
        assert 0.8 < one["efficiency"] <= 1


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes 0: not whole numbers from 1 to 100000. Write --nodes 10,100,1000."),
        (["--nodes", "many"], "--nodes many: not whole numbers"),
        (["--rows", "0"], "--rows"),
        (["--node-rate", "-1"], "--node-rate"),
    ],
)
def test_what_cannot_be_simulated_is_refused(gpuinfer, words, said):
    code, out, err = gpuinfer("simulate", "cluster", *words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_coordinator_that_cannot_keep_up_is_a_lower_efficiency():
    quick = ClusterScenario(units=50_000, nodes=50, rate=100.0, exchange_cost_s=1e-4)
    slow = ClusterScenario(units=50_000, nodes=50, rate=100.0, exchange_cost_s=0.1)
    assert simulate_cluster(slow).efficiency < 0.8 * simulate_cluster(quick).efficiency


def test_rows_that_nodes_hold_stay_within_the_bound():
    scenario = ClusterScenario(units=2_000_000, nodes=200, rate=100.0, parallel=32, item_bytes=2_000)
    bounded = simulate_cluster(scenario)
    without = simulate_cluster(scenario, RangePolicy(nodes=200, held_bytes=1e12))
    assert bounded.most_held * 2_000 < 400e6 < without.most_held * 2_000
    assert bounded.efficiency > 0.9


def test_the_records_of_a_range_have_no_more_bytes_than_the_bound():
    scenario = ClusterScenario(units=2_000, nodes=2, rate=100.0, record_bytes=1_000_000)
    assert simulate_cluster(scenario).ranges > 2_000 / 32
    assert simulate_cluster(scenario, RangePolicy(nodes=2, record_bytes=1e12)).ranges < 2_000 / 32


def test_memory_is_said_by_what_holds_it():
    scenario = ClusterScenario(units=10**8, nodes=10, rate=1.0, item_bytes=100)
    memory = memory_of(scenario, ClusterOutcome(most_held=1_000, most_intervals=5), name_bytes=12)
    assert memory["names of rows"] == 1_200_000_000
    assert memory["rows with nodes"] == 149_000


def test_a_run_that_does_not_end_is_an_error():
    with pytest.raises(WorkError, match="not over after 50 s"):
        simulate_cluster(ClusterScenario(units=1_000, nodes=1, rate=1.0, limit_s=50.0))


def test_nodes_that_die_are_replaced():
    outcome = simulate_cluster(ClusterScenario(units=20_000, nodes=4, rate=50.0, faults=Faults(deaths=1 / 30)))
    assert outcome.kept == [(0, 20_000)]
    assert outcome.computed > 20_000, "what a node had not sent is computed again"


def test_a_simulated_node_is_a_pipeline():
    node = SimulatedNode(0, rate=10.0, parallel=5, now=0.0)
    node.add(WorkRange(0, 100), 0.0)
    assert (node.on_hand(0.0), node.done(0.0)) == (99, 0)
    assert (node.on_hand(1.0), node.done(1.0)) == (89, 6)  # each takes half a second
    assert node.release(1_000, 1.0) == [(11, 100)]
    assert node.on_hand(1.0) == 0
    assert node.next_finish(1.0) == pytest.approx(1.5)
    node.stop(1.2)
    assert node.next_finish(5.0) is None
    node.go_on(11.2)
    assert node.finish(11.4) == []
    assert node.finish(11.5) == [(0, 11)]
    assert node.done(11.5) == 11
