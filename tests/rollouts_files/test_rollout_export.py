"""What trainers are given: the names and kinds of verl 0.9, skyrl 0.4, trl 1.16, openpipe-art 0.5 and prime-rl, the
right masks, and the very same groups when it is read back.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import TypedDict

import msgspec
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


@pytest.mark.sample(2)
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


def with_trajectories(group, change):
    games = (replace(game, trajectories=tuple(map(change, game.trajectories))) for game in group.games)
    return replace(group, games=tuple(games))


def forgetful(group):
    """Its trajectories, each played twice over: the second time begins anew."""

    def again(trajectory):
        second = (replace(turn, anew=turn.step == 0) for turn in trajectory.turns)
        return replace(trajectory, turns=(*trajectory.turns, *second))

    return with_trajectories(group, again)


def exported(name, path, *some):
    """The lines of a file, as JSON."""
    FORMATS[name].write(some, path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_was_drawn_is_marked_and_what_is_compared_stands_together(tmp_path):
    line, *_ = exported("verl", tmp_path / "verl", group_of(3, tokens=2))
    first, second = group_of(3, tokens=2).games[0].trajectories[0].turns
    assert tuple(line["prompt_ids"]) == first.prompt_tokens
    assert tuple(line["response_ids"]) == first.completion_tokens + second.prompt_tokens + second.completion_tokens
    assert line["response_mask"] == [1, 1, 0, 0, 0, 1, 1]
    assert line["response_logprobs"] == [*first.logprobs, 0, 0, 0, *second.logprobs]
    assert (line["reward_score"], line["num_turns"], line["extra_fields"]["group"]) == (0.5, 4, "g3/A")
    (line,) = exported("skyrl", tmp_path / "skyrl", forgetful(group_of(0)))  # who forgot has several samples
    assert line["is_last_step"] == [False, True, False, True]
    assert line["trajectory_ids"] == [{"instance_id": "g0/A", "repetition_id": sample} for sample in (0, 0, 1, 1)]
    assert line["rewards"] == [0.5, 0.5, 1.5, 1.5]
    lines = exported("prime-rl", tmp_path / "prime", group_of(0, tokens=2))
    of_tokens = ("mask", "logprobs", "temperatures", "advantages")
    assert all(len(line[name]) == len(line["token_ids"]) for line in lines for name in of_tokens)
    assert lines[0]["mask"] == [False] * 3 + [True, True] + [False] * 3 + [True, True]
    assert [line["advantages"][3] for line in lines] == pytest.approx([-1, 1])
    assert lines[0]["ref_logprobs"] is None
    group = with_trajectories(group_of(0, samples=3), lambda one: replace(one, trainable=True))
    lines = exported("trl", tmp_path / "trl", group)  # TRL compares the samples of one call, ART those of one group
    assert [line["group"] for line in lines] == [["g0/A"] * 3, ["g0/B"] * 3]
    assert [line["reward"] for line in lines] == [[0.5, 1.5, 2.5]] * 2


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_advantages_have_mean_0_and_deviation_1(rewards):
    found = advantages(rewards)
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)
    spread = math.fsum(one * one for one in found) / len(found)
    assert spread == pytest.approx(1) or not any(found)


def test_advantages_of_equal_and_of_huge_rewards():
    for rewards, expected in (([1.0] * 3, [0] * 3), ([0.0, 1.0], [-1, 1]), ([1e308, -1e308], [1, -1]), ([1.0], [0])):
        assert advantages(rewards) == pytest.approx(expected)


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


def test_masks_and_log_probabilities_that_do_not_fit_are_refused(tmp_path):
    (line,) = exported("trl", tmp_path / "out", group_of(0))
    line["env_mask"][0][0] = 0
    (tmp_path / "out").write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match="its mask is not where its answers were"):
        list(FORMATS["trl"].read(tmp_path / "out"))
    silent = with_trajectories(
        group_of(0), lambda one: replace(one, turns=tuple(replace(turn, logprobs=()) for turn in one.turns))
    )
    with pytest.raises(UsageError, match="g0/0/A has no log-probability for each"):
        FORMATS["trl"].write([silent], tmp_path / "silent")
    assert not (tmp_path / "silent").exists()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A folder of two groups."""

    async def write(folder):
        writer = Writer(folder, "jsonl", {"env": "toy"})
        for number in range(2):
            await writer.add(group_of(number))
        await writer.close()
        return folder

    return asyncio.run(write(tmp_path_factory.mktemp("records")))


@pytest.mark.parametrize("name", NAMES)
def test_the_command_writes_what_a_trainer_reads(gpuinfer, records, tmp_path, name):
    out = tmp_path / "out"
    code, said, told = gpuinfer("rollouts", "export", str(records), "--to", name, "--out", str(out))
    assert (code, said) == (0, "")
    assert f"{out} is for {name}: 2 groups, 4 samples, 40 tokens to train on" in told
    assert list(FORMATS[name].read(out)) == [group_of(0), group_of(1)]


