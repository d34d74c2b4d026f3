"""What a row may be, what becomes of it, and that a bad row costs no other its answer."""

from __future__ import annotations

import json

import msgspec
import pytest
from run_generate import infer_of, lines, run

from gpuinfer.errors import UsageError
from gpuinfer.generation import Constraint, Rendering, Sampling
from gpuinfer.serving.openai import row_files
from gpuinfer.serving.openai.prompt_rows import PromptRowReader, prompts_of
from gpuinfer.serving.openai.requests import PromptDefaults
from gpuinfer.serving.openai.row_splitter import RowSplitter
from gpuinfer.workloads.generate.answer_lines import LineWriter

BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
CHAT = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}


def asked(row, **defaults):
    reader = PromptRowReader(PromptDefaults(**defaults))
    return reader.read((1, row if isinstance(row, bytes) else json.dumps(row).encode()))


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ("hello", "text", "hello"),
        ({"prompt": ""}, "text", ""),
        ({"prompt": ["hello"]}, "text", "hello"),
        ({"prompt": [1, 2]}, "tokens", (1, 2)),
        ({"prompt": [[1, 2]]}, "tokens", (1, 2)),
        ({"prompt_token_ids": [1, 2]}, "tokens", (1, 2)),
        ({"messages": CHAT}, "messages", tuple(CHAT)),
        ({**BATCH, "body": {"model": "m", "prompt": "hello"}}, "text", "hello"),
        ({**BATCH, "url": "/v1/chat/completions", "body": {"messages": CHAT}}, "messages", tuple(CHAT)),
    ],
)
def test_a_prompt_is_read_in_each_form(row, field, value):
    found = asked(row)
    assert found.error is None
    given = {name: getattr(found.prompt, name) for name in ("text", "tokens", "messages")}
    assert given == {"text": None, "tokens": None, "messages": None, field: value}


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 6}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0, "top_k": -1, "top_p": 0.5}, {"temperature": 0.0, "top_k": 0, "top_p": 0.5}),
        ({"temperature": None, "n": None, "stream": False, "echo": False, "suffix": "", "tools": []}, {}),
        ({"tool_choice": "auto", "modalities": ["text"], "verbosity": "medium", "best_of": 1, "bad_words": []}, {}),
        ({"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}, {}),
        ({"service_tier": "flex", "store": True, "stream_options": {}, "parallel_tool_calls": False}, {}),
        ({"prediction": {"type": "content", "content": "x"}, "priority": 3, "request_id": "r"}, {}),
        ({"stop": "x", "skip_special_tokens": False}, {"stop": ("x",), "skip_special_tokens": False}),
        ({"stop": ["x", "y"], "stop_token_ids": [3]}, {"stop": ("x", "y"), "stop_token_ids": (3,)}),
        ({"seed": 4, "logit_bias": {"5": -100}}, {"seed": 4, "logit_bias": {5: -100.0}}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"response_format": {"type": "json_object"}}, {"constraint": Constraint(json_schema=SCHEMA)}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"constraint": Constraint(json_schema=SCHEMA)},
        ),
        ({"response_format": {"type": "text"}}, {"constraint": None}),
        ({"structured_outputs": {"regex": "a+"}}, {"constraint": Constraint(regex="a+")}),
        ({"guided_choice": ["a", "b"]}, {"constraint": Constraint(choice=("a", "b"))}),
        ({"guided_json": json.dumps(SCHEMA)}, {"constraint": Constraint(json_schema=SCHEMA)}),
    ],
)
@pytest.mark.parametrize("form", ["row", "batch"])
def test_a_row_may_say_how_its_answer_is_drawn(row, changed, form):
    defaults = Sampling(temperature=0.7, logprobs=1, constraint=Constraint(regex="b"))
    whole = {"prompt": "p", **row}
    found = asked(whole if form == "row" else {**BATCH, "body": whole}, sampling=defaults)
    expected = msgspec.structs.replace(defaults, **changed)
    spelled = form == "batch" and expected.logprobs is not None  # as OpenAI's form has it
    assert (found.error, found.prompt.sampling) == (None, msgspec.structs.replace(expected, spelled=spelled))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b"nope", "not JSON"),
        (b'{"prompt": NaN}', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"metadata": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, "nested too deeply"),
        (b"5", "Expected"),
        (b"\xff\xfe" + '{"prompt": "a"}'.encode("utf-16-le"), "as UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16-be"), "as UTF-8"),
        (rb'{"prompt": "a", "metadata": {"b": "\ud800"}}', "half of a character"),
        (rb'{"prompt": "a", "metadata": {"b": "\udc00"}}', "half of a character"),
        ({}, "has none"),
        ({"text": "a"}, "Rename it to `prompt`"),
        ({"id": 3, "label": 1, "input": "a"}, "has `input` where `prompt` is read"),
        ({"prompt": "a", "text": "b"}, "there is no field `text`"),
        ({"conversations": []}, "Rename it to `messages`"),
        ({"prompt": "a", "messages": CHAT}, "has 2"),
        ({"prompt": ["a", "b"]}, "row of its own"),
        ({"prompt": [-1]}, "token ids"),
        ({"messages": []}, "is empty"),
        ({"messages": [{"content": "a"}]}, "has no role"),
        ({"prompt": "a", "max_token": 5}, "Did you mean `max_tokens`?"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, ">= 1"),
        ({"prompt": "a", "temperature": -1}, ">= 0"),
        ({"prompt": "a", "n": 10**9}, "<= 4096"),
        ({"prompt": "a", "stop": [""]}, "empty text"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "gives none"),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": False}}}, "no answer"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, "more than one"),
        ({"prompt": "a", "guided_json": "{"}, "schema is none"),
        ({"prompt": "a", "guided_json": "false"}, "no answer fits"),
        ({"prompt": "a", "stream": True}, "`stream` is not to be had here"),
        ({"prompt": "a", "echo": True}, "`echo` is not to be had here"),
        ({"prompt": "a", "suffix": "z"}, "`suffix` is not to be had here"),
        ({"prompt": "a", "tool_choice": "required"}, "`tool_choice` is not to be had here"),
        ({"prompt": "a", "best_of": 5}, "`best_of` is not to be had here"),
        ({"prompt": "a", "tools": [{}]}, "`tools` is said of a chat"),
        ({"prompt": "a", "add_generation_prompt": False}, "said of a chat"),
        ({"messages": CHAT, "tools": ["f"]}, "Expected `object`"),
        ({"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True}, "one of"),
        ({**BATCH, "body": {"messages": CHAT}}, "has no `prompt`"),
        ({**BATCH, "url": "/v1/embeddings", "body": {}}, "/v1/completions"),
        ({**BATCH, "method": "GET", "body": {}}, "Write POST"),
        (BATCH, "no body"),
        ({**BATCH, "body": {"prompt": "a"}, "adapter": "b"}, "names no adapter"),
        ({**BATCH, "body": {"promt": "a"}}, "Did you mean `prompt`?"),
    ],
)
def test_a_bad_row_is_an_error_that_says_why(row, why):
    found = asked(row)
    assert found.prompt is None
    assert why in str(found.error)
    assert str(found.error).endswith(".")


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        ({"tools": [SCHEMA]}, {"tools": (SCHEMA,)}),
        ({"tools": [], "chat_template_kwargs": {}, "continue_final_message": False, "add_generation_prompt": True}, {}),
        ({"chat_template_kwargs": {"a": 2}}, {"variables": {"a": 2, "b": 1}}),
        ({"reasoning_effort": "low"}, {"variables": {"a": 1, "b": 1, "reasoning_effort": "low"}}),
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
    ],
)
@pytest.mark.parametrize("form", ["row", "batch"])
def test_a_chat_may_say_how_it_is_written_out(row, changed, form):
    whole, batch = {"messages": CHAT, **row}, {**BATCH, "url": "/v1/chat/completions"}
    defaults = Rendering(variables={"a": 1, "b": 1})
    found, plain = (
        asked(one if form == "row" else {**batch, "body": one}, rendering=defaults)
        for one in (whole, {"messages": CHAT})
    )
    assert found.prompt.rendering == msgspec.structs.replace(defaults, **changed)
    assert (found.content == plain.content) == (not changed)


