"""`generate --prompt`: texts of the command line, answered as rows in a pipe and as growing text on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re

from run_generate import infer_of, rows_of, run_all, succeeded

from gpuinfer.api import Setup
from gpuinfer.generation import Completion, Generation
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.workloads.generate.workload import Generate


class Screen(io.StringIO):
    """Standard output that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown(infer: FakeInfer | None = None, **options) -> str:
    """What stands on the terminal in the end, without its colours."""
    with contextlib.redirect_stdout(Screen()) as screen:
        asyncio.run(run_all(Generate(Setup(), model="tiny", **options), infer or infer_of()))
    return re.sub("\x1b\\[\\d*m", "", screen.getvalue())


def test_on_a_terminal_each_text_is_followed_by_the_answer_that_a_pipe_gets(tmp_path, caplog):
    page = shown(prompt=["one", "two"], num_samples=2, max_new_tokens=4)
    heads = ["1 of 2: oneeno 0 ", "2 of 2: oneeno 1 ", "1 of 2: twoowt 0 ", "2 of 2: twoowt 1 "]
    assert [re.sub("\\d+ \\[cut off after 4 tokens; .*\\]\n?$", "", text) for text in page.split("\n\n")] == heads
    texts = ["one", "bad", "one"]
    pages = shown(prompt=texts, max_new_tokens=4).split("\n\n")
    assert pages[1] == "bad [no answer: the prompt is bad. Give a better one.]"
    assert "1 of 3 rows ended with an error" in caplog.text
    options = {"prompt": texts, "max_new_tokens": 4, "output": str(tmp_path / "out.jsonl")}
    asyncio.run(run_all(Generate(Setup(), model="tiny", **options), infer_of()))
    for prompt, row, page in zip(texts, rows_of(tmp_path), pages, strict=True):  # in the order of the prompts
        assert page.startswith(prompt + row.get("text", ""))


def test_a_model_cannot_command_the_terminal():
    text = "a\x1b]0;owned\x07b\x9b2Jc\r\nd\te"
    said = Completion(text=text, tokens=(1,), finish_reason="stop")
    infer = FakeInfer(lambda request: Generation(completions=(said,), prompt_tokens=1))
    assert shown(infer, prompt=["p"]) == "pa␛]0;owned␇b�2Jc\nd\te\n"


def test_in_a_pipe_answers_are_rows_in_the_order_of_their_prompts(tmp_path):
    done = succeeded("--prompt", "ab, c", "--prompt", "ä", cwd=tmp_path)
    assert done.stderr.count("\n") == 1  # no live view, no panel
    assert [json.loads(line)["text"].split(" 0 ")[0] for line in done.stdout.splitlines()] == ["c ,ba", "ä"]
