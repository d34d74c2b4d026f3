"""An answer as it grows, split into what is thought, what is said, and calls of tools."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field

from gpuinfer.serving.openai.tool_formats import ToolFormat

THINK, THOUGHT = "<think>", "</think>"
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_BEGINNINGS = ('{"name":', '{"type":"function","name":')  # of a call that is known by its JSON alone
_BEGINS = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
LONGEST_HEAD = 512  # characters before a call's arguments, at most
_SIGNS = re.compile(r'["\\{}\[\]]')


@dataclass(slots=True)
class CallPart:
    """What is new of a call: its name in its first part, and some of its arguments' JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class AnswerDelta:
    """What is new of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerSplitter:
    """Of one answer. What its deltas come to depends on the text alone, not on how it is fed.

    `form`: how calls are written; None: there are none. `thinks`: "opens": the answer may begin with <think>; "inside":
    it begins in the midst of a thought; None: nothing is thought.
    """

    def __init__(self, form: ToolFormat | None, thinks: str | None) -> None:
        self._form, self._thinks = form, thinks
        self._state = {"inside": self._reasoning, "opens": self._opening}.get(thinks or "", self._start)
        self._held = ""  # not given out yet
        self._fresh = True  # nothing of the present section has been given out: white space before it is dropped
        self._trims = thinks is not None
        self.calls = 0  # begun
        self._raw = ""  # of a call whose name is not known yet
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> AnswerDelta:
        """What is certain now."""
        delta = AnswerDelta()
        self._held += text
        while self._state(delta, False):
            pass
        return delta

    def finish(self) -> AnswerDelta:
        """The answer is over: what was held back."""
        delta = AnswerDelta()
        while self._state(delta, True):
            pass
        if self._raw or self._held:
            rest, self._raw, self._held = self._raw + self._held, "", ""
            self._say(delta, rest)
        return delta

    # Sections: each takes what it can of `_held`, and returns whether another one goes on with it

    def _opening(self, delta: AnswerDelta, over: bool) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held, self._state = begun[len(THINK) :], self._reasoning
            return True
        if THINK.startswith(begun) and not over:
            return False
        self._state = self._start
        return True

    def _reasoning(self, delta: AnswerDelta, over: bool) -> bool:
        marks = [THOUGHT] if self._form is None or not self._form.begin else [THOUGHT, self._form.begin]
        place, mark = _first(self._held, marks)
        if mark:
            self._think(delta, self._held[:place].rstrip())
            self._fresh = True
            after = place + len(THOUGHT) if mark == THOUGHT else place
            self._held, self._state = self._held[after:], self._start
            return True
        sure = self._held if over else self._held[: len(self._held) - _partial(self._held, marks)]
        kept = sure.rstrip()
        self._think(delta, kept)
        self._held = "" if over else self._held[len(kept) :]
        return False

    def _start(self, delta: AnswerDelta, over: bool) -> bool:
        """Where an answer may begin as a call that is known by its JSON alone."""
        if self._form is not None and not self._form.begin:
            if _BEGINS.match(self._held):
                return self._begin_call()
            compact = re.sub(r"\s+", "", self._held)
            if not over and any(beginning.startswith(compact) for beginning in _BEGINNINGS):
                return False
        self._state = self._content
        return True

    def _content(self, delta: AnswerDelta, over: bool) -> bool:
        marks = [self._form.begin] if self._form is not None and self._form.begin else []
        place, mark = _first(self._held, marks)
        if mark:
            self._say(delta, self._held[:place].rstrip())
            self._held = self._held[place + len(mark) :]
            return self._begin_call()
        if not marks and not self._trims:
            self._say(delta, self._held)
            self._held = ""
            return False
        sure = self._held if over else self._held[: len(self._held) - _partial(self._held, marks)]
        kept = sure if over or not marks else sure.rstrip()
        self._say(delta, kept)
        self._held = self._held[len(kept) :]
        return False

    def _begin_call(self) -> bool:
        self._state, self._raw = self._head, ""
        return True

    def _head(self, delta: AnswerDelta, over: bool) -> bool:
        """Up to a call's arguments."""
        opening = self._form.opening.strip() if self._form is not None else ""
        held = self._held.lstrip()
        if opening and held.startswith(opening) and not self._raw:
            held = held[len(opening) :]
        found = _HEAD.match(held)
        if found is None or found.end() == len(held):
            if over and held[:1] in ("", "{"):  # cut short before it says which
                self._held = ""
                return False
            if over or len(held) > LONGEST_HEAD:  # no call: given out as it is
                begin = self._form.begin if self._form is not None else ""
                self._held, self._state, self._form = begin + self._held, self._content, None
                return True
            return False
        delta.calls.append(CallPart(self.calls, _unescaped(found[1])))
        self.calls += 1
        self._held, self._state = held[found.end() :], self._arguments
        self._depth, self._in_string, self._escaped = 0, False, False
        return True

    def _arguments(self, delta: AnswerDelta, over: bool) -> bool:
        """The object of a call's arguments, to its last brace."""
        at, text = 0, self._held
        end = None
        if self._escaped and text:
            self._escaped, at = False, 1
        while (sign := _SIGNS.search(text, at)) is not None:
            at = sign.end()
            if sign[0] == "\\":
                if at == len(text):
                    self._escaped = True
                at += 1
            elif sign[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if sign[0] in "{[" else -1
                if self._depth <= 0:
                    end = at
                    break
        part = text if end is None else text[:end]
        if part:
            if delta.calls and delta.calls[-1].index == self.calls - 1:
                delta.calls[-1].arguments += part
            else:
                delta.calls.append(CallPart(self.calls - 1, None, part))
        self._held = text[len(part) :]
        if end is None:
            return False
        self._state = self._tail
        return True

    def _tail(self, delta: AnswerDelta, over: bool) -> bool:
        """Between a call and the next, or the end of all."""
        form, held = self._form, self._held.lstrip()
        if form is None or not held:
            self._held = "" if over else self._held
            return False
        closing = "}" + form.ending.strip()
        following = "}" + form.between.strip()
        compact = re.sub(r"\s+", "", held)
        nexts, ends = re.sub(r"\s+", "", following), re.sub(r"\s+", "", closing)
        if form.between and compact.startswith(nexts):
            self._held = _without(held, nexts)
            return self._begin_call()
        if form.between and nexts.startswith(compact) and not over:
            return False
        if compact.startswith(ends):
            self._held, self._state, self._fresh = _without(held, ends), self._after, True
            return True
        if ends.startswith(compact) and not over:
            return False
        self._held = "" if over and (nexts.startswith(compact) or ends.startswith(compact)) else held
        self._state, self._fresh = self._after, True
        return True

    def _after(self, delta: AnswerDelta, over: bool) -> bool:
        """Behind all calls, where a grammar lets nothing stand but another call."""
        form, held = self._form, self._held.lstrip()
        if form is not None and form.begin and held.startswith(form.begin):
            self._held = held[len(form.begin) :]
            return self._begin_call()
        if form is not None and form.begin.startswith(held) and not over:
            return False
        if over and not held:
            self._held = ""
        self._state, self._trims = self._content, True
        return bool(self._held)

    def _think(self, delta: AnswerDelta, text: str) -> None:
        delta.reasoning += self._trimmed(text)

    def _say(self, delta: AnswerDelta, text: str) -> None:
        delta.content += self._trimmed(text) if self._trims else text

    def _trimmed(self, text: str) -> str:
        """Without white space at the beginning of a section."""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


def _first(text: str, marks: list[str]) -> tuple[int, str]:
    """The first of these marks, and where; "" where there is none."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


def _partial(text: str, marks: list[str]) -> int:
    """How many characters at the end may begin one of these marks."""
    most = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:size]):
                most = size
                break
    return most


def _without(text: str, compact: str) -> str:
    """The text behind these characters, between which there may be white space."""
    at = 0
    for sign in compact:
        at = text.index(sign, at) + 1
    return text[at:]


def _unescaped(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
USUAL_ID = 24  # letters and digits


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the answers to one request are split. `salt` makes the ids of its calls its own."""

    tools: ToolFormat | None
    thinks: str | None
    salt: str

    def splitter(self) -> AnswerSplitter:
        return AnswerSplitter(self.tools, self.thinks)

    def call_id(self, sample: int, index: int) -> str:
        """The same wherever the request is answered, and however often."""
        size = self.tools.id_size if self.tools is not None else USUAL_ID
        number = int.from_bytes(hashlib.blake2b(f"{self.salt} {sample} {index}".encode(), digest_size=24).digest())
        text = "".join(ALPHABET[number // 62**place % 62] for place in range(size))
        return text if size < USUAL_ID else f"call_{text}"
