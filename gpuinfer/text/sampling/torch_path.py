"""From logits to tokens in torch operations: for CUDA devices, and to check the compiled kernels.

All rows of a call go through the same operations: their number depends on the options that occur, not on the rows. The
host sends all settings in one copy, and waits for the device once.

Values in a total order and weights in whole numbers, as `cpu_values` describes them and to the same bits: no result
depends on how a device groups its sums, nor on the other rows of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.cuda_graphs import event_behind
from gpuinfer.text.decoder import cpu_math
from gpuinfer.text.decoder.torch_batch import Uploads
from gpuinfer.text.sampling import cpu_draw, cpu_values
from gpuinfer.text.sampling.cpu_draw import ALL_BUT, BROKEN, EMPTY, ONLY
from gpuinfer.text.sampling.slot_settings import SamplingSlots, TokenRules

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # (row, place in the list of the row's slot)
Arrays = dict[str, NDArray[np.int64]]  # on their way to the device; of other formats the bits

ONE_WEIGHT = 2.0**40
MAGNITUDE = 0x7FFFFFFF
LOWEST_KEY = -(1 << 31)
LOGIT_BYTES = 32  # that filters take at most for each logit, beside the logits
WORK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 24}  # that filters take at once: more rows than fit go through in pieces. On
# a processor they are as small as its caches
KEY_DIGITS = ((21, 11), (10, 11), (0, 10))  # bits of a key behind each digit, and in it
WANTED = ("inverse", "top_k", "top_p", "floor")  # fields of a record that a draw goes by
EXP_TERMS = [float(getattr(cpu_math, f"C{power}")) for power in range(7, 1, -1)] + [1.0, 1.0]
LOG2_E, LEAST = float(cpu_math.LOG2_E), float(cpu_math.LEAST)
LN2 = float(np.float32(cpu_math.LN2_HIGH + cpu_math.LN2_LOW))


def pairs(lengths: NDArray[Any]) -> Pairs:
    """Row and place of every entry of lists that are so long."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) - np.repeat(starts, lengths)


