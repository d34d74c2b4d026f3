import json
import signal

import pytest
from forking import run
from rollouts_run import HERE, ended, groups_in, rollouts, started, timeless, until

CHATTING = ("--env", "rollout_tables:Chatting", "--model", "null", "--groups", 6, "--samples-per-group", 2)
SLOWLY = (*CHATTING, "--env-option", "wait=0.15", "--groups-in-flight", 1)


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """The records of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    code, out, err = rollouts(*CHATTING, "--env-option", "wait=0.15", "--out", folder, "--json", "-")
    assert code == 0, err
    return folder, json.loads(out)


def test_a_run_ends_with_all_groups_and_a_report(at_once):
    folder, report = at_once
    assert report["status"] == "done"
    assert report["progress"]["done"] == 6
    assert [group.number for group in groups_in(folder)] == list(range(6))
    tokens = sum(len(turn.completion_tokens) for group in groups_in(folder) for turn in group.turns())
    rates, wall_s = report["throughput"], report["wall_s"]
    assert tokens <= round(rates["output_tokens_per_s"] * wall_s) <= 2 * tokens  # the first were asked for twice
    assert rates["games_per_min"] * wall_s / 60 == pytest.approx(12)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 3, id="Ctrl-C"),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="kill -9"),
    ],
)
def test_a_run_that_was_ended_goes_on_and_plays_each_group_once(at_once, tmp_path, number, code):
    whole, _ = at_once
    folder = tmp_path / "out"
    with started(*SLOWLY, "--out", folder) as process:
        until(lambda: groups_in(folder), process)
        process.send_signal(number)
        found, _, err = ended(process)
    assert found == code, err
    if code == 3:
        assert "--resume" in err
    before = groups_in(folder)
    assert 0 < len(before) < 6
    code, _, err = rollouts(*SLOWLY, "--out", folder, "--seed", 1, "--resume")
    assert (code, "seed: 0 there, 1 here" in err) == (2, True), err
    code, _, err = rollouts(*SLOWLY, "--out", folder, "--resume")
    assert code == 0, err
    found = groups_in(folder)
    assert [timeless(one) for one in found] == [timeless(one) for one in groups_in(whole)]
    assert [one for one in found if one.number in {had.number for had in before}] == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(("--model", "null"), 2, "rollouts needs an environment", id="no environment"),
        pytest.param(("--env", "arithmetic"), 2, "rollouts needs a model", id="no model"),
        pytest.param(("--env", "arithmetic", "--model", "null", "--resume"), 2, "Add --out DIR", id="resume nothing"),
        pytest.param(
            ("--env", "arithmetic", "--model", "null", "--ref-model", "tiny"),
            2,
            "Add --reference inline",
            id="no reference",
        ),
        pytest.param(
            ("--env", "arithmetic", "--model", "null", "--reference", "inline", "--ref-model", "tiniy"),
            2,
            "Did you mean 'tiny'?",
            id="a reference that is not there",
        ),
        pytest.param(("--env", "arithmetc", "--model", "null"), 2, "Did you mean 'arithmetic'", id="a slip"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused_with_the_cure(gpuinfer, words, code, said):
    found = gpuinfer("rollouts", *words)
    assert (found[0], said in found[2]) == (code, True), found[2]


def test_an_environment_that_blocks_for_ever_is_named_and_given_up():
    """What then ends a process is the command line's own part, and these processes are forked."""
    block = ("--env", "rollout_tables:Blocking", "--env-option", "seconds=600", "--model", "null", "--groups", 1)
    with started(*block, "--patience", "1s", "--give-up", "5s") as process:
        said = next(line for line in process.stderr if b"given up. " in line).decode()
    assert "'Blocking' (module rollout_tables) has kept all else waiting in step for" in said
    assert "rollout_tables.py" in said


BLOB = (
    "--env",
    "gpuinfer.rollouts.builtin_environments:BlobText",
    "--env-option",
    "cards=1",
    "--groups",
    2,
)


def test_opponents_are_another_model_with_a_temperature_of_its_own_and_do_not_learn(tmp_path):
    more = ("--opponent", "opponent=tiny", "--role-temperature", "opponent=0.5", "--samples-per-group", 2)
    code, _, err = rollouts(*BLOB, *more, "--model", "null", "--out", tmp_path / "out")
    assert code == 0, err
    for group in groups_in(tmp_path / "out"):
        for game in group.games:
            learns, *others = game.trajectories
            assert (learns.role, learns.model, learns.trainable) == ("policy", "null", True)
            assert {(one.role, one.model, one.trainable) for one in others} == {("opponent", "tiny", False)}
            assert {turn.temperature for one in others for turn in one.turns} == {0.5}
            assert {turn.temperature for turn in learns.turns} == {1.0}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--batch-size", 3), id="three rows at once"),
        pytest.param(("--groups-in-flight", 1), id="one group at a time"),
        pytest.param(("--backend", "central"), id="a central server"),
    ],
)
def test_the_same_seed_is_the_same_record_however_it_is_played(tmp_path, words, eight_at_once):
    assert played(tmp_path / "one", *words) == eight_at_once


@pytest.fixture(scope="module")
def eight_at_once(tmp_path_factory):
    return played(tmp_path_factory.mktemp("eight") / "out", "--samples-per-group", 8)


def played(folder, *words):
    """The record of some games with a real model."""
    line = ["gpuinfer", "rollouts", "--no-roofline", "--no-live", "--quiet", "--model", "tiny", "--out", folder]
    games = ("--env", "rollout_tables:Chatting", "--env-option", "steps=3", "--groups", 2, "--temperature", 0.8)
    done = run([*line, *games, *words], HERE, workers=True)
    assert done.returncode == 0, done.stderr
    return [timeless(group) for group in groups_in(folder)]


def test_a_backend_that_knows_the_models_own_log_probabilities_alone_is_asked_for_them(at_once):
    """As the instant model is."""
    folder, _ = at_once
    turns = [turn for group in groups_in(folder) for turn in group.turns()]
    assert all(turn.logprobs == (-1.5,) * len(turn.completion_tokens) for turn in turns)
