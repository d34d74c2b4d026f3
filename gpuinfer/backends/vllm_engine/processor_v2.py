"""Lists between tags as a logits processor of vLLM's second model runner. Rows of requests are its slots.

The tokens of a request are on the device: new ones are copied from there. With speculative decoding a request has a row
for each proposed token: these are tried on a copy of its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from gpuinfer.backends.vllm_engine.list_constraints import ListedRows, mask_logits, validate_list
from gpuinfer.errors import BadPrompt

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class ListedProcessor(LogitsProcessor):  # type: ignore[misc]
    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        validate_list(sampling_params)

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        self._rows = ListedRows.of(vllm_config, int(req_states.max_num_reqs))
        self._known = np.zeros(
            int(req_states.max_num_reqs), np.int64
        )  # tokens of each answer that are appended to its list

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._known[req_idx] = 0
        return self._rows.begin(req_idx, sampling_params)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """float32 [rows, vocabulary], in place."""
        listed = self._rows.listed
        if not listed or listed.isdisjoint(ctx.idx_mapping_np.tolist()):
            return logits
        slots, ends = _host(ctx.expanded_idx_mapping), _host(ctx.pos) + 1
        depths = _host(ctx.expanded_local_pos)
        first = np.flatnonzero((depths == 0) & np.isin(slots, list(listed)))
        answers = ends[first] - self._states.prompt_len.np[slots[first]]  # tokens that the answer has
        first, answers = first[answers >= 0], answers[answers >= 0]  # negative: still in prefill
        self._catch_up(slots[first], answers)
        self._rows.apply(logits, slots[first], first.astype(np.int32))
        if len(slots) > len(ctx.idx_mapping_np):
            self._propose(logits, slots, depths, _host(ctx.input_ids), set(slots[first].tolist()))
        return logits

    def _catch_up(self, slots: NDArray[np.int32], answers: NDArray[np.int64]) -> None:
        """Append the tokens drawn since the last step: mostly one per row, in one call."""
        import torch

        tokens, device = self._states.all_token_ids.gpu, self._states.all_token_ids.gpu.device
        starts = self._states.prompt_len.np[slots] + self._known[slots]
        missing = answers - self._known[slots]
        one = missing == 1
        if one.any():
            at = [torch.from_numpy(part[one].astype(np.int64)).to(device) for part in (slots, starts)]
            self._rows.advance_each(slots[one], _host(tokens[at[0], at[1]]))
        for slot, start, count in zip(
            slots[missing > 1].tolist(), starts[missing > 1], missing[missing > 1], strict=True
        ):
            self._rows.advance(slot, _host(tokens[slot, int(start) : int(start + count)]).tolist())
        self._known[slots] = answers

    def _propose(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        depths: NDArray[np.int32],
        tokens: NDArray[np.int32],
        mine: set[int],
    ) -> None:
        """Mask the rows after proposed tokens, each as if the tokens before it were accepted. A token that the list
        refuses is never accepted, so the rows after it do not matter.
        """
        for rows in _requests(slots, depths):
            slot = int(slots[rows[0]])
            if slot not in mine or slot not in self._rows.listed:
                continue
            at = self._rows.at(slot)
            for row in rows[1:]:
                try:
                    at.advance(int(tokens[row]))
                except BadPrompt:
                    break
                mask_logits(logits, np.array([row], np.int32), at.walks.rules(np.zeros(1, np.int32)))


def _requests(slots: NDArray[np.int32], depths: NDArray[np.int32]) -> Iterator[list[int]]:
    """The rows of each request that has several, in order."""
    order = np.lexsort((depths, slots)).tolist()
    rows: list[int] = []
    for row in [*order, None]:
        if rows and (row is None or slots[row] != slots[rows[0]]):
            if len(rows) > 1:
                yield rows
            rows = []
        if row is not None:
            rows.append(row)


def _host(values: Tensor) -> NDArray[np.int32]:
    found: NDArray[np.int32] = values.cpu().numpy().astype(np.int32)
    return found
