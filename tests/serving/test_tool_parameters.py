"""Calls whose arguments stand between tags: what is written is what is read, follows the schema, and cannot be anything
else.
"""

from __future__ import annotations

import json

import jsonschema
import pytest
from test_tools import follows, language  # noqa: F401  a fixture

from gpuinfer.errors import BadPrompt
from gpuinfer.serving.openai.answer_splitter import AnswerSplitter
from gpuinfer.serving.openai.tool_formats import TOOL_FORMATS, parameters_by_tool, tools_grammar, written_calls
from gpuinfer.serving.openai.tool_schemas import chosen_tools

TAGGED = [name for name, form in TOOL_FORMATS.items() if form.tags is not None]
FILE = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "of the file"},
        "short": {"type": "string", "minLength": 1, "maxLength": 5},
        "mode": {"enum": ["r", "w", 1, None]},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}], "default": None},
        "number": {"type": "integer", "minimum": 3},
        "when": {"type": "string", "pattern": "^[0-9]{4}$"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
        "anything": {},
        "literal": {"anyOf": [{"const": "all"}, {"type": "null"}]},
    },
    "required": ["path", "lines"],
    "additionalProperties": False,
    "$defs": {"line": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}},
}


def tools_of(*schemas):
    return [
        {"type": "function", "function": {"name": f"tool-{number}", "parameters": schema}}
        for number, schema in enumerate(schemas)
    ]


def planned(name, *schemas):
    """The format, what its splitter knows, and the grammar of one call that must be."""
    form, choice = TOOL_FORMATS[name], chosen_tools(tools_of(*schemas), "required", False)
    return form, parameters_by_tool(form, choice), tools_grammar(form, choice)


def read(form, parameters, pieces):
    splitter = AnswerSplitter(form, None, parameters)
    found = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part.arguments for one in found for part in one.calls), "".join(one.content for one in found)


GIVEN = [
    pytest.param({"path": "a b.txt", "lines": []}, id="texts without quotes"),
    pytest.param({"path": "", "lines": [{"text": 'say "hi"\\ \n</arg_value> </parameter>'}]}, id="ends inside JSON"),
    pytest.param({"path": 'C:\\a "b" {x}\n\n< </tool_call> </arg', "lines": [{"text": ""}]}, id="signs inside texts"),
    pytest.param({"path": "12", "lines": []}, id="a text that looks like a number"),
    pytest.param({"path": "x", "short": "abcde", "mode": "r", "limit": "all", "lines": []}, id="choices"),
    pytest.param({"path": "x", "mode": 1, "limit": 7, "number": 30, "lines": []}, id="numbers where they may be"),
    pytest.param({"path": "x", "mode": None, "limit": None, "lines": [], "literal": None}, id="null"),
    pytest.param({"path": "x", "lines": [], "anything": {"a": [1, "b"]}, "literal": "all"}, id="anything"),
    pytest.param({"path": "x", "lines": [], "anything": "true story"}, id="anything as a text"),
    pytest.param({"path": "東京 ü\t☃", "lines": [{"text": "☃"}]}, id="other scripts"),
]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_written_is_let_through_and_read_as_it_was(name, given, language):  # noqa: F811
    form, parameters, grammar = planned(name, FILE)
    text = written_calls(form, [("tool-0", given)])
    assert follows(language, grammar, text) == (True, True)
    whole, rest = read(form, parameters, [text])
    assert (json.loads(whole), rest) == (given, "")
    jsonschema.validate(json.loads(whole), FILE)
    assert read(form, parameters, list(text)) == (whole, rest)
    for cut in range(1, len(text)):
        assert read(form, parameters, [text[:cut], text[cut:]]) == (whole, rest)
        short, _ = read(form, parameters, [text[:cut]])
        assert whole.startswith(short.removesuffix("}"))


