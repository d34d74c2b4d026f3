"""Compiles a grammar in a child process first, with limits on time and memory.

llguidance's own limits (`limits`) bound most grammars, but not all: an `allOf` of patterns, `&` in Lark and several
`multipleOf` double its work with each part, without end, and a thread that compiles cannot be stopped. A grammar that
exceeds the child's limits is refused.

The child runs this file, by its path, so that it imports nothing but llguidance.
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

SECONDS = 10.0  # per grammar
MEMORY = 2 * 2**30  # bytes of the child
_HEADER = struct.Struct("<I")


class GrammarExaminer:
    """One child process, started on first use and after it was killed. Threads share it, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: Any = None

    def examine(self, grammar: str) -> str:
        """The fault of a grammar in llguidance's syntax; "" if there is none."""
        text = grammar.encode()
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self.close()
                    command = [sys.executable, "-I", os.path.abspath(__file__)]
                    pipe = subprocess.PIPE
                    self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
                    self._stop = weakref.finalize(self, _end, self._process)
                grammars, answers = self._process.stdin, self._process.stdout
                assert grammars is not None
                assert answers is not None
                grammars.write(_HEADER.pack(len(text)) + text)
                grammars.flush()
                answer, end = b"", time.monotonic() + SECONDS
                while not answer.endswith(b"\n"):
                    ready, _, _ = select.select([answers], [], [], max(0.0, end - time.monotonic()))
                    more = os.read(answers.fileno(), 1 << 16) if ready else b""
                    if not more:
                        raise OSError("no answer")
                    answer += more
                return str(json.loads(answer))
            except (OSError, ValueError):
                self.close()
                return f"it takes more than {SECONDS:g} s or {MEMORY >> 30} GiB to compile"

    def close(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None


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
    """llguidance's limits, in the child and where the grammar is used. A lexer state takes 1 to 2 kB."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


def complaint(tokenizer: Any, grammar: str) -> str:
    """The library's error for a grammar, its first mask included."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error() and not matcher.is_stopped():
        matcher.compute_bitmask()
    return str(matcher.get_error())


def main(grammars: IO[bytes], answers: IO[bytes]) -> None:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    where_there_are_limits = contextlib.suppress(
        ImportError, NameError, OSError, ValueError
    )  # else the parent's timeout remains
    with where_there_are_limits:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=[256])
    while len(header := grammars.read(_HEADER.size)) == _HEADER.size:
        with where_there_are_limits:  # of the CPU time of this grammar, in case the parent has died
            hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + 2 * SECONDS), hard))
        grammar = grammars.read(_HEADER.unpack(header)[0]).decode()
        answers.write(json.dumps(complaint(tokenizer, grammar)[:2000]).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
