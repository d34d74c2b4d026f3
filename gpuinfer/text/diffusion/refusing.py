"""What a model that goes from left to right cannot honour: whatever is said of masks."""

from __future__ import annotations

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Sampling, Unmasking
from gpuinfer.text.shape import Shape

NAMES = {"options": "decoder_options"}  # of fields that are called otherwise in a request


def refuse_masks(sampling: Sampling, shape: Shape) -> None:
    """Raises `BadPrompt`, which names the field, where masks are spoken of to a model that has none."""
    if sampling.unmasking is None or shape.masking is not None:
        return
    said = said_of_masks(sampling.unmasking)
    raise BadPrompt(
        f"{said} says how a diffusion model fills its masks in, and this is a {shape.family} model, which goes from "
        "left to right. Leave it out, or use a diffusion model."
    )


def said_of_masks(unmasking: Unmasking) -> str:
    """What is said of masks, by the name that a request has for it: the first of several."""
    plain, names = Unmasking(), Unmasking.__struct_fields__
    name = next((name for name in names if getattr(unmasking, name) != getattr(plain, name)), "")
    return f"`{NAMES.get(name, name)}`" if name else "`cfg_scale` or `decoder_options`"  # said, but nothing else
