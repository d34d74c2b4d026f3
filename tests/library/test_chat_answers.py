"""`LLM.chat`: calls of tools and thoughts are told apart, as the server tells them."""

from __future__ import annotations

import jsonschema
import pytest
from text.tiny import copy_of, tiny_checkpoint

import gpuinfer
from gpuinfer.errors import GpuinferError

ADD = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.arguments.a }}{% endfor %}\n{% endfor %}{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is false %}<think></think>{% else %}<think>\n"
    "{% endif %}{% endif %}"
)
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = copy_of(
        tiny_checkpoint("llama", max_position_embeddings=1024), tmp_path_factory.mktemp("chats") / "thinking"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with gpuinfer.LLM(folder, threads=1) as opened:
        yield opened


def test_calls_are_parsed_and_the_conversation_goes_on_with_them(llm):
    asked = [{"role": "user", "content": "Add"}]
    answer = llm.chat(asked, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=2, **QUIET)
    (call,) = answer.tool_calls
    assert isinstance(call, gpuinfer.ToolCall)
    assert (call.name, answer.text, answer.finish_reason) == ("add", "", "tool_calls")
    jsonschema.validate(call.values, ADD)
    assert answer.texts == ["", ""]
    assert answer.messages[1]["tool_calls"][0]["id"] != call.id
    more = [*asked, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    again = llm.chat(more, tools=TOOLS, tool_choice="none", max_new_tokens=4, **QUIET)
    assert (again.tool_calls, again.finish_reason) == ([], "length")
    assert again.text == again.samples[0].text
    named = {"type": "function", "function": {"name": "add"}}
    assert llm.chat(asked, tools=TOOLS, tool_choice=named, tool_format="qwen3-coder", **QUIET).tool_calls


def test_what_was_thought_is_no_part_of_the_text(llm):
    answer = llm.chat("Hi", max_new_tokens=8)
    assert isinstance(answer, gpuinfer.ChatAnswer)
    assert answer.text == ""
    assert answer.reasoning
    assert answer.reasoning in answer.samples[0].text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "sing"}}}, "There is add"),
        ({"tool_format": "nonesuch"}, "Choose from auto, hermes"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"regex": "a+"}, '"tool_choice": "none"'),
        ({"parallel_tool_calls": "yes"}, "neither true nor false"),
    ],
)
def test_what_cannot_be_is_refused(llm, changes, says):
    with pytest.raises(GpuinferError) as refused:
        llm.chat("Hi", **{"tools": TOOLS, **changes})
    assert says in str(refused.value)


def test_a_model_that_knows_no_tools_says_which_argument_helps():
    with gpuinfer.LLM("tiny", threads=1) as llm, pytest.raises(GpuinferError, match='tool_format="hermes"'):
        llm.chat("Hi", tools=TOOLS)
