"""The way from logits to tokens in torch operations: for CUDA devices, and a second opinion on the compiled kernels.

Values in a total order, and weights in whole numbers, as `cpu_values` describes them: no result depends on how a device
groups its sums, nor on the other rows of a call.

What changes single logits before a token is drawn.

Filters, draws and log-probabilities over whole blocks of rows, in torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.sampling import cpu_draw, cpu_values
from gpuinfer.text.sampling.cpu_draw import BROKEN, EMPTY, ONLY
from gpuinfer.text.sampling.slots import Rules, Slots

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # (row, place in the list of the row's slot)


def edited(
    values: Tensor,
    slots: NDArray[np.int32],
    records: NDArray[Any],
    masks: NDArray[np.int32] | None,
    rules: Rules | None,
    lists: Slots,
) -> Tensor:
    """The logits as they count: float32 [rows, vocabulary], a copy where anything is to be changed."""
    early = records["drawn"] < records["min_tokens"]
    if masks is None and rules is None and not (early.any() or records["biases"].any() or records["penalised"].any()):
        return values
    values = values.clone()
    add_biases(values, slots, records, lists)
    penalise(values, slots, records, lists)
    if masks is not None:
        values.masked_fill_(~allowed(torch.from_numpy(masks).to(values.device), values.shape[1]), -torch.inf)
    if rules is not None:
        keep_to(values, rules)
    if early.any():
        bar_ends(values, slots, records, early, lists)
    return values


@dataclass(frozen=True, slots=True)
class SomeRules:
    """`slots.Rules` of some of the rows."""

    kinds: NDArray[np.int8]
    starts: NDArray[np.int32]
    ids: NDArray[np.int32]


def rules_of(rules: Rules | None, first: int, end: int) -> SomeRules | None:
    """Those of the rows from `first` to `end`."""
    if rules is None:
        return None
    starts = rules.starts[first : end + 1]
    return SomeRules(rules.kinds[first:end], starts - starts[0], rules.ids[starts[0] : starts[-1]])


def keep_to(values: Tensor, rules: Rules) -> None:
    """Take away what the rows may not say."""
    rows, _ = pairs(np.diff(rules.starts))
    only = rules.kinds[rows] == ONLY
    ids = rules.ids[: len(rows)].astype(np.int64)
    kept_at = on(values, rows[only]), on(values, ids[only])
    kept = values[kept_at]
    values[on(values, np.flatnonzero(rules.kinds == ONLY))] = -torch.inf
    values[kept_at] = kept
    values[on(values, rows[~only]), on(values, ids[~only])] = -torch.inf


def add_biases(values: Tensor, slots: NDArray[np.int32], records: NDArray[Any], lists: Slots) -> None:
    rows, places = pairs(records["biases"])
    if len(rows):
        at = on(values, rows), on(values, lists.bias_ids.values[slots[rows], places].astype(np.int64))
        values[at] += on(values, lists.bias_values.values[slots[rows], places])


def penalise(values: Tensor, slots: NDArray[np.int32], records: NDArray[Any], lists: Slots) -> None:
    """See `cpu_edits.penalise`."""
    rows, places = pairs(records["seen"])
    if not len(rows):
        return
    at = on(values, rows), on(values, lists.seen_ids.values[slots[rows], places].astype(np.int64))
    counts = on(values, lists.seen_counts.values[slots[rows], places].astype(np.float32))
    repetition, presence, frequency = (
        on(values, records[name][rows]) for name in ("repetition", "presence", "frequency")
    )
    found = values[at]
    found = torch.where(found > 0, found / repetition, found * repetition)
    values[at] = torch.where(counts > 0, (found - frequency * counts) - presence, found)


def allowed(words: Tensor, vocabulary: int) -> Tensor:
    """bool [rows, vocabulary] from bits, int32 [rows, words]."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]


def bar_ends(
    values: Tensor, slots: NDArray[np.int32], records: NDArray[Any], early: NDArray[np.bool_], lists: Slots
) -> None:
    """Take end and stop tokens away from early rows, but for those that would be left with nothing."""
    stop_rows, places = pairs(np.where(early, records["stops"], 0))
    stops = lists.stops.values[slots[stop_rows], places]
    early_rows = np.flatnonzero(early)
    rows = np.concatenate([stop_rows, np.repeat(early_rows, len(lists.ends))])
    at = on(values, rows), on(values, np.concatenate([stops, np.tile(lists.ends, len(early_rows))]).astype(np.int64))
    before = values[at]
    values[at] = -torch.inf
    emptied = (values.amax(1) == -torch.inf)[at[0]]
    values[at] = torch.where(emptied, before, -torch.inf)


def pairs(lengths: NDArray[Any]) -> Pairs:
    """Row and place of every entry of lists that are so long."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) - np.repeat(starts, lengths)


def on(values: Tensor, array: NDArray[Any]) -> Tensor:
    """The array as a tensor beside the logits."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(values.device)


ONE_WEIGHT = 2.0**40
MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class Wanted:
    """What rows ask for, each a tensor [rows, 1] beside the logits. `most`: the largest top-k, 0 when one has none."""

    inverse: Tensor
    top_k: Tensor
    top_p: Tensor
    floor: Tensor
    units: Tensor
    most: int

    @classmethod
    def of(cls, records: NDArray[Any], units: NDArray[np.float64], device: torch.device) -> Wanted:
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


