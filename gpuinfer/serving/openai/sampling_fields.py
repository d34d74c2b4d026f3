"""From the fields of a request or a row to the changed fields of `Sampling`, `Rendering` and `Unmasking`; and the flags
of unmasking. Only diffusion models have masks: where the model is known, these fields are refused for another one.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from pydantic import Field, field_validator

from gpuinfer import api
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Constraint, Listed, Rendering, Sampling, Unmasking
from gpuinfer.serving.openai import schema
from gpuinfer.serving.openai.schema import DRAWING, MOST_DECODER_OPTIONS, Cache, SamplingFields, Structured

# The fields of a request that mean the same as those of `Sampling`; those that need a conversion are named below.
CONVERTED = frozenset({"max_tokens", "top_k", "stop", "stop_token_ids", "logprobs"})
SAMPLING_FIELDS = tuple(
    name for name in SamplingFields.__struct_fields__ if name in Sampling.__struct_fields__ and name not in CONVERTED
)
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")  # the first that is given counts
NOTHING = (None,) * len(DRAWING)
_values = operator.attrgetter(*DRAWING)


def is_default(request: SamplingFields) -> bool:
    """Whether the request sets none of these fields; most rows do not."""
    return bool(_values(request) == NOTHING)


def sampling_changes(request: SamplingFields) -> dict[str, Any]:
    """The fields of `Sampling` that the request sets, by name. Raises `BadPrompt` for contradictions."""
    found = {name: value for name in SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    lengths = [value for name in LENGTHS if (value := getattr(request, name)) is not None]
    if lengths:
        found["max_tokens"] = lengths[0]
    if request.top_k is not None:
        found["top_k"] = max(0, request.top_k)  # -1: all, as vLLM has it
    if request.stop is not None:
        found["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
        if "" in found["stop"]:
            raise BadPrompt("`stop` holds an empty text, which would end every answer. Take it out.")
    if request.stop_token_ids is not None:
        found["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.logprobs is not None or request.top_logprobs is not None:
        # completions give a number, chats yes or no beside `top_logprobs`
        wanted = request.logprobs
        chat = wanted is True or wanted is None
        found["logprobs"] = None if wanted is False else request.top_logprobs or 0 if chat else wanted
    constraints = list(_constraints(request))
    if len(constraints) > 1:
        raise BadPrompt("more than one form of the answer is asked for. Keep one of them.")
    return found | ({"constraint": constraints[0]} if constraints else {})


def requested_rendering(request: SamplingFields, plain: Rendering) -> Rendering:
    """How the request's chat is rendered, where that differs from the defaults. Raises `BadPrompt`."""
    variables = {**plain.variables, **(request.chat_template_kwargs or {})}
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    goes_on, begins = bool(request.continue_final_message), request.add_generation_prompt
    if goes_on and begins:
        raise BadPrompt(
            "`continue_final_message` goes on with the last message and `add_generation_prompt` begins a new one. "
            "Ask for one of them."
        )
    return Rendering(
        tools=tuple(request.tools) if request.tools else None,
        variables=variables,
        add_generation_prompt=not goes_on if begins is None else begins,
        continue_final_message=goes_on,
    )


def _constraints(request: SamplingFields) -> Iterator[Constraint | None]:
    """The forms that the request asks for. None: any text, whatever the defaults say."""
    if (form := request.response_format) is not None:
        if form.type == "json_schema" and form.json_schema is None:
            raise BadPrompt("response_format says json_schema and gives none. Add json_schema, or say json_object.")
        wanted = (
            {"type": "object"} if form.type == "json_object" or form.json_schema is None else form.json_schema.schema
        )
        yield None if form.type == "text" else Constraint(json_schema=_schema(wanted))
    guided = Structured(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
    )
    for one in (guided,) if request.structured_outputs is None else (request.structured_outputs, guided):
        if one.json is not None:
            yield Constraint(json_schema=_schema(one.json))
        if one.regex is not None:
            yield Constraint(regex=one.regex)
        if one.choice is not None:
            yield Constraint(choice=tuple(one.choice))
        if one.grammar is not None:
            yield Constraint(grammar=one.grammar)
        if (listed := one.listed) is not None:
            items = tuple((item, item) if isinstance(item, str) else item for item in listed.items)
            given = {name: getattr(listed, name) for name in ("begin", "end", "separator", "ends")}
            tags = {name: value for name, value in given.items() if value is not None}
            yield Constraint(listed=Listed(items=items, **tags))


