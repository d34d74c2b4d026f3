"""What is exported, against what the trainers read: always as it is described here, from their sources, and with their
own code where it is installed (verl 0.9, skyrl 0.4, trl 1.16, openpipe-art 0.5; prime-rl is on no package index).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal, TypedDict

import msgspec
import pytest
from msgspec.structs import replace
from record_draws import group_of

from gpuinfer.rollouts.export import FORMATS


class Metrics(TypedDict):
    generate_sequences: float


class AgentLoopOutput(TypedDict):
    """verl: verl/experimental/agent_loop/agent_loop.py."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward_score: float
    num_turns: int
    metrics: Metrics
    extra_fields: dict[str, object]


class TrajectoryID(TypedDict):
    instance_id: str
    repetition_id: int


class GeneratorOutput(TypedDict):
    """SkyRL: skyrl/train/generators/base.py."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_metrics: dict[str, float]
    rollout_logprobs: list[list[float]]
    trajectory_ids: list[TrajectoryID]
    is_last_step: list[bool]


class TrainingSample(TypedDict):
    """prime-rl: src/prime_rl/transport/types.py. `reward` has gone from its newest versions."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None
    advantages: list[float]
    reward: float
    trace_id: str
    branch_index: int


class Rollout(TypedDict):
    """TRL: what `rollout_func` of trl/trainer/grpo_trainer.py returns; the last three go to reward functions."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    env_mask: list[list[int]]
    reward: list[float]
    group: list[str]
    trajectory: list[str]


class Choice(TypedDict):
    """ART: an answer, as OpenAI and vLLM give it."""

    finish_reason: Literal["stop", "length"]
    index: int
    logprobs: dict[str, list[dict[str, object]]]
    message: dict[str, str]
    prompt_token_ids: list[int]
    token_ids: list[int]


class Trajectory(TypedDict):
    """ART: src/art/trajectories, stored as src/art/utils/trajectory_logging.py has it."""

    messages_and_choices: list[dict[str, object]]
    additional_histories: list[dict[str, list[dict[str, object]]]]
    reward: float
    initial_policy_version: int
    final_policy_version: int
    metrics: dict[str, float]
    metadata: dict[str, str | int]


DESCRIBED = {"verl": AgentLoopOutput, "skyrl": GeneratorOutput, "prime-rl": TrainingSample, "trl": Rollout}


def forgets(group):
    """Its trajectories played twice over: the second time begins anew."""

    def again(trajectory):
        second = (replace(turn, anew=turn.step == 0) for turn in trajectory.turns)
        return replace(trajectory, turns=(*trajectory.turns, *second))

    games = (replace(game, trajectories=tuple(map(again, game.trajectories))) for game in group.games)
    return replace(group, games=tuple(games))


GROUPS = [group_of(0), forgets(group_of(1)), group_of(2, tokens=1, samples=3)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    for name, form in FORMATS.items():
        form.write(GROUPS, folder / name)
    return folder


def lines(files, name):
    return [json.loads(line) for line in (files / name).read_text().splitlines()]


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_line_is_as_described_and_what_is_ours_stands_beside(files, name):
    for line in lines(files, name):
        assert msgspec.convert(line, DESCRIBED[name])
        assert set(line) - set(DESCRIBED[name].__annotations__) <= {"gpuinfer"}


def test_a_table_for_art_is_as_described(files):
    from pyarrow import parquet

    table = parquet.read_table(files / "art")
    assert table.schema.metadata[b"art.trajectory_parquet.version"] == b"2"
    rows = table.to_pylist()
    assert {row["format_version"] for row in rows} == {2}
    assert sorted({row["group_index"] for row in rows}) == [0, 1, 2]
    for row in rows:
        assert set(msgspec.json.decode(row["group_json"])["metadata"]) == {"group", "gpuinfer"}
        trajectory = msgspec.json.decode(row["trajectory_json"], type=Trajectory)
        choices = [one for one in trajectory["messages_and_choices"] if "token_ids" in one]
        assert len(choices) == 2
        for choice in (msgspec.convert(one, Choice) for one in choices):
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def flat(files):
    """Trajectory and context → tokens, mask, log-probabilities, as one sequence."""
    return {
        (line["trace_id"], line["branch_index"]): (line["token_ids"], line["mask"], line["logprobs"])
        for line in lines(files, "prime-rl")
    }


def test_verl_reads_it(files):
    theirs = pytest.importorskip("verl.experimental.agent_loop.agent_loop", exc_type=ImportError)
    for text in (files / "verl").read_text().splitlines():
        line, found = json.loads(text), theirs.AgentLoopOutput.model_validate_json(text).as_dict()
        assert found["prompts"].tolist() == line["prompt_ids"]
        assert found["responses"].tolist() == line["response_ids"]
        assert found["response_mask"].tolist() == line["response_mask"]
        assert found["rollout_log_probs"].tolist() == pytest.approx(line["response_logprobs"])
        assert found["rm_scores"].sum().item() == pytest.approx(line["reward_score"])


def test_skyrl_reads_it(files):
    base = pytest.importorskip("skyrl.train.generators.base", exc_type=ImportError)
    checks = pytest.importorskip("skyrl.train.utils.trainer_utils", exc_type=ImportError)
    for line in lines(files, "skyrl"):
        line["trajectory_ids"] = [base.TrajectoryID(**one) for one in line["trajectory_ids"]]
        checks.validate_generator_output(sum(line["is_last_step"]), line, step_wise=True)
        if all(line["is_last_step"]):
            checks.validate_generator_output(len(line["response_ids"]), line)


def test_art_reads_it(files):
    logging = pytest.importorskip("art.utils.trajectory_logging", exc_type=ImportError)
    tokenize = pytest.importorskip("art.preprocessing.tokenize", exc_type=ImportError)
    from art.trajectories import LegacyHistory

    class Tokenizer:
        def decode(self, tokens):
            return str(tokens)

    expected, count = flat(files), 0
    for group in logging.read_trajectory_groups_parquet(files / "art"):
        for trajectory in group.trajectories:
            first = LegacyHistory(messages_and_choices=trajectory.messages_and_choices, tools=None)
            sequences = tokenize.assemble_vllm_training_sequences(
                tokenizer=Tokenizer(),
                histories=[first, *trajectory.additional_histories],
                advantage=1.0,
                allow_training_without_logprobs=False,
                trajectory=trajectory,
            )
            for context, found in enumerate(sequences):
                tokens, mask, logprobs = expected[trajectory.metadata["trajectory"], context]
                assert found.token_ids == tokens
                assert list(map(bool, found.assistant_mask)) == mask
                assert [one for one, drawn in zip(found.logprobs, mask, strict=True) if drawn] == [
                    one for one, drawn in zip(logprobs, mask, strict=True) if drawn
                ]
                count += 1
    assert count == len(expected)


@pytest.mark.filterwarnings("ignore")  # theirs
def test_trl_trains_on_it(tmp_path, files, monkeypatch):
    tests = str(Path(__file__).parent.parent)  # has a folder `vllm`, which TRL would take for the package
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != tests])
    trl = pytest.importorskip("trl", exc_type=ImportError)
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    line, size = lines(files, "trl")[0], 100
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(size)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t99", pad_token="t98")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    samples, seen = len(line["prompt_ids"]), []

    def reward(prompts, completions, reward, trajectory, **others):
        seen.extend(trajectory)
        return reward

    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=size, **shape)),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["t1"] * 4}),
        rollout_func=lambda prompts, trainer: line,
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=samples,
            num_generations=samples,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
    )
    trainer.train()
    assert seen == line["trajectory"]
