"""One engine for all tests that only ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpuinfer.backends import vllm


@pytest.fixture(scope="session")
def held() -> Iterator[object]:
    if (problem := vllm.why_not_installed()) is not None:
        pytest.skip(problem)
    from vllm_held import Held

    one = Held(enable_lora=True, max_lora_rank=8)
    yield one
    one.close()
