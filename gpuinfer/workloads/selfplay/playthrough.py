"""Plays a game at random and checks each thing that its rules say, compiled or in Python, and that its symmetries hold.
Run in a child process where no slip can do harm.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import GpuinferError
from gpuinfer.host import error_text
from gpuinfer.models.positions import checked
from gpuinfer.workloads.selfplay import bits, games
from gpuinfer.workloads.selfplay.draw import draw_of
from gpuinfer.workloads.selfplay.game import Game, OutOfBounds, check_sizes, is_won_or_lost
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, CheckedRules, GameLength, Position, PythonGame, raised

CURE = "Turn features and actions alike, or leave it out."


@dataclass(frozen=True, slots=True)
class KnownPosition:
    """A position in which a seat moves; what its actions lead to does not depend on how the board is turned."""

    position: Position
    mover: int
    leads: dict[int, tuple[Any, ...]]  # by legal action
    row: NDArray[Any]  # what `observe` writes


@dataclass(frozen=True, slots=True)
class BoardSymmetry:
    """One of the symmetries; the last one stands for the position as it is."""

    number: int
    row: NDArray[np.int64]  # from where the features of `observe` come
    actions: NDArray[np.int64]


def refuse_symmetries(game: PythonGame, games: int, seconds: float) -> None:
    """Raises `OutOfBounds` for a symmetry that is none. Plays so many games, or as many as half of the time allows. The
    time is the processor's: a busy machine looks at as much.
    """
    symmetries = None if game.hidden else checked(game.symmetries(), game.features, game.actions, "the game")
    if symmetries is None:
        return
    first = game.actions  # the mask of legal actions stands before what is observed
    both = zip(symmetries.features, symmetries.actions, strict=True)
    turns = [
        BoardSymmetry(number, features[first:] - first, actions) for number, (features, actions) in enumerate(both)
    ]
    began, rules = time.thread_time(), CheckedRules(game)
    found = _reached(rules, games, began + seconds / 2)
    if found is None:
        return
    pool, starts = found
    pairs = [
        (one, there, turn)
        for turn in turns
        for one in pool.values()
        if (there := pool.get(one.row[turn.row].tobytes())) is not None
    ]
    for one, there, turn in pairs:
        _refuse(one, there, turn)
    at_first = [pair for pair in pairs if pair[0].row.tobytes() in starts]
    as_it_is = BoardSymmetry(len(turns), np.arange(game.features - first), np.arange(game.actions))
    for number in range(games if at_first else 0):
        _play_both(rules, *at_first[number % len(at_first)], [*turns, as_it_is], random.Random(number))
        if time.thread_time() > began + seconds:
            break


def _reached(rules: CheckedRules, games: int, end: float) -> tuple[dict[bytes, KnownPosition], set[bytes]] | None:
    """Positions of random games by their features, and which of them are first ones. None where two have the same
    features and are played otherwise.
    """
    pool, starts = dict[bytes, KnownPosition](), set[bytes]()
    for number in range(games):
        moves, one = random.Random(number), _known(rules, rules.game.deal(draw_of(number)))
        if one is not None:
            starts.add(one.row.tobytes())
        while one is not None:
            if pool.setdefault(one.row.tobytes(), one).leads != one.leads:
                return None
            one = _known(rules, rules.apply(one.position, moves.choice(list(one.leads))))
        if time.thread_time() > end:
            break
    return pool, starts


def _play_both(
    rules: CheckedRules,
    one: KnownPosition,
    other: KnownPosition,
    turn: BoardSymmetry,
    turns: list[BoardSymmetry],
    moves: random.Random,
) -> None:
    """Play on in both, as long as one is seen to be the other one turned."""
    at: tuple[KnownPosition, KnownPosition, BoardSymmetry] | None = (one, other, turn)
    while at is not None:
        one, other, turn = at
        _refuse(one, other, turn)
        place = moves.choice(list(other.leads))
        after = _known(rules, rules.apply(one.position, int(turn.actions[place])))
        there = _known(rules, rules.apply(other.position, place))
        if after is None or there is None:
            return
        first = [turn, *turns]  # the next player may see the board from another side
        at = next(((after, there, by) for by in first if np.array_equal(after.row[by.row], there.row)), None)


def _known(rules: CheckedRules, position: Position) -> KnownPosition | None:
    """None where no seat moves."""
    if (mover := rules.to_move(position)) < 0:
        return None
    leads: dict[int, tuple[Any, ...]] = {}
    for action in rules.legal(position):
        there = rules.apply(position, action)
        after = rules.to_move(there)
        if after == OVER:
            leads[action] = OVER, tuple(np.roll(rules.returns(there), -mover).round(4).tolist())
        elif after == CHANCE:
            leads[action] = CHANCE, len(rules.chances(there))
        else:
            leads[action] = (after - mover) % rules.game.seats, len(rules.legal(there))
    return KnownPosition(position, mover, leads, rules.observe(position))


def _refuse(one: KnownPosition, there: KnownPosition, turn: BoardSymmetry) -> None:
    turned = {place: one.leads[action] for place, action in enumerate(turn.actions.tolist()) if action in one.leads}
    if turned.keys() != there.leads.keys():
        raise OutOfBounds(
            f"symmetry {turn.number} of `symmetries` turns a position into another one and its legal actions into "
            f"{_short(list(turned))}; there {_short(list(there.leads))} are legal. {CURE}"
        )
    for place, leads in turned.items():
        if leads != there.leads[place]:
            raise OutOfBounds(
                f"symmetry {turn.number} of `symmetries` turns action {turn.actions[place]} into {place}, and they "
                f"lead to different things: {_leads_in_words(leads)}; {_leads_in_words(there.leads[place])}. {CURE}"
            )


def _leads_in_words(leads: tuple[Any, ...]) -> str:
    kind, said = leads
    if kind == OVER:
        return f"the end, with returns {list(said)} from the mover on"
    return f"chance with {said} outcomes" if kind == CHANCE else f"{said} legal actions of another position"


def _short(actions: list[int]) -> str:
    return str(actions) if len(actions) < 9 else f"[{', '.join(map(str, actions[:8]))}, …]"


TURNED = 1000  # games of which the beginnings are looked at where a game declares symmetries
LOOKED_AT = 200  # positions of one game, at most: the longest ones have thousands

SeenPosition = tuple[int, list[Any], np.ndarray]
"""All that a position says of itself: who moves, the legal actions or the outcomes of chance, the features."""


def fault_of(game: PythonGame, numbers: Iterable[int], seconds: float, returned: list[list[float]]) -> str | None:
    """What is wrong with it and the cure, as one of these games shows it, or as many of them as the time allows.
    `returned` takes the returns of each.
    """
    end = time.monotonic() + seconds
    try:
        for number in numbers:
            returned.append(PythonPlaythrough(game, number).play())
            if time.monotonic() > end:
                break
        refuse_symmetries(game, TURNED, seconds)
    except OutOfBounds as fault:
        return str(fault)
    except Exception as error:  # noqa: BLE001 (rules may raise anything)
        return error_text.safe_str(raised(game, error))
    return None


class PythonPlaythrough:
    """One game at random; the first two go to the edges: always the first action, always the last."""

    def __init__(self, game: PythonGame, number: int) -> None:
        self.game, self._number = game, number
        self._rules = CheckedRules(game)
        self._moves = random.Random(number)
        self._draw = draw_of(number)

    def play(self) -> list[float]:
        """Its returns, by seat. Raises `OutOfBounds`, and what the game raises."""
        rules, position, length, looked = self._rules, self.game.deal(self._draw), GameLength(self.game), 0
        mover = rules.to_move(position, "deal")
        while mover != OVER:
            seen = self._seen(position, mover)
            if mover >= 0 and len(seen[1]) > 1 and looked < LOOKED_AT:
                self._guess(position, seen)
            actions: list[int] = [action for action, _ in seen[1]] if mover == CHANCE else seen[1]
            after = rules.apply(position, actions[-self._number] if self._number < 2 else self._moves.choice(actions))
            length.count(mover)
            mover_after = rules.to_move(after)
            if looked < LOOKED_AT and not _alike(seen, self._seen(position, rules.to_move(position))):
                raise OutOfBounds(
                    "`apply` changes the position that it is given. Make another one: the tree keeps them all."
                )
            looked, position, mover = looked + 1, after, mover_after
        returns: list[float] = rules.returns(position).tolist()
        if self.game.won_or_lost and not is_won_or_lost(returns):
            raise OutOfBounds(
                f"`returns` gives {returns}, and won_or_lost = True says that they are 1 and -1, or 0 for both. Give "
                "those, or leave won_or_lost out."
            )
        return returns

    def _seen(self, position: Position, mover: int) -> SeenPosition:
        """A second look must see the same."""
        rules = self._rules
        if mover < 0:
            return mover, rules.chances(position) if mover == CHANCE else [], np.zeros(0)
        row = rules.observe(position)
        if not np.array_equal(row, rules.observe(position)):
            raise OutOfBounds("`observe` writes other features at a second look. Write them from the position alone.")
        return mover, rules.legal(position), row

    def _guess(self, position: Position, seen: SeenPosition) -> None:
        guess = self.game.determinize(position, self._draw)
        if not _alike(seen, self._seen(guess, self._rules.to_move(guess, "determinize"))):
            raise OutOfBounds(
                "`determinize` gives a position that the player to move can tell from the true one: other seat, "
                "actions or features. Change only what that player cannot see."
            )
        if not _alike(seen, self._seen(position, self._rules.to_move(position))):
            raise OutOfBounds("`determinize` changes the position that it is given. Make another one.")


GUESSES = 2  # determinizations of a position
ALWAYS = 20  # positions, of which at least one is guessed otherwise than it is where something is hidden
LEFTOVER = -7_777  # the content of memory that this game has not written


class Playthrough:
    """One game of compiled rules, called as the search calls them. In plain Python, numpy notices an index beyond an
    array; compiled, Numba does with NUMBA_BOUNDSCHECK=1.
    """

    def __init__(self, game: Game, rules: ModuleType) -> None:
        check_sizes(game)
        self.game, self.rules = game, rules
        self.positions = 0
        self.guessed = self.guessed_true = 0  # determinized positions; those whose hidden part came out as it is
        self.digests: list[str] = []  # of each game: all that the rules returned, except for determinizations
        # whole numbers are written to a wide row: one that does not fit the features' type is seen
        self._row_dtype = np.int64 if np.dtype(game.feature_dtype).kind in "iu" else np.dtype(game.feature_dtype)
        self._stream = np.zeros(2, np.uint64)
        self._state = np.full(game.words, LEFTOVER, np.int64)
        self._actions = np.full(game.max_legal, LEFTOVER, np.int16)
        self._values = np.full(game.seats, LEFTOVER, np.float32)
        self._samples = np.full((GUESSES, game.words), LEFTOVER, np.int64)
        self._scratch = np.full(game.scratch[0], LEFTOVER, np.int64), np.full(game.scratch[1], LEFTOVER, np.float64)

    def play(self, number: int) -> None:
        """One game, from the deal to its returns. Raises `OutOfBounds`."""
        moves, digest = random.Random(number), hashlib.sha256()
        self._deal(number)
        made = 0
        while (mover := self._mover(self._state)) >= 0:
            legal, row = self._look(self._state, mover)
            self.positions += 1
            digest.update(repr((mover, legal, np.round(row.astype(float), 4).tolist())).encode())
            if len(legal) > 1:
                self._guess(mover, legal, row)
            if made == self.game.max_moves:
                raise OutOfBounds(
                    f"game {number} goes on after {made} moves where max_moves = {made}. Declare the longest game's."
                )
            # The first two games go to the edges of the rules: always the first action, always the last.
            action = legal[-number] if number < 2 else moves.choice(legal)
            self._call("apply", self._state, np.int16(action))
            made += 1
        digest.update(repr([round(value, 4) for value in self._returns(number)]).encode())
        self.digests.append(digest.hexdigest())

    def _deal(self, number: int) -> None:
        """Into memory that holds another game: what `deal` does not write, the search has from the game before."""
        fresh = np.zeros(self.game.words, np.int64)
        for state in (fresh, self._state):
            bits.seed_stream(self._stream, 0, number)
            self._call("deal", state, self._stream)
        mover = self._mover(fresh)
        seen = self._look(fresh, mover) if mover >= 0 else ([], np.zeros(0))
        try:
            same = self._mover(self._state) == mover and (mover < 0 or _alike(seen, self._look(self._state, mover)))
        except OutOfBounds:
            same = False
        if not same:
            raise OutOfBounds(
                "`deal` leaves words of the game before in the position, and what it shows depends on them. "
                "Write every word of state: it is not zeroed."
            )

    def _mover(self, state: np.ndarray) -> int:
        mover = int(self._call("to_move", state))
        if not -1 <= mover < self.game.seats:
            raise OutOfBounds(
                f"`to_move` says {mover} where seats = {self.game.seats}: they count from 0. "
                f"Declare seats = {mover + 1}, or say -1 for the end."
            )
        return mover

    def _look(self, state: np.ndarray, mover: int) -> tuple[list[int], np.ndarray]:
        """The legal actions and the features of a position, each checked; neither may change it."""
        before = np.array(state)
        legal = self._legal(state, mover)
        row = np.zeros(self.game.features, self._row_dtype)
        self._call("observe", state, self._actions, len(legal), row)
        if self._row_dtype == np.int64:
            info = np.iinfo(self.game.feature_dtype)
            beyond = row[(row < info.min) | (row > info.max)]
            if beyond.size:
                raise OutOfBounds(
                    f"`observe` writes {beyond[0]} into features, which are {self.game.feature_dtype}. Keep to "
                    f"{info.min}…{info.max}."
                )
        mask = np.zeros(self.game.actions, bool)
        mask[legal] = True
        if not np.array_equal(row[: self.game.actions], mask):
            wrong = int(np.flatnonzero(row[: self.game.actions] != mask)[0])
            raise OutOfBounds(
                f"`observe` writes {row[wrong]} to feature {wrong}, and action {wrong} is "
                f"{'legal' if mask[wrong] else 'not legal'}. The first `actions` features are the mask: 1 for legal."
            )
        if not np.isfinite(row).all():
            raise OutOfBounds("`observe` writes features that are not finite. A network answers NaN to those.")
        if not np.array_equal(before, state):
            raise OutOfBounds("`legal`, `to_move` or `observe` changes the position. Only `deal` and `apply` may.")
        return legal, row

    def _legal(self, state: np.ndarray, mover: int) -> list[int]:
        count = int(self._call("legal", state, self._actions))
        if not 1 <= count <= self.game.max_legal:
            cure = "Say in `to_move` that the game is over" if count < 1 else f"Declare max_legal = {count} or more"
            raise OutOfBounds(
                f"`legal` counts {count} actions of seat {mover}; max_legal = {self.game.max_legal}. {cure}."
            )
        legal: list[int] = self._actions[:count].tolist()
        if legal != sorted(set(legal)):
            raise OutOfBounds(f"`legal` writes {_short(legal)}. Write each action once, in ascending order.")
        if not 0 <= legal[0] <= legal[-1] < self.game.actions:
            raise OutOfBounds(
                f"`legal` writes action {legal[-1] if legal[0] >= 0 else legal[0]} where actions = {self.game.actions}:"
                f" they count from 0. Declare actions = {legal[-1] + 1} or more."
            )
        return legal

    def _guess(self, mover: int, legal: list[int], row: np.ndarray) -> None:
        """The player to move cannot tell a guess from the position: same seat, same actions, same features."""
        self._samples[:] = LEFTOVER
        before = np.array(self._state)
        self._call("determinize", self._state, self._samples, self._stream, *self._scratch)
        if not np.array_equal(before, self._state):
            raise OutOfBounds("`determinize` changes the position. It may only write samples.")
        self.guessed += 1
        self.guessed_true += bool((self._samples == before).all())
        for sample in self._samples:
            if self._mover(sample) != mover or not _alike(self._look(sample, mover), (legal, row)):
                raise OutOfBounds(
                    "`determinize` writes a position that the player to move can tell from the true one: other seat, "
                    "actions or features. Fill whole positions, and change only what that player cannot see."
                )

    def _returns(self, number: int) -> list[float]:
        self._values[:] = math.nan
        self._call("returns", self._state, self._values)
        values: list[float] = self._values.tolist()
        if not all(map(math.isfinite, values)):
            raise OutOfBounds(
                f"`returns` leaves {values} for seats = {self.game.seats} (game {number}): write a finite value for "
                "each seat. The memory is not zeroed."
            )
        if self.game.won_or_lost and not is_won_or_lost(values):
            raise OutOfBounds(
                f"`returns` writes {values}, and won_or_lost = True says that they are 1 and -1, or 0 for both (game "
                f"{number}). Write those, or leave won_or_lost out."
            )
        return values

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.rules, name)(self.game.config, *arguments)
        except IndexError as error:
            raise OutOfBounds(f"`{name}`{_place(error, self.rules)} {self._beyond(name, str(error))}") from None

    def _beyond(self, name: str, message: str) -> str:
        """Which size an index was beyond, as far as numpy's message tells."""
        found = BEYOND.search(message)
        sizes = {**{size: getattr(self.game, size) for size in SIZES_OF[name]}}
        if name == "determinize":
            sizes |= {f"scratch[{number}]": size for number, size in enumerate(self.game.scratch)}
        size = next((size for size, count in sizes.items() if found and count == int(found[2])), None)
        if found is None or size is None:
            return f"reaches beyond an array: {message}. Declare sizes that hold."
        cure = f" Declare {size} = {int(found[1]) + 1} or more." if int(found[1]) >= 0 else ""
        return f"reaches for number {found[1]} where {size} = {found[2]} says how many there are.{cure}"


