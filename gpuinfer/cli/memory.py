"""What a model takes, part by part, and the largest batch that fits: estimated, and measured on some small batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.cli import flags
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.errors import UsageError
from gpuinfer.lab.memory.memory_options import MemoryOptions, memory_model

NAME = "memory"
COMMON = ("backend_options", "device", "dtype", "seed", "json", "quiet", "verbose", "config")
BACKEND = "inprocess"
TEXT = """What a model takes of memory, and the largest batch that fits.

Weights, caches, activations and what is needed beside them, at a batch size
(--batch-size; of a model of text, slots of --context tokens); and what some
small batches took in a process of its own, which may never take more than is
free. Nothing dies to find the largest batch.

A network of rows needs to know how large a row is: --game, or --features with
--actions and --seats. blobnet and blobnet-small have those of the game blob.
"""


def execute(values: Mapping[str, Any]) -> int:
    """Estimate, measure, show, write. Raises `UsageError` for a batch that does not fit."""
    from gpuinfer.backends.inprocess import OF_GRADIENTS
    from gpuinfer.cli.building import setup_of
    from gpuinfer.cli.screen.display import show_page
    from gpuinfer.cli.workload import begin_run, progress_lines
    from gpuinfer.config import registry
    from gpuinfer.lab.memory import memory_probe

    merged, destination, options = begin_run(NAME, MemoryOptions, values)
    common = merged.common
    backend = registry.load("backends", BACKEND)
    if not options.training:
        for name in OF_GRADIENTS:
            origin = merged.origin(f"backends.{BACKEND}.{name}")
            if origin.startswith("-B"):
                raise UsageError(f"{origin} has no effect without --training. Add --training, or leave it out.")
    own = backend.Options(**merged.options("backends", BACKEND, backend)).model_dump(mode="json")
    setup = setup_of(common)
    spec = memory_model(options, setup)
    how = "measuring small batches of" if options.probe else "looking at"
    progress_lines(NAME, common.quiet)(f"{how} '{spec.name}' in a process of its own")
    with interruptible():
        found = memory_probe.probe_memory(spec, setup, options, own)
    for page in memory_probe.memory_pages(found):
        show_page(page, on_stderr=destination.stdout)
    destination.write(found)
    return 0


app = flags.command(NAME, flags.of(MemoryOptions, NAME), COMMON, TEXT, execute)
