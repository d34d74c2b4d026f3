"""Training: the workload that draws batches from the positions that self-play has left, asks a backend for gradients,
and steps. Here are also the learning-rate schedule and the split into training and validation games.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.errors import BackendDied, UnknownName, UsageError
from gpuinfer.gradients import Gradients, TrainingBatch
from gpuinfer.host import machine
from gpuinfer.models.positions import Positions, Symmetries, positions_of, sizes_of, symmetries_of

if TYPE_CHECKING:
    from gpuinfer.workloads.optimizer import Stepper, TrainingFolder

ORDER, APART, TURNED = 1, 2, 3  # streams of random numbers
MOST_VALIDATED = 8192  # positions: more would tell little more


class TrainingBatches:
    """The batch of each step, by the seed and the step alone: so a run that goes on takes those it would have taken.

    Each position comes once an epoch, in an order of the epoch's own; what fills no batch at its end is left out. Where
    there are symmetries each is turned by one of them or by none, at random, as AlphaGo Zero does (Silver et al. 2017).
    """

    def __init__(
        self,
        positions: Positions,
        size: int,
        seed: int,
        validation_share: float,
        symmetries: Symmetries | None = None,
    ) -> None:
        self._symmetries = symmetries
        self._positions, self._seed = positions, seed
        # Whole games are kept apart: positions of one game are alike, and would tell what has been learnt by heart.
        games = np.unique(positions.game)
        count = round(validation_share * len(games))
        if validation_share > 0 and len(games) > 1:
            count = min(max(1, count), len(games) - 1)
        apart = np.isin(positions.game, np.random.default_rng([seed, APART]).permutation(games)[:count])
        self.rows = np.flatnonzero(~apart)
        self.validation = np.flatnonzero(apart)[:MOST_VALIDATED]
        self.size = min(size, len(self.rows))
        self.an_epoch = len(self.rows) // self.size
        self._epoch, self._order = -1, self.rows

    def at(self, step: int) -> TrainingBatch:
        """Without weights; the first step is 0."""
        epoch, place = divmod(step, self.an_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, ORDER, epoch]).permutation(self.rows)
            self._epoch = epoch
        batch = self._made(self._order[place * self.size : (place + 1) * self.size])
        if (symmetries := self._symmetries) is None:
            return batch
        dice = np.random.default_rng([self._seed, TURNED, step])
        drawn = dice.integers(len(symmetries) + 1, size=len(batch.features))
        for number, (features, actions) in enumerate(zip(symmetries.features, symmetries.actions, strict=True)):
            rows = np.flatnonzero(drawn == number)
            batch.features[rows] = batch.features[np.ix_(rows, features)]
            for name in ("policy", "legal"):
                batch.targets[name][rows] = batch.targets[name][np.ix_(rows, actions)]
        return batch

    def validating(self) -> Iterator[TrainingBatch]:
        """The positions that are kept apart."""
        for start in range(0, len(self.validation), self.size):
            yield self._made(self.validation[start : start + self.size])

    def _made(self, rows: NDArray[np.int64]) -> TrainingBatch:
        of = self._positions
        return TrainingBatch(
            of.observation[rows],
            {"policy": of.policy[rows], "value": of.value[rows], "legal": of.legal[rows]},
        )


Schedule = Literal["cosine", "constant"]


def rate_at(step: int, *, peak: float, warmup: int, steps: int, schedule: Schedule) -> float:
    """For the step after `step` others: rising evenly over `warmup` steps; then `peak`, or with `cosine` falling to 0
    at `steps` along half a cosine (Loshchilov and Hutter 2017, "SGDR", without restarts).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    return peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


MODELS = ("blobnet", "blobnet-small", "module:factory")
LATEST = 100  # steps: the loss that is told is their mean
MOST_ROWS = 10_000  # about, of the loss curve: in a longer training, each row is the mean of several steps
CURVE_S = 1.0  # between two writings of what the curve has grown by
TELL_S = 0.1  # between two words of how it goes: a step of a small network takes a millisecond

Made = TypeVar("Made")


