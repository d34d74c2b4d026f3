"""Check on your own model that batched = alone, shared = own, compiled = plain, and gpuinfer = transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuinfer.cli import flags
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.cli.problems import CHECK_FAILED, PARTIAL
from gpuinfer.errors import UsageError
from gpuinfer.lab.network_options import is_network, network_spec
from gpuinfer.lab.verify.verify_setup import VerifyOptions, check_kind

if TYPE_CHECKING:
    from gpuinfer.lab.presenter import Page
    from gpuinfer.lab.verify.rows_verification import RowsVerification

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

Of a network of rows (blobnet, module:factory): the module alone with one row at
a time, in a batch, in the process of a run, through the central server and
through a fleet, with the largest difference of policy and value.

With --perplexity FILE no checks are made: what the model makes of this text is
measured, as it is, and with the options that are given, as -B weights=int8.

Exits 4 when a check does not hold.
"""


def execute(values: Mapping[str, Any]) -> int:
    """Verify, show, write. The exit code: 3 stopped, 4 when a check does not hold, else 0."""
    from gpuinfer.cli.building import setup_of
    from gpuinfer.cli.screen.display import show_page
    from gpuinfer.cli.workload import begin_run, progress_lines
    from gpuinfer.config import registry
    from gpuinfer.lab.verify.perplexity import PerplexityComparison, perplexity_page
    from gpuinfer.lab.verify.verification import Verification, verify_page

    merged, destination, options = begin_run(NAME, VerifyOptions, values)
    common = merged.common
    check_kind(options)
    setup = replace(setup_of(common), deterministic=options.deterministic)
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
    of_rows = is_network(options.model)
    if tuning.model_fields_set and not of_rows:
        name = min(tuning.model_fields_set)
        raise UsageError(f"-B {name} is for --perplexity here. Add --perplexity FILE, or leave it out.")
    verification: Verification | RowsVerification
    page_of: Callable[[dict[str, Any]], Page]
    if of_rows:
        from gpuinfer.lab.verify import rows_verification

        spec = network_spec(options, setup)
        given = {name: getattr(tuning, name) for name in tuning.model_fields_set}
        verification = rows_verification.RowsVerification(options, setup, spec, say, given)
        page_of = rows_verification.rows_page
    else:
        verification, page_of = Verification(options, setup, say=say), verify_page
    stopped = False
    with interruptible():
        try:
            verification.run()
        except KeyboardInterrupt:
            stopped = True
    document = verification.document()
    if verification.findings or not stopped:
        show_page(page_of(document), on_stderr=destination.stdout)
    destination.write(document)
    return CHECK_FAILED if not verification.holds else PARTIAL if stopped else 0


app = flags.command(NAME, flags.of(VerifyOptions, NAME), COMMON, TEXT, execute)