@pytest.mark.parametrize(
    ("folder", "words", "cure"),
    [
        (None, "--to vrel --out out", "Did you mean 'verl'?"),
        (None, "--to verl --out .", "Give another --out"),
        (None, "--to verl --out no/out", "there is no folder no. Create it"),
        (".", "--to verl --out out", "holds no rollouts"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_cure(
    gpuinfer, records, tmp_path, monkeypatch, folder, words, cure
):
    monkeypatch.chdir(tmp_path)
    code, _, told = gpuinfer("rollouts", "export", folder or str(records), *words.split())
    assert (code, cure in told) == (2, True), told


def test_the_command_shows_what_there_is_in_80_columns(gpuinfer, records, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, said, _ = gpuinfer("rollouts", "show", str(records))
    assert (code, "policy@v1" in said) == (0, True)
    assert "2 groups, 4 games; tokens: 48 shown to the models, 80 drawn" in said


KINDS = {
    "number": float,
    "numbers": list[float],
    "whole": int,
    "tokens": list[int],
    "marks": list[bool],
    "rows_of_tokens": list[list[int]],
    "rows_of_numbers": list[list[float]],
    "name": str,
    "names": list[str],
    "figures": dict[str, float],
    "anything": dict[str, object],
    "objects": list[dict[str, object]],
    "numbers_or_none": list[float] | None,
    "trajectories": list[TypedDict("TrajectoryID", {"instance_id": str, "repetition_id": int})],
}


def fields(**names):
    """Field → type, from the names of the fields that have a kind."""
    return {name: KINDS[kind] for kind, some in names.items() for name in some.split()}


DESCRIBED = {
    # verl/experimental/agent_loop/agent_loop.py, AgentLoopOutput
    "verl": fields(
        tokens="prompt_ids response_ids response_mask",
        numbers="response_logprobs",
        number="reward_score",
        whole="num_turns",
        figures="metrics",
        anything="extra_fields",
    ),
    # skyrl/train/generators/base.py, GeneratorOutput
    "skyrl": fields(
        rows_of_tokens="prompt_token_ids response_ids loss_masks",
        rows_of_numbers="rollout_logprobs",
        numbers="rewards",
        names="stop_reasons",
        figures="rollout_metrics",
        trajectories="trajectory_ids",
        marks="is_last_step",
    ),
    # src/prime_rl/transport/types.py, TrainingSample; `reward` has gone from its newest versions
    "prime-rl": fields(
        tokens="token_ids",
        marks="mask",
        numbers="logprobs temperatures advantages",
        name="env_name trace_id",
        numbers_or_none="ref_logprobs",
        number="reward",
        whole="branch_index",
    ),
    # what `rollout_func` of trl/trainer/grpo_trainer.py returns; the last three go to reward functions
    "trl": fields(
        rows_of_tokens="prompt_ids completion_ids env_mask",
        rows_of_numbers="logprobs",
        numbers="reward",
        names="group trajectory",
    ),
}


# ART: an answer, as OpenAI and vLLM give it; src/art/trajectories, stored as src/art/utils/trajectory_logging.py has it
CHOICE = fields(name="finish_reason", whole="index", anything="logprobs message", tokens="prompt_token_ids token_ids")
TRAJECTORY = fields(
    objects="messages_and_choices additional_histories",
    number="reward",
    whole="initial_policy_version final_policy_version",
    figures="metrics",
    anything="metadata",
)


def check(line, described):
    assert set(line) - {"gpuinfer"} == set(described)
    for field, kind in described.items():
        msgspec.convert(line[field], kind)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for name, form in FORMATS.items():
        form.write([group_of(0), forgetful(group_of(1)), group_of(2, tokens=1, samples=3)], folder / name)
    return folder


def lines(files, name):
    return [json.loads(line) for line in (files / name).read_text().splitlines()]


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_line_is_as_described_and_what_is_ours_stands_beside(files, name):
    for line in lines(files, name):
        check(line, DESCRIBED[name])


def test_a_table_for_art_is_as_described(files):
    from pyarrow import parquet

    table = parquet.read_table(files / "art")
    assert table.schema.metadata[b"art.trajectory_parquet.version"] == b"2"
    rows = table.to_pylist()
    assert {(row["format_version"], row["group_index"]) for row in rows} == {(2, 0), (2, 1), (2, 2)}
    for row in rows:
        assert set(msgspec.json.decode(row["group_json"])["metadata"]) == {"group", "gpuinfer"}
        trajectory = json.loads(row["trajectory_json"])
        check(trajectory, TRAJECTORY)
        choices = [one for one in trajectory["messages_and_choices"] if "token_ids" in one]
        assert len(choices) == 2
        for choice in choices:
            check(choice, CHOICE)
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
