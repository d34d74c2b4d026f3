"""What a row may be, what becomes of it, and that one bad row is no other's concern."""

from __future__ import annotations

import json

import msgspec
import pytest
from asking import infer_of, lines, run

from gpuinfer.errors import UsageError
from gpuinfer.generation import Constraint, Rendering, Sampling
from gpuinfer.serving.openai.prompt_rows import PromptRowReader, prompts_of
from gpuinfer.serving.openai.requests import PromptDefaults
from gpuinfer.workloads.generate.answer_lines import LineWriter

BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
CHAT = [{"role": "user", "content": "hi"}]


def asked(row, **defaults):
    return PromptRowReader(PromptDefaults(**defaults)).read(
        (1, row if isinstance(row, bytes) else json.dumps(row).encode())
    )


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [
        ("hello", "text", "hello"),
        ({"prompt": "hello"}, "text", "hello"),
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


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        ({}, {}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 6}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0, "top_k": -1, "top_p": 0.5}, {"temperature": 0.0, "top_k": 0, "top_p": 0.5}),
        ({"temperature": None, "n": None}, {}),
        ({"stream": False, "echo": False, "suffix": "", "tools": []}, {}),
        ({"tool_choice": "auto", "modalities": ["text"], "verbosity": "medium", "best_of": 1, "bad_words": []}, {}),
        ({"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}, {}),
        ({"service_tier": "flex", "store": True, "stream_options": {}, "parallel_tool_calls": False}, {}),
        ({"prediction": {"type": "content", "content": "x"}, "priority": 3, "request_id": "r"}, {}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"], "stop_token_ids": [3]}, {"stop": ("x", "y"), "stop_token_ids": (3,)}),
        ({"seed": 4, "ignore_eos": True}, {"seed": 4, "ignore_eos": True}),
        ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100.0}}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": 2}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"response_format": {"type": "json_object"}}, {"constraint": Constraint(json_schema={"type": "object"})}),
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
    assert found.error is None
    expected = {name: getattr(defaults, name) for name in Sampling.__struct_fields__} | changed
    expected["spelled"] = form == "batch" and expected["logprobs"] is not None  # as OpenAI's form has it
    assert {name: getattr(found.prompt.sampling, name) for name in Sampling.__struct_fields__} == expected


@pytest.mark.parametrize(
    ("row", "why"),
    [
        pytest.param(b"nope", "not JSON", id="words"),
        pytest.param(b'{"prompt": "a"', "not JSON", id="cut short"),
        pytest.param(b'{"prompt": NaN}', "not JSON", id="NaN"),
        pytest.param(b'{"prompt": "\xff"}', "not UTF-8", id="not UTF-8"),
        pytest.param(b'{"metadata": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, "nested too deeply", id="deep"),
        pytest.param(b"5", "Expected", id="a number"),
        pytest.param(b"[]", "Expected", id="a list"),
        pytest.param({}, "has none", id="no prompt"),
        pytest.param({"text": "a"}, "Rename it to `prompt`", id="a text"),
        pytest.param({"id": 3, "label": 1, "input": "a"}, "has `input` where `prompt` is read", id="an input"),
        pytest.param({"prompt": "a", "text": "b"}, "there is no field `text`", id="a prompt and a text"),
        pytest.param({"conversations": []}, "Rename it to `messages`", id="a conversation"),
        pytest.param({"prompt": "a", "messages": CHAT}, "has 2", id="two prompts"),
        pytest.param({"prompt": 5}, "Expected", id="a number for a prompt"),
        pytest.param({"prompt": ["a", "b"]}, "row of its own", id="several prompts"),
        pytest.param({"prompt": [-1]}, "token ids", id="a negative token"),
        pytest.param({"messages": []}, "is empty", id="an empty chat"),
        pytest.param({"messages": [{"content": "a"}]}, "has no role", id="nobody's message"),
        pytest.param({"prompt": "a", "max_token": 5}, "Did you mean `max_tokens`?", id="a field that is not known"),
        pytest.param({"prompt": "a", "max_tokens": "5"}, "max_tokens", id="a length in words"),
        pytest.param({"prompt": "a", "max_tokens": 0}, ">= 1", id="no length"),
        pytest.param({"prompt": "a", "temperature": -1}, ">= 0", id="cold"),
        pytest.param({"prompt": "a", "top_p": 1.5}, "<= 1", id="more than all"),
        pytest.param({"prompt": "a", "n": 10**9}, "<= 4096", id="a great many"),
        pytest.param({"prompt": "a", "response_format": {"type": "json_schema"}}, "gives none", id="no schema"),
        pytest.param({"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, "more than one", id="two forms"),
        pytest.param({"prompt": "a", "guided_json": "{"}, "schema is none", id="a schema that is no JSON"),
        pytest.param({"prompt": "a", "guided_json": False}, "no answer fits", id="a schema that is false"),
        pytest.param({"prompt": "a", "guided_json": "false"}, "no answer fits", id="a schema that says false"),
        pytest.param(
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "no answer fits",
            id="a format that is false",
        ),
        *(
            pytest.param({"prompt": "a", name: value}, f"`{name}` is not to be had here", id=f"{name} in a row")
            for name, value in (
                ("stream", True),
                ("echo", True),
                ("suffix", "z"),
                ("tool_choice", "required"),
                ("best_of", 5),
            )
        ),
        pytest.param({"prompt": "a", "tools": [{}]}, "`tools` is said of a chat", id="tools without a chat"),
        pytest.param({"prompt": "a", "add_generation_prompt": False}, "said of a chat", id="an end without a chat"),
        pytest.param({"messages": CHAT, "tools": ["f"]}, "Expected `object`", id="a tool that is a word"),
        pytest.param(
            {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True}, "one of", id="two ends"
        ),
        pytest.param({"messages": CHAT, "prompt_cach_key": "a"}, "Did you mean `prompt_cache_key`?", id="misspelt"),
        pytest.param(b"\xff\xfe" + '{"prompt": "a"}'.encode("utf-16-le"), "as UTF-8", id="UTF-16"),
        pytest.param('{"prompt": "a"}'.encode("utf-16-be"), "as UTF-8", id="UTF-16 without a mark"),
        pytest.param(rb'{"prompt": "a", "metadata": {"b": "\ud800"}}', "half of a character", id="half a character"),
        pytest.param(rb'{"prompt": "a", "metadata": {"b": "\udc00"}}', "half of a character", id="its other half"),
        pytest.param({"prompt": "a", "stop": [""]}, "empty text", id="an empty stop"),
        pytest.param({**BATCH, "body": {"prompt": "a", "stream": True}}, "`stream`", id="a stream"),
        pytest.param({**BATCH, "body": {"messages": CHAT}}, "has no `prompt`", id="a chat at the wrong url"),
        pytest.param({**BATCH, "url": "/v1/embeddings", "body": {}}, "/v1/completions", id="embeddings"),
        pytest.param({**BATCH, "method": "GET", "body": {}}, "Write POST", id="GET"),
        pytest.param(BATCH, "no body", id="no body"),
        pytest.param({**BATCH, "body": {"prompt": "a"}, "adapter": "b"}, "names no adapter", id="an adapter beside it"),
        pytest.param({**BATCH, "body": {"promt": "a"}}, "Did you mean `prompt`?", id="a body that is not known"),
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
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)
@pytest.mark.parametrize("form", ["row", "batch"])
def test_a_chat_may_say_how_it_is_written_out(row, changed, form):
    whole = {"messages": CHAT, **row}
    batch = {**BATCH, "url": "/v1/chat/completions", "body": whole}
    defaults = Rendering(variables={"a": 1, "b": 1})
    found = asked(whole if form == "row" else batch, rendering=defaults)
    assert found.error is None
    assert found.prompt.rendering == msgspec.structs.replace(defaults, **changed)
    plain = asked({"messages": CHAT} if form == "row" else {**batch, "body": {"messages": CHAT}}, rendering=defaults)
    assert (found.content == plain.content) == (not changed)


def test_bad_rows_are_error_rows_and_the_others_are_answered(tmp_path):
    text = lines(b"nope", b"", {"id": "x", "prompt": 5}, {"id": "y", "prompt": "bad"}, {"id": 7, "prompt": "good"})
    rows = {row["id"]: row for row in run(tmp_path, text)}
    assert rows[7]["text"].startswith("doog")
    assert rows["x"]["error"] == {
        "type": "bad_row",
        "message": "Expected `str | array | null`, got `int` - at `$.prompt`. Correct it.",
        "row": 2,
        "line": 3,
    }
    assert rows["y"]["error"]["type"] == "bad_prompt"
    assert len(rows) == 4


def test_numbers_beyond_64_bits_come_back_as_they_were(tmp_path):
    huge = 10**30
    first, second = run(tmp_path, lines({"id": huge, "prompt": "a", "metadata": {"n": huge}}, "other"), ordered=True)
    assert (first["id"], first["metadata"]) == (huge, {"n": huge})
    assert second["text"]


def test_an_answer_that_cannot_be_written_is_its_rows_trouble_alone(tmp_path, monkeypatch):
    answer = LineWriter.answer

    def choosy(self, job, *more):
        if job.id == "odd":
            raise OverflowError("too big")
        return answer(self, job, *more)

    monkeypatch.setattr(LineWriter, "answer", choosy)
    first, second = run(tmp_path, lines({"id": "odd", "prompt": "a"}, "other"), ordered=True)
    assert "too big" in first["error"]["message"]
    assert second["text"]


def test_a_long_row_is_an_error_and_no_other_is(tmp_path, monkeypatch):
    from gpuinfer.serving.openai.row_splitter import RowSplitter
    from gpuinfer.workloads.generate import pump

    monkeypatch.setattr(pump, "RowSplitter", lambda: RowSplitter(1000))
    rows = run(tmp_path, lines("x" * 2000, "short"))
    assert ["error" in row for row in rows] == [True, False]


@pytest.mark.parametrize("ids", [("a", "a", "b"), (1, "1", 2)])
def test_an_id_that_came_before_is_an_error(tmp_path, ids):
    rows = run(tmp_path, lines(*({"id": one, "prompt": f"p{number}"} for number, one in enumerate(ids))), ordered=True)
    assert ["error" in row for row in rows] == [False, True, False]
    assert "has come before" in rows[1]["error"]["message"]


def test_ids_come_from_what_a_row_says_and_not_from_where_it_stands(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    one = run(first, lines("a", "b", {"prompt": "c", "n": 2}, "a"))
    other = run(second, b"\xef\xbb\xbf" + json.dumps(["b", "a", "a", {"n": 2, "prompt": "c"}], indent=1).encode())
    assert sorted(one, key=str) == sorted(other, key=str)
    assert len({row["id"] for row in one}) == 4
    assert len({row["text"] for row in one if "text" in row}) == 3  # the second "a" draws for itself


def test_many_samples_are_asked_in_parts_that_draw_the_same_answers(tmp_path):
    wide, narrow = tmp_path / "1", tmp_path / "2"
    wide.mkdir()
    narrow.mkdir()
    text = lines({"id": "a", "prompt": "p", "n": 30}, {"id": "b", "prompt": "q"}, {"id": "c", "prompt": "bad", "n": 30})
    infer = infer_of(slots=4)
    split = run(narrow, text, infer, ordered=True)
    assert split == run(wide, text, infer_of(slots=64), ordered=True)
    assert len(split[0]["samples"]) == 30
    assert len({sample["text"] for sample in split[0]["samples"]}) == 30
    assert max(request.rows for request in infer.requests) <= 4
    assert split[2]["error"]["type"] == "bad_prompt"


def test_what_was_asked_for_is_written(tmp_path):
    text = lines({"id": "a", "prompt": "p", "logprobs": 1, "metadata": {"label": 3}})
    (row,) = run(tmp_path, text, token_ids=True, timing=True)
    assert row["metadata"] == {"label": 3}
    assert len(row["token_ids"]) == len(row["logprobs"]) == row["usage"]["completion_tokens"] == 4
    assert row["logprobs"][0]["likeliest"] == [{"token_id": row["token_ids"][0], "logprob": -1.5, "rank": 1}]
    assert set(row["timing"]) == {"first_token_s", "seconds", "total_s", "cached_tokens"}


def test_batch_requests_are_answered_in_their_own_form(tmp_path):
    text = lines(
        {**BATCH, "body": {"model": "m", "prompt": "hello", "logprobs": 1}},
        {
            **BATCH,
            "custom_id": "b",
            "url": "/v1/chat/completions",
            "body": {"messages": CHAT, "n": 2, "logprobs": True},
        },
        {**BATCH, "custom_id": "c", "body": {"prompt": "bad"}},
        {**BATCH, "custom_id": "d", "body": {}},
    )
    rows = {row["custom_id"]: row for row in run(tmp_path, text)}
    body = rows["a"]["response"]["body"]
    assert (rows["a"]["response"]["status_code"], rows["a"]["error"]) == (200, None)
    assert (body["object"], body["model"]) == ("text_completion", "m")
    assert body["choices"][0]["text"].startswith("olleh")
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-1.5] * 4
    assert body["choices"][0]["logprobs"]["text_offset"] is None
    assert body["usage"]["total_tokens"] == 9
    chat = rows["b"]["response"]["body"]
    assert [choice["index"] for choice in chat["choices"]] == [0, 1]
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert [rows[one]["response"]["status_code"] for one in "cd"] == [400, 400]
    assert rows["c"]["error"]["code"] == "bad_prompt"


@pytest.mark.parametrize("row", [{"prompt": "p"}, {**BATCH, "body": {"prompt": "p"}}], ids=["row", "batch"])
def test_what_depends_on_who_came_first_is_written_with_timing_only(tmp_path, row):
    assert "cached" not in json.dumps(run(tmp_path, lines(row)))
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl.run.json").unlink()
    assert "cached_tokens" in json.dumps(run(tmp_path, lines(row), timing=True))


def test_a_table_in_the_place_of_a_prompts_file_of_any_command_is_named(tmp_path):
    (tmp_path / "p.csv").write_text("id,prompt\n1,ab\n")
    with pytest.raises(UsageError, match=r"--prompts .*p.csv is a table with the columns id, prompt") as refused:
        list(prompts_of(tmp_path / "p.csv", "--prompts"))
    assert str(refused.value).endswith("> rows.jsonl\nand give --prompts rows.jsonl.")
