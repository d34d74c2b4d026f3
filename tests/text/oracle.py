"""What transformers says about the tokens of a prompt: the judge of every decoder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def peer(folder: Path) -> Any:
    """The model of a Hugging Face folder in transformers, float32, with its plainest attention."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def logits_of(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Float32 logits [tokens, vocabulary] at every position of one prompt, all alone."""
    found: Tensor = peer(folder)(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found.float()
