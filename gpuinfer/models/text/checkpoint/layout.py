"""Which stored tensors make which weights. One description serves to count, to check and to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gpuinfer.models.text.checkpoint.family import Biases
from gpuinfer.models.text.shape import Shape
from gpuinfer.models.text.weights import Layer, Linear, Norm, Weights


@dataclass(frozen=True)
class Part:
    """A stored tensor's name and shape. `transposed`: it is stored [in, out]."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


Take = Callable[[Sequence[Part], bool], Tensor]
"""Makes one tensor of parts, joined along their first dimension; true: in float32, else in the model's dtype."""


class Layout(Protocol):
    @property
    def shape(self) -> Shape: ...

    def weights(self, take: Take) -> Weights:
        """All weights, each taken once, in the order in which the model uses them."""
        ...


@dataclass(frozen=True)
class RotaryLayout:
    """Llama, Mistral, Qwen2 and Qwen3, as transformers names their tensors. `prefix`: "model." or nothing."""

    shape: Shape
    biases: Biases
    prefix: str = "model."
    embedding_name: str | None = None  # where only the head is stored, and tied
    head_name: str = "lm_head.weight"

    def weights(self, take: Take) -> Weights:
        shape = self.shape
        name = self.embedding_name or f"{self.prefix}embed_tokens.weight"
        embedding = take([Part(name, (shape.vocabulary, shape.hidden))], False)
        layers = tuple(self._layer(f"{self.prefix}layers.{number}.", take) for number in range(shape.layers))
        norm = self._norm(f"{self.prefix}norm", shape.hidden, take)
        return Weights(embedding, layers, norm, _head(shape, self.head_name, embedding, take))

    def _layer(self, prefix: str, take: Take) -> Layer:
        shape, biases = self.shape, self.biases
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = [(f"{attention}q_proj", heads), (f"{attention}k_proj", kv_heads), (f"{attention}v_proj", kv_heads)]
        up = [(f"{mlp}gate_proj", shape.intermediate), (f"{mlp}up_proj", shape.intermediate)]
        return Layer(
            attention_norm=self._norm(f"{prefix}input_layernorm", shape.hidden, take),
            qkv=_linear(qkv, shape.hidden, biases.qkv, take),
            query_norm=self._norm(f"{attention}q_norm", shape.head_dim, take) if shape.qk_norm else None,
            key_norm=self._norm(f"{attention}k_norm", shape.head_dim, take) if shape.qk_norm else None,
            out=_linear([(f"{attention}o_proj", shape.hidden)], heads, biases.out, take),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm", shape.hidden, take),
            up=_linear(up, shape.hidden, biases.up, take),
            down=_linear([(f"{mlp}down_proj", shape.hidden)], shape.intermediate, biases.down, take),
        )

    def _norm(self, name: str, size: int, take: Take) -> Norm:
        return Norm(take([Part(f"{name}.weight", (size,))], True))


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
        embedding = take([Part(name, (shape.vocabulary, shape.hidden))], False)
        positions = take([Part(f"{self.prefix}wpe.weight", (shape.positions, shape.hidden))], False)
        layers = tuple(self._layer(f"{self.prefix}h.{number}.", take) for number in range(shape.layers))
        norm = self._norm(f"{self.prefix}ln_f", take)
        return Weights(embedding, layers, norm, _head(shape, self.head_name, embedding, take), positions)

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
        shift = take([Part(f"{name}.bias", size)], True) if self.norm_shifts else None
        return Norm(take([Part(f"{name}.weight", size)], True), shift)


def _head(shape: Shape, name: str, embedding: Tensor, take: Take) -> Linear:
    return Linear(embedding if shape.tied else take([Part(name, (shape.vocabulary, shape.hidden))], False))


def _linear(rows: Sequence[tuple[str, int]], columns: int, bias: bool, take: Take, transposed: bool = False) -> Linear:
    """`rows`: each part's name and how many outputs it has."""
    shapes = [(name, (columns, count) if transposed else (count, columns)) for name, count in rows]
    weight = take([Part(f"{name}.weight", shape, transposed) for name, shape in shapes], False)
    return Linear(weight, take([Part(f"{name}.bias", (count,)) for name, count in rows], False) if bias else None)
