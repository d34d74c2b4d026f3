import asyncio
import math
import re

import pytest
from rollouts_run import TABLES, player, timeless

from gpuinfer.errors import WorkError
from gpuinfer.rollouts.reference_model import ReferenceModel


async def played(environment, *options, groups=1, **plan):
    async with player(environment, options, **plan) as one:
        return await asyncio.gather(*(one.play(number) for number in range(groups)))


async def test_a_group_has_each_sample_once_from_one_start_and_its_record_adds_up():
    (group,) = await played("Chatting", samples=3)
    assert [(game.sample, game.ending) for game in group.games] == [(0, "done"), (1, "done"), (2, "done")]
    first = [game.trajectories[0].turns[0] for game in group.games]
    assert len({turn.prompt_tokens for turn in first}) == 1
    assert len({turn.completion_tokens for turn in first}) == 3
    assert group.failed == ()
    for game in group.games:
        assert [one.agent for one in game.trajectories] == ["left", "right"]
        for one in game.trajectories:
            assert [(turn.step, turn.anew) for turn in one.turns] == [(0, True), (1, False)]
            assert one.reward == sum(turn.reward for turn in one.turns) == sum(len(turn.text) for turn in one.turns)
            for turn in one.turns:
                assert len(turn.logprobs) == len(turn.completion_tokens) <= 6
                assert all(value <= 0 and math.isfinite(value) for value in turn.logprobs)
                assert turn.spans[0].start == 0


async def test_what_else_is_played_changes_no_group():
    (alone,) = await played("Chatting", "steps=3", samples=2, slots=1)
    together = await played("Chatting", "steps=3", samples=2, groups=4)
    assert timeless(together[0]) == timeless(alone)
    assert len({group.games[0].trajectories[0].turns[0].prompt_tokens for group in together}) == 4


async def test_a_game_that_fails_is_recorded_and_played_again():
    (group,) = await played("Flaky", samples=2)
    assert len(group.games) == 2
    assert [(game.ending, game.attempt) for game in group.failed] == [("error", 0)]
    assert "rollout_tables" in group.failed[0].error
    assert "step raised ZeroDivisionError: the board is gone" in group.failed[0].error


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        ("endless", {"max_turns": 4}, "has not ended a game in 4 steps"),
        ("hangs", {"step_seconds": 0.2}, "has not come back from step within 0.2 s"),
        ("nan", {}, "step answered a reward of agent 'left' that is nan"),
        ("none", {}, "step answered a NoneType and no Outcome"),
        ("rewarded", {}, "an agent 'middle' that is not one of its own"),
        ("list", {}, "observe answered a list and no mapping"),
        ("stranger", {}, "an agent 'middle' that is not"),
        ("text", {}, "a str for 'left' and no Observation"),
        ("roleless", {}, "a message for 'left' without a role"),
    ],
)
async def test_an_environment_that_makes_no_sense_ends_the_run_by_name(kind, plan, said):
    with pytest.raises(WorkError, match=said) as caught:
        await played("Crooked", f"kind={kind}", attempts=2, model="null", **plan)
    assert f"environment '{TABLES}:Crooked'" in str(caught.value)
    assert "group 0 could not be played: 4 games ended in an error, from 2 starts" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Crooked", "kind=unhappy"], r"\): nobody bids. Try --env-option loud=true\.$"),
        (["Blocking"], r"kept all other games waiting for \d[\d.]* s in step.*asyncio.to_thread"),
    ],
)
async def test_what_is_amiss_with_an_environment_is_logged_once(words, said, caplog):
    await played(*words, samples=2, model="null", attempts=1, max_turns=2)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"environment '{TABLES}:{words[0]}' (")
    assert re.search(said, record.getMessage(), re.S)


async def test_each_answer_is_requested_once_and_each_context_of_a_reference_once():
    async with player("Chatting", samples=3, model="null") as one:
        reference, session = ReferenceModel(one._infer), one._infer
        await reference.admit()
        group = await reference.add(await one.play(0))
        requests = session.snapshot().requests
    trajectories = [one for game in group.games for one in game.trajectories]
    turns = [turn for one in trajectories for turn in one.turns]
    assert all(len(turn.reference_logprobs) == len(turn.completion_tokens) for turn in turns)
    assert requests == len(turns) + sum(len(list(one.contexts())) for one in trajectories) == 12 + 6
