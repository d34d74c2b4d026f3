"""The tools of a request, checked: names, parameters as JSON schemas, and which of them may be called.
Each error names the path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gpuinfer.serving.openai.requests import BadRequest

MOST_TOOLS = 128  # of one request, as OpenAI has it
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")  # keywords whose value is a list of schemas
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")  # or an object of them
OF_ONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "unevaluatedProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DEEPEST = 64  # levels of a schema
MOST_VALUES = 20_000  # of all tools' schemas


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters`: the JSON schema of its arguments, an object's."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that may be called; with `must` the answer is a call, or several where `parallel`."""

    tools: tuple[Tool, ...]
    must: bool
    parallel: bool


def chosen_tools(given: Sequence[Any] | None, choice: Any, parallel: Any) -> ToolChoice | None:
    """What a request's `tools`, `tool_choice` and `parallel_tool_calls` say; None: nothing may be called. Raises
    `BadRequest`.
    """
    if parallel is not None and not isinstance(parallel, bool):
        raise BadRequest("`parallel_tool_calls` is neither true nor false. Say one.", "parallel_tool_calls")
    tools = checked_tools(given or ())
    wanted = "auto" if choice is None else choice
    if isinstance(wanted, Mapping):
        return ToolChoice((_named(wanted, tools),), must=True, parallel=False)
    if wanted not in ("auto", "none", "required"):
        raise BadRequest(
            f"`tool_choice` is {json.dumps(wanted)[:60]}. Choose from auto, none, required, or name a function: "
            '{"type": "function", "function": {"name": …}}.',
            "tool_choice",
        )
    if not tools:
        if wanted == "required":
            raise BadRequest("`tool_choice` is required, and there are no `tools`. Give some.", "tool_choice")
        return None
    if wanted == "none":
        return None
    return ToolChoice(tools, must=wanted == "required", parallel=parallel is not False)


