"""How families of models write calls of tools, and grammars (llguidance's Lark) that let them write no other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuinfer.serving.openai.tool_parameters import (
    ToolParameters,
    ValueForm,
    complete_schema,
    tool_parameters,
    written_value,
)
from gpuinfer.serving.openai.tool_schemas import Tool, ToolChoice

MOST_CALLS = 64  # of one answer
MOST_OTHERS = 64  # parameters of a call that its tool does not name
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """What stands around the arguments of a call that are written one by one: the tool's name `name_end`, for each
    argument `begin` NAME `middle` VALUE `end` `gap`, and `close`. `loose`: line breaks among these may be left out.
    """

    name_end: str
    begin: str
    middle: str
    end: str  # stands in no value
    gap: str
    close: str = ""
    loose: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `{"name": …, FIELD: …}`; or, with `mark`, NAME `mark` ARGUMENTS; or NAME and arguments with `tags`. The
    first call stands behind `begin` and `opening`, others behind `between`, and `ending` behind the last.
    """

    name: str
    begin: str  # what no other text of an answer holds; "": a call is known by its JSON alone
    field: str = "arguments"
    opening: str = ""  # between `begin` and the first call
    between: str = ""
    ending: str = ""
    several: bool = True  # the family's template can hold several calls of one answer
    special: tuple[str, ...] = ()  # marks that are special tokens, where the vocabulary has them as one
    id_size: int = 24  # letters and digits of a call's id
    mark: str = ""
    id_mark: str = ""  # before `mark` the model writes an id of its own behind this one
    tags: ArgumentTags | None = None

    @property
    def call_end(self) -> str:
        """What ends a call behind its arguments."""
        return "" if self.mark else self.tags.close if self.tags is not None else "}"


HERMES = ToolFormat(
    "hermes", "<tool_call>", opening="\n", between="\n</tool_call>\n<tool_call>\n", ending="\n</tool_call>"
)
LLAMA = ToolFormat("llama3", "", field="parameters", several=False)
MISTRAL = ToolFormat(
    "mistral", "[TOOL_CALLS]", opening="[", between=", ", ending="]", special=("[TOOL_CALLS]",), id_size=9
)
MISTRAL_NAMES = ToolFormat(
    "mistral-args",
    "[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    id_size=9,
    mark="[ARGS]",
)
MISTRAL_IDS = ToolFormat(
    "mistral-ids",
    "[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    id_size=9,
    mark="[ARGS]",
    id_mark="[CALL_ID]",
)
QWEN_CODER = ToolFormat(
    "qwen3-coder",
    "<tool_call>",
    opening="\n<function=",
    between="\n</tool_call>\n<tool_call>\n<function=",
    ending="\n</tool_call>",
    tags=ArgumentTags(">\n", "<parameter=", ">\n", "\n</parameter>", "\n", "</function>"),
)
GLM = ToolFormat(  # GLM 4.5 and 4.6 break lines, GLM 4.7 and 5 do not
    "glm4",
    "<tool_call>",
    between="</tool_call>\n<tool_call>",
    ending="</tool_call>",
    tags=ArgumentTags("\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n", loose=True),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    one.name: one for one in (HERMES, LLAMA, MISTRAL, MISTRAL_NAMES, MISTRAL_IDS, QWEN_CODER, GLM)
}


def detected_format(template: str) -> ToolFormat | None:
    """The format that a chat template's text shows; None: none of those that are known here."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL if "[ARGS]" not in template else MISTRAL_IDS if "[CALL_ID]" in template else MISTRAL_NAMES
    if "<tool_call>" in template:
        if "<arg_key>" in template:
            return GLM
        if "<function=" in template:
            return QWEN_CODER if "<parameter=" in template else None
        return HERMES
    if '"parameters"' in template and ("python_tag" in template or "ipython" in template):
        return LLAMA
    return None


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls, (name, arguments), as the model would have written them."""
    bodies = [_written_call(form, name, given) for name, given in calls]
    return f"{form.begin}{form.opening}{form.between.join(bodies)}{form.ending}"


