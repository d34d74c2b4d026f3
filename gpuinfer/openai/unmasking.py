"""How masks are filled in, as flags, as fields of a row or a request, and how the one goes over the other.

Only diffusion models have masks; that another model is asked for none of it is said by whoever has the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from pydantic import Field, field_validator

from gpuinfer import api
from gpuinfer.errors import UsageError
from gpuinfer.generation import MOST_GUIDANCE, Unmasking
from gpuinfer.openai.schema import MOST_DECODER_OPTIONS, MOST_TOKENS, Drawing

Cache = Literal["none", "prefix", "dual", "vicinity", "exact"]
SAME = ("decoder", "steps", "block_length", "threshold", "cfg_scale", "cache")
FIELDS = (*SAME, "decoder_options")
USUAL_TOKENS = 128  # of a diffusion model's answer where nobody says: each step computes all of them
OF_A_DECODER = ("threshold", "options")  # another one reads them otherwise, or not at all


class UnmaskingOptions(api.Options):
    """How a diffusion model fills its masks in. What is not given is the model's own."""

    decoder: str | None = Field(
        None,
        description="of a diffusion model: which masks a step fills in [the model's]",
        json_schema_extra={"kind": "decoders"},
    )
    threshold: float | None = Field(None, ge=0, le=1, description="confidence from which a mask is filled in")
    steps: int | None = Field(None, ge=1, le=MOST_TOKENS, description="of a whole answer [one for each token]")
    block_length: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="tokens that are filled in together [the model's, or the whole answer]"
    )
    cfg_scale: float | None = Field(None, ge=0, le=MOST_GUIDANCE, description="classifier-free guidance [none]")
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
    """What the flags say; None: nothing. Raises `UsageError`."""
    said: dict[str, Any] = {name: value for name in SAME if (value := getattr(own, name)) is not None}
    if own.decoder_options:
        said["options"] = own.decoder_options
    if said.get("decoder") == "":
        raise UsageError("--decoder is empty. Name one (`gpuinfer plugins list` has them), or leave it out.")
    return over(None, said) if said else None


def asked(request: Drawing) -> dict[str, Any]:
    """The fields of `Unmasking` that a row or a request sets, by name."""
    found: dict[str, Any] = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    if request.decoder_options is not None:
        found["options"] = request.decoder_options
    return found


def over(base: Unmasking | None, said: Mapping[str, Any]) -> Unmasking:
    """`base` with what is `said` in its place, options key by key. Where that names another decoder, the threshold and
    the options of the one before are left out: they meant something else.
    """
    base, said = base or Unmasking(), dict(said)
    if said.get("decoder", base.decoder) != base.decoder:
        plain = Unmasking()
        base = msgspec.structs.replace(base, **{name: getattr(plain, name) for name in OF_A_DECODER})
    if "options" in said:
        said["options"] = {**base.options, **said["options"]}
    return msgspec.structs.replace(base, **said)
