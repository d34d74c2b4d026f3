"""Generate: the workload that reads prompts, asks a model to go on with each, and writes the answers down."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer import errors
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.config import registry
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.following import followed
from gpuinfer.workloads.generate import output, reading
from gpuinfer.workloads.generate.answers import Writer
from gpuinfer.workloads.generate.asked import Defaults, Reader
from gpuinfer.workloads.generate.defaults import check, rendering, sampling
from gpuinfer.workloads.generate.naming import Namer
from gpuinfer.workloads.generate.options import GenerateOptions
from gpuinfer.workloads.generate.output import Output, open_output
from gpuinfer.workloads.generate.pump import Pump, Tally
from gpuinfer.workloads.generate.reading import Source

TEST_ROWS = 3

log = logging.getLogger(__name__)


class Generate(Workload):
    """Answer a file of prompts: each row once, the same answer in any company, and all of it kept when the run ends."""

    class Options(GenerateOptions):
        """They stand in a file of their own."""

    options: Options
    goes_on_by, writes_to = ("resume", "retry_errors"), ("output",)
    max_failures = 1.0  # a row that fails says so in its answer, and where all do the run has failed anyway

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        own = self.options
        self.target = "-" if own.test else own.output
        self._check_model()
        self._check_files()
        self.sampling, self.rendering = sampling(own), rendering(own)
        if own.retry_errors and not own.resume:
            raise UsageError("--retry-errors goes on with an output that is there. Add --resume.")

    def _check_model(self) -> None:
        own = self.options
        if (own.model is None) == (own.checkpoint is None):
            both = "generate takes a --model or a --checkpoint, and not both" if own.model else "generate needs a model"
            raise UsageError(f"{both}. Give --model DIR, --model tiny, or --checkpoint model.pt --meta meta.json.")
        if own.meta is not None and own.checkpoint is None:
            raise UsageError("--meta belongs to a nanoGPT checkpoint. Add --checkpoint model.pt, or leave --meta out.")
        for flag, file in (("checkpoint", own.checkpoint), ("meta", own.meta)):
            if file is not None and not file.is_file():
                raise UsageError(f"--{flag}: there is no file '{file}'. Give one that exists.")
        if own.trust_remote_code and "vllm" not in registry.names("backends"):
            raise UsageError(
                "--trust-remote-code: code that comes with a checkpoint is never run here, only through the backend "
                "vllm, which is not installed. Leave the flag out, or install that backend and add --backend vllm."
            )

    def _check_files(self) -> None:
        own = self.options
        if own.input is None:
            raise UsageError("generate needs prompts. Give --input FILE, or --input - for standard input.")
        reading.check(own.input)
        output.check(self.target, own.input, own.resume and not own.test)

    def trial(self, setup: Setup, **changes: Any) -> Generate | None:
        """The prompts from the first on, to nowhere. None where they can be read only once."""
        own = self.options
        if own.test or not Path(own.input or "-").is_file():
            return None
        nowhere = {"output": os.devnull, "resume": False, "retry_errors": False}
        return Generate(setup, **{**own.model_dump(), **nowhere, **changes})

    @property
    def _source_name(self) -> str:
        return "standard input" if self.options.input == "-" else str(self.options.input)

    @property
    def writes_stdout(self) -> bool:
        return self.target == "-"

    @property
    def deterministic(self) -> bool:
        return self.options.deterministic

    def model(self) -> ModelSpec:
        own = self.options
        wanted = {
            "slots": own.batch_size,
            "context": own.context,
            "meta": own.meta and str(own.meta),
            "trust_remote_code": own.trust_remote_code or None,
        }
        return ModelSpec(
            name=own.model or str(own.checkpoint),
            weights=str(own.checkpoint) if own.checkpoint else None,
            arguments={name: value for name, value in wanted.items() if value is not None},
            kind="text",
        )

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        own = self.options
        opening = asyncio.create_task(asyncio.to_thread(self._open))
        waiting = asyncio.create_task(ended(opening))  # a thread cannot be cancelled, and leaves things open
        async for _ in followed(waiting, infer.stopping):
            yield Progress(0, note="reading what is done" if own.resume else "opening the model", setup=True)
        await ended(opening)
        source, target, settings = opening.result()
        try:
            if not waiting.cancelled():
                async for progress in self._answer(infer, source, target, settings):
                    yield progress
        finally:
            source.close()
            target.close()

    def _open(self) -> tuple[Source, Output, dict[str, Any]]:
        """Everything that may take a while before the first row: the model's fingerprint, and what is done."""
        own = self.options
        settings = self.deciding_settings()
        check(self.model(), self.sampling)
        target = open_output(
            self.target,
            {**settings, **self.form()},
            resume=own.resume and not own.test,
            retry=own.retry_errors,
            ordered=own.ordered,
        )
        try:
            return Source(own.input or "-"), target, settings
        except BaseException:
            target.close()
            raise

    async def _answer(
        self, infer: Infer, source: Source, target: Output, settings: Mapping[str, Any]
    ) -> AsyncIterator[Progress]:
        loading = asyncio.create_task(loaded(infer))
        async for _ in followed(loading, infer.stopping):
            yield Progress(0, note="loading the model", setup=True)
        if loading.cancelled():
            return
        own = self.options
        pump = Pump(
            infer,
            source,
            target,
            Reader(Defaults(self.sampling, self.rendering, own.num_samples, own.truncate, own.strict)),
            Namer(settings),
            Writer(token_ids=own.token_ids, timing=own.timing, model=self.model().name),
            ordered=own.ordered,
            most=TEST_ROWS if own.test else None,
        )
        counting = asyncio.create_task(asyncio.to_thread(source.lines))
        yield self._progress(pump, counting)  # the run's clock starts
        running = asyncio.create_task(pump.run())
        try:
            async for _ in followed(running, infer.stopping):
                yield self._progress(pump, counting)
            if not running.cancelled():
                target.finish()
            else:
                self._say_stopped(pump)
        except BaseExceptionGroup as group:
            raise errors.unwrap(group) from group
        finally:
            source.stop()
            await asyncio.wait({counting})
        self._say_failures(pump.tally)
        yield self._progress(pump, counting)

    def _progress(self, pump: Pump, counting: asyncio.Task[int | None]) -> Progress:
        tally, total = pump.tally, None
        if tally.ended:
            total = tally.read
        elif not self.options.test and pump.splitter.by_lines and counting.done() and (lines := counting.result()):
            total = max(lines, tally.read)
        names = ("input_tokens", "output_tokens", "cached_tokens")
        return Progress(
            tally.done,
            total,
            "rows",
            counts={name: getattr(tally, name) for name in names},
            facts={"rows_outstanding": pump.under_way},
            note=f"{tally.failed} rows with errors" if tally.failed else "",
            before=tally.before,
            failed=tally.failed,
        )

    def _say_stopped(self, pump: Pump) -> None:
        if output.is_stream(self.target):
            return
        if not pump.tally.done and not pump.waiting:
            log.warning("stopped before the first answer. Run the same command again.")
            return
        early = (
            f" ({pump.waiting} that wait for an earlier one: in {self.target}{output.EARLY})" if pump.waiting else ""
        )
        log.warning(
            "stopped; what was answered is in %s%s. Run the same command with --resume to go on.", self.target, early
        )

    def _say_failures(self, tally: Tally) -> None:
        """Raises `WorkError` when not one row was answered."""
        if tally.ended and not tally.read:
            log.warning("no prompts in %s: nothing was asked", self._source_name)
        if tally.first_failure is None:
            return
        said = f"The first says: {tally.first_failure}"
        if not tally.answered and tally.failed == tally.done and tally.ended:
            raise WorkError(f"not one of {tally.failed} rows was answered. {said}")
        cure = "" if output.is_stream(self.target) else " With that mended, run again with --resume --retry-errors."
        log.warning("%d of %d rows ended with an error. %s%s", tally.failed, tally.done, said, cure)

    def deciding_settings(self) -> dict[str, Any]:
        """All that decides what an answer is: what a row's digest covers beside the row."""
        own = self.options
        return {
            **msgspec.to_builtins(self.sampling),
            **{name: getattr(own, name) for name in ("num_samples", "truncate", "context", "deterministic")},
            "chat_template_kwargs": dict(self.rendering.variables),
            "seed": self.setup.seed,
            "dtype": self.setup.dtype,
            "computes_in": arithmetic(self.setup),
            "model": fingerprint(self.model()),
        }

    def form(self) -> dict[str, Any]:
        """How answers are written: one output has one form."""
        return {name: getattr(self.options, name) for name in ("token_ids", "timing", "ordered")}


def fingerprint(spec: ModelSpec) -> str:
    """What tells this model from others; its name where the checkpoint is not one that we read ourselves."""
    from gpuinfer.text.checkpoint import open_checkpoint

    try:
        return str(open_checkpoint(spec).fingerprint)
    except UsageError as error:
        log.info("no fingerprint of %s: %s", spec.name, error)  # a backend that cannot read it will say so
        return f"name {spec.name}"


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancelled, it leaves the task alone."""
    await asyncio.wait({task})


def arithmetic(setup: Setup) -> str:
    """The number format that the model will be computed in here; what was asked for where there is no such device."""
    if setup.dtype != "bfloat16":
        return setup.dtype  # always, and known without importing torch
    from gpuinfer.text.arithmetic import computes_in_here

    try:
        return computes_in_here(setup)
    except UsageError as error:
        log.info("no device %s: %s", setup.device, error)  # the backend will say so, if it is to compute there
        return setup.dtype


async def loaded(infer: Infer) -> None:
    await infer.ready()
