"""A real server of vLLM's, asked with -B endpoint."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from msgspec import structs
from peft import adapter
from ports import free_port
from vllm_held import Held

from gpuinfer.api import ModelSpec
from gpuinfer.backends.vllm_engine.engine_process import model_for_vllm
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Constraint, Part, Prompt, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
UP_S = 600.0
GREEDY = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Iterator[Held]:
    room = tmp_path_factory.mktemp("served")
    folder, _ = model_for_vllm(ModelSpec("tiny", kind="text"), room)
    port = free_port()
    told = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", "float32"]
    more = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--enable-lora", "--served-model-name", "it"]
    more += ["--enable-prompt-tokens-details", "--max-lora-rank", "8"]
    with open(room / "log", "wb") as log:
        server = subprocess.Popen([*command, *more], env={**os.environ, **told}, stdout=log, stderr=log, cwd=room)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", server)
        one = Held(endpoint=url, model="it")
        yield one
        one.close()
    finally:
        server.terminate()
        server.wait(60)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + UP_S
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not come up")


def test_a_server_answers_as_an_engine_of_our_own_does(asked, held):
    prompts = [
        Prompt(text="The capital", sampling=structs.replace(GREEDY, logprobs=2)),
        Prompt(text="once upon a time", sampling=structs.replace(GREEDY, stop=("e",), logprobs=None)),
        Prompt(text="12 34", samples=2, sampling=structs.replace(GREEDY, temperature=1.0)),
        Prompt(text="measured", sampling=Sampling(max_tokens=0, prompt_logprobs=1)),
    ]
    for theirs, ours in zip(asked.asked(*prompts), held.asked(*prompts), strict=True):
        said = [[(one.text, one.tokens, one.stop_reason) for one in each.completions] for each in (theirs, ours)]
        assert said[0] == said[1]
        for one, other in zip(theirs.completions[0].logprobs or (), ours.completions[0].logprobs or (), strict=True):
            assert abs(one.chosen.logprob - other.chosen.logprob) < 1e-4
            assert [like.token for like in one.likeliest] == [like.token for like in other.likeliest]
        for one, other in zip(theirs.prompt_logprobs or (), ours.prompt_logprobs or (), strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.chosen.token, one.chosen.rank) == (other.chosen.token, other.chosen.rank)


def test_parts_come_as_the_server_streams(asked):
    parts = list[Part]()
    whole = asked.run(asked.ask(Prompt(text="grow", sampling=structs.replace(GREEDY, logprobs=1)), parts))
    assert len(parts) > 2
    assert "".join(part.text for part in parts) == whole.completions[0].text
    assert sum((part.tokens for part in parts), ()) == whole.completions[0].tokens


def test_an_adapter_goes_by_name_and_version(asked, tmp_path):
    prompt = Prompt(text="adapt", adapter="policy", sampling=GREEDY)
    with pytest.raises(BadPrompt, match="'policy'"):
        asked.asked(prompt)
    asked.update("v1", adapter(tmp_path / "1", 1), adapter="policy")
    (first,) = asked.asked(prompt)
    asked.update("v2", adapter(tmp_path / "2", 2), adapter="policy")
    (second,) = asked.asked(prompt)
    assert (first.versions, second.versions) == (("policy@v1",), ("policy@v2",))
    assert first.completions[0].tokens != second.completions[0].tokens


def test_what_a_server_cannot_do_is_refused_with_another_way(asked, tmp_path):
    with pytest.raises(BadPrompt, match="without -B endpoint"):
        asked.asked(Prompt(text="a", sampling=Sampling(constraint=Constraint(choice=("a",)))))
    with pytest.raises(BadPrompt, match="raw ones"):
        asked.asked(Prompt(text="a", sampling=Sampling(temperature=0.5, processed_logprobs=True)))
    with pytest.raises(UsageError, match="without -B endpoint"):
        asked.update("w2", tmp_path)
    with pytest.raises(UsageError, match="serves it, not 'another'"):
        Held(endpoint=asked.backend.options.endpoint, model="another")


def test_what_the_server_measures_is_told(asked):
    before = asked.device()["tokens"]["output"]
    asked.asked(Prompt(text="a", sampling=GREEDY))
    told = asked.device()
    assert told["tokens"]["output"] - before >= 16
    assert told["engine"].keys() >= {"running", "waiting", "cache_usage", "prefix_hits"}
