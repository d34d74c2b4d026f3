"""The architecture of a decoder-only transformer, its weights by neutral names, and one forward step over tokens of
many rows. The keys and values of a row lie in pages of the cache, which the step names (Kwon et al. 2023,
"PagedAttention").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


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
    decoder: Literal["native", "transformers"] = "native"  # whose code computes it: ours, or transformers' own
    cached_values: int | None = None  # `cache_values` of layers that differ from one another

    @property
    def cache_values(self) -> int:
        """Values that one position of one row keeps in the cache: keys and values of all layers."""
        if self.cached_values is not None:
            return self.cached_values
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


@dataclass(frozen=True)
class Norm:
    """Scale and, for LayerNorm, shift: float32 [size]."""

    scale: Tensor
    shift: Tensor | None = None


@dataclass(frozen=True)
class Linear:
    """`weight` [out, in] in the model's dtype, `bias` [out] in the model's dtype."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Mixture:
    """A layer's experts, and the router that chooses among them (`Experts`)."""

    router: Tensor  # float32 [count, hidden]
    bias: Tensor | None  # float32 [count], added to the scores where experts are chosen, not where they are weighed
    up: Tensor  # [count, 2 × intermediate, hidden], gate then value
    down: Tensor  # [count, hidden, intermediate]


@dataclass(frozen=True)
class Layer:
    """One block. `qkv` gives queries, keys, values after one another: [(heads + 2 × kv_heads) × head_dim, hidden];
    `up` gives gate then value when gated: [2 × intermediate, hidden], else [intermediate, hidden]. In a layer with a
    `mixture`, `up` and `down` are those of the expert that every token goes through: of size 0 where there is none.
    """

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    mixture: Mixture | None = None


