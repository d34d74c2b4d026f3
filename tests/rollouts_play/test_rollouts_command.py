import json
import signal

import pytest
from forking import run
from rollouts_run import HERE, ended, groups_in, rollouts, started, timeless, until

from gpuinfer.workloads.rollouts.options import RoleOpponent, Roles

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
    turns = [turn for group in groups_in(folder) for turn in group.turns()]
    assert all(turn.logprobs == (-1.5,) * len(turn.completion_tokens) for turn in turns)  # the instant model's own
    tokens = sum(len(turn.completion_tokens) for turn in turns)
    rates, wall_s = report["throughput"], report["wall_s"]
    assert tokens <= round(rates["output_tokens_per_s"] * wall_s) <= 2 * tokens  # the first were asked for twice
    assert rates["games_per_min"] * wall_s / 60 == pytest.approx(12)


@pytest.mark.thorough
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


ARITHMETIC = "--env arithmetic --model null"


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("--model null", "rollouts needs an environment"),
        ("--env arithmetic", "rollouts needs a model"),
        (f"{ARITHMETIC} --resume", "Add --out DIR"),
        (f"{ARITHMETIC} --ref-model tiny", "Add --reference inline"),
        (f"{ARITHMETIC} --reference inline --ref-model tiniy", "Did you mean 'tiny'?"),
        ("--env arithmetc --model null", "Did you mean 'arithmetic'"),
        ("--env rollout_tables:Chating --model null", "has no attribute 'Chating'"),
        ("--env nowhere_at_all:X --model null", "No module named 'nowhere_at_all'"),
        (f"{ARITHMETIC} --env-option larges=3", "has no option 'larges'. Did you mean 'largest'?"),
        (f"{ARITHMETIC} --env-option largest=x", "is not a whole number"),
        (f"{ARITHMETIC} --env-option largest", "not of the form key=value"),
        ("--env rollout_tables:by_function --model null --env-option stops=1", "Did you mean 'steps'"),
        (f"{ARITHMETIC} --opponent enemy", "--opponent enemy: not of the form role=MODEL"),
        (f"{ARITHMETIC} --opponent a=x --opponent a=y", "--opponent names 'a' twice"),
        (f"{ARITHMETIC} --opponent a=adapter:b", "no such adapter. Add --adapter b=DIR"),
        (f"{ARITHMETIC} --role-temperature a=hot", "--role-temperature a=hot: no temperature"),
        (f"{ARITHMETIC} --role-temperature a=-1", "Give a number from 0 to 1000"),
        (f"{ARITHMETIC} --adapter a=/nowhere", "there is no adapter_config.json in it"),
        (f"{ARITHMETIC} --plain --steps steps.jsonl", "there is no trainer. Add --trainer-seconds"),
        (f"{ARITHMETIC} --plain --listen 127.0.0.1:0 --trainer-seconds 1", "Give one of them"),
        (f"{ARITHMETIC} --plain --listen 0.0.0.0:0", "--api-key-file"),
        (f"{ARITHMETIC} --plain --groups 4 --trainer-seconds 1 --prefill 9", "Use --prefill 3"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused_with_the_cure(gpuinfer, empty_folder, words, cure):
    code, _, err = gpuinfer("rollouts", *words.split())
    assert (code, cure in " ".join(err.split())) == (2, True), err


def test_roles_have_models_adapters_and_temperatures_and_other_weights_decide_another_record(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    cast = Roles.of(["enemy=tiny", "rival=adapter:old"], ["enemy=0.5"], [f"old={tmp_path}"])
    assert cast.opponents == {"enemy": RoleOpponent(model="tiny"), "rival": RoleOpponent(adapter="old")}
    assert (cast.temperatures, cast.policy) == ({"enemy": 0.5}, None)
    cast = Roles.of([], [], [f"policy={tmp_path}"])
    assert cast.policy == "policy"
    before = cast.deciding()
    assert cast.deciding() == before
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    assert cast.deciding() != before


@pytest.mark.thorough
def test_an_environment_that_blocks_for_ever_is_named_and_given_up():
    """What then ends a process is the command line's own part, and these processes are forked."""
    block = ("--env", "rollout_tables:Blocking", "--env-option", "seconds=600", "--model", "null", "--groups", 1)
    with started(*block, "--patience", "1s", "--give-up", "5s") as process:
        said = next(line for line in process.stderr if b"given up. " in line).decode()
    assert "'Blocking' (module rollout_tables) has kept all else waiting in step for" in said
    assert "rollout_tables.py" in said


def test_opponents_are_another_model_with_a_temperature_of_its_own_and_do_not_learn(tmp_path):
    blob = ("--env", "gpuinfer.rollouts.builtin_environments:BlobText", "--env-option", "cards=1", "--groups", 2)
    more = ("--opponent", "opponent=tiny", "--role-temperature", "opponent=0.5", "--samples-per-group", 2)
    code, _, err = rollouts(*blob, *more, "--model", "null", "--out", tmp_path / "out")
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
