"""What rollouts cost in tokens, and what is asked again of a record."""

from __future__ import annotations

from bench_rollouts_games import game, group, turn

from gpuinfer.lab.rollouts_bench.recorded_games import (
    RecordedCall,
    Tokens,
    calls,
    tokens_by_agent,
    tokens_by_step,
    tokens_of_game,
)

TWO = game(
    ("north", (turn(0, 10, 3, asked=1.0), turn(1, 5, 2, cached=12, asked=3.0))),
    ("south", (turn(0, 20, 4, asked=2.0), turn(1, 7, 1, anew=True, asked=4.0))),
)


def test_a_prompt_is_all_that_the_model_was_given():
    """A turn that goes on has what was said before in its prompt; one that begins anew has not."""
    assert tokens_by_step(TWO) == {"step 1": Tokens(2, 30, 0, 7), "step 2": Tokens(2, 10 + 3 + 5 + 7, 12, 3)}


def test_all_tokens_are_counted_once():
    for parts in (tokens_by_step(TWO), tokens_by_agent(TWO)):
        whole = Tokens()
        for part in parts.values():
            whole.calls += part.calls
            whole.prompt += part.prompt
            whole.cached += part.cached
            whole.completion += part.completion
        assert whole == tokens_of_game(TWO)


def test_calls_are_asked_again_in_the_order_of_their_asking_with_their_whole_prompts():
    found = calls([group(TWO)])
    assert [(len(one.tokens), one.length) for one in found] == [(10, 3), (20, 4), (18, 2), (7, 1)]
    assert found[2] == RecordedCall((*range(10), 100, 101, 102, *range(5)), 2)
