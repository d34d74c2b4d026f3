"""A server of a diffusion model, as clients see it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai
import psutil
import pytest
from replica_servers import SECONDS, Server, serving, until

WORDS = ("--model", "tiny-llada", "-B", "threads=1", "--block-length", "4")
ASKED = {"prompt": "The sea was", "max_tokens": 16, "seed": 5, "temperature": 0.7}


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(*WORDS, folder=tmp_path_factory.mktemp("llada")) as server:
        yield server


def test_the_family_is_told_and_a_request_goes_over_the_flags(llada):
    def said(**more: object) -> str:
        return llada.ask("/v1/completions", {**ASKED, **more}).json["choices"][0]["text"]

    (model,) = llada.ask("/v1/models").json["data"]
    assert (model["family"], model["diffusion"]) == ("llada", True)
    assert said() == said(block_length=4, decoder="low-confidence")
    assert said(block_length=16) != said()
    chat = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    usage = llada.ask("/v1/chat/completions", chat).json["usage"]
    assert usage["completion_tokens"] == 128, "no canvas of the whole context"


def test_a_stream_sends_what_is_committed_from_the_left_and_no_more(llada):
    with openai.OpenAI(base_url=f"{llada.url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client:
        asked = {**ASKED, "model": "tiny-llada", "n": 2, "logprobs": 1}
        whole = client.completions.create(**asked)
        texts, told, chunks = ["", ""], [0, 0], 0
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                told[choice.index] += len(choice.logprobs.token_logprobs) if choice.logprobs else 0
                chunks += bool(choice.text)
    assert texts == [choice.text for choice in whole.choices]
    assert told == [len(choice.logprobs.token_logprobs) for choice in whole.choices]
    assert chunks >= 4  # at least one a block, of those that lie within


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"decoder": "treshold"}, "Did you mean 'threshold'?"),
        ({"threshold": 1.5}, "<= 1.0"),
        ({"decoder": "threshold", "decoder_options": {"foo": 1}}, "has no option 'foo'"),
        ({"response_format": {"type": "json_object"}}, "fills its answer in in any order"),
        ({"cache": "exact"}, "Choose from none, prefix, dual, vicinity."),
    ],
)
def test_what_cannot_be_is_refused_with_its_cure(llada, more, why):
    answer = llada.ask("/v1/completions", {**ASKED, **more})
    assert answer.status == 400
    assert why in answer.error["message"]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny", "tiny-llada"])
def test_a_stream_goes_on_exactly_when_its_replica_is_killed(model, tmp_path):
    asked = {**ASKED, "model": model, "max_tokens": 300, "n": 2, "logprobs": 1, "extra_body": {"ignore_eos": True}}
    words = ("--model", model, "-B", "threads=1", *(() if model == "tiny" else ("--block-length", "4")))
    with serving(*words, "--replicas", "2", folder=tmp_path) as server:
        try:
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client:
                whole = client.completions.create(**asked)
                texts, told, killed = ["", ""], [[], []], False
                for count, chunk in enumerate(client.completions.create(**asked, stream=True)):
                    for choice in chunk.choices:
                        texts[choice.index] += choice.text
                        told[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
                    if count == 8:
                        busiest(server).kill()
                        killed = True
            assert killed
            assert texts == [choice.text for choice in whole.choices]
            assert told == [choice.logprobs.token_logprobs for choice in whole.choices]
            until(lambda: "died (SIGKILL)" in server.log, lambda: server.log)
        finally:
            server.end()


def busiest(server: Server) -> psutil.Process:
    """The replica that has computed most since it was looked at first."""
    replicas = [one for one in psutil.Process(server.process.pid).children(recursive=True) if is_replica(one)]
    assert len(replicas) == 2
    before = {one: sum(one.cpu_times()[:2]) for one in replicas}
    since = lambda one: sum(one.cpu_times()[:2]) - before[one]  # noqa: E731
    until(lambda: any(since(one) > 0 for one in replicas))
    return max(replicas, key=since)


def is_replica(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "--behind-router" in process.cmdline()
    return False
