"""What is asked: requests as bodies, the same for the same seed and number, whoever is asked."""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from gpuinfer.errors import UsageError

Endpoint = Literal["completions", "chat", "evaluate"]
PATHS: Mapping[str, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "evaluate": "/v1/evaluate",
}
JSON, SAFETENSORS = "application/json", "application/x-safetensors"
WORDS = """
the of and to in is that it for was on are as with they be at one have this from by hot word but what some we can out
other were all there when up use your how said an each she which do their time if will way about many then them would
like so these her long make thing see him two has look more day could go come did number sound no most people my over
know water than call first who may down side been now find any new work part take get place made live where after back
little only round man year came show every good me give our under name very
""".split()  # noqa: SIM905 (nobody reads a hundred quotation marks)
MOST_BYTES = 64 << 20  # of a file of prompts

encode = msgspec.json.Encoder().encode


class Call(NamedTuple):
    body: bytes
    rows: int = 0
    headers: Sequence[tuple[str, str]] = ()


class Calls(ABC):
    """`make(number)`: the request of this number. `path`, `accept` and `stream` are those of all of them."""

    endpoint: Endpoint
    stream = False
    content_type = JSON

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    @abstractmethod
    def make(self, number: int) -> Call: ...


@dataclass(frozen=True)
class Length:
    """Tokens: any number from `least` to `most`, each as likely as the next."""

    least: int
    most: int

    def draw(self, dice: random.Random) -> int:
        return self.least if self.least == self.most else dice.randint(self.least, self.most)


@dataclass(frozen=True)
class WordsOfTokens:
    """How many words make a prompt of so many tokens, as the server's tokenizer counts them."""

    per_word: float = 1.0
    besides: float = 0.0  # of the chat template, or a token at the beginning

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.besides) / self.per_word))


@dataclass(kw_only=True)
class TextCalls(Calls):
    """Prompts, drawn or those of a file round and round, each with its wish for an answer."""

    endpoint: Endpoint
    model: str | None
    stream: bool
    seed: str
    input_tokens: Length
    output_tokens: Length
    given: Sequence[Mapping[str, Any]] = ()  # of a file; empty: they are drawn
    scale: WordsOfTokens = WordsOfTokens()
    users: int = 0  # sessions that are told; 0: nobody says who it is
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of every request

    def make(self, number: int) -> Call:
        dice = random.Random(f"{self.seed}/{number}")
        wanted = self.output_tokens.draw(dice)
        body: dict[str, Any] = {} if self.model is None else {"model": self.model}
        body["max_tokens"] = wanted
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.users:
            body["user"] = f"user-{dice.randrange(self.users)}"
        body |= self.more
        body |= self.given[number % len(self.given)] if self.given else self._drawn(dice)
        return Call(encode(body))

    def _drawn(self, dice: random.Random) -> dict[str, Any]:
        text = " ".join(dice.choices(WORDS, k=self.scale.words(self.input_tokens.draw(dice))))
        return {"messages": [{"role": "user", "content": text}]} if self.endpoint == "chat" else {"prompt": text}


@dataclass(kw_only=True)
class RowCalls(Calls):
    """Rows of features for `/v1/evaluate`: normally distributed, drawn once, and sent round and round."""

    rows: int
    features: int
    binary: bool
    seed: str
    model: str | None = None  # of several
    kept: int = 64  # different bodies
    endpoint: Endpoint = "evaluate"

    @property
    def path(self) -> str:
        return PATHS[self.endpoint] + ("" if self.model is None else f"?model={quote(self.model)}")

    def __post_init__(self) -> None:
        self.content_type = SAFETENSORS if self.binary else JSON
        self._bodies = [self._body(number) for number in range(self.kept)]

    def make(self, number: int) -> Call:
        return Call(self._bodies[number % self.kept], self.rows)

    def _body(self, number: int) -> bytes:
        import numpy as np

        dice = np.random.default_rng([*self.seed.encode(), number])
        rows = dice.standard_normal((self.rows, self.features)).astype("float32")
        if self.binary:
            from safetensors.numpy import save

            return bytes(save({"rows": rows}))
        values = [[round(value, 3) for value in row] for row in rows.tolist()]
        return encode({"x": values[0]} if self.rows == 1 else {"rows": values})


def prompts_of(path: Path, endpoint: Endpoint) -> list[dict[str, Any]]:
    """One request a line: JSON with `prompt` or `messages`, whose other fields go with it, or plain text.

    Raises `UsageError` for a file that cannot be read or holds nothing.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"--prompts {path} is larger than {MOST_BYTES >> 20} MB. Give a part of it.")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--prompts {path} cannot be read: {reason}. Give a file of JSON lines, or of text.") from None
    found = [_asked(line, endpoint) for line in text.splitlines() if line.strip()]
    if not found:
        raise UsageError(f"--prompts {path} holds no prompts. Give one JSON object a line, or one text.")
    return found


def _asked(line: str, endpoint: Endpoint) -> dict[str, Any]:
    """As the endpoint wants it: a prompt becomes a user's message, and messages their contents."""
    row = _row(line)
    for name in ("id", "custom_id", "metadata", "model"):
        row.pop(name, None)
    if endpoint == "chat" and "messages" not in row:
        row["messages"] = [{"role": "user", "content": row.pop("prompt", "")}]
    if endpoint != "chat" and "prompt" not in row:
        row["prompt"] = "\n".join(str(message.get("content", "")) for message in row.pop("messages", []))
    return row


def _row(line: str) -> dict[str, Any]:
    """A line as a JSON object, or as a text that is the prompt."""
    row: Any = line
    if line.lstrip().startswith(("{", '"')):
        with contextlib.suppress(msgspec.DecodeError):
            row = msgspec.json.decode(line)
    if not isinstance(row, dict):
        return {"prompt": row if isinstance(row, str) else line}
    body = row.get("body")  # of OpenAI's batches
    return dict(body if isinstance(body, dict) else row)
