"""What trainers are given: their own names, the right masks, and the very same groups when it is read back."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from record_draws import group_of, groups

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.export import FORMATS
from gpuinfer.rollouts.export.samples import advantages, samples
from gpuinfer.rollouts.files import Writer

NAMES = list(FORMATS)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(40))
@given(some=st.lists(groups, max_size=4))
def test_groups_come_back_from_each_form_as_they_were(tmp_path_factory, name, some):
    path = tmp_path_factory.mktemp("export") / "out.jsonl"
    if not any(samples(group) for group in some):
        with pytest.raises(UsageError, match="nothing to train on"):
            FORMATS[name].write(some, path)
        assert not path.exists()
        return
    written = FORMATS[name].write(some, path)
    assert (written.groups, written.samples) == (len(some), sum(len(samples(group)) for group in some))
    assert list(FORMATS[name].read(path)) == some


def forgetful(group):
    """Its trajectories, each played twice over: the second time begins anew."""

    def again(trajectory):
        second = (replace(turn, anew=turn.step == 0) for turn in trajectory.turns)
        return replace(trajectory, turns=(*trajectory.turns, *second))

    games = (replace(game, trajectories=tuple(map(again, game.trajectories))) for game in group.games)
    return replace(group, games=tuple(games))


def exported(name, path, *some):
    """The lines of a file, as JSON."""
    FORMATS[name].write(some, path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_several_turns_are_one_sequence_with_what_was_drawn_marked(tmp_path):
    line, *_ = exported("verl", tmp_path / "out", group_of(3, tokens=2))
    first, second = group_of(3, tokens=2).games[0].trajectories[0].turns
    assert tuple(line["prompt_ids"]) == first.prompt_tokens
    assert tuple(line["response_ids"]) == first.completion_tokens + second.prompt_tokens + second.completion_tokens
    assert line["response_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert line["response_logprobs"] == [*first.logprobs, 0, 0, 0, *second.logprobs]
    assert line["reward_score"] == 0.5
    assert line["num_turns"] == 4
    assert line["extra_fields"]["group"] == "g3/A"


def test_a_trajectory_that_forgot_is_several_samples(tmp_path):
    (line,) = exported("skyrl", tmp_path / "out", forgetful(group_of(0)))
    assert line["is_last_step"] == [False, True, False, True]
    assert line["trajectory_ids"] == [{"instance_id": "g0/A", "repetition_id": sample} for sample in (0, 0, 1, 1)]
    assert line["rewards"] == [0.5, 0.5, 1.5, 1.5]


def test_a_flat_sample_has_everything_for_each_token(tmp_path):
    lines = exported("prime-rl", tmp_path / "out", group_of(0, tokens=2))
    of_tokens = ("mask", "logprobs", "temperatures", "advantages")
    assert all(len(line[name]) == len(line["token_ids"]) for line in lines for name in of_tokens)
    assert lines[0]["mask"] == [False] * 3 + [True, True] + [False] * 3 + [True, True]
    assert lines[0]["advantages"] == pytest.approx([0, 0, 0, -1, -1, 0, 0, 0, -1, -1])
    assert lines[1]["advantages"] == pytest.approx([0, 0, 0, 1, 1, 0, 0, 0, 1, 1])
    assert lines[0]["ref_logprobs"] is None


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        pytest.param([1.0, 1.0, 1.0], [0, 0, 0], id="all the same"),
        pytest.param([0.0, 1.0], [-1, 1], id="one better"),
        pytest.param([1e308, -1e308], [1, -1], id="that overflow"),
        pytest.param([1.0], [0], id="one alone"),
        pytest.param([], [], id="none"),
    ],
)
def test_advantages(rewards, expected):
    assert advantages(rewards) == pytest.approx(expected)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_advantages_have_mean_0_and_deviation_1(rewards):
    found = advantages(rewards)
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)
    spread = math.fsum(one * one for one in found) / len(found)
    assert spread == pytest.approx(1) or not any(found)


def test_records_without_logprobs_are_refused(tmp_path):
    group = group_of(0)
    game = group.games[0]
    silent = replace(game.trajectories[0], turns=(replace(game.trajectories[0].turns[0], logprobs=()),))
    with pytest.raises(UsageError, match="g0/0/A has no log-probability for each"):
        FORMATS["trl"].write([replace(group, games=(replace(game, trajectories=(silent,)),))], tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_was_changed_is_refused(tmp_path, name):
    path = tmp_path / "out"
    FORMATS[name].write([group_of(0), group_of(1)], path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match=rf"after line \d+: .* --to {name}` wrote"):
        list(FORMATS[name].read(path))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        list(FORMATS[name].read(tmp_path / "nowhere"))


def test_a_changed_mask_is_refused(tmp_path):
    (line,) = exported("trl", tmp_path / "out", group_of(0))
    line["env_mask"][0][0] = 0
    (tmp_path / "out").write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match="its mask is not where its answers were"):
        list(FORMATS["trl"].read(tmp_path / "out"))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A folder of two groups."""

    async def run(folder):
        writer = Writer(folder, "jsonl", {"env": "toy"})
        for number in range(2):
            await writer.add(group_of(number))
        await writer.close()

    folder = tmp_path_factory.mktemp("records")
    asyncio.run(run(folder))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_what_a_trainer_reads(gpuinfer, records, tmp_path, name):
    out = tmp_path / "out"
    code, said, told = gpuinfer("rollouts", "export", str(records), "--to", name, "--out", str(out))
    assert (code, said) == (0, "")
    assert f"{out} is for {name}: 2 groups, 4 samples, 40 tokens to train on" in told
    assert list(FORMATS[name].read(out)) == [group_of(0), group_of(1)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        pytest.param(
            ["--to", "vrel", "--out", "out"], "no trainer named 'vrel'. Did you mean 'verl'?", id="no such one"
        ),
        pytest.param(["--to", "verl", "--out", "."], ". exists already. Give another --out.", id="already there"),
        pytest.param(["--to", "verl", "--out", "no/out"], "there is no folder no. Create it", id="no folder"),
    ],
)
def test_what_cannot_be_exported_is_told(gpuinfer, records, tmp_path, monkeypatch, words, why):
    monkeypatch.chdir(tmp_path)
    code, _, told = gpuinfer("rollouts", "export", str(records), *words)
    assert code == 2
    assert why in told
    assert "holds no rollouts" in gpuinfer("rollouts", "export", ".", "--to", "verl", "--out", "out")[2]


def test_the_command_shows_what_there_is_in_80_columns(gpuinfer, records, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, said, _ = gpuinfer("rollouts", "show", str(records))
    assert code == 0
    assert "policy@v1" in said
    assert "2 groups, 4 games; tokens: 48 shown to the models, 80 drawn" in said


def test_what_is_compared_stands_in_one_line(tmp_path):
    """TRL compares the samples of one call, ART those of one group."""

    def shared(game):
        return replace(game, trajectories=tuple(replace(one, trainable=True) for one in game.trajectories))

    group = group_of(0, samples=3)
    group = replace(group, games=tuple(map(shared, group.games)))
    lines = exported("trl", tmp_path / "out", group)
    assert [line["group"] for line in lines] == [["g0/A"] * 3, ["g0/B"] * 3]
    assert [line["reward"] for line in lines] == [[0.5, 1.5, 2.5]] * 2
    assert list(FORMATS["trl"].read(tmp_path / "out")) == [group]
