"""Generate: the workload that reads prompts, asks a model to go on with each, and writes the answers down.

Its options are the flags of the command.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer import errors
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.division import Division, RangeFeed
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.event_loop import follow_task
from gpuinfer.host.terminal import show_status
from gpuinfer.serving.openai.model_options import (
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
from gpuinfer.workloads.generate.generate_division import GenerateDivision, OpenedRun, RangeAnswerer, pack_row_records
from gpuinfer.workloads.generate.generate_options import GenerateOptions
from gpuinfer.workloads.generate.input_rows import InputSource, input_of_texts, texts_as_rows
from gpuinfer.workloads.generate.opened_output import EARLY, OpenedOutput
from gpuinfer.workloads.generate.output import is_folder, open_output
from gpuinfer.workloads.generate.pump import Pump
from gpuinfer.workloads.generate.row_asker import RowAsker, RowCounts

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

    def _open(self, backend_arithmetic: str) -> OpenedRun:
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
                return OpenedRun(input_of_texts(self.prompts), target, settings)
            return OpenedRun(InputSource(own.input or "-", column=own.prompt_column), target, settings)
        except BaseException:
            target.close()
            raise

    async def _answer(
        self, infer: Infer, source: InputSource, target: OpenedOutput, settings: Mapping[str, Any]
    ) -> AsyncIterator[Progress]:
        infers = self._infers(infer)
        loading = asyncio.create_task(_load(infers))
        async for _ in follow_task(loading, infer.stopping):
            yield Progress(0, note="loading the model", setup=True)
        if loading.cancelled():
            return
        loading.result()
        pump = Pump(
            infers,
            source,
            target,
            self._reader(),
            Namer(settings),
            self._writer(),
            ordered=self.ordered,
            most=self._most_rows,
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
            else:
                self._say_stopped(pump.counts, target, pump.waiting)
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

    def _infers(self, infer: Infer) -> dict[str, Infer]:
        """The ways to the models, by the names that rows give."""
        specs = self.specs().items()
        return {name: infer.beside(spec, name=name) if number else infer for number, (name, spec) in enumerate(specs)}

    def _reader(self) -> PromptRowReader:
        return PromptRowReader(self.defaults(), models=[name for name in self.models if name])

    def _writer(self) -> LineWriter:
        own = self.options
        return LineWriter(token_ids=own.token_ids, timing=own.timing, model=self.model().name)

    @property
    def _most_rows(self) -> int | None:
        return TEST_ROWS if self.options.test else None

    # Over many machines

    def node_options(self) -> Mapping[str, Any]:
        """Without input and output, which the coordinator alone opens."""
        options = self.options.model_dump(mode="json", exclude_unset=True)
        for name in ("prompt", "prompt_column", "ordered", "resume", "retry_errors"):
            options.pop(name, None)
        return {**options, "input": os.devnull, "output": os.devnull}

    def division(self) -> Division:
        def ended(counts: RowCounts, output: OpenedOutput, waiting: int | None) -> None:
            if waiting is not None:
                self._say_stopped(counts, output, waiting)
            self._say_failures(counts, output.is_useless)

        return GenerateDivision(
            self._open,
            self._reader(),
            self._writer(),
            ended,
            ordered=self.ordered,
            most=self._most_rows,
        )

    def deciding(self, arithmetic: str) -> Mapping[str, Any]:
        return self.deciding_settings(arithmetic)

    async def run_ranges(self, infer: Infer, feed: RangeFeed) -> AsyncIterator[Progress]:
        infers = self._infers(infer)
        loading = asyncio.create_task(_load(infers))
        async for _ in follow_task(loading, infer.stopping):
            yield Progress(0, note="loading the model", setup=True)
        if loading.cancelled():
            return
        loading.result()
        answering = RangeAnswerer(RowAsker(infers, self._writer()), feed, self._reader())
        yield progress_of(answering.counts, None, answering.under_way)  # the run's clock starts
        running = asyncio.create_task(answering.run(infer.stopping))
        try:
            async for _ in follow_task(running, asyncio.Event()):  # it stops by itself
                yield progress_of(answering.counts, None, answering.under_way)
        except BaseExceptionGroup as group:
            raise errors.unwrap(group) from group
        yield progress_of(answering.counts, None, answering.under_way)

    def pack_records(self, records: Sequence[Any]) -> bytes:
        return pack_row_records(records)

    def _say_stopped(self, counts: RowCounts, target: OpenedOutput, waiting: int) -> None:
        """`waiting`: how many answers wait for an earlier one."""
        if target.path is None:
            return
        if not counts.done and not waiting:
            log.warning("stopped before the first answer. Run the same command again.")
            return
        kept = self.target + (output.JOURNAL if output.is_table(self.target) else "")
        early = f" ({waiting} that wait for an earlier one: in {kept}{EARLY})" if waiting else ""
        log.warning("stopped; what was answered is in %s%s. Run the same command with --resume to go on.", kept, early)

    def _say_failures(self, counts: RowCounts, removed: bool = False) -> None:
        """Raises `WorkError` when not one row was answered."""
        if counts.ended and not counts.read:
            source = {"-": "standard input", None: "--prompt"}.get(self.options.input, self.options.input)
            log.warning("no prompts in %s: nothing was asked", source)
        if not counts.failure:
            return
        first = f"The first says: {counts.failure}"
        if counts.ended and counts.failed == counts.done == counts.read:
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


async def _load(infers: Mapping[str, Infer]) -> None:
    for one in infers.values():  # one after the other, so that each finds free what the others have left
        await one.ready()


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
        failure=counts.failure,
    )
