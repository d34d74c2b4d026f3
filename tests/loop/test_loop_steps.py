"""A loop's steps: what each is asked, that none is done twice, and what becomes of those that fail."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpuinfer.cli import loop
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.lab.loop import loop_runner, loop_summary
from gpuinfer.lab.loop.loop_runner import KINDS, LoopPlan, run_loop

COMMAND = str(Path(__file__).with_name("loop_command.py"))
PLAN = LoopPlan(
    folder=Path("loop"),
    model="blobnet-small",
    iterations=3,
    games=30,
    temperature_moves=16,
    window=2,
    training_steps=20,
    batch_size=32,
    learning_rate=1e-3,
    evaluation_games=400,
    evaluate_every=2,
    seed=7,
    play=["--game=connect-four"],
    common=["--quiet"],
)


@pytest.fixture
def plan(tmp_path):
    return replace(PLAN, folder=tmp_path / "loop")


@pytest.fixture
def go(plan, tmp_path):
    """Follow the plan with commands that end this way; what all of them were asked until now."""
    journal = tmp_path / "journal"

    def run(way="done", steps=None):
        try:
            program = [sys.executable, COMMAND, str(journal), way]
            run_loop(steps or list(plan.steps()), False, lambda step: None, lambda *_: None, program)
        finally:
            go.asked = [json.loads(line) for line in journal.read_text().splitlines()]
        return go.asked

    def go(*arguments):
        return run(*arguments)

    return go


def test_each_step_is_asked_for_what_the_ones_before_it_left(plan, go):
    asked, at = go(), str(plan.folder)
    assert [one["command"] for one in asked] == ["selfplay", "train"] + 2 * ["selfplay", "train", "selfplay"]
    games, training = asked[2], asked[3]
    assert games["weights"] == f"{at}/iteration-001/training/weights.safetensors"
    assert (games["out"], games["game"], games["seed"]) == (f"{at}/iteration-002/games", "connect-four", "9")
    assert (training["weights"], training["steps"]) == (games["weights"], "20")
    match = asked[-1]
    assert match["weights"] == f"{at}/iteration-003/training/weights.safetensors"
    assert (match["opponent-weights"], match["games"], match["seed"]) == (f"{at}/first.safetensors", "400", "7")


def test_on_a_terminal_what_is_under_way_gives_place_to_what_came_of_it(capsys):
    with contextlib.suppress(KeyboardInterrupt), loop._Line(replaced=True) as line:
        line.say("games …", end="")
        line.say("games in 3 s: 12", end="\n")
        line.say("training …", end="")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "games …\r\x1b[Kgames in 3 s: 12\ntraining …\n"


def test_each_line_of_a_loop_says_how_long_the_rest_takes_once_that_is_known(plan, tmp_path, monkeypatch, capsys):
    program = [sys.executable, COMMAND, str(tmp_path / "journal"), "done"]
    monkeypatch.setattr(loop_runner.run_loop, "__defaults__", (program,))
    assert loop._follow(plan, verbose=False, quiet=False) == "done"
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"iteration 1 of 3 · games in \d+ s: 30", first)  # how long training takes is not known
    assert re.fullmatch(r"iteration 1 of 3 · training in .*: loss 2\.50 · (\d+ s|about \d+ min) left.*", second)
    assert re.fullmatch(r"iteration 3 of 3 · match in .* over the first generation", last)


def asked_with_gate(plan, tmp_path, gate, lost=()):
    """All commands of the plan, where the gates of these iterations are lost, and the others as they score: 75 %."""
    plan = replace(plan, gate=gate, gate_games=40, evaluate_every=1)
    journal = tmp_path / "journal"

    def ended(step, report, seconds):
        if step.kind == "gate" and step.iteration in lost:
            step.report.write_text(json.dumps({**report, "strength": {**report["strength"], "score": 0.4}}))

    run_loop(plan.steps(), False, lambda step: None, ended, [sys.executable, COMMAND, str(journal), "done"])
    asked = [json.loads(line) for line in journal.read_text().splitlines()]
    return plan, [{**one, "kind": Path(one["out"]).name} for one in asked]


def weights_of(plan, asked, kind, name="weights"):
    return [str(Path(one[name]).relative_to(plan.folder)) for one in asked if one["kind"] == kind]


TRAINED = [f"iteration-{number:03d}/training/weights.safetensors" for number in (1, 2, 3)]
FIRST = "first.safetensors"


@pytest.mark.parametrize(
    ("gate", "lost", "plays"),
    [
        pytest.param(0.75, [], [FIRST, *TRAINED], id="each wins"),
        pytest.param(0.76, [], [FIRST] * 4, id="none wins"),
        pytest.param(0.55, [2], [FIRST, TRAINED[0], TRAINED[0], TRAINED[2]], id="the second loses"),
        pytest.param(0.55, [1, 2], [FIRST, FIRST, FIRST, TRAINED[2]], id="the third is the first to win"),
    ],
)
def test_a_network_plays_once_it_has_won_its_gate(plan, tmp_path, gate, lost, plays):
    """`plays`: the weights that play before the first iteration and after each."""
    plan, asked = asked_with_gate(plan, tmp_path, gate, lost)
    assert [one["kind"] for one in asked] == ["games", "training", "gate", "match"] * 3
    assert weights_of(plan, asked, "games") == plays[:-1]
    assert weights_of(plan, asked, "training") == [FIRST, *TRAINED[:-1]]  # goes on from the last, whether it won or not
    assert weights_of(plan, asked, "gate") == TRAINED
    assert weights_of(plan, asked, "gate", "opponent-weights") == plays[:-1]
    assert weights_of(plan, asked, "match") == plays[1:]
    assert weights_of(plan, asked, "match", "opponent-weights") == [FIRST] * 3
    assert {(one["games"], one["noise"]) for one in asked if one["kind"] == "gate"} == {("40", "0")}
    told = loop_summary.loop_document(plan, {}, "", "done")
    assert told["weights"] == str(plan.folder / plays[-1])
    won = [one != before for before, one in itertools.pairwise(plays)]
    assert [one["gate"]["won"] for one in told["iterations"]] == won
    assert [row[-1].endswith(", won") for row in loop_summary.loop_rows(told)] == won
    assert f"| {loop_summary.GATE} |" in loop_summary.loop_page(told, {}).markdown()


def test_players_resign_in_self_play_alone(plan, tmp_path):
    plan = replace(plan, resign=0.9, resign_check=0.2)
    _, asked = asked_with_gate(plan, tmp_path, 0.5)
    told = {
        kind: {(one.get("resign"), one.get("resign-check")) for one in asked if one["kind"] == kind} for kind in KINDS
    }
    assert told == {"games": {("0.9", "0.2")}, **{kind: {(None, None)} for kind in KINDS if kind != "games"}}


def test_the_line_of_games_says_how_many_were_resigned_and_what_to_do_where_too_many_are_false(plan):
    step = next(iter(plan.steps()))
    report = {"progress": {"done": 30}, "resignation": None}
    assert loop._told(step, report, 3.0) == "games in 3 s: 30"
    found = {"games": 30, "checked": 10, "resigned": 8, "advice": None}
    assert loop._told(step, {**report, "resignation": found}, 3.0) == "games in 3 s: 30, 40% of 20 games resigned"
    found["advice"] = "Try --resign 0.95."
    assert loop._told(step, {**report, "resignation": found}, 3.0).endswith("resigned\n  Try --resign 0.95.")


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        pytest.param("fails", WorkError, "games of iteration 1 failed: the disk is full. Make room.", id="fails"),
        pytest.param("refuses", UsageError, "games of iteration 1: no game named 'blab'.", id="refuses"),
        pytest.param("dies", WorkError, "it was ended by SIGKILL", id="is killed"),
    ],
)
def test_a_step_that_fails_is_named_and_can_be_done_again(plan, go, way, error, message):
    with pytest.raises(error, match=message):
        go(way)
    assert len(go()) == 1 + len(list(plan.steps()))


def test_ctrl_c_is_passed_on_and_waited_for(plan, go, tmp_path):
    """The command is asked to stop, and ends by itself with what it keeps."""

    def interrupt():
        while not (tmp_path / "journal").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # for us to wait for it
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        go("hangs")
    thread.join()
    (one,) = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    with pytest.raises(ProcessLookupError):
        os.kill(one["pid"], 0)


def test_a_report_of_a_run_that_was_not_done_counts_for_nothing(plan, go):
    first = next(plan.steps())
    first.report.parent.mkdir(parents=True)
    for content in ("", "{}", '{"status": "partial"}', "[]"):
        first.report.write_text(content)
        assert loop_summary.loop_document(plan, {}, "", "partial")["iterations"] == []
    assert len(go()) == 8


def test_the_story_is_told_in_a_table_a_page_a_plot_and_the_loss_of_each_step(plan, go):
    go()
    told = loop_summary.loop_document(plan, {"game": "connect-four"}, "gpuinfer loop --out loop", "done")
    assert [one["loss"] for one in told["iterations"]] == [2.5, 2.5, 2.5]
    assert [bool(one["strength"]) for one in told["iterations"]] == [False, True, True]
    assert loop_summary.loop_verdict(told).startswith("After 3 iterations: 75.0 % (70.0 to 80.0) of 400 games")
    assert list(loop_summary.loop_rows(told))[1][-2:] == ("+191 Elo (+147 to +241)", "75.0%")
    for iteration in (1, 2):
        rows = [{"step": step, "loss": 3.0 / step} for step in range(1, 21)] + [{"step": 20, "validation": 0.2}]
        plan.curve(iteration).parent.mkdir(parents=True, exist_ok=True)
        plan.curve(iteration).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loop_summary.write_loop(plan, told)
    assert json.loads((plan.folder / "loop.json").read_text()) == told
    assert "| 3 | 30 | " in (plan.folder / "loop.md").read_text()
    assert "data:image/svg+xml" in (plan.folder / "loop.html").read_text()
    assert "Elo over the first generation" in (plan.folder / "loop.svg").read_text()
    steps = [json.loads(line) for line in (plan.folder / "loss.jsonl").read_text().splitlines()]
    assert [(row["iteration"], row["step"]) for row in steps if "loss" in row] == [
        (iteration, step) for iteration in (1, 2) for step in range(1, 21)
    ]


def test_a_strength_without_a_bound_is_drawn_too(plan, go):
    go()
    told = loop_summary.loop_document(plan, {}, "", "done")
    for one, ends in zip(told["iterations"], ([500.0, None], [None, -500.0], [None, None]), strict=True):
        one["strength"] = {**told["strength"], "elo": None, "elo_ci95": ends}
    assert loop_summary.loop_figure(told, {}).axes


def matches(*found):
    told = {"score": 0.5}
    return {
        "iterations": [
            {"iteration": at, "strength": None if one is None else {**told, "elo": one[1], "elo_ci95": one[::2]}}
            for at, one in enumerate(found, start=1)
        ]
    }


def test_matches_are_drawn_in_the_terminal_between_the_ends_of_all_intervals():
    (name, scale), first, third = loop_summary.strength_lines(matches((-100, 0, 100), None, (135, 235, 370)))
    assert (name, first[0], third[0]) == ("Elo", "iteration 1", "iteration 3")
    assert (scale[:4], scale[10], scale[-4:], len(scale)) == ("−100", "0", "+370", loop_summary.WIDTH)
    assert first[1] == "├─────────●─────────┤"
    assert third[1] == "          ┊             ├─────────●────────────┤"


@pytest.mark.parametrize(
    ("elo", "line"),
    [
        pytest.param((100, None, None), "          ┊         ├" + 26 * "─" + "▶", id="all won"),
        pytest.param((None, None, -50), "◀────┤    ┊", id="all lost"),
        pytest.param((None, None, None), "◀" + 46 * "─" + "▶", id="anything"),
    ],
)
def test_an_end_that_is_not_known_is_drawn_as_an_arrow(elo, line):
    assert list(loop_summary.strength_lines(matches((-100, 0, 370), elo)))[-1][1] == line
