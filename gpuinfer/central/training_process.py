"""A model in training in a process of its own, whose rows come over a channel, and weights and gradients through shared
memory. It has one client, which started it, and computes one batch after the other.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Limits, Setup
from gpuinfer.errors import BackendDied, BackendError, GpuinferError
from gpuinfer.gradients import Gradients, TrainingBatch
from gpuinfer.host import children, shared_memory
from gpuinfer.host.child import BURIAL_S, Channel, ChannelClosed, Child, cannot_start, how_it_ended
from gpuinfer.host.error_text import error_from_wire, error_to_wire, short_message
from gpuinfer.models.data_parallel import CURE, START_S, batch_from_wire, batch_to_wire

if TYPE_CHECKING:
    from gpuinfer.models.gradients import GradientTuning

ALIGNED = 64  # bytes: where each array begins


class ArrayPlace(msgspec.Struct, frozen=True):
    """Where an array is in shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SharedArrays:
    """The arrays of a model's state, once for weights and once for what a pass makes of them."""

    places: tuple[ArrayPlace, ...]
    size: int  # bytes of one of the two

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> SharedArrays:
        places, offset = [], 0
        for name, array in arrays.items():
            places.append(ArrayPlace(name, array.dtype.str, array.shape, offset))
            offset += math.ceil(array.nbytes / ALIGNED) * ALIGNED
        return cls(tuple(places), max(ALIGNED, offset))

    def views(self, memory: Any, number: int) -> dict[str, NDArray[Any]]:
        """Arrays in the memory's first half, or of number 1 in its second."""
        return {
            one.name: np.ndarray(one.shape, np.dtype(one.dtype), memory, number * self.size + one.offset)
            for one in self.places
        }


@dataclass(frozen=True)
class TrainingOrder:
    setup: Setup
    tuning: GradientTuning
    arrays: SharedArrays


def training_main(end: socket.socket, memory: shared_memory.Descriptor, order: TrainingOrder) -> None:
    """The life of the process, which may have others of its own, one for each further device."""
    children.set_up_child(group=True)
    channel = Channel(end)
    with contextlib.suppress(ChannelClosed):  # the client has gone
        try:
            _serve(channel, memory, order)
        except GpuinferError as error:
            channel.send({"error": error_to_wire(error)})
        except Exception as error:  # noqa: BLE001 (whatever it is, the client must hear of it)
            channel.send({"error": error_to_wire(BackendError(short_message(error)))})
    children.kill_descendants()
    os._exit(0)


def _serve(channel: Channel, memory: shared_memory.Descriptor, order: TrainingOrder) -> None:
    spec = order.setup.model
    assert spec is not None
    shared = shared_memory.attach(os.dup(memory.number), 2 * order.arrays.size)
    weights, made = order.arrays.views(shared, 0), order.arrays.views(shared, 1)
    opened = importlib.import_module("gpuinfer.models.gradients").open_gradients(spec, order.setup, order.tuning)
    importlib.import_module("torch._dynamo")  # which the first pass would wait for
    channel.send({"max_rows": opened.limits.max_rows, "device": dict(opened.device())})
    while True:
        message = channel.receive()
        batch = batch_from_wire(message, weights=weights if message["weighted"] else None)
        found: Gradients
        try:
            found = opened.passed(batch)
        except BackendDied:
            raise
        except GpuinferError as error:  # this batch fails alone
            channel.send({"failed": error_to_wire(error)})
            continue
        for arrays in (found.by_name, found.buffers):
            for name, array in arrays.items():
                made[name][...] = array
        channel.send(
            {
                "by_name": list(found.by_name),
                "buffers": list(found.buffers),
                "measured": {
                    "loss": found.loss,
                    "parts": dict(found.parts),
                    "activation_bytes": found.activation_bytes,
                    "forward_s": found.forward_s,
                    "backward_s": found.backward_s,
                    "loss_name": found.loss_name,
                },
                "device": dict(opened.device()),
            }
        )


class TrainingProcess:
    """The client's side. One thread at a time."""

    def __init__(self, setup: Setup, tuning: GradientTuning) -> None:
        self._setup, self._tuning = setup, tuning
        self._child: Child | None = None
        self._channel: Channel
        self._version: int | None = None  # of the weights in shared memory
        self._device: Mapping[str, Any] = {}
        self.lost: BackendDied | None = None

    def start(self) -> Limits:
        """Start the process, and wait until the model is there. Raises `UsageError` where there can be none."""
        from gpuinfer.models.load import with_weights

        spec = self._setup.model
        assert spec is not None
        state = with_weights(spec, self._setup.seed).float().state_dict()
        arrays = SharedArrays.of({name: one.numpy() for name, one in state.items()})
        descriptor, memory = shared_memory.create(2 * arrays.size)
        self._weights, self._made = arrays.views(memory, 0), arrays.views(memory, 1)
        handed = shared_memory.Descriptor(descriptor)
        order = TrainingOrder(replace(self._setup, processes=1), self._tuning, arrays)
        try:
            self._child = Child(training_main, handed, order, name="gpuinfer training server", group=True)
        except Exception as error:
            raise cannot_start("the process that trains", error) from error
        finally:
            handed.close()
        self._channel = Channel(self._child.end)
        ready = self._answer(START_S)
        self._device = ready["device"]
        return Limits(ready["max_rows"])

    def passed(self, batch: TrainingBatch) -> Gradients:
        """Gradients in memory of their own. Raises what the pass raises, and `BackendDied` once the process is gone."""
        if self.lost is not None:
            raise self.lost
        if not isinstance(batch, TrainingBatch):
            raise BackendError(
                f"a request for gradients is a gpuinfer.gradients.TrainingBatch, and this is {type(batch).__name__}."
            )
        weighted = batch.weights is not None
        if batch.weights is not None and batch.version != self._version:
            for name, array in self._weights.items():
                array[...] = np.asarray(batch.weights[name])
            self._version = batch.version
        try:
            self._channel.send({**batch_to_wire(batch), "weighted": weighted})
        except ChannelClosed:
            raise self._died() from None
        answer = self._answer(self._setup.give_up)
        if "failed" in answer:
            raise error_from_wire(answer["failed"])
        self._device = answer["device"]
        by_name, buffers = ({name: self._made[name].copy() for name in answer[key]} for key in ("by_name", "buffers"))
        return Gradients(by_name=by_name, buffers=buffers, **answer["measured"])

    def _answer(self, within_s: float) -> Mapping[str, Any]:
        try:
            message: Mapping[str, Any] = self._channel.receive(within_s)
        except ChannelClosed:
            raise self._died() from None
        except TimeoutError:
            raise self._died(f"has sent nothing for {within_s:g} s") from None
        if "error" in message:
            error = error_from_wire(message["error"])
            self.lost = error if isinstance(error, BackendDied) else None
            raise error
        return message

    def _died(self, how: str = "") -> BackendDied:
        code = None if self._child is None else self._child.exit_code(BURIAL_S)
        self.lost = BackendDied(f"the server process that trains {how or how_it_ended(code)}. {CURE}")
        self.close()
        return self.lost

    def device(self) -> Mapping[str, Any]:
        """As the process last reported."""
        return self._device

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._channel.close()
            child.exit_code(BURIAL_S)
            child.kill(BURIAL_S)