def _written_call(form: ToolFormat, name: str, given: Any) -> str:
    if (tags := form.tags) is not None:
        pairs = [
            f"{tags.begin}{key}{tags.middle}{written_value(value)}{tags.end}{tags.gap}" for key, value in given.items()
        ]
        return f"{name}{tags.name_end}{''.join(pairs)}{tags.close}"
    if form.mark:
        id = f"{form.id_mark}{'0' * form.id_size}" if form.id_mark else ""
        return f"{name}{id}{form.mark}{json.dumps(given, ensure_ascii=False)}"
    return json.dumps({"name": name, form.field: given}, ensure_ascii=False)


def tools_in_words(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says of tools to a model whose chat template knows of none."""
    described = "\n".join(json.dumps(one.get("function", one), ensure_ascii=False) for one in tools)
    example = written_calls(form, [("NAME", {"PARAMETER": "VALUE"})])
    return (
        f"You can call functions. These are there, each with the JSON schema of its parameters:\n<tools>\n{described}\n"
        f"</tools>\nTo call one, write this and nothing else:\n{example}\n"
        "What a function answers comes between <tool_response> and </tool_response>."
    )


def parameters_by_tool(form: ToolFormat | None, choice: ToolChoice) -> Mapping[str, ToolParameters]:
    """Of each tool how its arguments are written between tags; nothing where they are JSON. Raises `BadRequest`."""
    if form is None or form.tags is None:
        return {}
    return {tool.name: tool_parameters(tool, form.tags.end) for tool in choice.tools}


def tools_grammar(
    form: ToolFormat,
    choice: ToolChoice,
    *,
    special: Mapping[str, int] | None = None,
    answer_schema: Any = None,
    thinks: str | None = None,
) -> str:
    """A grammar of answers: calls alone, where they must be; else text, or what fits `answer_schema`, or calls.

    Text before calls is free in formats with a `begin`, which stands in no other text; in those without, an answer that
    begins as a call is one. `special`: of the format's marks those that are one token, and which. `thinks`: the answer
    may begin with what is thought ("opens"), or begins in the midst of it ("inside"), up to </think>; for where calls
    must be. Raises `BadRequest` for parameters that the format cannot write.
    """
    terms, loose = _Terms(special or {}), form.tags is not None and form.tags.loose
    begin = terms.of(form.begin)
    calls = f"{terms.of(form.opening)} body" if form.opening else "body"
    if choice.parallel and form.several:
        calls += f" ({terms.of(form.between, loose)} body){{0,{MOST_CALLS - 1}}}"
    if form.ending:
        calls += f" {terms.of(form.ending)}"
    lines = [r"TEXT: /(.|\n)*/"]
    if choice.must:
        thought = {"opens": '("<think>" thought GAP)? ', "inside": "thought GAP "}.get(thinks or "", "")
        lines += [f"start: {thought}calls", f"calls: {begin} {calls}" if form.begin else f"calls: {calls}"]
        if thought:
            lines += ['thought[lazy]: TEXT "</think>"', r"GAP: /[ \n]{0,4}/"]
    elif answer_schema is not None:
        lines += ["start: answer | calls", f"answer: %json {json.dumps(answer_schema, default=dict)}"]
        lines.append(f"calls: {begin} {calls}" if form.begin else f"calls: {calls}")
    elif form.begin and form.begin not in terms.special:
        lines += ["start: TEXT | begun calls", f"begun[lazy]: TEXT {begin}", f"calls: {calls}"]
    elif form.begin:
        lines += [f"start: TEXT | TEXT {begin} calls", f"calls: {calls}"]
    else:
        other = r'/(.|\n)*/ & ~/[ \n]*\{[ \n]*"(name|type)"[ \n]*:(.|\n)*/'
        lines += [f"OTHER: {other}", "start: OTHER | calls", f"calls: {calls}"]
    lines.append("body: " + " | ".join(f"body_{number}" for number in range(len(choice.tools))))
    for number, tool in enumerate(choice.tools):
        lines += _call_rules(form, tool, number, terms)
    if not any("TEXT" in line for line in lines[1:]):
        lines.pop(0)
    return "\n".join(lines) + "\n"


class _Terms:
    """Literals of a grammar, in which `special` texts are tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self._marks = re.compile("|".join(map(re.escape, special))) if special else None

    def of(self, text: str, loose: bool = False) -> str:
        """`loose`: its line breaks may be left out."""
        found, at = [], 0
        for mark in self._marks.finditer(text) if self._marks is not None else ():
            found += [self._plain(text[at : mark.start()], loose), f"<[{self.special[mark[0]]}]>"]
            at = mark.end()
        return " ".join(one for one in (*found, self._plain(text[at:], loose)) if one)

    def _plain(self, text: str, loose: bool) -> str:
        pieces = re.split(r"(\n)", text) if loose else [text]
        return " ".join('"\\n"?' if loose and one == "\n" else json.dumps(one) for one in pieces if one)


def _json_of(schema: Any) -> str:
    if schema is True or schema is False:
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': SPACED}, default=dict, ensure_ascii=False)}"


def _call_rules(form: ToolFormat, tool: Tool, number: int, terms: _Terms) -> list[str]:
    """The rule `body_NUMBER` of calls of one tool, and those it needs."""
    if form.tags is not None:
        return _tagged_rules(form.tags, tool, number, terms)
    arguments = _json_of(tool.parameters)
    if form.mark:
        id = f"{terms.of(form.id_mark)} /[A-Za-z0-9]{{{form.id_size}}}/ " if form.id_mark else ""
        return [f"body_{number}: {json.dumps(tool.name)} {id}{terms.of(form.mark)} {arguments}"]
    head = f'{{"name": {json.dumps(tool.name)}, "{form.field}": '
    return [f'body_{number}: {json.dumps(head)} {arguments} "}}"']


def _tagged_rules(tags: ArgumentTags, tool: Tool, number: int, terms: _Terms) -> list[str]:
    """Parameters come in the order of the schema, as they do in JSON."""
    known, rules = tool_parameters(tool, tags.end), []
    body = terms.of(f"{tool.name}{tags.name_end}", tags.loose)
    gap = terms.of(tags.gap, tags.loose)
    for place, one in enumerate(known.named):
        label = f"{number}_{place}"
        body += f" given_{label}" + ("" if one.required else "?")
        head = terms.of(f"{tags.begin}{one.name}{tags.middle}", tags.loose)
        value, needed = _value_rule(one.value, label, tags, tool, terms)
        rules += [f"given_{label}: {head} {value} {gap}", *needed]
    if known.others is not None:
        label = f"{number}_others"
        body += f" given_{label}{{0,{MOST_OTHERS}}}"
        head = f"{terms.of(tags.begin)} /[A-Za-z0-9_.-]{{1,64}}/ {terms.of(tags.middle, tags.loose)}"
        value, needed = _value_rule(known.others, label, tags, tool, terms)
        rules += [f"given_{label}: {head} {value} {gap}", *needed]
    close = f" {terms.of(tags.close)}" if tags.close else ""
    return [f"body_{number}: {body}{close}", *rules]


def _value_rule(value: ValueForm, label: str, tags: ArgumentTags, tool: Tool, terms: _Terms) -> tuple[str, list[str]]:
    """What a value is in a rule, up to and with its end; and the rules that it needs."""
    end = terms.of(tags.end)
    if value.is_json:
        return f"{_json_of(complete_schema(value.schema, tool.parameters))} {end}", []
    if value.kind == "choice":
        return f"({' | '.join(json.dumps(text, ensure_ascii=False) for text, _ in value.choices)}) {end}", []
    least, most = value.lengths
    if (least, most) == (0, None):
        return f"value_{label}", [f"value_{label}[lazy]: TEXT {end}"]
    count = f"{{{least},{'' if most is None else most}}}"
    other = re.sub(r"([/\\.+*?()|\[\]{}^$#&~-])", r"\\\1", tags.end).replace("\n", r"\n")
    return f"value_{label}", [
        rf"BOUND_{label}: /(.|\n){count}/ & ~/(.|\n)*{other}(.|\n)*/",
        f"value_{label}[lazy]: BOUND_{label} {end}",
    ]
