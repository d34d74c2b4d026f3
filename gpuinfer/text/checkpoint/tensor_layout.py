"""Which stored tensors make which weights, by the names that each family gives them.

One description serves to count, to check and to read: each tensor once, straight to its place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.model_family import Biases
from gpuinfer.text.transformer import Experts, Layer, Linear, Mixture, Norm, Shape, UnreadLayers, Weights


@dataclass(frozen=True)
class TensorNames:
    """Names without ".weight" and ".bias". Names within a layer follow `layer`, which holds the layer's number."""

    prefix: str = "model."
    embedding: str = "embed_tokens"
    layer: str = "layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one that is all three
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp."  # before the names of its products
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    norm: str = "norm"
    head: str = "lm_head"
    head_within: bool = False  # the head's name has the prefix too
    router: str = "mlp.gate"
    router_bias: str | None = None  # a tensor's whole name within the layer
    expert: str = "mlp.experts.{}."  # before the names of one expert's products
    shared: str = "mlp.shared_experts."

    def embedding_of(self, prefix: str) -> str:
        return f"{prefix}{self.embedding}.weight"

    def head_of(self, prefix: str) -> str:
        return f"{prefix if self.head_within else ''}{self.head}.weight"


LLAMA = TensorNames()
NAMES: Mapping[str, TensorNames] = {
    "llada": TensorNames(
        prefix="model.transformer.",
        embedding="wte",
        layer="blocks.{}.",
        attention_norm="attn_norm",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="attn_out",
        mlp_norm="ff_norm",
        mlp="",
        gate="ff_proj",
        up="up_proj",
        down="ff_out",
        norm="ln_f",
        head="ff_out",
        head_within=True,
    ),
    "llada2": TensorNames(
        embedding="word_embeddings",
        qkv=("attention.query_key_value",),
        query_norm="attention.query_layernorm",
        key_norm="attention.key_layernorm",
        out="attention.dense",
        router_bias="mlp.gate.expert_bias",
    ),
}


def names_of(family: str) -> TensorNames:
    return NAMES.get(family, LLAMA)


@dataclass(frozen=True)
class TensorPart:
    """A stored tensor's name and shape. `transposed`: it is stored [in, out]."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


Take = Callable[[Sequence[TensorPart], bool], Tensor]
"""Makes one tensor of parts, joined along their first dimension; true: in float32, else in the model's dtype."""


class TensorLayout(Protocol):
    @property
    def shape(self) -> Shape: ...

    def weights(self, take: Take) -> Weights:
        """All weights; those of a layer are taken on access."""
        ...

    def layer_path(self, number: int) -> str:
        """What the names of a layer's tensors begin with, without the last dot."""
        ...


