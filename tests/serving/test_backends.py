"""Servers on other backends, and as a file describes them."""

from __future__ import annotations

import asyncio

import pytest
from replica_servers import serving

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.vllm_engine.endpoint import VllmEndpoint
from gpuinfer.config.setup_file import ServerSetup
from gpuinfer.errors import UsageError


def test_a_file_describes_a_server_as_well_as_flags_do(tmp_path):
    setup = Setup(model=ModelSpec("tiny", kind="text"), devices=("cpu",), seed=3)
    ServerSetup(setup=setup, backend_options={"slots": 2, "threads": 1, "context": 96}, served_model_name="mine").write(
        tmp_path / "setup"
    )
    with serving("--setup-file", "setup", folder=tmp_path) as server:
        (model,) = server.ask("/v1/models").json["data"]
        assert (model["id"], model["slots"], model["max_model_len"]) == ("mine", 2, 96)
        answers = [server.ask("/v1/completions", {"prompt": [1] * long, "max_tokens": 1}) for long in (95, 97)]
        assert [answer.status for answer in answers] == [200, 400]
        with pytest.raises(UsageError, match=r"is a server of gpuinfer's\. Ask it with --backend fleet"):
            asyncio.run(opened(server.url))


async def opened(url):
    endpoint = VllmEndpoint(url, None, 1, 1.0)
    try:
        await endpoint.open(None)
    finally:
        await endpoint.end()


def test_a_file_is_for_its_owner_alone_and_clients_never_learn_where_a_checkpoint_is(tmp_path):
    ServerSetup(setup=Setup()).write(tmp_path / "setup")
    assert (tmp_path / "setup").stat().st_mode & 0o077 == 0
    spec = ModelSpec(str(tmp_path / "secret" / "my-model"), kind="text")
    assert ServerSetup(setup=Setup(model=spec)).name == "my-model"


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["tiny", "blobnet-small"])
def test_a_model_in_a_process_of_its_own_is_served_too(model, tmp_path):
    with serving("--model", model, "--backend", "central", "-B", "threads=1", folder=tmp_path) as server:
        if model == "tiny":
            answer = server.ask("/v1/completions", {"prompt": "Hello", "max_tokens": 5, "stream": True})
            assert answer.events[-1] is None
        else:
            answer = server.ask("/v1/evaluate", {"x": [1] * 256})
        assert answer.status == 200
        assert server.ask("/stats").json["requests"] == 1
        assert server.ask("/metrics").status == 200
        assert server.end() == 0
