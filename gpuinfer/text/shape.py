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
class Experts:
    """A mixture of experts in place of a layer's MLP (Shazeer et al. 2017): each token goes through a few of many."""

    count: int
    chosen: int  # of a token
    intermediate: int  # of one expert
    shared: int = 0  # intermediate size of the one that every token goes through besides; 0: there is none
    dense: tuple[int, ...] = ()  # layers that have an ordinary MLP of `Shape.intermediate` instead
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    normalised: bool = False  # the chosen ones' scores are divided by their sum
    scale: float = 1.0  # then multiplied by this
    groups: int = 1  # experts in as many groups, of which those with the best sums of two are looked into
    groups_chosen: int = 1


@dataclass(frozen=True)
class Masking:
    """What makes a transformer a masked diffusion model (Nie et al. 2025): it fills masks in, in any order."""

    mask_token: int
    block: int | None = None  # positions of a block from 0 on: a token sees its own and those before; None: it sees all
    shifted: bool = False  # a position's logits are for the position after it (Dream)
    guided: bool = True  # it was trained so that classifier-free guidance makes sense


@dataclass(frozen=True)
class Shape:
    """Sizes and switches. All weights' shapes follow from it."""

    family: str  # "llama", "mistral", "qwen2", "qwen3", "gpt2", "nanogpt", "null"; "llada", "llada-moe", "llada2", …
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
    experts: Experts | None = None
    masking: Masking | None = None  # None: the model goes from left to right

    @property
    def cache_values(self) -> int:
        """Values that one position of one row keeps in the cache: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """`windows`, of a model without any, too: one for each layer."""
        return self.windows or (None,) * self.layers

    def mixed(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.experts is not None and layer not in self.experts.dense

    def inner(self, layer: int) -> int:
        """Values between `Layer.up` and `Layer.down`, which all tokens go through; 0: there is no such expert."""
        return self.experts.shared if self.experts is not None and self.mixed(layer) else self.intermediate
