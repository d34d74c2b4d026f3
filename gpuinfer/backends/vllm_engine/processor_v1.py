"""Lists between tags as a logits processor of vLLM's first model runner. Rows are places in its batch, and move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from gpuinfer.backends.vllm_engine.list_constraints import ListedRows, validate_list

if TYPE_CHECKING:
    from torch import Tensor

PLACEHOLDER = -1  # a token that the device has not sent yet


@dataclass(slots=True)
class ListedRequest:
    """`output` is vLLM's own list, which grows; the list knows the first `known` of its tokens."""

    row: int
    output: list[int]
    known: int = 0


class ListedProcessor(LogitsProcessor):  # type: ignore[misc]
    @classmethod
    def validate_params(cls, params: Any) -> None:
        validate_list(params)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        count = 2 * int(vllm_config.scheduler_config.max_num_seqs)  # requests that leave and come in one step
        self._rows = ListedRows.of(vllm_config, count)
        self._free = list(range(count))
        self._requests: dict[int, ListedRequest] = {}  # by the place in the batch

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Before each step: requests that have left, come and moved, in this order."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._remove(self._requests.pop(place, None))
        for place, params, _, output in batch_update.added:
            self._remove(self._requests.pop(place, None))
            if params is not None and params.extra_args:
                self._add(place, params, output)
        for one, other, way in batch_update.moved:
            self._move(one, other, way == MoveDirectionality.SWAP)

    def apply(self, logits: Tensor) -> Tensor:
        """float32 [places, vocabulary], in place."""
        if not self._requests:
            return logits
        self._catch_up()
        here = [(place, one.row) for place, one in self._requests.items() if one.row in self._rows.listed]
        places, rows = np.array(here, np.int32).reshape(-1, 2).T
        return self._rows.apply(logits, np.ascontiguousarray(rows), np.ascontiguousarray(places))

    def _catch_up(self) -> None:
        """Append the tokens drawn since the last step: mostly one per row, in one call."""
        rows, tokens = [], []
        for one in self._requests.values():
            end = len(one.output)
            while end > one.known and one.output[end - 1] == PLACEHOLDER:
                end -= 1
            if end - one.known == 1:
                rows.append(one.row)
                tokens.append(one.output[one.known])
            elif end > one.known:
                self._rows.advance(one.row, one.output[one.known : end])
            one.known = max(end, one.known)
        if rows:
            self._rows.advance_each(np.array(rows, np.int32), np.array(tokens, np.int32))

    def _add(self, place: int, params: Any, output: list[int]) -> None:
        row = self._free.pop()
        if self._rows.begin(row, params):
            self._requests[place] = ListedRequest(row, output)
        else:
            self._free.append(row)

    def _remove(self, one: ListedRequest | None) -> None:
        if one is not None:
            self._rows.leave(one.row)
            self._free.append(one.row)

    def _move(self, one: int, other: int, swap: bool) -> None:
        first, second = self._requests.pop(one, None), self._requests.pop(other, None)
        if first is not None:
            self._requests[other] = first
        if second is not None and swap:
            self._requests[one] = second
        elif second is not None:
            self._remove(second)