def test_bad_rows_are_error_rows_and_the_others_are_answered(tmp_path, monkeypatch):
    answer, huge, infer = LineWriter.answer, 10**30, infer_of()

    def choosy(self, job, *more):
        if job.id == "odd":
            raise OverflowError("too big")
        return answer(self, job, *more)

    monkeypatch.setattr(LineWriter, "answer", choosy)
    monkeypatch.setattr(row_files, "RowSplitter", lambda: RowSplitter(1000))
    rows = [{"id": "x", "prompt": 5}, {"id": "y", "prompt": "bad"}, {"id": huge, "prompt": "good"}]
    rows += [{"id": "odd", "prompt": "a"}, {"id": "z", "prompt": "p", "metadata": {"n": huge}}]
    text = lines("x" * 2000, b"nope", b"", *rows)
    found = run(tmp_path, text, infer)
    rows = {row["id"]: row for row in found}
    assert rows[huge]["text"].startswith("doog")
    why = "Expected `str | array | null`, got `int` - at `$.prompt`. Correct it."
    assert rows["x"]["error"] == {"type": "bad_row", "message": why, "row": 3, "line": 4}
    assert rows["y"]["error"]["type"] == "bad_prompt"
    assert "too big" in rows["odd"]["error"]["message"]
    assert rows["z"]["metadata"] == {"n": huge}
    assert (len(found), sum("error" in row for row in found)) == (7, 5)
    spent = {lane.name: set(lane.visits()) for lane in infer.lanes}
    assert spent == {"input": {"read", "understand", "idle"}, "output": {"write", "sync", "idle"}}


