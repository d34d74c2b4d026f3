"""A list between tags in a row of `generate`, in a request to a server, and in vLLM's `extra_args`."""

import json

import msgspec
import pytest
from listing import is_legal

from gpuinfer.backends.vllm_engine.list_constraints import KEY, extra_args, listed_in
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Listed, Prompt
from gpuinfer.serving.openai.requests import PromptDefaults, RequestReader

WHOLE = {"items": [["PAR", "A PAR H"], ["PAR", "A PAR - BUR"], ["BRE", "F BRE - MAO"]], "begin": "", "separator": "\n"}


def reading(**more: object) -> Prompt:
    body = json.dumps({"model": "m", "prompt": "p", **more}).encode()
    return RequestReader(PromptDefaults()).read(body, "/v1/completions").prompt


def test_a_request_names_items_and_tags():
    asked = reading(structured_outputs={"listed": {"items": ["a", ["u", "b"]], "begin": "[", "ends": False}})
    listed = Listed(items=(("a", "a"), ("u", "b")), begin="[", ends=False)
    assert asked.sampling.constraint == Constraint(listed=listed)


@pytest.mark.parametrize("given", [{}, {"items": []}, {"items": [["a"]]}, {"items": ["a"], "starts": True}])
def test_what_is_no_list_is_an_error(given):
    with pytest.raises(BadPrompt, match=r"listed|items|starts"):
        reading(structured_outputs={"listed": given})


def test_answers_of_generate_are_lists(tmp_path, gpuinfer):
    rows = [
        {"id": f"r{n}", "prompt": f"say {n}", "n": 2, "max_tokens": 80, "temperature": float(n % 2),
         "structured_outputs": {"listed": WHOLE}}
        for n in range(6)
    ]  # fmt: skip
    rows.append({"id": "bad", "prompt": "x", "structured_outputs": {"listed": {"items": ["a\nb"]}}})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--no-roofline", "--model", "tiny", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    gpuinfer("generate", *map(str, words), "--batch-size", "3")
    found = {row["id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert "holds its separator" in json.dumps(found.pop("bad"))
    listed, texts = Listed(items=tuple(map(tuple, WHOLE["items"]))), set()
    for row in found.values():
        for one in row["samples"]:
            assert is_legal("<orders>" + one["text"], listed)
            assert one["finish_reason"] == "stop"
            texts.add(one["text"])
    assert len(found) == 6
    assert len(texts) > 1


def test_a_list_comes_back_from_extra_args_in_json_and_msgpack():
    listed = Listed(items=(("PAR", "A PAR H"), ("BRE", "F BRE - MAO")), begin="[", end="]", separator=", ", ends=False)
    assert listed_in(extra_args(listed)) == listed
    for form in (msgspec.json, msgspec.msgpack):
        assert listed_in(form.decode(form.encode(extra_args(listed)))) == listed
    assert listed_in(None) is listed_in({}) is listed_in({"other": 1}) is None


@pytest.mark.parametrize("given", [3, {"items": "x"}, {"items": [["a", "b", "c"]]}, {}])
def test_malformed_extra_args_are_refused(given):
    with pytest.raises(BadPrompt, match="no list between tags"):
        listed_in({KEY: given})
