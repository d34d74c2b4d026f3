"""Embeddings of prompts: their tokens go through the decoder in steps of their own, in turn with those of answers. What
the decoder's last norm gives for them is pooled (Reimers and Gurevych 2019, "Sentence-BERT") and scaled to length 1.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BackendError, UsageError
from gpuinfer.models.out_of_memory import first_line
from gpuinfer.text.checkpoint.config_keys import read_json
from gpuinfer.text.generator.adapter_versions import weights_name
from gpuinfer.text.generator.page_pool import pages_for
from gpuinfer.text.generator.prompts import PromptWork
from gpuinfer.text.generator.slot_table import RowPages
from gpuinfer.text.transformer import Decoder, Step


class EmbeddingDecoder(Decoder, Protocol):
    """A decoder that gives out what its last norm computes."""

    def states(self, step: Step) -> NDArray[np.float32]:
        """[tokens, hidden] of all tokens of the step, whose `wanted` is not looked at; the cache is filled."""
        ...


@dataclass(slots=True, eq=False)
class _Pending:
    """One prompt. `pages` it has from its first step on."""

    work: PromptWork[Any]
    pages: list[int] = field(default_factory=list)
    done: int = 0  # tokens
    total: NDArray[np.float64] | None = None  # of the states until now


@dataclass(frozen=True, slots=True)
class EmbeddedStep:
    """What one step did: prompts that are done, with their vectors or errors, and what went through the decoder."""

    finished: list[tuple[PromptWork[Any], NDArray[np.float32] | Exception]]
    rows: int = 0
    tokens: int = 0


class EmbeddingQueue:
    """Prompts whose embeddings are wanted. All calls come from the thread that steps."""

    def __init__(self, decoder: Decoder, pages: RowPages, step_tokens: int, pooling: str) -> None:
        """`pooling`: of prompts that leave it to the model."""
        self._decoder, self._pages, self._step_tokens, self._pooling = decoder, pages, step_tokens, pooling
        self._waiting: dict[Hashable, _Pending] = {}  # by ticket
        self._careful = False  # a step has failed: one prompt at a time, to find which one it was

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: PromptWork[Any]) -> None:
        self._waiting[work.ticket] = _Pending(work)

    def cancel(self, ticket: Hashable) -> PromptWork[Any] | None:
        """The prompt, which is computed no further; None: there is none of this ticket."""
        one = self._waiting.pop(ticket, None)
        if one is None:
            return None
        self._leave(one)
        return one.work

    def restart(self, version: str) -> None:
        """The weights are of this version from now on: what is under way begins anew."""
        for one in self._waiting.values():
            one.done, one.total = 0, None
            one.work.versions = (weights_name(one.work.adapter, version),)

    def step(self) -> EmbeddedStep | None:
        """Compute as many tokens as one step takes. None: there are no pages for any, as rows have them."""
        chosen = self._chosen()
        if not chosen:
            return None
        chunks = [one.work.prepared.tokens[one.done : one.done + count] for one, count in chosen]
        width = max(len(one.pages) for one, _ in chosen)
        table = np.zeros((len(chosen), width), np.int32)
        for row, (one, _) in zip(table, chosen, strict=True):
            row[: len(one.pages)] = one.pages
        step = Step(
            np.ascontiguousarray(np.concatenate(chunks), np.int32),
            table,
            np.array([one.done for one, _ in chosen], np.int32),
            np.array([count for _, count in chosen], np.int32),
            np.zeros(0, np.int32),
            adapters=np.array([one.work.adapter_number for one, _ in chosen], np.int32),
        )
        try:
            states = self._decoder.states(step)  # type: ignore[attr-defined]  # `prompts.refuse_embedding` has asked
        except Exception as error:  # noqa: BLE001  of which prompt's making must be found out
            return EmbeddedStep(self._after_failure([one for one, _ in chosen], error.with_traceback(None)))
        finished: list[tuple[PromptWork[Any], NDArray[np.float32] | Exception]] = []
        first = 0
        for one, count in chosen:
            self._pool(one, states[first : first + count])
            first += count
            if one.done == len(one.work.prepared.tokens):
                finished.append((one.work, self._vector(one)))
                self._leave(one)
                del self._waiting[one.work.ticket]
        self._careful &= bool(self._waiting)
        return EmbeddedStep(finished, len(chosen), len(step.tokens))

    def _chosen(self) -> list[tuple[_Pending, int]]:
        """Who takes part, with how many tokens each; those that begin now get all of their pages.

        Half of a step is kept for the oldest prompt, so that it comes to its end. The rest goes to those with the
        fewest tokens left: a short text does not wait for long ones that came before it.
        """
        oldest, *others = self._waiting.values()
        if self._careful:
            others = []
        chosen, kept = list[tuple[_Pending, int]](), 0
        if self._has_pages(oldest):
            kept = min(self._left_of(oldest), -(-self._step_tokens // 2))
            chosen.append((oldest, kept))
        room = self._step_tokens - kept
        for one in sorted(others, key=self._left_of):
            if not room or len(chosen) == self._decoder.slots:
                break
            if self._has_pages(one):
                chosen.append((one, min(room, self._left_of(one))))
                room -= chosen[-1][1]
        if kept:
            chosen[0] = (oldest, min(self._left_of(oldest), kept + room))
        return chosen

    def _left_of(self, one: _Pending) -> int:
        """How many of its tokens are still to be computed."""
        return len(one.work.prepared.tokens) - one.done

    def _has_pages(self, one: _Pending) -> bool:
        """Whether it has its pages, now if not before."""
        wanted = pages_for(len(one.work.prepared.tokens))
        if not one.pages and wanted <= self._pages.available:
            one.pages = self._pages.take(wanted)
        return bool(one.pages)

    def _pool(self, one: _Pending, states: NDArray[np.float32]) -> None:
        """Token after token, so that it does not matter how they are shared out among steps."""
        pooling, begins = self._pooling_of(one), one.done == 0
        one.done += len(states)
        if pooling == "last":
            one.total = states[-1].astype(np.float64)
        elif pooling == "mean":
            before = np.zeros((1, states.shape[1])) if one.total is None else one.total[None]
            one.total = np.add.accumulate(np.concatenate([before, states]), axis=0)[-1]
        elif begins:
            one.total = states[0].astype(np.float64)

    def _pooling_of(self, one: _Pending) -> str:
        wanted = one.work.prepared.embed
        return self._pooling if wanted in (None, "model") else str(wanted)

    def _vector(self, one: _Pending) -> NDArray[np.float32] | Exception:
        """Of length 1: the mean's divisor does not show."""
        length = 0.0 if one.total is None else float(np.linalg.norm(one.total))
        if one.total is None or not np.isfinite(length) or not length:
            return BackendError("the model's states for this text are no numbers, or all zero. Check its weights.")
        return (one.total / length).astype(np.float32)

    def _after_failure(
        self, chosen: list[_Pending], error: Exception
    ) -> list[tuple[PromptWork[Any], NDArray[np.float32] | Exception]]:
        """The one that was alone has failed; several are tried again, one by one."""
        if len(chosen) > 1:
            self._careful = True
            return []
        (one,) = chosen
        self._leave(one)
        del self._waiting[one.work.ticket]
        cause = f"{type(error).__name__}: {first_line(error)}"
        return [(one.work, BackendError(f"the model failed on this text ({cause}). Leave it out, or report it."))]

    def _leave(self, one: _Pending) -> None:
        if one.pages:
            self._pages.give(one.pages)
            one.pages = []


POOLINGS = ("mean", "last", "first")
SENTENCE_POOLINGS = {"mean_tokens": "mean", "lasttoken": "last", "cls_token": "first"}


def pooling_of(folder: Path | None) -> str:
    """How a model's folder pools the states of a text, as sentence-transformers writes it down: one of `POOLINGS`, or
    the name of what is not computed here. A folder that says nothing is a decoder's: its last token has seen all.
    """
    if folder is None or not (folder / "modules.json").is_file():
        return "last"
    try:
        modules: Any = json.loads((folder / "modules.json").read_text("utf-8"))
        kinds = [str(one["type"]).rpartition(".")[2] for one in modules]
        places = [Path(one["path"]).name for one, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(f"{folder / 'modules.json'} cannot be read: {error}. Copy the model's folder again.") from None
    if other := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        return other[0]
    if not places:
        return "last"
    settings = read_json(folder / places[0] / "config.json")
    named = [name.removeprefix("pooling_mode_") for name, value in settings.items() if value is True]
    wanted = [name for name in named if name != "include_prompt"]
    return SENTENCE_POOLINGS.get(wanted[0], wanted[0]) if len(wanted) == 1 else " and ".join(wanted) or "none"
