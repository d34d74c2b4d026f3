"""The prompts of a comparison of generators, as tokens: each run gets its own, and all generators the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError

SHORTEST, LONGEST = 8, 24  # tokens of a prompt that is drawn
CHUNK = 1 << 20


@dataclass(frozen=True)
class Drawn:
    """Random tokens, fresh in every run: nobody gains from having seen them before."""

    vocabulary: int
    end_tokens: tuple[int, ...]
    seed: int
    shortest: int = SHORTEST
    longest: int = LONGEST

    def of(self, repeat: int, count: int) -> list[list[int]]:
        import numpy as np

        random = np.random.default_rng([self.seed, repeat, count])
        usable = np.setdiff1d(np.arange(self.vocabulary), self.end_tokens)
        lengths = random.integers(self.shortest, self.longest + 1, count)
        return [random.choice(usable, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Given:
    """Those of a file, run after run where the last one ended, round and round."""

    tokens: Sequence[Sequence[int]]

    @property
    def longest(self) -> int:
        return max(map(len, self.tokens))

    def of(self, repeat: int, count: int) -> list[list[int]]:
        start = repeat * count
        return [list(self.tokens[(start + number) % len(self.tokens)]) for number in range(count)]


Prompts = Drawn | Given


def from_file(path: Path, language: Any, most: int) -> Given:
    """The first `most` rows of a file such as `generate` takes. Raises `UsageError` for what cannot be a prompt."""
    from gpuinfer.errors import BadPrompt

    rows = list(islice(_rows(path), most))
    if not rows:
        raise UsageError(f"--prompts {path} holds no prompts. Give one JSON object a line.")
    tokens = language.encode(rows)
    for number, one in enumerate(tokens, 1):
        if isinstance(one, BadPrompt):
            raise UsageError(f"--prompts {path}, row {number}: {one}")
    return Given([one.tolist() for one in tokens])


def _rows(path: Path) -> Any:
    from gpuinfer.workloads.generate.asked import Defaults, Reader
    from gpuinfer.workloads.generate.splitting import Either

    reader, splitter, number = Reader(Defaults(strict=False)), Either(), 0
    try:
        with path.open("rb") as file:
            while True:
                data = file.read(CHUNK)
                for piece in splitter.feed(data) if data else splitter.end():
                    number += 1
                    asked = reader.read(piece)
                    if asked.error is not None:
                        raise UsageError(f"--prompts {path}, row {number}: {asked.error}")
                    yield asked.prompt
                if not data:
                    return
    except OSError as error:
        raise UsageError(f"--prompts {path} cannot be read: {error.strerror}. Give a file of prompts.") from error
