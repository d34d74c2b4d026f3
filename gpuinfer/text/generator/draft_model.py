"""A smaller model of the same vocabulary that proposes what a larger one goes on with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Sampling
from gpuinfer.text.generator.page_pool import Ints, PagePool, pages_for
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.generator.speculation import NOTHING, Proposal, Proposer, StepTimes
from gpuinfer.text.language import Language
from gpuinfer.text.sampling import Sampler
from gpuinfer.text.transformer import Decoder, Shape, Step

if TYPE_CHECKING:
    from gpuinfer.text.text_options import TorchModelOptions

DRAFT_ROWS, FULL_ROWS = 16, 4  # rows that it proposes for in a step; pages for so many at full length
DRAFT_STEP_TOKENS = 512


def open_draft(
    name: str, setup: Setup, tuning: TorchModelOptions, device: torch.device, dtype: torch.dtype, length: int
) -> tuple[Decoder, Language]:
    """The decoder and the language of the draft `name`, for rows of up to `length` positions. Raises `UsageError`."""
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.checkpoint.memory_estimate import row_pages
    from gpuinfer.text.decoder import open_sized
    from gpuinfer.text.language import open_language

    checkpoint = open_checkpoint(ModelSpec(name=name, kind="text"))
    if checkpoint.shape.masking is not None:
        raise UsageError(f"the draft '{name}' is a diffusion model, which proposes no next token. Take another draft.")
    length = min(length, checkpoint.shape.positions)
    decoder, _ = open_sized(
        checkpoint,
        dtype,
        device,
        slots=min(tuning.slots or DRAFT_ROWS, DRAFT_ROWS),
        pages=FULL_ROWS * row_pages(length),
        length=length,
        threads=tuning.threads or 1,
        deterministic=setup.deterministic,
        compile=tuning.compile,
        graphs=tuning.graphs,
        step_tokens=DRAFT_STEP_TOKENS,
        sharing=setup.processes,
    )
    return decoder, open_language(checkpoint.language, checkpoint.shape)


def draft_memory(
    name: str, tuning: TorchModelOptions, device: torch.device, dtype: torch.dtype, length: int
) -> tuple[int, int]:
    """Bytes of the weights and of the cache of the draft that `open_draft` opens. Raises `UsageError`."""
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.checkpoint.memory_estimate import SPARE_PAGES, page_bytes, row_pages
    from gpuinfer.text.decoder import own_kernels

    checkpoint = open_checkpoint(ModelSpec(name=name, kind="text"))
    own = own_kernels(checkpoint.shape, dtype, device, tuning.compile)
    pages = FULL_ROWS * row_pages(min(length, checkpoint.shape.positions)) + (0 if own else SPARE_PAGES)
    return checkpoint.weight_bytes(dtype, None, own), pages * page_bytes(checkpoint.shape, dtype, own)


def refuse_other_vocabulary(name: str, draft: Language, own: Language, model: str) -> None:
    """Raises `UsageError` where the same number is another token for the draft than for the model."""
    number = draft.first_difference(own)
    if number is not None:
        raise UsageError(
            f"the draft '{name}' has another vocabulary than {model}: they differ in token {number}. Take a smaller "
            "model of the same family as a draft, or use -B speculate=lookup."
        )


def weight_values(shape: Shape) -> float:
    """Values of weights that a lone token meets, about."""
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    each = shape.hidden * (attention + (3 if shape.gated else 2) * max(shape.intermediate, 1))
    return float(shape.layers * each + shape.hidden * shape.vocabulary)


class DraftModel(Proposer):
    """Proposes what the draft draws at the same positions with the same random numbers: where its probabilities are
    like the model's, it mostly draws the same.

    Its cache is its own. A row's tokens go through it when proposals for the row are first wanted, and it goes on from
    there; what turned out otherwise is forgotten. A row that its pages have no room for has no proposals.
    """

    def __init__(self, table: SlotTable, decoder: Decoder, target: Decoder, *, seed: int, threads: int) -> None:
        self._table, self._decoder, self._target = table, decoder, target
        slots, vocabulary = table.slots, decoder.shape.vocabulary
        self._vocabulary = min(vocabulary, target.shape.vocabulary)
        self._pool = PagePool(decoder.pages)
        self._pages = np.zeros((slots, pages_for(decoder.length)), np.int32)
        self._held = np.zeros(slots, np.int32)
        self._tokens = np.zeros((slots, decoder.length), np.int32)  # that its cache holds, of which
        self._filled = np.zeros(slots, np.int32)  # so many count
        self._epoch = np.full(slots, -1, np.int64)  # of the row that they are of
        self._times, self._share = StepTimes(), weight_values(decoder.shape) / weight_values(target.shape)
        self._sampler = Sampler(slots, vocabulary, decoder.device, seed=seed, end_tokens=(), threads=threads)

    def step_share(self, rows: int, times: StepTimes) -> float:
        """How long each further token of so many rows takes to propose, as a share of a step of the model."""
        if not (self._times.known and times.known):
            return self._share
        one = np.array([max(1, rows)])
        return float(self._times.of(one)[0] / times.of(one)[0])

    def propose(self, slots: Ints, rooms: Ints) -> Sequence[Proposal]:
        self._release_gone()
        known = self._table.filled + 1
        rows: dict[int, int] = {}  # slot → tokens wanted of it
        for slot, room in zip(slots.tolist(), rooms.tolist(), strict=True):
            room = min(room, self._decoder.length - int(known[slot]) + 1)
            if room > 0 and len(rows) < self._decoder.slots and self._seated(slot, int(known[slot]) + room - 1):
                rows[slot] = room
        found: dict[int, list[int]] = {slot: [] for slot in rows}
        if rows:
            self._target.rest()
            self._caught_up(list(rows))
            self._draw(rows, found, known)
            self._decoder.rest()
        return [Proposal(np.array(found[slot], np.int32)) if found.get(slot) else NOTHING for slot in slots.tolist()]

    def close(self) -> None:
        """Free threads and memory."""
        self._sampler.close()
        self._decoder.close()

    def _release_gone(self) -> None:
        """The pages of rows that are gone are free."""
        for slot in np.flatnonzero((self._held > 0) & (self._epoch != self._table.epoch)).tolist():
            self._pool.free(self._pool.leave(self._pages[slot, : self._held[slot]]))
            self._held[slot] = self._filled[slot] = 0
            self._sampler.release(slot)

    def _seated(self, slot: int, positions: int) -> bool:
        """Whether the row in this slot has pages for so many positions; then what the cache holds is of its tokens."""
        more = pages_for(positions) - int(self._held[slot])
        row = self._table.rows[slot]
        if row is None or more > len(self._pool):
            return False
        if self._epoch[slot] != self._table.epoch[slot]:
            self._epoch[slot] = self._table.epoch[slot]
            prepared = row.work.prepared
            number = prepared.first_sample + row.number
            self._sampler.admit(slot, _plain(prepared.sampling), prepared.tokens, prepared.key, number)
        if more > 0:
            held = int(self._held[slot])
            self._pages[slot, held : held + more] = self._pool.take(more)
            self._held[slot] += more
        count = min(int(self._filled[slot]), int(self._table.filled[slot]))
        differs = self._tokens[slot, :count] != self._table.tokens[slot, :count]
        self._filled[slot] = int(differs.argmax()) if differs.any() else count
        return True

    def _caught_up(self, slots: Sequence[int]) -> None:
        """Take these rows so far that what is left of them goes through the draft in one step."""
        table, filled = self._table, self._filled
        while True:
            behind = {slot: int(table.filled[slot] - filled[slot]) for slot in slots}
            if sum(behind.values()) + len(slots) <= DRAFT_STEP_TOKENS:
                return
            room, runs = DRAFT_STEP_TOKENS, list[tuple[int, Ints]]()
            for slot, count in behind.items():
                count = min(count, room)
                if count:
                    runs.append((slot, table.tokens[slot, filled[slot] : filled[slot] + count]))
                    room -= count
            self._forward(runs)

    def _draw(self, rows: dict[int, int], found: dict[int, list[int]], known: Ints) -> None:
        """Draw as many tokens of each row as are wanted, or until it ends."""
        going = list(rows)
        runs = [(slot, self._table.tokens[slot, self._filled[slot] : known[slot]]) for slot in going]
        for slot in going:
            row = self._table.rows[slot]
            if row is not None:
                self._sampler.go_back(slot, int(known[slot]) - len(row.work.prepared.tokens))
        while going:
            began = time.perf_counter()
            logits = self._forward(runs)
            drawn = self._sampler.draw(logits, np.array(going, np.int32)).tokens.tolist()
            if len(going) == sum(len(tokens) for _, tokens in runs):
                self._times.took(len(going), time.perf_counter() - began)
            further = []
            for slot, token in zip(going, drawn, strict=True):
                if not 0 <= token < self._vocabulary:
                    continue
                found[slot].append(token)
                ended = self._table.ends[slot] and self._table.is_end[token]
                if len(found[slot]) < rows[slot] and not ended:
                    further.append(slot)
            going = further
            runs = [(slot, np.array(found[slot][-1:], np.int32)) for slot in going]

    def _forward(self, runs: Sequence[tuple[int, Ints]]) -> Tensor:
        """The logits of the last token of each run of (slot, tokens), which go behind what the cache has of the row."""
        slots = np.array([slot for slot, _ in runs], np.int32)
        lengths = np.array([len(tokens) for _, tokens in runs], np.int32)
        step = Step(
            np.concatenate([tokens for _, tokens in runs]).astype(np.int32),
            np.ascontiguousarray(self._pages[slots, : int(self._held[slots].max())]),
            self._filled[slots].copy(),
            lengths,
            (np.cumsum(lengths) - 1).astype(np.int32),
        )
        logits = self._decoder.forward(step)
        for slot, tokens in runs:
            start = int(self._filled[slot])
            self._tokens[slot, start : start + len(tokens)] = tokens
            self._filled[slot] = start + len(tokens)
        return logits


def _plain(sampling: Sampling) -> Sampling:
    """The same without what depends on more than the position, or is only noted."""
    changes: dict[str, Any] = {"logprobs": None, "processed_logprobs": False, "repetition_penalty": 1.0}
    return structs.replace(sampling, **changes, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0)
