"""A trainer's form: lines with the names that the trainer has, and one field that it ignores. Most are JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.files import put_whole
from gpuinfer.host.records import FULL
from gpuinfer.rollouts.export.kept import Block, Piece, blocks, restored
from gpuinfer.rollouts.record import Group

Row = TypeVar("Row", bound=msgspec.Struct)
OWN = "gpuinfer"  # the field that the trainer ignores, wherever it stands


@dataclass
class Written:
    """What a file holds. `tokens`: those to train on."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0

    def counted(self, groups: Iterable[Group]) -> Iterator[Group]:
        for group in groups:
            self.groups += 1
            yield group


class Format(ABC, Generic[Row]):
    """How one trainer has its samples. `line` is the type of a line: its fields are those that the trainer reads."""

    name: str
    line: type[Row]

    @abstractmethod
    def lines(self, block: Block) -> Iterable[Row]:
        """Those of one group."""

    @abstractmethod
    def pieces(self, line: Row) -> Iterator[Piece]:
        """What a line says of its samples, in their order. Raises `ValueError` for what `lines` has not made."""

    def store(self, file: IO[bytes], lines: Iterable[Row]) -> None:
        """All of them. One line is JSON, unless the trainer's own reader wants something else."""
        encode = msgspec.json.Encoder().encode
        file.writelines(encode(line) + b"\n" for line in lines)

    def load(self, file: IO[bytes]) -> Iterator[Row]:
        """What `store` has stored, one at a time. Raises `ValueError` for anything else."""
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

        def pieces(file: IO[bytes]) -> Iterator[Piece]:
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
