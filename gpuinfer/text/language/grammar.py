"""Constrained decoding: constraints become grammars of llguidance (Moskal et al. 2025), within limits, and a matcher
computes which tokens may come next.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint
from gpuinfer.host.extras import missing_extra
from gpuinfer.text.language.detokenizer import Codec
from gpuinfer.text.language.grammar_examiner import GrammarExaminer, limits

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from gpuinfer.text.language.list_trie import Tries
    from gpuinfer.text.language.list_walks import ListedMatcher

LONGEST_SCHEMA = 128 * 1024  # characters of JSON
LONGEST_REGEX = 16 * 1024
LONGEST_GRAMMAR = 64 * 1024
LONGEST_CHOICES = 256 * 1024  # characters of all together
MOST_CHOICES = 10_000
DEEPEST = 64  # levels of a schema
SHOWN = 240  # characters of the library's message
OPTIONS = '%llguidance {"no_forcing": true}\n'  # forced text may be spelled by any tokens, not one spelling alone
STUCK = "no token of the model can go on from here"
KINDS = ("json_schema", "regex", "choice", "grammar", "listed")
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Key = tuple[str, str]  # the kind of grammar, and its text


def constraint_key(constraint: Constraint) -> Key:
    """The cache key of a constraint. Raises `BadPrompt` for no kind, several kinds, or one over the limits, and without
    the extra `schemas`.
    """
    kinds = [name for name in KINDS if getattr(constraint, name) is not None]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "nothing"
        raise BadPrompt(f"a constraint sets {found}. Give exactly one of {', '.join(KINDS)}.")
    if kinds == ["listed"]:
        raise BadPrompt("a list between tags is no grammar. It is matched in another way.")
    if (problem := missing_grammars()) is not None:
        raise BadPrompt(problem)
    if kinds == ["json_schema"]:
        return "schema", _within(_schema(constraint.json_schema), LONGEST_SCHEMA, "JSON schema")
    if kinds == ["regex"]:
        return "regex", _within(constraint.regex, LONGEST_REGEX, "regex")
    if kinds == ["choice"]:
        choices = constraint.choice or ()
        if not choices or not all(isinstance(one, str) for one in choices):
            raise BadPrompt("choice holds no texts. Give at least one.")
        if len(choices) > MOST_CHOICES or sum(map(len, choices)) > LONGEST_CHOICES:
            raise BadPrompt(
                f"choice is too long. Give at most {MOST_CHOICES} texts of {LONGEST_CHOICES} characters in all."
            )
        escaped = [_META.sub(lambda match: "\\" + match[0], text) for text in choices]
        literals = [_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text) for text in escaped]
        return "choice", "(?:" + "|".join(literals) + ")"
    return "grammar", _within(constraint.grammar, LONGEST_GRAMMAR, "grammar")


def missing_grammars() -> str | None:
    """Why answers cannot follow grammars here, with the cure; None where they can."""
    return missing_extra("schemas", "an answer that follows a schema, regex, choice or grammar")


def grammar_of(key: Key) -> str:
    """The grammar in llguidance's syntax. Raises the library's errors for a bad one."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = key
    if kind == "schema":
        return f"start: %json {text}\n{OPTIONS}"
    if kind in ("regex", "choice"):
        return f"start: /{regex_to_lark(text)}/\n{OPTIONS}"
    return f"{any_to_lark(text)}\n{OPTIONS}"


def refused(what: str, message: str) -> BadPrompt:
    """The library's error, without its inner state and on one line."""
    message = message.split("<state>")[0].replace("<non-verbose/>", "")
    if message.strip() == "NoExtensionBias":  # the library's name for a dead end
        message = STUCK
    own = re.search(r"^error: (.+)$", message, re.MULTILINE)
    text = " ".join((own[1] if own else message).split())
    text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return BadPrompt(f"the {what} of this answer cannot be used: {text.rstrip('.')}. Correct or simplify it.")


def _within(text: Any, longest: int, what: str) -> str:
    if not isinstance(text, str) or not text:
        raise BadPrompt(f"the {what} is no text, or empty. Write one, or leave the constraint out.")
    if len(text) > longest:
        raise BadPrompt(f"the {what} has {len(text)} characters. Give at most {longest}.")
    if "\x00" in text:
        raise BadPrompt(f"the {what} holds a zero byte. Leave it out.")
    return text


