"""An answer as it grows, split into what is thought, what is said, and calls of tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuinfer.serving.openai.tool_formats import ArgumentTags, ToolFormat
from gpuinfer.serving.openai.tool_parameters import ANY_VALUE, ToolParameters, ValueForm, value_as_json

THINK, THOUGHT = "<think>", "</think>"
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_BEGINNINGS = ('{"name":', '{"type":"function","name":')  # of a call that is known by its JSON alone
_BEGINS = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
_NAME = re.compile(r"\s*([\w.-]{1,64})\s*")  # of a tool whose call is no JSON
_CUT_HEAD = re.compile(r"\s*[\w.-]{0,64}\s*(\[.*)?", re.S)
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
    it begins in the midst of a thought; None: nothing is thought. `parameters`: of tools whose arguments are written
    between tags.
    """

    def __init__(
        self, form: ToolFormat | None, thinks: str | None, parameters: Mapping[str, ToolParameters] | None = None
    ) -> None:
        self._form, self._parameters = form, parameters or {}
        self._state = {"inside": self._reasoning, "opens": self._opening}.get(thinks or "", self._start)
        self._held = ""  # not given out yet
        self._fresh = True  # nothing of the present section has been given out: white space before it is dropped
        self._trims = thinks is not None
        self.calls = 0  # begun
        self._raw = ""  # of a call whose name is not known yet
        self._depth, self._in_string, self._escaped = 0, False, False
        self._called: ToolParameters | None = None  # the arguments of the present call, where they are tagged
        self._value: ValueForm = ANY_VALUE  # the form of the present one of them
        self._given = 0  # arguments of the present call so far

    @property
    def whole_calls(self) -> int:
        """How many calls there are; 0 where the last of them is not complete."""
        within = (self._head, self._arguments, self._argument, self._tagged_value)
        return 0 if self._state in within else self.calls

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
        form = self._form
        opening = form.opening.strip() if form is not None else ""
        held = self._held.lstrip()
        if opening and held.startswith(opening) and not self._raw:
            held = held[len(opening) :]
        found = self._head_in(held)
        if found is None:
            plain = form is None or (form.tags is None and not form.mark)
            cut = held[:1] in ("", "{") if plain else opening.startswith(held) or _CUT_HEAD.fullmatch(held) is not None
            if over and cut:  # short before it says which
                self._held = ""
                return False
            if over or len(held) > LONGEST_HEAD:  # no call: given out as it is
                self._held = (form.begin if form is not None else "") + self._held
                self._state, self._form = self._content, None
                return True
            return False
        name, end = found
        delta.calls.append(CallPart(self.calls, name))
        self.calls += 1
        self._held = held[end:]
        if form is not None and form.tags is not None:
            self._called, self._given, self._state = self._parameters.get(name), 0, self._argument
            self._add(delta, "{")
        else:
            self._state = self._arguments
            self._depth, self._in_string, self._escaped = 0, False, False
        return True

    def _head_in(self, held: str) -> tuple[str, int] | None:
        """The name of the tool, and where the arguments begin; None as long as that is not certain."""
        form = self._form
        if form is None or (form.tags is None and not form.mark):
            found = _HEAD.match(held)
            return None if found is None or found.end() == len(held) else (_unescaped(found[1]), found.end())
        name = _NAME.match(held)
        if name is None or name.end() == len(held):
            return None
        at = name.end()
        if form.tags is not None:
            ending = form.tags.name_end.strip()
            return (name[1], at + len(ending)) if held.startswith(ending or "<", at) else None
        if held.startswith("[CALL_ID]", at):  # the ids of calls are ours
            id = _NAME.match(held, at + len("[CALL_ID]"))
            at = at if id is None else id.end()
        place = held.find("{", at)
        return (name[1], place) if place >= 0 and held[at:place].strip() == form.mark else None

    def _add(self, delta: AnswerDelta, arguments: str) -> None:
        """Something of the last call's arguments."""
        if delta.calls and delta.calls[-1].index == self.calls - 1:
            delta.calls[-1].arguments += arguments
        elif arguments:
            delta.calls.append(CallPart(self.calls - 1, None, arguments))

    def _argument(self, delta: AnswerDelta, over: bool) -> bool:
        """Between tagged arguments: the next one's name, or the end of the call."""
        held, tags = self._held.lstrip(), self._tags
        if held.startswith(tags.begin):
            middle = tags.middle.split("\n")  # of which the line breaks may be left out
            at, name = len(tags.begin), None
            for number, piece in enumerate(middle):
                end = held.find(piece, at)
                if end < 0 or (number and held[at:end].strip()):
                    break
                name = held[at:end] if name is None else name
                at = end + len(piece)
            else:
                if not middle[-1] and at == len(held) and not over:
                    return False  # whether a line break follows
                self._held = held[at:].removeprefix("\n") if not middle[-1] else held[at:]
                self._begin_value(delta, (name or "").strip())
                return True
            self._held = "" if over else self._held
            return False
        begun = any(mark.startswith(held) and mark != held for mark in (tags.begin, tags.close) if mark)
        if begun:  # perhaps cut short
            self._held = "" if over else self._held
            return False
        self._add(delta, "}")
        self._held, self._state = held.removeprefix(tags.close), self._tail
        return True

    @property
    def _tags(self) -> ArgumentTags:
        if self._form is None or self._form.tags is None:
            raise RuntimeError("these calls of tools have no tags.")
        return self._form.tags

    def _begin_value(self, delta: AnswerDelta, name: str) -> None:
        self._value = ANY_VALUE if self._called is None else self._called.value_form(name)
        quote = '"' if self._value.kind == "text" else ""
        before = ", " if self._given else ""
        self._add(delta, f"{before}{json.dumps(name, ensure_ascii=False)}: {quote}")
        self._given += 1
        self._state, self._in_string, self._escaped = self._tagged_value, False, False

    def _tagged_value(self, delta: AnswerDelta, over: bool) -> bool:
        """The value of one argument. Texts and JSON are given out as they come."""
        end, value = self._tags.end, self._value
        place = self._value_end(end) if value.is_json else self._held.find(end)
        whole = place >= 0
        kept = 0 if value.is_json and self._in_string else _partial(self._held, [end])
        sure = self._held[:place] if whole else self._held[: len(self._held) - kept]
        if value.kind == "text":
            self._add(delta, json.dumps(sure, ensure_ascii=False)[1:-1] + ('"' if whole else ""))
        elif value.is_json:
            self._add(delta, sure)
        elif whole:
            self._add(delta, value_as_json(value, sure))
        else:
            sure = ""  # what it is shows at its end
        self._held = "" if over and not whole else self._held[len(sure) + (len(end) if whole else 0) :]
        if whole:
            self._state = self._argument
        return whole

    def _value_end(self, end: str) -> int:
        """Where a value that is JSON ends: its texts may hold what ends it. -1: not yet."""
        at = 1 if self._escaped and self._held else 0
        self._escaped = self._escaped and not self._held
        for sign in re.finditer(rf'["\\]|{re.escape(end)}', self._held):
            if sign.start() < at:
                continue
            if sign[0] == "\\":
                at = sign.end() + 1
                self._escaped = sign.end() == len(self._held)
            elif sign[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                return sign.start()
        return -1

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
        self._add(delta, part)
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
        end = "" if form.tags is not None else form.call_end  # of tagged arguments it has been read
        closing, following = end + form.ending.strip(), end + form.between.strip()
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
    """How the answers to one request are split. `salt` makes the ids of its calls its own. `parameters`: of each tool,
    where their arguments are written between tags.
    """

    tools: ToolFormat | None
    thinks: str | None
    salt: str
    parameters: Mapping[str, ToolParameters] = field(default_factory=dict)

    def splitter(self) -> AnswerSplitter:
        return AnswerSplitter(self.tools, self.thinks, self.parameters)

    def call_id(self, sample: int, index: int) -> str:
        """The same wherever the request is answered, and however often."""
        size = self.tools.id_size if self.tools is not None else USUAL_ID
        number = int.from_bytes(hashlib.blake2b(f"{self.salt} {sample} {index}".encode(), digest_size=24).digest())
        text = "".join(ALPHABET[number // 62**place % 62] for place in range(size))
        return text if size < USUAL_ID else f"call_{text}"
