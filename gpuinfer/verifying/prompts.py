"""Which prompts are asked: the user's own, or a set of different lengths, signs and common beginnings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt
from gpuinfer.text.generator.prepared import Language
from gpuinfer.workloads.generate.asked import Defaults, Reader
from gpuinfer.workloads.generate.splitting import Either, Piece

CHUNK = 1 << 20
SHOWN = 60  # characters of a prompt
ENOUGH = 6  # built-in texts that a tokenizer must know, or prompts are drawn
DRAWN_LENGTHS = (1, 2, 5, 11, 23, 24, 47, 96, 130)

_STORY = (
    "The harbour lay quiet in the early light. A boat came in with its nets full, and the men on the quay counted the "
    "boxes as they were handed up: cod, haddock, a few plaice, and one small shark that nobody had meant to catch. "
)
TEXTS = (
    "A",
    "The sea",
    "Write a word for harbour:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Zürich, naïve café, 東京, Ωmega 🙂",
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef median(values):\n",
    '{"name": "Ada", "age": 36, "tags": ["poet", "engine"], "alive":',
    _STORY + "Then",
    _STORY + "By noon the quay was empty again, and",
    "Question: why is the sky blue?\nAnswer: because air scatters blue light most.\nQuestion: why is the sea green?\n",
    _STORY * 2 + "It was the year in which",
    "  \n\n\t  indented, and then some",
)


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt, as tokens: int32 [tokens]. `text` is what it is called on the screen."""

    text: str
    tokens: NDArray[np.int32]
    asked: Prompt | None = None  # where it came as a text or a chat


def built_in(language: Language, vocabulary: int, room: int, seed: int) -> list[Item]:
    """Prompts of at most `room` tokens. A tokenizer that knows too few of the texts (characters, say) gets tokens."""
    found = language.encode([Prompt(text=text) for text in TEXTS])
    items = [
        Item(shown(text), one[:room], Prompt(text=text))
        for text, one in zip(TEXTS, found, strict=True)
        if not isinstance(one, Exception)
    ]
    if len(items) >= ENOUGH:
        return items
    draw = np.random.default_rng(seed)
    drawn = [draw.integers(0, vocabulary, min(length, room), dtype=np.int32) for length in DRAWN_LENGTHS]
    return [*items, *(Item(f"{len(tokens)} tokens by chance", tokens) for tokens in drawn)]


def from_file(path: Path, limit: int, language: Language, room: int) -> list[Item]:
    """The first `limit` prompts of a file as `generate` reads it. Raises `UsageError`, naming a row that is wrong."""
    items = []
    for number, piece in enumerate(_pieces(path), 1):
        if number > limit:
            break
        asked = Reader(Defaults()).read(piece)
        if asked.prompt is None:
            raise UsageError(f"--prompts {path}, row {number}: {asked.error}")
        (tokens,) = language.encode([asked.prompt])
        if isinstance(tokens, Exception):
            raise UsageError(f"--prompts {path}, row {number}: {tokens}")
        if len(tokens) > room:
            raise UsageError(
                f"--prompts {path}, row {number}: {len(tokens)} tokens, and the model has room for {room} beside an "
                "answer. Shorten it, or use fewer --new-tokens."
            )
        items.append(Item(_called(asked.prompt), tokens, asked.prompt))
    if not items:
        raise UsageError(f"--prompts {path}: there are no prompts in it. Give one JSON object a line.")
    return items


def shown(text: str) -> str:
    """A text in one short line."""
    line = text.replace("\n", "↵").replace("\t", " ")
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


def _called(prompt: Prompt) -> str:
    if prompt.messages is not None:
        return shown(str(prompt.messages[-1].get("content", "")))
    return shown(prompt.text if prompt.text is not None else f"tokens {list(prompt.tokens or ())[:12]}")


def _pieces(path: Path) -> Iterator[Piece]:
    splitter = Either()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield from splitter.feed(chunk)
    except OSError as error:
        raise UsageError(f"--prompts {path} cannot be read: {error.strerror}. Give a file of prompts.") from error
    yield from splitter.end()
