import random
from decimal import Decimal

import pytest

from gpuinfer.rollouts.builtin_environments import Arithmetic, BlobRules, BlobText, last_number


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        pytest.param("{}", 1.0, id="the number alone"),
        pytest.param("That is {}.", 1.0, id="in a sentence"),
        pytest.param("1, no: {}", 1.0, id="the last number counts"),
        pytest.param("{}.0", 1.0, id="as a decimal number"),
        pytest.param("{}.5", 0.0, id="a decimal number beside it"),
        pytest.param("{}1", 0.0, id="another number"),
        pytest.param("I do not know", 0.0, id="no number"),
        pytest.param("9" * 5000, 0.0, id="more digits than are read"),
    ],
)
async def test_arithmetic_rewards_exactly_the_right_number(answer, reward):
    for seed in range(20):
        made = Arithmetic(largest=20)
        await made.reset(seed)
        ((agent, shown),) = (await made.observe()).items()
        question = shown.messages[-1]["content"].removeprefix("What is ").partition("?")[0]
        left, sign, right = question.split()
        result = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[sign]
        outcome = await made.step({agent: answer.format(result)})
        assert (outcome.rewards, outcome.done) == ({"solver": reward}, True)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        pytest.param("2 + 3 = 5", 5, id="behind the sum"),
        pytest.param("It is 1,350.", 1350, id="thousands apart"),
        pytest.param("1,234,567 and no more", 1234567, id="millions apart"),
        pytest.param("one of 1,2345", 2345, id="a comma that parts no thousands"),
        pytest.param("4 \N{MINUS SIGN} 6 = \N{MINUS SIGN}2", -2, id="a typographic minus"),
        pytest.param("-7.50", Decimal("-7.5"), id="decimals"),
        pytest.param("9" * 33, None, id="too many digits"),
        pytest.param("none", None, id="none"),
    ],
)
def test_the_last_number_of_an_answer_is_read_as_people_write_it(text, number):
    assert last_number(text) == number


async def test_arithmetic_shows_examples_before_it_asks_and_asks_for_none_of_them():
    """A seed that would ask for one of them asks for something else, the same each time."""
    asked = set()
    for seed in range(400):
        one, again, bare = Arithmetic(), Arithmetic(), Arithmetic(examples=0)
        shown = []
        for made in (one, again, bare):
            await made.reset(seed)
            shown.append([message["content"] for message in (await made.observe())["solver"].messages])
        assert shown[0] == shown[1]
        *examples, question = shown[0]
        assert examples[::2] == ["What is 2 + 3?", "What is 9 - 4?", "What is 3 * 4?"]
        assert examples[1::2] == ["2 + 3 = 5", "9 - 4 = 5", "3 * 4 = 12"]
        assert len(shown[2]) == 1
        asked.add(question)
    assert asked.isdisjoint(examples)
    assert len(asked) > 250  # of 1,320


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


async def played(seed, say, **options):
    """All that was shown, and the last outcome of a whole game."""
    table, shown = BlobText(**options), []
    await table.reset(seed)
    while True:
        ((agent, observation),) = (await table.observe()).items()
        shown.append((agent, observation))
        outcome = await table.step({agent: say(observation)})
        if outcome.done:
            return shown, outcome


def legal_of(observation):
    constraint = observation.constraint
    return constraint.choice or tuple(text for _, text in constraint.listed.items)


async def test_blob_rewards_legal_moves_with_points_and_plays_a_legal_one_for_what_is_none():
    shown, outcome = await played(3, lambda one: f" {legal_of(one)[-1].upper()}. ")
    assert outcome.metrics == {"illegal_moves": 0.0}
    assert set(outcome.rewards) == {"player-1", "player-2", "player-3", "player-4"}
    assert all(0 <= reward <= 1 for reward in outcome.rewards.values())
    assert len(shown) == 4 * 6
    assert sum(one.messages[0]["role"] == "system" for _, one in shown) == 4  # each is introduced once
    _, outcome = await played(3, lambda one: "pass", penalty=0.5, cards=1, players=2)
    assert outcome.metrics == {"illegal_moves": 4.0}
    assert all(reward <= 1 - 2 * 0.5 for reward in outcome.rewards.values())
    thought = "hm, 3? <move>\n{}\n</move>"
    _, outcome = await played(5, lambda one: thought.format(legal_of(one)[0]), thinking=True)
    assert outcome.metrics == {"illegal_moves": 0.0}
