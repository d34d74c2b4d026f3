"""The built-in environments, registered like anyone's.

Arithmetic: one question, one answer, one reward, to try a loop before it costs anything. Blob: a trick game in words,
in which bids and cards are messages, and each agent is shown the moves since its last turn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from pydantic import Field

from gpuinfer import api
from gpuinfer.generation import Constraint, Listed
from gpuinfer.rollouts.environment import Environment, Observation, Outcome

AGENT = "solver"
MOST_DIGITS = 32  # of an answer that is read
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
EXAMPLES = (("2 + 3", 5), ("9 - 4", 5), ("3 * 4", 12), ("7 + 8", 15), ("4 - 6", -2), ("5 * 7", 35))


class Arithmetic(Environment):
    """Asks for a sum, a difference or a product. 1 for an answer whose last number is it, else 0.

    `examples` come before it as earlier turns of the chat (few-shot, Brown et al. 2020) and show the form of an answer:
    small models get a sum right far more often where they write it down before its result. None of them is asked for.
    """

    class Options(api.Options):
        largest: int = Field(20, ge=1, le=10**12, description="of the two numbers")
        operations: str = Field("+-*", pattern=r"^[+*-]+$", description="those that may come")
        examples: int = Field(3, ge=0, le=len(EXAMPLES), description="questions with their answers, shown before")

    options: Options
    agents = (AGENT,)

    async def reset(self, seed: int) -> None:
        chance = random.Random(seed)
        shown = {question for question, _ in EXAMPLES[: self.options.examples]}
        while True:
            left, right = (chance.randint(0, self.options.largest) for _ in range(2))
            sign = chance.choice(self.options.operations)
            self._question, self._result = f"{left} {sign} {right}", SIGNS[sign](left, right)
            if self._question not in shown:
                return

    async def observe(self) -> Mapping[str, Observation]:
        messages = []
        for question, result in EXAMPLES[: self.options.examples]:
            messages += [_asking(question), {"role": "assistant", "content": f"{question} = {result}"}]
        return {AGENT: Observation(messages=[*messages, _asking(self._question)])}

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        right = last_number(answers[AGENT]) == self._result
        return Outcome(rewards={AGENT: float(right)}, done=True, metrics={"correct": float(right)})


def _asking(question: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is {question}?"}


def last_number(text: str) -> Decimal | None:
    """The last number of a text, such as 1,350, -2 or 12.0; None without one, or if it has too many digits."""
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found and len(found[-1]) <= MOST_DIGITS else None


DECK = 52
SUIT_CARDS = 13


class BlobRules:
    """One deal. Seats are 0 up to `players` - 1; seat 0 bids first and leads first."""

    def __init__(self, players: int, cards: int, chance: random.Random) -> None:
        deck = chance.sample(range(DECK), players * cards + 1)
        self.players, self.cards = players, cards
        self.hands = [set(deck[seat * cards : (seat + 1) * cards]) for seat in range(players)]
        self.turned = deck[-1]
        self.bids: list[int] = []
        self.tricks = [0] * players
        self.trick: list[tuple[int, int]] = []  # (seat, card) of the present one
        self.turn = 0

    @property
    def trump(self) -> int:
        return self.turned // SUIT_CARDS

    @property
    def bidding(self) -> bool:
        return len(self.bids) < self.players

    @property
    def over(self) -> bool:
        return sum(self.tricks) == self.cards

    def legal(self) -> Sequence[int]:
        """Bids or cards of the seat whose turn it is, in ascending order; at least one until it is over."""
        if self.bidding:
            last = len(self.bids) == self.players - 1
            return [bid for bid in range(self.cards + 1) if not (last and sum(self.bids) + bid == self.cards)]
        hand = self.hands[self.turn]
        led = [card for card in hand if self.trick and card // SUIT_CARDS == self.trick[0][1] // SUIT_CARDS]
        return sorted(led or hand)

    def play(self, move: int) -> int | None:
        """A legal move. The seat that has taken a trick with it."""
        if self.bidding:
            self.bids.append(move)
            self.turn = (self.turn + 1) % self.players
            return None
        self.hands[self.turn].remove(move)
        self.trick.append((self.turn, move))
        self.turn = (self.turn + 1) % self.players
        if len(self.trick) < self.players:
            return None
        self.turn = max(self.trick, key=lambda one: self._strength(one[1]))[0]
        self.tricks[self.turn] += 1
        self.trick = []
        return self.turn

    def points(self, seat: int) -> int:
        return 10 + self.bids[seat] if self.bids[seat] == self.tricks[seat] else 0

    def _strength(self, card: int) -> tuple[bool, bool, int]:
        suit = card // SUIT_CARDS
        return suit == self.trump, suit == self.trick[0][1] // SUIT_CARDS, card


SUITS = ("clubs", "diamonds", "hearts", "spades")
RANKS = ("2", "3", "4", "5", "6", "7", "8", "9", "10", "jack", "queen", "king", "ace")
OPEN, CLOSE = "<move>", "</move>"

RULES = (
    "You play Blob. Each player is dealt {cards} cards and bids how many of the {cards} tricks it will take; the bids "
    "of all must not add up to {cards}. Then follow the suit that was led if you can. The highest trump takes a trick, "
    "or else the highest card of the suit led. Exactly as many tricks as you bid score ten points and your bid; any "
    "other number scores nothing."
)
ALONE = "Answer with your move alone."
IN_TAGS = f"You may think. Then write your move on a line between {OPEN} and {CLOSE}."


class BlobText(Environment):
    """Blob (Oh Hell), a card game, in words: every seat is an agent. Each reward is the share of the most points there
    are, less `penalty` for each answer that was no legal move: then the first legal move is played.
    """

    class Options(api.Options):
        players: int = Field(4, ge=2, le=7, description="at the table")
        cards: int = Field(5, ge=1, le=7, description="dealt to each")
        thinking: bool = Field(False, description=f"moves stand between {OPEN} and {CLOSE}, and free text before them")
        penalty: float = Field(0.1, ge=0, description="off the reward, for each answer that is no legal move")

    options: Options

    async def reset(self, seed: int) -> None:
        chance = random.Random(seed)
        count = self.options.players
        self.agents = tuple(f"player-{number}" for number in range(1, count + 1))
        self.roles = dict.fromkeys(self.agents[1:], "opponent")
        self._game = BlobRules(count, self.options.cards, chance)
        self._first = chance.randrange(count)  # the agent in seat 0
        self._news: dict[str, list[str]] = {agent: [] for agent in self.agents}
        self._spoken: set[str] = set()
        self._illegal = dict.fromkeys(self.agents, 0)

    async def observe(self) -> Mapping[str, Observation]:
        agent, moves = self._at_turn, list(self._moves())
        news, self._news[agent] = self._news[agent], []
        text = " ".join([*news, f"Your legal moves: {', '.join(moves)}.", IN_TAGS if self.options.thinking else ALONE])
        messages = [{"role": "user", "content": text}]
        if agent not in self._spoken:
            self._spoken.add(agent)
            cards = ", ".join(map(card_name, sorted(self._game.hands[self._game.turn])))
            introduction = (
                f"{RULES.format(cards=self.options.cards)} You are {agent} of {len(self.agents)}. "
                f"Trump is {SUITS[self._game.trump]}: the {card_name(self._game.turned)} was turned. You hold: {cards}."
            )
            messages = [{"role": "system", "content": introduction}, *messages]
        constraint = Constraint(choice=tuple(moves))
        if self.options.thinking:
            listed = Listed(items=tuple(("move", move) for move in moves), begin=OPEN, end=CLOSE)
            constraint = Constraint(listed=listed)
        return {agent: Observation(messages=messages, constraint=constraint)}

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        agent, moves = self._at_turn, self._moves()
        move = self._understood(answers[agent], moves)
        if move is None:
            self._illegal[agent] += 1
            move = next(iter(moves))
        bidding = self._game.bidding
        taken = self._game.play(moves[move])
        self._tell(f"{agent} bids {move}." if bidding else f"{agent} plays the {move}.", besides=agent)
        if taken is not None:
            self._tell(f"{self._agent(taken)} takes the trick.")
        rewards = {one: self._share(one) for one in self.agents} if self._game.over else {}
        if rewards:
            rewards = {one: reward - self.options.penalty * self._illegal[one] for one, reward in rewards.items()}
        return Outcome(rewards, self._game.over, {"illegal_moves": float(sum(self._illegal.values()))})

    @property
    def _at_turn(self) -> str:
        return self._agent(self._game.turn)

    def _agent(self, seat: int) -> str:
        return self.agents[(self._first + seat) % len(self.agents)]

    def _share(self, agent: str) -> float:
        seat = (self.agents.index(agent) - self._first) % len(self.agents)
        return self._game.points(seat) / (10 + self.options.cards)

    def _moves(self) -> dict[str, int]:
        """The legal moves in words."""
        return {str(one) if self._game.bidding else card_name(one): one for one in self._game.legal()}

    def _understood(self, answer: str, moves: Mapping[str, int]) -> str | None:
        """The move that the answer is, but for capitals, spaces and a full stop; None: it is none."""
        if self.options.thinking:
            _, begin, rest = answer.rpartition(OPEN)
            answer = rest.partition(CLOSE)[0] if begin else ""
        move = " ".join(answer.lower().strip(" \t\n.").split())
        return move if move in moves else None

    def _tell(self, text: str, besides: str = "") -> None:
        for agent, news in self._news.items():
            if agent != besides:
                news.append(text)


def card_name(card: int) -> str:
    """Such as `10 of hearts`."""
    return f"{RANKS[card % SUIT_CARDS]} of {SUITS[card // SUIT_CARDS]}"
