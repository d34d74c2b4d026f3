"""Embeddings of texts, from a model of text in a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.library.llm_session import OpenedLLM
from gpuinfer.library.text_scores import generations_of, is_one_text, token_ids
from gpuinfer.serving.embedding_endpoint import embedding_of, shortened

Pooling = Literal["model", "mean", "last", "first"]
POOLINGS = ("model", "mean", "last", "first")


def embedding_prompts(texts: Any, pooling: Pooling, adapter: str | None) -> list[Prompt]:
    """One for each text, or list of token ids. Raises `UsageError`."""
    if pooling not in POOLINGS:
        raise UsageError(f"pooling={pooling!r} is none. Choose from {', '.join(POOLINGS)}.")
    rows = []
    given: Iterable[Any] = [texts] if is_one_text(texts) else texts
    for number, one in enumerate(given):
        try:
            text, tokens = (one, None) if isinstance(one, str) else (None, token_ids(one))
        except BadPrompt as error:
            raise UsageError(f"text {number}: {error}") from None
        sampling = Sampling(max_tokens=0)
        rows.append(Prompt(text=text, tokens=tokens, sampling=sampling, embed=pooling, key="embed", adapter=adapter))
    return rows


async def embeddings_of(
    opened: OpenedLLM, rows: Sequence[Prompt], dimensions: int | None, timeout: float | None, request: dict[str, Any]
) -> NDArray[np.float32]:
    """float32 [rows, dimensions], on the session's loop. Raises the first error, whose `index` is the text's place."""
    vectors = []
    for found in await generations_of(opened, rows, timeout, request, "text"):
        vector = embedding_of(found)
        if dimensions is not None and not 1 <= dimensions <= len(vector):
            raise UsageError(f"dimensions={dimensions!r}: these embeddings have {len(vector)}. Give 1 to that.")
        vectors.append(shortened(vector, dimensions))
    return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)
