"""The architecture of a decoder-only transformer, in terms that all families share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021), with the checkpoint's scaling applied to its angles.

    The first `2 × len(inverse_frequencies)` values of a head turn: value i with value i + half, as Hugging Face has it.
    """

    inverse_frequencies: tuple[float, ...]  # radians per position
    attention_factor: float = 1.0  # cosine and sine are multiplied by it (YaRN; Peng et al. 2023)


@dataclass(frozen=True)
class Shape:
    """Sizes and switches. All weights' shapes follow from it."""

    family: str  # "llama", "mistral", "qwen2", "qwen3", "gpt2", "nanogpt", "null"
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    positions: int  # the longest context it was made for
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm (Zhang and Sennrich 2019), LayerNorm (Ba et al. 2016)
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True  # up projection holds gate and value (Shazeer 2020)
    qk_norm: bool = False  # queries and keys pass through an RMSNorm of each head's values (Qwen3)
    rope: Rope | None = None
    learned_positions: bool = False
    windows: tuple[int | None, ...] = field(default=())  # of each layer: positions it looks back, itself included
    tied: bool = False  # the head is the embedding: no weight of its own
    end_tokens: tuple[int, ...] = ()  # any of them ends an answer
    beginning_token: int | None = None

    @property
    def cache_values(self) -> int:
        """Values that one position of one row keeps in the cache: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim
