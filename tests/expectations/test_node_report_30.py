"""What people expect to see of a run over many nodes: one live view, one report and one verdict of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jsonschema
import psutil
import pytest
from cluster.made_up_nodes import ROWS, MadeUpNode, MadeUpRun
from cluster.numbers_workload import install
from rich.console import Console

from gpuinfer.api import Progress, Setup
from gpuinfer.cli.screen import display, live_view
from gpuinfer.cli.screen.live_view import ViewLines
from gpuinfer.cluster.cluster_backend import ClusterBackend
from gpuinfer.cluster.node_report import NodeReport
from gpuinfer.config import registry
from gpuinfer.report import causes_cluster
from gpuinfer.report.cluster_forecast import ClusterForecast
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.report import schema
from gpuinfer.runtime.run import RunUpdate, execute
from gpuinfer.testing.workloads import Workload

WAIT_S = 180.0


def shown(run: MadeUpRun, width: int, height: int) -> str:
    """The live view as it stands after half a minute."""
    run.go_on(30.0)
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(display.frame(an_update(run), {"games": 12.0, "rows": 1200.0}, "selfplay", width, height))
    return console.file.getvalue()


def an_update(run: MadeUpRun) -> RunUpdate:
    state = run.state()
    snapshot = replace(run.figures.snapshot(run.now), cluster=state)
    progress = run.figures.progress(100, total=5000, unit="games")
    return RunUpdate(progress, snapshot, run.now, 1.0, "running", state.roofline, state.core_shares(run.now))


def panel(report: dict, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(display.result_panel(report))
    return " ".join(console.file.getvalue().replace("│", " ").split())


# One live view


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
@pytest.mark.parametrize("count", [1, 8, 64, 1000])
def test_the_live_view_has_a_table_of_nodes_that_fits(count, width, height):
    nodes = [MadeUpNode(speed=0.4 if index == count // 2 else 1.0) for index in range(count)]
    lines = shown(MadeUpRun(*nodes), width, height).splitlines()
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    assert any("node" in line and "games" in line and "host" in line for line in lines)
    assert any(f"host{count // 2}" in line and "working" in line for line in lines)


def test_of_many_nodes_it_shows_those_in_trouble_and_the_slowest_and_sums_up_the_rest():
    nodes = [
        MadeUpNode(speed=0.5 if index == 40 else 1.0, dies_at=20.0 if index == 50 else None) for index in range(64)
    ]
    text = shown(MadeUpRun(*nodes), 120, 40)
    order = [line.split()[1] for line in text.splitlines() if "host" in line and "node" not in line]
    assert order[:2] == ["50", "40"]
    assert "63 working, 1 lost" in text
    assert "not shown" in text
    assert "slowest: node 40, 0.50 of the others" in text


def test_a_plain_line_says_how_many_nodes_work_and_which_is_slowest():
    run = MadeUpRun(MadeUpNode(), MadeUpNode(speed=0.3), MadeUpNode(ready_at=60.0)).go_on(30.0)
    line = ViewLines().due(an_update(run), {"games": 12.0})
    assert "2 of 3 nodes" in line
    assert "slowest: node 1, 0.30 of the others" in line


def test_rates_stations_cores_and_the_roofline_are_those_of_all_nodes():
    update = an_update(MadeUpRun(*(MadeUpNode(roofline=150.0) for _ in range(4))).go_on(30.0))
    assert update.snapshot.rows == 4 * 30 * ROWS
    assert update.roofline.rows_per_s == 600.0
    assert update.cores["count"] == 16
    assert len(update.snapshot.lanes) == 8
    parts = [update.cores[name] for name in ("busy_s", "others_s", "stolen_s", "idle_s")]
    assert sum(parts) == pytest.approx(30.0 * 16)


# One run: counters of the nodes go the way of any run's


class Followed(Workload):
    """Stands in for the coordinator: reports of nodes come in, one a step."""

    figures = None
    reports: tuple = ()

    async def run(self, infer):
        await infer.ready()
        yield Progress(0, setup=True)
        kept: dict[int, int] = {}
        for now, (number, report) in enumerate(self.reports):
            self.figures.heard(number, report, float(now))
            self.figures.kept(number, report.done - kept.get(number, 0))
            kept[number] = report.done
            yield self.figures.progress(5, total=10, unit="games")
            await asyncio.sleep(0.05)
        self.figures.ended(float(len(self.reports)))
        yield self.figures.progress(10, total=10, unit="games")


def test_the_coordinators_run_has_view_figures_and_report_of_all_nodes():
    made = MadeUpRun(MadeUpNode(), MadeUpNode(), MadeUpNode(ready_at=100.0))
    workload, updates, points = Followed(), [], []
    workload.figures = made.figures
    beginning = [(number, NodeReport(setup=False, elapsed_s=0.1)) for number in range(2)]
    workload.reports = (
        *beginning,
        *((number, MadeUpNode().report(float(second))) for second in (5, 9) for number in range(2)),
    )
    backend = ClusterBackend(Setup(), made.figures)
    strategy = registry.load("strategies", "dynamic")(Setup())
    settings = {"workload": "selfplay", "backend": "inprocess", "strategy": "dynamic"}
    report = asyncio.run(
        execute(
            workload, backend, strategy, settings=settings, on_update=updates.append, update_s=0.01,
            on_figures=lambda step, figures: points.append(figures),
        )
    )  # fmt: skip
    jsonschema.validate(report, schema())
    assert report["batches"]["rows_mean"] == ROWS
    assert report["throughput"]["rows_per_s"] * report["wall_s"] == pytest.approx(18 * ROWS)
    assert sum(report["time_s"].values()) == pytest.approx(report["lanes"] * report["wall_s"])
    assert [line["units"] for line in report["cluster"]["nodes"]] == [9, 9, 0]
    assert any(update.snapshot.cluster is not None for update in updates)
    assert any("batch/rows" in figures for figures in points)


# One report


def test_the_report_has_a_line_a_node_and_what_became_of_ranges_records_and_time():
    nodes = [
        MadeUpNode(roofline=200.0),
        MadeUpNode(through_folder=True),
        MadeUpNode(dies_at=50.0),
        MadeUpNode(idle_from=90.0),
    ]
    report = MadeUpRun(*nodes).report()
    jsonschema.validate(report, schema())
    found = report["cluster"]
    assert [line["state"] for line in found["nodes"]] == ["working", "working", "lost", "working"]
    assert found["nodes"][2]["why"] == "killed by signal 9"
    assert found["nodes"][0]["efficiency"] == pytest.approx(0.5, rel=0.03)
    assert [line["records"] for line in found["nodes"]] == ["wire", "folder", "wire", "wire"]
    assert found["ranges"]["count"] > 0
    assert found["tail_s"] == pytest.approx(10.0)
    assert 0.2 < found["records"]["through_folder"] < 0.4
    assert found["coordinator"]["cpu_share"] == pytest.approx(0.02)
    assert sum(found["time"].values()) == pytest.approx(1.0)


def test_the_panel_says_how_the_nodes_did_and_what_twice_as_many_would_bring():
    text = panel(MadeUpRun(*(MadeUpNode(speed=0.5 if index == 2 else 1.0) for index in range(4))).report())
    assert "nodes 4 on 4 hosts: 99% working, 1% starting" in text
    assert "node 2 (host2): 50 games" in text
    assert "twice as many predicted, 8 nodes: 2.0 times as fast" in text


def test_a_report_without_nodes_has_no_such_section():
    report = MadeUpRun(MadeUpNode()).report()
    assert "nodes" not in panel({**report, "cluster": None}).split("bottleneck")[0]


# One verdict


@pytest.mark.parametrize(
    ("run", "kind", "said"),
    [
        pytest.param(
            MadeUpRun(*(MadeUpNode(with_records=0.3, sending_s=2.0, through_folder=True) for _ in range(4))),
            "waiting for the folder", "for their records to be taken 30% of their time, and", id="a slow folder",
        ),
        pytest.param(
            MadeUpRun(*(MadeUpNode(with_records=0.3) for _ in range(4))),
            "waiting for the coordinator", "a range took 10 ms to be taken over the wire", id="a slow wire",
        ),
        pytest.param(
            MadeUpRun(*(MadeUpNode(starved=0.4) for _ in range(4)), coordinator=0.96),
            "coordinator saturated", "loop was busy 96% of it", id="a coordinator at its end",
        ),
        pytest.param(
            MadeUpRun(*(MadeUpNode() for _ in range(5)), MadeUpNode(speed=0.4, others=2.4), MadeUpNode()),
            "slow node", "Node 5 (host5) is slow: 0.4 of the others: other programs have 2.4 of its 4 cores", id="slow",
        ),
        pytest.param(
            MadeUpRun(*(MadeUpNode(dies_at=50.0 if index else None) for index in range(3))),
            "lost nodes", "34% of the nodes' time was missing", id="nodes that died",
        ),
        pytest.param(
            MadeUpRun(*(MadeUpNode(ready_at=12.0) for _ in range(8)), end_s=20.0, range_s=1.0),
            "too many nodes", "8 nodes for 64 games", id="far too many nodes",
        ),
        pytest.param(
            MadeUpRun(*(MadeUpNode(idle_from=60.0 if index else None) for index in range(4)), range_s=40.0),
            "ranges too large", "a range of 10 games took 40 s", id="ranges as long as the tail",
        ),
        pytest.param(
            MadeUpRun(*(MadeUpNode() for _ in range(4))),
            "search-bound", "Node 1, in the middle of 4 by its speed: The workers were busy", id="nodes that only work",
        ),
    ],
)  # fmt: skip
def test_the_verdict_names_what_holds_the_nodes_back(run, kind, said):
    bottleneck = run.report(selfplay={"workers": 4})["bottleneck"]
    assert bottleneck["class"] == kind, bottleneck
    assert said in bottleneck["why"]
    assert bottleneck["advice"]


def test_too_many_nodes_come_with_the_number_that_would_have_been_right_as_a_command():
    """Each needs 12 s to start, and all of the work is 64 s: seven nodes need 21 s, and one 76 s."""
    bottleneck = MadeUpRun(*(MadeUpNode(ready_at=12.0) for _ in range(8)), end_s=20.0, range_s=1.0).report()[
        "bottleneck"
    ]
    assert bottleneck["change"] == {"flag": "-L", "name": "nodes", "value": 7}
    assert bottleneck["command"] == "gpuinfer selfplay --games 1000 --launcher local -L nodes=7"
    assert "7 nodes would have taken 21" in bottleneck["why"]


@pytest.mark.parametrize(
    ("node", "shared_s", "faster"),
    [
        pytest.param({}, 0.0, 2.0, id="nothing but work"),
        pytest.param({"ready_at": 20.0}, 20.0, 1.67, id="a start of a fifth"),
        pytest.param({"with_records": 0.4, "sending_s": 1.0}, None, 1.0, id="a folder that can take no more"),
        pytest.param({"starved": 0.4}, None, 1.0, id="units that come no faster"),
    ],
)
def test_what_twice_as_many_would_bring_is_predicted(node, shared_s, faster):
    """`shared_s`: seconds that each node needs however many there are. The run of twice as many is made up as well."""
    now = MadeUpRun(*(MadeUpNode(**node) for _ in range(4)), end_s=100.0).finished().section
    assert now["twice"]["nodes"] == 8
    assert now["twice"]["factor"] == pytest.approx(faster, rel=0.05)
    if shared_s is not None:
        then_s = shared_s + (100.0 - shared_s) / 2
        then = MadeUpRun(*(MadeUpNode(**node) for _ in range(8)), end_s=then_s).finished().section
        done = [sum(line["units"] for line in found["nodes"]) for found in (now, then)]
        assert done[1] == pytest.approx(done[0], rel=0.03)
        assert now["twice"]["wall_s"] == pytest.approx(then["wall_s"], rel=0.05)


def test_a_busy_coordinator_bounds_what_more_nodes_bring():
    found = MadeUpRun(*(MadeUpNode() for _ in range(4)), coordinator=0.7).finished().section["twice"]
    assert found["factor"] == pytest.approx(1 / 0.7, rel=0.05)
    assert "the coordinator needs" in found["why"]


# Real nodes


@pytest.fixture
def numbers(tmp_path):
    """Runs the tests' workload over real nodes; returns its report. `during` is called with the node processes."""
    path = install(tmp_path / "package")
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}

    def run(*words: object, nodes: int = 2, during=None) -> dict:
        report = tmp_path / "report.json"
        line = [
            *(sys.executable, "-m", "gpuinfer", "numbers", "--out", str(tmp_path / "out"), "--json", str(report)),
            *("--launcher", "local", "-L", f"nodes={nodes}", "--nodes-min", str(nodes), *map(str, words)),
        ]
        with subprocess.Popen(line, env=own, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                if during is not None:
                    during(process)
                said, _ = process.communicate(timeout=WAIT_S)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, said.decode()
        return json.loads(report.read_text())

    return run


def node_processes(process: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--key-file" in one.cmdline():
                found.append(one)
    return sorted(found, key=lambda one: one.pid)


def test_two_real_nodes_are_reported_as_one_run(numbers):
    report = numbers("--total", 400, "--seconds", 0.005)
    jsonschema.validate(report, schema())
    found = report["cluster"]
    assert sum(line["units"] for line in found["nodes"]) == 400
    assert [line["node"] for line in found["nodes"]] == ["0", "1"]
    assert sum(found["time"].values()) == pytest.approx(1.0)
    assert found["ranges"]["count"] > 0
    assert found["records"]["bytes"] == sum(len(f"{number}\n") for number in range(400))


@pytest.mark.system
def test_a_real_node_that_is_slowed_is_named(numbers, tmp_path):
    """It is suspended for four fifths of the time, from when there are first records on."""
    over = threading.Event()

    def slow_down(process):
        until = time.monotonic() + WAIT_S
        while len(nodes := node_processes(process)) < 3 or not list(tmp_path.glob("out/*.part")):
            assert time.monotonic() < until
            time.sleep(0.05)

        def take_turns():
            with contextlib.suppress(ProcessLookupError):
                while not over.is_set():
                    os.kill(nodes[1].pid, signal.SIGSTOP)
                    over.wait(0.8)
                    os.kill(nodes[1].pid, signal.SIGCONT)
                    over.wait(0.2)

        threading.Thread(target=take_turns, daemon=True).start()

    try:
        report = numbers("--total", 8000, "--seconds", 0.02, nodes=3, during=slow_down)
    finally:
        over.set()
    slowest = report["cluster"]["slowest"]
    line = next(line for line in report["cluster"]["nodes"] if line["node"] == slowest)
    assert line["relative"] < 0.7
    assert report["bottleneck"]["class"] == "slow node"
    assert f"Node {slowest} (" in report["bottleneck"]["why"]


@pytest.mark.system
def test_far_too_many_real_nodes_are_called_so(numbers):
    report = numbers("--total", 24, "--seconds", 0.2, "--parallel", 1, nodes=4)
    assert report["bottleneck"]["class"] in ("too many nodes", "ranges too large"), report["bottleneck"]
    assert report["bottleneck"]["change"]["value"] < 4


@pytest.mark.system
def test_a_real_folder_that_is_slow_is_named(numbers):
    report = numbers("--total", 600, "--seconds", 0.005, "--keep-s", 1.5)
    assert report["bottleneck"]["class"] == "waiting for the folder", report["bottleneck"]
    assert report["cluster"]["coordinator"]["keeping_share"] > 0.5


# What people found wrong


def test_too_many_nodes_are_named_only_where_fewer_are_nearly_as_quick_and_not_of_a_run_that_was_stopped():
    found = MadeUpRun(*(MadeUpNode(ready_at=12.0) for _ in range(8)), end_s=20.0, range_s=1.0).finished().section
    forecast = ClusterForecast.of(found)
    right = forecast.right_nodes()
    assert forecast.seconds(right) <= 1.1 * forecast.seconds(8) < forecast.seconds(right - 1)
    two = MadeUpRun(*(MadeUpNode(ready_at=2.0) for _ in range(2)), end_s=7.0, range_s=1.0).finished().section
    assert causes_cluster.dearest(Evidence(cluster=two)) is None  # one node would need 12 s
    assert causes_cluster.dearest(Evidence(cluster=found)).kind == "too many nodes"
    assert causes_cluster.dearest(Evidence(cluster=found, stopped=True)) is None


def test_a_node_is_gone_from_its_last_word_on_and_was_lost_not_slow():
    """It hangs at 10 s, is given up at 40 s, and started again; its threads were ready to run and not running."""
    run = MadeUpRun(MadeUpNode(), MadeUpNode(waited=0.9), end_s=10.0).go_on()
    machine = run.figures.accounts["1"].machine
    run.figures.gone(1, 40.0, "no word from it for 30 s", lost=True)
    run.figures.joined(7, machine, 41.0, index=1)
    for second in range(11, 51):
        run.figures.heard(0, MadeUpNode().report(float(second)), float(second))
        if second > 41:
            run.figures.heard(7, MadeUpNode().report(second - 41.0), float(second))
        run.figures.snapshot(float(second))
    run.now = run.end_s = 50.0
    section = run.finished().section
    assert section["time"]["gone"] == pytest.approx(31.0 / 100, abs=0.01)
    assert causes_cluster.dearest(Evidence(cluster=section)).kind == "lost nodes"


def test_a_node_that_was_silent_at_the_end_counts_as_gone_before_it_is_given_up():
    run = MadeUpRun(MadeUpNode(), MadeUpNode(), end_s=10.0).go_on()
    for second in range(11, 31):
        run.figures.heard(0, MadeUpNode().report(float(second)), float(second))
    run.now = run.end_s = 30.0
    section = run.finished().section
    assert [line["state"] for line in section["nodes"]] == ["working", "silent"]
    assert section["time"]["gone"] == pytest.approx(1 / 3, abs=0.01)


def test_units_of_a_lost_range_are_those_of_the_node_whose_records_were_kept():
    run = MadeUpRun(MadeUpNode(), MadeUpNode(), end_s=10.0).go_on()
    run.figures.heard(1, NodeReport(setup=False, done=500), 10.0)  # finished, and lost with the node
    run.figures.gone(1, 11.0, "killed by signal 9")
    run.figures.kept(1, 5)  # records that were under way
    assert [line["units"] for line in run.state().section["nodes"]] == [10, 15]


def test_twice_as_many_nodes_on_the_same_cores_bring_nothing():
    nodes = [MadeUpNode(host="here", cores=2, cpus=(0, 1), waited=0.5) for _ in range(3)]
    found = MadeUpRun(*nodes).finished().section
    assert found["wanted_cores"] > 1
    assert found["twice"]["factor"] == pytest.approx(1.0, abs=0.05)
    assert "share the cores" in found["twice"]["why"]
    assert ClusterForecast.of(found).right_nodes() < 3


def test_one_node_of_a_launcher_that_starts_nodes_here_alone_would_share_its_cores_with_a_second():
    run = MadeUpRun(MadeUpNode(host="here", cores=2, cpus=(0, 1)))
    run.figures.one_host = True
    assert run.finished().section["twice"]["factor"] == pytest.approx(1.0, abs=0.05)


def test_where_no_node_is_left_there_is_no_time_left_to_show():
    run = MadeUpRun(MadeUpNode(), MadeUpNode(), end_s=20.0).go_on()
    assert live_view.left_of(an_update(run))
    for number in range(2):
        run.figures.gone(number, 20.0, "killed by signal 9")
    update = an_update(run)
    assert (live_view.left_of(update), update.progress.note) == ("", "no node is there")
    assert "no node is there" in ViewLines().due(update, {})


def test_sentences_say_of_which_time_they_are():
    run = MadeUpRun(*(MadeUpNode(ready_at=12.0) for _ in range(8)), end_s=20.0, range_s=1.0)
    report = run.report()
    assert "from the first node's joining until all was kept" in report["bottleneck"]["why"]
    assert "with their start" in panel(report)


def test_times_of_cores_that_were_not_measured_are_left_out():
    report = MadeUpRun(MadeUpNode(), MadeUpNode()).report()
    report["cores"] |= {"stations": {"search": 10.0}, "waiting_s": 1.0e6}
    assert " time of " in panel(report)
    assert "waited for a core" in panel(report)
    for short in ({**report, "cores": {**report["cores"], "busy_s": 0.0}}, {**report, "wall_s": 1.0}):
        assert " time of " not in panel(short)
        assert "waited for a core" not in panel(short)


def test_advice_names_what_there_is():
    large = MadeUpRun(*(MadeUpNode(idle_from=60.0 if index else None) for index in range(4)), range_s=40.0).report()
    assert "smaller ranges" not in large["bottleneck"]["advice"]
    lost = MadeUpRun(MadeUpNode(), MadeUpNode(dies_at=50.0)).report()
    assert "start them again by hand" in lost["bottleneck"]["advice"]


def test_nodes_that_use_few_cores_gain_from_more_nodes_although_other_programs_are_busy():
    nodes = [MadeUpNode(host="here", cores=2, cpus=(0, 1), others=1.9) for _ in range(3)]
    found = MadeUpRun(*nodes).finished().section
    assert found["wanted_cores"] == pytest.approx(0.3, abs=0.05)
    assert found["twice"]["factor"] == pytest.approx(2.0, abs=0.1)
