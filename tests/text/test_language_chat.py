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
    ("chat", "template", "given"),
    [
        (ASKED, TOOLS, {"tools": [TOOL, TOOL]}),
        (ASKED, TOOLS, {"enable_thinking": False}),
        (ASKED, TOOLS, {"enable_thinking": True, "bos_token": "B"}),  # the tokenizer names a bos_token too
        (ASKED, TOOLS, {"add_generation_prompt": False}),
        (BEGUN, TOOLS, {"continue_final_message": True}),
        (BEGUN, TOOLS, {"continue_final_message": True, "trims": True}),
        (BEGUN, CHATML, {"continue_final_message": True}),
        (BEGUN, BRACKETS, {"continue_final_message": True}),
        (PARTS, MACROS, {"continue_final_message": True}),
        (ASKED, CHATML, {"continue_final_message": True}),
        ([SYSTEM, *ASKED], CHATML, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_of_a_chat_are_those_of_transformers(tmp_path, chat, template, given):
    opened = chat_language(tmp_path / "m", template)
    theirs = transformers_tokenizer(tmp_path / "m")
    begins = given.get("add_generation_prompt", "continue_final_message" not in given)
    text = theirs.apply_chat_template(chat, tokenize=False, **{**given, "add_generation_prompt": begins})
    names = ("tools", "add_generation_prompt", "continue_final_message")
    ours = {name: given[name] for name in names if name in given}
    variables = {name: value for name, value in given.items() if name not in names}
    rendering = {"add_generation_prompt": begins, **ours, "variables": variables}
    assert rendered(opened, chat, **rendering) == text
    plain = rendered(opened, chat)
    assert (plain != text) == (given not in ({}, {"enable_thinking": True, "bos_token": "B"}))


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


UNFINISHED = {"continue_final_message": True, "add_generation_prompt": False}
REFUSED = {  # template, messages, rendering, what the message names
    "to go on and to begin anew": (CHATML, ASKED, {"continue_final_message": True}, "one of them"),
    "the chat once more": (CHATML, ASKED, {"variables": {"messages": []}}, "sets `messages`"),
    "a template that changes the text": ("{{ messages[0].content | upper }}", "x", UNFINISHED, "go"),
    "one that leaves the text out": ("{{ messages[0].role }}", "x", UNFINISHED, "go"),
    "no text to go on with": ("{{ messages[0].content }}", None, UNFINISHED, "go"),
    "no parts": ("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", [], UNFINISHED, "go"),
    "tools that are not read": (TOOLS.replace("tools", "tools_of_old"), ASKED, {"tools": (TOOL,)}, "Take them out"),
    "a system message that is not read": (BRACKETS, (SYSTEM, *ASKED), {}, "roles must take turns"),
    "no message": (CHATML, (), {}, "at least one message"),
    "no role": (CHATML, ({"content": "x"},), {}, "message 0 of the chat has no role"),
    "a number for content": (CHATML, 5, {}, "content is a int"),
    "an image": (CHATML, [{"type": "image_url", "image_url": {}}], {}, "'image_url'"),
    "a part without text": (CHATML, [{"type": "text"}], {}, "has no text"),
    "a bare text for a part": (CHATML, ["x"], {}, "type 'str'"),
    "a role that the template refuses": (CHATML, ({"role": "wizard", "content": "x"},), {}, "Unknown role wizard"),
    "no content": (CHATML, ({"role": "user"},), {}, "chat template"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_chat_that_cannot_be_rendered_is_refused_with_the_cure(tmp_path, case):
    template, messages, rendering, named = REFUSED[case]
    if messages is None or isinstance(messages, str | int) or (isinstance(messages, list) and messages != ASKED):
        messages = ({"role": "user", "content": messages},)
    prompt = Prompt(messages=tuple(messages), rendering=Rendering(**rendering))
    why = refusal(chat_language(tmp_path / "m", template), prompt)
    assert named in why
    assert named != "go" or why.endswith("eave continue_final_message out.")


def test_variables_that_the_template_does_not_read_are_reported_once(tmp_path, caplog):
    opened = chat_language(tmp_path / "m", TOOLS.replace("tools", "tools_of_old"))
    for _ in range(3):
        rendered(opened, ASKED, variables={"enable_thinkin": False, "enable_thinking": False})
    assert [record.getMessage() for record in caplog.records] == [
        "the model's chat template does not read `enable_thinkin`, which changes nothing. Did you mean "
        "`enable_thinking`?",
    ]


def test_which_template_is_taken(tmp_path):
    path = folder(tmp_path / "m", byte_level(), chat_template={"chat_template": "three"})
    assert rendered(language(path, byte_level()), ASKED) == "three"
    assert rendered(chat_language(path, "two"), ASKED) == "two"
    (path / "chat_template.jinja").write_text("one {{ messages[0].role }}")
    assert rendered(chat_language(path, "two"), ASKED) == "one user"
    several, single = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}], [{"template": "O"}]
    for templates, text in ((several, "D"), (single, "O")):
        opened = chat_language(tmp_path / "n", templates)
        assert (opened.has_chat_template, rendered(opened, ASKED)) == (True, text)
    opened = language(tmp_path / "none", byte_level())
    assert not opened.has_chat_template
    assert "Give a prompt instead of messages" in refusal(opened, Prompt(messages=tuple(ASKED)))


def test_text_parts_stay_parts_where_the_template_knows_them_and_are_joined_where_not(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert rendered(chat_language(tmp_path / "a", MACROS), parts).startswith("<USER>one<USER>two")
    assert "user\none\ntwo<|im_end|>" in rendered(chat_language(tmp_path / "b", CHATML), parts)
    assert rendered(chat_language(tmp_path / "c", "{{ messages[0].content }}"), parts) == "one\ntwo"


DOUBLING = "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t OP n.t %}{% endfor %}"
MISBEHAVING = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "end"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deep"),
    "long output": ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "more than"),
    "a long text by multiplication": ("{{ 'x' * 10 ** 12 }}", "more than"),
    "a large number": ("{{ 7 ** (7 ** 9) }}", "more than"),
    "a wide format": ("{{ '%999999999d' % 1 }}", "widens"),
    "a wide format by its argument": ("{{ '%*d' | format(10 ** 10, 1) }}", "widens"),
    "a wide format of a text's own": ("{{ '{:999999999}'.format(1) }}", "widens"),
    "a wide filter": ("{{ 'x' | center(10 ** 10) }}", "widens"),
    "a wide call": ("{{ 'x'.ljust(10 ** 10) }}", "widens"),
    "a text that doubles": (DOUBLING.replace("OP", "+"), "more than"),
    "a text that doubles by joining": (DOUBLING.replace("OP", "~"), "more than"),
    "a way out of the sandbox": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "a change of the chat": ("{{ messages.append(1) }}", "unsafe|safely"),
    "no template at all": ("{% if %}", "Expected an expression"),
    "another file": ("{% include '/etc/passwd' %}", "chat template"),
    "an error of its own": ("{{ 1 / 0 }}", "ZeroDivisionError"),
}


@pytest.mark.parametrize("case", MISBEHAVING)
def test_a_template_that_misbehaves_fails_the_prompt_alone(tmp_path, case, monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_TURNS", 20_000)
    template, named = MISBEHAVING[case]
    guarded = "{% if messages[0].content == 'bad' %}" + template + "{% else %}fine{% endif %}"
    opened = chat_language(tmp_path / "m", template if "if %}" in template else guarded)
    message = refusal(opened, Prompt(messages=({"role": "user", "content": "bad"},)))
    assert any(one in message for one in named.split("|"))
    assert len(message) < 600
    if "if %}" not in template:
        assert rendered(opened, [{"role": "user", "content": "good"}]) == "fine"


def test_deep_json_in_a_message_is_refused(tmp_path):
    wrapped: list = []
    for _ in range(3000):
        wrapped = [wrapped]
    opened = chat_language(tmp_path / "m", "{{ messages[0].tool_calls | tojson }}")
    assert "nested too deep" in refusal(opened, Prompt(messages=({"role": "user", "tool_calls": wrapped},)))