BEYOND = re.compile(r"index (-?\d+) is out of bounds for axis \d+ with size (\d+)")
SIZES_OF = {
    **dict.fromkeys(("deal", "to_move", "apply", "determinize"), ("words",)),
    "legal": ("max_legal", "words"),
    "observe": ("features", "max_legal", "words"),
    "returns": ("seats", "words"),
}
"""The sizes of the arrays that each function is given, the one that it writes first."""


def _alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two looks at a position have seen the same; the features are last."""
    return one[:-1] == other[:-1] and np.array_equal(one[-1], other[-1])


def _place(error: BaseException, rules: ModuleType) -> str:
    """Where in the rules it happened, when that can be told."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == rules.__file__]
    return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""


def played(game: Game, rules: ModuleType, numbers: Iterable[int], seconds: float) -> dict[str, Any]:
    """Plays one of these games, and others as far as the time allows. What was found, as plain values.

    `fault` is what is wrong, or None; `odd` what the rules raised that need not be wrong of compiled code.
    """
    found: dict[str, Any] = {"fault": None, "odd": None, "games": 0, "positions": 0, "digests": []}
    end: float | None = None  # from the end of the first, which may compile
    try:
        through = Playthrough(game, rules)
        for number in numbers:
            through.play(number)
            found |= {"games": found["games"] + 1, "positions": through.positions, "digests": through.digests}
            end = end or time.monotonic() + seconds
            if time.monotonic() > end:
                break
        if game.hidden and through.guessed >= ALWAYS and through.guessed == through.guessed_true:
            raise OutOfBounds(
                f"`determinize` wrote the true position each of {through.guessed * GUESSES} times, and hidden = True "
                "says that part of it is hidden: the search would see that part. Draw it anew; set hidden = False "
                "where every player sees the whole position."
            )
    except OutOfBounds as fault:
        found["fault"] = str(fault)
    except Exception as error:  # noqa: BLE001 (rules may raise anything)
        found["odd"] = f"{error_text.full_message(error)}{_place(error, rules)}"
    return found


