"""`gpuinfer bench generate` with generators: our own, one prompt at a time and batched, beside transformers and vLLM.

What is compared there are programs, and not settings of ours; `--compare inprocess,central` compares as elsewhere.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuinfer.cli import flags
from gpuinfer.cli.comparison_end import (
    comparison_flag,
    concluded,
    logs_folder,
    printer,
)
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.cli.grid import whole_numbers
from gpuinfer.config import registry
from gpuinfer.errors import UsageError
from gpuinfer.lab.peers.peer_process import PEERS, PROGRAMS, pythons
from gpuinfer.serving.openai.sampling_fields import UNMASKING_FIELDS, UnmaskingOptions, unmasking_of

if TYPE_CHECKING:
    from gpuinfer.api import ModelSpec
    from gpuinfer.config.settings import Settings
    from gpuinfer.lab.bench.generators import Contest
    from gpuinfer.lab.bench.series import SeriesPlan

TARGET = "generate"
DEFAULT = tuple(PROGRAMS)
BATCH_SIZES = (1, 8, 16, 32, 64, 128)
NEW_TOKENS, REPEATS, MOST = 128, 3, 1 << 16
TAKEN = (
    "model",
    "download",
    "checkpoint",
    "meta",
    "input",
    "max_new_tokens",
    "mask_token_id",
    *UNMASKING_FIELDS,
)  # of the workload's flags
COMMON = ("device", "dtype", "seed", "json", "live", "quiet", "verbose", "config", "roofline")
NOT_HERE = ("seconds", "warmup", "apply")  # of bench's own flags

Values = Mapping[str, Any]


def named_generators(compare: Sequence[str] | None, values: Values) -> list[str]:
    """The generators that are to be compared; none when it is backends or settings."""
    from gpuinfer.cli.grid import parts

    if not compare:
        several = any(isinstance(value, str) and "," in value for value in values.values())
        return [] if several or values.get("backend") or values.get("input") else list(DEFAULT)
    names = [name for word in compare for name in parts(word)]
    return names if all(name in PROGRAMS for name in names) else []


def for_backends(values: Values, own: Values) -> dict[str, Any]:
    """The workload's flags, where backends or settings are compared: those of generators have names of their own."""
    if own["num_sequences"]:
        raise UsageError(
            "--num-sequences is for generators, and each row of --input is answered once. Add --compare batched, or "
            "leave it out."
        )
    if own["python"]:
        raise UsageError(f"--python is for {' and '.join(PEERS)}. Add --compare batched,vllm, or leave it out.")
    told = {"max_new_tokens": own["new_tokens"], "input": own["prompts"], "batch_size": own["batch_sizes"]}
    values = {**values, **{key: str(value) for key, value in told.items() if value is not None}}
    if values.get("input") == "-":
        raise UsageError("--input -: a comparison reads the prompts many times. Give a file.")
    return values


