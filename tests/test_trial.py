"""An advice tried before it is given: on a load and a stand-in whose right answer is known, and in words."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

from gpuinfer.api import Setup
from gpuinfer.cli import workload
from gpuinfer.cli.app import run as gpuinfer
from gpuinfer.cli.building import build, merge
from gpuinfer.cli.screen.display import Display
from gpuinfer.cli.screen.final_panel import panel_rows, trial_rows
from gpuinfer.config import registry
from gpuinfer.config.options import OptionChange
from gpuinfer.errors import WorkError
from gpuinfer.lab.bench import advice_trial as turns
from gpuinfer.lab.bench.advice_trial import AdviceTrial, TrialPlan, plan_trial
from gpuinfer.report.report import schema
from gpuinfer.report.verdict import TriedAdvice, after, to_try

pytestmark = pytest.mark.usefixtures("empty_folder")

LOAD = ["load", "--backend", "standin", "--clients", "16"]
STANDIN = ("alpha=0", "beta=20ms", "max_rows=1")  # one row each 20 ms, and more would cost nothing
PLAN = TrialPlan(pairs=2, seconds=0.4, most_s=250.0)  # on a busy machine nothing may be answered in 0.1 s


def settings(*options, **values):
    return merge("load", {"backend": "standin", "clients": "16", "backend_options": list(options), **values})


def ways(merged, change):
    """The load as it is and with a change, as a trial builds them."""
    made = build("load", merged).workload
    report = a_report(change=change.plain())
    found = workload.trial_ahead(report, made, merged, 0.0)
    assert found is not None, report["bottleneck"]["not_tried"]
    return found


def a_report(wall_s=600.0, change=None, **more):
    change = {"flag": "-B", "name": "max_rows", "value": 16} if change is None else change
    advice = {"advice": "Allow larger batches.", "change": change, "command": "gpuinfer load -B max_rows=16"}
    gain, untried = {"low": 1.8, "high": 2.2, "expected": 2.0}, {"trial": None, "not_tried": None}
    verdict = {"class": "batch cap too small", "why": "It is small.", "gain": gain, "bounds": {}}
    run = {"workload": "load", "status": "done", "setup_s": 1.0, "wall_s": wall_s, "latency_s": {"mean": 0.01}}
    run |= {"queue_wait_s": {}, "batches": {"slots": None}, "roofline": None}
    return {**run, "bottleneck": {**verdict, **advice, **untried}, **more}


JUDGED = {**a_report()["bottleneck"], "healthy": False, "station": "forward", "share": 0.5, "unexplained": 0.0}


def test_a_change_that_helps_is_measured_in_turns_beside_the_setting_in_force():
    found = ways(settings(*STANDIN, trial=True), OptionChange("-B", "max_rows", 16))
    series = AdviceTrial(found.present, found.changed, PLAN)
    measured, _, _ = series.run()  # the interval of two short pairs on a busy machine may be anything
    assert (series.done, series.pairs) == (4, 2)
    assert measured > 1.5  # sixteen times as many rows in the same time


def test_options_that_go_with_the_old_value_alone_are_left_out_of_both_command_and_trial():
    given = ["parallel=pipeline", "stages=2", "split_points=1", "max_rows=64"]
    change = OptionChange("-B", "parallel", "data", without=("stages", "split_points", "micro_batch_rows", "layers"))
    found = ways(settings(*given, backend="inprocess", trial=True), change)
    present, changed = found.present().backend.options, found.changed().backend.options
    assert (present.parallel, present.stages, present.max_rows) == ("pipeline", 2, 64)
    assert (changed.parallel, changed.stages, changed.split_points, changed.max_rows) == ("data", "auto", None, 64)
    command = "gpuinfer load -B stages=2 --clients 3 -B split-points=1 -B parallel=pipeline"
    assert change.in_command(command) == "gpuinfer load --clients 3 -B parallel=data"
    assert OptionChange(**change.plain()) == replace(change, without=list(change.without))


def test_when_time_runs_out_the_pairs_that_are_there_must_do(monkeypatch):
    rates = iter([100.0, 150.0, 150.0, 100.0, 100.0])

    def turn(self, build):
        if (rate := next(rates, None)) is None:
            raise TimeoutError
        return rate

    monkeypatch.setattr(AdviceTrial, "_turn", turn)
    series = AdviceTrial(None, None, TrialPlan(4, 1.0, 60.0))
    assert series.run()[0] == pytest.approx(1.5)
    assert series.pairs == 2


def test_a_trial_never_outlasts_its_time_nor_do_its_processes():
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
    worker.start()
    found = ways(settings(*STANDIN, trial=True), OptionChange("-B", "max_rows", 16))
    with pytest.raises(WorkError, match="took too long"):
        AdviceTrial(found.present, found.changed, TrialPlan(2, 1000.0, 0.2)).run()
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("report", "start_s", "pairs"),
    [
        (a_report(10.0), 0.0, None),
        (a_report(60.0), 0.0, 2),
        (a_report(60.0), 4.0, None),  # each start takes long
        (a_report(600.0), 4.0, 4),
        (a_report(60.0, latency_s={"mean": 1.0}), 0.0, None),  # an answer takes long
        (a_report(60.0, latency_s={"mean": 9.0}, queue_wait_s={"mean": 8.99}), 0.0, 2),  # it waits for long
    ],
)
def test_a_trial_takes_its_share_of_the_runs_time_and_no_more(report, start_s, pairs):
    trial_plan = plan_trial(report, start_s)
    assert (trial_plan and trial_plan.pairs) == pairs
    if trial_plan is not None:
        least_s = 2 * trial_plan.pairs * (trial_plan.seconds + start_s)
        assert least_s < trial_plan.about_s < trial_plan.most_s == turns.SHARE * report["wall_s"]


@pytest.mark.parametrize(
    "phases",
    [
        [("starting", 0.1), ("measuring the roofline", 7.0), ("starting the workers", 8.0)],
        [("starting", 0.1), ("starting the workers", 2.0), ("measuring the roofline", 8.9)],
    ],
)
def test_how_long_a_start_takes_leaves_the_roofline_out(phases):
    starting = workload.Starting()
    for phase, setup_s in phases:
        starting.look(SimpleNamespace(elapsed_s=0.0, phase=phase, setup_s=setup_s))
    assert starting.seconds({"setup_s": 9.0}) == pytest.approx(2.1)


def test_a_load_from_outside_is_answered_as_fast_as_it_comes_and_is_not_tried():
    report = a_report()
    assert to_try(report) is not None
    report["bottleneck"]["bounds"] = {"arrival": 100.0}
    assert to_try(report) is None


@pytest.mark.parametrize(
    ("asked", "terminal", "quiet", "tries"),
    [
        (None, True, False, True),
        (None, False, False, False),
        (None, True, True, False),
        (True, False, True, True),
        (False, True, False, False),
    ],
)
def test_an_advice_is_tried(monkeypatch, asked, terminal, quiet, tries):
    monkeypatch.setattr(workload, "_watched", lambda: terminal)
    assert workload.wants_trial(settings(trial=asked, quiet=quiet or None).common) is tries


def text_of(lines):
    return "\n".join(f"{line.name}: {line.text}" for line in lines)


SLOWER = "-B max_rows=16: slower, 0.28 times as fast (0.26 to 0.31). Nothing simple to change."


@pytest.mark.parametrize(
    ("ends", "given", "words"),
    [
        ((1.42, 1.31, 1.55), True, "1.42 times as fast (1.31 to 1.55), 8 turns of 4 s."),
        ((1.0, 0.97, 1.03), False, "-B max_rows=16: no faster (0.97 to 1.03). Nothing simple to change."),
        ((0.28, 0.26, 0.31), False, SLOWER),
        ((1.2, 0.8, 1.8), True, "1.20 times as fast (0.80 to 1.80), 8 turns of 4 s. No clear answer: what the advice "
         "brings stays a prediction."),
    ],
)  # fmt: skip
def test_after_a_trial_the_verdict_advises_what_has_helped_and_says_what_was_measured(ends, given, words):
    found = after(a_report()["bottleneck"], TriedAdvice(*ends, 4.0, 8, "gpuinfer load -B max_rows=16"))
    assert found["advice"] == ("Allow larger batches." if given else f"Tried {words}")
    assert (found["command"] is not None, found["change"] is not None) == (given, given)
    assert (found["class"], found["trial"]["command"]) == ("batch cap too small", "gpuinfer load -B max_rows=16")
    assert f"tried: {words}" in text_of(trial_rows(found))
    if ends[1] > 1:
        assert f"Allow larger batches. Tried: {words}" in text_of(panel_rows({**a_report(), "bottleneck": found}))


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyboardInterrupt(), "it was skipped"),
        (WorkError("no room for so many rows."), "no room for so many rows"),
        (ZeroDivisionError(), "ZeroDivisionError"),
    ],
)
def test_whatever_ends_a_trial_the_report_stays_and_says_so(monkeypatch, raised, said):
    def run(self):
        raise raised

    monkeypatch.setattr(AdviceTrial, "run", run)
    ahead = workload.Ahead(OptionChange("-B", "max_rows", 16), lambda: None, lambda: None, PLAN)
    found = workload.trial_report(a_report(), ahead, Display("load", live=False))["bottleneck"]
    assert found == {**a_report()["bottleneck"], "not_tried": said}
    untried = {**a_report(), "bottleneck": found}
    assert f"Predicted, not tried ({said}): 2.0 times as fast (1.8 to 2.2)." in text_of(panel_rows(untried))
    assert text_of(trial_rows(found)) == f"not tried: {said}. What the advice brings stays a prediction."


def test_ctrl_c_ends_a_trial_in_the_midst_of_a_turn_and_its_processes_at_once():
    found = ways(settings(*STANDIN, trial=True), OptionChange("-B", "max_rows", 16))
    looks, worker = [], multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
    worker.start()

    def interrupt(done):
        looks.append(done)
        if len(looks) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        AdviceTrial(found.present, found.changed, TrialPlan(2, 1000.0, 1000.0), watch=interrupt).run()
    assert set(looks) == {0}
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.thorough
def test_a_command_tries_its_advice_and_writes_what_it_measured(monkeypatch, capsys):
    """The whole way, of a run that is far too short for it: a thousand times its length may be spent on trying, since a
    busy machine takes seconds to start a turn, and a turn is long enough for an answer on one.
    """
    for name, value in (("SHARE", 1000.0), ("LEAST_S", 0.4), ("LONGEST_S", 0.4), ("PAIRS", (2,))):
        monkeypatch.setattr(turns, name, value)
    monkeypatch.setattr("gpuinfer.report.report.judge", lambda run: JUDGED)
    given = [word for option in STANDIN for word in ("-B", option)]
    assert gpuinfer([*LOAD, *given, "--duration", "0.3", "--trial", "--json", "r.json"]) == 0
    report = json.loads(Path("r.json").read_text())
    jsonschema.validate(report, schema())
    assert report["bottleneck"]["trial"]["turns"] == 4
    assert report["bottleneck"]["trial"]["measured"] > 1.5
    told = capsys.readouterr()
    assert "times as fast" in told.out.rpartition("Trying it now")[2]
    assert "trying -B max_rows=16 …" in told.err


def test_a_report_is_on_the_disk_before_its_advice_is_tried(monkeypatch):
    kept = []
    monkeypatch.setattr("gpuinfer.report.report.judge", lambda run: JUDGED)
    monkeypatch.setattr(turns, "SHARE", 1000.0)
    monkeypatch.setattr(
        AdviceTrial, "run", lambda self: kept.append(json.loads(Path("r.json").read_text())) or (1, 1, 1)
    )
    assert gpuinfer([*LOAD, "--duration", "0.1", "--trial", "--json", "r.json"]) == 0
    assert [report["bottleneck"]["trial"] for report in kept] == [None]
    assert json.loads(Path("r.json").read_text())["bottleneck"]["command"] is None  # it was no faster


def test_without_a_terminal_nothing_is_tried_unless_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("gpuinfer.report.report.judge", lambda run: JUDGED)
    monkeypatch.setattr(AdviceTrial, "run", lambda self: pytest.fail("it was tried"))
    assert gpuinfer([*LOAD, "--duration", "0.1", "--json", "r.json"]) == 0
    told = json.loads(Path("r.json").read_text())["bottleneck"]
    assert (told["trial"], told["not_tried"]) == (None, None)
    assert "Predicted, not tried: 2.0 times as fast" in capsys.readouterr().out


def test_what_workloads_try_writes_nothing_and_never_ends(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    setup = Setup()
    load = registry.load("workloads", "load")
    assert load(clients=3, requests=5).trial(setup).options.duration > 1e6
    assert load(rate=100.0).trial(setup) is None
    play = registry.load("workloads", "selfplay")(games=40, out=tmp_path / "records", workers=1).trial(setup, workers=2)
    assert (play.options.out, play.options.resume, play.processes) == (None, False, 2)
    assert play.slots(SimpleNamespace(roofline=None), 2, 40) == 20  # as many in flight as the run of 40 had
    generate = registry.load("workloads", "generate")
    own = {"model": "tiny", "input": str(tmp_path / "prompts.jsonl"), "output": str(tmp_path / "out.jsonl")}
    copy = generate(**own).trial(setup, batch_size=16)
    assert (copy.options.output, copy.options.batch_size) == (os.devnull, 16)
    assert generate(**{**own, "input": "-"}).trial(setup) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "prompts.jsonl"]
