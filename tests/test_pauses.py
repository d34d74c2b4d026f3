"""The garbage collector is left as it was found, whoever serves and however often."""

from __future__ import annotations

import gc

import pytest
from helpers import AtOnce, Doubler

from gpuinfer.host import process
from gpuinfer.runtime.session import Session


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield before
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_full_collections_are_rare_as_long_as_anybody_serves(thresholds):
    process.shorten_collections()
    process.shorten_collections()
    process.restore_collector()
    assert gc.get_threshold() == (*thresholds[:2], process.THRESHOLDS_SERVING)
    assert gc.get_freeze_count() > 0
    process.restore_collector()


async def test_a_session_serves_from_its_first_request_to_its_end(thresholds):
    async with Session(Doubler(), AtOnce()) as infer:
        assert gc.get_threshold() == thresholds
        assert await infer(21) == 42
        assert gc.get_threshold()[2] == process.THRESHOLDS_SERVING
