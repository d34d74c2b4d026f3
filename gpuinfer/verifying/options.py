"""The options of `verify`, which are its flags."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gpuinfer import api
from gpuinfer.workloads.generate.asking import MOST_TOKENS

LARGEST_BATCH = 4096


class Options(api.Options):
    """The flags of `gpuinfer verify`."""

    model: str | None = Field(None, description="a folder with a checkpoint, or tiny, which is built in")
    checkpoint: Path | None = Field(None, description="a nanoGPT checkpoint, model.pt, instead of --model")
    meta: Path | None = Field(None, description="its characters: meta.pkl or meta.json")
    prompts: Path | None = Field(None, description="prompts as generate takes them; default: a set that is built in")
    limit: int = Field(32, ge=1, le=100_000, description="prompts that are taken from there, the first ones")
    new_tokens: int = Field(32, ge=1, le=MOST_TOKENS, description="of each answer, whatever ends one")
    batch_sizes: list[int] = Field([1, 3, 64], min_length=1, max_length=16, description="rows at once: 1,3,64")
    tolerance: float | None = Field(
        None, gt=0, le=1e3, description="between two logits [1e-4 in float32; docs/verify.md]"
    )
    transformers: bool = Field(True, description="compare with transformers where it is installed")
    deterministic: bool = Field(False, description="demand the same bits, with a model that is opened for it")
