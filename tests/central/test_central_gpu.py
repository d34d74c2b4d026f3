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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

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


async def test_rows_are_those_of_the_cpu(caplog):
    """In shared memory of this process, which is registered with the device."""
    dice = np.random.default_rng(0)
    blocks = [dice.integers(0, 2, (rows, FEATURES), dtype=np.uint8) for rows in (1, 700, 33, 2000, 64) * 4]
    expected, _ = await answers(InProcess(Setup(NETWORK, CPU)), blocks, rows=None)
    found, stats = await answers(Central(Setup(NETWORK, CUDA), in_flight=4, max_rows=4096), blocks, rows=None)
    for ours, theirs in zip(found, expected, strict=True):
        for output, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(output, wanted, atol=1e-4)
    assert stats["device"]["name"] == torch.cuda.get_device_name(0)
    assert "cannot pin" not in caplog.text


async def test_text_is_the_same_in_any_company():
    prompts = [short(str(number)) for number in range(3 * SLOTS)]
    options = {"slots": SLOTS, "context": CONTEXT}
    setup = Setup(TEXT, CUDA, deterministic=True)
    together, _ = await answers(Central(setup, **options), prompts)
    (alone,), _ = await answers(Central(setup, **options), prompts[:1])
    assert [one.tokens for one in together[0].completions] == [one.tokens for one in alone.completions]
