"""The records of a run of rollouts, as trainers read them (`export`), and as people do (`show`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpuinfer.cli.subcommands import WORDS
from gpuinfer.errors import UnknownName, UsageError, WorkError
from gpuinfer.host.files import no_folder, put_whole

if TYPE_CHECKING:
    from gpuinfer.rollouts.record import Group

SHOWN = 40  # groups, unless --all asks for more
PARQUET = "parquet"  # the records themselves, in the columns of `--format parquet`
COLUMNS = ("group", "games", "turns", "in", "out", "reward", "versions")


def _names() -> list[str]:
    from gpuinfer.rollouts.export import FORMATS

    return [*FORMATS, PARQUET]


FOLDER = typer.Argument(help="what --out of the run named", metavar="DIR")
TO = typer.Option(
    ..., "--to", metavar="TRAINER", help="verl, skyrl, prime-rl, trl, art or parquet.", autocompletion=_names
)
OUT = typer.Option(..., "--out", metavar="FILE", help="Write it to this file, which must not be there.")
ALL = typer.Option(False, "--all", help=f"Every group, not only the first {SHOWN}.")


def export(folder: Path = FOLDER, to: str = TO, out: Path = OUT) -> None:
    from gpuinfer.rollouts.export import FORMATS
    from gpuinfer.rollouts.files import read

    if to not in _names():
        raise UnknownName("trainer", to, _names(), label="Trainers")
    if out.exists():
        raise UsageError(f"{out} exists already. Give another --out.")
    if not out.parent.is_dir():
        raise no_folder("--out", out)
    if to == PARQUET:
        _write_parquet(folder, out)
        return
    written = FORMATS[to].write(read(folder), out)
    of = f"{written.groups:,} groups, {written.samples:,} samples, {written.tokens:,} tokens to train on"
    print(f"gpuinfer: {out} is for {to}: {of}", file=sys.stderr)


def _write_parquet(folder: Path, out: Path) -> None:
    from gpuinfer.rollouts.export import Written
    from gpuinfer.rollouts.files import parquet, read

    parquet.require_pyarrow()
    written = Written()
    try:
        put_whole(out, lambda file: parquet.write_groups(file, written.counted(read(folder))))
    except OSError as error:
        raise WorkError(f"{out} cannot be written: {error.strerror}. Free some space, or name another file.") from error
    print(f"gpuinfer: {out} holds {written.groups:,} groups, a row a turn", file=sys.stderr)


def show_exports(folder: Path = FOLDER, all_of_them: bool = ALL) -> None:
    from gpuinfer.cli.screen.display import comparison
    from gpuinfer.rollouts.files import header, read

    settings = header(folder)
    tally = _Tally()
    rows = list(tally.rows(read(folder), None if all_of_them else SHOWN))
    notes = [("records", f"{settings.get('format')}, {tally.said()}")]
    if tally.groups > len(rows):
        notes.append(("", f"{tally.groups - len(rows):,} groups more: --all"))
    comparison(f"rollouts in {folder}", COLUMNS, rows, notes)


class _Tally:
    """Adds up what is shown."""

    def __init__(self) -> None:
        self.groups = self.games = self.read = self.drawn = 0

    def said(self) -> str:
        counts = f"{self.groups:,} groups, {self.games:,} games"
        return f"{counts}; tokens: {self.read:,} shown to the models, {self.drawn:,} drawn"

    def rows(self, groups: Iterator[Group], most: int | None) -> Iterator[tuple[str, ...]]:
        for group in groups:
            turns = list(group.turns())
            shown = sum(len(turn.prompt_tokens) for turn in turns)
            drawn = sum(len(turn.completion_tokens) for turn in turns)
            self.groups += 1
            self.games += len(group.games)
            self.read += shown
            self.drawn += drawn
            if most is None or self.groups <= most:
                yield _row(group, len(turns), shown, drawn)


def _row(group: Group, turns: int, shown: int, drawn: int) -> tuple[str, ...]:
    rewards = [one.reward for game in group.games for one in game.trajectories if one.trainable]
    reward = f"{sum(rewards) / len(rewards):.3g} ({min(rewards):.3g}…{max(rewards):.3g})" if rewards else "–"
    games = f"{len(group.games):,}" + (f" (+{len(group.failed):,} replaced)" if group.failed else "")
    counts = (f"{count:,}" for count in (turns, shown, drawn))
    versions = ", ".join(version or "start" for version in group.versions) or "–"
    return (group.id, games, *counts, reward, versions)


def _app(word: str, call: Callable[..., None]) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(word, help=WORDS["rollouts"][word], context_settings={"help_option_names": ["-h", "--help"]})(call)
    return app


COMMANDS = {word: _app(word, call) for word, call in (("export", export), ("show", show_exports))}
