"""`gpuinfer loop`: what is refused, what each step is asked, that none is done twice, and what fails."""

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

import psutil
import pytest
from forking import Forked, own_environment
from tracking.tracked_runs import TensorBoardRun

from gpuinfer.cli import loop
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.lab.loop import loop_runner, loop_summary
from gpuinfer.lab.loop.loop_runner import KINDS, LoopPlan, run_loop
from gpuinfer.runtime.tracking import Tracking

TINY = ["--game", "connect-four", "--games", "12", "--simulations", "4", "--training-steps", "6", "--batch-size", "16"]
WORK = [*TINY, "--iterations", "2", "--evaluation-games", "8", "--evaluate-every", "1", "--workers", "1", "--out", "l"]
WORK += ["--gate", "0.55", "--gate-games", "6"]
COMMAND = str(Path(__file__).with_name("loop_command.py"))
FIRST = "first.safetensors"
TRAINED = [f"iteration-{number:03d}/training/weights.safetensors" for number in (1, 2, 3)]
REFUSED = {
    "": "Add --out DIR.",
    "--out l --model uniform": "has nothing to learn",
    "--out l --model blobnte": "Did you mean 'blobnet'?",
    "--out l --game blab": "Did you mean 'blob'?",
    "--out l --game connect-four --cards 5": "no option 'cards'",
    "--out l --weights nowhere": "no file 'nowhere'",
    "--out l --iterations 0": "--iterations: '0' is less than 1",
    "--out l --gate 55": "--gate: '55' is more than 1",
    "--out l --gate-games 50": "Add --gate 0.55.",
    "--out l --resign 0.9": "Leave --resign out.",
    "--out l --resign-check 0.2": "Add --resign 0.9.",
    "--out a,b": "parted by commas",
    "--out l --batch-size 99999": "--batch-size: 99999 is more than 65536",
    "--out l --dtype float16": "gradients vanish",
    "--out l --itrations 3": "Did you mean '--iterations'?",
}


@pytest.mark.parametrize(("words", "message"), REFUSED.items())
def test_a_loop_that_cannot_be_is_refused_before_any_game(gpuinfer, empty_folder, words, message):
    code, out, err = gpuinfer("loop", *words.split())
    assert (code, out, message in err) == (2, "", True), err
    assert not Path("l").exists()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_loop_that_was_killed_in_any_of_its_steps_goes_on_where_it_was(tmp_path):
    """With SIGKILL, as soon as a step's folder is there."""

    def started(*words):
        return Forked(["gpuinfer", "loop", *WORK, *words], tmp_path, own_environment(COLUMNS="160"), text=True)

    def ended(*words):
        with started(*words) as process:
            out, err = process.communicate(timeout=280)
        return process.returncode, out, err

    def reports(kinds):
        """When each was written."""
        return {kind: (first / f"{kind}.json").stat().st_mtime_ns for kind in kinds}

    first, finished = tmp_path / "l" / "iteration-001", {}
    for kind in KINDS:
        with started(*(["--resume"] if kind != KINDS[0] else [])) as process:
            while not (first / kind / "manifest.json").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.communicate(timeout=60)
        assert not psutil.wait_procs(children, timeout=30)[1]  # none goes on alone
        assert reports(finished) == finished
        finished = reports(KINDS[: KINDS.index(kind)])
    code, _, err = ended()
    assert (code, "--resume" in err) == (2, True)
    code, out, err = ended("--resume", "--json", "-")
    assert code == 0, err
    document = json.loads(out)
    for number, one in enumerate(document["iterations"], 1):
        assert (one["iteration"], one["games"], one["strength"]["games"], one["gate"]["games"]) == (number, 12, 8, 6)
        assert one["loss"] > 0
    assert len(document["iterations"]) == 2
    assert reports(finished) == finished
    assert json.loads((tmp_path / "l" / "loop.json").read_text()) == document
    code, out, err = ended("--resume", "--fail-under", "1")
    assert (code, "against the first generation" in out) == (4 if document["strength"]["score"] < 1 else 0, True)
    code, _, err = ended("--resume", "--simulations", "5")
    assert (code, "simulations: 4 there, 5 here" in err) == (2, True)


