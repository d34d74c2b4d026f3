"""Play a game against a network in the terminal."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Setup
from gpuinfer.cli import flags
from gpuinfer.cli.problems import FAILED
from gpuinfer.cli.screen.talk import TalkScreen
from gpuinfer.config import blame, registry
from gpuinfer.config.options import check
from gpuinfer.errors import UsageError
from gpuinfer.host.terminal import printable, write

NAME = "play"
COMMON = (
    *("backend", "strategy", "backend_options", "strategy_options", "device", "dtype", "seed"),
    *("patience", "give_up", "quiet", "verbose", "config"),
)
OF_GAME = ("players", "cards", "trump", "scoring")  # that self-play gives to the game, where they are given
OF_SELFPLAY = (*OF_GAME, "game", "game_options", "model", "weights", "simulations", "exploration", "determinizations")
TEXT = """Play a game against a network in the terminal.

Type a move, or /hint, /back, /help or /quit. All other seats have the network, which searches each of its moves.

Where standard input is no terminal, each of its lines is a move.
"""
HELP = """/hint   search the position for you: the moves with their share of the visits, and what each brings
/back   take your last move back, and what came after it
/help   this, and the moves that there are
/quit   end it; so do Ctrl-C and Ctrl-D
Moves without a choice, and those of chance, are made by themselves."""
PROMPT = "move> "
HINTS = 8  # moves, at most
NAMED = 40  # moves that a complaint lists
DEALS = 10**9


class PlayOptions(api.Options):
    """The flags of `gpuinfer play`."""

    game: str = Field(
        "connect-four",
        description="the game, NAME:VARIANT of one that has some, or module:Class",
        json_schema_extra={"kind": "games"},
    )
    players: int | None = Field(None, description="players at the table, as in selfplay")
    cards: int | None = Field(None, description="cards dealt to each player, as in selfplay")
    trump: str | None = Field(None, description="turned, none, or a suit, as in selfplay")
    scoring: str | None = Field(None, description="blob or oh-hell, as in selfplay")
    game_options: str = Field("", description="options of another game, as key=value,key=value")
    model: str = Field(
        "rollout",
        description="who has the other seats: blobnet, blobnet-small, uniform, rollout or module:factory",
        json_schema_extra={"names": ["blobnet", "blobnet-small", "uniform", "rollout"]},
    )
    weights: Path | None = Field(None, description="safetensors, or a torch file of plain tensors")
    simulations: int = Field(200, ge=1, le=10_000, description="simulations in each tree: more of them play better")
    exploration: float = Field(1.5, gt=0, le=1e6, description="c of PUCT")
    determinizations: int | None = Field(None, ge=1, le=1000, description="guesses at the hidden cards, as in selfplay")
    seat: int = Field(1, ge=1, le=127, description="yours, from 1: seat 1 mostly has the first move")
    deal: int | None = Field(None, ge=0, lt=DEALS, description="the number of the deal [another one each time]")


def execute(values: Mapping[str, Any]) -> int:
    """Play one game. The exit code: 1 when a file or a pipe had a line that is no move, else 0."""
    from gpuinfer.cli.building import merge, served, setup_of
    from gpuinfer.cli.workload import log_to_people

    merged = merge(NAME, values)
    common = merged.common
    own = PlayOptions(**check(PlayOptions, merged.table(NAME), NAME))
    given = {name: value for name in OF_SELFPLAY if (value := getattr(own, name)) is not None}
    selfplay = blame.make(registry.load("workloads", "selfplay"), Setup(seed=common.seed), given)
    if own.seat > selfplay.game.seats:
        raise UsageError(f"--seat {own.seat}: {own.game} has {selfplay.game.seats}. Give one of them.")
    spec = selfplay.model()
    log_to_people(common.verbose)
    screen = GameScreen(NAME, "moves", common.quiet)
    deal = random.randrange(DEALS) if own.deal is None else own.deal
    with contextlib.ExitStack() as open_until_the_end:
        with screen.waiting("getting the game ready; its search is compiled once, a minute or two"):
            if spec is None:
                table, ask = selfplay.table(deal), _nobody
            else:
                from gpuinfer.runtime.background_session import BackgroundSession

                backend, strategy = served(NAME, replace(setup_of(common), model=spec), merged)
                table = selfplay.table(deal)  # refused before a model is loaded
                session = open_until_the_end.enter_context(BackgroundSession(backend, strategy))
                session.ready()

                def ask(rows: Any) -> Any:
                    return session.stream(rows, rows=len(rows)).result

        opponent = "the network" if spec is not None else own.model
        screen.note(f"{own.game} against {own.model}, --deal {deal}. /help says what there is, /quit ends.")
        game = TerminalGame(table, own.seat - 1, ask, screen, opponent)
        try:
            game.play()
        except (EOFError, KeyboardInterrupt):
            screen.note("ended before the game was over.")
    return FAILED if game.refused and not screen.talks else 0


def _nobody(rows: Any) -> Any:
    """Evaluators inside the search ask for nothing."""
    raise AssertionError("a search without a network asked for one")


class TerminalGame:
    """One game between a person and the opponents in the other seats. `ask` answers rows of features."""

    def __init__(self, table: Any, seat: int, ask: Callable[[Any], Any], screen: GameScreen, opponent: str) -> None:
        self._table, self._seat, self._ask, self._screen, self._opponent = table, seat, ask, screen, opponent
        self.refused = 0  # lines that were no move

    def play(self) -> None:
        """Until the game is over. Raises `EOFError` when the person leaves."""
        while (mover := self._table.mover) is not None:
            if mover == self._seat:
                self._screen.say(self._table.shown(self._seat))
                self._one_move()
            else:
                found = self._think()[0]
                name = self._named()[found.action]
                value = "" if found.value is None else f", value {found.value:+.2f}"
                who = self._opponent if self._table.game.seats == 2 else f"player {mover + 1}"
                self._table.play(found.action)
                self._screen.say(f"{who} plays {name} ({found.share:.0%} of the visits{value})")
        self._screen.say(self._table.shown(self._seat))
        self._screen.say(result_text(self._table.returns, self._seat))

    def _one_move(self) -> None:
        """Read lines until one is a move, and make it, or until something else has changed the position."""
        names = self._table.names()
        typed = {name.lower(): action for name, action in names.items()} | names
        while True:
            line = self._screen.read().strip()
            action, word = typed.get(line, typed.get(line.lower())), line.lower().removeprefix("/")
            if action is not None:
                self._table.play(action)
                return
            if word == "back":
                if self._table.take_back(self._seat):
                    return
                self._screen.complain("you have made no move that could be taken back.")
            elif word == "quit":
                raise EOFError
            elif word == "hint":
                named = self._named()
                found = self._think()[:HINTS]
                width = max(len("move"), *(len(named[one.action]) for one in found))
                self._screen.say(f"{'move':{width}}  visits  value")
                for one in found:
                    value = "–" if one.value is None else f"{one.value:+.2f}"
                    self._screen.say(f"{named[one.action]:{width}}  {one.share:6.0%}  {value:>5}")
            elif word == "help":
                self._screen.say(f"{HELP}\nmoves: {_listed(list(names))}")
            elif line:
                self.refused += 1
                self._screen.complain(f"'{line}' is no move here. Moves: {_listed(list(names))}. Or /help.")

    def _think(self) -> Sequence[Any]:
        with self._screen.waiting("thinking"):
            found: Sequence[Any] = self._table.think(self._ask)
        return found

    def _named(self) -> dict[int, str]:
        return {action: name for name, action in self._table.names().items()}


def result_text(returns: Sequence[float], seat: int) -> str:
    """How a game has ended for this seat."""
    each = ", ".join(
        f"{'you' if other == seat else f'player {other + 1}'} {value:+g}" for other, value in enumerate(returns)
    )
    others = [value for other, value in enumerate(returns) if other != seat]
    if not others:
        return f"The game is over: {each}."
    best = max(others)
    return (
        f"{'You have won' if returns[seat] > best else 'A draw' if returns[seat] == best else 'You have lost'}: {each}."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


class GameScreen(TalkScreen):
    """The game on standard output."""

    def read(self) -> str:
        return self.ask(PROMPT)

    def say(self, text: str) -> None:
        write(printable(text) + "\n", sys.stdout)


app = flags.command(NAME, flags.of(PlayOptions, NAME), COMMON, TEXT, execute)
