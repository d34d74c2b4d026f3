"""Training passes on several devices: torch's DistributedDataParallel, with a process for each device.

This process has the first device and all of the optimizer. Before a pass the other ranks get their rows over a channel
and the weights by one broadcast; while gradients are computed torch averages them over all ranks. A rank that fails or
dies ends the group, since the others would wait for it.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuinfer.api import Limits, ModelSpec, Setup
from gpuinfer.errors import BackendDied, BackendError, GpuinferError, UsageError
from gpuinfer.gradients import Gradients, TrainingBatch
from gpuinfer.host import children
from gpuinfer.host.child import BURIAL_S, Channel, ChannelClosed, Child, cannot_start, how_it_ended
from gpuinfer.host.error_text import error_from_wire, error_to_wire, short_message
from gpuinfer.stats import DeviceCount

if TYPE_CHECKING:
    from gpuinfer.models.gradients import GradientPass, GradientTuning, OpenedGradients

START_S = 300.0  # for a rank to build its model
LOOK_S = 0.2  # between two polls of a rank that starts
READ_S = 1.0  # between two readings of the devices
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # by which ranks reach one another
CURE = "What has been trained is kept: the same command with --resume goes on."


@dataclass(frozen=True)
class RankOrder:
    """What a rank's process is started with."""

    spec: ModelSpec
    setup: Setup  # of its own device
    tuning: GradientTuning
    rank: int
    ranks: int
    store: str  # a file in a folder of this run alone, by which ranks find one another


