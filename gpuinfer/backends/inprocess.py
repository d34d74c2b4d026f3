"""The model in this very process: torch on the CPU or a CUDA device, the forward in threads beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from gpuinfer.api import (
    Backend,
    BackendContext,
    Event,
    Limits,
    ModelSpec,
    Request,
    Result,
    Setup,
    TextRoofline,
    enter_station,
)
from gpuinfer.errors import BackendDied, BackendError, GpuinferError, UsageError
from gpuinfer.host import error_text, machine
from gpuinfer.models import model_options, processor
from gpuinfer.models.device_arbiter import DeviceSlot, UnsharedSlot, arbiter_of
from gpuinfer.models.memory_watch import MemoryWatch
from gpuinfer.models.model_options import LAYERS, WITH_STAGES, CheckpointSegments, GradientLoss
from gpuinfer.models.row_format import answers_by_halving, misfit
from gpuinfer.text import precision
from gpuinfer.text.model import TextModel
from gpuinfer.text.multi_device import TextDevices, open_text
from gpuinfer.text.text_options import TorchModelOptions, changed_arithmetic

if TYPE_CHECKING:
    from gpuinfer.models.gradients import OpenedGradients
    from gpuinfer.models.open_model import Opened

CPU_MAX_ROWS = 4096
SHORT_S = 300e-6  # what it costs to hand a batch to a thread and its answers back
LONG_S = 0.001  # of a processor: other callers would notice it
ROWS_TRIED = 32
WORTH = 1 << 24  # bytes of released memory: less may be chance
OFTEN = 3  # what happens once may be the machine's fault

T = TypeVar("T")


class ShortBatches:
    """Up to how many rows a batch is computed on the event loop itself: handing it to a thread would take longer.

    Of models that do nothing but compute (`Opened.seconds_of`): what waits would keep all else waiting. There it has
    one core, since a second thread would be woken for each operation (`open_model.end_thread_pool`).
    """

    def __init__(self) -> None:
        self.rows = 0
        self._long = 0  # batches in a row that took too long

    def try_out(self, seconds_of: Callable[[int], float], max_rows: int) -> None:
        """`seconds_of` computes so many rows, in the calling thread."""
        from gpuinfer.models.open_model import on_one_core

        rows = min(ROWS_TRIED, max_rows)
        with contextlib.suppress(Exception), on_one_core():  # a model that raises here may do so for its own reasons
            seconds_of(rows)  # the first of a size takes longer
            if (seconds := seconds_of(rows)) < SHORT_S:
                self._allow(rows, seconds)

    def timed(self, compute: Callable[[], T], rows: int) -> T:
        """Compute a short batch, and learn from the time that it takes."""
        from gpuinfer.models.open_model import on_one_core

        ran = time.thread_time()
        try:
            with on_one_core():
                return compute()
        finally:
            seconds = time.thread_time() - ran
            self._long = self._long + 1 if seconds > LONG_S else 0
            if self._long >= OFTEN:
                self.rows, self._long = rows // 2, 0
            elif seconds < SHORT_S:
                self._allow(rows, seconds)

    def _allow(self, rows: int, seconds: float) -> None:
        """So many rows took so long: larger batches that are expected to be short are."""
        self.rows = max(self.rows, min(4 * rows, int(rows * SHORT_S / max(seconds, 1e-9))))


OF_GRADIENTS = ("loss", "checkpoint_segments")  # options without effect on answers


class InProcess(Backend):
    """Runs the model in this process, on one device or a copy on each of several. With several worker processes each
    has its own copies of the model.
    """

    class Options(TorchModelOptions):
        backward: bool = Field(False, description="answer batches of training with the gradients of a loss")
        loss: GradientLoss = None
        checkpoint_segments: CheckpointSegments = None
        layers: str | None = Field(None, min_length=1, description=LAYERS, json_schema_extra=WITH_STAGES)
        gate: bool = Field(
            True, description="models of one run share the device; false: each computes as if it were alone"
        )

    options: Options
    serves = ("rows", "text", "gradients")
    several_devices = True

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.setup = model_options.with_stage_devices(self.setup, self.options.stages)
        self.limits = Limits(self.options.max_rows or CPU_MAX_ROWS, self.options.in_flight or 1)
        if self._trains:
            self.notices = processor.training_notices(self.setup, self.options.compute)
        else:
            if self.options.backward and self.setup.model is not None:
                raise UsageError("-B backward=true is for models of rows, and this one is of text. Leave it out.")
            given = [name for name in OF_GRADIENTS if getattr(self.options, name)]
            if given and self.setup.model is not None:
                raise UsageError(f"-B {given[0]} is for gradients. Add -B backward=true, or leave it out.")
            self.notices = precision.notices(self.setup, self.options.compute)
        self._gate = arbiter_of(self.setup, free=not self.options.gate)  # the same one for all models of a run
        self._stands_beside = False  # another model, which may be loaded before this one
        self._place: DeviceSlot = UnsharedSlot()
        self._width = 1  # cores of one forward
        self._on_cuda = machine.wants_cuda(self.setup.devices)
        self._opened: Opened | None = None
        self._gradients: OpenedGradients | None = None
        self._text: TextModel | TextDevices | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._short = ShortBatches()
        self._watch: MemoryWatch | None = None

    @property
    def arithmetic(self) -> str:
        return changed_arithmetic(self.options)

    @property
    def compute(self) -> str:
        return self.options.compute

    @property
    def _trains(self) -> bool:
        spec = self.setup.model
        return spec is not None and (spec.kind == "gradients" or (self.options.backward and spec.kind == "rows"))

    async def check(self) -> None:
        """Devices by their names; the layers of a model of rows that is to be cut, which is built for that. Of a model
        beside another, which may be loaded before it, also what would keep it from being loaded.
        """
        if self.setup.model is None:
            return  # of a workload that brings its own answers
        spec = self._served()
        model_options.check_names(self.setup.devices)
        await asyncio.to_thread(self._check_in_thread, spec)

    def _check_in_thread(self, spec: ModelSpec) -> None:
        """What imports torch, and may take a while."""
        if self._stands_beside and spec.kind == "text":
            from gpuinfer.text.generator.setup import refuse_unloadable

            refuse_unloadable(spec, self.setup, self.options)
        elif self._stands_beside and spec.kind == "rows":
            from gpuinfer.models import load

            load.refuse_unloadable(spec)
        if self.options.parallel != "data" and spec.kind == "rows":
            from gpuinfer.models.pipeline.open_pipeline import check_layers

            check_layers(spec, self.setup, self.options)
        elif model_options.may_be_missing(self.setup.devices):
            from gpuinfer.models.device import resolve_devices

            resolve_devices(self.setup.devices)

    def _served(self) -> ModelSpec:
        """The model, which these options are for. Raises `UsageError`."""
        spec = self.setup.model
        if spec is None:
            raise UsageError(
                "the backend 'inprocess' serves a model, and this workload names none. "
                "Choose another backend with --backend (`gpuinfer plugins list`), or give the workload a model."
            )
        if self.options.parallel != "data" and self._trains:
            raise UsageError(
                f"parallel={self.options.parallel} cuts models that answer, and for gradients a model is whole. Leave "
                "-B parallel out."
            )
        if spec.kind == "text" and self.options.layers is not None:
            raise UsageError(
                f"layers={self.options.layers} names the attribute with a module's layers, and those of a model of "
                "text are known. Leave -B layers out; -B split_points=2,4 or their names say where stages begin."
            )
        return spec

    async def start(self, context: BackendContext) -> None:
        """Build the model and try it on two small batches. Raises `UsageError` when there is none that fits."""
        spec = self._served()
        self._place = self._gate.join(self.setup.share, fixed=self._keeps_its_threads)
        if spec.kind == "text":
            calls = (context.stepped, self._place, context.lane, context.resized)
            self._text = await open_text(spec, self.setup, self.options, *calls)
            self.limits = self._text.limits
            self.notices = (*self.notices, *precision.decoder_notices(self.setup, self._text.computed_by))
            return
        # In a thread that ends: its OpenMP threads would outlive the opening, see `open_model.end_thread_pool`.
        opening, loop = ThreadPoolExecutor(1, "gpuinfer-open"), asyncio.get_running_loop()
        in_context = contextvars.copy_context().run
        try:
            if self._trains:
                self._gradients = await loop.run_in_executor(opening, in_context, self._open_gradients, spec)
                self.limits = self._gradients.limits
            else:
                self._opened = await loop.run_in_executor(opening, in_context, self._open, spec, context)
                self.limits = self._opened.limits
        finally:
            opening.shutdown(wait=False)
        self._width = int(self.device().get("threads") or 1)
        self._watch = self._watched()
        # Made only now: threads take their share of cores from torch when they first compute.
        self._threads = ThreadPoolExecutor(self.limits.in_flight, thread_name_prefix="gpuinfer-forward")

    def _open(self, spec: ModelSpec, context: BackendContext) -> Opened:
        if self.options.parallel != "data":
            from gpuinfer.models.pipeline.open_pipeline import open_staged

            return open_staged(spec, self.setup, self.options, context.roofline, context.lane)
        from gpuinfer.models.open_model import open_on_devices

        opened = open_on_devices(spec, self.setup, self.options, context.roofline)
        if opened.seconds_of is not None and opened.limits.in_flight == 1:
            self._short.try_out(opened.seconds_of, opened.limits.max_rows)
        return opened

    def _open_gradients(self, spec: ModelSpec) -> OpenedGradients:
        from gpuinfer.models.gradients import open_gradients

        return open_gradients(spec, self.setup, self.options)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        """Payloads are arrays [rows, features] in the model's input dtype; results float32, shaped as it answers. With
        `backward` they are `gradients.TrainingBatch`, results `gradients.Gradients`.

        A payload that does not fit gets a `BackendError` as its result, one at which the model raises that error; its
        neighbours are answered.
        """
        if self._gradients is not None and self._threads is not None:
            from gpuinfer.models import gradients

            payloads = [request.payload for request in batch]
            passes = partial(gradients.answers_to, self._gradients.passed, payloads)
            own = (getattr(one, "executor", None) for one in payloads)
            executor: Executor = next(filter(None, own), self._threads)
            context = contextvars.copy_context()
            return await asyncio.get_running_loop().run_in_executor(executor, context.run, self._in_turn, passes)
        if self._opened is None or self._threads is None:
            raise BackendDied(
                "the backend 'inprocess' is not running. Await start() before infer(), and not after close()."
            )
        spec = self._opened.spec
        misfits = (
            {}
            if spec.layout is not None
            else {
                index: error
                for index, request in enumerate(batch)
                if (error := misfit(request.payload, request.rows, spec))
            }
        )
        blocks = [request.payload for index, request in enumerate(batch) if index not in misfits]
        if not blocks:
            return list(misfits.values())
        compute, rows = partial(answers_by_halving, self._opened.forward, blocks), sum(map(len, blocks))
        if rows <= self._short.rows and self._place.is_alone:
            answers = self._short.timed(partial(self._in_turn, compute, short=True), rows)
        else:
            context = contextvars.copy_context()  # so that the thread finds its lane in the time ledger
            loop = asyncio.get_running_loop()
            answers = await loop.run_in_executor(self._threads, context.run, self._in_turn, compute)
        answers = [_blamed(spec, one) if isinstance(one, Exception) else one for one in answers]
        for index, error in misfits.items():  # in ascending order, so that each finds its place
            answers.insert(index, error)
        return answers

    def _in_turn(self, answers: Callable[[], list[Any]], *, short: bool = False) -> list[Any]:
        """Once it is its turn at the device, on as many cores as it has there, or if `short` as the thread has."""
        with self._place.turn(self._width, enter_station) as cores:
            if not (short or self._keeps_its_threads or self._on_cuda):
                from gpuinfer.models.open_model import compute_with

                compute_with(cores)
            return answers()

    @property
    def _keeps_its_threads(self) -> bool:
        """Whether a forward has as many as it was opened with, whatever is computed beside it: a user has said so, or
        the bits of the answers may depend on it.
        """
        own, spec = self.options, self.setup.model
        of_bits = self.setup.deterministic and spec is not None and spec.kind != "text"
        return own.threads is not None or bool(own.compile) or own.parallel != "data" or self._trains or of_bits

    @property
    def streams(self) -> bool:
        return self._text is not None

    def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Of a text model: payloads are `generation.Prompt`, values `generation.Generation`. Rows as in `infer`."""
        return super().stream(batch) if self._text is None else self._text.stream(batch)

    def cancel(self, request: Request) -> None:
        if self._text is not None:
            self._text.cancel(request)

    @property
    def updates(self) -> bool:
        return self._text is not None or self._opened is not None

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """Of a text model: applied between two steps. Of rows: batches under way are finished with the old weights."""
        if self._opened is not None and adapter is None:
            from gpuinfer.models.open_model import open_with_weights

            change = partial(open_with_weights, self._opened, weights, self.setup, self.options)
            opening, in_context = ThreadPoolExecutor(1, "gpuinfer-open"), contextvars.copy_context().run
            try:
                self._opened = await asyncio.get_running_loop().run_in_executor(opening, in_context, change)
            finally:
                opening.shutdown(wait=False)
        elif self._text is None:
            await super().update(version, weights, adapter=adapter, drain=drain)
        elif adapter is not None:
            await self._text.load_adapter(adapter, version, weights)
        else:
            await self._text.update(version, weights, drain=drain)

    @property
    def adapters(self) -> Sequence[str]:
        return () if self._text is None else self._text.adapters

    async def unload(self, adapter: str) -> None:
        if self._text is None:
            await super().unload(adapter)
        else:
            await self._text.unload_adapter(adapter)

    async def free_memory(self) -> Mapping[str, int]:
        if self._text is not None:
            return await self._text.free_memory()
        if self._opened is None and self._gradients is None:
            return {}
        return await asyncio.to_thread(self._release)

    def _watched(self) -> MemoryWatch | None:
        """With `keep_free`, the watch of a model of rows, which has no slots: it releases unused memory."""
        keep = self.options.keep_free
        if keep is None:
            return None
        from gpuinfer.models.device import free_bytes, resolve_devices

        devices = resolve_devices(self.setup.devices)
        return MemoryWatch(lambda: free_bytes(devices) < keep, lambda: self._release()["freed_bytes"] > WORTH)

    def _release(self) -> Mapping[str, int]:
        """Of a model of rows: what torch and the C library keep of freed memory."""
        from gpuinfer.models.device import release_memory, resolve_devices

        return release_memory(resolve_devices(self.setup.devices))

    def share_device(self, other: InProcess) -> None:
        """Take turns at the device with `other`, by the shares of their setups. Before `start`."""
        self._gate = other._gate

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Backend:
        """Without the adapters, which are of this model. Both take turns at the device."""
        options = self.options.model_dump(exclude_unset=True, exclude={"adapters"})
        other = InProcess(replace(self.setup, model=spec, share=share), **options)
        other._gate, other._stands_beside = self._gate, True
        return other

    async def measure(self, rows: int, seconds: float) -> TextRoofline | None:
        """Of a text model that is whole, on one device."""
        return await self._text.measure(rows, seconds) if isinstance(self._text, TextModel) else None

    def device(self) -> Mapping[str, Any]:
        serving = self._opened or self._gradients or self._text
        return {**serving.device(), "turns": self._place.counters()} if serving is not None else {}

    def waits_for(self) -> str:
        serving = self._opened or self._text
        return "" if serving is None else serving.waits_for()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._place.close()
        threads, self._threads = self._threads, None
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            await asyncio.to_thread(gradients.close)
        opened, self._opened = self._opened, None
        if opened is not None:
            await asyncio.to_thread(opened.close)
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        text, self._text = self._text, None
        if text is not None:
            await text.close()


def _blamed(spec: ModelSpec, error: Exception) -> Exception:
    """What the user's own model raised is said to be that: the backend is not at fault."""
    if (":" not in spec.name and spec.source is None) or isinstance(error, GpuinferError):
        return error
    from gpuinfer.models.load import title

    made = BackendError(
        f"{title(spec.name)} raised {error_text.short_message(error)}. Run it again with -vv to see where."
    )
    made.__cause__ = error
    return made
