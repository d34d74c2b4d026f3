"""A list between tags on its way into vLLM: it travels in `SamplingParams.extra_args`, as plain values.

The engine is started with `logits_processors=[processor_for(v2)]`; which of the two interfaces it takes depends on its
model runner: `VllmConfig.use_v2_model_runner`. Rows without a list cost nothing there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed

KEY, BEGUN = "gpuinfer_listed", "gpuinfer_listed_begun"
V1 = "gpuinfer.vllm.processor_v1:ListedProcessor"
V2 = "gpuinfer.vllm.processor_v2:ListedProcessor"


def processor_for(v2: bool) -> str:
    """What `logits_processors` names, as module:class, for an engine with the second model runner or without."""
    return V2 if v2 else V1


def extra_args(listed: Listed, begun: Sequence[int] = ()) -> dict[str, Any]:
    """What `SamplingParams.extra_args` holds for it: plain values, which JSON and msgpack have too.

    `begun`: the last tokens of the prompt are those that the answer has begun with elsewhere.

    Once the list is complete and the answer with it (`ends`), nothing but the request's stop tokens may come; where it
    has none, anything. Whoever reads the answer ends it with the list's last token, as our own engine does: a matcher
    of its own says when (`Language.matcher`).
    """
    found: dict[str, Any] = {KEY: msgspec.to_builtins(listed)}
    return found | ({BEGUN: list(begun)} if begun else {})


def begun_in(extra: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Raises `BadPrompt`."""
    try:
        return msgspec.convert((extra or {}).get(BEGUN, ()), tuple[int, ...])
    except msgspec.ValidationError as error:
        raise BadPrompt(f"`{BEGUN}` is no list of tokens: {error}. Give it as `extra_args` makes it.") from None


def listed_in(extra: Mapping[str, Any] | None) -> Listed | None:
    """The list in them, if there is one. Raises `BadPrompt` for one that is none."""
    given = (extra or {}).get(KEY)
    if given is None:
        return None
    try:
        return msgspec.convert(given, Listed)
    except msgspec.ValidationError as error:
        raise BadPrompt(f"`{KEY}` is no list between tags: {error}. Give it as `extra_args` makes it.") from None