@pytest.fixture
def plan(tmp_path):
    return LoopPlan(
        folder=tmp_path / "loop",
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
def follow(tmp_path):
    """Follow a plan with commands that end this way, where these iterations lose their gates: all that was asked."""
    journal = tmp_path / "journal"

    def run(plan, way="done", lost=()):
        def ended(step, report, seconds):
            if step.kind == "gate" and step.iteration in lost:
                step.report.write_text(json.dumps({**report, "strength": {**report["strength"], "score": 0.4}}))

        program = [sys.executable, COMMAND, str(journal), way]
        run_loop(plan.steps(), False, lambda step: None, ended, program)
        return [json.loads(line) for line in journal.read_text().splitlines()]

    return run


def test_each_step_is_asked_for_what_the_ones_before_it_left(plan, follow):
    for content in ("", "{}", '{"status": "partial"}', "[]"):  # no report of a run that was done
        (report := next(plan.steps()).report).parent.mkdir(parents=True, exist_ok=True)
        report.write_text(content)
        assert loop_summary.loop_document(plan, {}, "", "partial")["iterations"] == []
    asked, at = follow(plan), str(plan.folder)
    assert [one["command"] for one in asked] == ["selfplay", "train"] + 2 * ["selfplay", "train", "selfplay"]
    games, training, match = asked[2], asked[3], asked[-1]
    assert games["weights"] == training["weights"] == f"{at}/{TRAINED[0]}"
    assert (games["out"], games["game"], games["seed"]) == (f"{at}/iteration-002/games", "connect-four", "9")
    assert training["steps"] == "20"
    assert (match["weights"], match["opponent-weights"]) == (f"{at}/{TRAINED[2]}", f"{at}/{FIRST}")
    assert (match["games"], match["seed"]) == ("400", "7")


def test_each_line_of_a_loop_says_how_long_the_rest_takes_once_that_is_known(plan, tmp_path, monkeypatch, capsys):
    program = [sys.executable, COMMAND, str(tmp_path / "journal"), "done"]
    monkeypatch.setattr(loop_runner.run_loop, "__defaults__", (program,))
    with Tracking([f"tensorboard={tmp_path / 'runs'}"], "loop", {}) as tracking:
        assert loop._follow(plan, verbose=False, quiet=False, tracking=tracking) == "done"
    first, second, *_, last, projection = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"iteration 1 of 3 · games in \d+ s: 30", first)  # how long training takes is not known
    assert re.fullmatch(r"iteration 1 of 3 · training in .*: loss 2\.50 · (\d+ s|about \d+ min) left.*", second)
    assert re.fullmatch(r"iteration 3 of 3 · match in .* over the first generation", last)
    assert re.fullmatch(r"  an iteration: self-play .* · 3 iterations: \d+ s, of which .* \d+ %", projection)
    with contextlib.suppress(KeyboardInterrupt), loop._Line(replaced=True) as line:  # as on a terminal
        line.say("games …", end="")
        line.say("games in 3 s: 12", end="\n")
        line.say("training …", end="")
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "games …\r\x1b[Kgames in 3 s: 12\ntraining …\n"
    found = {"games": 30, "checked": 10, "resigned": 8, "advice": "Try --resign 0.95."}
    step, report = next(iter(plan.steps())), {"progress": {"done": 30}, "resignation": found}
    assert loop._told(step, report, 3.0) == "games in 3 s: 30, 40% of 20 games resigned\n  Try --resign 0.95."
    tracked = TensorBoardRun(tmp_path / "runs").scalars
    assert tracked["loop/games"] == [(iteration, 30) for iteration in (1, 2, 3)]
    assert tracked["loop/loss"] == [(iteration, 2.5) for iteration in (1, 2, 3)]
    assert tracked["loop/score"] == [(iteration, 0.75) for iteration in (2, 3)]  # every second, and the last


@pytest.mark.parametrize(
    ("gate", "lost", "plays"),
    [
        pytest.param(0.75, [], [FIRST, *TRAINED], id="each wins"),
        pytest.param(0.76, [], [FIRST] * 4, id="none wins"),
        pytest.param(0.55, [2], [FIRST, TRAINED[0], TRAINED[0], TRAINED[2]], id="the second loses"),
        pytest.param(0.55, [1, 2], [FIRST, FIRST, FIRST, TRAINED[2]], id="the third is the first to win"),
    ],
)
def test_a_network_plays_once_it_has_won_its_gate(plan, follow, gate, lost, plays):
    """`plays`: the weights that play before the first iteration and after each. Players resign in self-play alone."""
    plan = replace(plan, gate=gate, gate_games=40, evaluate_every=1, resign=0.9, resign_check=0.2)
    asked = [{**one, "kind": Path(one["out"]).name} for one in follow(plan, lost=lost)]

    def weights(kind, name="weights"):
        return [str(Path(one[name]).relative_to(plan.folder)) for one in asked if one["kind"] == kind]

    assert [one["kind"] for one in asked] == ["games", "training", "gate", "match"] * 3
    assert weights("games") == weights("gate", "opponent-weights") == plays[:-1]
    assert weights("training") == [FIRST, *TRAINED[:-1]]  # goes on from the last, whether it won or not
    assert weights("gate") == TRAINED
    assert (weights("match"), weights("match", "opponent-weights")) == (plays[1:], [FIRST] * 3)
    assert {(one["games"], one["noise"]) for one in asked if one["kind"] == "gate"} == {("40", "0")}
    resigned = {one["kind"]: (one["resign"], one["resign-check"]) for one in asked if "resign" in one}
    assert resigned == {"games": ("0.9", "0.2")}
    document = loop_summary.loop_document(plan, {}, "", "done")
    assert document["weights"] == str(plan.folder / plays[-1])
    won = [one != before for before, one in itertools.pairwise(plays)]
    assert [one["gate"]["won"] for one in document["iterations"]] == won
    assert [row[-1].endswith(", won") for row in loop_summary.loop_page(document, {}).table.rows] == won
    assert f"| {loop_summary.GATE} |" in loop_summary.loop_page(document, {}).markdown()


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        pytest.param("fails", WorkError, "games of iteration 1 failed: the disk is full. Make room.", id="fails"),
        pytest.param("refuses", UsageError, "games of iteration 1: no game named 'blab'.", id="refuses"),
        pytest.param("dies", WorkError, "it was ended by SIGKILL", id="is killed"),
    ],
)
def test_a_step_that_fails_is_named_and_can_be_done_again(plan, follow, way, error, message):
    with pytest.raises(error, match=message):
        follow(plan, way)
    assert len(follow(plan)) == 1 + len(list(plan.steps()))


