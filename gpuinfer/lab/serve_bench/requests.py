"""Requests as bodies, the same for the same seed and number, and their responses as they arrive.

A stream's events are counted by their bytes, and few of them are ever parsed: a client that parsed a thousand streams
would measure itself. All times are of `time.perf_counter`.
"""

from __future__ import annotations

import contextlib
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from gpuinfer.errors import UsageError
from gpuinfer.models.row_layout import RowLayout

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
""".split()  # noqa: SIM905 (a hundred quotation marks are hard to read)
MOST_BYTES = 64 << 20  # of a file of prompts

encode = msgspec.json.Encoder().encode


class PlannedRequest(NamedTuple):
    body: bytes
    rows: int = 0
    headers: Sequence[tuple[str, str]] = ()


class RequestSource(ABC):
    """`make(number)`: the request of this number. `path`, `accept` and `stream` are those of all of them."""

    endpoint: Endpoint
    stream = False
    content_type = JSON

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    @abstractmethod
    def make(self, number: int) -> PlannedRequest: ...


@dataclass(frozen=True)
class LengthRange:
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
class TextRequests(RequestSource):
    """Prompts, drawn or those of a file round and round, each with its wish for an answer."""

    endpoint: Endpoint
    model: str | None
    stream: bool
    seed: str
    input_tokens: LengthRange
    output_tokens: LengthRange
    given: Sequence[Mapping[str, Any]] = ()  # of a file; empty: they are drawn
    scale: WordsOfTokens = WordsOfTokens()
    users: int = 0  # users that requests name; 0: requests name none
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of every request

    def make(self, number: int) -> PlannedRequest:
        dice = random.Random(f"{self.seed}/{number}")
        wanted = self.output_tokens.draw(dice)
        body: dict[str, Any] = {} if self.model is None else {"model": self.model}
        body["max_tokens"] = wanted
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.users:
            body["user"] = f"user-{dice.randrange(self.users)}"
        body |= self.more
        if self.given:
            body |= self.given[number % len(self.given)]
        else:
            text = " ".join(dice.choices(WORDS, k=self.scale.words(self.input_tokens.draw(dice))))
            messages = {"messages": [{"role": "user", "content": text}]}
            body |= messages if self.endpoint == "chat" else {"prompt": text}
        return PlannedRequest(encode(body))


@dataclass(kw_only=True)
class RowRequests(RequestSource):
    """Rows for `/v1/evaluate`, of features or of a layout: normally distributed, whole numbers zeros and ones, drawn
    once, and sent round and round.
    """

    rows: int
    features: int
    layout: RowLayout | None = None
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

    def make(self, number: int) -> PlannedRequest:
        return PlannedRequest(self._bodies[number % self.kept], self.rows)

    def _body(self, number: int) -> bytes:
        import numpy as np

        dice = np.random.default_rng([*self.seed.encode(), number])
        if self.layout is not None:
            return self._shaped(self.layout, dice)
        rows = dice.standard_normal((self.rows, self.features)).astype("float32")
        if self.binary:
            from safetensors.numpy import save

            return bytes(save({"rows": rows}))
        values = [[round(value, 3) for value in row] for row in rows.tolist()]
        return encode({"x": values[0]} if self.rows == 1 else {"rows": values})

    def _shaped(self, layout: RowLayout, dice: Any) -> bytes:
        from gpuinfer.models.row_format import to_body
        from gpuinfer.models.row_layout import drawn_rows, unpacked_arrays

        leaves = unpacked_arrays(drawn_rows(layout, self.rows, dice), layout)
        if self.binary:
            return to_body(dict(zip(layout.names, leaves, strict=True)))
        return encode({"rows": layout.arrange([leaf.astype(object).tolist() for leaf in leaves])})


def read_prompts(path: Path, endpoint: Endpoint) -> list[dict[str, Any]]:
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
    found = []
    for line in filter(str.strip, text.splitlines()):
        row: Any = line  # a JSON object, or a text that is the prompt
        if line.lstrip().startswith(("{", '"')):
            with contextlib.suppress(msgspec.DecodeError):
                row = msgspec.json.decode(line)
        if isinstance(row, dict):
            row = dict(row["body"]) if isinstance(row.get("body"), dict) else row  # of OpenAI's batches
        else:
            row = {"prompt": row if isinstance(row, str) else line}
        for name in ("id", "custom_id", "metadata", "model"):
            row.pop(name, None)
        # As the endpoint wants it: a prompt becomes a user's message, and messages their contents.
        if endpoint == "chat" and "messages" not in row:
            row["messages"] = [{"role": "user", "content": row.pop("prompt", "")}]
        if endpoint != "chat" and "prompt" not in row:
            row["prompt"] = "\n".join(str(message.get("content", "")) for message in row.pop("messages", []))
        found.append(row)
    if not found:
        raise UsageError(f"--prompts {path} holds no prompts. Give one JSON object a line, or one text.")
    return found


clock = perf_counter


class RequestRecord:
    """`due`: when it was to be sent, from which all its latencies count. `lag_s`: how late the sender itself was."""

    __slots__ = ("due", "ended", "error", "events", "first", "input_tokens", "lag_s", "last", "route", "rows", "tokens")

    def __init__(self, due: float) -> None:
        self.due = due
        self.lag_s = 0.0
        self.first = 0.0  # the first event that carries content; without a stream, the first byte. 0: there was none
        self.last = 0.0  # the last event that carries content
        self.ended = 0.0  # the last byte, or the failure
        self.events: array[float] | None = None  # when each event with content came; None: not streamed
        self.tokens: int | None = None  # of the answer, as its usage says
        self.input_tokens: int | None = None
        self.rows = 0  # of an evaluation
        self.error: str | None = None  # its kind, such as `HTTP 429` or `timeout`
        self.route: str | None = None  # who answered and why, as the router says

    @property
    def e2e_s(self) -> float:
        return self.ended - self.due

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from when the request was due; None for an answer in one piece."""
        return self.first - self.due if self.events is not None and self.first else None

    @property
    def counted(self) -> int:
        """Tokens of the answer: of its usage, else its events, of which each is taken for one."""
        return self.tokens if self.tokens is not None else len(self.events or ())

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of fewer than two."""
        if self.ttft_s is None or self.counted < 2:
            return None
        return (self.last - self.first) / (self.counted - 1)


EVENT = b"\ndata:"
TAIL = 16 << 10  # bytes of the end that are kept: the last events with content, usage and end


class EventCounter:
    """The events of one stream. Tell it each part of the body with the time it came, and then `finish`."""

    __slots__ = ("_begun", "_edge", "_record", "_tail", "_times")

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._times = record.events = array("d")
        self._edge = b"\n"  # the end of what came before: an event's first bytes may come in two parts
        self._tail = b""
        self._begun = False

    def feed(self, at: float, data: bytes) -> None:
        tail = self._tail + data
        self._tail = tail[-TAIL:] if len(tail) > TAIL else tail
        window = self._edge + data
        count = window.count(EVENT)
        self._edge = window[1 - len(EVENT) :]
        if not self._begun and b"\n" in data:
            # From the first event that has content on, all are counted: those without stand at the end.
            whole = self._tail[: self._tail.rfind(b"\n") + 1]
            content = (before for before, line in enumerate(lines(whole)) if has_content(decoded(line)))
            if (before := next(content, None)) is not None:
                self._begun, self._record.first = True, at
                count = (b"\n" + self._tail).count(EVENT) - before
        if self._begun:
            for _ in range(count):
                self._times.append(at)

    def finish(self) -> None:
        """Take the events without content off the end, and read the usage or the error there."""
        record, trailing, done = self._record, 0, False
        for line in reversed(list(lines(self._tail))):
            if line == b"[DONE]":
                trailing, done = trailing + 1, True
                continue
            event = decoded(line)
            if event.get("error"):
                record.error = "error in the stream"
            usage = event.get("usage")
            if isinstance(usage, dict) and record.tokens is None:
                record.tokens, record.input_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
            if has_content(event):
                break
            trailing += 1
        if self._begun and trailing:
            del self._times[max(1, len(self._times) - trailing) :]
        record.last = self._times[-1] if self._times else 0.0
        if not done and record.error is None:
            record.error = "stream cut off"


def lines(data: bytes) -> Iterator[bytes]:
    """What follows `data:` in each whole line; a first line whose beginning is gone is none."""
    for line in data.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def decoded(data: bytes) -> dict[str, Any]:
    """A JSON object; what is none is empty."""
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def has_content(event: dict[str, Any]) -> bool:
    """Whether any of its choices says something."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta")
        if delta is None:
            if choice.get("text"):
                return True
        elif any(value for name, value in delta.items() if name != "role"):
            return True
    return False


def read_whole(record: RequestRecord, body: bytes) -> None:
    """The usage of an answer that came at once; anything else is an error."""
    answer = decoded(body)
    usage = answer.get("usage")
    if isinstance(usage, dict):
        record.tokens, record.input_tokens = usage.get("completion_tokens"), usage.get("prompt_tokens")
    if not answer.get("choices"):
        record.error = "no answer in the body"
