"""The lines of the output: an answer or an error, in our own form or in that of OpenAI's batches.

They are written here and read back when a run is resumed: which rows are done, and which lines cannot stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt, GpuinferError
from gpuinfer.generation import Generation
from gpuinfer.host import error_text
from gpuinfer.http.http_exchange import error_body
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.responses import Envelope, plain_logprob, response, status_of
from gpuinfer.serving.openai.row_names import KEY_BYTES, KeySet, NamedRow

BATCH_ANSWER = "batch_req_"  # before the digest, in the id of a batch's answer


class TokenUsage(Struct, kw_only=True):
    """In tokens."""

    prompt_tokens: int
    completion_tokens: int


class SampleLine(Struct, kw_only=True, omit_defaults=True):
    """One of several answers to a prompt."""

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: list[dict[str, Any]] | None = None


class AnswerTiming(Struct, kw_only=True):
    """How the answer came about: what differs from run to run. In seconds, but for the tokens."""

    first_token_s: float  # from the admission to a slot
    seconds: float  # from the admission to the last token
    total_s: float  # from when the row was asked to its answer
    cached_tokens: int  # of the prompt's, those that had been computed for another: who came first decides


class Failure(Struct, kw_only=True, omit_defaults=True):
    """Why a row has no answer."""

    type: str
    message: str
    row: int  # its place among the rows of the input, from 1
    line: int  # the line of the input that it begins on, as an editor counts; of Parquet its row
    file: str | None = None  # of several


class OutputLine(Struct, kw_only=True, omit_defaults=True):
    """A row of the output. With several answers they stand in `samples`, else one stands here."""

    id: str | int
    model: str | None = None  # that has answered, of several
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: list[dict[str, Any]] | None = None
    samples: list[SampleLine] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    usage: TokenUsage | None = None
    timing: AnswerTiming | None = None
    error: Failure | None = None
    metadata: dict[str, Any] | None = None
    digest: str = ""


class LineWriter:
    """Writes answers as lines of JSON. `model` is what a batch's answer calls it when its request named none."""

    def __init__(self, *, token_ids: bool = False, timing: bool = False, model: str = "") -> None:
        self._token_ids, self._timing, self._model = token_ids, timing, model
        self._encode = msgspec.json.Encoder().encode

    def answer(self, row: NamedRow, generation: Generation, seconds: float) -> bytes:
        """The line of a row that was answered, `seconds` after it was asked."""
        if row.openai is not None:
            envelope = Envelope(
                row.digest,
                row.openai == "chat",
                row.model or self._model,
                token_ids=self._token_ids,
                cached=self._timing,
            )
            return self._batch_line(row, 200, response(envelope, generation), None)
        samples = [
            SampleLine(
                text=one.text,
                finish_reason=one.finish_reason,
                stop_reason=one.stop_reason,
                token_ids=one.tokens if self._token_ids else None,
                logprobs=None if one.logprobs is None else [plain_logprob(each) for each in one.logprobs],
            )
            for one in generation.completions
        ]
        usage = TokenUsage(
            prompt_tokens=generation.prompt_tokens,
            completion_tokens=sum([len(one.tokens) for one in generation.completions]),
        )
        line = OutputLine(id=row.id, model=row.model, usage=usage, metadata=row.metadata, digest=row.digest)
        if self._timing:
            line.timing = AnswerTiming(
                first_token_s=generation.first_token_s,
                seconds=generation.seconds,
                total_s=seconds,
                cached_tokens=generation.cached_tokens,
            )
        if generation.prompt_logprobs is not None:
            line.prompt_logprobs = [None if one is None else plain_logprob(one) for one in generation.prompt_logprobs]
        if len(samples) > 1:
            line.samples = samples
        else:
            (one,) = samples
            line.text, line.finish_reason, line.stop_reason = one.text, one.finish_reason, one.stop_reason
            line.token_ids, line.logprobs = one.token_ids, one.logprobs
        return self._encode(line) + b"\n"

    def error(self, row: NamedRow, error: GpuinferError) -> bytes:
        """The line of a row that has no answer. When the row's own words cannot be written it goes without them."""
        try:
            return self._error(row, error)
        except Exception:  # noqa: BLE001 - an error must always get out
            plain_id = str(row.id).encode(errors="backslashreplace").decode()
            return self._error(msgspec.structs.replace(row, id=plain_id, metadata=None), error)

    def _error(self, row: NamedRow, error: GpuinferError) -> bytes:
        """Its `type` is for scripts."""
        message = " ".join(error_text.safe_str(error).split())
        kind = (
            "bad_row" if isinstance(error, BadRequest) else "bad_prompt" if isinstance(error, BadPrompt) else "failed"
        )
        if row.openai is None:
            failure = Failure(type=kind, message=message, row=row.number, line=row.line, file=row.file)
            line = OutputLine(id=row.id, model=row.model, error=failure, metadata=row.metadata, digest=row.digest)
            return self._encode(line) + b"\n"
        fault: dict[str, Any] = {"code": kind, "message": message, "row": row.number, "line": row.line}
        if row.file is not None:
            fault["file"] = row.file
        return self._batch_line(row, status_of(error), error_body(message, kind), fault)

    def _batch_line(self, row: NamedRow, status: int, body: dict[str, Any], fault: dict[str, Any] | None) -> bytes:
        line = {
            "id": BATCH_ANSWER + row.digest,
            "custom_id": row.id,
            "response": {"status_code": status, "request_id": row.digest, "body": body},
            "error": fault,
            **({} if row.metadata is None else {"metadata": row.metadata}),
        }
        return self._encode(line) + b"\n"