def execute(names: Sequence[str], values: Values, own: Values, folder: Path | None) -> dict[str, Any]:
    """Compare; the document. Raises `UsageError` when none of them can be had."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.lab.bench.generators import Generators
    from gpuinfer.lab.bench.generators_tables import generators_document
    from gpuinfer.lab.bench.series import SeriesPlan

    given = {key: value for key, value in values.items() if value is not None and value != [] and value != 0}
    more = {key: own[key] for key in NOT_HERE if own[key]}
    for key in {**given, **more}:
        if key not in (*TAKEN, *COMMON):
            raise UsageError(
                f"{flags.flag(key)} is no part of a comparison of generators, which all take the likeliest token and "
                "run to the end. Leave it out, or compare backends: --compare inprocess,central."
            )
    merged = merge(TARGET, values)
    log_to_people(merged.common.verbose)
    series_plan = SeriesPlan(own["repeats"], None, None, merged.common.seed, roofline=False, parity=False)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="gpuinfer-bench-") as scratch, interruptible():
        work = _work(names, merged, values, own, series_plan, Path(scratch))
        generators = Generators(work, series_plan, logs_folder(folder, Path(scratch)), printer(merged.common.quiet))
        outcome = generators.run()
        return generators_document(concluded(TARGET, outcome, series_plan, began), work, generators)


def _work(
    names: Sequence[str], merged: Settings, values: Values, own: Values, series_plan: SeriesPlan, scratch: Path
) -> Contest:
    """Everything checked: the model, the prompts, and that they fit."""
    from gpuinfer.api import Setup
    from gpuinfer.generation import Sampling
    from gpuinfer.lab.bench.generators import Contest, DrawnPrompts, needed
    from gpuinfer.serving.openai.model_options import check_with_model
    from gpuinfer.text.checkpoint import open_checkpoint

    given = merged.read_options("workloads", TARGET, registry.load("workloads", TARGET))
    sizes = list(BATCH_SIZES)
    if (text := own["batch_sizes"]) is not None:
        sizes = whole_numbers("batch-sizes", text, MOST, "1,8,64")
    spec = named_model(given)
    checkpoint = open_checkpoint(spec)
    sequences = own["num_sequences"]
    unmasking = unmasking_of(UnmaskingOptions(**{name: given[name] for name in UNMASKING_FIELDS if name in given}))
    if unmasking is not None:
        check_with_model(spec, Sampling(unmasking=unmasking))
    common = merged.common
    work = Contest(
        model=spec.name,
        names=names,
        batch_sizes=sizes,
        new_tokens=own["new_tokens"] or given.get("max_new_tokens") or NEW_TOKENS,
        prompts=benchmark_prompts(
            own["prompts"] or given.get("input"),
            checkpoint,
            DrawnPrompts(checkpoint.shape.vocabulary, checkpoint.shape.end_tokens, common.seed),
            needed(sequences or max(sizes), series_plan.repeats),
        ),
        setup=Setup(devices=common.devices, dtype=common.dtype, seed=common.seed),
        folder=_folder(checkpoint, scratch) if set(names) & set(PEERS) else None,
        weights=spec.weights,
        arguments=spec.arguments,
        unmasking=unmasking,
        pythons=pythons(own["python"] or []),
        command=spelled_generation(values),
        sequences=sequences,
    )
    refuse_long_prompts(work.prompts.longest, work.new_tokens, checkpoint.shape.positions, work.model)
    return work


def named_model(options: Mapping[str, Any]) -> ModelSpec:
    """The model that the workload's options name. Raises `UsageError` where they name none."""
    from gpuinfer.api import ModelSpec
    from gpuinfer.serving.openai.model_options import prepare_model

    chosen, meta = options.get("model") or options.get("checkpoint"), options.get("meta")
    if chosen is None:
        raise UsageError("bench generate needs a model. Give --model DIR, or --model tiny, which is built in.")
    if options.get("model"):
        prepare_model(str(chosen), options.get("download", False))
    arguments: dict[str, Any] = {"meta": str(meta)} if meta else {}
    if options.get("mask_token_id") is not None:
        arguments["mask_token"] = options["mask_token_id"]
    weights = None if options.get("model") else str(chosen)
    return ModelSpec(str(chosen), weights=weights, arguments=arguments, kind="text")


def refuse_long_prompts(longest: int, new_tokens: int, positions: int, model: str) -> None:
    """Raises `UsageError` where a prompt and its answer, in tokens, are longer than the model's context."""
    if longest + new_tokens > positions:
        raise UsageError(
            f"a prompt of {longest} tokens and {new_tokens} new ones do not fit into the {positions} positions of "
            f"{model}. Take a smaller --new-tokens, or shorter prompts."
        )


def spelled_generation(values: Values) -> str:
    """The flags that say what is run, as they were given."""
    own = ("model", "checkpoint", "meta", "input", "max_new_tokens", "mask_token_id", *UNMASKING_FIELDS)
    kept = (*own, "device", "dtype", "backend_options")
    given = ((key, one) for key in kept if values.get(key) for one in _several(values[key]))
    return "".join(f" {flags.SHORTS.get(key) or flags.flag(key)} {shlex.quote(str(one))}" for key, one in given)


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def benchmark_prompts(path: Any, checkpoint: Any, drawn: Any, most: int) -> Any:
    """The first `most` prompts of the file, or drawn ones."""
    from gpuinfer.lab.bench.generators import prompts_from_file
    from gpuinfer.text.language import open_language

    if path is None:
        return drawn
    return prompts_from_file(Path(path), open_language(checkpoint.language, checkpoint.shape), most)


def _folder(checkpoint: Any, scratch: Path) -> Path | None:
    """The model as others read it: its folder, or that of a built-in one, written now. None: there is no such thing."""
    from gpuinfer.text.checkpoint import save_folder

    if checkpoint.folder is not None:
        return Path(checkpoint.folder).resolve()
    with contextlib.suppress(UsageError):
        save_folder(checkpoint, scratch / "model")
        return scratch / "model"
    return None


def generators_flags() -> flags.Parameters:
    """The flags of `bench generate` alone."""
    sizes = ",".join(map(str, BATCH_SIZES))
    return {
        "batch_sizes": comparison_flag("batch_sizes", str | None, "N,N", f"Prompts at once. [default: {sizes}]"),
        "new_tokens": comparison_flag(
            "new_tokens", int | None, "N", f"Of each answer, no fewer and no more. [default: {NEW_TOKENS}]", min=1
        ),
        "num_sequences": comparison_flag(
            "num_sequences", int | None, "N", "Prompts of a run, in all. [default: its batch size]", min=1
        ),
        "ablate": comparison_flag(
            "ablate", bool, "", "What each part brings: our own, and without one part each.", default=False
        ),
        "prompts": comparison_flag("prompts", Path | None, "FILE", "Prompts, as of --input. [default: random tokens]"),
        "python": comparison_flag(
            "python", list[str] | None, "NAME=PATH", "A peer's own Python, vllm=PATH; repeatable."
        ),
    }
