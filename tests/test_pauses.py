"""The garbage collector is left as it was found, whoever serves and however often."""

from __future__ import annotations

import gc

from helpers import AtOnce, Doubler

from gpuinfer.host import process
from gpuinfer.runtime.session import Session


async def test_full_collections_are_rare_as_long_as_anybody_serves():
    before = gc.get_threshold()
    process.shorten_collections()
    process.shorten_collections()
    process.restore_collector()
    assert gc.get_threshold() == (*before[:2], process.THRESHOLDS_SERVING)
    assert gc.get_freeze_count() > 0
    process.restore_collector()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    async with Session(Doubler(), AtOnce()) as infer:  # which serves from its first request to its end
        assert gc.get_threshold() == before
        assert await infer(21) == 42
        assert gc.get_threshold()[2] == process.THRESHOLDS_SERVING
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
