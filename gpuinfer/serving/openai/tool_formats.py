"""How families of models write calls of tools, and grammars (llguidance's Lark) that let them write no other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuinfer.serving.openai.tool_schemas import ToolChoice

MOST_CALLS = 64  # of one answer
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as templates write JSON


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `{"name": …, FIELD: …}`; the first stands behind `begin` and `opening`, others behind `between`, and
    `ending` behind the last.
    """

    name: str
    begin: str  # what no other text of an answer holds; "": a call is known by its JSON alone
    field: str = "arguments"
    opening: str = ""  # between `begin` and the first call
    between: str = ""
    ending: str = ""
    several: bool = True  # the family's template can hold several calls of one answer
    special: bool = False  # `begin` is a special token, where the vocabulary has it as one
    id_size: int = 24  # letters and digits of a call's id


HERMES = ToolFormat(
    "hermes", "<tool_call>", opening="\n", between="\n</tool_call>\n<tool_call>\n", ending="\n</tool_call>"
)
LLAMA = ToolFormat("llama3", "", field="parameters", several=False)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", opening="[", between=", ", ending="]", special=True, id_size=9)
TOOL_FORMATS: Mapping[str, ToolFormat] = {one.name: one for one in (HERMES, LLAMA, MISTRAL)}


def detected_format(template: str) -> ToolFormat | None:
    """The format that a chat template's text shows; None: none of those that are known here."""
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if '"parameters"' in template and ("python_tag" in template or "ipython" in template):
        return LLAMA
    return None


def written_calls(form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls, (name, arguments), as the model would have written them."""
    bodies = [json.dumps({"name": name, form.field: given}, ensure_ascii=False) for name, given in calls]
    return f"{form.begin}{form.opening}{form.between.join(bodies)}{form.ending}"


def tools_in_words(form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says of tools to a model whose chat template knows of none."""
    described = "\n".join(json.dumps(one.get("function", one), ensure_ascii=False) for one in tools)
    example = written_calls(form, [("NAME", {"PARAMETER": "VALUE"})])
    return (
        f"You can call functions. These are there, each with the JSON schema of its parameters:\n<tools>\n{described}\n"
        f"</tools>\nTo call one, write this and nothing else:\n{example}\n"
        "What a function answers comes between <tool_response> and </tool_response>."
    )


def tools_grammar(
    form: ToolFormat,
    choice: ToolChoice,
    *,
    begin_token: int | None = None,
    answer_schema: Any = None,
    thinks: str | None = None,
) -> str:
    """A grammar of answers: calls alone, where they must be; else text, or what fits `answer_schema`, or calls.

    Text before calls is free in formats with a `begin`, which stands in no other text; in those without, an answer that
    begins as a call is one. `begin_token`: the token that `begin` is. `thinks`: the answer may begin with what is
    thought ("opens"), or begins in the midst of it ("inside"), up to </think>; for where calls must be.
    """
    quoted = json.dumps
    begin = quoted(form.begin) if begin_token is None else f"<[{begin_token}]>"
    calls = f"{quoted(form.opening)} body" if form.opening else "body"
    if choice.parallel and form.several:
        calls += f" ({quoted(form.between)} body){{0,{MOST_CALLS - 1}}}"
    if form.ending:
        calls += f" {quoted(form.ending)}"
    lines = [r"TEXT: /(.|\n)*/"]
    if choice.must:
        thought = {"opens": '("<think>" thought GAP)? ', "inside": "thought GAP "}.get(thinks or "", "")
        lines += [f"start: {thought}calls", f"calls: {begin} {calls}" if form.begin else f"calls: {calls}"]
        if thought:
            lines += ['thought[lazy]: TEXT "</think>"', r"GAP: /[ \n]{0,4}/"]
        else:
            lines.pop(0)
    elif answer_schema is not None:
        lines = ["start: answer | calls", f"answer: %json {quoted(answer_schema, default=dict)}"]
        lines.append(f"calls: {begin} {calls}" if form.begin else f"calls: {calls}")
    elif form.begin and begin_token is None:
        lines += ["start: TEXT | begun calls", f"begun[lazy]: TEXT {begin}", f"calls: {calls}"]
    elif form.begin:
        lines += [f"start: TEXT | TEXT {begin} calls", f"calls: {calls}"]
    else:
        other = r'/(.|\n)*/ & ~/[ \n]*\{[ \n]*"(name|type)"[ \n]*:(.|\n)*/'
        lines = [f"OTHER: {other}", "start: OTHER | calls", f"calls: {calls}"]
    lines.append("body: " + " | ".join(f"body_{number}" for number in range(len(choice.tools))))
    for number, tool in enumerate(choice.tools):
        schema = quoted({**tool.parameters, "x-guidance": SPACED}, default=dict, ensure_ascii=False)
        head = f'{{"name": {quoted(tool.name)}, "{form.field}": '
        lines.append(f'body_{number}: {quoted(head)} %json {schema} "}}"')
    return "\n".join(lines) + "\n"
