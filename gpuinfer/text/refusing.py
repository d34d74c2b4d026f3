"""What would keep a model of text from being loaded, found before any other is: its files, and what is asked of it."""

from __future__ import annotations

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.models.device import resolve_devices
from gpuinfer.text.checkpoint import open_checkpoint, read_adapter
from gpuinfer.text.checkpoint.estimate import refuse_short
from gpuinfer.text.generator.setup import Options, asked, checked_context
from gpuinfer.text.stages.open_staged import places_for


def refuse_unloadable(spec: ModelSpec, setup: Setup, options: Options) -> None:
    """Raises `UsageError` for a model that is not there, a context that is longer than its own, pages for less than one
    row of it, more threads than cores, stages that its layers do not allow, and adapters that are not for it. Of the
    model's own files only headers are read.
    """
    checkpoint, devices = open_checkpoint(spec), resolve_devices(setup.devices)
    wanted = asked(spec, options, setup, devices[0], checkpoint.shape)
    refuse_short(wanted.pages, checked_context(checkpoint.shape, wanted.context))
    if options.parallel != "data":
        places_for(checkpoint, setup, options)
    for folder in (wanted.adapters or {}).values():
        read_adapter(checkpoint, folder)
