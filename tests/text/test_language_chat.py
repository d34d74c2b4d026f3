"""Chats become the texts that transformers makes of them, and a template that runs away fails its prompt alone."""

import pytest
from language_samples import byte_level, folder, language
from test_language_encoding import refusal, transformers_tokenizer

from gpuinfer.generation import Prompt, Rendering
from gpuinfer.text.language import chat_template

CHATML = """{%- if messages[0].role != 'system' -%}
<|im_start|>system
You are helpful.<|im_end|>
{% endif -%}
{% for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

BRACKETS = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ ' ' + message.content | trim + eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}"""

MACROS = """{%- macro turn(role, content) -%}
    {%- if content is string -%}
        {{- '<' ~ role ~ '>' ~ content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type != 'text' -%}{%- continue -%}{%- endif -%}
            {{- '<' ~ role ~ '>' ~ part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(count=0, last='') -%}
{%- for message in messages -%}
    {%- set ns.count = ns.count + 1 -%}
    {%- set ns.last = message.content -%}
    {{- turn(message.role | upper, message.content) }}
    {%- if message.tool_calls is defined %}
{{ message.tool_calls | tojson }}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
{%- endfor %}
{{ 'n=%d' % ns.count }}{{ '-' * 3 }}{% if tools is none %} no tools{% endif %}{{ strftime_now('%Y') | length }}
{%- for n in range(5) %}{% if n == 3 %}{% break %}{% endif %}{{ n }}{% endfor %}
{% call(x) wrap() %}[{{ x }}]{% endcall %}""".replace(
    "{%- set ns =", "{%- macro wrap() %}{{ caller('in') }}{% endmacro -%}{%- set ns ="
)

CHATS = [
    [{"role": "user", "id": 10**12, "content": "Hello <b>world</b> & 'you' 日本😀\n"}],
    [
        {"role": "user", "content": "What is 2+2?  "},
        {"role": "assistant", "content": " 4 "},
        {"role": "user", "content": "Sure?"},
    ],
    [
        {"role": "user", "content": "It is { 1234567 } % 5 * 3"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"a": "é<>", "b": [1, 2.5]}}]},
    ],
]
SYSTEM = {"role": "system", "content": "Be brief."}
NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": None}


def chat_language(path, template, **more):
    return language(path, byte_level(), tokenizer_config={**NAMED, "chat_template": template, **more})


def rendered(opened, messages, **more) -> str:
    return opened.render_chat(messages, Rendering(**more))


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [CHATML, BRACKETS, MACROS], ids=["chatml", "brackets", "macros"])
def test_a_chat_is_rendered_and_encoded_as_transformers_does(tmp_path, template, chat):
    opened = chat_language(tmp_path / "m", template)
    theirs = transformers_tokenizer(tmp_path / "m")
    (ours,) = opened.encode([Prompt(messages=tuple(chat))])
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered(opened, chat) == text
    assert ours.tolist() == theirs(text, add_special_tokens=False)["input_ids"]