def test_a_pattern_is_kept_to_by_json(language):  # noqa: F811
    """Its quotes are written, as in JSON."""
    form, parameters, grammar = planned("qwen3-coder", FILE)
    start, middle = "<tool_call>\n<function=tool-0>\n<parameter=path>\nx\n</parameter>\n", "<parameter=when>\n"
    end = "\n</parameter>\n<parameter=lines>\n[]\n</parameter>\n</function>\n</tool_call>"
    assert follows(language, grammar, f'{start}{middle}"2024"{end}') == (True, True)
    assert follows(language, grammar, f"{start}{middle}2024{end}") == (False, False)
    whole, _ = read(form, parameters, [f'{start}{middle}"2024"{end}'])
    assert json.loads(whole) == {"path": "x", "when": "2024", "lines": []}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"path": "x"}, id="a required one is missing"),
        pytest.param({"lines": [], "path": "x"}, id="in another order"),
        pytest.param({"path": "x", "short": "abcdef", "lines": []}, id="too long"),
        pytest.param({"path": "x", "short": "", "lines": []}, id="too short"),
        pytest.param({"path": "x", "mode": "a", "lines": []}, id="no choice"),
        pytest.param({"path": "x", "number": 2, "lines": []}, id="too small"),
        pytest.param({"path": "x", "lines": [{}]}, id="not as the reference has it"),
        pytest.param({"path": "x", "lines": [], "more": 1}, id="a parameter that is none"),
    ],
)
def test_what_does_not_follow_the_schema_cannot_be_written(name, given, language):  # noqa: F811
    form, _, grammar = planned(name, FILE)
    assert follows(language, grammar, written_calls(form, [("tool-0", given)]))[1] is False


@pytest.mark.parametrize("name", TAGGED)
def test_a_tool_whose_parameters_are_free(name, language):  # noqa: F811
    given = {"a": "text", "b_2": [1], "c": None}
    form, parameters, grammar = planned(name, {"type": "object"}, {"additionalProperties": {"type": "integer"}})
    text = written_calls(form, [("tool-0", given)])
    assert follows(language, grammar, text) == (True, True)
    assert json.loads(read(form, parameters, [text])[0]) == given
    numbers = written_calls(form, [("tool-1", {"a": 1})])
    assert follows(language, grammar, numbers) == (True, True)
    assert follows(language, grammar, numbers.replace("1", "x"))[1] is False


def test_line_breaks_between_tags_of_glm_may_be_left_out(language):  # noqa: F811
    form, parameters, grammar = planned("glm4", FILE)
    dense = "<tool_call>tool-0<arg_key>path</arg_key><arg_value>x</arg_value>"
    dense += "<arg_key>lines</arg_key><arg_value>[]</arg_value></tool_call>"
    assert follows(language, grammar, dense) == (True, True)
    assert read(form, parameters, [dense]) == ('{"path": "x", "lines": []}', "")
    assert read(form, parameters, list(dense)) == ('{"path": "x", "lines": []}', "")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"anyOf": [{"type": "object"}]}, "`anyOf` for all arguments"),
        ({"properties": {"a>b": {}}}, 'a parameter named "a>b"'),
        ({"properties": {"a": {}}, "minProperties": 1}, "counts its properties"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "counts its properties"),
    ],
)
def test_schemas_that_no_tags_can_follow_are_refused(schema, says):
    with pytest.raises(BadPrompt, match="tool-0") as refused:
        planned("glm4", schema)
    assert says in str(refused.value)
    assert planned("hermes", schema)


def test_arguments_that_refer_to_all_of_them(language):  # noqa: F811
    """The reference is to the schema of the arguments, whose parts a parameter's grammar must still find."""
    tree = {"properties": {"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["child"]}
    form, parameters, grammar = planned("qwen3-coder", {"type": "object", **tree, "additionalProperties": False})
    text = written_calls(form, [("tool-0", {"child": {"child": None}})])
    assert follows(language, grammar, text) == (True, True)
    assert json.loads(read(form, parameters, [text])[0]) == {"child": {"child": None}}
