"""The built-in networks for card games: features of one position in, policy logits and one value per seat out.

A row's first `actions` features are its legal mask, 1 where the action may be taken and 0 where it may not.

Weights from files: safetensors, or torch files of which only plain tensors are read.
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
from gpuinfer.host import spoken
from gpuinfer.models.frozen import Affine, FrozenBlobNet, FrozenBlobNetSmall, FrozenLayer, masked

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


def fused_attention(layer: nn.TransformerEncoderLayer) -> tuple[Tensor, Tensor]:
    """The value and output projections as the one linear map that they make, float64 weight and bias."""
    attention = layer.self_attn
    inner, inner_bias = attention.in_proj_weight[2 * WIDTH :].double(), attention.in_proj_bias[2 * WIDTH :].double()
    outer, outer_bias = attention.out_proj.weight.double(), attention.out_proj.bias.double()
    return outer @ inner, outer @ inner_bias + outer_bias


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

    @property
    def encoder(self) -> Sequence[nn.TransformerEncoderLayer]:
        return cast(Sequence[nn.TransformerEncoderLayer], self.layers)

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
            return FrozenLayer(affine(*fused_attention(layer)), norm(layer.norm1), grow, shrink, norm(layer.norm2))

        embed, heads = affine(self.embed.weight, self.embed.bias), affine(*joined(self.policy, self.value))
        return FrozenBlobNet(embed, norm(self.norm), [frozen(layer) for layer in self.encoder], heads, self.actions)


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
            for weight, bias in (joined(self.first), joined(self.second), joined(self.policy, self.value))
        )
        return FrozenBlobNetSmall(first, second, heads, self.actions)


def joined(*heads: nn.Linear) -> tuple[Tensor, Tensor]:
    """Several heads over the same input as one: their outputs side by side."""
    return torch.cat([head.weight for head in heads]), torch.cat([head.bias for head in heads])


NETWORKS: dict[str, type[BlobNet] | type[BlobNetSmall]] = {"blobnet": BlobNet, "blobnet-small": BlobNetSmall}


SHOWN = 3  # mismatched keys in a message
WRAPPERS = ("state_dict", "model")  # training scripts often keep the weights under one of these keys


def load_weights(module: nn.Module, path: str, model: str) -> None:
    """Put the weights in file `path` into `module`. Raises `UsageError` unless every key and shape fits."""
    weights = read_weights(Path(path))
    wanted = module.state_dict()
    if problems := mismatches(wanted, weights):
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UsageError(
            f"the weights in {path} do not fit model '{model}': {'; '.join(problems[:SHOWN])}{more}. "
            "Use the model and the game sizes that they were trained with."
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
        reason = spoken.said(error).strip().partition("\n")[0].rstrip(".")
        if reason.startswith("Weights only load failed"):  # and at length how to run what is in it all the same
            reason = "no plain tensors"
        raise UsageError(
            f"cannot read weights from {path}: {reason}. Save a plain state_dict, best as safetensors "
            "(safetensors.torch.save_file)."
        ) from error
    return named_tensors(content, path)


def named_tensors(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        for key in WRAPPERS:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
        if all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
            return dict(content)
    raise UsageError(f"{path} does not hold a state_dict, names with tensors alone. Save model.state_dict() in it.")


def mismatches(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """What does not fit, a phrase each: keys that are absent, keys that are unknown, shapes that differ."""
    problems = [f"'{key}' {list(wanted[key].shape)} is missing" for key in wanted if key not in given]
    problems += [f"'{key}' {list(given[key].shape)} is unknown to it" for key in given if key not in wanted]
    problems += [
        f"'{key}' is {list(given[key].shape)} where it has {list(tensor.shape)}"
        for key, tensor in wanted.items()
        if key in given and given[key].shape != tensor.shape
    ]
    return problems