def _schema(given: Mapping[str, Any] | str | bool) -> Mapping[str, Any] | bool:
    """Raises `BadPrompt` for what is no schema, and for the one that nothing fits."""
    try:
        found = msgspec.json.decode(given, type=dict[str, Any] | bool) if isinstance(given, str) else given
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadPrompt(f"the JSON schema is none: {error}. Give a schema as JSON.") from error
    if found is False:
        raise BadPrompt("the JSON schema is false, which no answer fits. Give an object, or leave it out.")
    return found


COPIED_FIELDS = tuple(name for name in SamplingFields.__struct_fields__ if name in Unmasking.__struct_fields__)
UNMASKING_FIELDS = (*COPIED_FIELDS, "decoder_options")
USUAL_TOKENS = 128  # of a diffusion model's answer, by default: each step computes all of them
OF_A_DECODER = ("threshold", "options")  # which mean something else to another decoder, or nothing


class UnmaskingOptions(api.Options):
    """How a diffusion model fills its masks in; by default as the model's configuration has it."""

    decoder: str | None = Field(
        None,
        description="of a diffusion model: which masks a step fills in [the model's]",
        json_schema_extra={"kind": "decoders"},
    )
    threshold: float | None = Field(
        None, ge=schema.SHARE.ge, le=schema.SHARE.le, description="confidence from which a mask is filled in"
    )
    steps: int | None = Field(
        None, ge=schema.SOME.ge, le=schema.SOME.le, description="of a whole answer [one for each token]"
    )
    block_length: int | None = Field(
        None,
        ge=schema.SOME.ge,
        le=schema.SOME.le,
        description="tokens that are filled in together [the model's, or the whole answer]",
    )
    cfg_scale: float | None = Field(
        None, ge=schema.GUIDANCE.ge, le=schema.GUIDANCE.le, description="classifier-free guidance [none]"
    )
    cache: Cache | None = Field(
        None, description="what a step does not compute anew [none; exact if blocks are causal]"
    )
    decoder_options: dict[str, Any] = Field(
        {},
        max_length=MOST_DECODER_OPTIONS,
        description="option of the decoder; repeatable",
        json_schema_extra={"repeatable": True, "short": "-D"},
    )

    @field_validator("decoder_options", mode="before")
    @classmethod
    def _of_words(cls, given: Any) -> Any:
        """`key=value`, as a command line has them."""
        return dict(map(_pair, given)) if isinstance(given, list) else given


def _pair(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not (key and equals):
        raise ValueError(f"not of the form key=value. Write -D {key or 'key'}=VALUE")
    try:
        return key.strip().replace("-", "_"), json.loads(value)
    except ValueError:
        return key.strip().replace("-", "_"), value


def unmasking_of(own: UnmaskingOptions) -> Unmasking | None:
    """The flags' values; None where none is given. Raises `UsageError`."""
    given: dict[str, Any] = {name: value for name in COPIED_FIELDS if (value := getattr(own, name)) is not None}
    if own.decoder_options:
        given["options"] = own.decoder_options
    if given.get("decoder") == "":
        raise UsageError("--decoder is empty. Name one (`gpuinfer plugins list` has them), or leave it out.")
    return override_unmasking(None, given) if given else None


def requested_unmasking(request: SamplingFields) -> dict[str, Any]:
    """The fields of `Unmasking` that a row or a request sets, by name."""
    found: dict[str, Any] = {name: value for name in COPIED_FIELDS if (value := getattr(request, name)) is not None}
    if request.decoder_options is not None:
        found["options"] = request.decoder_options
    return found


def override_unmasking(base: Unmasking | None, changes: Mapping[str, Any]) -> Unmasking:
    """`base` with these changes, options key by key. With another decoder the threshold and the options of the one
    before are left out: they meant something else.
    """
    base, changed = base or Unmasking(), dict(changes)
    if changed.get("decoder", base.decoder) != base.decoder:
        plain = Unmasking()
        base = msgspec.structs.replace(base, **{name: getattr(plain, name) for name in OF_A_DECODER})
    if "options" in changed:
        changed["options"] = {**base.options, **changed["options"]}
    return msgspec.structs.replace(base, **changed)
