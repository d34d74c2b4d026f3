"""`gpuinfer bench generate --ablate`: what each part of our own generator brings by itself on this machine."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuinfer.cli import flags
from gpuinfer.cli.bench_generators import (
    COMMON,
    MOST,
    NOT_HERE,
    TAKEN,
    TARGET,
    benchmark_prompts,
    named_model,
    refuse_long_prompts,
    spelled_generation,
)
from gpuinfer.cli.comparison_end import concluded, logs_folder, printer
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.cli.grid import whole_numbers
from gpuinfer.config import registry
from gpuinfer.errors import UsageError

if TYPE_CHECKING:
    from gpuinfer.config.settings import Settings
    from gpuinfer.lab.bench.ablation import Ablation

Values = Mapping[str, Any]
BACKEND = "inprocess"


def execute(values: Values, own: Values, folder: Path | None) -> dict[str, Any]:
    """Measure; the document. Raises `UsageError` for flags that are no part of it, and a model that it cannot take."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.lab.bench.ablation import AblationRuns, ablation_document
    from gpuinfer.lab.bench.series import SeriesPlan

    passed = {key: value for key, value in values.items() if value is not None and value != [] and value != 0}
    more = {key: own[key] for key in (*NOT_HERE, "compare", "python", "fail_under") if own[key]}
    for key in {**passed, **more}:
        if key not in (*TAKEN, *COMMON, "backend_options"):
            raise UsageError(f"{flags.flag(key)} is no part of --ablate, which compares our own parts. Leave it out.")
    merged = merge(TARGET, values)
    log_to_people(merged.common.verbose)
    series_plan = SeriesPlan(own["repeats"], None, None, merged.common.seed, roofline=False, parity=False)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="gpuinfer-bench-") as scratch, interruptible():
        work = _work(merged, values, own, series_plan.repeats)
        runs = AblationRuns(work, series_plan, logs_folder(folder, Path(scratch)), printer(merged.common.quiet))
        outcome = runs.run()
        return ablation_document(concluded(TARGET, outcome, series_plan, began), work, outcome)


def _work(merged: Settings, values: Values, own: Values, repeats: int) -> Ablation:
    """Everything checked: the model, the prompts, and which parts are at work."""
    from gpuinfer.api import Setup
    from gpuinfer.host import machine
    from gpuinfer.lab.bench import ablation
    from gpuinfer.models.device import resolve_device, resolve_dtype
    from gpuinfer.text.checkpoint import open_checkpoint
    from gpuinfer.text.decoder import own_kernels

    workload_options = merged.read_options("workloads", TARGET, registry.load("workloads", TARGET))
    options = merged.read_options("backends", BACKEND, registry.load("backends", BACKEND))
    if options.get("parallel", "data") != "data":
        raise UsageError(
            f"--ablate is for a model on one device, and parallel={options['parallel']} cuts it. Leave it out."
        )
    sizes = (
        [ablation.BATCH_SIZE]
        if own["batch_sizes"] is None
        else whole_numbers("batch-sizes", own["batch_sizes"], MOST, "8")
    )
    if len(sizes) > 1:
        raise UsageError("--ablate compares at one batch size. Give one: --batch-sizes 8.")
    spec, common = named_model(workload_options), merged.common
    checkpoint = open_checkpoint(spec, options.get("decoder"))
    shape = checkpoint.shape
    if shape.masking is not None:
        raise UsageError(
            "--ablate is for models that generate from left to right. Compare settings of this one instead."
        )
    sequences = own["num_sequences"] or sizes[0]
    new_tokens = own["new_tokens"] or workload_options.get("max_new_tokens") or ablation.NEW_TOKENS
    prompts = benchmark_prompts(
        own["prompts"] or workload_options.get("input"),
        checkpoint,
        ablation.drawn_prompts(shape.vocabulary, shape.end_tokens, common.seed, shape.positions - new_tokens),
        2 * sequences * repeats,
    )
    refuse_long_prompts(prompts.longest, new_tokens, shape.positions, spec.name)
    device, dtype = resolve_device(common.devices[0]), resolve_dtype(common.dtype)
    facts = ablation.Facts(
        device=device.type,
        cores=machine.cores(),
        kernels=device.type == "cuda" or own_kernels(shape, dtype, device, options.get("compile", False)),
        dtype=common.dtype,
        options=options,
        batch_size=sizes[0],
        alike=ablation.shared_beginning(prompts, sequences),
    )
    order = {
        "model": spec.name,
        "weights": spec.weights,
        "arguments": dict(spec.arguments),
        "options": options,
        "sampling": ablation.DRAWING,
        "dtype": common.dtype,
        "device": common.devices[0],
        "seed": common.seed,
        "rows": sizes[0],
        "length": prompts.longest + new_tokens,
    }
    parts = ablation.optimization_parts(facts)
    amounts = {
        "batch-sizes": own["batch_sizes"],
        "new-tokens": own["new_tokens"],
        "num-sequences": own["num_sequences"],
    }
    amount_flags = "".join(f" --{name} {amount}" for name, amount in amounts.items() if amount is not None)
    prompted = f" --prompts {own['prompts']}" if own["prompts"] else ""
    command = (
        f"gpuinfer bench generate{spelled_generation(values)}{prompted}{amount_flags} --repeats {repeats} --ablate"
    )
    setup = Setup(devices=common.devices, dtype=common.dtype, seed=common.seed)
    return ablation.Ablation(order, parts, prompts, sizes[0], sequences, new_tokens, setup, sys.executable, command)
