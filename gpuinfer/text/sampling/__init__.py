"""From logits to tokens: each row by its own settings, the same bits whatever shares its step."""

import gpuinfer.text.torch_import  # noqa: F401  before torch
from gpuinfer.text.sampling.sampler import DrawnTokens, Sampler
from gpuinfer.text.sampling.slot_settings import check_sampling

__all__ = ["DrawnTokens", "Sampler", "check_sampling"]
