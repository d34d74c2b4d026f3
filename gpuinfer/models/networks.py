"""The built-in networks for card games: features of one position in, policy logits and one value per seat out.

A row's first `actions` features are its legal mask, 1 where the action may be taken and 0 where it may not. Each
network has an inference form: fewer and larger steps, weights laid out for the device. Weights are read from
safetensors files, or from torch files that hold plain tensors only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from gpuinfer.errors import UsageError
from gpuinfer.host import error_text

TYPICAL_ROWS = 512  # what the packed layout is chosen for; other batch sizes give the same answers


def masked(logits: Tensor, legal: Tensor) -> Tensor:
    """`logits` [rows, actions] with -inf where `legal` (0 or 1, same shape) is 0; a row of zeros keeps all its logits.

    In whole-block arithmetic, since a boolean `masked_fill` would cost a tenth of a small network's time.
    """
    any_legal = legal.sum(1, keepdim=True).clamp_(max=1)
    return torch.threshold_(legal - any_legal, -0.5, float("-inf")).add_(logits)


class Affine(nn.Module):
    """`inputs @ weight.T + bias`, optionally followed by a ReLU or by the addition of a residual."""

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
    """Replace packed products by plain ones: torch.compile packs by itself and cannot see into packed ones."""
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
    """The first segment: takes the features, keeps the mask and embeds."""

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
    """The last segment: returns policy logits and values."""

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
        """The network as modules to be called in turn: embedding, each layer, heads."""
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
        """The network as modules to be called in turn."""
        first, second = Enter(WithRelu(self.first), self.actions), Between(WithRelu(self.second))
        return [first, second, Leave(self.heads, self.actions)]


WIDTH = 256
HEADS = 8
FEED_FORWARD = 1024
LAYERS = 6
SMALL_WIDTH = 128


class OneTokenLayer(nn.TransformerEncoderLayer):
    """An encoder layer whose rows [rows, width] are each a sequence of one token.

    The softmax over a single token is 1 whatever its query and key, so attention (Vaswani et al., 2017) comes down to
    the value and output projections, and those of the queries and keys need not be computed.
    """

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, FEED_FORWARD, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]  # no masks for a single token
        attention = self.self_attn
        values = functional.linear(tokens, attention.in_proj_weight[2 * WIDTH :], attention.in_proj_bias[2 * WIDTH :])
        tokens = self.norm1(tokens + attention.out_proj(values))
        answer: Tensor = self.norm2(tokens + self.linear2(functional.relu(self.linear1(tokens))))
        return answer


class BlobNet(nn.Module):
    """A transformer encoder over one token: 6 post-norm layers, width 256, 8 heads, feed-forward 1,024 with ReLU.

    Its parameters are those of ordinary `nn.TransformerEncoderLayer`s, about 4.8 million.
    """

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        self.actions = actions
        self.embed = nn.Linear(features, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(OneTokenLayer() for _ in range(LAYERS))
        self.policy = nn.Linear(WIDTH, actions)
        self.value = nn.Linear(WIDTH, seats)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features [rows, F] in the parameters' dtype → policy logits [rows, actions] and values [rows, seats].

        Illegal actions have a logit of -inf. A row without any legal action keeps all its logits, so that a softmax
        over them stays finite. The values are linear: no squashing.
        """
        tokens = self.norm(self.embed(features))
        for layer in self.layers:
            tokens = layer(tokens)
        return masked(self.policy(tokens), features[:, : self.actions]), self.value(tokens)

    @torch.no_grad()
    def freeze(self, *, device: torch.device, dtype: torch.dtype, compute: torch.dtype | None = None) -> nn.Module:
        """A copy that cannot be trained, with fewer and larger steps: the same answers up to rounding. Its weights are
        rounded to `dtype` and computed with in `compute` (None: in `dtype` too).
        """

        def affine(weight: Tensor, bias: Tensor) -> Affine:
            return Affine.best(weight, bias, device=device, dtype=dtype, compute=compute)

        def norm(layer: nn.LayerNorm) -> nn.LayerNorm:
            return copy.deepcopy(layer).to(device=device, dtype=dtype).to(compute or dtype).requires_grad_(False)

        def frozen(layer: nn.TransformerEncoderLayer) -> FrozenLayer:
            grow = affine(layer.linear1.weight, layer.linear1.bias)
            shrink = affine(layer.linear2.weight, layer.linear2.bias)
            # The value and output projections as one linear map, multiplied in float64.
            inner, outer = layer.self_attn, layer.self_attn.out_proj.weight.double()
            weight = outer @ inner.in_proj_weight[2 * WIDTH :].double()
            bias = outer @ inner.in_proj_bias[2 * WIDTH :].double() + inner.out_proj.bias.double()
            return FrozenLayer(affine(weight, bias), norm(layer.norm1), grow, shrink, norm(layer.norm2))

        embed, heads = affine(self.embed.weight, self.embed.bias), affine(*stacked_heads(self.policy, self.value))
        return FrozenBlobNet(
            embed, norm(self.norm), [frozen(cast(OneTokenLayer, one)) for one in self.layers], heads, self.actions
        )