def bits(values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers as int64: of floating point the bits of their float64, of integers themselves."""
    if values.dtype.kind == "f":
        found: NDArray[np.int64] = np.ascontiguousarray(values, np.float64).view(np.int64)
        return found
    return values.astype(np.int64)


# What changes single logits before a token is drawn


def edits_of(
    slots: NDArray[np.int32],
    records: NDArray[Any],
    masks: NDArray[np.int32] | None,
    rules: TokenRules | None,
    lists: SamplingSlots,
    vocabulary: int,
) -> Arrays:
    """What `edited` and `restricted` go by. Names that end in `_at` are places in the flat logits, row × vocabulary +
    token; arrays that would be empty are left out.
    """
    found: Arrays = {}
    if rules is not None:
        rows, _ = pairs(np.diff(rules.starts))
        at, kinds = rows * vocabulary + rules.ids[: len(rows)], rules.kinds[rows]
        found["only_rows"], found["only_at"] = np.flatnonzero(rules.kinds == ONLY), at[kinds == ONLY]
        found["barred_at"] = at[kinds == ALL_BUT]
    rows, places = pairs(records["biases"])
    found["bias_at"] = rows * vocabulary + lists.bias_ids.values[slots[rows], places]
    found["bias_values"] = bits(lists.bias_values.values[slots[rows], places])
    rows, places = pairs(records["seen"])
    found["seen_at"] = rows * vocabulary + lists.seen_ids.values[slots[rows], places]
    found["seen_counts"] = bits(lists.seen_counts.values[slots[rows], places])
    if len(rows):
        found |= {name: bits(records[name]) for name in ("repetition", "presence", "frequency")}
    if masks is not None:
        words = np.full((len(masks), -(-vocabulary // 64) * 2), -1, np.int32)
        words[:, : -(-vocabulary // 32)] = masks[:, : -(-vocabulary // 32)]
        found["masks"] = words.view(np.int64).ravel()
    early = records["drawn"] < records["min_tokens"]
    rows, places = pairs(np.where(early, records["stops"], 0))
    stops = rows * vocabulary + lists.stops.values[slots[rows], places]
    ends = (np.flatnonzero(early)[:, None] * vocabulary + lists.ends).ravel()
    found["early_at"] = np.concatenate([stops, ends])
    return {name: array for name, array in found.items() if len(array)}


def restricted(values: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    """A copy with nothing but a rule's tokens in rows that these alone may come in: others are not looked at, nor
    whether they are numbers.
    """
    if "only_rows" not in sent:
        return values
    flat = values.reshape(-1)
    found = values.index_fill(0, sent["only_rows"], -torch.inf)
    if "only_at" in sent:
        found.view(-1).index_copy_(0, sent["only_at"], flat[sent["only_at"]])
    return found


def edited(values: Tensor, sent: Mapping[str, Tensor]) -> Tensor:
    """The logits as they count: float32 [rows, vocabulary], a copy where anything is changed."""
    if not sent.keys() & {"bias_at", "seen_at", "masks", "barred_at", "early_at"}:
        return values
    values = values.clone(memory_format=torch.contiguous_format)
    flat = values.view(-1)
    if "bias_at" in sent:
        at = sent["bias_at"]
        flat[at] = flat[at] + sent["bias_values"].view(torch.float64).float()
    if "seen_at" in sent:  # see `cpu_values.penalise`
        at, counts = sent["seen_at"], sent["seen_counts"].float()
        rows = at.div(values.shape[1], rounding_mode="floor")
        repetition, presence, frequency = (
            sent[name].view(torch.float64).float()[rows] for name in ("repetition", "presence", "frequency")
        )
        found = flat[at]
        found = torch.where(found > 0, found / repetition, found * repetition)
        flat[at] = torch.where(counts > 0, (found - frequency * counts) - presence, found)
    if "masks" in sent:
        words = sent["masks"].view(torch.int32).view(len(values), -1)
        values.masked_fill_(~allowed(words, values.shape[1]), -torch.inf)
    if "barred_at" in sent:
        flat.index_fill_(0, sent["barred_at"], -torch.inf)
    if "early_at" in sent:  # end and stop tokens of early rows, but for those that would be left with nothing
        at = sent["early_at"]
        rows, before = at.div(values.shape[1], rounding_mode="floor"), flat[at]
        flat.index_fill_(0, at, -torch.inf)
        emptied = values.amax(1) == -torch.inf
        flat[at] = torch.where(emptied[rows], before, -torch.inf)
    return values


def allowed(words: Tensor, vocabulary: int) -> Tensor:
    """bool [rows, vocabulary] from bits, int32 [rows, words]."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]


# Draws


@dataclass(frozen=True)
class WantedDraws:
    """What rows want: `columns` int64 [5, rows] beside the logits, as `columns_of` has them; and whether top-k has a
    say in some row, and top-p.
    """

    columns: Tensor
    counts: bool
    masses: bool

    @classmethod
    def of(cls, records: NDArray[Any], units: NDArray[np.float64], device: torch.device) -> WantedDraws:
        """From the rows' records and their random numbers."""
        return cls.sent(torch.from_numpy(columns_of(records, units)).to(device), records)

    @classmethod
    def sent(cls, columns: Tensor, records: NDArray[Any]) -> WantedDraws:
        """From columns that are on the device already."""
        sampled = records["inverse"] != 0
        counts = bool(((records["top_k"] > 0) | ~sampled).any())
        return cls(columns, counts, bool(((records["top_p"] < 1) & sampled).any()))

    def of_rows(self, first: int, end: int) -> WantedDraws:
        """Those of the rows from `first` to `end`."""
        return WantedDraws(self.columns[:, first:end], self.counts, self.masses)

    @property
    def inverse(self) -> Tensor:
        """float32 [rows, 1], the inverse of the temperature."""
        return self._exact(0).float()

    @property
    def top_k(self) -> Tensor:
        """int64 [rows, 1]"""
        return self.columns[1, :, None]

    @property
    def top_p(self) -> Tensor:
        """float64 [rows, 1], as the next two."""
        return self._exact(2)

    @property
    def floor(self) -> Tensor:
        return self._exact(3)

    @property
    def units(self) -> Tensor:
        return self._exact(4)

    def _exact(self, column: int) -> Tensor:
        return self.columns[column, :, None].view(torch.float64)


def columns_of(records: NDArray[Any], units: NDArray[np.float64]) -> NDArray[np.int64]:
    """What a draw goes by: the fields WANTED, and `units`; int64 [5, rows]. A row that takes its likeliest token keeps
    one token, the first of the best.
    """
    greedy = records["inverse"] == 0
    plain = {"inverse": 1.0, "top_k": 1, "top_p": 1.0, "floor": -math.inf}
    return np.stack([*(bits(np.where(greedy, plain[name], records[name])) for name in WANTED), bits(units)])


def keys_of(values: Tensor) -> Tensor:
    """int32 that sort as the logits do."""
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0, which it equals
    return bits ^ ((bits >> 31) & MAGNITUDE)


def orders(values: Tensor) -> Tensor:
    """int64 [rows, vocabulary] that sort as the logits do, then lowest token first: see `cpu_values`."""
    places = torch.arange(values.shape[1], device=values.device)
    return (keys_of(values).long() << 32) | (MAGNITUDE - places)


def exponentials(x: Tensor) -> Tensor:
    """e^x of float32, x ≤ 0, to the bits of `cpu_math.exp` as it is compiled: each product is added to unrounded, and
    both parts of ln 2 are one number. In float64 such a product is exact. `x` is where they go.
    """
    rest = x.clamp_(min=LEAST).double()
    product = rest * LOG2_E
    powers = x.copy_(product.sub_(0.5)).int()
    rest.sub_(product.copy_(powers).mul_(LN2))
    rest.copy_(x.copy_(rest))  # rounds to float32
    x.fill_(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        torch.mul(rest, x, out=product)
        x.copy_(product.add_(term))
    return x.mul_(powers.add_(127).bitwise_left_shift_(23).view(torch.float32))


def weights(values: Tensor, best: Tensor, inverse: Tensor) -> Tensor:
    """int64, in units of 2^-40: see `cpu_values.weight_of`."""
    return exponentials((values - best).mul_(inverse)).mul_(ONE_WEIGHT).long()


def first_of(values: Tensor, best: Tensor) -> Tensor:
    """The lowest token of each row that has the best logit. Nothing says which of several `argmax` would take."""
    places = torch.arange(values.shape[1], device=values.device)
    return places.where(values == best[:, None], values.shape[1]).amin(1).clamp_(max=values.shape[1] - 1)


def drawn(values: Tensor, best: Tensor, wanted: WantedDraws) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows]: where the weights, added up in the order of the tokens, pass `units` of their sum; and that
    sum, int64 [rows].
    """
    best = best[:, None]
    amounts = weights(values, best, wanted.inverse)
    keys = keys_of(values)
    amounts.masked_fill_(~kept(keys, amounts, best, wanted), 0)
    reached = amounts.cumsum(1)
    total = reached[:, -1:]
    left = torch.minimum((wanted.units * total.double()).long(), total - 1)
    tokens = torch.searchsorted(reached, left.contiguous(), right=True).squeeze(1).clamp_(max=values.shape[1] - 1)
    return tokens, total.squeeze(1)


def kept(keys: Tensor, amounts: Tensor, best: Tensor, wanted: WantedDraws) -> Tensor:
    """bool [rows, vocabulary]: the tokens that top-k, top-p and min-p leave."""
    floor = keys_of((best.double() + wanted.floor).float())
    if not (wanted.counts or wanted.masses):
        return keys >= floor
    key, ties = last_kept(keys, amounts, wanted)
    ties = ties.masked_fill(floor > key, keys.shape[1])
    key = torch.maximum(floor, key)
    tied = keys == key
    return (keys > key) | (tied & (tied.cumsum(1) <= ties))


def last_kept(keys: Tensor, amounts: Tensor, wanted: WantedDraws) -> tuple[Tensor, Tensor]:
    """The least key of the tokens that top-k and top-p keep, int32 [rows, 1], and how many tokens of that key, the
    lowest, they keep at most; int64 [rows, 1].
    """
    vocabulary = keys.shape[1]
    key = torch.full_like(wanted.top_k, LOWEST_KEY, dtype=torch.int32)
    ties = torch.full_like(wanted.top_k, vocabulary)
    if wanted.counts:
        some = (wanted.top_k > 0) & (wanted.top_k < vocabulary)
        found, left = reaching(keys, None, wanted.top_k)
        key, ties = torch.where(some, found, key), torch.where(some, left, ties)
    if wanted.masses:
        total = torch.where(keys > key, amounts, 0).sum(1, keepdim=True)
        if wanted.counts:
            tied = keys == key
            total += torch.where(tied & (tied.cumsum(1) <= ties), amounts, 0).sum(1, keepdim=True)
        need = torch.minimum((wanted.top_p * total.double()).ceil().long().clamp_(min=1), total)
        found, left = reaching(keys, amounts, need)
        own = torch.where(keys == found, amounts, 0).amax(1, keepdim=True).clamp_(min=1)
        some = wanted.top_p < 1
        key = torch.where(some, found, key)
        ties = torch.where(some, (left + own - 1).div(own, rounding_mode="floor"), ties)
    return key, ties


def reaching(keys: Tensor, amounts: Tensor | None, need: Tensor) -> tuple[Tensor, Tensor]:
    """The largest key, int32 [rows, 1], such that the tokens from it on reach `need` in sum: of their `amounts`, or of
    1 each; and what those of that key have to add, int64 [rows, 1].

    It is found digit by digit, from the highest on, by the sums of all tokens that have the digits before: sums of
    whole numbers, which are the same in whatever order a device adds them.
    """
    found = torch.zeros_like(need, dtype=torch.int32)
    for shift, digits in KEY_DIGITS:
        sums = sums_by_digit(keys, amounts, found, shift, digits)
        reached = sums.flip(1).cumsum(1).flip(1)
        digit = ((reached >= need).sum(1, keepdim=True) - 1).clamp_(min=0)
        need = need - (reached - sums).gather(1, digit)
        found = digit.int() - (1 << 10) if shift == 21 else (found << digits) | digit.int()
    return found, need


def sums_by_digit(keys: Tensor, amounts: Tensor | None, found: Tensor, shift: int, digits: int) -> Tensor:
    """What the tokens add up to whose keys have the digits `found` before this one, by this digit: int64 [rows, 2 to
    the power of `digits`].
    """
    places = keys >> shift
    if shift == 21:
        places = (places + (1 << 10)).long()  # the highest digit has the sign
        added = torch.ones((), dtype=torch.int64, device=keys.device) if amounts is None else amounts
    else:
        before = places >> digits == found
        places = (places & ((1 << digits) - 1)).long()
        added = before.long() if amounts is None else torch.where(before, amounts, 0)
    sums = torch.zeros((len(keys), 1 << digits), dtype=torch.int64, device=keys.device)
    return sums.scatter_add_(1, places, added.expand(keys.shape))


# Results on the host


class Download:
    """A tensor's values on their way to the host, behind the work that has been queued until now."""

    def __init__(self, values: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._host = values
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._done = event_behind(values.device)

    @property
    def ready(self) -> bool:
        """Whether they have come."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def values(self) -> NDArray[Any]:
        """Once the device has come to them. Nothing else in this file waits for it."""
        if self._done is not None:
            self._done.synchronize()
        found: NDArray[Any] = self._host.numpy()
        return found


def to_host(values: Tensor) -> NDArray[Any]:
    """The tensor's values."""
    return Download(values).values()


def values_in(keys: NDArray[np.int64]) -> NDArray[np.float64]:
    """The logits of keys."""
    short = keys.astype(np.int32)
    found: NDArray[np.float32] = (short ^ ((short >> 31) & np.int32(MAGNITUDE))).view(np.float32)
    return found.astype(np.float64)


def log_total(total: int) -> float:
    """The logarithm of a sum of weights; 0 for that of a row without any."""
    return math.log(total / ONE_WEIGHT) if total > 0 else 0.0


class DrawMethod(Protocol):
    """What `drawn` and `weights` do, by other means: `drawn` takes `logit_bytes` for each logit beside the logits."""

    logit_bytes: int

    def drawn(self, values: Tensor, best: Tensor, wanted: WantedDraws) -> tuple[Tensor, Tensor]: ...
    def weights(self, values: Tensor, best: Tensor, inverse: Tensor) -> Tensor: ...


def described(values: Tensor, chosen: Tensor, most: int, weigh: Callable[..., Tensor] = weights) -> Tensor:
    """What log-probabilities are made of: int64 [rows, 4 + most], the chosen token's rank, 0 where a row has NaN, +inf
    or no finite value; the sum of the weights; keys of the best logit and the chosen one; orders of the likeliest.
    """
    best = values.amax(1, keepdim=True)
    sound = (values < torch.inf).all(1, keepdim=True) & (best > -torch.inf)
    total = weigh(values, best, torch.ones_like(best)).sum(1, keepdim=True)
    found = orders(values)
    own = found.gather(1, chosen[:, None])
    ranks = ((found > own).sum(1, keepdim=True) + 1) * sound
    return torch.cat([ranks, total, keys_of(best).long(), own >> 32, found.topk(most, dim=1).values], 1)


Described = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int32]]


