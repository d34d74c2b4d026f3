"""What a request may say, under the names of OpenAI's API and of vLLM's; what a row of a file may say beside it; and
the bodies of requests that load adapters or update weights. Reading checks types and ranges; `requests` makes
prompts of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from gpuinfer.generation import MOST_GUIDANCE, MOST_LOGPROBS, MOST_PENALTY, MOST_REPETITION, MOST_TEMPERATURE

MOST_SAMPLES = 4096  # of one prompt
MOST_TOKENS = 1 << 30
MOST_DECODER_OPTIONS = 32

# The ranges of fields, here and in the flags of commands (`model_options`, `sampling_fields`)
TOKEN_ID = Meta(ge=0, lt=1 << 31)
COUNT = Meta(ge=0, le=MOST_TOKENS)
SOME = Meta(ge=1, le=MOST_TOKENS)
SHARE = Meta(ge=0, le=1)
POSITIVE_SHARE = Meta(gt=0, le=1)
TEMPERATURE = Meta(ge=0, le=MOST_TEMPERATURE)
TOP_K = Meta(ge=-1, lt=1 << 31)
REPETITION = Meta(gt=0, le=MOST_REPETITION)
PENALTY = Meta(ge=-MOST_PENALTY, le=MOST_PENALTY)
GUIDANCE = Meta(ge=0, le=MOST_GUIDANCE)
STOPS = Meta(max_length=64)
STOP_TOKENS = Meta(max_length=1024)

TokenId = Annotated[int, TOKEN_ID]
Some = Annotated[int, SOME]
Share = Annotated[float, SHARE]
Temperature = Annotated[float, TEMPERATURE]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Samples = Annotated[int, Meta(ge=1, le=MOST_SAMPLES)]
Logprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Penalty = Annotated[float, PENALTY]
Cache = Literal["none", "prefix", "dual", "vicinity", "exact"]
Words = Annotated[list[str], Meta(min_length=1, max_length=100_000)]
DecoderOptions = Annotated[dict[str, bool | int | float | str | None], Meta(max_length=MOST_DECODER_OPTIONS)]
Texts = str | list[int | str | list[int]]


class SchemaFormat(Struct, kw_only=True):
    """`json_schema` of a response format. `name` and `strict` change nothing: a schema always holds."""

    schema: dict[str, Any] | bool = True


class ResponseFormat(Struct, kw_only=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class ListedFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """A list between tags: see `generation.Listed`. An item is its text, which may stand once, or [unit, text]."""

    items: Annotated[list[str | tuple[str, str]], Meta(min_length=1, max_length=100_000)]
    begin: str | None = None
    end: str | None = None
    separator: str | None = None
    ends: bool | None = None


class Structured(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`, and lists between tags, which are ours."""

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: Words | None = None
    grammar: str | None = None
    listed: ListedFormat | None = None


class SamplingFields(Struct, kw_only=True):
    """How the answer is drawn, where that differs from the defaults. Null is as good as nothing."""

    max_tokens: Some | None = None
    max_completion_tokens: Some | None = None
    max_new_tokens: Some | None = None
    min_tokens: Annotated[int, COUNT] | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, TOP_K] | None = None
    top_p: Annotated[float, POSITIVE_SHARE] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, REPETITION] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], STOPS] | None = None
    stop_token_ids: Annotated[list[TokenId], STOP_TOKENS] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-1e6, le=1e6)]] | None = None
    logprobs: bool | Logprobs | None = None
    top_logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Words | None = None
    guided_grammar: str | None = None
    decoder: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    threshold: Share | None = None
    steps: Some | None = None
    block_length: Some | None = None
    cfg_scale: Annotated[float, GUIDANCE] | None = None
    cache: Cache | None = None
    decoder_options: DecoderOptions | None = None
    n: Samples | None = None
    truncate: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ServiceFields(SamplingFields, kw_only=True):
    """And what concerns a service and its speed, but no answer: passed over."""

    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    priority: Any = None
    request_id: Any = None
    cache_salt: Any = None


class UnsupportedFields(ServiceFields, kw_only=True):
    """And what the APIs know and is not to be had here. Null, false, empty or the usual value asks for nothing."""

    stream: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    audio: Any = None
    modalities: Any = None
    verbosity: Any = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Any = None


class InputRow(UnsupportedFields, kw_only=True, forbid_unknown_fields=True):
    """A row as it stands in the input: one of `prompt`, `prompt_token_ids`, `messages`; or a request of OpenAI's batch
    format, `custom_id`, `method`, `url` and `body`.
    """

    id: str | int | None = None
    prompt: Texts | None = None
    prompt_token_ids: list[TokenId] | None = None
    messages: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None  # goes into the answer as it is
    adapter: str | None = None  # `generation.Prompt.adapter`; "": none; a request names what it wants as `model`
    model: str | None = None  # which of several answers
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: Raw = Raw()


class RequestBody(UnsupportedFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to /v1/completions or /v1/chat/completions."""

    model: str | None = None
    prompt: Texts | None = None
    messages: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None  # the service's


class LooseRow(InputRow, kw_only=True, forbid_unknown_fields=False):
    """The same, and fields that we do not know are passed over."""


class LooseBody(RequestBody, kw_only=True, forbid_unknown_fields=False):
    """The same, and fields that we do not know are passed over."""


DRAWING = SamplingFields.__struct_fields__
OF_CHATS = ("tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
USUAL: dict[str, Any] = {  # of what is not to be had, the values that ask for nothing; false and empty ones go anywhere
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    **dict.fromkeys(("stream", "echo", "suffix", "functions", "web_search_options", "audio"), ()),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "bad_words"), ()),
}


Name = Annotated[str, Meta(min_length=1, max_length=128)]
Place = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadBody(Struct, forbid_unknown_fields=True):
    """An adapter of this name is loaded from a folder of the server's machine; under way or not, it takes the place of
    the one that the name means now.
    """

    lora_name: Name
    lora_path: Place
    version: Name | None = None  # none: the next whole number
    load_inplace: bool = True  # of vLLM: a name that is loaded already is loaded again
    lora_int_id: int | None = None  # of vLLM: not used
    model: Name | None = None  # of several in one server: whose


class UnloadBody(Struct, forbid_unknown_fields=True):
    """`policy` with all its versions, or one of them, `policy@7`."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=257)]
    lora_int_id: int | None = None
    model: Name | None = None


class UpdateBody(Struct, forbid_unknown_fields=True):
    """As `Backend.update`: other weights of the model, or with `adapter` those of an adapter."""

    version: Name
    weights: Place
    adapter: Name | None = None
    drain: bool = True
    model: Name | None = None


class FreeBody(Struct, forbid_unknown_fields=True):
    """As `Backend.free_memory`."""

    model: Name | None = None


CHANGES: Mapping[str, tuple[type[Struct], str]] = {
    "/v1/load_lora_adapter": (LoadBody, "Load an adapter, or another version of it."),
    "/v1/unload_lora_adapter": (UnloadBody, "Unload an adapter."),
    "/v1/update_weights": (UpdateBody, "Compute with other weights, or another adapter."),
    "/v1/free_memory": (FreeBody, "Give back memory that is kept and not in use."),
}
