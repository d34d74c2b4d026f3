"""A transformer's weights by neutral names, whatever its checkpoint calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

if TYPE_CHECKING:
    from torch import Tensor


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
    """A layer's experts: all of them, and who decides (`shape.Experts`)."""

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

    product: Product
    first: int
    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter of low rank, on the CPU: of each layer what it adds to which products."""

    layers: tuple[tuple[LowRank, ...], ...]

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max((low.rank for layer in self.layers for low in layer), default=0)

    @property
    def nbytes(self) -> int:
        return sum(low.down.nbytes + low.up.nbytes for layer in self.layers for low in layer)
