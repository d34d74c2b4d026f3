import asyncio
import random

import pytest

from gpuinfer.rollouts.builtin_environments import Arithmetic, BlobRules, BlobText


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        pytest.param("{}", 1.0, id="the number alone"),
        pytest.param("That is {}.", 1.0, id="in a sentence"),
        pytest.param("1, no: {}", 1.0, id="the last number counts"),
        pytest.param("{}1", 0.0, id="another number"),
        pytest.param("I do not know", 0.0, id="no number"),
        pytest.param("9" * 5000, 0.0, id="more digits than are read"),
    ],
)
def test_arithmetic_rewards_exactly_the_right_number(answer, reward):
    async def play(seed):
        made = Arithmetic(largest=20)
        await made.reset(seed)
        ((agent, shown),) = (await made.observe()).items()
        question = shown.messages[-1]["content"].removeprefix("What is ").partition("?")[0]
        left, sign, right = question.split()
        result = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
        return await made.step({agent: answer.format(result)})

    for seed in range(20):
        outcome = asyncio.run(play(seed))
        assert (outcome.rewards, outcome.done) == ({"solver": reward}, True)


@pytest.mark.parametrize("players", [3, 7])
def test_blob_in_words_has_the_rules_of_the_compiled_game(players):
    import numpy as np

    from gpuinfer.workloads.selfplay.games import blob, blob_rules

    cards, chance = 5, random.Random(players)
    config = blob.Blob(None, players=players, cards=cards).config
    for _ in range(20):
        ours = BlobRules(players, cards, chance)
        state = compiled_state(ours, blob_rules)
        actions = np.zeros(64, np.int16)
        while not ours.over:
            assert blob_rules.to_move(config, state) == ours.turn
            count = blob_rules.legal(config, state, actions)
            assert ours.legal() == actions[:count].tolist()
            move = chance.choice(ours.legal())
            blob_rules.apply(config, state, move)
            ours.play(move)
        assert blob_rules.to_move(config, state) == -1
        assert [ours.points(seat) for seat in range(players)] == [
            blob_rules.points(config, state, seat) for seat in range(players)
        ]


def compiled_state(game, rules):
    import numpy as np

    state = np.zeros(rules.WORDS, np.int64)
    for seat, hand in enumerate(game.hands):
        state[rules.BIDS + seat] = -1
        state[rules.HANDS + seat] = sum(1 << card for card in hand)
    state[[rules.LED, rules.BEST, rules.WINNER]] = -1
    state[rules.TURNED], state[rules.TRUMP], state[rules.SEEN] = game.turned, game.trump, 1 << game.turned
    return state


def played(seed, say, **options):
    """The environment after a whole game, all that was shown, and the last outcome."""

    async def play():
        table, shown = BlobText(**options), []
        await table.reset(seed)
        while True:
            ((agent, observation),) = (await table.observe()).items()
            shown.append((agent, observation))
            outcome = await table.step({agent: say(observation)})
            if outcome.done:
                return table, shown, outcome

    return asyncio.run(play())


def legal_of(observation):
    constraint = observation.constraint
    return constraint.choice or tuple(text for _, text in constraint.listed.items)


def test_blob_hears_every_legal_move_and_rewards_the_points():
    _, shown, outcome = played(3, lambda one: f" {legal_of(one)[-1].upper()}. ")
    assert outcome.metrics == {"illegal_moves": 0.0}
    assert set(outcome.rewards) == {"player-1", "player-2", "player-3", "player-4"}
    assert all(0 <= reward <= 1 for reward in outcome.rewards.values())
    assert len(shown) == 4 * 6
    introduced = [one for _, one in shown if one.messages[0]["role"] == "system"]
    assert len(introduced) == 4


def test_what_is_no_move_costs_and_the_first_legal_one_is_played():
    _, _, outcome = played(3, lambda one: "pass", penalty=0.5, cards=1, players=2)
    assert outcome.metrics == {"illegal_moves": 4.0}
    assert all(reward <= 1 - 2 * 0.5 for reward in outcome.rewards.values())


def test_a_move_stands_between_tags_after_free_thought():
    said = "hm, 3? <move>\n{}\n</move>"
    _, _, outcome = played(5, lambda one: said.format(legal_of(one)[0]), thinking=True)
    assert outcome.metrics == {"illegal_moves": 0.0}
