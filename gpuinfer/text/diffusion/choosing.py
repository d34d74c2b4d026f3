"""Which decoder a request gets: by name, with its options; and what of the request this decoder cannot do."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from gpuinfer.config import blame, registry
from gpuinfer.config.options import Given, check
from gpuinfer.errors import BadPrompt, PluginError, UsageError
from gpuinfer.generation import Sampling, Unmasking
from gpuinfer.text.diffusion.deciding import UnmaskingDecoder

KEPT = 256  # decoders with different options: requests bring them, so there is a bound


def decoder_for(sampling: Sampling, default: str) -> UnmaskingDecoder:
    """The decoder that the request names, else the default one. Requests with the same options share it.

    Raises BadPrompt for an unknown one, for options that it does not have or take, for a threshold out of range or
    given to a decoder that has none, and for a logit bias where that would mean nothing.
    """
    asked = sampling.unmasking or Unmasking()
    name = asked.decoder or default
    try:
        decoder = made(name, json.dumps(dict(asked.options), sort_keys=True, default=str))
    except UsageError as error:
        raise BadPrompt(str(error)) from error
    if asked.threshold is not None:
        _check_threshold(decoder, asked.threshold)
    if sampling.logit_bias and not decoder.biased:
        raise BadPrompt(f"decoder '{name}' takes no logit_bias. Leave it out, or choose another decoder.")
    return decoder


def threshold_for(decoder: UnmaskingDecoder, asked: float | None) -> float:
    """What `View.threshold` is for who asks so."""
    given = decoder.default_threshold if asked is None else asked
    return 1.0 if given is None else float(given)


@functools.lru_cache(maxsize=KEPT)
def made(name: str, options: str) -> UnmaskingDecoder:
    """A decoder with these options, a JSON object. Raises UsageError; what its own `__init__` raises is a WorkError."""
    kind = registry.load("decoders", name)
    given: Mapping[str, Any] = json.loads(options)
    told = {key: Given(value, f"decoder option {key}") for key, value in given.items()}
    values = check(kind.Options, told, f"decoder '{name}'")
    with blame.calling(kind, "__init__"):
        decoder: UnmaskingDecoder = kind(kind.Options(**values))
    decoder.name = name
    return decoder


def with_threshold() -> list[str]:
    """The names of the decoders that have one, as far as they can be loaded."""
    found = []
    for name in registry.names("decoders"):
        try:
            kind = registry.load("decoders", name)
        except PluginError:
            continue
        if kind.default_threshold is not None:
            found.append(name)
    return found


def _check_threshold(decoder: UnmaskingDecoder, threshold: float) -> None:
    if decoder.default_threshold is None:
        raise BadPrompt(
            f"decoder '{decoder.name}' has no threshold. Leave it out, or choose {' or '.join(with_threshold())}."
        )
    if not (isinstance(threshold, int | float) and 0 <= threshold <= 1):  # a NaN is in no range
        raise BadPrompt(f"threshold is {threshold!r}. Give a number from 0 to 1.")