class UnreadLayers(Sequence[Layer]):
    """Layers that are read each time they are asked for, so that not all of them are in memory at once."""

    def __init__(self, count: int, read: Callable[[int], Layer]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> Layer: ...
    @overload
    def __getitem__(self, number: slice) -> list[Layer]: ...
    def __getitem__(self, number: int | slice) -> Layer | list[Layer]:
        found = range(self._count)[number]
        return self._read(found) if isinstance(found, int) else [self._read(one) for one in found]

    def __iter__(self) -> Iterator[Layer]:
        return map(self._read, range(self._count))  # holds no layer while it reads the next


@dataclass(frozen=True)
class Weights:
    """All of a model's weights, on the CPU, contiguous."""

    embedding: Tensor  # [vocabulary, hidden]
    layers: Sequence[Layer]
    norm: Norm
    head: Linear  # [vocabulary, hidden]; the embedding itself when tied
    positions: Tensor | None = None  # learned: [positions, hidden]


Product = Literal["qkv", "out", "up", "down"]


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to some outputs of a product, for inputs x: x · downᵀ · upᵀ (Hu et al. 2021, "LoRA").

    `down` float32 [rank, in], `up` float32 [outputs, rank] with the adapter's scale in it. `first` is the first of
    those outputs among the product's: of qkv they are all queries, all keys or all values; of a gated up all gates, or
    none.
    """

    product: str  # a `Product`, or the name of a module that transformers' own code computes
    first: int
    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter of low rank, on the CPU: of each layer what it adds to which products; of a model that transformers'
    own code computes all that it adds to which modules, in one.
    """

    layers: tuple[tuple[LowRank, ...], ...]

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max((low.rank for layer in self.layers for low in layer), default=0)

    @property
    def nbytes(self) -> int:
        return sum(low.down.nbytes + low.up.nbytes for layer in self.layers for low in layer)


PAGE = 32  # positions in a page of the cache, in every decoder


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings that stand in the place of some tokens' own."""

    places: NDArray[np.int32]  # [n] indices into `Step.tokens`, ascending
    values: NDArray[np.float32] | Tensor  # [n, hidden], contiguous; a tensor lies on the decoder's device


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute next. Segment i brings `lengths[i]` tokens of one row, at positions `starts[i]` onwards; the
    positions before are in the cache. No row comes twice. Arrays are int32 and contiguous. A segment may begin before
    where its row's last one ended: what that one brought from there on is forgotten.

    Position p of segment i lies in page `pages[i, p // PAGE]`, at `p % PAGE`. Entries behind the last position that a
    segment brings or sees are not looked at. Segments may have their first pages in common: if two of them have the
    same page in the same column, all columns before are the same too. No page that a step writes into has two segments.
    """

    tokens: NDArray[np.int32]  # [all tokens], segment after segment; see `drawn`
    pages: NDArray[np.int32]  # [segments, columns] numbers of pages, 0 to before `Decoder.pages`
    starts: NDArray[np.int32]  # [segments]
    lengths: NDArray[np.int32]  # [segments], each 1 or more
    wanted: NDArray[np.int32]  # [outputs] indices into `tokens`, ascending: whose logits are asked for
    adapters: NDArray[np.int32] | None = (
        None  # [segments] the number of each one's adapter, 0: none; None: none has any
    )
    sees: NDArray[np.int32] | None = None
    """[all tokens] how many positions of its row each token attends to, from 0 on: those of this step and those in the
    cache. They may lie after its own, also beyond the segment: such are in the cache. What lies behind all that a step
    sees of a row is forgotten. None: each up to itself."""
    vectors: Vectors | None = None
    drawn: Tensor | None = None
    """int64 [n] on the decoder's device, n at most `Decoder.slots`: tokens that the host has not seen yet. Where
    `tokens` says -1 - i, the i-th of them goes through; token 0 in the place of a negative one. Only for decoders that
    read them."""


class Decoder(Protocol):
    """A transformer with its cache, a pool of pages. The caller assigns pages to rows. All calls but those of `pack`
    come from one thread.
    """

    shape: Shape
    slots: int  # rows that one step may have, at most
    pages: int  # in the cache, of PAGE positions each
    length: int  # positions of a row, at most
    device: Any  # torch.device
    computes_in: str  # the number format that rows have when they meet the weights, by name
    reads_drawn: bool  # whether a step may have `Step.drawn`: it queues its work, and does not wait for it

    def forward(self, step: Step) -> Tensor:
        """Logits [len(step.wanted), vocabulary], float32, on the decoder's device; the cache is filled.

        They may lie in the decoder's own memory: they are only read, and the next step overwrites them. Raises
        `torch.OutOfMemoryError` (CUDA) when the device has no room, with nothing changed that the same step tried again
        would not change alike.
        """
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give each target page what the source page at the same place of the list holds. No target is a source."""
        ...

    @property
    def pages_go_back(self) -> bool:
        """Whether `give_back` does anything; else memory is free once the cache is made smaller."""
        ...

    def give_back(self, pages: Sequence[int]) -> None:
        """Nothing needs what these pages hold: the system may have their memory until they are written again."""
        ...

    def resize(self, slots: int, pages: int) -> None:
        """Another number of rows in a step, and of pages, all of them empty. Raises `torch.OutOfMemoryError` when they
        do not fit. Of a decoder whose pages do not go back.
        """
        ...

    def drop_graphs(self) -> None:
        """Let go of captured graphs and what they work in: steps that come often are captured again."""
        ...

    def embedding(self) -> Tensor:
        """[vocabulary, hidden] of the weights it computes with, on the device, as they are stored; only to be read."""
        ...

    def weight_tensors(self) -> Sequence[Tensor]:
        """The memory of the weights it computes with, in whatever order they lie; only to be read."""
        ...

    def pack(self, weights: Weights) -> object:
        """Other weights of the same shape as `swap` takes them: all slow work. From any thread."""
        ...

    def swap(self, packed: object) -> None:
        """Compute with these weights from the next step on. The cache keeps what the old ones have computed."""
        ...

    def pack_adapter(self, adapter: Adapter) -> object:
        """An adapter as `load` takes it. From any thread."""
        ...

    def load(self, number: int, packed: object) -> None:
        """Steps may name this adapter from now on, by a number from 1 that no other has."""
        ...

    def unload(self, number: int) -> None:
        """No step names it any more."""
        ...

    def cache_bytes(self) -> int:
        """Bytes of the cache, all pages."""
        ...

    def use(self, threads: int) -> None:
        """Compute with at most so many threads from the next step on; no effect on other devices than the CPU."""
        ...

    def rest(self) -> None:
        """Another model has the cores until the next step: no thread may spin until then."""
        ...

    def close(self) -> None:
        """Free threads and memory."""
        ...
