"""The central server with models on a CUDA device: rows that it reads where clients have left them, and text."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from texts import CONTEXT, SLOTS, short

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.engine.engine import Engine
from gpuinfer.strategies.dynamic import Dynamic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SECONDS = 120
FEATURES = 64
CUDA, CPU = ("cuda",), ("cpu",)
NETWORK = ModelSpec("blobnet-small", None, FEATURES, "uint8", {"actions": 20, "seats": 4})
TEXT = ModelSpec("tiny", kind="text")


async def answers(backend, payloads, rows=1):
    """What an engine over this backend answers, all asked at once."""
    engine = Engine(backend, Dynamic(backend.setup))
    await engine.start()
    try:
        asked = (engine.submit(payload, rows=len(payload) if rows is None else rows) for payload in payloads)
        return await asyncio.wait_for(asyncio.gather(*asked), SECONDS), await backend.stats()
    finally:
        await engine.close()


@pytest.mark.parametrize("in_flight", [1, 2, 4])
async def test_rows_are_those_of_the_cpu(in_flight):
    dice = np.random.default_rng(0)
    blocks = [dice.integers(0, 2, (rows, FEATURES), dtype=np.uint8) for rows in (1, 700, 33, 2000, 64) * 4]
    expected, _ = await answers(InProcess(Setup(NETWORK, CPU)), blocks, rows=None)
    central = Central(Setup(NETWORK, CUDA), in_flight=in_flight, max_rows=4096)
    found, stats = await answers(central, blocks, rows=None)
    for ours, theirs in zip(found, expected, strict=True):
        for output, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(output, wanted, atol=1e-4)
    assert stats["device"]["name"] == torch.cuda.get_device_name(0)


async def test_blocks_in_shared_memory_are_registered_with_the_device(caplog):
    """The server's log tells when CUDA refuses; here a client in this process has the memory, and hears it."""
    block = np.random.default_rng(0).integers(0, 2, (4096, FEATURES), dtype=np.uint8)
    expected, _ = await answers(InProcess(Setup(NETWORK, CPU)), [block], rows=None)
    found, _ = await answers(Central(Setup(NETWORK, CUDA), max_rows=4096), [block] * 5, rows=None)
    for ours in found:
        np.testing.assert_allclose(ours[1], expected[0][1], atol=1e-4)
    assert "cannot pin" not in caplog.text


async def test_text_is_the_same_in_any_company():
    prompts = [short(str(number)) for number in range(3 * SLOTS)]
    options = {"slots": SLOTS, "context": CONTEXT}
    setup = Setup(TEXT, CUDA, deterministic=True)
    together, _ = await answers(Central(setup, **options), prompts)
    alone = [(await answers(Central(setup, **options), [prompt]))[0][0] for prompt in prompts[:2]]
    tokens = [[one.tokens for one in answer.completions] for answer in together]
    assert tokens[:2] == [[one.tokens for one in answer.completions] for answer in alone]