@dataclass(frozen=True)
class RotaryLayout:
    """Llama and families of the same structure, with their names. `prefix` precedes all names, and may be empty."""

    shape: Shape
    biases: Biases
    prefix: str = LLAMA.prefix
    embedding_name: str | None = None  # if only the tied head is stored
    names: TensorNames = LLAMA

    def weights(self, take: Take) -> Weights:
        shape, names = self.shape, self.names
        name = self.embedding_name or names.embedding_of(self.prefix)
        embedding = take([TensorPart(name, (shape.vocabulary, shape.hidden))], False)
        layers = UnreadLayers(shape.layers, lambda number: self._layer(number, take))
        norm = self._norm(f"{self.prefix}{names.norm}", shape.hidden, take)
        return Weights(embedding, layers, norm, _head(shape, names.head_of(self.prefix), embedding, take))

    def layer_path(self, number: int) -> str:
        return (self.prefix + self.names.layer.format(number)).rstrip(".")

    def _layer(self, number: int, take: Take) -> Layer:
        shape, names, biases = self.shape, self.names, self.biases
        prefix = self.prefix + names.layer.format(number)
        heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = [heads, kv_heads, kv_heads]
        outputs = sizes if len(names.qkv) == len(sizes) else [sum(sizes)]
        qkv = [(prefix + name, size) for name, size in zip(names.qkv, outputs, strict=True)]
        attention_norm = self._norm(prefix + names.attention_norm, shape.hidden, take)
        query_norm = self._norm(prefix + names.query_norm, shape.head_dim, take) if shape.qk_norm else None
        key_norm = self._norm(prefix + names.key_norm, shape.head_dim, take) if shape.qk_norm else None
        products = _linear(qkv, shape.hidden, biases.qkv, take)
        out = _linear([(prefix + names.out, shape.hidden)], heads, biases.out, take)
        mlp_norm = self._norm(prefix + names.mlp_norm, shape.hidden, take)
        if shape.experts is not None and number not in shape.experts.dense:
            mixture = self._mixture(prefix, shape.experts, take)
            up, down = self._shared(prefix, shape.experts.shared, mixture.up, take)
            return Layer(attention_norm, products, out, mlp_norm, up, down, query_norm, key_norm, mixture)
        up, down = self._mlp(prefix + names.mlp, shape.intermediate, take)
        return Layer(attention_norm, products, out, mlp_norm, up, down, query_norm, key_norm)

    def _mlp(self, prefix: str, size: int, take: Take) -> tuple[Linear, Linear]:
        names, hidden = self.names, self.shape.hidden
        up = _linear([(prefix + names.gate, size), (prefix + names.up, size)], hidden, self.biases.up, take)
        return up, _linear([(prefix + names.down, hidden)], size, self.biases.down, take)

    def _shared(self, prefix: str, size: int, like: Tensor, take: Take) -> tuple[Linear, Linear]:
        """The shared expert, or empty matrices."""
        if size:
            return self._mlp(prefix + self.names.shared, size, take)
        hidden = self.shape.hidden
        return Linear(like.new_empty((0, hidden))), Linear(like.new_empty((hidden, 0)))

    def _mixture(self, prefix: str, experts: Experts, take: Take) -> Mixture:
        names, hidden, inner = self.names, self.shape.hidden, experts.intermediate
        each = [prefix + names.expert.format(number) for number in range(experts.count)]
        pairs = [f"{one}{half}.weight" for one in each for half in (names.gate, names.up)]
        router = take([TensorPart(f"{prefix}{names.router}.weight", (experts.count, hidden))], True)
        bias = take([TensorPart(prefix + names.router_bias, (experts.count,))], True) if names.router_bias else None
        up = take([TensorPart(name, (inner, hidden)) for name in pairs], False)
        down = take([TensorPart(f"{one}{names.down}.weight", (hidden, inner)) for one in each], False)
        return Mixture(router, bias, up.view(experts.count, -1, hidden), down.view(experts.count, -1, inner))

    def _norm(self, name: str, size: int, take: Take) -> Norm:
        return Norm(take([TensorPart(f"{name}.weight", (size,))], True))


@dataclass(frozen=True)
class Gpt2Layout:
    """GPT-2 as transformers names its tensors; nanoGPT's have the same names and are not transposed."""

    shape: Shape
    biases: Biases
    prefix: str = "transformer."
    transposed: bool = True
    norm_shifts: bool = True
    embedding_name: str | None = None
    head_name: str = "lm_head.weight"

    def weights(self, take: Take) -> Weights:
        shape = self.shape
        name = self.embedding_name or f"{self.prefix}wte.weight"
        embedding = take([TensorPart(name, (shape.vocabulary, shape.hidden))], False)
        positions = take([TensorPart(f"{self.prefix}wpe.weight", (shape.positions, shape.hidden))], False)
        layers = UnreadLayers(shape.layers, lambda number: self._layer(f"{self.layer_path(number)}.", take))
        norm = self._norm(f"{self.prefix}ln_f", take)
        return Weights(embedding, layers, norm, _head(shape, self.head_name, embedding, take), positions)

    def layer_path(self, number: int) -> str:
        return f"{self.prefix}h.{number}"

    def _layer(self, prefix: str, take: Take) -> Layer:
        hidden, inner, biases = self.shape.hidden, self.shape.intermediate, self.biases

        def linear(name: str, rows: int, columns: int, bias: bool) -> Linear:
            return _linear([(prefix + name, rows)], columns, bias, take, self.transposed)

        return Layer(
            attention_norm=self._norm(f"{prefix}ln_1", take),
            qkv=linear("attn.c_attn", 3 * hidden, hidden, biases.qkv),
            out=linear("attn.c_proj", hidden, hidden, biases.out),
            mlp_norm=self._norm(f"{prefix}ln_2", take),
            up=linear("mlp.c_fc", inner, hidden, biases.up),
            down=linear("mlp.c_proj", hidden, inner, biases.down),
        )

    def _norm(self, name: str, take: Take) -> Norm:
        size = (self.shape.hidden,)
        shift = take([TensorPart(f"{name}.bias", size)], True) if self.norm_shifts else None
        return Norm(take([TensorPart(f"{name}.weight", size)], True), shift)


def _head(shape: Shape, name: str, embedding: Tensor, take: Take) -> Linear:
    return Linear(embedding if shape.tied else take([TensorPart(name, (shape.vocabulary, shape.hidden))], False))


def _linear(rows: Sequence[tuple[str, int]], columns: int, bias: bool, take: Take, transposed: bool = False) -> Linear:
    """`rows`: each part's name and how many outputs it has."""
    shapes = [(name, (columns, count) if transposed else (count, columns)) for name, count in rows]
    weight = take([TensorPart(f"{name}.weight", shape, transposed) for name, shape in shapes], False)
    return Linear(weight, take([TensorPart(f"{name}.bias", (count,)) for name, count in rows], False) if bias else None)


@dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: torch.dtype


class Store(Protocol):
    where: str  # its name in messages

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str, into: Tensor) -> None:
        """Fill `into`, contiguous and of the stored shape, in its own dtype. Raises `UsageError` for a damaged file."""
        ...

    def digests(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Of all bytes of each, as stored: the same digest, the same weights. Raises `UsageError` as `read` does."""
        ...


SHOWN = 3  # tensors, or experts of a layer, in a message
EXPERT = re.compile(r"(.+)\.experts\.([0-9]+)\.")
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.(bias|masked_bias))$")  # older files store computable buffers


def tensor_parts(layout: TensorLayout) -> list[TensorPart]:
    """All tensors that the layout takes from a store."""
    found: list[TensorPart] = []

    def take(parts: Sequence[TensorPart], wide: bool) -> Tensor:
        found.extend(parts)
        return torch.empty(joined_size(parts), device="meta")

    all_weights(layout, take)
    return found


def check_store(store: Store, layout: TensorLayout, spare: Sequence[str] = (), settings: str = "config.json") -> None:
    """Raises `UsageError` with the first tensors that are missing, unknown or of another shape.

    `spare`: tensors that the store may hold and that are not used. `settings`: what says the shapes.
    """
    wanted = {part.name: part.shape for part in tensor_parts(layout)}
    missing = {name: shape for name, shape in wanted.items() if name not in store.tensors}
    problems = _without_experts(missing, wanted)
    unknown = [name for name in store.tensors if name not in wanted]
    for at, (name, shape) in enumerate(missing.items()):
        near = difflib.get_close_matches(name, unknown, n=1, cutoff=0.8) if at < SHOWN else []
        problems.append(f"'{name}' {list(shape)} is missing" + (f" (is it '{near[0][:120]}'?)" if near else ""))
    problems += [
        f"'{name}' is {list(store.tensors[name].shape)}, {settings} makes it {list(shape)}"
        for name, shape in wanted.items()
        if name in store.tensors and store.tensors[name].shape != shape
    ]
    problems += [f"'{name}' is not part of it" for name in unknown if name not in spare and not BUFFERS.search(name)]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UsageError(
            f"the weights in {store.where} are not those of a {layout.shape.family} model of this config: "
            f"{'; '.join(problems[:SHOWN])}{more}. Copy the whole model again, or save it again."
        )


def _without_experts(missing: dict[str, tuple[int, ...]], wanted: Collection[str]) -> list[str]:
    """A message for each layer of which whole experts are missing. Removes their tensors from `missing`."""
    parts: dict[tuple[str, str], set[str]] = {}
    for name in wanted:
        if found := EXPERT.match(name):
            parts.setdefault((found[1], found[2]), set()).add(name)
    gone: dict[str, list[str]] = {}
    for (layer, number), names in parts.items():
        if names <= missing.keys():
            gone.setdefault(layer, []).append(number)
            for name in names:
                del missing[name]
    messages = []
    for layer, numbers in gone.items():
        more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
        noun, verb = ("expert", "is") if len(numbers) == 1 else ("experts", "are")
        messages.append(f"{noun} {', '.join(numbers[:SHOWN])}{more} of '{layer}' {verb} missing")
    return messages


def all_weights(layout: TensorLayout, take: Take) -> Weights:
    """All weights, those of layers included, each taken once."""
    weights = layout.weights(take)
    return replace(weights, layers=tuple(weights.layers))


def read_all_weights(store: Store, layout: TensorLayout, dtype: torch.dtype, *, by_layer: bool = False) -> Weights:
    """All weights on the CPU, matrices in `dtype`, norms in float32. Reading takes the memory of one more tensor.
    `by_layer`: a layer is read on each access.
    """

    def take(parts: Sequence[TensorPart], wide: bool) -> Tensor:
        into = torch.empty(joined_size(parts), dtype=torch.float32 if wide else dtype)
        row = 0
        for part in parts:
            rows = part.shape[-1] if part.transposed else part.shape[0]
            place = into[row : row + rows]
            if part.transposed:
                staging = torch.empty(part.shape, dtype=place.dtype)
                store.read(part.name, staging)
                place.copy_(staging.T)
            else:
                store.read(part.name, place)
            row += rows
        return into

    return layout.weights(take) if by_layer else all_weights(layout, take)


def joined_size(parts: Sequence[TensorPart]) -> tuple[int, ...]:
    shapes = [part.shape[::-1] if part.transposed else part.shape for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
