"""From what a row says about its answer to the fields of `Sampling` that it changes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Constraint, Rendering
from gpuinfer.workloads.generate.asking import DRAWING, Drawing, Format, Structured

SAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
    "logit_bias",
    "prompt_logprobs",
    "skip_special_tokens",
)
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")  # the first that is given counts
NOTHING = (None,) * len(DRAWING)
said = operator.attrgetter(*DRAWING)


def says_nothing(row: Drawing) -> bool:
    """Whether the row leaves everything to the flags; most do."""
    return bool(said(row) == NOTHING)


def changes(row: Drawing) -> dict[str, Any]:
    """The fields of `Sampling` that this row sets, by name. Raises `BadPrompt` for what contradicts itself."""
    found = {name: value for name in SAME if (value := getattr(row, name)) is not None}
    lengths = [value for name in LENGTHS if (value := getattr(row, name)) is not None]
    if lengths:
        found["max_tokens"] = lengths[0]
    if row.top_k is not None:
        found["top_k"] = max(0, row.top_k)  # -1: all, as vLLM has it
    if row.stop is not None:
        found["stop"] = (row.stop,) if isinstance(row.stop, str) else tuple(row.stop)
        if "" in found["stop"]:
            raise BadPrompt("`stop` holds an empty text, which would end every answer. Take it out.")
    if row.stop_token_ids is not None:
        found["stop_token_ids"] = tuple(row.stop_token_ids)
    if row.logprobs is not None or row.top_logprobs is not None:
        found["logprobs"] = _logprobs(row)
    return found | _constraint(row)


def rendering(row: Drawing, plain: Rendering) -> Rendering:
    """How the row's chat is written out, where that differs from the flags. Raises `BadPrompt`."""
    variables = {**plain.variables, **(row.chat_template_kwargs or {})}
    if row.reasoning_effort is not None:
        variables["reasoning_effort"] = row.reasoning_effort
    goes_on, begins = bool(row.continue_final_message), row.add_generation_prompt
    if goes_on and begins:
        raise BadPrompt(
            "`continue_final_message` goes on with the last message and `add_generation_prompt` begins a new one. "
            "Ask for one of them."
        )
    return Rendering(
        tools=tuple(row.tools) if row.tools else None,
        variables=variables,
        add_generation_prompt=not goes_on if begins is None else begins,
        continue_final_message=goes_on,
    )


def _logprobs(row: Drawing) -> int | None:
    """A number as completions have it, or yes and no beside `top_logprobs` as chats have it."""
    if row.logprobs is False:
        return None
    if row.logprobs is True or row.logprobs is None:
        return row.top_logprobs or 0
    return row.logprobs


def _constraint(row: Drawing) -> dict[str, Any]:
    found = list(_constraints(row))
    if len(found) > 1:
        raise BadPrompt("the row asks for more than one form of the answer. Keep one of them.")
    return {"constraint": found[0]} if found else {}


def _constraints(row: Drawing) -> Iterator[Constraint | None]:
    """None: any text, whatever the flags say."""
    if (form := row.response_format) is not None:
        yield _form(form)
    guided = Structured(
        json=row.guided_json, regex=row.guided_regex, choice=row.guided_choice, grammar=row.guided_grammar
    )
    for one in (row.structured_outputs, guided):
        if one is not None:
            yield from structured(one)


def _form(form: Format) -> Constraint | None:
    if form.type == "text":
        return None
    if form.type == "json_object":
        return Constraint(json_schema=True)
    if form.json_schema is None:
        raise BadPrompt("response_format says json_schema and gives none. Add json_schema, or say json_object.")
    return Constraint(json_schema=_schema(form.json_schema.schema))


def structured(wanted: Structured) -> Iterator[Constraint]:
    if wanted.json is not None:
        yield Constraint(json_schema=_schema(wanted.json))
    if wanted.regex is not None:
        yield Constraint(regex=wanted.regex)
    if wanted.choice is not None:
        yield Constraint(choice=tuple(wanted.choice))
    if wanted.grammar is not None:
        yield Constraint(grammar=wanted.grammar)


def _schema(given: Mapping[str, Any] | str | bool) -> Mapping[str, Any] | bool:
    """Raises `BadPrompt` for what is no schema, and for the one that nothing fits."""
    try:
        schema = msgspec.json.decode(given, type=dict[str, Any] | bool) if isinstance(given, str) else given
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadPrompt(f"the row's JSON schema is none: {error}. Give a schema as JSON.") from error
    if schema is False:
        raise BadPrompt("the row's JSON schema is false, which no answer fits. Give an object, or leave it out.")
    return schema