@contextlib.contextmanager
def _over_loopback() -> Iterator[None]:
    """Have ranks, which are all on this machine, listen on its loopback interface alone."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    added = {name: names[0] for name in INTERFACES if names and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _join(order: RankOrder, passes: GradientPass) -> None:
    """Enter the process group once all other ranks do. Raises `BackendError`."""
    from torch import distributed

    backend = "nccl" if order.setup.device.startswith("cuda") else "gloo"
    try:
        with _over_loopback():
            distributed.init_process_group(
                backend,
                store=distributed.FileStore(order.store, order.ranks),  # type: ignore[attr-defined]
                rank=order.rank,
                world_size=order.ranks,
                timeout=timedelta(seconds=order.setup.give_up),
            )
            passes.distribute(order.rank, order.ranks)
    except RuntimeError as error:
        raise BackendError(
            f"{order.ranks} processes cannot train together ({backend}): {short_message(error)}. Train on one device."
        ) from error


def rank_main(end: socket.socket, order: RankOrder) -> None:
    """The life of a rank but the first: a message and an answer for each pass. Ends when the channel does."""
    children.set_up_child()
    channel = Channel(end)
    with contextlib.suppress(ChannelClosed):
        try:
            _serve_rank(channel, order)
        except GpuinferError as error:
            channel.send({"error": error_to_wire(error)})
        except Exception as error:  # noqa: BLE001 (whatever it is, the first rank must hear of it)
            channel.send({"error": error_to_wire(BackendError(short_message(error)))})
    os._exit(0)  # a group that lacks a rank cannot be left in order


def _serve_rank(channel: Channel, order: RankOrder) -> None:
    gradients = importlib.import_module("gpuinfer.models.gradients")  # which imports torch
    passes, _ = gradients.open_pass(order.spec, order.setup, order.tuning)
    gauge = importlib.import_module("gpuinfer.models.device").Gauge(passes.device)
    importlib.import_module("torch._dynamo")  # which the first pass would wait for
    channel.send({"built": True})
    _join(order, passes)
    channel.send({"joined": True})
    while True:
        message = channel.receive()
        batch = replace(batch_from_wire(message), keep_on_device=True)  # the gradients stay where they are
        found: Gradients = passes(batch, message["rows_in_all"])
        answer = {"loss": found.loss, "parts": dict(found.parts), "activation_bytes": found.activation_bytes}
        channel.send(answer | ({"device": dict(gauge.read())} if message["read"] else {}))


def _to_wire(array: np.ndarray) -> tuple[str, list[int], bytes]:
    return array.dtype.str, list(array.shape), np.ascontiguousarray(array).tobytes()


def _from_wire(message: Sequence[Any]) -> np.ndarray:
    dtype, shape, content = message
    return np.frombuffer(bytearray(content), np.dtype(dtype)).reshape(shape)  # writable, as torch wants it


def open_data_parallel(spec: ModelSpec, setups: Sequence[Setup], tuning: GradientTuning) -> OpenedGradients:
    """The model on several devices, each with its setup. Raises as `open_gradients`, and `BackendDied` for a rank that
    dies meanwhile.
    """
    from torch import distributed

    from gpuinfer.models.gradients import OpenedGradients, open_pass

    if not distributed.is_available():
        raise UsageError("this torch has no torch.distributed, and several devices cannot train together. Name one.")
    if distributed.is_initialized():
        raise UsageError(
            "this process is in a group of torch.distributed already, and training on several devices makes its own. "
            "Train on one device: --device cuda:0."
        )
    group = TrainingGroup(spec, setups, tuning)
    try:
        passes, facts = open_pass(spec, setups[0], tuning)
        group.open(passes)
    except BaseException:
        group.close()
        raise
    limits = Limits(facts["in_force"]["max_rows"])
    return OpenedGradients(limits, group.passed, lambda: {**group.device(), **facts}, group.close)


class TrainingGroup:
    """The first rank, in this process, and the processes of the others. One thread at a time calls `passed`."""

    def __init__(self, spec: ModelSpec, setups: Sequence[Setup], tuning: GradientTuning) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpuinfer-ranks-"))
        store = str(self._folder / "store")
        self._orders = [RankOrder(spec, one, tuning, rank, len(setups), store) for rank, one in enumerate(setups)]
        self._ranks: list[tuple[Child, Channel]] = []
        self._counts = [DeviceCount() for _ in setups]
        self._readings: list[Mapping[str, Any]] = [{} for _ in setups]
        self._read_at = 0.0
        self._lost: GpuinferError | None = None
        self._over = threading.Event()
        try:
            with children.threads_per_process(len(setups)):
                for order in self._orders[1:]:
                    child = Child(rank_main, order, name=f"gpuinfer training rank {order.rank}", daemon=True)
                    self._ranks.append((child, Channel(child.end)))
        except Exception as error:
            self.close()
            raise cannot_start("a process that trains", error) from error

    def open(self, passes: GradientPass) -> None:
        """Wait until all ranks have built the model, and train together with them."""
        from gpuinfer.models.device import Gauge
        from gpuinfer.models.open_model import threads_for

        self._passes, self._gauge = passes, Gauge(passes.device)
        self._threads = threads_for(self._orders[0].setup, self._orders[0].tuning)
        for rank in range(1, len(self._orders)):
            self._answer(rank, START_S)
        threading.Thread(target=self._watch, name="gpuinfer-ranks", daemon=True).start()
        try:
            _join(self._orders[0], passes)
        except BackendError as error:
            raise self._lose(error) from None
        for rank in range(1, len(self._orders)):
            self._answer(rank, START_S)
        self._readings = [dict(self._gauge.read())] * len(self._orders)

    def passed(self, batch: TrainingBatch) -> Gradients:
        """Gradients of the whole batch, to which each rank contributes its rows. A pass without `backward` is computed
        here alone. Raises what `GradientPass` raises, and `BackendDied` once a rank is gone.
        """
        from gpuinfer.models.open_model import compute_with

        compute_with(self._threads)
        if not batch.backward:
            return self._passes(batch)
        if self._lost is not None:
            raise self._lost
        self._passes.refuse_misfit(batch)
        parts = split_batch(batch, len(self._orders))
        began = time.monotonic()
        read = began - self._read_at > READ_S
        self._read_at = began if read else self._read_at
        for count in self._counts:
            count.begin()
        rows = 0
        try:
            for (_, channel), part in zip(self._ranks, parts[1:], strict=True):
                channel.send({**batch_to_wire(part), "rows_in_all": len(batch.features), "read": read})
            own = self._passes(parts[0], len(batch.features))
            answers = [self._answer(rank, self._orders[rank].setup.give_up) for rank in range(1, len(self._orders))]
            rows = len(batch.features)
        except (GpuinferError, ChannelClosed, RuntimeError) as error:
            raise self._lose(error) from error
        finally:
            for count, part in zip(self._counts, parts, strict=True):
                count.end(len(part.features) if rows else 0)
        if read:
            self._readings = [dict(self._gauge.read()), *(answer["device"] for answer in answers)]
        return _together(own, answers, parts)

    def _answer(self, rank: int, within_s: float) -> Mapping[str, Any]:
        """The next message of a rank. Raises what it reports, and `BackendDied` when it has ended or says nothing."""
        child, channel = self._ranks[rank - 1]
        try:
            message: Mapping[str, Any] = channel.receive(within_s)
        except ChannelClosed:
            raise self._died(rank, how_it_ended(child.exit_code(BURIAL_S))) from None
        except TimeoutError:
            raise self._died(rank, f"has sent nothing for {within_s:g} s") from None
        if "error" in message:
            raise error_from_wire(message["error"])
        return message

    def _died(self, rank: int, how: str) -> BackendDied:
        order = self._orders[rank]
        return BackendDied(f"the process that trains on {order.setup.device} (rank {rank}) {how}. {CURE}")

    def _lose(self, error: BaseException) -> GpuinferError:
        """End the group after an error of this rank; the error to raise: that of another rank, where it has one, since
        an operation of the group fails here for what has happened there.
        """
        cause = error
        if not isinstance(error, BackendDied):
            for rank in range(1, len(self._orders)):
                try:
                    if self._ranks[rank - 1][1].poll(BURIAL_S / len(self._orders)):
                        self._answer(rank, BURIAL_S)
                except GpuinferError as other:
                    cause = other
                    break
                except (ChannelClosed, TimeoutError):
                    continue
        if not isinstance(cause, GpuinferError):
            cause = BackendDied(f"the processes that train have lost one another: {short_message(cause)}. {CURE}")
        self._lost = self._lost or (
            cause if isinstance(cause, BackendDied) else BackendDied(f"training on several devices ended: {cause}")
        )
        self.close()
        return cause

    def _watch(self) -> None:
        """Until it is closed: once a rank is gone, abort what this process waits for. Gloo notices by itself, NCCL does
        not.
        """
        sentinels = [child.process.sentinel for child, _ in self._ranks]
        while not self._over.wait(LOOK_S):
            if not self._over.is_set() and connection.wait(sentinels, 0):
                _abort()
                return

    def device(self) -> Mapping[str, Any]:
        """All devices for the report."""
        from gpuinfer.models.device import device_labels, merged_readings, resolve_devices

        labels = device_labels(resolve_devices([order.setup.device for order in self._orders]))
        own = [{**one, **count.told()} for one, count in zip(self._readings, self._counts, strict=True)]
        return {**merged_readings(self._readings), "devices": dict(zip(labels, own, strict=True))}

    def close(self) -> None:
        """End the other ranks, and leave the group."""
        self._over.set()
        for child, channel in self._ranks:
            channel.close()
            child.kill()
        for child, _ in self._ranks:
            child.exit_code(BURIAL_S)
        _abort()
        shutil.rmtree(self._folder, ignore_errors=True)


def _abort() -> None:
    """Leave the process group, whatever is under way in it."""
    from torch import distributed

    if distributed.is_initialized():
        with contextlib.suppress(Exception):  # its other ranks are gone
            distributed.distributed_c10d._abort_process_group()  # of NCCL: else a collective would wait on
        with contextlib.suppress(Exception):
            distributed.destroy_process_group()


def split_batch(batch: TrainingBatch, parts: int) -> list[TrainingBatch]:
    """The batch in parts of about as many rows, in order. Raises `BackendError` for fewer rows than parts."""
    rows = len(batch.features)
    if rows < parts:
        raise BackendError(
            f"a batch of {rows} rows cannot be divided among {parts} devices. Give at least --batch-size {parts}, or "
            "fewer devices."
        )
    bounds = [rows * part // parts for part in range(parts + 1)]
    return [
        replace(
            batch,
            features=batch.features[start:stop],
            targets={name: one[start:stop] for name, one in batch.targets.items()},
        )
        for start, stop in pairwise(bounds)
    ]


def batch_to_wire(batch: TrainingBatch) -> dict[str, Any]:
    """Plain values for another process, without the weights."""
    return {
        "arrays": [_to_wire(batch.features), *map(_to_wire, batch.targets.values())],
        "targets": list(batch.targets),
        "version": batch.version,
        "settings": dict(batch.settings),
        "backward": batch.backward,
    }


def batch_from_wire(message: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> TrainingBatch:
    """The batch, with these weights."""
    features, *targets = map(_from_wire, message["arrays"])
    return TrainingBatch(
        features,
        dict(zip(message["targets"], targets, strict=True)),
        weights,
        message["version"],
        message["settings"],
        message["backward"],
    )


def _together(own: Gradients, answers: Sequence[Mapping[str, Any]], parts: Sequence[TrainingBatch]) -> Gradients:
    """The first rank's result, with losses that are the means of all rows."""
    rows = [len(part.features) for part in parts]
    shares = [count / sum(rows) for count in rows]
    losses = [own.loss, *(answer["loss"] for answer in answers)]
    named = [own.parts, *(answer["parts"] for answer in answers)]
    means = {
        name: math.fsum(share * one.get(name, 0.0) for share, one in zip(shares, named, strict=True))
        for name in own.parts
    }
    most = max([own.activation_bytes, *(answer["activation_bytes"] for answer in answers)])
    loss = math.fsum(share * one for share, one in zip(shares, losses, strict=True))
    return replace(own, loss=loss, parts=means, activation_bytes=most)
