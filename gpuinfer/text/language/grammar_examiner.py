"""Compiles a grammar in another process first, where it may take only so much time and memory.

The library bounds most of what a grammar can cost, but not all: patterns that must hold together may double its work
with each of them, and what it allocates there cannot be stopped from within. A grammar that kills its examiner goes no
further.

This file is also what the other process runs. It is started by its path, so that it imports nothing but llguidance.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import IO, Any

SECONDS = 10.0  # of one grammar, on the clock
MEMORY = 2 * 2**30  # bytes of the other process
_HEADER = struct.Struct("<I")


class GrammarExaminer:
    """One other process, started when it is first needed and again after it was killed. Threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Any = None

    def examine(self, grammar: str) -> str:
        """What is wrong with a grammar of llguidance; "" when nothing is."""
        text = grammar.encode()
        with self._lock:
            try:
                process = self._started()
                _write(process.stdin, _HEADER.pack(len(text)) + text)
                return str(json.loads(self._line(process)))
            except (OSError, ValueError):
                self.close()
                return f"it takes more than {SECONDS:g} s or {MEMORY >> 30} GiB to compile"

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            command = [sys.executable, "-I", os.path.abspath(__file__)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            self._stop = weakref.finalize(self, _end, self._process)
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The answer. Raises `OSError` when none has come in time."""
        answer, end = b"", time.monotonic() + SECONDS
        answers = process.stdout.fileno() if process.stdout else -1
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([answers], [], [], max(0.0, end - time.monotonic()))
            more = os.read(answers, 1 << 16) if ready else b""
            if not more:
                raise OSError("no answer")
            answer += more
        return answer


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    if pipe is None:
        raise OSError("no pipe")
    pipe.write(data)
    pipe.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class _Bytes:
    """The smallest vocabulary: 256 bytes and an end."""

    tokens = [*(bytes([byte]) for byte in range(256)), b"<|the end|>"]  # noqa: RUF012
    special_token_ids, eos_token_id, bos_token_id = (256,), 256, None

    def __call__(self, text: Any) -> list[int]:
        return []


def limits() -> Any:
    """Of llguidance itself, here and where the grammar is used. A state of its lexer takes 1 to 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


def complaint(tokenizer: Any, grammar: str) -> str:
    """What the library says of a grammar, and of its first step."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def _bound() -> None:
    """Bound this process; the clock of the other side ends it where there are no such limits."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_next() -> None:
    """A grammar may use so much of the processor, should nobody be left to stop it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + 2 * SECONDS), hard))


def main(grammars: IO[bytes], answers: IO[bytes]) -> None:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    _bound()
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[256])
    while len(header := grammars.read(_HEADER.size)) == _HEADER.size:
        _bound_next()
        grammar = grammars.read(_HEADER.unpack(header)[0]).decode()
        answers.write(json.dumps(complaint(tokenizer, grammar)[:2000]).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