def logprobs_of(found: NDArray[np.int64]) -> Described:
    """Ranks int64 [rows], log-probabilities float64 [rows, 1 + most], the likeliest int32 [rows, most], from what
    `described` has given.
    """
    ranks, totals, best, likeliest = found[:, 0], found[:, 1], found[:, 2], found[:, 4:]
    whole = values_in(best) + np.array([log_total(total) for total in totals.tolist()], np.float64)
    logits = values_in(np.concatenate([found[:, 3:4], likeliest >> 32], 1))
    tokens = (MAGNITUDE - (likeliest & 0xFFFFFFFF)).astype(np.int32)
    with np.errstate(invalid="ignore"):  # of rows without any finite value
        return ranks.copy(), logits - whole[:, None], tokens


def piece_of(logits: Tensor, logit_bytes: int = LOGIT_BYTES) -> int:
    """Rows that go through at once, where so much is taken for each logit."""
    return max(1, WORK_BYTES.get(logits.device.type, WORK_BYTES["cuda"]) // (logit_bytes * logits.shape[1]))


@dataclass(frozen=True, slots=True)
class DrawFindings:
    """What a draw has found: `codes` int32 [rows], tokens, or BROKEN or EMPTY; `processed` float64 [rows], or [0] if no
    row wants it; the log-probabilities of some rows, ascending, where any has a token and wants them.
    """

    codes: NDArray[np.int32]
    processed: NDArray[np.float64]
    rows: NDArray[np.int64]
    described: Described | None


@dataclass(frozen=True)
class QueuedDraw:
    """A draw that the device has yet to come to. `tokens` int64 [rows] lie there: tokens, or BROKEN or EMPTY."""

    path: TorchPath
    slots: NDArray[np.int32]
    records: NDArray[Any]  # of these slots, as they were
    tokens: Tensor
    download: Download
    processes: bool  # whether `processed` is wanted
    samples: bool  # whether sums come with the tokens
    wanting: NDArray[np.int64]  # rows that want log-probabilities
    most: int  # of the likeliest of each, at most

    @property
    def ready(self) -> bool:
        """Whether the device has come to it."""
        return self.download.ready

    def finish(self, kept: NDArray[np.bool_] | None) -> DrawFindings:
        """Wait for it. Tokens are noted in the slots of the rows that are `kept`; None: all are."""
        found, rows = self.download.values(), len(self.slots)
        codes = found[:rows].astype(np.int32)
        processed = np.zeros(rows if self.processes else 0)
        if self.processes and self.samples:
            processed = processed_of(found[rows : 4 * rows].reshape(3, rows), self.records, codes)
        described = None
        if (codes[self.wanting] >= 0).any():
            last = len(self.wanting) * (4 + self.most)
            described = logprobs_of(found[len(found) - last :].reshape(len(self.wanting), -1))
        self.path.note(codes, self.slots, kept)
        return DrawFindings(codes, processed, self.wanting, described)


class TorchPath:
    """Draws and log-probabilities over logits on any device. One call at a time.

    A draw waits for the device once, and sends it one copy at most; nothing when the rows want what they wanted in the
    draw before, as all do that take their likeliest token.
    """

    def __init__(self, slots: SamplingSlots, vocabulary: int, own: DrawMethod | None = None) -> None:
        self._slots, self._vocabulary = slots, vocabulary
        self._draw = drawn if own is None else own.drawn
        self._weigh = weights if own is None else own.weights
        self._logit_bytes = LOGIT_BYTES if own is None else own.logit_bytes
        self._uploads: Uploads | None = None
        self._last: tuple[NDArray[np.int64], Tensor] | None = None  # what was sent, and where it is

    @torch.inference_mode()
    def begin(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        masks: NDArray[np.int32] | None,
        processes: bool,
        rules: TokenRules | None = None,
    ) -> QueuedDraw:
        """Queue the draw of a token for each row. From now on the slots count one more."""
        rows, records = len(slots), self._slots.records[slots]
        arrays = edits_of(slots, records, masks, rules, self._slots, self._vocabulary)
        samples = bool(records["inverse"].any())
        if samples and rows:
            units = np.zeros(rows)
            cpu_draw.units(self._slots.records, slots, units)
            arrays["columns"] = columns_of(records, units).ravel()
        wanting = np.flatnonzero(records["logprobs"] >= 0)
        if 0 < len(wanting) < rows:
            arrays["logprob_rows"] = wanting
        sent = self._sent(arrays, logits.device)

        values = restricted(logits.float(), sent)
        broken = ~((values < torch.inf).all(1))
        values = edited(values, sent)
        best = values.amax(1)
        total = None
        if samples:
            tokens, total = self._drawn(values, best, WantedDraws.sent(sent["columns"].view(-1, rows), records))
        else:
            tokens = first_of(values, best)
        coded = tokens.masked_fill(best == -torch.inf, EMPTY).masked_fill(broken, BROKEN)
        parts = [coded]
        if processes and total is not None:
            own = values.gather(1, tokens[:, None]).squeeze(1)
            parts += [total, keys_of(best).long(), keys_of(own).long()]
        most = min(int(records["logprobs"].max(initial=-1)), self._vocabulary)
        if len(wanting):
            parts.append(self._described(logits, sent.get("logprob_rows"), tokens, most).flatten())
        download = Download(torch.cat(parts) if len(parts) > 1 else coded)
        self._slots.records["drawn"][slots] += 1
        return QueuedDraw(self, slots, records, coded, download, processes, samples, wanting, most)

    def note(self, codes: NDArray[np.int32], slots: NDArray[np.int32], kept: NDArray[np.bool_] | None) -> None:
        """These tokens have been drawn. `begin` has counted one for each row, which `note_all` does itself for rows
        that have a token; where there is nothing else to note, the count stands.
        """
        if kept is not None:
            codes, slots = codes[kept], slots[kept]
        if self._slots.penalised or (codes < 0).any():
            self._slots.records["drawn"][slots] -= 1
            cpu_values.note_all(codes, slots, self._slots.records, self._slots.lists())

    @torch.inference_mode()
    def logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: NDArray[np.int32], wanted: NDArray[np.int64]
    ) -> Described:
        """Ranks, log-probabilities and likeliest tokens: see `cpu_draw.logprob_rows`."""
        most = int(wanted.max(initial=0))
        if not len(rows):
            return np.zeros(0, np.int64), np.zeros((0, 1)), np.zeros((0, 0), np.int32)
        sent = self._sent({"rows": rows, "chosen": bits(chosen)}, logits.device)
        return logprobs_of(to_host(self._described(logits, sent["rows"], sent["chosen"], most, taken=True)))

    def close(self) -> None:
        """Nothing to let go of."""

    def _sent(self, arrays: Arrays, device: torch.device) -> dict[str, Tensor]:
        """Each array on the device, all in one copy, which is left out when they are those that were sent last."""
        if not arrays:
            return {}
        whole = np.concatenate(list(arrays.values()))
        if self._last is None or not np.array_equal(self._last[0], whole):
            self._uploads = self._uploads or Uploads(device)
            (there,) = self._uploads.sent([whole])
            self._last = whole, there
        parts = torch.split(self._last[1], [len(array) for array in arrays.values()])
        return dict(zip(arrays, parts, strict=True))

    def _drawn(self, values: Tensor, best: Tensor, wanted: WantedDraws) -> tuple[Tensor, Tensor]:
        """Tokens and totals, in as many pieces as memory calls for."""
        size = piece_of(values, self._logit_bytes)
        if len(values) <= size:
            return self._draw(values, best, wanted)
        parts = [
            self._draw(values[at : at + size], best[at : at + size], wanted.of_rows(at, at + size))
            for at in range(0, len(values), size)
        ]
        tokens, totals = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(totals)

    def _described(self, logits: Tensor, rows: Tensor | None, tokens: Tensor, most: int, taken: bool = False) -> Tensor:
        """See `described`, of some rows of the logits or all. `tokens` are of these rows alone if `taken`."""
        if rows is not None and not taken:
            tokens = tokens[rows]
        size, count, parts = piece_of(logits), len(tokens), []
        for at in range(0, count, size):
            values = logits[at : at + size] if rows is None else logits[rows[at : at + size]]
            parts.append(described(values.float(), tokens[at : at + size], most, self._weigh))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def processed_of(found: NDArray[np.int64], records: NDArray[Any], tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """float64 [rows], see `cpu_draw.processed_of`; from sums of weights, keys of best and of drawn logits."""
    best, own = values_in(found[1]), values_in(found[2])
    wants = (records["processed"] != 0) & (records["inverse"] != 0) & (tokens >= 0)
    logs = np.array([log_total(total) for total in found[0].tolist()])
    with np.errstate(invalid="ignore"):  # of rows that have no token
        return np.where(wants, (own - best) * records["inverse"].astype(np.float64) - logs, 0.0)