def plain_bits() -> None:
    """The intrinsics of `bits` as plain Python; rules that are imported from now on take these."""

    def trailing_zeros(mask: Any) -> np.int64:
        whole = int(mask) & 0xFFFF_FFFF_FFFF_FFFF
        return np.int64((whole & -whole).bit_length() - 1 if whole else 64)

    def popcount(mask: Any) -> np.int64:
        return np.int64((int(mask) & 0xFFFF_FFFF_FFFF_FFFF).bit_count())

    bits.trailing_zeros, bits.popcount = trailing_zeros, popcount


def main() -> None:
    """Reads an order from standard input, writes what was found to standard output. See `rehearsal.py`."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a game prints
    order: Mapping[str, Any] = json.loads(sys.stdin.read())
    warnings.simplefilter("ignore")
    if order["plain"]:
        plain_bits()

    def hangs(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it did not come back")

    signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, order["limit_s"])
    found: dict[str, Any]
    try:
        with np.errstate(all="ignore"):
            game = games.build_game(order["game"], order["options"])
            if isinstance(game, PythonGame):
                found = {"fault": fault_of(game, range(order["games"]), order["seconds"], [])}
            else:
                rules = importlib.import_module(game.rules)
                found = played(game, rules, range(order["games"]), order["seconds"])
    except GpuinferError as error:
        found = {"fault": str(error)}
    json.dump(found, answer)
    answer.close()


if __name__ == "__main__":
    main()