def _named(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        form = '{"type": "function", "function": {"name": …}}'
        raise BadRequest(f"`tool_choice` is an object that names no function. Write {form}.", "tool_choice")
    for tool in tools:
        if tool.name == name:
            return tool
    known = f"There is {', '.join(tool.name for tool in tools)}." if tools else "There are no `tools`."
    raise BadRequest(f"`tool_choice` names '{name[:60]}', which is none of the tools. {known}", "tool_choice")


def checked_tools(given: Sequence[Any]) -> tuple[Tool, ...]:
    """Raises `BadRequest`, which names the path."""
    if len(given) > MOST_TOOLS:
        raise BadRequest(f"`tools` holds {len(given)}, and {MOST_TOOLS} are the most. Leave some out.", "tools")
    tools: dict[str, Tool] = {}
    values = 0
    for number, one in enumerate(given):
        place = f"tools[{number}]"
        if not isinstance(one, Mapping) or one.get("type", "function") != "function":
            raise _wrong(f"{place}.type", "is not function, and no other tools are called here. Leave it out")
        function, at = one.get("function"), f"{place}.function"
        if not isinstance(function, Mapping):
            raise _wrong(at, 'is no object. Write {"name": …, "parameters": …}')
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise _wrong(f"{at}.name", "is no name. Write up to 64 letters, digits and any of _ . -")
        if name in tools:
            raise _wrong(f"{at}.name", f"is '{name}', as that of another tool. Give each its own")
        parameters = function.get("parameters")
        if parameters is None:
            parameters = NO_PARAMETERS
        if not isinstance(parameters, Mapping):
            raise _wrong(f"{at}.parameters", "is no JSON schema. Write an object of type object")
        if parameters.get("type", "object") != "object":
            raise _wrong(f"{at}.parameters.type", "is not object, which arguments are. Write object")
        values += check_schema(parameters, f"{at}.parameters")
        if values > MOST_VALUES:
            raise _wrong(
                f"{at}.parameters", f"makes the schemas of all tools more than {MOST_VALUES:,} values. Shorten"
            )
        tools[name] = Tool(name, {"type": "object", **parameters})
    return tuple(tools.values())


def _wrong(place: str, why: str) -> BadRequest:
    return BadRequest(f"`{place}` {why}.", place)


def check_schema(schema: Mapping[str, Any], place: str) -> int:
    """Raises `BadRequest`, with the path, for what JSON Schema does not allow. How many values there are, about."""
    values, level = 0, [(schema, place)]
    for _ in range(DEEPEST):
        inner: list[tuple[Any, str]] = []
        for one, at in level:
            values += 1
            if isinstance(one, bool):
                continue
            if not isinstance(one, Mapping):
                raise _wrong(at, "is no JSON schema. Write an object, true or false")
            values += len(one)
            _check_keywords(one, at)
            inner += _inner_schemas(one, at)
        if values > MOST_VALUES:
            raise _wrong(place, f"has more than {MOST_VALUES:,} values. Make it smaller")
        if not inner:
            return values
        level = inner
    raise _wrong(place, f"is nested more than {DEEPEST} deep. Make it flatter")


def _check_keywords(schema: Mapping[str, Any], at: str) -> None:
    """The keywords whose values are no schemas themselves."""
    if (kind := schema.get("type")) is not None:
        kinds = kind if isinstance(kind, list) and kind else [kind]
        if not all(isinstance(one, str) and one in TYPES for one in kinds):
            raise _wrong(f"{at}.type", f"is {json.dumps(kind)[:60]}. Choose from {', '.join(TYPES)}")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise _wrong(f"{at}.enum", "is no list of values. Give at least one")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise _wrong(f"{at}.required", "is no list of names. Write one")
    for name in NUMBERS:
        if name in schema and (isinstance(schema[name], bool) or not isinstance(schema[name], int | float)):
            raise _wrong(f"{at}.{name}", "is no number. Write one")
    for name in COUNTS:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _wrong(f"{at}.{name}", "is no whole number from 0 on. Write one")
    if "pattern" in schema and not isinstance(schema["pattern"], str):
        raise _wrong(f"{at}.pattern", "is no text. Write a regular expression")
    if (target := schema.get("$ref")) is not None and not (isinstance(target, str) and target.startswith("#")):
        raise _wrong(f"{at}.$ref", 'points to nothing in this schema. Write "#/$defs/NAME"')


def _inner_schemas(schema: Mapping[str, Any], at: str) -> list[tuple[Any, str]]:
    found: list[tuple[Any, str]] = []
    for name in OF_SCHEMAS:
        if name in schema:
            if not isinstance(schema[name], list) or not schema[name]:
                raise _wrong(f"{at}.{name}", "is no list of schemas. Give at least one")
            found += [(one, f"{at}.{name}[{number}]") for number, one in enumerate(schema[name])]
    for name in BY_NAME:
        if name in schema:
            if not isinstance(schema[name], Mapping):
                raise _wrong(f"{at}.{name}", "is no object. Write a schema for each name")
            found += [(one, f"{at}.{name}.{key}") for key, one in schema[name].items()]
    for name in OF_ONE:
        if name in schema:
            if name == "items" and isinstance(schema[name], list):  # as before JSON Schema 2020-12
                found += [(one, f"{at}.items[{number}]") for number, one in enumerate(schema[name])]
            else:
                found.append((schema[name], f"{at}.{name}"))
    return found


def check_tool_grammars(tools: Sequence[Tool]) -> None:
    """Raises `BadRequest`, which names the tool, for a schema that cannot be followed. It may take seconds."""
    from gpuinfer.text.language.grammar import missing_grammars

    if tools and (problem := missing_grammars()) is not None:
        raise BadRequest(problem, "tools")
    for number, tool in enumerate(tools):
        if fault := _fault_of(json.dumps(tool.parameters, ensure_ascii=False, sort_keys=False)):
            place = f"tools[{number}].function.parameters"
            raise BadRequest(f"`{place}` cannot be followed: {fault.rstrip('.')}. Correct or simplify it.", place)


@lru_cache(256)
def _fault_of(schema: str) -> str:
    from gpuinfer.text.language.grammar import EXAMINER, grammar_of, refused

    fault = EXAMINER.examine(grammar_of(("schema", schema)))
    return str(refused("schema", fault)).partition("used: ")[2].partition(". Correct")[0] if fault else ""
