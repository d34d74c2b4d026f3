"""Generate: the workload that reads prompts, asks a model to go on with each, and writes the answers down.

Its options are the flags of the command.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import Field

from gpuinfer import api, errors
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.event_loop import follow_task
from gpuinfer.host.terminal import show_status
from gpuinfer.serving.openai.model_options import (
    REPEATABLE,
    AdapterOptions,
    AnswerOptions,
    ModelOptions,
    adapter_digests,
    adapter_folders,
    arithmetic,
    check_model,
    check_text,
    check_with_model,
    each_model,
    model_fingerprint,
    rendering_of,
    sampling_of,
    text_model,
    word_separator,
)
from gpuinfer.serving.openai.prompt_rows import PromptRowReader
from gpuinfer.serving.openai.requests import PromptDefaults
from gpuinfer.serving.openai.row_names import Namer
from gpuinfer.serving.openai.sampling_fields import unmasking_of
from gpuinfer.workloads.generate import input_rows, output
from gpuinfer.workloads.generate.answer_lines import LineWriter
from gpuinfer.workloads.generate.answer_screen import AnswerScreen
from gpuinfer.workloads.generate.input_rows import InputSource, input_of_texts, texts_as_rows
from gpuinfer.workloads.generate.opened_output import EARLY, OpenedOutput
from gpuinfer.workloads.generate.output import is_folder, open_output
from gpuinfer.workloads.generate.pump import Pump, RowCounts


class PlaceOptions(api.Options):
    """Where prompts come from, and where answers go."""

    prompt: list[str] = Field(
        [], description="a text to go on with, or FILE:PATH of one; repeatable", json_schema_extra=REPEATABLE
    )
    input: str | None = Field(None, description="prompts: JSONL, JSON, CSV, Parquet; - is standard input")
    prompt_column: str | None = Field(None, description="of a table: the prompts [prompt, messages or text]")
    output: str = Field("-", description="answers: JSONL, FILE.parquet, or FOLDER/; - is standard output")


class GenerateOptions(AnswerOptions, PlaceOptions, AdapterOptions, ModelOptions):
    """What `gpuinfer generate` takes; `[generate]` of gpuinfer.toml too."""

    batch_size: int | None = Field(None, ge=1, le=1 << 20, description="rows at once [as memory allows]")
    token_ids: bool = Field(False, description="write the tokens of each answer too")
    timing: bool = Field(False, description="write how long each answer took")
    ordered: bool = Field(False, description="write answers in the order of the prompts")
    strict: bool = Field(True, description="a field that is not known makes its row an error")
    resume: bool = Field(False, description="go on with --output: what is done is not asked again")
    retry_errors: bool = Field(False, description="with --resume, ask rows again that ended with an error")
    test: bool = Field(False, description="three rows of a few tokens, to standard output; --output stays as it is")


TEST_ROWS, TEST_TOKENS = 3, 16
FINISH_LOOK_S = 0.5  # between two updates while an output is finished
DECIDING = ("num_samples", "truncate", "context", "deterministic", "mask_token_id")  # beside sampling and model

log = logging.getLogger(__name__)


class Generate(Workload):
    """Answer a file of prompts: each row once, the same answer in any company, and all of it kept when the run ends."""

    class Options(GenerateOptions):
        """They stand in a file of their own."""

    options: Options
    goes_on_by, writes_to, writes_answers = ("resume", "retry_errors"), ("output",), True
    max_failures = 1.0  # a row that fails says so in its answer, and where all do the run has failed anyway

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        own = self.options
        self.target = "-" if own.test else own.output
        self.models = each_model(own, "generate")
        for one in self.models.values():
            check_model(one, "generate")
        if own.prompt and "" not in self.models:
            raise UsageError(
                "--prompt names no model, and there are several. Give --input with rows that name theirs: "
                '{"prompt": "…", "model": "NAME"}.'
            )
        check_text("--prompt", own.prompt)
        self.prompts = [input_rows.prompt_of_flag(one) for one in own.prompt]
        if own.prompt and own.input is not None:
            raise UsageError("--prompt and --input each say what is asked. Give one of them.")
        if own.input is not None:
            input_rows.check_input(own.input, own.prompt_column)
        elif not own.prompt:
            raise UsageError(
                "generate needs prompts. Give --prompt TEXT, --input FILE, or --input - for standard input."
            )
        output.check_output(self.target, own.input or "-", own.resume and not own.test)
        self.adapters = adapter_folders(own.adapter)
        most = min(own.max_new_tokens, TEST_TOKENS) if own.test else own.max_new_tokens
        self.sampling = sampling_of(
            own,
            max_tokens=most,
            logprobs=own.logprobs,
            prompt_logprobs=own.prompt_logprobs,
            unmasking=unmasking_of(own),
        )
        self.rendering = rendering_of(own)
        if own.ordered and is_folder(self.target):
            raise UsageError("--ordered: the files of a folder have no order. Leave it out.")
        if own.retry_errors and not own.resume:
            raise UsageError("--retry-errors goes on with an output that is there. Add --resume.")

    def trial(self, setup: Setup, **changes: Any) -> Generate | None:
        """The prompts from the first on, to nowhere. None where they can be read only once."""
        own = self.options
        if own.test or not Path(own.input or "-").is_file():
            return None
        nowhere = {"output": os.devnull, "resume": False, "retry_errors": False}
        return Generate(setup, **{**own.model_dump(), **nowhere, **changes})

    @property
    def writes_stdout(self) -> bool:
        return self.target == "-"

    @property
    def shows_answers(self) -> bool:
        """Texts of the command line are answered there: as growing text on a terminal, else as rows."""
        return bool(self.options.prompt) and self.writes_stdout

    @property
    def ordered(self) -> bool:
        """Texts of the command line have no ids to know their answers by."""
        return self.options.ordered or (bool(self.options.prompt) and not is_folder(self.target))

    @property
    def deterministic(self) -> bool:
        return self.options.deterministic

    def model(self) -> ModelSpec:
        """The first, of several."""
        return next(iter(self.specs().values()))

    def specs(self) -> dict[str, ModelSpec]:
        """Of each model, by the name that rows give, or of one by ""."""
        return {name: text_model(one, one.batch_size, self.adapters) for name, one in self.models.items()}

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        own = self.options
        if self.shows_answers and sys.stdout.isatty():
            async for progress in self._show(infer):
                yield progress
            return
        opening = asyncio.create_task(asyncio.to_thread(self._open, infer.arithmetic))
        # Cancelled, it leaves the thread alone, which cannot be cancelled, and leaves things open.
        waiting = asyncio.create_task(asyncio.wait({opening}))
        async for _ in follow_task(waiting, infer.stopping):
            yield Progress(0, note="reading what is done" if own.resume else "opening the model", setup=True)
        await asyncio.wait({opening})
        source, target, settings = opening.result()
        try:
            if not waiting.cancelled():
                async for progress in self._answer(infer, source, target, settings):
                    yield progress
        finally:
            source.close()
            target.close()

    def _open(self, backend_arithmetic: str) -> tuple[InputSource, OpenedOutput, dict[str, Any]]:
        """Everything that may take a while before the first row: the model's fingerprint, and what is done."""
        own = self.options
        settings = self.deciding_settings(backend_arithmetic)
        for spec in self.specs().values():
            check_with_model(spec, self.sampling)
        target = open_output(
            self.target,
            {**settings, "token_ids": own.token_ids, "timing": own.timing, "ordered": self.ordered},
            resume=own.resume and not own.test,
            retry=own.retry_errors,
            ordered=self.ordered,
        )
        try:
            if own.prompt:
                return input_of_texts(self.prompts), target, settings
            return InputSource(own.input or "-", column=own.prompt_column), target, settings
        except BaseException:
            target.close()
            raise

    async def _answer(
        self, infer: Infer, source: InputSource, target: OpenedOutput, settings: Mapping[str, Any]
    ) -> AsyncIterator[Progress]:
        specs = self.specs()
        infers = {
            name: infer.beside(spec, name=name) if number else infer
            for number, (name, spec) in enumerate(specs.items())
        }

        async def load() -> None:
            for one in infers.values():  # one after the other, so that each finds free what the others have left
                await one.ready()

        loading = asyncio.create_task(load())
        async for _ in follow_task(loading, infer.stopping):
            yield Progress(0, note="loading the model", setup=True)
        if loading.cancelled():
            return
        loading.result()
        own, names = self.options, [name for name in specs if name]
        pump = Pump(
            infers,
            source,
            target,
            PromptRowReader(self.defaults(), models=names),
            Namer(settings),
            LineWriter(token_ids=own.token_ids, timing=own.timing, model=self.model().name),
            ordered=self.ordered,
            most=TEST_ROWS if own.test else None,
        )
        counting = asyncio.create_task(asyncio.to_thread(source.count))
        yield self._progress(pump, counting)  # the run's clock starts
        running = asyncio.create_task(pump.run())
        try:
            async for _ in follow_task(running, infer.stopping):
                yield self._progress(pump, counting)
            if not running.cancelled():
                finishing = asyncio.create_task(asyncio.to_thread(target.finish, useless=pump.counts.none_right))
                while not finishing.done():
                    await asyncio.wait({finishing}, timeout=FINISH_LOOK_S)
                    yield self._progress(pump, counting)
                finishing.result()
            elif target.path is not None and not pump.counts.done and not pump.waiting:
                log.warning("stopped before the first answer. Run the same command again.")
            elif target.path is not None:
                kept = self.target + (output.JOURNAL if output.is_table(self.target) else "")
                place = f"in {kept}{EARLY}"
                early = f" ({pump.waiting} that wait for an earlier one: {place})" if pump.waiting else ""
                log.warning(
                    "stopped; what was answered is in %s%s. Run the same command with --resume to go on.", kept, early
                )
        except BaseExceptionGroup as group:
            raise errors.unwrap(group) from group
        finally:
            source.stop()
            await asyncio.wait({counting})
        self._say_failures(pump.counts, target.is_useless)
        yield self._progress(pump, counting)

    async def _show(self, infer: Infer) -> AsyncIterator[Progress]:
        """The texts of the command line, answered on the terminal."""

        async def load() -> str:
            await asyncio.to_thread(check_with_model, self.model(), self.sampling)
            between = await asyncio.to_thread(word_separator, self.model())
            await infer.ready()
            return between

        loading = asyncio.create_task(load())
        try:
            async for _ in follow_task(loading, infer.stopping):
                show_status("loading the model")
                yield Progress(0, note="loading the model", setup=True)
        finally:
            show_status("")
        if loading.cancelled():
            return
        reader, prompts = (
            PromptRowReader(self.defaults()),
            self.prompts[: TEST_ROWS if self.options.test else None],
        )
        rows = [reader.read((number, row)) for number, row in enumerate(texts_as_rows(prompts), 1)]
        showing = AnswerScreen(infer, Namer({}).name(rows), loading.result())  # their digests are not written
        yield progress_of(showing.counts, len(rows))  # the run's clock starts
        running = asyncio.create_task(showing.run())
        try:
            async for _ in follow_task(running, infer.stopping):
                yield progress_of(showing.counts, len(rows))
        except BaseExceptionGroup as group:
            raise errors.unwrap(group) from group
        self._say_failures(showing.counts)
        yield progress_of(showing.counts, len(rows))

    def _progress(self, pump: Pump, counting: asyncio.Task[int | None]) -> Progress:
        counts, total = pump.counts, None
        if counts.ended:
            total = counts.read
        elif not self.options.test and pump.source.is_countable and counting.done() and (rows := counting.result()):
            total = max(rows, counts.read)
        return progress_of(counts, total, pump.under_way)

    def _say_failures(self, counts: RowCounts, removed: bool = False) -> None:
        """Raises `WorkError` when not one row was answered."""
        if counts.ended and not counts.read:
            source = {"-": "standard input", None: "--prompt"}.get(self.options.input, self.options.input)
            log.warning("no prompts in %s: nothing was asked", source)
        if counts.first_failure is None:
            return
        first = f"The first says: {counts.first_failure}"
        if not counts.answered and counts.failed == counts.done and counts.ended:
            raise WorkError(
                f"not one of {counts.failed} rows was answered{', and no output is left' if removed else ''}. {first}"
            )
        cure = "" if output.is_stream(self.target) else " With that mended, run again with --resume --retry-errors."
        log.warning("%d of %d rows ended with an error. %s%s", counts.failed, counts.done, first, cure)

    def defaults(self) -> PromptDefaults:
        own = self.options
        adapter = next(iter(self.adapters), None)
        return PromptDefaults(self.sampling, self.rendering, own.num_samples, own.truncate, own.strict, adapter)

    def deciding_settings(self, backend_arithmetic: str) -> dict[str, Any]:
        """All that decides what an answer is: what a row's digest covers beside the row. `backend_arithmetic`: see
        `Backend.arithmetic`.
        """
        own, sampling = self.options, msgspec.to_builtins(self.sampling)
        fingerprints = {name: model_fingerprint(spec) for name, spec in self.specs().items()}
        del sampling["keyed"]  # no flag sets it: outputs that began before there was one can go on
        return {
            **sampling,
            **{name: getattr(own, name) for name in DECIDING},
            "chat_template_kwargs": dict(self.rendering.variables),
            "seed": self.setup.seed,
            "dtype": self.setup.dtype,
            "computes_in": arithmetic(self.setup, backend_arithmetic),
            "model": fingerprints.get("", fingerprints),
            **({"adapters": [list(one) for one in adapter_digests(self.adapters).items()]} if self.adapters else {}),
        }


def progress_of(counts: RowCounts, total: int | None, outstanding: int | None = None) -> Progress:
    """How far the rows are, of `total`; `outstanding`: how many are under way at most."""
    names = ("input_tokens", "output_tokens", "cached_tokens")
    return Progress(
        counts.done,
        total,
        "rows",
        counts={name: getattr(counts, name) for name in names},
        facts={} if outstanding is None else {"rows_outstanding": outstanding},
        note=f"{counts.failed} rows with errors" if counts.failed else "",
        before=counts.before,
        failed=counts.failed,
        failure=str(counts.first_failure or ""),
    )
