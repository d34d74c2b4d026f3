"""Arguments of calls that are written between tags, one parameter after another: texts stand there without quotes, all
other values as JSON. The schema of a parameter says which of both a value is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.tool_schemas import TYPES, Tool

ANY_TYPE = frozenset(TYPES)
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "strict")
)
LENGTHS = frozenset(("minLength", "maxLength"))
NOT_FLAT = ("anyOf", "oneOf", "allOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies")
MOST_HOPS = 32  # of references that point to references
PARAMETER_NAME = re.compile(r"[^<>\s][^<>\n]{0,127}")


@dataclass(frozen=True, slots=True)
class ValueForm:
    """How the values of one parameter are written.

    "text": as they are. "choice": one of `choices`, written text → value. "either": JSON where that is a value of
    `types`, else a text. "json": JSON, in which a text has its quotes.
    """

    kind: Literal["text", "choice", "either", "json"]
    schema: Any = True  # complete, but for what `$ref` in it points to
    choices: tuple[tuple[str, Any], ...] = ()
    types: frozenset[str] = ANY_TYPE
    lengths: tuple[int, int | None] = (0, None)  # of a text, in characters

    @property
    def is_json(self) -> bool:
        """Whether all that is written is JSON."""
        return self.kind == "json" or (self.kind == "either" and "string" not in self.types)


ANY_VALUE = ValueForm("either")


@dataclass(frozen=True, slots=True)
class ParameterForm:
    name: str
    required: bool
    value: ValueForm


@dataclass(frozen=True, slots=True)
class ToolParameters:
    """Of one tool. `others`: the form of parameters that its schema names nowhere; None: there are none."""

    named: tuple[ParameterForm, ...]
    others: ValueForm | None = None

    def value_form(self, name: str) -> ValueForm:
        """Of this parameter, named or not."""
        return next((one.value for one in self.named if one.name == name), self.others or ANY_VALUE)


def tool_parameters(tool: Tool, end_mark: str) -> ToolParameters:
    """`end_mark`: what ends a value. Raises `BadRequest` for a schema that is no flat list of parameters."""
    root = tool.parameters
    schema = _resolved(root, root)
    for name in NOT_FLAT:
        if schema.get(name):
            raise _unwritable(tool, f"has `{name}` for all arguments together")
    properties, required = schema.get("properties", {}), schema.get("required", ())
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", len(properties))
    if least > len(set(required)) or most < len(properties):
        raise _unwritable(tool, "counts its properties")
    further = schema.get("additionalProperties", True)
    names = list(dict.fromkeys((*properties, *required)))
    if wrong := next((one for one in names if not PARAMETER_NAME.fullmatch(one)), None):
        raise _unwritable(tool, f"has a parameter named {json.dumps(wrong)[:60]}")
    named = tuple(
        ParameterForm(one, one in required, value_form(properties.get(one, further), root, end_mark)) for one in names
    )
    open_to_all = not named and further is not False
    return ToolParameters(named, value_form(further, root, end_mark) if open_to_all else None)


def _unwritable(tool: Tool, why: str) -> BadRequest:
    return BadRequest(
        f"the parameters of the tool '{tool.name}' cannot be written by this model, which writes them one after "
        f"another: their schema {why}. Name each under `properties`, without that.",
        "tools",
    )


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that references lead to, where nothing but annotations stands beside them."""
    for _ in range(MOST_HOPS):
        target = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(target, str) or not {*schema} - {"$ref", "$defs", "definitions"} <= ANNOTATIONS:
            break
        found: Any = root
        for part in target.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping | bool):
            break
        schema = found
    return schema


def value_form(schema: Any, root: Mapping[str, Any], end_mark: str) -> ValueForm:
    """How values of this schema are written; what may be a text and is bound in other ways than by its length is JSON,
    so that it can be kept to.
    """
    as_json = ValueForm("json", schema)
    found = _resolved(schema, root)
    if found is True:
        return ANY_VALUE
    if not isinstance(found, Mapping):
        return as_json
    bounds = {*found} - ANNOTATIONS - {"$defs", "definitions"}
    if "enum" in bounds or "const" in bounds:
        values = found["enum"] if "enum" in bounds else [found["const"]]
        return _choice(values, end_mark) if bounds <= {"enum", "const", "type"} else as_json
    for name in ("anyOf", "oneOf"):
        if bounds == {name}:
            return _joined([value_form(one, root, end_mark) for one in found[name]], end_mark) or as_json
    kinds = found.get("type", list(TYPES))
    types = frozenset([kinds] if isinstance(kinds, str) else kinds)
    if bounds <= {"type"}:
        return ValueForm("text") if types == {"string"} else ValueForm("either", found, types=types)
    if types == {"string"} and bounds <= {"type", *LENGTHS}:
        return ValueForm("text", lengths=(found.get("minLength", 0), found.get("maxLength")))
    return as_json


def _choice(values: Sequence[Any], end_mark: str) -> ValueForm:
    written: dict[str, Any] = {}
    for one in values:
        text = one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
        if text in written or end_mark in text or not text or text != text.strip():
            return ValueForm("json", {"enum": list(values)})
        written[text] = one
    return ValueForm("choice", {"enum": list(values)}, tuple(written.items()))


def _joined(forms: Sequence[ValueForm], end_mark: str) -> ValueForm | None:
    """A value of any of these forms; None where what is written would not tell which."""
    if all(one.kind in ("text", "either") and one.lengths == (0, None) for one in forms):
        types = frozenset(kind for one in forms for kind in (("string",) if one.kind == "text" else one.types))
        return ValueForm("either", {"type": sorted(types)}, types=types)
    values: list[Any] = []
    for one in forms:
        if one.kind == "choice":
            values += [value for _, value in one.choices]
        elif one.kind == "either" and one.types == {"null"}:
            values.append(None)
        else:
            return None
    return _choice(values, end_mark)


def written_value(value: Any) -> str:
    """A value as templates write it between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def value_as_json(form: ValueForm, text: str) -> str:
    """The JSON of a value that has been written so: a choice, or one thing or another."""
    if form.kind == "choice":
        for written, value in form.choices:
            if written == text:
                return json.dumps(value, ensure_ascii=False)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = text
    if not isinstance(value, str) and form.types & _types_of(value):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _types_of(value: Any) -> set[str]:
    """The types of JSON Schema that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    return {"null"} if value is None else {"object"} if isinstance(value, dict) else {"array"}


def complete_schema(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema of one parameter alone, with all that `$ref` in it points to."""
    if '"$ref"' not in json.dumps(schema, default=dict):
        return schema
    whole = {"$defs": {"arguments": _pointing(root)}}
    return {**_pointing(schema), **whole}


def _pointing(value: Any) -> Any:
    """With references into the arguments' schema, which lies under `$defs/arguments`."""
    if isinstance(value, Mapping):
        return {
            name: f"#/$defs/arguments{one[1:]}" if name == "$ref" and isinstance(one, str) else _pointing(one)
            for name, one in value.items()
        }
    return [_pointing(one) for one in value] if isinstance(value, list | tuple) else value
