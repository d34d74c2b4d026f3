"""Filters, draws and log-probabilities over whole blocks of rows, in torch operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ONE_WEIGHT = 2.0**40
MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class Asked:
    """What rows ask for, each a tensor [rows, 1] beside the logits. `most`: the largest top-k, 0 when one has none."""

    inverse: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    units: Tensor
    most: int

    @classmethod
    def of(cls, records: NDArray[Any], units: NDArray[np.float64], device: torch.device) -> Asked:
        """From the rows' records and their random numbers."""

        def column(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]

        inverse, top_k, top_p, floor = (column(records[name]) for name in ("inverse", "top_k", "top_p", "floor"))
        most = int(records["top_k"].max()) if records["top_k"].all() else 0
        return cls(inverse, top_k, top_p, floor, column(units), most)


def orders(values: Tensor) -> Tensor:
    """int64 [rows, vocabulary] that sort as the logits do, then lowest token first: see `cpu_values`."""
    bits = (values + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & MAGNITUDE)
    places = torch.arange(values.shape[1], device=values.device)
    return (keys.long() << 32) | (MAGNITUDE - places)


def values_in(found: Tensor) -> Tensor:
    """The logits of orders."""
    keys = (found >> 32).int()
    return (keys ^ ((keys >> 31) & MAGNITUDE)).view(torch.float32)


def weights(values: Tensor, best: Tensor, inverse: Tensor) -> Tensor:
    return (((values - best) * inverse).exp() * ONE_WEIGHT).long()


def first_of(values: Tensor, best: Tensor) -> Tensor:
    """The lowest token of each row that has the best logit. Nothing says which of several `argmax` would take."""
    places = torch.arange(values.shape[1], device=values.device)
    return places.where(values == best[:, None], values.shape[1]).amin(1).clamp_(max=values.shape[1] - 1)


def drawn(values: Tensor, best: Tensor, asked: Asked, sort: bool) -> Tensor:
    """Tokens int64 [rows]: where the weights, added up in the order of the tokens, pass `units` of their sum."""
    best = best[:, None]
    found = orders(values)
    threshold = cut(found, best, asked, sort)
    reached = weights(values, best, asked.inverse).masked_fill_(found < threshold, 0).cumsum(1)
    total = reached[:, -1:]
    left = torch.minimum((asked.units * total.double()).long(), total - 1)
    return torch.searchsorted(reached, left.contiguous(), right=True).squeeze(1).clamp_(max=values.shape[1] - 1)


def cut(found: Tensor, best: Tensor, asked: Asked, sort: bool) -> Tensor:
    """The order from which on tokens stay: int64 [rows, 1]. `sort`: top-k or top-p has a say."""
    floor = (orders((best.double() + asked.floor).float()) >> 32) << 32  # below every token of that logit
    return torch.maximum(floor, cut_sorted(found, best, asked)) if sort else floor


def cut_sorted(found: Tensor, best: Tensor, asked: Asked) -> Tensor:
    """The order from which on top-k and top-p keep tokens: int64 [rows, 1]."""
    vocabulary = found.shape[1]
    if 0 < asked.most < vocabulary:
        found = found.topk(asked.most, dim=1).values
    else:
        found = found.sort(dim=1, descending=True).values
    top_k = torch.where(asked.top_k > 0, asked.top_k, vocabulary)
    kept = torch.arange(found.shape[1], device=found.device) < top_k
    mass = weights(values_in(found), best, asked.inverse) * kept
    reached = mass.cumsum(1)
    total = reached[:, -1:]
    need = (asked.top_p * total.double()).ceil().long().clamp(min=1)
    need = torch.where(asked.top_p < 1, torch.minimum(need, total), 1 << 62)
    kept &= reached - mass < need
    return found.gather(1, (kept.sum(1, keepdim=True) - 1).clamp(min=0))


def logprobs(values: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks int64 [rows], log-probabilities float64 [rows, 1 + most], the likeliest int32 [rows, most]."""
    best = values.amax(1, keepdim=True)
    sound = (values < torch.inf).all(1) & (best[:, 0] > -torch.inf)
    total = weights(values, best, torch.ones_like(best)).sum(1, keepdim=True)
    whole = best.double() + (total.double() / ONE_WEIGHT).log()
    found = orders(values)
    own = found.gather(1, chosen[:, None])
    likeliest = found.topk(most, dim=1).values
    ranks = ((found > own).sum(1) + 1) * sound
    logits = torch.cat([values.gather(1, chosen[:, None]), values_in(likeliest)], 1)
    return ranks, logits.double() - whole, (MAGNITUDE - (likeliest & 0xFFFFFFFF)).int()