TOOLS = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content | trim if trims else message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of <a> city & 'now'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [{"role": "user", "content": "How warm is it?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "  It is\n warm. "}]
PARTS = [*ASKED, {"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]}]


@pytest.mark.parametrize(
    ("chat", "template", "said"),
    [
        pytest.param(ASKED, TOOLS, {"tools": [TOOL, TOOL]}, id="tools"),
        pytest.param(ASKED, TOOLS, {"enable_thinking": False}, id="a variable"),
        pytest.param(ASKED, TOOLS, {"enable_thinking": True, "bos_token": "B"}, id="one that the tokenizer names too"),
        pytest.param(ASKED, TOOLS, {"add_generation_prompt": False}, id="a closed chat"),
        pytest.param(BEGUN, TOOLS, {"continue_final_message": True}, id="a message to go on with"),
        pytest.param(BEGUN, TOOLS, {"continue_final_message": True, "trims": True}, id="one that is trimmed"),
        pytest.param(BEGUN, CHATML, {"continue_final_message": True}, id="one in another form"),
        pytest.param(BEGUN, BRACKETS, {"continue_final_message": True}, id="one in brackets"),
        pytest.param(PARTS, MACROS, {"continue_final_message": True}, id="one in parts"),
        pytest.param(ASKED, CHATML, {"continue_final_message": True}, id="the user's own"),
    ],
)
def test_what_is_said_of_a_chat_is_what_transformers_makes_of_it(tmp_path, chat, template, said):
    opened = chat_language(tmp_path / "m", template)
    theirs = transformers_tokenizer(tmp_path / "m")
    begins = said.get("add_generation_prompt", "continue_final_message" not in said)
    text = theirs.apply_chat_template(chat, tokenize=False, **{**said, "add_generation_prompt": begins})
    names = ("tools", "add_generation_prompt", "continue_final_message")
    ours = {name: said[name] for name in names if name in said}
    variables = {name: value for name, value in said.items() if name not in names}
    rendering = {"add_generation_prompt": begins, **ours, "variables": variables}
    assert rendered(opened, chat, **rendering) == text
    plain = rendered(opened, chat)
    assert (plain != text) == (said not in ({"enable_thinking": True, "bos_token": "B"},))


def test_tools_have_a_template_of_their_own_where_there_is_one(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T {{ tools[0].function.name }}"}]
    opened = chat_language(tmp_path / "m", named)
    assert rendered(opened, ASKED) == "D"
    assert rendered(opened, ASKED, tools=(TOOL,)) == "T weather"
    theirs = transformers_tokenizer(tmp_path / "m")
    assert theirs.apply_chat_template(ASKED, tools=[TOOL], tokenize=False) == "T weather"
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "tool_use.jinja").write_text("F")
    assert rendered(chat_language(tmp_path / "m", "D"), ASKED, tools=(TOOL,)) == "F"


@pytest.mark.parametrize(
    ("rendering", "said"),
    [
        pytest.param({"continue_final_message": True}, "one of them", id="to go on and to begin anew"),
        pytest.param({"variables": {"messages": []}}, "sets `messages`", id="the chat once more"),
    ],
)
def test_what_cannot_be_said_of_a_chat_is_refused(tmp_path, rendering, said):
    prompt = Prompt(messages=tuple(ASKED), rendering=Rendering(**rendering))
    assert said in refusal(chat_language(tmp_path / "m", CHATML), prompt)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param("{{ messages[0].content | upper }}", {"content": "x"}, id="a template that changes the text"),
        pytest.param("{{ messages[0].role }}", {"content": "x"}, id="one that leaves it out"),
        pytest.param("{{ messages[0].content }}", {"content": None}, id="no text"),
        pytest.param("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", {"content": []}, id="no parts"),
    ],
)
def test_a_message_that_cannot_be_gone_on_with_is_refused(tmp_path, template, message):
    rendering = Rendering(continue_final_message=True, add_generation_prompt=False)
    prompt = Prompt(messages=({"role": "assistant", **message},), rendering=rendering)
    assert "go" in (why := refusal(chat_language(tmp_path / "m", template), prompt))
    assert why.endswith("eave continue_final_message out.")


def test_what_the_template_does_not_read_is_said_once(tmp_path, caplog):
    opened = chat_language(tmp_path / "m", TOOLS.replace("tools", "tools_of_old"))
    for _ in range(3):
        rendered(opened, ASKED, variables={"enable_thinkin": False, "enable_thinking": False})
    assert [record.getMessage() for record in caplog.records] == [
        "the model's chat template does not read `enable_thinkin`, which changes nothing. Did you mean "
        "`enable_thinking`?",
    ]


def test_tools_that_the_template_does_not_read_are_refused(tmp_path):
    opened = chat_language(tmp_path / "m", TOOLS.replace("tools", "tools_of_old"))
    why = refusal(opened, Prompt(messages=tuple(ASKED), rendering=Rendering(tools=(TOOL,))))
    assert "does not read `tools`" in why
    assert "Take them out" in why
    assert rendered(opened, ASKED, tools=()) == rendered(opened, ASKED)


def test_a_system_message_is_rendered_where_the_template_has_one_and_refused_where_not(tmp_path):
    chat = (SYSTEM, {"role": "user", "content": "hi"})
    opened = chat_language(tmp_path / "m", CHATML)
    theirs = transformers_tokenizer(tmp_path / "m")
    assert rendered(opened, chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "roles must take turns" in refusal(chat_language(tmp_path / "n", BRACKETS), Prompt(messages=chat))


def test_a_template_file_goes_before_the_settings(tmp_path):
    path = folder(tmp_path / "m", byte_level(), chat_template={"chat_template": "three"})
    user = [{"role": "user", "content": "x"}]
    assert rendered(language(path, byte_level()), user) == "three"
    assert rendered(chat_language(path, "two"), user) == "two"
    (path / "chat_template.jinja").write_text("one {{ messages[0].content }}")
    assert rendered(chat_language(path, "two"), user) == "one x"


@pytest.mark.parametrize(
    ("templates", "text"),
    [
        pytest.param([{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}], "D", id="that by name"),
        pytest.param([{"name": "own", "template": "O"}], "O", id="the only one"),
    ],
)
def test_of_several_templates_the_default_is_taken(tmp_path, templates, text):
    opened = chat_language(tmp_path / "m", templates)
    assert opened.has_chat_template
    assert rendered(opened, [{"role": "user", "content": "x"}]) == text


def test_a_model_without_a_template_wants_a_prompt(tmp_path):
    opened = language(tmp_path / "m", byte_level())
    assert not opened.has_chat_template
    assert "Give a prompt instead of messages" in refusal(opened, Prompt(messages=({"role": "user", "content": "x"},)))


def test_text_parts_stay_parts_where_the_template_knows_them_and_are_joined_where_not(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert rendered(chat_language(tmp_path / "a", MACROS), parts).startswith("<USER>one<USER>two")
    assert "user\none\ntwo<|im_end|>" in rendered(chat_language(tmp_path / "b", CHATML), parts)
    printed = "{{ messages[0].content }}"
    assert rendered(chat_language(tmp_path / "c", printed), parts) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        pytest.param((), "at least one message", id="no message"),
        pytest.param(({"content": "x"},), "message 0 of the chat has no role", id="no role"),
        pytest.param(({"role": "user", "content": 5},), "content is a int", id="a number for content"),
        pytest.param(
            ({"role": "u", "content": [{"type": "image_url", "image_url": {}}]},), "'image_url'", id="an image"
        ),
        pytest.param(({"role": "u", "content": [{"type": "text"}]},), "has no text", id="a part without text"),
        pytest.param(({"role": "u", "content": ["x"]},), "type 'str'", id="a bare text for a part"),
        pytest.param(({"role": "wizard", "content": "x"},), "Unknown role wizard", id="the template refuses"),
        pytest.param(({"role": "user"},), "chat template", id="the template misses the content"),
    ],
)
def test_a_bad_chat_is_refused_with_a_reason(tmp_path, messages, said):
    assert said in refusal(chat_language(tmp_path / "m", CHATML), Prompt(messages=messages))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "end", id="loops"
        ),
        pytest.param("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deep", id="recursion"),
        pytest.param("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than", id="long output"),
        pytest.param("{{ 'x' * 10 ** 12 }}", "more than", id="a long text by multiplication"),
        pytest.param("{{ 7 ** (7 ** 9) }}", "more than", id="a large number"),
        pytest.param("{{ '%999999999d' % 1 }}", "widens", id="a wide format"),
        pytest.param("{{ '%*d' | format(10 ** 10, 1) }}", "widens", id="a wide format by its argument"),
        pytest.param("{{ '{:999999999}'.format(1) }}", "widens", id="a wide format of a text's own"),
        pytest.param("{{ 'x' | center(10 ** 10) }}", "widens", id="a wide filter"),
        pytest.param("{{ 'x'.ljust(10 ** 10) }}", "widens", id="a wide call"),
        pytest.param(
            "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
            "more than",
            id="a text that doubles",
        ),
        pytest.param(
            "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
            "more than",
            id="a text that doubles by joining",
        ),
        pytest.param("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe", id="a way out of the sandbox"),
        pytest.param("{{ messages.append(1) }}", "unsafe|safely", id="a change of the chat"),
        pytest.param("{% if %}", "Expected an expression", id="no template at all"),
        pytest.param("{% include '/etc/passwd' %}", "chat template", id="another file"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError", id="an error of its own"),
    ],
)
def test_a_template_that_misbehaves_fails_the_prompt_alone(tmp_path, template, said, monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_TURNS", 20_000)
    guarded = "{% if messages[0].content == 'bad' %}" + template + "{% else %}fine{% endif %}"
    opened = chat_language(tmp_path / "m", template if "if %}" in template else guarded)
    message = refusal(opened, Prompt(messages=({"role": "user", "content": "bad"},)))
    assert any(one in message for one in said.split("|"))
    assert len(message) < 600
    if "if %}" not in template:
        assert rendered(opened, [{"role": "user", "content": "good"}]) == "fine"


def test_deep_json_in_a_message_is_refused(tmp_path):
    wrapped: list = []
    for _ in range(3000):
        wrapped = [wrapped]
    opened = chat_language(tmp_path / "m", "{{ messages[0].tool_calls | tojson }}")
    assert "nested too deep" in refusal(opened, Prompt(messages=({"role": "user", "tool_calls": wrapped},)))
