"""/tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import pytest

SNOWMAN = "Hi ☃"


def test_a_text_becomes_tokens_and_a_text_again(tiny):
    told = tiny.ask("/tokenize", {"prompt": SNOWMAN, "return_token_strs": True}).json
    assert told["tokens"] == list(SNOWMAN.encode())
    assert told["count"] == len(told["tokens"])
    assert told["token_strs"] == ["H", "i", " ", "\\xe2", "\\x98", "\\x83"]
    [model] = tiny.ask("/v1/models").json["data"]
    assert told["max_model_len"] == model["max_model_len"]
    assert tiny.ask("/detokenize", {"tokens": told["tokens"]}).json == {"prompt": SNOWMAN}


def test_the_tokens_of_a_chat_are_those_of_its_answer(tiny):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    counted = tiny.ask("/tokenize", chat).json["count"]
    answered = tiny.ask("/v1/chat/completions", {**chat, "max_tokens": 1}).json
    assert counted == answered["usage"]["prompt_tokens"]
    begun = tiny.ask("/tokenize", {**chat, "add_generation_prompt": False}).json["count"]
    assert 0 < begun < counted


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "neither `prompt` nor `messages`"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "Give one"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ 7 }}"}, "no field `chat_template`"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template_kwargs": {"bos_token": "x"}}, "no argument of"),
        ("/tokenize", {"messages": []}, "`messages` is empty"),
        ("/detokenize", {"tokens": [72, 1 << 20]}, "token 1048576 is not in the model's vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "Hi"}, "Expected `array`"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "no model of that name"),
    ],
)
def test_refusals(tiny, path, body, says):
    answer = tiny.ask(path, body)
    assert answer.status == (404 if "model of" in says else 400)
    assert says in answer.error["message"]


def test_a_model_of_rows_has_no_tokens(rows):
    answer = rows.ask("/tokenize", {"prompt": "Hi"})
    assert answer.status == 404
    assert "POST /v1/evaluate" in answer.error["message"]