BLOCK = 1024


class _DoneLine(Struct):
    id: str | int = ""
    digest: str = ""
    error: Raw = Raw(b"null")


_decode = msgspec.json.Decoder(_DoneLine).decode


def digest_key(digest: str) -> bytes:
    """A row's digest as `Seen` keeps it. Raises `ValueError` for what is none."""
    key = bytes.fromhex(digest)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{digest} is no digest")
    return key


def read_key(line: bytes) -> tuple[bytes, bool] | None:
    """The key of a line's row, and whether the line is an error; None for what no run of ours has written."""
    try:
        found = _decode(line)
        key = digest_key(found.digest or str(found.id).removeprefix(BATCH_ANSWER))
    except (ValueError, RecursionError):
        return None
    return (key, bytes(found.error) != b"null") if line.endswith(b"\n") else None


class DoneRows:
    """The rows of an output, by one look at all its lines. `retry`: rows with errors count as not done."""

    def __init__(self, file: IO[bytes], retry: bool) -> None:
        self.rows = KeySet()
        self.dropped = 0  # lines that cannot stay: unreadable ones, and errors to be tried again
        self.unreadable = 0  # of them, those that no run has written so
        self.whole_bytes = 0  # up to the end of the last whole line
        self._retry = retry
        block: list[bytes] = []
        for line in file:
            if not line.endswith(b"\n"):
                break  # torn: it is cut off
            self.whole_bytes += len(line)
            if (key := self.keeps(line)) is not None:
                block.append(key)
            if len(block) >= BLOCK:
                self.rows.count(block)
                block = []
        self.rows.count(block)

    def keeps(self, line: bytes) -> bytes | None:
        """The key of a line that stays; None for one that does not, which is counted."""
        found = read_key(line)
        if found is not None and not (found[1] and self._retry):
            return found[0]
        self.dropped += 1
        self.unreadable += found is None
        return None


class EarlierAnswers:
    """Answers of an output that was out of order or had errors, to be taken over when their rows come by.

    Keeps 17 bytes a line in memory. The errors among them are not taken over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        keys, offsets, position = [], [], 0
        for line in self._file:
            found = read_key(line)
            if found is not None and not found[1]:
                keys.append(found[0][:8])
                offsets.append(position)
            position += len(line)
        highs = np.frombuffer(b"".join(keys), np.uint64)
        order = highs.argsort(kind="stable")
        self._keys: NDArray[np.uint64] = highs[order]
        self._offsets: NDArray[np.int64] = np.array(offsets, np.int64)[order]
        self._taken = np.zeros(len(order), bool)

    def take(self, digest: str) -> bytes | None:
        """The line of the row of this digest, which has not been taken before."""
        key = digest_key(digest)
        word = np.frombuffer(key[:8], np.uint64)
        left, right = int(self._keys.searchsorted(word, "left")[0]), int(self._keys.searchsorted(word, "right")[0])
        for index in range(left, right):
            line = self._line(index)
            found = read_key(line)
            if found is not None and found[0] == key and not self._taken[index]:
                self._taken[index] = True
                return line
        return None

    def rest(self) -> Iterator[bytes]:
        """Lines of rows that the input has no more, in their old order."""
        left = np.flatnonzero(~self._taken)
        for index in left[self._offsets[left].argsort(kind="stable")]:
            yield self._line(int(index))

    def _line(self, index: int) -> bytes:
        self._file.seek(int(self._offsets[index]))
        return self._file.readline()

    def close(self) -> None:
        self._file.close()
