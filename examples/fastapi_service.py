"""A FastAPI service around `gpuinfer.Batcher`: requests of all connections share batches.

    pip install gpuinfer fastapi uvicorn
    uvicorn fastapi_service:app --port 8001

    POST /predict  {"pixels": [[[…]]]}  →  {"scores": […]}   numbers [3, 16, 16] → numbers [10]
                   X-Priority: high | normal | low           who goes first when many wait
                   X-Timeout: 200ms                          at most; 2 s without it
    GET /stats     figures; GET /verdict  what holds the service back, and what to change

A request that waited for too long is answered with 504, one for which the queue has no room with 503 and Retry-After,
and one that is no image with 422.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from torch import nn

import gpuinfer
from gpuinfer.errors import BadResult, Expired, GpuinferError, QueueFull, RequestError, UsageError

STATUS = {QueueFull: 503, Expired: 504, BadResult: 500, RequestError: 422, UsageError: 422}  # the first that fits


class Images(nn.Module):
    """Images float32 [rows, 3, 16, 16] to scores [rows, 10]. Yours is trained: load its weights here."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.scores = nn.Linear(256, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.scores(self.features(pixels))


class Image(BaseModel):
    pixels: list[list[list[float]]]


def service(model: Any, **options: Any) -> FastAPI:
    """The service of a model of images [3, 16, 16]; `options` are those of `gpuinfer.Batcher`."""
    options = {"strategy": "priority", "queue": "refuse", "max_queue_rows": 1024, **options}
    batcher = gpuinfer.Batcher(model, example=torch.zeros(3, 16, 16), **options)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with batcher:  # the model is loaded before the first request, and what was asked is answered at the end
            yield

    app = FastAPI(title="Scores of images", lifespan=lifespan)

    @app.post("/predict")
    async def predict(
        image: Image, x_priority: Annotated[str, Header()] = "normal", x_timeout: Annotated[str, Header()] = "2s"
    ) -> dict[str, list[float]]:
        scores = await batcher(image.pixels, priority=x_priority, timeout=x_timeout)
        return {"scores": scores.tolist()}

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return batcher.stats()

    @app.get("/verdict", response_class=PlainTextResponse)
    async def verdict() -> str:
        return str(batcher.verdict())

    @app.exception_handler(GpuinferError)
    async def refused(request: Request, error: GpuinferError) -> JSONResponse:
        status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
        return JSONResponse({"detail": str(error)}, status, {"Retry-After": "1"} if status == 503 else None)

    return app


app = service(Images())
