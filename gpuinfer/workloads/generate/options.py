"""The options of `generate`, which are its flags."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.config import JsonDict

from gpuinfer import api
from gpuinfer.generation import MOST_LOGPROBS, MOST_PENALTY, MOST_REPETITION, MOST_TEMPERATURE
from gpuinfer.workloads.generate.asking import MOST_SAMPLES, MOST_TOKENS

REPEATABLE: JsonDict = {"repeatable": True}  # a flag that is given once for each value


class GenerateOptions(api.Options):
    """What `gpuinfer generate` takes; `[generate]` of gpuinfer.toml too."""

    model: str | None = Field(None, description="a folder with a checkpoint, or tiny or null, which are built in")
    checkpoint: Path | None = Field(None, description="a nanoGPT checkpoint, model.pt, instead of --model")
    meta: Path | None = Field(None, description="its characters: meta.pkl or meta.json")
    input: str | None = Field(None, description="prompts: JSONL or a JSON array; - is standard input")
    output: str = Field("-", description="answers, as JSONL; - is standard output")
    max_new_tokens: int = Field(128, ge=1, le=MOST_TOKENS, description="of each answer, at most")
    min_tokens: int = Field(0, ge=0, le=MOST_TOKENS, description="of each answer, before it may end")
    temperature: float = Field(1.0, ge=0, le=MOST_TEMPERATURE, description="0 takes the likeliest token")
    top_k: int = Field(0, ge=-1, lt=1 << 31, description="draw from so many likeliest tokens; 0: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest that make up this share")
    min_p: float = Field(0.0, ge=0, le=1, description="leave out what is less likely than this part of the likeliest")
    repetition_penalty: float = Field(
        1.0, gt=0, le=MOST_REPETITION, description="divides logits of tokens that were there"
    )
    presence_penalty: float = Field(
        0.0, ge=-MOST_PENALTY, le=MOST_PENALTY, description="off logits of tokens in the answer"
    )
    frequency_penalty: float = Field(0.0, ge=-MOST_PENALTY, le=MOST_PENALTY, description="the same, for each time")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the answers' texts")
    chat_template_kwargs: str | None = Field(
        None, description="JSON that the chat template reads: '{\"enable_thinking\": false}'"
    )
    stop: list[str] = Field(
        [], max_length=64, description="end the answer before this text; repeatable", json_schema_extra=REPEATABLE
    )
    stop_token_ids: list[int] = Field([], max_length=1024, description="end the answer after one of these: 1,2")
    ignore_eos: bool = Field(False, description="go on past the model's end token")
    num_samples: int = Field(1, ge=1, le=MOST_SAMPLES, description="answers to each prompt")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="log-probabilities of tokens, and of so many likeliest"
    )
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="the same of the prompt")
    json_schema: Path | None = Field(None, description="answers are JSON that fits the schema in this file")
    regex: str | None = Field(None, description="answers match this pattern")
    choice: list[str] = Field([], description="answers are one of these; repeatable", json_schema_extra=REPEATABLE)
    grammar: Path | None = Field(None, description="answers follow the grammar in this file: Lark or GBNF")
    truncate: Literal["left", "right"] | None = Field(
        None, description="what goes of a prompt that does not fit; without it the row is an error"
    )
    batch_size: int | None = Field(None, ge=1, le=1 << 20, description="rows at once [as memory allows]")
    context: int | None = Field(None, ge=1, le=MOST_TOKENS, description="tokens of prompt and answer [the model's]")
    token_ids: bool = Field(False, description="write the tokens of each answer too")
    timing: bool = Field(False, description="write how long each answer took")
    ordered: bool = Field(False, description="write answers in the order of the prompts")
    strict: bool = Field(True, description="a field that is not known makes its row an error")
    resume: bool = Field(False, description="go on with --output: what is done is not asked again")
    retry_errors: bool = Field(False, description="with --resume, ask rows again that ended with an error")
    test: bool = Field(False, description="three rows of a few tokens, to standard output; --output stays as it is")
    deterministic: bool = Field(False, description="the same bits for a row in any batch")
    trust_remote_code: bool = Field(False, description="run code that comes with a checkpoint; only with vllm")
