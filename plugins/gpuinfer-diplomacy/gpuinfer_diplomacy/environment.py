"""The game as an environment: which powers order, what each is shown, what comes of the answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.rollouts.environment import Environment, Observation, Outcome
from gpuinfer_diplomacy import prompt
from gpuinfer_diplomacy.board import FIRST_YEAR, Board, Position, Resolved, on_thread
from gpuinfer_diplomacy.options import POWERS, Options
from gpuinfer_diplomacy.orders import ReadAnswer, constraint, read_answer

SOLO = 18  # of 34 centres: a power that owns them has won, and the others have nothing


class Diplomacy(Environment):
    """Seven powers, from the spring of 1901 to the winter of the last year, or until one of them has won.

    Powers that have nothing to order get no prompt; units without an order hold. Raises `pydantic.ValidationError` for
    an unknown or ill-typed option.
    """

    Options = Options

    def __init__(self, **options: Any) -> None:
        self.options = Options(**options)
        self.agents = POWERS
        self.roles = {power: "policy" if power in self.options.policy else "opponent" for power in POWERS}

    async def reset(self, seed: int) -> None:
        self._counts: Counter[str] = Counter()
        self._prompted: set[str] = set()
        self._last: Resolved | None = None
        self._board, self._position = await on_thread(_begin, self.options.opening, random.Random(seed))
        self._scores = scores(self._position.centers, self.options.score)

    async def observe(self) -> Mapping[str, Observation]:
        position, options = self._position, self.options
        board = prompt.board(position, self._last if options.results else None)
        return {power: self._observation(power, board) for power, orders in position.legal.items() if orders}

    def _observation(self, power: str, board: str) -> Observation:
        options = self.options
        turn = prompt.turn(self._position, power, detail=options.detail, begin=options.begin)
        message = {"role": "user", "content": f"{board}\n{turn}"}
        anew = options.memory == "phase" or power not in self._prompted
        self._prompted.add(power)
        messages = ({"role": "system", "content": prompt.rules(options.begin)}, message) if anew else (message,)
        return Observation(messages, anew=anew, constraint=constraint(self._position, power, options.begin))

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        orders = {
            power: self._read(power, answers.get(power, "")).orders
            for power, legal in self._position.legal.items()
            if legal
        }
        year = self._position.year
        self._last, self._position, won = await on_thread(_play, self._board, orders)
        done = won or self._position.year >= FIRST_YEAR + self.options.horizon
        self._counts["phases"] += 1
        rewards = self._rewards(done, done or self._position.year > year)
        owned = {f"centers_{power.lower()}": len(places) for power, places in self._position.centers.items()}
        metrics = {name: float(count) for name, count in (*self._counts.items(), *owned.items())}
        return Outcome(rewards, done, metrics, remark=self._remark())

    def _remark(self) -> str:
        """What to tell the user while no answer has begun its orders: all units hold, which looks like play."""
        if self._counts["answers_without_orders"] < self._counts["answers"]:
            return ""
        return (
            f"no answer of a whole phase said {self.options.begin}, so that all units held. Give answers more room "
            "(--max-new-tokens); of a model that has not learnt to say it, as one with random weights, let them be "
            "orders from the first token on: --env-option begin="
        )

    def _read(self, power: str, text: str) -> ReadAnswer:
        answer = read_answer(text, self._position, power, self.options.begin)
        self._counts.update(
            answers=1,
            orders=len(answer.orders),
            illegal_orders=answer.illegal,
            repeated_orders=answer.repeated,
            unfinished_answers=answer.unfinished,
            answers_without_orders=answer.none,
        )
        return answer

    def _rewards(self, done: bool, new_year: bool) -> dict[str, float]:
        """By the end, or by the year: then they add up to what the game has changed in a power's score."""
        yearly = self.options.rewards == "year"
        if not (new_year if yearly else done):
            return {}
        before, self._scores = self._scores, scores(self._position.centers, self.options.score)
        return {power: score - before[power] * yearly for power, score in self._scores.items()}

    async def close(self) -> None:
        self._board = None


def _begin(opening: int, chance: random.Random) -> tuple[Board, Position]:
    board = Board()
    position = board.position()
    for _ in range(opening):
        board.play(at_random(position, chance))
        if board.over:
            return _begin(0, chance)
        position = board.position()
    return board, position


def at_random(position: Position, chance: random.Random) -> dict[str, list[str]]:
    """Any legal orders of all powers, one for each unit; of builds and disbands as many as are due."""
    orders = {power: [chance.choice(there) for there in places.values()] for power, places in position.legal.items()}
    if position.kind == "A":
        return {
            power: chance.sample(given, min(len(given), abs(position.adjustments[power])))
            for power, given in orders.items()
        }
    return orders


def _play(board: Board, orders: Mapping[str, tuple[str, ...]]) -> tuple[Resolved, Position, bool]:
    last = board.play(orders)
    return last, board.position(), board.over


def scores(centers: Mapping[str, Sequence[str]], score: str) -> dict[str, float]:
    """The powers' scores, which add up to 1: `share` of the centres that are owned, or `squares`: of the sum of their
    squares, which favours the leader.
    """
    owned = {power: len(places) for power, places in centers.items()}
    if max(owned.values()) >= SOLO:
        return {power: float(count >= SOLO) for power, count in owned.items()}
    worth = {power: count**2 if score == "squares" else count for power, count in owned.items()}
    return {power: value / sum(worth.values()) for power, value in worth.items()}
