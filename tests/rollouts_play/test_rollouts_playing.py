import asyncio
import math
import re

import msgspec
import pytest
from playing_here import HERE, player
from rollouts_run import timeless

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.rollouts.guarded_environment import open_environment
from gpuinfer.rollouts.record import Group
from gpuinfer.rollouts.reference_model import ReferenceModel


def played(environment, *options, groups=1, **plan):
    async def play():
        async with player(environment, options, **plan) as one:
            return await asyncio.gather(*(one.play(number) for number in range(groups)))

    return asyncio.run(play())


def test_a_group_has_each_sample_once_and_all_from_one_start():
    (group,) = played("Chatting", samples=3)
    assert [game.sample for game in group.games] == [0, 1, 2]
    assert {game.ending for game in group.games} == {"done"}
    first = {game.trajectories[0].turns[0].prompt_tokens for game in group.games}
    said = {game.trajectories[0].turns[0].completion_tokens for game in group.games}
    assert len(first) == 1
    assert len(said) == 3
    assert group.failed == ()


def test_a_record_adds_up():
    (group,) = played("Chatting", samples=2)
    for game in group.games:
        assert [one.agent for one in game.trajectories] == ["left", "right"]
        for one in game.trajectories:
            assert [turn.step for turn in one.turns] == [0, 1]
            assert [turn.anew for turn in one.turns] == [True, False]
            assert one.reward == sum(turn.reward for turn in one.turns) == sum(len(turn.text) for turn in one.turns)
            for turn in one.turns:
                assert len(turn.logprobs) == len(turn.completion_tokens) <= 6
                assert all(value <= 0 and math.isfinite(value) for value in turn.logprobs)
                assert turn.spans[0].start == 0
    assert msgspec.json.decode(msgspec.json.encode(group), type=Group) == group


def test_what_else_is_played_changes_no_group():
    alone = [played("Chatting", "steps=3", samples=2, slots=1)[0]]
    controller = played("Chatting", "steps=3", samples=2, groups=4)
    assert timeless(controller[0]) == timeless(alone[0])
    assert len({group.games[0].trajectories[0].turns[0].prompt_tokens for group in controller}) == 4


def test_a_game_that_fails_is_recorded_and_played_again():
    (group,) = played("Flaky", samples=2)
    assert len(group.games) == 2
    assert [(game.ending, game.attempt) for game in group.failed] == [("error", 0)]
    assert "rollout_tables" in group.failed[0].error
    assert "step raised ZeroDivisionError: the board is gone" in group.failed[0].error


@pytest.mark.parametrize(
    ("environment", "options", "plan", "said"),
    [
        pytest.param("Endless", [], {"max_turns": 4}, "has not ended a game in 4 steps", id="never ends"),
        pytest.param("Hanging", [], {"step_seconds": 0.2}, "has not come back from step within 0.2 s", id="hangs"),
        pytest.param("Crooked", ["kind=nan"], {}, "step answered a reward of agent 'left' that is nan", id="NaN"),
        pytest.param("Crooked", ["kind=none"], {}, "step answered a NoneType and no Outcome", id="no outcome"),
        pytest.param("Crooked", ["kind=rewarded"], {}, "an agent 'middle' that is not one of its own", id="rewarded"),
        pytest.param("Crooked", ["kind=list"], {}, "observe answered a list and no mapping", id="no mapping"),
        pytest.param("Crooked", ["kind=stranger"], {}, "an agent 'middle' that is not", id="stranger"),
        pytest.param("Crooked", ["kind=text"], {}, "a str for 'left' and no Observation", id="no observation"),
        pytest.param("Crooked", ["kind=roleless"], {}, "a message for 'left' without a role", id="no role"),
    ],
)
def test_an_environment_that_makes_no_sense_ends_the_run_by_name(environment, options, plan, said):
    with pytest.raises(WorkError, match=said) as caught:
        played(environment, *options, attempts=2, model="null", **plan)
    assert f"environment '{HERE}:{environment}'" in str(caught.value)
    assert "group 0 could not be played: 4 games ended in an error, from 2 starts" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        pytest.param("arithmetics", [], "Did you mean 'arithmetic'", id="a name a little off"),
        pytest.param(f"{HERE}:Chating", [], "has no attribute 'Chating'", id="no such class"),
        pytest.param("nowhere_at_all:X", [], "No module named 'nowhere_at_all'", id="no such module"),
        pytest.param(
            "arithmetic", ["larges=3"], "has no option 'larges'. Did you mean 'largest'?", id="no such option"
        ),
        pytest.param("arithmetic", ["largest=x"], "is not a whole number", id="ill typed"),
        pytest.param("arithmetic", ["largest"], "not of the form key=value", id="no value"),
        pytest.param(f"{HERE}:by_function", ["stops=1"], "Did you mean 'steps'", id="a function's options"),
    ],
)
def test_an_environment_that_cannot_be_had_is_refused_with_the_cure(name, options, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        open_environment(name, options)


def test_what_an_environment_finds_amiss_is_said_once(caplog):
    played("Unhappy", samples=2, model="null")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"environment '{HERE}:Unhappy' (")
    assert said.endswith("): nobody bids. Try --env-option loud=true.")


def test_an_environment_that_keeps_all_others_waiting_is_told_of_once(caplog):
    played("Blocking", samples=2, model="null")
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"environment '{HERE}:Blocking'" in said
    assert re.search(r"kept all other games waiting for \d[\d.]* s in step", said)
    assert "asyncio.to_thread" in said


def test_each_answer_is_asked_for_once_and_each_context_of_a_reference_once():
    async def play():
        async with player("Chatting", samples=3, model="null") as one:
            reference, session = ReferenceModel(one._infer), one._infer
            await reference.admit()
            group = await reference.add(await one.play(0))
            return group, session.snapshot().requests

    group, requests = asyncio.run(play())
    trajectories = [one for game in group.games for one in game.trajectories]
    turns = [turn for one in trajectories for turn in one.turns]
    assert all(len(turn.reference_logprobs) == len(turn.completion_tokens) for turn in turns)
    assert requests == len(turns) + sum(len(list(one.contexts())) for one in trajectories) == 12 + 6