def test_ctrl_c_is_passed_on_and_waited_for(plan, follow, tmp_path):
    """The command is asked to stop, and ends by itself with what it keeps."""
    journal = tmp_path / "journal"

    def interrupt():
        while not journal.exists():
            time.sleep(0.01)
        time.sleep(0.2)  # for us to wait for it
        os.kill(os.getpid(), signal.SIGINT)

    (thread := threading.Thread(target=interrupt)).start()
    with pytest.raises(KeyboardInterrupt):
        follow(plan, "hangs")
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(journal.read_text())["pid"], 0)


def test_a_loop_is_shown_in_a_table_a_page_a_plot_and_the_loss_of_each_step(plan, follow):
    follow(plan)
    document = loop_summary.loop_document(plan, {"game": "connect-four"}, "gpuinfer loop --out loop", "done")
    assert [one["loss"] for one in document["iterations"]] == [2.5, 2.5, 2.5]
    assert [bool(one["strength"]) for one in document["iterations"]] == [False, True, True]
    page = loop_summary.loop_page(document, {})
    assert page.verdict.startswith("After 3 iterations: 75.0 % (70.0 to 80.0) of 400 games")
    assert page.table.rows[1][-2:] == ("+191 Elo (+147 to +241)", "75.0%")
    for iteration in (1, 2):
        rows = [{"step": step, "loss": 3.0 / step} for step in range(1, 21)] + [{"step": 20, "validation": 0.2}]
        plan.curve(iteration).parent.mkdir(parents=True, exist_ok=True)
        plan.curve(iteration).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    loop_summary.write_loop(plan, document)
    written = {path.name: path.read_text() for path in plan.folder.iterdir() if path.is_file()}
    assert json.loads(written["loop.json"]) == document
    assert "| 3 | 30 | " in written["loop.md"]
    assert "data:image/svg+xml" in written["loop.html"]
    assert "Elo over the first generation" in written["loop.svg"]
    steps = [row for row in map(json.loads, written["loss.jsonl"].splitlines()) if "loss" in row]
    assert [(row["iteration"], row["step"]) for row in steps] == [*itertools.product((1, 2), range(1, 21))]
    for one, ends in zip(document["iterations"], ([500.0, None], [None, -500.0], [None, None]), strict=True):
        one["strength"] = {**document["strength"], "elo": None, "elo_ci95": ends}
    assert loop_summary.loop_figure(document, {}).axes


@pytest.mark.parametrize(
    ("match", "line"),
    [
        pytest.param((135, 235, 370), "          ┊             ├─────────●────────────┤", id="known"),
        pytest.param((100, None, None), "          ┊         ├" + 26 * "─" + "▶", id="all won"),
        pytest.param((None, None, -50), "◀────┤    ┊", id="all lost"),
        pytest.param((None, None, None), "◀" + 46 * "─" + "▶", id="anything"),
    ],
)
def test_matches_are_drawn_in_the_terminal_between_the_ends_of_all_intervals(match, line):
    """An end that is not known is an arrow."""
    found = enumerate([(-100, 0, 100), None, (0, 0, 370), match], start=1)
    strengths = {at: one and {"score": 0.5, "elo": one[1], "elo_ci95": one[::2]} for at, one in found}
    document = {"iterations": [{"iteration": at, "strength": one} for at, one in strengths.items()]}
    (name, scale), first, *_, last = loop_summary.strength_lines(document)
    assert (name, first[0], last[0]) == ("Elo", "iteration 1", "iteration 4")
    assert (scale[:4], scale[10], scale[-4:], len(scale)) == ("−100", "0", "+370", loop_summary.WIDTH)
    assert (first[1], last[1]) == ("├─────────●─────────┤", line)