def _schema(schema: Any) -> str:
    """The schema's JSON text. `True` is any JSON."""
    depth, level = 0, [schema]  # levels of nested objects and lists
    while inner := [one for one in level if isinstance(one, Mapping | list)]:
        depth += 1
        if depth > DEEPEST:
            raise BadPrompt(f"the JSON schema is nested deeper than {DEEPEST} levels. Make it flatter, or use $ref.")
        level = [one for values in inner for one in (values.values() if isinstance(values, Mapping) else values)]
    try:
        return json.dumps({} if schema is True else schema, ensure_ascii=False, default=dict)
    except (TypeError, ValueError) as error:
        raise BadPrompt(f"the JSON schema is not JSON: {error}. Write it with JSON's own types.") from None


EXAMINER = GrammarExaminer()
MOST_COMPILED = 256  # grammars in the cache
PATIENCE_S, TOKEN_S = 2.0, 0.005  # CPU time of one answer's grammar: its budget, and what each token adds
END = b"<|the end|>"
Words = NDArray[np.int32]


def words_of(vocabulary: int) -> int:
    """int32 words for one bit per token."""
    return -(-vocabulary // 32)


def token_bits(tokens: Sequence[int], words: int) -> Words:
    """A bit set of tokens: bit `token % 32` of word `token // 32`."""
    flags = np.zeros(words * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


class GrammarMatchers:
    """Compiles constraints for one vocabulary and caches the latest. Threads may share it."""

    def __init__(self, codec: Codec, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._codec, self._vocabulary, self._end_tokens = codec, vocabulary, tuple(end_tokens)
        self._table: TokenTable | None = None
        self._compiled: OrderedDict[Key, GrammarMatcher | BadPrompt] = (
            OrderedDict()
        )  # errors too: each may take seconds
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._tries: Tries | None = None

    def matcher(self, constraint: Constraint) -> GrammarMatcher | ListedMatcher:
        """A matcher at the beginning of an answer. Raises `BadPrompt`."""
        if constraint.listed is not None and constraint == Constraint(listed=constraint.listed):
            from gpuinfer.text.language.list_walks import ListedMatcher

            tries = self.tries()
            return ListedMatcher(tries.token_bytes(), tries.trie(constraint.listed)).warmed()
        key = constraint_key(constraint)
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
        if known is None:
            try:
                known = self._compile(key)
            except BadPrompt as error:
                known = BadPrompt(str(error))
            with self._lock:
                self._compiled[key] = known
                while len(self._compiled) > MOST_COMPILED:
                    self._compiled.popitem(last=False)
        if isinstance(known, BadPrompt):
            raise BadPrompt(str(known))
        return known.copy()

    def tries(self) -> Tries:
        """The compiler of lists, made on first use."""
        from gpuinfer.text.language.list_trie import Tries

        with self._lock:
            if self._tries is None:
                self._tries = Tries(self._codec, self._vocabulary)
            return self._tries

    def _compile(self, key: Key) -> GrammarMatcher:
        with self._building:
            if self._table is None:
                self._table = TokenTable(self._codec, self._vocabulary, self._end_tokens)
            table = self._table
        from llguidance import LLMatcher

        what = {"schema": "JSON schema"}.get(key[0], key[0])
        try:
            grammar = grammar_of(key)
            if key[0] != "choice" and (wrong := EXAMINER.examine(grammar)):
                raise ValueError(wrong)
            inner = LLMatcher(table.tokenizer, grammar, log_level=0, limits=limits())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - the library's panics are not derived from Exception
            raise refused(what, str(error)) from None
        matcher = GrammarMatcher(table, inner, what)
        matcher.check()
        return matcher


class TokenTable:
    """A vocabulary for llguidance. Making one takes half a second for 150,000 tokens."""

    def __init__(self, codec: Codec, vocabulary: int, end_tokens: Sequence[int]) -> None:
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        if codec.spelling.joins:
            raise BadPrompt("this model's tokens are whole words, and cannot follow a constraint. Leave it out.")
        self.vocabulary, self.words = vocabulary, words_of(vocabulary)
        # the library needs an end token: a model without one gets one beyond its vocabulary, which is never allowed
        self.extra = 0 if end_tokens else 1
        self.all_words = words_of(vocabulary + self.extra)
        ends = list(end_tokens) or [vocabulary]
        self.end = token_bits(ends, self.all_words)
        self.known = token_bits([token for token in range(vocabulary) if token not in ends], self.all_words)
        spelling = codec.spelling
        pieces = [spelling.piece(token) for token in range(vocabulary)]
        written = [piece.encode("utf-8", "replace") if isinstance(piece, str) else piece or b"" for piece in pieces]
        written += [END] * self.extra
        special = sorted({token for token in codec.hidden if token < vocabulary} | set(ends))
        for token in special:
            written[token] = f"<|{token}|>".encode()
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Pieces(written, special, ends[0])), eos_token=ends, slices=None)
        # tokens that lose a space at the beginning of a text, and those of them that are a single space
        self.lost_first: Words | None = None
        self.space: Words | None = None
        if spelling.eats_spaces:
            lost = []
            for token, piece in enumerate(pieces):
                changes = piece is not None and spelling.lead is not None and spelling.lead(token) != piece
                if changes or (piece is not None and spelling.strip > 0 and piece[:1] in (" ", b" ")):
                    lost.append(token)
            self.lost_first = token_bits(lost, self.all_words)
            self.space = token_bits([token for token in lost if pieces[token] in (" ", b" ")], self.all_words)


class _Pieces:
    """The interface that the library's `TokenizerWrapper` needs. It encodes only forced texts, and grammars here force
    none.
    """

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, end
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return []


class GrammarMatcher:
    """The state of one answer in its grammar. Not thread-safe."""

    def __init__(self, table: TokenTable, inner: LLMatcher, what: str, first: bool = True) -> None:
        self._table, self._inner, self._what, self._first = table, inner, what, first
        self._mask = np.zeros(table.all_words, np.int32)
        self._address, self._bytes = self._mask.ctypes.data, self._mask.nbytes
        self._fresh = False  # whether the mask is up to date
        self._free_space = False  # whether the next token is a space that the detokenizer drops
        self._left_s = PATIENCE_S  # CPU time left: all other answers wait while this one is computed

    def mask(self, into: Words) -> None:
        """Write the set of tokens that may come next into all of `into`, int32 [words_of(vocabulary)].

        It holds the end token if and only if the answer may end here. Raises `BadPrompt` if no token of the model is
        allowed, or the grammar is too complex.
        """
        self._compute()
        np.copyto(into, self._mask[: self._table.words])

    def advance(self, token: int) -> None:
        """Append a token. Raises `BadPrompt` if it is not allowed."""
        if self._first and self._table.lost_first is not None:
            self._compute()
            if self._free_space:
                self._first = self._fresh = False
                return
        self._left_s = min(PATIENCE_S, self._left_s + TOKEN_S)
        with self._measured():
            allowed = self._inner.consume_token(int(token))
        if not allowed:
            raise self._refused(f"token {token} is not allowed here")
        self._first = self._fresh = False

    @property
    def complete(self) -> bool:
        """Whether only an end token may follow, or the answer has ended."""
        if self._inner.is_stopped():
            self._check_error()
            return True
        if not self._inner.is_accepting():
            return False
        self._compute()
        return not (self._mask & ~self._table.end).any()

    def copy(self) -> GrammarMatcher:
        """An independent matcher in the same state."""
        copied = GrammarMatcher(self._table, self._inner.deep_copy(), self._what, self._first)
        copied._mask[:] = self._mask
        copied._fresh, copied._free_space = self._fresh, self._free_space
        return copied

    def check(self) -> None:
        """Raises `BadPrompt` if no token may come next."""
        self._check_error()
        if not self._inner.is_stopped():
            self._compute()

    def _compute(self) -> None:
        if self._fresh:
            return
        with self._measured():
            self._inner.unsafe_compute_mask_ptr(self._address, self._bytes)
        self._check_error()
        self._free_space = False
        if self._first and self._table.lost_first is not None:
            kept = self._mask & ~self._table.lost_first
            if not kept.any() and self._mask.any() and self._table.space is not None:
                self._free_space = True
                kept = self._table.space
            self._mask[:] = kept
        if self._table.extra:
            np.bitwise_and(self._mask, self._table.known, out=self._mask)
        if not self._mask.any() and not self._inner.is_accepting():
            raise self._refused(STUCK)
        self._fresh = True

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Count CPU time. Raises `BadPrompt` once the budget is spent: no other answer goes on meanwhile."""
        started = time.thread_time()
        yield
        self._left_s -= time.thread_time() - started
        if self._left_s < 0:
            raise self._refused("it takes too long to see which tokens may come next")

    def _check_error(self) -> None:
        if self._inner.is_error():
            raise self._refused(self._inner.get_error())

    def _refused(self, why: Any) -> BadPrompt:
        return refused(self._what, self._inner.get_error() or why)
