"""Calls of tools: asked by OpenAI's own client, whole and streamed, in each family's format; they always parse, follow
their schemas, and go on where another replica has ended.
"""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import openai
import pytest
from replica_servers import serving
from test_router_side import blocks, gone_on, tokens_of
from text.tiny import copy_of, tiny_checkpoint

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint
from gpuinfer.serving.openai.answer_splitter import AnswerForm, AnswerSplitter
from gpuinfer.serving.openai.responses import message_of
from gpuinfer.serving.openai.tool_formats import TOOL_FORMATS, detected_format, tools_grammar, written_calls
from gpuinfer.serving.openai.tool_schemas import chosen_tools
from gpuinfer.text.checkpoint import LanguageFiles
from gpuinfer.text.language import open_language
from gpuinfer.text.transformer import Shape

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"enum": [1, 2, 3]}},
}
ADD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "In a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": WEATHER, "add": ADD, "now": {"type": "object", "maxProperties": 0}}
ASK = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
TEMPLATES = {
    "hermes": PLAIN + "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}",
    "llama3": PLAIN + '{% if tools %}{"name": "", "parameters": {}} ipython {{ tools | tojson }}{% endif %}',
    "mistral": PLAIN + "{% if tools %}[TOOL_CALLS] {{ tools | tojson }}{% endif %}",
    "thinking": PLAIN + "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %}<think></think>{% else %}<think>\n"
    "{% endif %}{% endif %}",
    "mistral-args": PLAIN + "{% if tools %}[TOOL_CALLS][ARGS] {{ tools | tojson }}{% endif %}",
    "mistral-ids": PLAIN + "{% if tools %}[TOOL_CALLS][CALL_ID][ARGS] {{ tools | tojson }}{% endif %}",
    "qwen3-coder": PLAIN + "{% if tools %}<tool_call><function=<parameter={{ tools | tojson }}{% endif %}",
    "glm4": PLAIN + "{% if tools %}<tool_call><arg_key>{{ tools | tojson }}{% endif %}",
    "unknown": PLAIN + "{% if tools %}<function={{ tools | tojson }}{% endif %}",
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One server of a model for each template, and `plain`, which is told to have tools described in a message."""
    room = tmp_path_factory.mktemp("tools")
    named = []
    for name, template in TEMPLATES.items():
        folder = copy_of(tiny_checkpoint("llama", max_position_embeddings=1024), room / name)
        (folder / "chat_template.jinja").write_text(template)
        if name.startswith("mistral"):  # in whose vocabularies these are special tokens
            for file in ("tokenizer.json", "tokenizer_config.json"):
                renamed = (folder / file).read_text().replace("<|im_start|>", "[TOOL_CALLS]")
                renamed = renamed.replace("<|endoftext|>", "[ARGS]") if name != "mistral" else renamed
                (folder / file).write_text(renamed)
        named.append(f"{name}={folder}")
    words = ("--model", ",".join(named), "-B", "slots=4", "--behind-router")
    with serving(*words, folder=room) as running:
        yield running


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described")
    with serving("--model", "tiny", "-B", "slots=4", "--tool-format", "hermes", folder=folder) as running:
        yield running


def chat(server, **more):
    return server.openai.chat.completions.create(
        **{"messages": ASK, "tools": TOOLS, "max_tokens": 120, "seed": 1, **more}
    )


def joined(chunks):
    """What a stream's deltas come to: content, reasoning, calls as (id, name, arguments), finish reason."""
    content = reasoning = ""
    calls, finish = [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                calls.append([part.id, part.function.name, ""])
            calls[part.index][2] += part.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_calls_parse_and_follow_their_schemas_whole_and_streamed(servers, family):
    seen = set()
    for seed in range(4):
        asked = {"model": family, "tool_choice": "required", "seed": seed, "parallel_tool_calls": seed % 2 == 0}
        (whole,) = chat(servers, **asked).choices
        content, _, calls, finish = joined(chat(servers, **asked, stream=True))
        said = whole.message
        assert said.tool_calls, said
        assert whole.finish_reason == finish
        assert content == (said.content or "") == ""
        assert [one[1:] for one in calls] == [[one.function.name, one.function.arguments] for one in said.tool_calls]
        assert len({one.id for one in said.tool_calls}) == len(said.tool_calls)
        complete = said.tool_calls if whole.finish_reason == "tool_calls" else said.tool_calls[:-1]
        for call in complete:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            seen.add(call.function.name)
        if not asked["parallel_tool_calls"] or family == "llama3":
            assert len(said.tool_calls) == 1
            assert whole.finish_reason == "tool_calls"
        if family.startswith("mistral"):  # whose templates want such
            assert all(len(one.id) == 9 and one.id.isalnum() for one in said.tool_calls)
    assert len(seen) > 1


@pytest.mark.parametrize("family", TOOL_FORMATS)
def test_a_named_function_is_called_and_no_other(servers, family):
    named = {"type": "function", "function": {"name": "add"}}
    (choice,) = chat(servers, model=family, tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "add"
    assert json.loads(call.function.arguments)["a"] in (1, 2)


def test_several_answers_have_calls_of_their_own(servers):
    found = chat(servers, model="hermes", tool_choice="required", n=3, parallel_tool_calls=False)
    assert len({choice.message.tool_calls[0].id for choice in found.choices}) == 3


def test_auto_is_free_and_none_does_not_tell_the_model(servers):
    free = chat(servers, model="hermes", max_tokens=8)
    assert free.choices[0].message.content
    silent = chat(servers, model="hermes", max_tokens=8, tool_choice="none")
    without = chat(servers, model="hermes", max_tokens=8, tools=openai.omit)
    assert silent.choices[0].message.content == without.choices[0].message.content
    assert silent.usage.prompt_tokens == without.usage.prompt_tokens < free.usage.prompt_tokens


def test_a_model_that_knows_no_tools_hears_of_them_in_a_message(described):
    (call,) = (
        chat(described, model="tiny", tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    )
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    more = [{"role": "system", "content": "Be brief."}, *ASK, said]
    more.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    one, other = (chat(described, model="tiny", messages=given, max_tokens=4) for given in (ASK, more))
    assert other.usage.prompt_tokens > one.usage.prompt_tokens > 300
    tokens = described.ask("/tokenize", {"messages": ASK}).json["count"]
    assert tokens < 100


def test_thoughts_are_told_apart(servers):
    thinking = chat(servers, model="thinking", tools=openai.omit, max_tokens=12)
    said = thinking.choices[0].message
    assert (said.content, thinking.choices[0].finish_reason) == ("", "length")
    assert said.reasoning_content
    content, reasoning, _, _ = joined(chat(servers, model="thinking", tools=openai.omit, max_tokens=12, stream=True))
    assert (content, reasoning) == ("", said.reasoning_content)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = chat(servers, model="thinking", tools=openai.omit, max_tokens=12, extra_body=off)
    assert plain.choices[0].message.content
    assert not hasattr(plain.choices[0].message, "reasoning_content")


def test_a_stream_of_calls_goes_on_where_another_replica_has_ended(servers):
    asked = {"model": "hermes", "messages": ASK, "tools": TOOLS, "tool_choice": "required", "max_tokens": 120}
    asked |= {"stream": True, "parallel_tool_calls": False}
    said = {"X-Request-Id": "r1"}
    whole = blocks(servers.ask("/v1/chat/completions", asked, said))
    deltas = [event for event in whole if event[0] is not None and "role" not in event[1]["choices"][0]["delta"]]
    assert deltas  # those that come while the reader waits are one event: their number is a matter of speed
    for cut in range(len(deltas)):
        rest = gone_on(servers, "/v1/chat/completions", asked, {0: tokens_of(deltas[:cut])}, **said)
        assert tokens_of(deltas[:cut]) + tokens_of(rest) == tokens_of(whole)
        assert calls_in(deltas[:cut]) + calls_in(rest) == calls_in(whole)


def calls_in(events):
    """Names, ids and arguments as one text."""
    found = ""
    for _, data in events:
        for choice in (data or {}).get("choices", ()):
            for part in choice["delta"].get("tool_calls", ()):
                found += part.get("id", "") + part["function"].get("name", "") + part["function"]["arguments"]
    return found


def tool(**parameters):
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        (tool(type="object", properties={"a": {"type": "txt"}}), "tools[0].function.parameters.properties.a.type",
         "Choose from object, array"),
        (tool(properties={"a": {"items": {"enum": []}}}), "tools[0].function.parameters.properties.a.items.enum",
         "Give at least one"),
        (tool(type="string"), "tools[0].function.parameters.type", "Write object"),
        (tool(properties=[]), "tools[0].function.parameters.properties", "Write a schema for each name"),
        (tool(required="a"), "tools[0].function.parameters.required", "no list of names"),
        (tool(properties={"a": {"anyOf": [3]}}), "tools[0].function.parameters.properties.a.anyOf[0]", "JSON schema"),
        (tool(properties={"a": {"$ref": "http://x/y"}}), "tools[0].function.parameters.properties.a.$ref", "#/$defs"),
        (tool(properties={"a": {"$ref": "#/$defs/b"}}), "tools[0].function.parameters", "cannot be followed"),
        (tool(properties={"a": {"type": "string", "pattern": "(("}}), "tools[0].function.parameters", "be followed"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "no object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "no other tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "letters, digits"),
        ({"tools": [TOOLS[2], TOOLS[2]]}, "tools[1].function.name", "another tool"),
        ({"tools": [TOOLS[2]] * 129}, "tools", "128 are the most"),
        ({"tool_choice": "any"}, "tool_choice", "auto, none, required"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no `tools`"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "There is weather, add, now"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "names no function"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "neither true nor false"),
        ({"structured_outputs": {"regex": "a+"}}, "tools", '"tool_choice": "none"'),
        ({"model": "unknown"}, "tools", "--tool-format"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments", "is not JSON"),
        (tool(properties={"a": {"enum": ["x" * 70_000]}}), "tools", "65,536 are the most"),
        ({"functions": [{"name": "f"}]}, "functions", "not to be had"),
    ],
)  # fmt: skip
def test_refusals(servers, changes, param, says):
    asked = {"model": "hermes", "messages": ASK, "tools": TOOLS, "max_tokens": 4, **changes}
    answer = servers.ask("/v1/chat/completions", asked)
    assert answer.status == 400
    assert says in answer.error["message"]
    assert answer.error["param"] == param


def test_a_template_without_tools_says_which_flag_helps(tiny):
    answer = tiny.ask("/v1/chat/completions", {"messages": ASK, "tools": TOOLS})
    assert answer.status == 400
    assert "--tool-format hermes" in answer.error["message"]


def test_json_or_a_call(servers):
    schema = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(3):
        (choice,) = chat(servers, model="hermes", response_format=form, seed=seed, parallel_tool_calls=False).choices
        if choice.message.tool_calls is None:
            jsonschema.validate(json.loads(choice.message.content), schema)


# Grammars and the splitter, without a model

CALLS = [("weather", {"city": "Paris", "days": 2}), ("add", {"a": 1})]


@pytest.fixture(scope="module")
def language():
    return open_language(LanguageFiles(bytes=True), Shape("tiny", 257, 8, 1, 1, 1, 8, 8, 64, end_tokens=(256,)))


def follows(language, grammar, text):
    """Whether a text may be an answer: (each character may come, the answer may end there)."""
    matcher = language.matcher(Constraint(grammar=grammar))
    for byte in text.encode():
        try:
            matcher.advance(byte)
        except BadPrompt:
            return False, False
    mask = np.zeros(9, np.int32)
    matcher.mask(mask)
    return True, bool(mask[8] & 1)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_the_grammar_of_auto_lets_through(name, language):
    form = TOOL_FORMATS[name]
    calls = CALLS if form.several else CALLS[:1]
    grammar = tools_grammar(form, chosen_tools(TOOLS, "auto", None))
    before = "Let me see. " if form.begin else ""
    for text, fits in (
        ("", (True, True)),
        ("Hello {1} <b> [x]", (True, True)),
        ('{"a": 1}', (True, True)),
        (before + written_calls(form, calls), (True, True)),
        (before + written_calls(form, calls)[:-9], (True, False)),
        (before + written_calls(form, [("weather", {"city": "Oslo", "days": 2})]), (False, False)),
        (before + written_calls(form, [("sing", {})]), (False, False)),
    ):
        assert follows(language, grammar, text) == fits, text
    one = tools_grammar(form, chosen_tools(TOOLS, "required", False))
    assert follows(language, one, "Hello") == (False, False)
    assert follows(language, one, written_calls(form, CALLS[:1])) == (True, True)
    assert follows(language, one, written_calls(form, CALLS)) == (False, False)


def test_thoughts_before_calls_that_must_be(language):
    choice = chosen_tools(TOOLS, "required", None)
    call = written_calls(TOOL_FORMATS["hermes"], CALLS)
    opens, inside = (tools_grammar(TOOL_FORMATS["hermes"], choice, thinks=one) for one in ("opens", "inside"))
    assert follows(language, opens, call) == (True, True)
    assert follows(language, opens, f"<think>\nwell\n</think>\n\n{call}") == (True, True)
    assert follows(language, inside, f"well\n</think>\n\n{call}") == (True, True)
    assert follows(language, inside, "well\n</think>\n\nHello") == (False, False)


def split(form, thinks, pieces):
    splitter = AnswerSplitter(None if form is None else TOOL_FORMATS[form], thinks)
    found = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    calls = []
    for part in (part for one in found for part in one.calls):
        if part.index == len(calls):
            calls.append((part.name, ""))
        calls[part.index] = calls[part.index][0], calls[part.index][1] + part.arguments
    return "".join(one.reasoning for one in found), "".join(one.content for one in found), calls


H = written_calls(TOOL_FORMATS["hermes"], CALLS)
PAIRS = [(name, json.dumps(given)) for name, given in CALLS]
TRICKY = [("f", {"a": 'quote " brace } \\', "b": [{"c": {}}]})]


@pytest.mark.parametrize(
    ("form", "thinks", "text", "expected"),
    [
        ("hermes", None, "Hello <tool", ("", "Hello <tool", [])),
        ("hermes", None, f"Let me see.\n{H}", ("", "Let me see.", PAIRS)),
        ("hermes", None, H + "\nDone.", ("", "Done.", PAIRS)),
        ("hermes", "opens", f"<think>\nwell </b>\n</think>\n\n{H}", ("well </b>", "", PAIRS)),
        ("hermes", "inside", "well\n\nI see\n</think>\n\nHello\n", ("well\n\nI see", "Hello\n", [])),
        ("hermes", "inside", f"well\n{H}", ("well", "", PAIRS)),
        ("hermes", "opens", "Hello", ("", "Hello", [])),
        ("hermes", "opens", "<thing>", ("", "<thing>", [])),
        (None, "inside", "cut short", ("cut short", "", [])),
        (None, "opens", "<think></think>Hi", ("", "Hi", [])),
        ("mistral", None, written_calls(TOOL_FORMATS["mistral"], CALLS), ("", "", PAIRS)),
        ("mistral", None, '[TOOL_CALLS] [{"name":"f","arguments":{"x":[1]}}]', ("", "", [("f", '{"x":[1]}')])),
        ("llama3", None, written_calls(TOOL_FORMATS["llama3"], CALLS[:1]), ("", "", PAIRS[:1])),
        ("llama3", None, '{"type": "function", "name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
        ("llama3", None, '{"nam": 1}', ("", '{"nam": 1}', [])),
        ("llama3", None, "{", ("", "{", [])),
        ("hermes", None, written_calls(TOOL_FORMATS["hermes"], TRICKY), ("", "", [("f", json.dumps(TRICKY[0][1]))])),
        ("hermes", None, '<tool_call>\n{"name": "f", "arguments": {"a": "b', ("", "", [("f", '{"a": "b')])),
        ("hermes", None, 'Hi <tool_call>\n{"na', ("", "Hi", [])),
        ("hermes", None, "<tool_call> is a tag", ("", "<tool_call> is a tag", [])),
    ],
)
def test_an_answer_is_split_the_same_however_it_comes(form, thinks, text, expected):
    assert split(form, thinks, [text]) == expected
    assert split(form, thinks, list(text)) == expected
    for cut in range(1, len(text)):
        assert split(form, thinks, [text[:cut], text[cut:]]) == expected


def test_the_message_of_a_text_and_ids_that_are_the_same_anywhere():
    form = AnswerForm(TOOL_FORMATS["hermes"], "inside", "request-7")
    message, count = message_of(form, 0, f"well</think>{H}")
    assert count == 2
    assert message["content"] is None
    assert message["reasoning_content"] == "well"
    assert message == message_of(form, 0, f"well</think>{H}")[0]
    assert message["tool_calls"][0]["id"] != message_of(form, 1, f"well</think>{H}")[0]["tool_calls"][0]["id"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_that_a_stop_string_cuts_short_is_no_reason_to_wait_for_tools(name):
    form = AnswerForm(TOOL_FORMATS[name], None, "request-7")
    text = written_calls(TOOL_FORMATS[name], CALLS[:1])
    assert message_of(form, 0, text)[1] == 1
    message, whole = message_of(form, 0, text.partition("aris")[0])
    assert (whole, message["tool_calls"][0]["function"]["name"]) == (0, "weather")


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_the_format_is_seen_in_the_template(name, template):
    found = detected_format(template)
    assert (found and found.name) == {"thinking": "hermes", "unknown": None}.get(name, name)