class Train(Workload):
    """Train a network on the positions that self-play has left: policy on the visits, values on the outcomes."""

    class Options(api.Options):
        records: list[Path] = Field(description="folders that selfplay --out wrote, oldest first")
        out: Path = Field(description="folder for checkpoints, the loss curve and, in the end, weights.safetensors")
        model: str = Field(
            "blobnet",
            description="blobnet, blobnet-small or module:factory",
            json_schema_extra={"names": ["blobnet", "blobnet-small"]},
        )
        weights: Path | None = Field(
            None, description="begin with these: safetensors, or a torch file of plain tensors"
        )
        steps: int = Field(1000, ge=1, le=10**9, description="steps of the optimizer")
        batch_size: int = Field(256, ge=1, le=65_536, description="positions in each step")
        learning_rate: float = Field(1e-3, gt=0, le=10, description="at its highest")
        schedule: Schedule = Field("cosine", description="of the learning rate, after the warm-up")
        warmup_steps: int = Field(100, ge=0, description="in which the learning rate rises")
        weight_decay: float = Field(0.01, ge=0, le=10, description="of AdamW, of matrices")
        clip_norm: float = Field(1.0, gt=0, le=1e9, description="the most that the norm of all gradients may be")
        value_weight: float = Field(1.0, ge=0, le=1e6, description="of the values' error beside the policy's")
        window: int | None = Field(None, ge=1, description="train on so many of the newest positions alone [all]")
        symmetries: bool = Field(True, description="turn positions at random, where their game declares symmetries")
        validation_share: float = Field(0.05, ge=0, lt=1, description="of the games, kept apart to validate on")
        checkpoint_every: int = Field(500, ge=1, description="steps from one checkpoint to the next")
        picture: bool = Field(True, description="draw the loss curve at the end, to loss.svg")
        resume: bool = Field(False, description="go on with the last checkpoint in --out")

    options: Options
    goes_on_by, writes_to = ("resume",), ("out",)

    def __init__(
        self,
        setup: Setup | None = None,
        /,
        *,
        source: Any = None,
        source_digest: Callable[[], str] | None = None,
        **options: Any,
    ) -> None:
        """`source`: the model, where it is an object of the program (`ModelSpec.source`), and `source_digest` a digest
        of that; `options.model` is then what it is called.
        """
        super().__init__(setup, **options)
        self._source, self._source_digest = source, source_digest
        own = self.options
        if source is None and own.model not in MODELS and ":" not in own.model:
            raise UnknownName("model", own.model, MODELS, label="Choices")
        if own.weights is not None and not own.weights.is_file():
            raise UsageError(f"--weights: no file '{own.weights}'. Give the file that holds the weights.")
        if not own.records:
            raise UsageError("--records names no folder. Give the one that `gpuinfer selfplay --out` wrote.")
        if twice := next((one for one in own.records if own.records.count(one) > 1), None):
            raise UsageError(f"--records names {twice} twice. Name each folder once.")

    def model(self) -> ModelSpec:
        """As large as the records say. Raises `UsageError` where there are none."""
        own, sizes = self.options, sizes_of(self.options.records)
        return ModelSpec(
            own.model,
            str(own.weights) if own.weights else None,
            sizes.features,
            sizes.dtype,
            {"actions": sizes.actions, "seats": sizes.seats},
            kind="gradients",
            source=self._source,
        )

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        compute = ThreadPoolExecutor(1, "gpuinfer-train")
        try:
            with ThreadPoolExecutor(1, "gpuinfer-files") as files:
                training = _TrainingRun(self, infer, compute, files)
                async for progress in training.prepared():
                    yield progress
                try:
                    async for progress in training.trained():
                        yield progress
                finally:
                    training.folder.release()
        finally:
            machine.cpu_times()  # while the thread that trained, and those that torch gave it, can say how they waited
            compute.shutdown(wait=False)  # a loss may hang

    def deciding_settings(self, positions: Positions) -> dict[str, Any]:
        """All that decides which weights come out: a run with others does not go on with this one."""
        own = self.options
        names = ("model", "batch_size", "learning_rate", "schedule", "warmup_steps", "weight_decay", "clip_norm")
        return {
            **{name: getattr(own, name) for name in (*names, "value_weight", "validation_share")},
            "weights": hashlib.sha256(own.weights.read_bytes()).hexdigest() if own.weights else None,
            **({} if self._source_digest is None else {"network": self._source_digest()}),
            "records": {"positions": len(positions), "digest": positions.digest()},
            "steps": own.steps if own.schedule == "cosine" else None,  # which decides the learning rate of each step
            "seed": self.setup.seed,
            "dtype": self.setup.dtype,
        }


