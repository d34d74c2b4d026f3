"""Games led by a record: they hear what it says, while as many tokens are drawn freely."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from bench_rollouts_games import game, group, turn

from gpuinfer.errors import WorkError
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.lab.rollouts_bench.recorded_games import ForcedInfer, RecordedAnswers, recorded_answers
from gpuinfer.testing.fakes import FakeInfer, made_up

PROMPT = Prompt(tokens=(1, 2), key="g0/0/a/0", sampling=Sampling(max_tokens=50, constraint=Constraint(choice=("x",))))


def test_each_answer_of_a_record_is_found_by_the_key_of_its_prompt():
    played = group(game(("a", (turn(0, 3, 2), turn(1, 3, 4))), ("b", (turn(0, 5, 1),))))
    assert recorded_answers([played]) == {
        "g0/0/a/0": RecordedAnswers("", 2),
        "g0/0/a/1": RecordedAnswers("", 4),
        "g0/0/b/0": RecordedAnswers("", 1),
    }


def test_as_much_is_drawn_freely_and_what_the_record_says_is_heard():
    infer = FakeInfer(lambda request: made_up(request.payload))
    found = asyncio.run(ForcedInfer(infer, {PROMPT.key: RecordedAnswers("hold", 3)})(PROMPT))
    asked = infer.requests[0].payload.sampling
    assert asked == msgspec.structs.replace(PROMPT.sampling, constraint=None, max_tokens=3, ignore_eos=True)
    assert [one.text for one in found.completions] == ["hold"]
    assert found.completions[0].tokens == made_up(infer.requests[0].payload).completions[0].tokens


def test_games_that_go_another_way_than_the_record_are_refused():
    with pytest.raises(WorkError, match="no answer to g0/0/a/0"):
        asyncio.run(ForcedInfer(FakeInfer(lambda request: made_up(request.payload)), {})(PROMPT))
