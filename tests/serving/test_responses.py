"""/v1/responses asked by OpenAI's own client, whole and as events."""

from __future__ import annotations

import json

import pytest
from test_tools import ADD, described, servers  # noqa: F401  fixtures

TOOLS = [{"type": "function", "name": "add", "parameters": ADD, "strict": True}]
CONVERSATION = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Add"}, {"type": "input_text", "text": "these."}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "3"},
]


def ask(server, **more):
    return server.openai.responses.create(**{"model": "hermes", "input": "Hi", "max_output_tokens": 60, **more})


def test_a_response_is_the_answer_of_the_chat(servers):  # noqa: F811
    found = ask(servers, max_output_tokens=8, instructions="Be brief.", extra_body={"seed": 3})
    chat = servers.ask(
        "/v1/chat/completions",
        {
            "model": "hermes",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            "max_tokens": 8,
            "seed": 3,
        },
    ).json
    assert found.output_text == chat["choices"][0]["message"]["content"]
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert found.usage.output_tokens == 8


def test_calls_and_their_events(servers):  # noqa: F811
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"seed": 1}}
    whole = ask(servers, **asked)
    (call,) = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    assert json.loads(call.arguments)["a"] in (1, 2)
    assert call.call_id.startswith("call_")
    events = list(ask(servers, **asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert pieces == events[-3].arguments == call.arguments
    assert events[-1].response.output[0].arguments == call.arguments


def test_text_and_thoughts_as_events(servers):  # noqa: F811
    for model, inner in (("hermes", "output_text"), ("thinking", "reasoning_text")):
        asked = {"model": model, "max_output_tokens": 8, "extra_body": {"seed": 2}}
        events = list(ask(servers, **asked, stream=True))
        said = "".join(event.delta for event in events if event.type == f"response.{inner}.delta")
        whole = ask(servers, **asked)
        assert said == whole.output[0].content[0].text
        assert whole.output[0].type == ("message" if model == "hermes" else "reasoning")
        (done,) = [event for event in events if event.type == f"response.{inner}.done"]
        assert done.text == said
        assert events[-1].type == "response.incomplete"


def test_a_conversation_with_calls_goes_on(described, servers):  # noqa: F811
    for server, model in ((described, "tiny"), (servers, "hermes")):
        found = ask(server, model=model, input=CONVERSATION, tools=TOOLS, max_output_tokens=4)
        assert found.usage.output_tokens <= 4


def test_a_form(servers):  # noqa: F811
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}, "strict": True}}
    assert ask(servers, text=form).output_text in ('"yes"', '"no"')


@pytest.mark.parametrize(
    ("changes", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "Send the conversation so far"),
        ({"conversation": "conv_1"}, "conversation", "keeps no answers"),
        ({"background": True}, "background", "waited for"),
        ({"include": ["file_search_call.results"]}, "include", "Take it out"),
        ({"truncation": "auto"}, "truncation", "nothing of a conversation is dropped"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "no other tools"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "txt"}}]}, "tools[0].parameters.type",
         "Write object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "does not map"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "texts alone"),
        ({"input": []}, "input", "`input` is empty"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"max_output_tokens": 0}, None, ">= 1"),
        ({"modalities": ["text"]}, "modalities", "no field"),
    ],
)  # fmt: skip
def test_refusals(servers, changes, param, says):  # noqa: F811
    answer = servers.ask("/v1/responses", {"model": "hermes", "input": "Hi", **changes})
    assert answer.status == 400
    assert says in answer.error["message"]
    assert answer.error["param"] == param
