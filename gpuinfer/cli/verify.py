"""Check on your own model that batched = alone, shared = own, compiled = plain, and gpuinfer = transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuinfer.cli import flags
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.cli.problems import CHECK_FAILED, PARTIAL
from gpuinfer.errors import UsageError
from gpuinfer.lab.verify.verify_setup import VerifyOptions

NAME = "verify"
BACKEND = "inprocess"
COMMON = ("backend_options", "device", "dtype", "seed", "json", "quiet", "verbose", "config")
TEXT = """Check on your own model that a prompt's answer does not depend on how it is asked.

Batched = alone, in any order, in any pages, in chunks = whole, with a shared
beginning = its own, several samples = one by one, CUDA graphs = eager, the
compiled decoder = plain torch, and gpuinfer = transformers where that is
installed.

Where two ways part, the two tokens and their logits on each side are shown: a
tie passes and is said, a fault fails.

With --perplexity FILE no checks are made: what the model makes of this text is
measured, as it is, and with the options that are given, as -B weights=int8.

Exits 4 when a check does not hold.
"""


def execute(values: Mapping[str, Any]) -> int:
    """Verify, show, write. The exit code: 3 stopped, 4 when a check does not hold, else 0."""
    from gpuinfer.api import Setup
    from gpuinfer.cli.screen.display import show_page
    from gpuinfer.cli.workload import begin_run, progress_lines
    from gpuinfer.config import registry
    from gpuinfer.lab.verify.perplexity import PerplexityComparison, perplexity_page
    from gpuinfer.lab.verify.verification import Verification, verify_page

    merged, destination, options = begin_run(NAME, VerifyOptions, values)
    common = merged.common
    setup = Setup(devices=common.devices, dtype=common.dtype, seed=common.seed, deterministic=options.deterministic)
    say = progress_lines(NAME, common.quiet)
    backend = registry.load("backends", BACKEND)
    tuning = backend.Options(**merged.options("backends", BACKEND, backend))
    if options.perplexity is not None:
        comparison = PerplexityComparison(options, setup, tuning, say)
        with interruptible():
            comparison.run()
        show_page(perplexity_page(comparison.document()), on_stderr=destination.stdout)
        destination.write(comparison.document())
        return 0
    if tuning.model_fields_set:
        name = min(tuning.model_fields_set)
        raise UsageError(f"-B {name} is for --perplexity here. Add --perplexity FILE, or leave it out.")
    verification = Verification(options, setup, say=say)
    stopped = False
    with interruptible():
        try:
            verification.run()
        except KeyboardInterrupt:
            stopped = True
    document = verification.document()
    if verification.findings or not stopped:
        show_page(verify_page(document), on_stderr=destination.stdout)
    destination.write(document)
    return CHECK_FAILED if not verification.holds else PARTIAL if stopped else 0


app = flags.command(NAME, flags.of(VerifyOptions, NAME), COMMON, TEXT, execute)
