"""A server of a diffusion model, as clients see it; and who is refused before it starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import openai
import psutil
import pytest
from replica_servers import SECONDS, Server, serving, until

from gpuinfer.errors import UsageError
from gpuinfer.generation import Unmasking
from gpuinfer.serving.serve_options import ServeOptions, default_unmasking, served_spec

WORDS = ("--model", "tiny-llada", "-B", "threads=1", "--block-length", "4")
ASKED = {"prompt": "The sea was", "max_tokens": 16, "seed": 5, "temperature": 0.7}


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(*WORDS, folder=tmp_path_factory.mktemp("llada")) as server:
        yield server


def text_of(server: Server, **more: object) -> str:
    return server.ask("/v1/completions", {**ASKED, **more}).json["choices"][0]["text"]


def usual(**flags: object) -> Unmasking | None:
    own = ServeOptions(**flags)
    return default_unmasking(own, served_spec(own))


def test_a_model_without_masks_is_not_started_with_words_on_them():
    assert usual(model="tiny") is None
    with pytest.raises(UsageError, match="`threshold` says how a diffusion model fills its masks in"):
        usual(model="tiny", threshold=0.9)
    with pytest.raises(UsageError, match=r"-D is said of a diffusion model, and blobnet takes rows\. Leave it out"):
        usual(model="blobnet", decoder_options={"low": 0.4})
    with pytest.raises(UsageError, match=r"--mask-token-id is said of a diffusion model"):
        usual(model="blobnet", mask_token_id=3)


def test_a_server_is_not_started_with_what_no_request_could_use():
    with pytest.raises(UsageError, match="Did you mean 'threshold'"):
        usual(model="tiny-llada", decoder="treshold")
    with pytest.raises(UsageError, match="'low-confidence' has no threshold"):
        usual(model="tiny-llada", threshold=0.9)


def test_the_family_is_told(llada):
    (model,) = llada.ask("/v1/models").json["data"]
    assert (model["family"], model["diffusion"]) == ("llada", True)


def test_a_request_goes_over_the_flags(llada):
    assert text_of(llada) == text_of(llada, block_length=4, decoder="low-confidence")
    assert text_of(llada, block_length=16) != text_of(llada)


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


def test_a_chat_that_says_no_number_is_no_canvas_of_the_whole_context(llada):
    answer = llada.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True})
    assert answer.json["usage"]["completion_tokens"] == 128


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
def test_a_stream_goes_on_exactly_when_its_replica_is_killed(tmp_path):
    asked = {**ASKED, "model": "tiny-llada", "max_tokens": 300, "n": 2, "logprobs": 1}
    asked["extra_body"] = {"ignore_eos": True}
    with serving(*WORDS, "--replicas", "2", folder=tmp_path) as server:
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
    before = [spent(one) for one in replicas]
    until(lambda: any(spent(one) > then for one, then in zip(replicas, before, strict=True)))
    return max(zip(replicas, before, strict=True), key=lambda pair: spent(pair[0]) - pair[1])[0]


def spent(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def is_replica(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "--behind-router" in process.cmdline()
    return False