class BlobNetSmall(nn.Module):
    """A perceptron: features → 128 → 128 → heads, with ReLU."""

    def __init__(self, features: int, actions: int, seats: int) -> None:
        super().__init__()
        self.actions = actions
        self.first = nn.Linear(features, SMALL_WIDTH)
        self.second = nn.Linear(SMALL_WIDTH, SMALL_WIDTH)
        self.policy = nn.Linear(SMALL_WIDTH, actions)
        self.value = nn.Linear(SMALL_WIDTH, seats)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The same promise as `BlobNet.forward`."""
        hidden = functional.relu(self.second(functional.relu(self.first(features))))
        return masked(self.policy(hidden), features[:, : self.actions]), self.value(hidden)

    @torch.no_grad()
    def freeze(self, *, device: torch.device, dtype: torch.dtype, compute: torch.dtype | None = None) -> nn.Module:
        """A copy that cannot be trained: the same promise as `BlobNet.freeze`."""
        first, second, heads = (
            Affine.best(weight, bias, device=device, dtype=dtype, compute=compute)
            for weight, bias in (
                stacked_heads(self.first),
                stacked_heads(self.second),
                stacked_heads(self.policy, self.value),
            )
        )
        return FrozenBlobNetSmall(first, second, heads, self.actions)


def stacked_heads(*heads: nn.Linear) -> tuple[Tensor, Tensor]:
    """Several heads over the same input as one layer: their outputs side by side."""
    return torch.cat([head.weight for head in heads]), torch.cat([head.bias for head in heads])


NETWORKS: dict[str, type[BlobNet] | type[BlobNetSmall]] = {"blobnet": BlobNet, "blobnet-small": BlobNetSmall}


SHOWN = 3  # mismatched keys in a message
WRAPPERS = ("state_dict", "model")  # training scripts often keep the weights under one of these keys


def load_weights(module: nn.Module, path: str, model: str) -> None:
    """Load the weights of file `path` into `module`. Raises `UsageError` unless every key and shape fits."""
    weights = read_weights(Path(path))
    if problems := mismatch(module.state_dict(), weights):
        raise UsageError(
            f"the weights in {path} do not fit model '{model}': {problems}. Use the model and the game sizes that they "
            "were trained with."
        )
    module.load_state_dict(weights)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Raises `UsageError` when the file is absent, damaged, or holds anything but named tensors."""
    if not path.is_file():
        raise UsageError(f"no weights file {path}. Check the path that was given as weights.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each kind of damage raises a kind of its own
        reason = error_text.safe_str(error).strip().partition("\n")[0].rstrip(".")
        if reason.startswith("Weights only load failed"):  # and at length how to run what is in it all the same
            reason = "no plain tensors"
        raise UsageError(
            f"cannot read weights from {path}: {reason}. Save a plain state_dict, best as safetensors "
            "(safetensors.torch.save_file)."
        ) from error
    if isinstance(content, Mapping):
        for key in WRAPPERS:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
        if all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
            return dict(content)
    raise UsageError(f"{path} does not hold a state_dict, names with tensors alone. Save model.state_dict() in it.")


def mismatch(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """The first mismatches: absent keys, unknown keys, other shapes. "" where all fits."""
    problems = [f"'{key}' {list(wanted[key].shape)} is missing" for key in wanted if key not in given]
    problems += [f"'{key}' {list(given[key].shape)} is unknown to it" for key in given if key not in wanted]
    problems += [
        f"'{key}' is {list(given[key].shape)} where it has {list(tensor.shape)}"
        for key, tensor in wanted.items()
        if key in given and given[key].shape != tensor.shape
    ]
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return "; ".join(problems[:SHOWN]) + more
