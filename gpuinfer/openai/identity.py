"""What tells the answers of one model from those of another, so that only the same one goes on with an output."""

from __future__ import annotations

import logging

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError

log = logging.getLogger(__name__)


def fingerprint(spec: ModelSpec) -> str:
    """What tells this model from others; its name where the checkpoint is not one that we read ourselves."""
    from gpuinfer.text.checkpoint import open_checkpoint

    try:
        return str(open_checkpoint(spec).fingerprint)
    except UsageError as error:
        log.info("no fingerprint of %s: %s", spec.name, error)  # a backend that cannot read it will say so
        return f"name {spec.name}"


def arithmetic(setup: Setup) -> str:
    """The number format that the model will be computed in here; what was asked for where there is no such device."""
    if setup.dtype != "bfloat16":
        return setup.dtype  # always, and known without importing torch
    from gpuinfer.text.arithmetic import computes_in_here

    try:
        return computes_in_here(setup)
    except UsageError as error:
        log.info(
            "no device %s: %s", ",".join(setup.devices), error
        )  # the backend will say so, if it is to compute there
        return setup.dtype
