"""`gpuinfer serve` on the devices that CUDA_VISIBLE_DEVICES names."""

from __future__ import annotations

import pytest
import torch
from replica_servers import SECONDS, Server, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORDS = ("--model", "tiny", "--device", "cuda", "-B", "slots=8")
ASKED = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
SEVERAL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def visible(devices: str) -> dict[str, dict[str, str]]:
    return {"environment": {"CUDA_VISIBLE_DEVICES": devices}}


@pytest.mark.parametrize("devices", ["0", pytest.param("1", marks=SEVERAL), pytest.param("1,0", marks=SEVERAL)])
def test_it_serves_from_the_first_that_is_visible(tmp_path, devices):
    with serving(*WORDS, folder=tmp_path, **visible(devices)) as server:
        answer = server.ask("/v1/completions", ASKED)
        assert answer.status == 200
        assert answer.json["usage"]["completion_tokens"] == 6
        assert server.ask("/v1/completions", ASKED).json["choices"] == answer.json["choices"]
        assert server.end() == 0


def test_without_any_it_ends_and_says_so(tmp_path):
    server = Server(*WORDS, folder=tmp_path, **visible(""))
    try:
        assert server.process.wait(SECONDS) == 2
    finally:
        server.kill()
    assert "no device 'cuda" in server.log


def test_replicas_have_a_device_each(tmp_path):
    with serving(*WORDS, "--replicas", 1, folder=tmp_path, **visible("0")) as server:
        assert server.ask("/v1/completions", ASKED).status == 200
        assert server.end() == 0
