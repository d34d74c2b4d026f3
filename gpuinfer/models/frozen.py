"""The inference forms of the built-in networks: fewer and larger steps, weights laid out for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TYPICAL_ROWS = 512  # what the packed layout is chosen for; other batch sizes give the same answers


def masked(logits: Tensor, legal: Tensor) -> Tensor:
    """`logits` [rows, actions] with -inf where `legal` (0 or 1, same shape) is 0; a row of zeros keeps all its logits.

    In whole-block arithmetic, since a boolean `masked_fill` would cost a tenth of a small network's time.
    """
    any_legal = legal.sum(1, keepdim=True).clamp_(max=1)
    return torch.threshold_(legal - any_legal, -0.5, float("-inf")).add_(logits)


class Affine(nn.Module):
    """`inputs @ weight.T + bias`, with what usually follows it: a ReLU, or the addition of a residual."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @classmethod
    def best(
        cls,
        weight: Tensor,
        bias: Tensor,
        *,
        device: torch.device,
        dtype: torch.dtype,
        compute: torch.dtype | None = None,
    ) -> Affine:
        """The fastest form that `device` has for parameters `weight` [outputs, inputs] and `bias` [outputs], rounded to
        `dtype` and computed with in `compute` (None: in `dtype` too).
        """
        weight = weight.detach().to(device=device, dtype=dtype).to(compute or dtype).contiguous()
        bias = bias.detach().to(device=device, dtype=dtype).to(compute or dtype).contiguous()
        if device.type != "cpu":
            return cls(weight, bias)
        try:
            packed = PackedAffine(weight, bias)
            packed(weight.new_zeros(1, weight.shape[1]))
        except (AttributeError, RuntimeError):  # a torch without oneDNN, or a CPU without kernels for this dtype
            return cls(weight, bias)
        return packed

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight, self.bias)

    def relu(self, inputs: Tensor) -> Tensor:
        if inputs.is_cuda:  # bias and ReLU in the matrix product's own epilogue
            return torch._addmm_activation(self.bias, inputs, self.weight.t())
        return self(inputs).relu_()  # type: ignore[no-any-return]

    def plus(self, inputs: Tensor, residual: Tensor) -> Tensor:
        return self(inputs).add_(residual)  # type: ignore[no-any-return]


class PackedAffine(Affine):
    """The same through oneDNN, its weight already in the blocked layout that the kernels want.

    These are the operations that torch's own compiler emits. On a Zen 4 core they reach 98 % of the arithmetic peak,
    where `functional.linear` reaches 90 % in float32; and a row's answer is the same bits in every batch size.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__(weight, bias)
        operations = torch.ops.mkldnn
        self._multiply: Any = operations._linear_pointwise.default
        self._multiply_add: Any = operations._linear_pointwise.binary
        self._packed = operations._reorder_linear_weight(weight, TYPICAL_ROWS)

    def forward(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, self._packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def relu(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, self._packed, self.bias, "relu", [], "")  # type: ignore[no-any-return]

    def plus(self, inputs: Tensor, residual: Tensor) -> Tensor:
        return self._multiply_add(inputs, residual, self._packed, self.bias, "add")  # type: ignore[no-any-return]


def unpack(module: nn.Module) -> None:
    """Put plain products in the place of packed ones, which torch.compile cannot see into: it packs by itself."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, PackedAffine):
                setattr(parent, name, Affine(child.weight, child.bias))


class FrozenLayer(nn.Module):
    """A post-norm encoder layer over one token: attention is one matrix, feed-forward two."""

    def __init__(
        self, attention: Affine, attention_norm: nn.LayerNorm, grow: Affine, shrink: Affine, norm: nn.LayerNorm
    ) -> None:
        super().__init__()
        self.attention, self.attention_norm = attention, attention_norm
        self.grow, self.shrink, self.norm = grow, shrink, norm

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.attention_norm(self.attention.plus(tokens, tokens))
        return self.norm(self.shrink.plus(self.grow.relu(tokens), tokens))  # type: ignore[no-any-return]


Carried = tuple[Tensor, Tensor]
"""What goes from one segment of a network to the next: its tokens, and the legal mask [rows, actions]."""


class Enter(nn.Module):
    """The first segment: takes the features, and keeps of them only the mask."""

    def __init__(self, first: nn.Module, actions: int) -> None:
        super().__init__()
        self.first, self.actions = first, actions

    def forward(self, features: Tensor) -> Carried:
        return self.first(features), features[:, : self.actions].clone()


class Between(nn.Module):
    """Any segment in the middle."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, carried: Carried) -> Carried:
        tokens, legal = carried
        return self.layer(tokens), legal


class Leave(nn.Module):
    """The last segment: policy logits and values, as the network answers them."""

    def __init__(self, heads: Affine, actions: int) -> None:
        super().__init__()
        self.heads, self.actions = heads, actions

    def forward(self, carried: Carried) -> tuple[Tensor, Tensor]:
        tokens, legal = carried
        answer = self.heads(tokens)
        return masked(answer[:, : self.actions], legal), answer[:, self.actions :]


class WithRelu(nn.Module):
    """A product and the ReLU behind it."""

    def __init__(self, affine: Affine) -> None:
        super().__init__()
        self.affine = affine

    def forward(self, inputs: Tensor) -> Tensor:
        return self.affine.relu(inputs)


class FrozenBlobNet(nn.Module):
    """`BlobNet` for inference. `heads` answers policy logits and values side by side."""

    def __init__(
        self, embed: Affine, norm: nn.LayerNorm, layers: Sequence[FrozenLayer], heads: Affine, actions: int
    ) -> None:
        super().__init__()
        self.actions = actions
        self.embed, self.norm, self.heads = embed, norm, heads
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The same promise as `BlobNet.forward`."""
        answer = self.heads(self.layers(self.norm(self.embed(features))))
        return masked(answer[:, : self.actions], features[:, : self.actions]), answer[:, self.actions :]

    def segments(self) -> list[nn.Module]:
        """Its steps as modules to be called one after the other: embedding, each layer, heads."""
        first = Enter(nn.Sequential(self.embed, self.norm), self.actions)
        return [first, *map(Between, self.layers), Leave(self.heads, self.actions)]


class FrozenBlobNetSmall(nn.Module):
    """`BlobNetSmall` for inference."""

    def __init__(self, first: Affine, second: Affine, heads: Affine, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.first, self.second, self.heads = first, second, heads

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The same promise as `BlobNet.forward`."""
        answer = self.heads(self.second.relu(self.first.relu(features)))
        return masked(answer[:, : self.actions], features[:, : self.actions]), answer[:, self.actions :]

    def segments(self) -> list[nn.Module]:
        """Its steps as modules to be called one after the other."""
        first, second = Enter(WithRelu(self.first), self.actions), Between(WithRelu(self.second))
        return [first, second, Leave(self.heads, self.actions)]
