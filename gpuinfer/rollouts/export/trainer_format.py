"""A trainer's form of the records: lines with the trainer's field names, and one field that the trainer ignores, with
everything else of the records, so that the very same groups can be read back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.files import FULL, put_whole
from gpuinfer.rollouts.export.samples import Sample, SamplePlace, samples
from gpuinfer.rollouts.record import Game, Group, Trajectory, Turn


class Kept(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beside one sample. `groups` (with the first sample of a group): the last is its own, emptied; those before it
    have no sample. `after` (in the very last sample): those that follow, which have none either.
    """

    place: SamplePlace
    groups: tuple[Group, ...] = ()
    after: tuple[Group, ...] = ()


class ExportPiece(Struct, frozen=True):
    """One sample as read from a file: `logprobs` and `mask` are as long as `response`."""

    kept: Kept
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]


Block = list[tuple[Sample, Kept]]  # of one group


def blocks(groups: Iterable[Group]) -> Iterator[Block]:
    """The samples of each group that has samples, with what is kept. Raises `UsageError` if there are none at all."""
    waiting: list[Group] = []
    held: Block = []  # until it is known what follows
    for group in groups:
        if not (found := samples(group)):
            waiting.append(group)
            continue
        if held:
            yield held
        nothing = {"prompt_tokens": (), "completion_tokens": (), "logprobs": ()}  # the samples hold them
        left = {_where(one.place): tuple(replace(turn, **nothing) for turn in one.turns) for one in found}
        first = Kept(place=found[0].place, groups=(*waiting, _with_contexts(group, left)))
        held = [(found[0], first), *((one, Kept(place=one.place)) for one in found[1:])]
        waiting = []
    if not held:
        raise UsageError("there is nothing to train on: no trajectory of the policy has an answer.")
    sample, kept = held[-1]
    yield [*held[:-1], (sample, replace(kept, after=tuple(waiting)))]


def by_start(block: Block) -> Iterator[Block]:
    """One block for each agent: the samples that are compared with one another."""
    agents: dict[str, Block] = {}
    for sample, kept in block:
        agents.setdefault(sample.start, []).append((sample, kept))
    yield from agents.values()


def restored(pieces: Iterable[ExportPiece]) -> Iterator[Group]:
    """The groups that `blocks` was given. Raises `ValueError` for pieces that do not belong together."""
    own: list[ExportPiece] = []
    for piece in pieces:
        if piece.kept.groups:
            if own:
                yield _filled(own)
            yield from piece.kept.groups[:-1]
            own = []
        elif not own:
            raise ValueError("its group is missing")
        own.append(piece)
    if own:
        yield _filled(own)
        for piece in own:
            yield from piece.kept.after


def _filled(pieces: Sequence[ExportPiece]) -> Group:
    group = pieces[0].kept.groups[-1]
    by_context = {
        (place, at, context): turns
        for place, game in enumerate(group.games)
        for at, trajectory in enumerate(game.trajectories)
        for context, (_, turns) in enumerate(trajectory.contexts())
    }
    new = {_where(piece.kept.place): _filled_turns(by_context, piece) for piece in pieces}
    return _with_contexts(group, new)


Where = tuple[int, int, int]  # game, trajectory, context


def _where(place: SamplePlace) -> Where:
    return place.game, place.trajectory, place.context


def _with_contexts(group: Group, new: Mapping[Where, tuple[Turn, ...]]) -> Group:
    """These contexts in the place of its own."""

    def trajectory(place: int, at: int, old: Trajectory) -> Trajectory:
        contexts = [new.get((place, at, context), turns) for context, (_, turns) in enumerate(old.contexts())]
        return replace(old, turns=tuple(chain.from_iterable(contexts)))

    def game(place: int, old: Game) -> Game:
        return replace(old, trajectories=tuple(trajectory(place, at, one) for at, one in enumerate(old.trajectories)))

    return replace(group, games=tuple(game(place, one) for place, one in enumerate(group.games)))


