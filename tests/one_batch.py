"""A backend that lives for one batch."""

from __future__ import annotations

from collections.abc import Sequence

from gpuinfer.api import Backend, BackendContext, Request, Result


async def answered(backend: Backend, batch: Sequence[Request]) -> Sequence[Result]:
    """Started, asked and closed, whatever comes of it."""
    await backend.start(BackendContext())
    try:
        return await backend.infer(batch)
    finally:
        await backend.close()
