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


def numbered(answer):
    """Each event: whether it goes out with the next one, the tokens in it, its number, whether it is the last."""
    found = []
    for block in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        ids = [line.removeprefix("id: ") for line in block.split("\n") if line.startswith("id: ")]
        told = json.loads(next(line for line in block.split("\n") if line.startswith("data: ")).removeprefix("data: "))
        tokens = [int(one) for one in ids[0].removeprefix("0.").removesuffix("!").split(",") if one] if ids else []
        number = int(ids[1].removeprefix("999999999.")) if ids else None
        found.append((block.startswith(": more\n"), tokens, number, bool(ids) and ids[0].endswith("!"), told))
    return found


def _without_times(response):
    """But for what another replica may know otherwise: the time, and what it has cached of the prompt."""
    usage = {name: value for name, value in response["usage"].items() if name != "input_tokens_details"}
    return {**response, "created_at": 0, "usage": usage}


def text_in(events):
    return "".join(event["delta"] for event in events if event["type"].endswith(".delta"))


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"model": "hermes"}, id="text"),
        pytest.param({"model": "thinking"}, id="thoughts"),
        pytest.param({"model": "hermes", "tools": TOOLS, "tool_choice": "required"}, id="calls"),
        pytest.param({"model": "qwen3-coder", "tools": TOOLS, "tool_choice": "required"}, id="calls between tags"),
    ],
)
def test_a_stream_goes_on_where_another_replica_has_ended(servers, asked):  # noqa: F811
    body = {"input": "Hi", "max_output_tokens": 60, "parallel_tool_calls": False, "stream": True, **asked}
    said = {"X-Request-Id": f"response-{asked['model']}"}
    whole = numbered(servers.ask("/v1/responses", body, said))
    assert [one[4]["sequence_number"] for one in whole] == list(range(len(whole)))
    assert [one[0] for one in whole] == [one[2] is None for one in whole]
    cuts = [place + 1 for place, one in enumerate(whole) if one[2] is not None]
    assert len(cuts) > 2  # how many deltas come is a matter of speed
    for cut in (cuts[0], cuts[1], cuts[len(cuts) // 2], cuts[-2]):
        had = [token for one in whole[:cut] for token in one[1]]
        head = {"0": {"tokens": had, "ended": False}, "999999999": {"tokens": [cut - 1], "ended": False}}
        sent = json.dumps(head).encode()
        more = {**said, "X-Gpuinfer-Begun": str(len(sent)), "X-Gpuinfer-Created": "1234"}
        rest = numbered(servers.ask("/v1/responses", sent + json.dumps(body).encode(), more))
        assert [one[4]["sequence_number"] for one in rest] == list(range(cut, cut + len(rest)))
        assert had + [token for one in rest for token in one[1]] == [token for one in whole for token in one[1]]
        before, after, all_of_it = ([one[4] for one in some] for some in (whole[:cut], rest, whole))
        assert text_in(before) + text_in(after) == text_in(all_of_it)
        resumed, unbroken = (_without_times(some[-1]["response"]) for some in (after, all_of_it))
        assert resumed == unbroken
    ended = json.dumps({"0": {"tokens": [1], "ended": True}}).encode()
    more = {**said, "X-Gpuinfer-Begun": str(len(ended))}
    assert servers.ask("/v1/responses", ended + json.dumps(body).encode(), more).body == b""
