"""A mixture of experts (Shazeer et al. 2017) in plain torch: rows sorted by expert, or every row through every expert.

The first is less work. In the second no size depends on who goes where, which is what bits that are the same in any
company need.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from gpuinfer.text.shape import Experts
from gpuinfer.text.weights import Mixture

Activate = Callable[[Tensor], Tensor]
"""From what up projections give to what goes into down projections."""
ALIGNED = 16  # bytes: the kernel for all experts at once wants rows whose size is a multiple of it
Mix = Callable[[Experts, Mixture, Tensor, Activate], Tensor]


def chosen_for(experts: Experts, mixture: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of rows [rows, hidden], int64 [rows, chosen], ascending; and what share of the sum each has."""
    logits = F.linear(x.float(), mixture.router)
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    ranked = scores if mixture.bias is None else scores + mixture.bias
    if experts.groups > 1:
        ranked = _of_best_groups(experts, ranked)
    chosen = ranked.topk(experts.chosen).indices.sort(-1).values
    shares = scores.gather(-1, chosen)
    if experts.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    return chosen, shares * experts.scale


def _of_best_groups(experts: Experts, ranked: Tensor) -> Tensor:
    """-inf for all experts but those of the groups whose two best have the highest sum (DeepSeek-AI 2024)."""
    grouped = ranked.view(*ranked.shape[:-1], experts.groups, -1)
    best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).topk(experts.groups_chosen).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def sorted_mix(experts: Experts, mixture: Mixture, x: Tensor, activate: Activate) -> Tensor:
    """What the experts of rows [rows, hidden] give, float32 sums of what each does. No size depends on the choice, so
    that it can be captured.
    """
    chosen, shares = chosen_for(experts, mixture, x)
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(experts.count, device=x.device), right=True, out_int32=True)
    inner = activate(grouped(x[order // experts.chosen], mixture.up, ends))
    found = grouped(inner, mixture.down, ends)
    given = torch.empty_like(found).index_copy_(0, order, found).view(*chosen.shape, -1)
    return (given.float() * shares[..., None]).sum(1)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows [rows, in], each by its expert's of `weights` [experts, out, `aligned` in]; those of an expert end before
    `ends`.
    """
    return F.grouped_mm(as_wide_as(weights, x), weights.transpose(1, 2), offs=ends)


def aligned(weights: Tensor) -> Tensor:
    """Weights of experts [experts, out, in] with zeros behind each row, up to a multiple of ALIGNED bytes."""
    odd = -weights.shape[-1] % (ALIGNED // weights.itemsize)
    return F.pad(weights, (0, odd)) if odd else weights


def as_wide_as(weights: Tensor, x: Tensor) -> Tensor:
    """Rows with as many values as those of `aligned` weights."""
    odd = weights.shape[-1] - x.shape[-1]
    return F.pad(x, (0, odd)) if odd else x


def whole_mix(experts: Experts, mixture: Mixture, x: Tensor, activate: Activate) -> Tensor:
    """The same, with every row through every expert."""
    chosen, shares = chosen_for(experts, mixture, x)
    inner = activate(torch.matmul(as_wide_as(mixture.up, x), mixture.up.transpose(1, 2)))
    given = torch.matmul(
        as_wide_as(mixture.down, inner), mixture.down.transpose(1, 2)
    ).float()  # [experts, rows, hidden]
    rows = torch.arange(len(x), device=x.device)[:, None]
    return (given[chosen, rows] * shares[..., None]).sum(1)