def _filled_turns(contexts: Mapping[Where, tuple[Turn, ...]], piece: ExportPiece) -> tuple[Turn, ...]:
    place = piece.kept.place
    turns = contexts.get(_where(place), ())
    tokens = piece.prompt + piece.response
    if len(turns) != len(place.sizes) or sum(map(sum, place.sizes)) != len(tokens):
        raise ValueError("it has not as many turns or tokens as it had")
    logprobs, mask = (0.0,) * len(piece.prompt) + piece.logprobs, (0,) * len(piece.prompt) + piece.mask
    if len(logprobs) != len(tokens) or len(mask) != len(tokens):
        raise ValueError("its tokens, mask and log-probabilities are not of one length")
    filled, at = [], 0
    for turn, (shown, drawn) in zip(turns, place.sizes, strict=True):
        begin, end = at + shown, at + shown + drawn
        if any(mask[at:begin]) or not all(mask[begin:end]):
            raise ValueError("its mask is not where its answers were")
        filled.append(
            replace(
                turn, prompt_tokens=tokens[at:begin], completion_tokens=tokens[begin:end], logprobs=logprobs[begin:end]
            )
        )
        at = end
    return tuple(filled)


Row = TypeVar("Row", bound=msgspec.Struct)
OWN = "gpuinfer"  # the field that the trainer ignores, wherever it stands


@dataclass
class Written:
    """What was written. `tokens`: those to train on."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0

    def counted(self, groups: Iterable[Group]) -> Iterator[Group]:
        for group in groups:
            self.groups += 1
            yield group


class Format(ABC, Generic[Row]):
    """The file format of one trainer. `line` is the type of a line, with the fields that the trainer reads."""

    name: str
    line: type[Row]

    @abstractmethod
    def lines(self, block: Block) -> Iterable[Row]:
        """The lines of one group."""

    @abstractmethod
    def pieces(self, line: Row) -> Iterator[ExportPiece]:
        """The samples in a line, in order. Raises `ValueError` for a line that `lines` has not made."""

    def store(self, file: IO[bytes], lines: Iterable[Row]) -> None:
        """All of them. One line is JSON, unless the trainer's own reader wants something else."""
        encode = msgspec.json.Encoder().encode
        file.writelines(encode(line) + b"\n" for line in lines)

    def load(self, file: IO[bytes]) -> Iterator[Row]:
        """The lines of a stored file, one at a time. Raises `ValueError` for any other file."""
        decode = msgspec.json.Decoder(self.line).decode
        for text in file:
            yield decode(text)

    def write(self, groups: Iterable[Group], path: str | Path) -> Written:
        """All of it is there when this returns, or nothing. Raises `UsageError` when nothing can be trained on, and
        `WorkError` when the disk is full.
        """
        written = Written()

        def lines() -> Iterator[Row]:
            for block in blocks(written.counted(groups)):
                written.samples += len(block)
                written.tokens += sum(sum(sample.mask) for sample, _ in block)
                yield from self.lines(block)

        try:
            put_whole(Path(path), lambda file: self.store(file, lines()))
        except OSError as error:
            cure = "Free some space" if error.errno in FULL else "Name another file"
            raise WorkError(f"{path} cannot be written: {error.strerror}. {cure}.") from error
        return written

    def read(self, path: str | Path) -> Iterator[Group]:
        """The very groups that were written; one is in memory at a time. Raises `UsageError` for another file."""
        number = 0

        def pieces(file: IO[bytes]) -> Iterator[ExportPiece]:
            nonlocal number
            for number, line in enumerate(self.load(file), 1):  # noqa: B007  the error names it
                yield from self.pieces(line)

        try:
            with Path(path).open("rb") as file:
                yield from restored(pieces(file))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}. Name what `export` has written.") from error
        except (ValueError, RecursionError) as error:
            what = f"{path}, after line {number}: {str(error).rstrip('.')}"
            why = f"{what}. Read what `gpuinfer rollouts export --to {self.name}` wrote."
            raise UsageError(why) from error