class _TrainingRun:
    """One run of the workload. All that computes with torch is done in one thread, passes included, and what reads and
    writes files in another, so that nothing waits for a loss that hangs.
    """

    folder: TrainingFolder

    def __init__(self, workload: Train, infer: Infer, compute: Executor, files: Executor) -> None:
        self._workload, self._own, self._infer = workload, workload.options, infer
        self._compute, self._files = compute, files
        self._lane = infer.lane("trainer")
        self._step = self._begun = self._kept = 0
        self._loss_name = ""
        self._latest: deque[Gradients] = deque(maxlen=LATEST)
        self._since: list[dict[str, float]] = []  # what the steps since the curve's last row came to
        self._rows: list[dict[str, float]] = []  # of the curve, to be written
        self._unreported: list[dict[str, float]] = []  # rows of the curve, since the last Progress
        self._write_at = 0.0
        self._tell_at = 0.0
        self._facts: dict[str, float] = {}
        self._spent = {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0}

    async def prepared(self) -> AsyncIterator[Progress]:
        """Records read, the folder claimed, weights and optimizer where they were."""
        yield Progress(0, note="reading the records", unit="steps", setup=True)
        own, workload = self._own, self._workload
        positions = await self._do(self._files, positions_of, own.records, own.window)
        symmetries = await self._do(self._files, symmetries_of, own.records) if own.symmetries else None
        settings = await self._do(self._files, workload.deciding_settings, positions)
        settings |= {} if symmetries is None else {"symmetries": symmetries.plain()["actions"]}
        yield Progress(0, note="making the model ready", unit="steps", setup=True)
        await self._do(self._compute, self._open, positions, symmetries, settings)
        try:
            await self._do(self._files, self.folder.begin_curve, self._step)
            limits = await self._infer.ready()
            if self._batches.size > limits.max_rows:
                raise UsageError(
                    f"batches of {self._batches.size} rows are more than the {limits.max_rows} that the backend takes. "
                    "Give a smaller --batch-size, or raise -B max_rows."
                )
        except BaseException:
            self.folder.release()
            raise

    def _open(self, positions: Positions, symmetries: Symmetries | None, settings: Mapping[str, Any]) -> None:
        from gpuinfer.workloads.optimizer import Stepper, TrainingFolder

        own, setup = self._own, self._workload.setup
        self._batches = TrainingBatches(positions, own.batch_size, setup.seed, own.validation_share, symmetries)
        self._stepper: Stepper = Stepper(self._workload.model(), setup.seed, own.weight_decay, own.clip_norm)
        self.folder = TrainingFolder(own.out)
        if self.folder.claim(settings, own.resume) and (last := self.folder.last()) is not None:
            self._step, self._loss_name, state = last
            self._begun = self._kept = self._step
            if self._step > own.steps:
                self.folder.release()
                raise UsageError(f"{own.out} is at step {self._step} already. Ask for more with --steps.")
            try:
                self._stepper.restore(state)
            except (KeyError, RuntimeError) as error:
                self.folder.release()
                said = f"no {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
                raise UsageError(
                    f"the checkpoint in {own.out} is not of model '{own.model}' as it is now: {said}. Put the model "
                    "back as it was, or give another folder with --out."
                ) from error

    async def trained(self) -> AsyncIterator[Progress]:
        own = self._own
        yield self._progress()
        with self._infer.client() as me:
            while self._step < own.steps and not self._infer.stopping.is_set():
                try:
                    await self._one_step(me)
                except BackendDied:  # the weights are here, and whole
                    if self._step > self._kept:
                        await self._keep()
                    raise
                if self._step % own.checkpoint_every == 0 and self._step < own.steps:
                    await self._validate(me)
                    await self._keep()
                if time.monotonic() >= self._write_at:
                    await self._write_curve()
                if time.monotonic() >= self._tell_at:
                    yield self._progress()
            if self._step == own.steps and self._step > self._begun:
                await self._validate(me)
        if self._step > self._kept:
            await self._keep()
        if self._step == own.steps:
            state = await self._do(self._compute, self._stepper.state)
            await self._do(self._files, self.folder.finish, self._step, self._loss_name, state)
        if own.picture and self._step > self._begun:
            await self._do(self._files, self.folder.draw_curve)
        yield self._progress()

    async def _one_step(self, me: Hashable) -> None:
        self._lane.enter("input")
        found = await self._ask(self._batches.at(self._step), me)
        own = self._own
        rate = rate_at(
            self._step,
            peak=own.learning_rate,
            warmup=own.warmup_steps,
            steps=own.steps,
            schedule=own.schedule,
        )
        self._lane.enter("optimizer")
        began = time.perf_counter()
        norm = await self._do(self._compute, self._stepper.step, found, rate)
        self._lane.enter("idle")
        self._step += 1
        self._latest.append(replace(found, by_name={}, buffers={}))
        self._spent["forward_s"] += found.forward_s
        self._spent["backward_s"] += found.backward_s
        self._spent["optimizer_s"] += time.perf_counter() - began
        told = {"learning_rate": rate, "gradient_norm": norm, "activation_bytes": found.activation_bytes}
        self._facts.update({"first_loss": found.loss} | self._facts | told)
        parts = {f"loss_{name}": value for name, value in found.parts.items()}
        self._since.append({"loss": found.loss, **parts, "gradient_norm": norm, "learning_rate": rate})
        if self._step % math.ceil(own.steps / MOST_ROWS) == 0:
            self._add_row()

    async def _ask(self, batch: TrainingBatch, me: Hashable) -> Gradients:
        own, step = self._own, self._step
        settings = {"value_weight": own.value_weight}
        batch = replace(
            batch,
            weights=self._stepper.weights,
            version=step,
            settings=settings,
            keep_on_device=True,
            executor=self._compute,
        )
        self._lane.enter("idle")
        found: Gradients = await self._infer(batch, rows=len(batch.features), client=me)
        if self._loss_name not in ("", found.loss_name):
            raise UsageError(
                f"{own.out} was made with the loss '{self._loss_name}', and this run has '{found.loss_name}'. "
                f"Use that with -B loss={self._loss_name}, or give another folder with --out."
            )
        self._loss_name = found.loss_name
        return found

    async def _validate(self, me: Hashable) -> None:
        found = [await self._ask(replace(batch, backward=False), me) for batch in self._batches.validating()]
        if found:
            rows = [len(batch.features) for batch in self._batches.validating()]
            mean = self._mean(found, "validation", rows)
            self._facts.update(mean)
            self._add_row()
            self._add_to_curve({name.replace(": ", "_"): one for name, one in mean.items()})

    @staticmethod
    def _mean(found: list[Gradients], name: str, weights: list[int] | None = None) -> dict[str, float]:
        """Of losses and their parts, over batches; as facts."""
        shares = weights or [1] * len(found)
        sums = {name: math.fsum(one.loss * share for one, share in zip(found, shares, strict=True))}
        for part in found[0].parts:
            sums[f"{name}: {part}"] = math.fsum(
                one.parts.get(part, 0.0) * share for one, share in zip(found, shares, strict=True)
            )
        return {key: value / sum(shares) for key, value in sums.items()}

    def _add_row(self) -> None:
        """To the loss curve, of the steps since its last row."""
        if self._since:
            last = self._since[-1]
            means = {name: math.fsum(one.get(name, 0.0) for one in self._since) / len(self._since) for name in last}
            self._add_to_curve({**means, "learning_rate": last["learning_rate"]})
            self._since.clear()

    def _add_to_curve(self, figures: dict[str, float]) -> None:
        row = {"step": self._step, **figures}
        self._rows.append(row)
        self._unreported.append(row)

    async def _write_curve(self) -> None:
        self._write_at = time.monotonic() + CURVE_S
        rows, self._rows = self._rows, []
        if rows:
            await self._do(self._files, self.folder.add_to_curve, rows)

    async def _keep(self) -> None:
        self._lane.enter("record")
        self._add_row()
        await self._write_curve()  # before the checkpoint: what is done again begins after it
        state = await self._do(self._compute, self._stepper.state)
        await self._do(self._files, self.folder.keep, self._step, self._loss_name, state)
        self._lane.enter("idle")
        self._kept = self._step

    async def _do(self, where: Executor, work: Callable[..., Made], *arguments: Any) -> Made:
        return await asyncio.get_running_loop().run_in_executor(where, work, *arguments)

    def _progress(self) -> Progress:
        self._tell_at = time.monotonic() + TELL_S
        batches = self._batches
        if self._latest:
            self._facts.update(self._mean(list(self._latest), "loss"))
        facts = {
            "training_steps": self._step,
            "batch_size": batches.size,
            "training_positions": len(batches.rows),
            "validation_positions": len(batches.validation),
            "epochs": self._step / batches.an_epoch,
            "checkpoint": self._kept,
            **self._spent,
            **self._facts,
        }
        counts = {"steps": self._step - self._begun}
        rows, self._unreported = self._unreported, []
        figures = [(int(row["step"]), {name: one for name, one in row.items() if name != "step"}) for row in rows]
        return Progress(self._step, self._own.steps, "steps", counts, facts, before=self._begun, figures=figures)