def drawn(values: Tensor, best: Tensor, asked: Wanted, sort: bool) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows]: where the weights, added up in the order of the tokens, pass `units` of their sum; and that
    sum, int64 [rows, 1].
    """
    best = best[:, None]
    found = orders(values)
    threshold = cut(found, best, asked, sort)
    reached = weights(values, best, asked.inverse).masked_fill_(found < threshold, 0).cumsum(1)
    total = reached[:, -1:]
    left = torch.minimum((asked.units * total.double()).long(), total - 1)
    tokens = torch.searchsorted(reached, left.contiguous(), right=True).squeeze(1).clamp_(max=values.shape[1] - 1)
    return tokens, total


def processed_of(values: Tensor, best: Tensor, tokens: Tensor, asked: Wanted, total: Tensor) -> Tensor:
    """float64 [rows]: see `cpu_draw.processed_of`."""
    above = values.gather(1, tokens[:, None]).double() - best[:, None].double()
    return (above * asked.inverse.double() - (total.double() / ONE_WEIGHT).log()).squeeze(1)


def cut(found: Tensor, best: Tensor, asked: Wanted, sort: bool) -> Tensor:
    """The order from which on tokens stay: int64 [rows, 1]. `sort`: top-k or top-p has a say."""
    floor = (orders((best.double() + asked.floor).float()) >> 32) << 32  # below every token of that logit
    return torch.maximum(floor, cut_sorted(found, best, asked)) if sort else floor


def cut_sorted(found: Tensor, best: Tensor, asked: Wanted) -> Tensor:
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


ROWS = 64  # at once: filters take some tens of bytes for each logit


class TorchPath:
    """Draws and log-probabilities over logits on any device. One call at a time."""

    def __init__(self, slots: Slots, vocabulary: int) -> None:
        self._slots, self._vocabulary = slots, vocabulary

    @torch.inference_mode()
    def draw(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        masks: NDArray[np.int32] | None,
        processed: NDArray[np.float64],
        rules: Rules | None = None,
    ) -> NDArray[np.int32]:
        """A token for each row, or BROKEN or EMPTY; noted in the slots. `processed` as `cpu.CpuPath.draw` fills it."""
        told = torch.zeros(len(processed), dtype=torch.float64, device=logits.device)
        parts = [
            self._some(
                logits[at : at + ROWS],
                slots[at : at + ROWS],
                None if masks is None else masks[at : at + ROWS],
                told[at : at + ROWS],
                rules_of(rules, at, at + ROWS),
            )
            for at in range(0, len(slots), ROWS)
        ]
        tokens = torch.cat(parts).cpu().numpy().astype(np.int32) if parts else np.zeros(0, np.int32)
        processed[:] = told.cpu().numpy()
        cpu_values.note_all(tokens, slots, self._slots.records, self._slots.lists())
        return tokens

    @torch.inference_mode()
    def logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: NDArray[np.int32], wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int32]]:
        """Ranks, log-probabilities and likeliest tokens: see `cpu_logprobs.logprob_rows`."""
        most, parts = int(wanted.max(initial=0)), []
        for at in range(0, len(rows), ROWS):
            values = logits[torch.from_numpy(rows[at : at + ROWS]).to(logits.device)]
            tokens = torch.from_numpy(chosen[at : at + ROWS].astype(np.int64)).to(logits.device)
            parts.append(logprobs(values.float(), tokens, most))
        if not parts:
            return np.zeros(0, np.int64), np.zeros((0, 1)), np.zeros((0, 0), np.int32)
        ranks, found, likeliest = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
        return ranks, found, likeliest

    def close(self) -> None:
        """Nothing to let go of."""

    def _some(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        masks: NDArray[np.int32] | None,
        processed: Tensor,
        rules: Rules | None,
    ) -> Tensor:
        """Tokens int64 [rows], for few enough rows."""
        values, records = logits.float(), self._slots.records[slots]
        broken = ~((values < torch.inf).all(1))
        values = edited(values, slots, records, masks, rules, self._slots)
        best = values.amax(1)
        if (records["inverse"] == 0).all():
            tokens = first_of(values, best)
        else:
            tokens = self._mixed(values, best, slots, records, processed)
        empty = tokens.new_tensor(EMPTY).where(best == -torch.inf, tokens)
        return tokens.new_tensor(BROKEN).where(broken, empty)

    def _mixed(
        self, values: Tensor, best: Tensor, slots: NDArray[np.int32], records: NDArray[Any], processed: Tensor
    ) -> Tensor:
        """Rows that take the likeliest token, and rows that draw, each by the cheapest way."""
        units = np.zeros(len(slots))
        cpu_draw.units(self._slots.records, slots, units)
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=values.device)
        sorts = ((records["top_k"] > 0) & (records["top_k"] < self._vocabulary)) | (records["top_p"] < 1)
        greedy = records["inverse"] == 0
        for chosen, way in ((greedy, "first"), (~greedy & sorts, "sort"), (~greedy & ~sorts, "draw")):
            if chosen.any():
                rows = torch.from_numpy(np.flatnonzero(chosen)).to(values.device)
                of_rows, best_of_rows = values[rows], best[rows]
                if way == "first":
                    tokens[rows] = first_of(of_rows, best_of_rows)
                else:
                    asked = Wanted.of(records[chosen], units[chosen], values.device)
                    tokens[rows], total = drawn(of_rows, best_of_rows, asked, way == "sort")
                    if len(processed):
                        processed[rows] = processed_of(of_rows, best_of_rows, tokens[rows], asked, total)
        return tokens
