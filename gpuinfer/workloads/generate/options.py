"""The options of `generate`, which are its flags."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpuinfer import api
from gpuinfer.generation import MOST_LOGPROBS
from gpuinfer.openai.adapters import AdapterOptions
from gpuinfer.openai.options import REPEATABLE, DrawingOptions, ModelOptions
from gpuinfer.openai.schema import MOST_SAMPLES
from gpuinfer.openai.unmasking import UnmaskingOptions


class PlaceOptions(api.Options):
    """Where prompts come from, and where answers go."""

    prompt: list[str] = Field([], description="a text to go on with; repeatable", json_schema_extra=REPEATABLE)
    input: str | None = Field(None, description="prompts: JSONL or a JSON array; - is standard input")
    output: str = Field("-", description="answers, as JSONL; - is standard output")


class GenerateOptions(UnmaskingOptions, DrawingOptions, PlaceOptions, AdapterOptions, ModelOptions):
    """What `gpuinfer generate` takes; `[generate]` of gpuinfer.toml too."""

    num_samples: int = Field(1, ge=1, le=MOST_SAMPLES, description="answers to each prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="log-probabilities of tokens, and of so many likeliest"
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="the same of the prompt")
    truncate: Literal["left", "right"] | None = Field(
        None, description="what goes of a prompt that does not fit; without it the row is an error"
    )
    batch_size: int | None = Field(None, ge=1, le=1 << 20, description="rows at once [as memory allows]")
    token_ids: bool = Field(False, description="write the tokens of each answer too")
    timing: bool = Field(False, description="write how long each answer took")
    ordered: bool = Field(False, description="write answers in the order of the prompts")
    strict: bool = Field(True, description="a field that is not known makes its row an error")
    resume: bool = Field(False, description="go on with --output: what is done is not asked again")
    retry_errors: bool = Field(False, description="with --resume, ask rows again that ended with an error")
    test: bool = Field(False, description="three rows of a few tokens, to standard output; --output stays as it is")
