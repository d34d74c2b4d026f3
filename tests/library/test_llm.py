"""`gpuinfer.LLM`: the snippets of its docstring, the same answers as the command, and clear errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path
from typing import Literal

import forking
import numpy as np
import pydantic
import pytest
from adapters.random_adapters import peft_folder

import gpuinfer as library
from gpuinfer.api import ModelSpec
from gpuinfer.errors import BadPrompt, Closed, Expired, GpuinferError, PromptTooLong, RequestError, UsageError
from gpuinfer.library.text_prompts import AnswerArguments, AnswerKeywords
from gpuinfer.text.checkpoint import open_checkpoint, save_folder

pytestmark = pytest.mark.usefixtures("children_forked")
LIMIT_S = 60
CHAT = [{"role": "user", "content": "Hi"}]
PROMPTS = ["Once", "The sea was", "Once", "x" * 40]
SHORT = {"max_new_tokens": 6}


def until(condition):
    """Wait for something that another thread does."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def llm():
    with library.LLM("tiny", seed=7) as one:
        yield one


@pytest.fixture(scope="module")
def by_command(tmp_path_factory):
    """What `gpuinfer generate --seed 7` answers to `PROMPTS`: two texts each."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in PROMPTS))
    words = ["gpuinfer", "generate", "--model", "tiny", "--input", "in.jsonl", "--seed", "7", "--num-samples", "2"]
    more = ["--max-new-tokens", "6", "--ordered", "--no-roofline", "--quiet"]
    done = forking.run([*words, *more], folder, forking.own_environment(), LIMIT_S)
    assert done.returncode == 0, done.stderr
    return [[one["text"] for one in json.loads(line)["samples"]] for line in done.stdout.splitlines() if line[0] == "{"]


def test_answers_are_those_of_the_command_whichever_way_they_are_asked(llm, by_command, tmp_path):
    options = {"n": 2, **SHORT}
    assert [one.texts for one in llm.generate(PROMPTS, **options)] == by_command
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps({'prompt': one})}\n" for one in PROMPTS))
    (tmp_path / "in.txt").write_text("\n\n".join(PROMPTS))
    for given in (tmp_path / "in.jsonl", str(tmp_path / "in.jsonl"), tmp_path / "in.txt", iter(PROMPTS)):
        assert [one.texts for one in llm.generate(given, num_samples=2, **SHORT)] == by_command, given
    found = {one.index: one.texts for one in llm.generate(PROMPTS, ordered=False, **options)}
    assert [found[place] for place in range(len(PROMPTS))] == by_command
    assert llm.answer("Once", **SHORT).result().text == by_command[0][0]
    assert "".join(part.text for part in llm.stream("Once", **SHORT)) == by_command[0][0]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param("central", {}, id="central"),
        pytest.param("fleet", {"replicas": 1}, id="fleet", marks=pytest.mark.thorough),
    ],
)
def test_other_backends_answer_alike_and_a_seed_of_a_call_is_that_of_a_run(by_command, backend, options):
    with library.LLM("tiny", backend=backend, **options) as one:
        assert [answer.texts for answer in one.generate(PROMPTS, n=2, seed=7, **SHORT)] == by_command
        assert "".join(part.text for part in one.stream("Once", seed=7, **SHORT)) == by_command[0][0]
        assert one.score("Once", [" upon"])[0].logprob < 0
        assert one.stats()["errors"]["failed"] == 0
    assert one.report()["progress"]["done"] == len(PROMPTS) + 2


def test_a_seed_of_a_call_is_that_of_a_run_of_a_diffusion_model_too():
    hot = {"temperature": 2.0, "max_new_tokens": 16}  # else it is nearly sure of its answers
    with library.LLM("tiny-llada", seed=3) as run, library.LLM("tiny-llada") as call:
        texts = [one.text for one in run.generate(["Once"] * 3, **hot)]
        assert [one.text for one in call.generate(["Once"] * 3, seed=3, **hot)] == texts
        assert len(set(texts)) == 3


def test_a_seed_in_a_row_means_what_it_means_to_the_command(llm):
    """The answer of that seed, whatever the prompt is called."""
    rows = [{"prompt": "Once", "seed": 3, "id": "a"}, {"prompt": "Once", "seed": 3, "id": "b"}]
    assert len({one.text for one in llm.generate(rows, **SHORT)}) == 1
    assert len({one.text for one in llm.generate(rows, seed=5, **SHORT)}) == 1
    assert len({one.text for one in llm.generate(["Once"] * 2, seed=3, **SHORT)}) == 2


@pytest.mark.parametrize(
    ("given", "count"),
    [
        pytest.param("Once", 1, id="a text"),
        pytest.param([1, 2, 3], 1, id="token ids"),
        pytest.param(np.array([1, 2, 3]), 1, id="an array of token ids"),
        pytest.param(np.array([[1, 2], [3, 4]]), 2, id="rows of token ids"),
        pytest.param(CHAT, 1, id="a chat"),
        pytest.param([CHAT, "Once", (1, 2), {"prompt": "Once", "id": 9}], 4, id="a mix"),
        pytest.param([], 0, id="nothing"),
        pytest.param("", 1, id="an empty text"),
        pytest.param(["notes.txt"], 1, id="a text that is called like a file"),
    ],
)
def test_prompts_may_be(llm, given, count):
    answers = list(llm.generate(given, **SHORT))
    assert [one.index for one in answers] == list(range(count))
    assert all(len(one.tokens) <= 6 and one.finish_reason in ("length", "stop") for one in answers)


def test_an_answer_says_all_that_the_model_said(llm):
    [one] = llm.generate({"prompt": "Once", "id": 9, "metadata": {"a": 1}}, n=2, logprobs=1, **SHORT)
    assert (one.id, one.metadata, one.prompt.text, one.prompt_tokens, str(one)) == (9, {"a": 1}, "Once", 4, one.text)
    assert [sample.text for sample in one.samples] == one.texts
    assert len(one.logprobs) == len(one.tokens)
    assert repr(one) == f"TextAnswer(index=0, texts={one.texts!r}, finish_reason='length')"


def test_prompts_are_read_only_as_far_ahead_as_is_of_use_and_those_under_way_end_with_the_loop(llm):
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield f"prompt {read}"

    for one in llm.generate(endless(), max_new_tokens=50):
        assert one.index == 0
        break
    assert read <= 3 * llm.limits.slots + 1
    until(lambda: not llm.opened().tasks)


def test_a_slow_source_of_prompts_does_not_keep_answers_back(llm):
    first = threading.Event()

    def slow():
        yield "Once"
        until(lambda: llm.opened().done > before)
        yield "Once more"
        assert first.wait(LIMIT_S), "the first answer was kept until the source had ended"
        yield "At last"

    before = llm.opened().done
    for _ in llm.generate(slow(), **SHORT):
        first.set()
    assert llm.opened().done == before + 3


def test_a_source_of_prompts_that_blocks_does_not_stall_the_event_loop(llm):
    blocked, ticked = threading.Event(), threading.Event()

    def slow():
        yield "Once"
        blocked.set()
        assert ticked.wait(LIMIT_S), "the loop stood still while the source blocked"
        yield "Once more"
        raise LookupError("the source has failed")

    async def tick():
        await asyncio.to_thread(blocked.wait, LIMIT_S)
        ticked.set()

    async def read():
        ticking, found = asyncio.create_task(tick()), []
        with contextlib.suppress(LookupError):
            async for answer in llm.generate(slow(), **SHORT):
                found.append(answer.index)
            raise AssertionError("the source's error was not raised")
        await ticking
        return found

    assert asyncio.run(read()) in ([0], [0, 1], [])
    assert ticked.is_set()


def test_an_error_is_raised_in_its_place_or_returned(llm):
    prompts = ["Once", "x" * 5000, 5, "Once"]
    found = list(llm.generate(prompts, errors="return", **SHORT))
    assert [type(one) for one in found[1:3]] == [PromptTooLong, type(found[2])]
    assert isinstance(found[2], BadPrompt)
    assert [one.index for one in found] == [0, 1, 2, 3]
    answers = llm.generate(prompts, **SHORT)
    assert next(answers).index == 0
    with pytest.raises(PromptTooLong, match=r"^prompt 1: the prompt has 5000 tokens") as raised:
        next(answers)
    assert raised.value.index == 1
    assert list(answers) == [], "the error is the end"
    until(lambda: not llm.opened().tasks)


def test_a_model_that_is_asked_too_much_of_says_so_in_time(llm):
    with pytest.raises(Expired, match=r"no answer within 0\.02 s"):
        llm.answer("Once", timeout="20ms", max_new_tokens=2000, ignore_eos=True).result()
    until(lambda: not llm.opened().tasks)


def test_constraints_are_schemas_patterns_choices_and_grammars(llm, tmp_path):
    (tmp_path / "yes.lark").write_text('start: "yes"')
    cases = [
        {"regex": "[0-9]{3}"},
        {"regex": "none"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "yes" | "no"'},
        {"grammar": tmp_path / "yes.lark"},
        {"json_schema": {"const": 12}},
        {"json_schema": '{"const": 12}'},
        {"json_schema": pydantic.RootModel[Literal[12]]},
    ]
    texts = [next(llm.generate("Once", **one)).text for one in cases]
    assert [len(texts[0]), texts[0].isdigit()] == [3, True]
    assert texts[1] == "none"
    assert texts[4:] == ["yes", "12", "12", "12"]
    assert {*texts[2:4]} <= {"yes", "no"}


def test_it_cannot_be_sent_to_another_process(llm):
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        pickle.dumps(llm)


def test_the_keywords_are_the_options(llm):
    assert set(AnswerArguments.model_fields) == set(typing.get_type_hints(AnswerKeywords))


BAD_OPTIONS = [
    pytest.param({"temprature": 1}, "Did you mean 'temperature'", id="misspelled"),
    pytest.param({"max_tokens": 5}, "Did you mean 'max_new_tokens'", id="another program's word"),
    pytest.param({"temperature": -1}, "temperature=-1: -1 is less than 0. Give 0 or more.", id="out of range"),
    pytest.param({"n": 0}, "n=0: 0 is less than 1", id="no answers"),
    pytest.param({"n": 1, "num_samples": 2}, "n and num_samples are the same", id="twice"),
    pytest.param({"min_tokens": 9, "max_new_tokens": 5}, "min_tokens=9 is more than max_new_tokens=5", id="at odds"),
    pytest.param({"stop": ""}, "stop has an empty text", id="an empty stop"),
    pytest.param({"regex": "a", "grammar": "b"}, "each say what an answer must be", id="two forms"),
    pytest.param({"json_schema": "{"}, "json_schema is not JSON", id="no JSON"),
    pytest.param({"json_schema": 5}, "no schema that an answer can fit", id="no schema"),
    pytest.param({"grammar": 5}, "grammar=5 is no text", id="no grammar"),
    pytest.param({"adapter": 5}, "adapter=5 is no name", id="no adapter's name"),
    pytest.param({"errors": "ignore"}, "errors='ignore' is no way", id="errors"),
    pytest.param({"timeout": "soon"}, "timeout='soon' is no time", id="timeout"),
    pytest.param({"priority": "urgent"}, "priority='urgent' is no class", id="priority"),
]


@pytest.mark.parametrize(("options", "said"), BAD_OPTIONS)
def test_options_that_cannot_be_are_refused_in_words_of_python(llm, options, said):
    with pytest.raises((UsageError, RequestError)) as raised:
        llm.generate("Once", **options)
    assert said in str(raised.value)
    assert "--" not in str(raised.value)


BAD_PROMPTS = [
    pytest.param(lambda llm: llm.generate(5), "prompts=5 is nothing to answer. Give a text", id="a number"),
    pytest.param(lambda llm: llm.generate(None), "prompts=None is nothing to answer", id="nothing"),
    pytest.param(lambda llm: llm.generate("none.jsonl"), "there is no file none.jsonl", id="no file"),
    pytest.param(
        lambda llm: list(llm.generate(Path("none.jsonl"))), "none.jsonl: there is no such file", id="no such path"
    ),
    pytest.param(lambda llm: list(llm.generate(["a", ["b"]])), "prompt 1: Expected `int`", id="a list of texts in one"),
    pytest.param(lambda llm: list(llm.generate([[99999]])), "prompt 0: token 99999", id="a token that is none"),
    pytest.param(lambda llm: list(llm.generate(["\ud800"])), "prompt 0: the text has half", id="half a character"),
    pytest.param(lambda llm: list(llm.generate([object()])), "is no prompt. Give a text", id="an object"),
    pytest.param(lambda llm: list(llm.generate({"prompt": object()})), "a object is in it", id="an odd row"),
    pytest.param(lambda llm: list(llm.generate(CHAT[0])), "a message is no prompt", id="a message alone"),
    pytest.param(lambda llm: list(llm.generate({"prompt": "a", "sed": 1})), "Did you mean `seed`", id="an odd field"),
    pytest.param(lambda llm: list(llm.generate("a", adapter="other")), "the adapter 'other'", id="no such adapter"),
    pytest.param(lambda llm: llm.answer(["a", "b"]), "this asks one prompt", id="several for one"),
    pytest.param(lambda llm: llm.answer("x" * 5000).result(), "the prompt has 5000 tokens", id="one too long"),
    pytest.param(lambda llm: list(llm.stream("x" * 5000)), "the prompt has 5000 tokens", id="a stream too long"),
    pytest.param(lambda llm: llm.chat([]), "`messages` is empty", id="an empty chat"),
    pytest.param(lambda llm: llm.score(["a", "b"], ["c"]), "2 prompts and 1 continuations", id="unequal lists"),
    pytest.param(lambda llm: llm.score("a", ["b", ""]), "continuation 1: the continuation is empty", id="empty"),
    pytest.param(lambda llm: llm.score("", "a"), "nothing comes before the continuation", id="nothing before"),
    pytest.param(lambda llm: llm.score("a", [5]), "one is a text and one is token ids", id="a text and tokens"),
    pytest.param(lambda llm: llm.score(5, "a"), "5 cannot be scored", id="a number to score"),
    pytest.param(lambda llm: llm.score([1, 99999], [5]), "continuation 0: token 99999", id="a token to score"),
    pytest.param(lambda llm: llm.update(1, "/none"), "there are no weights at /none", id="no weights"),
]


@pytest.mark.parametrize(("ask", "said"), BAD_PROMPTS)
def test_what_cannot_be_asked_is_refused(llm, ask, said):
    with pytest.raises(GpuinferError) as raised:
        ask(llm)
    assert said in str(raised.value)


BAD_MODELS = [
    pytest.param({"model": "folder"}, "there is no model folder 'folder'", id="no folder"),
    pytest.param({"model": "owner/name"}, "To fetch it, add download=True.", id="a name of a hub"),
    pytest.param({}, "LLM needs a model", id="no model"),
    pytest.param({"model": object()}, "this is a object", id="an object"),
    pytest.param({"model": "tiny", "backend": "vlm"}, "Did you mean 'vllm'", id="no backend"),
    pytest.param({"model": "tiny", "backend": 5}, "backend=5 is no name", id="a number"),
    pytest.param({"model": "tiny", "strategy": "dynamc"}, "Did you mean 'dynamic'", id="no strategy"),
    pytest.param({"model": "tiny", "max_row": 5}, "Did you mean 'max_rows'", id="an option of the backend"),
    pytest.param({"model": "tiny", "determinstic": True}, "Did you mean 'deterministic'", id="an option of its own"),
    pytest.param({"model": "tiny", "max_model_len": 5}, "Did you mean 'context'", id="another program's word"),
    pytest.param({"model": "tiny", "pages": -1}, "pages=-1: -1 is less than", id="a value of the backend"),
    pytest.param({"model": "tiny", "context": 0}, "context=0: 0 is less than 1", id="a value of its own"),
    pytest.param({"model": "tiny", "seed": -1}, "seed=-1 is no seed", id="seed"),
    pytest.param({"model": "tiny", "batch_size": 0}, "batch_size=0 is no number", id="batch size"),
    pytest.param({"model": "tiny", "adapters": {"a": "/none"}}, "adapter a=/none", id="no adapter"),
    pytest.param({"model": "tiny", "trust_remote_code": True}, "trust_remote_code", id="remote code"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD_MODELS)
def test_a_model_that_cannot_be_is_refused_when_it_is_made(arguments, said):
    with pytest.raises(GpuinferError) as raised:
        library.LLM(**arguments)
    assert said in str(raised.value)


def test_errors_of_a_start_are_in_words_of_python_too():
    with pytest.raises(UsageError, match=r"cannot reach http://127\.0\.0\.1:1 .*\n.* correct endpoint\.$"):
        library.LLM("tiny", backend="fleet", endpoint="http://127.0.0.1:1", retry=0).start()


@pytest.mark.parametrize("options", [{"devices": "tpu"}, {"dtype": "int8"}, {"devices": "cuda:77"}])
def test_a_start_that_fails_may_be_tried_again(options):
    one = library.LLM("tiny", **options)
    for _ in range(2):
        with pytest.raises(UsageError):
            one.start()
    assert one.stats()["errors"]["failed"] == 0
    one.close()


def test_coroutines_ask_hundreds_at_once_on_any_loop(llm, by_command):
    async def ask():
        many = [llm.answer(f"prompt {number}", max_new_tokens=2) for number in range(150)]
        assert len(await asyncio.gather(*many)) == 150
        texts = [one.texts async for one in llm.generate(PROMPTS, n=2, **SHORT)]
        parts = [part.text async for part in llm.stream("Once", **SHORT)]
        return texts, "".join(parts), llm.chat("Hi", **SHORT).index  # which blocks, as in a notebook

    for run in (asyncio.run, asyncio.run, pytest.importorskip("uvloop").run):
        assert run(ask()) == (by_command, by_command[0][0], 0)


def test_a_coroutine_that_is_cancelled_frees_what_it_held(llm):
    async def ask():
        stream = llm.stream("Once", max_new_tokens=2000, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.answer("Once", max_new_tokens=2000, ignore_eos=True), 0.02)

    asyncio.run(ask())
    until(lambda: not llm.opened().tasks)


def test_a_program_of_coroutines():
    async def program():
        async with library.LLM("tiny") as one:
            assert one.is_open
            answers = [answer.text async for answer in one.generate(["Once", "The sea"], **SHORT)]
            assert (await one.answer("Once", **SHORT)).text == answers[0]
        return one

    assert repr(asyncio.run(program())) == "<gpuinfer.LLM tiny on inprocess, closed>"


def test_it_opens_with_the_first_answer_that_is_read():
    one = library.LLM("tiny")
    assert not one.is_open

    async def read():
        return [answer.index async for answer in one.generate(["Once"], **SHORT)]

    assert asyncio.run(read()) == [0]
    assert one.is_open
    one.close()
    one.close()


def test_threads_share_batches(llm):
    found = []

    def ask(thread):
        found.append([one.text for one in llm.generate([f"{thread} {number}" for number in range(8)], **SHORT)])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(LIMIT_S)
    assert len(found) == 6


def test_closing_waits_for_what_was_asked_and_takes_no_more():
    with library.LLM("tiny") as one:
        pending = [one.answer(f"prompt {number}", max_new_tokens=10) for number in range(100)]
        reading = one.generate((f"prompt {number}" for number in range(1000)), max_new_tokens=20)
        next(reading)
    assert all(answer.done() for answer in pending)
    assert len({answer.result().text for answer in pending}) > 50
    for ask in (lambda: list(reading), lambda: one.answer("Once"), lambda: one.generate("Once"), one.start):
        with pytest.raises(Closed, match=r"this LLM is closed\. Make another one"):
            ask()
    assert one.verdict().why
    assert one.report()["status"] == "done"


def test_closing_in_haste_cancels_what_was_asked():
    one = library.LLM("tiny")
    pending = [one.answer(f"prompt {number}", max_new_tokens=2000, ignore_eos=True) for number in range(5)]
    one.close(drain=False)
    for answer in pending:
        with pytest.raises(Closed):
            answer.result(LIMIT_S)


def test_a_prompt_with_more_samples_than_slots_and_a_short_queue_are_waited_for():
    with library.LLM("tiny", batch_size=2, max_queue_rows=2, seed=7) as one:
        assert one.limits.slots == 2
        [answer] = one.generate("Once", n=5, **SHORT)
        assert len(set(answer.texts)) == 5
        assert len(list(one.generate([f"prompt {number}" for number in range(20)], **SHORT))) == 20
        assert sorted({part.sample for part in one.stream("Once", n=5, **SHORT)}) == [0, 1, 2, 3, 4]


def test_the_first_adapter_is_used_where_none_is_named(tmp_path):
    shape = open_checkpoint(ModelSpec("tiny", kind="text")).shape
    folders = {name: peft_folder(tmp_path / name, shape, seed=seed) for name, seed in (("one", 1), ("two", 2))}
    ask = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with library.LLM("tiny", adapters=folders) as llm:
        assert {"one", "two"} <= set(llm.adapters)
        plain, one, two = (next(llm.generate("The tide", adapter=name, **ask)).text for name in ("", "one", "two"))
        assert next(llm.generate("The tide", **ask)).text == one
        assert len({plain, one, two}) == 3
        base = llm.score("The tide", " turns", adapter="")[0].logprob
        assert base != llm.score("The tide", " turns")[0].logprob


def test_scores_are_the_log_probabilities_of_the_tokens(llm):
    [greedy] = llm.generate("Once", temperature=0, logprobs=0, ignore_eos=True, **SHORT)
    tokens = [ord(one) for one in "Once"]  # of the model's tokenizer
    [score] = llm.score([tokens], [greedy.tokens])
    assert score.greedy
    assert score.tokens == greedy.tokens
    assert score.logprobs == pytest.approx([one.chosen.logprob for one in greedy.logprobs], abs=1e-4)
    assert score.logprob == pytest.approx(sum(score.logprobs))
    alone, other = llm.score("Once", [" upon", " never"])
    assert [alone.logprob, other.logprob] == pytest.approx(
        [one.logprob for one in llm.score(["Once", "Once"], [" upon", " never"])]
    )


def test_weights_are_changed_under_way(llm, tmp_path):
    save_folder(open_checkpoint(ModelSpec("tiny", kind="text")), tmp_path / "same")
    with library.LLM("tiny") as one:
        before = next(one.generate("Once", **SHORT))
        one.update("v2", tmp_path / "same")
        after = next(one.generate("Once", **SHORT))
        assert (before.version, after.version, after.text) == ("", "v2", before.text)
        save_folder(open_checkpoint(ModelSpec("tiny-llada", kind="text")), tmp_path / "other")
        with pytest.raises(UsageError, match="of another model"):
            one.update("v3", tmp_path / "other")
        assert next(one.generate("Once", **SHORT)).version == "v2"


def test_its_figures_are_those_of_what_it_has_done(capfd):
    with library.LLM("tiny") as one:
        with one.live():
            assert len(list(one.generate([f"prompt {number}" for number in range(20)], progress=True, **SHORT))) == 20
        report = one.report()
        assert (report["workload"], report["progress"]["done"]) == ("generate", 20)
        assert "of 64 slots" in str(one.verdict())
        assert one.stats()["throughput"]["output_tokens_per_s"] > 0
    assert "20/20" in capfd.readouterr().err


FORKED = (
    "this LLM was opened before this process was forked, and its threads did not come along. Make another one here; or "
    'start processes with multiprocessing.get_context("spawn").'
)
PROGRAMS = {
    "a program that ends while answers are under way": (
        """
        import gpuinfer
        if __name__ == "__main__":
            llm = gpuinfer.LLM("tiny", backend=BACKEND, patience=600)
            answers = llm.generate((f"p {number}" for number in range(100_000)), max_new_tokens=500)
            print(len(next(answers).texts), llm.answer("Once", max_new_tokens=2000).done())
        """,
        "1 False",
        "",
    ),
    "a fork of one that is open": (
        """
        import multiprocessing, gpuinfer

        def child(line):
            for ask in (lambda: list(llm.generate("Once")), lambda: next(answers), pending.result, llm.stats):
                try:
                    line.send(type(ask()).__name__)
                except Exception as error:
                    line.send(str(error))

        if __name__ == "__main__":
            with gpuinfer.LLM("tiny", backend=BACKEND, patience=600) as llm:
                answers = llm.generate(["Once"] * 9, max_new_tokens=500, ignore_eos=True)
                next(answers)
                pending = llm.answer("Once", max_new_tokens=2000, ignore_eos=True)
                fork = multiprocessing.get_context("fork")
                ours, theirs = fork.Pipe()
                process = fork.Process(target=child, args=(theirs,))
                process.start()
                print(*[ours.recv() for _ in range(4)], sep="\\n")
                process.join()
                print(len(list(answers)), pending.cancel())
        """,
        "\n".join([FORKED, FORKED, FORKED, "dict", "8 True"]),
        "",
    ),
    "a fork of one that is not open yet": (
        """
        import os, gpuinfer

        if __name__ == "__main__":
            llm = gpuinfer.LLM("tiny", backend=BACKEND, patience=600)
            child = os.fork()
            print(len(list(llm.generate(["Once", "The sea"], max_new_tokens=2))), flush=True)
            if child:
                print(os.waitpid(child, 0)[1])
        """,
        "2\n2\n0",
        "",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["inprocess", "central"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_whole_programs(name, backend, tmp_path):
    program, out, err = PROGRAMS[name]
    done = python(program.replace("BACKEND", repr(backend)), tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, out), done.stderr
    assert done.stderr == err


def python(program, folder):
    import textwrap

    (folder / "program.py").write_text(textwrap.dedent(program))
    words = [sys.executable, "program.py"]
    return subprocess.run(
        words,
        cwd=folder,
        env=forking.own_environment(),
        capture_output=True,
        text=True,
        timeout=4 * LIMIT_S,
        check=False,
    )


@pytest.mark.thorough
def test_a_program_that_asks_whenever_it_is_imported_is_told_how_to_be_written(tmp_path):
    program = """
    import gpuinfer
    print(list(gpuinfer.LLM("tiny", backend="central").generate("Once", max_new_tokens=2)))
    """
    done = python(program, tmp_path)
    assert done.returncode == 1
    assert "Put what starts it below `if __name__ == '__main__':`." in done.stderr.splitlines()[-1]


def test_a_time_limit_of_each_prompt_may_be_given():
    with library.LLM("tiny") as llm:
        assert [one.text for one in llm.generate(["a", "b"], timeout="60s", max_new_tokens=2)]
        assert list(llm.stream("a", timeout=60, max_new_tokens=2))
        assert llm.answer("a", timeout="60s", max_new_tokens=2).result(60).text


def test_a_second_reader_is_refused_and_the_first_goes_on():
    with library.LLM("tiny") as llm:
        answers, found, refused = llm.generate(["a"] * 30, max_new_tokens=8), [], []

        def read():
            try:
                found.extend(answers)
            except UsageError as error:
                refused.append(error)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(120)
    assert len(found) == 30
    assert len(refused) <= 1
