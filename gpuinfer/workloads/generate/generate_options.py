"""The options of `generate`, which are its flags."""

from __future__ import annotations

from pydantic import Field

from gpuinfer import api
from gpuinfer.serving.openai.model_options import REPEATABLE, AdapterOptions, AnswerOptions, ModelOptions


class PlaceOptions(api.Options):
    """Where prompts come from, and where answers go."""

    prompt: list[str] = Field(
        [], description="a text to go on with, or FILE:PATH of one; repeatable", json_schema_extra=REPEATABLE
    )
    input: str | None = Field(None, description="prompts: JSONL, JSON, CSV, Parquet; - is standard input")
    prompt_column: str | None = Field(None, description="of a table: the prompts [prompt, messages or text]")
    output: str = Field("-", description="answers: JSONL, FILE.parquet, or FOLDER/; - is standard output")


class GenerateOptions(AnswerOptions, PlaceOptions, AdapterOptions, ModelOptions):
    """What `gpuinfer generate` takes; `[generate]` of gpuinfer.toml too."""

    batch_size: int | None = Field(None, ge=1, le=1 << 20, description="rows at once [as memory allows]")
    token_ids: bool = Field(False, description="write the tokens of each answer too")
    timing: bool = Field(False, description="write how long each answer took")
    ordered: bool = Field(False, description="write answers in the order of the prompts")
    strict: bool = Field(True, description="a field that is not known makes its row an error")
    resume: bool = Field(False, description="go on with --output: rows that have an answer are left out")
    retry_errors: bool = Field(False, description="with --resume, ask rows again that ended with an error")
    test: bool = Field(False, description="three rows of a few tokens, to standard output; --output stays as it is")