@pytest.mark.parametrize("ids", [("a", "a", "b"), (1, "1", 2)])
def test_an_id_that_came_before_is_an_error(tmp_path, ids):
    rows = run(tmp_path, lines(*({"id": one, "prompt": f"p{number}"} for number, one in enumerate(ids))), ordered=True)
    assert ["error" in row for row in rows] == [False, True, False]
    assert "has come before" in rows[1]["error"]["message"]


def test_ids_come_from_what_a_row_says_and_not_from_where_it_stands(tmp_path):
    one = run(tmp_path / "1", lines("a", "b", {"prompt": "c", "n": 2}, "a"))
    array = b"\xef\xbb\xbf" + json.dumps(["b", "a", "a", {"n": 2, "prompt": "c"}], indent=1).encode()
    assert sorted(one, key=str) == sorted(run(tmp_path / "2", array), key=str)
    assert len({row["id"] for row in one}) == 4
    assert len({row["text"] for row in one if "text" in row}) == 3  # the second "a" draws for itself


def test_many_samples_are_asked_in_parts_that_draw_the_same_answers(tmp_path):
    text = lines({"id": "a", "prompt": "p", "n": 30}, {"id": "b", "prompt": "q"}, {"id": "c", "prompt": "bad", "n": 30})
    infer = infer_of(slots=4)
    split = run(tmp_path / "1", text, infer, ordered=True)
    assert split == run(tmp_path / "2", text, infer_of(slots=64), ordered=True)
    assert len({sample["text"] for sample in split[0]["samples"]}) == 30
    assert max(request.rows for request in infer.requests) <= 4
    assert split[2]["error"]["type"] == "bad_prompt"


def test_what_was_asked_for_is_written_and_timing_alone_says_what_was_cached(tmp_path):
    text = lines({"id": "a", "prompt": "p", "logprobs": 1, "metadata": {"label": 3}})
    (row,) = run(tmp_path / "1", text, token_ids=True, timing=True)
    assert row["metadata"] == {"label": 3}
    assert len(row["token_ids"]) == len(row["logprobs"]) == row["usage"]["completion_tokens"] == 4
    assert row["logprobs"][0]["likeliest"] == [{"token_id": row["token_ids"][0], "logprob": -1.5, "rank": 1}]
    assert set(row["timing"]) == {"first_token_s", "seconds", "total_s", "cached_tokens"}
    batch = lines({**BATCH, "body": {"prompt": "p"}})
    assert "cached" not in json.dumps([*run(tmp_path / "2", text), *run(tmp_path / "3", batch)])
    assert "cached_tokens" in json.dumps(run(tmp_path / "4", batch, timing=True))


def test_batch_requests_are_answered_in_their_own_form(tmp_path):
    chat = {"custom_id": "b", "url": "/v1/chat/completions", "body": {"messages": CHAT, "n": 2, "logprobs": True}}
    text = lines(
        {**BATCH, "body": {"model": "m", "prompt": "hello", "logprobs": 1}},
        {**BATCH, **chat},
        {**BATCH, "custom_id": "c", "body": {"prompt": "bad"}},
        {**BATCH, "custom_id": "d", "body": {}},
    )
    rows = {row["custom_id"]: row for row in run(tmp_path, text)}
    body = rows["a"]["response"]["body"]
    (choice,) = body["choices"]
    assert (rows["a"]["response"]["status_code"], rows["a"]["error"]) == (200, None)
    assert (body["object"], body["model"], body["usage"]["total_tokens"]) == ("text_completion", "m", 9)
    assert choice["text"].startswith("olleh")
    assert (choice["logprobs"]["token_logprobs"], choice["logprobs"]["text_offset"]) == ([-1.5] * 4, None)
    choices = rows["b"]["response"]["body"]["choices"]
    assert [(choice["index"], choice["message"]["role"]) for choice in choices] == [(0, "assistant"), (1, "assistant")]
    assert [rows[one]["response"]["status_code"] for one in "cd"] == [400, 400]
    assert rows["c"]["error"]["code"] == "bad_prompt"


def test_a_prompts_file_of_any_command_may_be_a_table_and_another_form_is_named(tmp_path):
    (tmp_path / "p.csv").write_text("id,prompt\n1,ab\n")
    assert [prompt.text for prompt in prompts_of(tmp_path / "p.csv", "--prompts")] == ["ab"]
    (tmp_path / "p").write_text("ab\ncd\n")
    with pytest.raises(UsageError, match=r"--prompts .*p is plain text") as refused:
        list(prompts_of(tmp_path / "p", "--prompts"))
    assert str(refused.value).endswith("> rows.jsonl\nand give that file.")
