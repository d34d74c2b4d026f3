"""The server process: opens the model, serves clients, and does what its owner says on their line.

The main thread never runs the model: it answers the owner at once, whatever the forward threads are doing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Backend, ModelSpec, Roofline, Setup, Strategy
from gpuinfer.central.blocks import BlockForm
from gpuinfer.central.protocol import PendingChanges, WeightsChange
from gpuinfer.central.row_server import BatchRunner, RowServer
from gpuinfer.engine.trace_recorder import Recorder
from gpuinfer.engine.watchdog import Patience, Watchdog
from gpuinfer.errors import BackendDied, BackendError, GpuinferError, UsageError, WorkError
from gpuinfer.host import children, error_text, machine, process
from gpuinfer.host.child import Channel, ChannelClosed, Heartbeat
from gpuinfer.host.children import quoted_log_line
from gpuinfer.host.error_text import error_to_wire
from gpuinfer.host.shared_memory import Descriptor
from gpuinfer.text.text_options import TorchModelOptions

if TYPE_CHECKING:
    from gpuinfer.central.text_server import TextServer

_Opened = tuple["RowServer | TextServer", Any, Recorder | None]  # the model, whose `device()` says where it is
LOOK_S = 0.5  # between two looks at how long batches take
CHANGING_S = 0.01  # and at whether other weights are there
DRAIN_S = 5.0  # for batches to end when the owner closes


@dataclass(frozen=True)
class OtherTextBackend:
    """Another model of text than our own: a backend, which may start processes, at work in the server process."""

    backend: type[Backend]
    options: Mapping[str, Any] = field(default_factory=dict)
    called: str = "the central server"  # in errors
    start_s: float = 3600.0  # that it may take to come up
    log: str | None = None  # a file for all that it and its processes print; None: our standard error


@dataclass(frozen=True)
class ServerStart:
    """All that a server process is told at its start."""

    setup: Setup
    options: TorchModelOptions
    roofline: Roofline | None
    strategy: type[Strategy]
    strategy_setup: Setup
    strategy_options: Mapping[str, Any]
    token: bytes
    most_clients: int
    batch_timeout_s: float
    owner: int  # the process that starts it
    texts: OtherTextBackend | None = None
    changes: tuple[WeightsChange, ...] = ()  # of the weights, that one before it was told


def server_main(end: socket.socket, listener: socket.socket, heartbeat: Descriptor, order: ServerStart) -> None:
    """The life of the process, which beats in the memory of `heartbeat`."""
    if order.texts is not None and order.texts.log is not None:
        _print_to(order.texts.log)
    children.set_up_child(group=order.texts is not None)
    machine.descriptors()  # as many as it may have: each client takes one, and before Python 3.13 each of its blocks
    Heartbeat(heartbeat)
    line, code = Channel(end), 0
    with contextlib.suppress(OSError, ChannelClosed):  # the owner has gone
        try:
            desk, opened, recorder = _open(order, listener, heartbeat.number)
        except Exception as error:  # noqa: BLE001 (whatever it is, the owner must hear of it)
            line.send({"error": _told(error)})
            return _leave(1, order)
        process.shorten_collections()
        desk.start()
        limits = desk.limits
        ready = {
            "max_rows": limits.max_rows,
            "in_flight": limits.in_flight,
            "slots": limits.slots,
            "adapters": [] if isinstance(desk, RowServer) else list(desk.adapters),
        }
        with contextlib.nullcontext() if recorder is None else contextlib.closing(recorder):
            line.send({"ready": ready})
            code = _obeyed(line, desk, opened, order)
    return _leave(code, order)  # when the trace is whole: it ends the process at once


def _print_to(path: str) -> None:
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _leave(code: int, order: ServerStart) -> None:
    if order.texts is not None:
        children.kill_descendants()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch apart first would cost up to a second


def _open(order: ServerStart, listener: socket.socket, pulse: int) -> _Opened:
    spec = order.setup.model
    if spec is None:
        raise UsageError("the central server serves a model, and none was named. Name one.")
    return _open_text(spec, order, listener, pulse) if spec.kind == "text" else _open_rows(spec, order, listener, pulse)


def _open_text(spec: ModelSpec, order: ServerStart, listener: socket.socket, pulse: int) -> _Opened:
    from gpuinfer.central.text_server import OwnTextBackend, TextServer

    strategy = _strategy(order)
    backend: Backend = (
        OwnTextBackend(spec, order.setup, order.options)
        if order.texts is None
        else order.texts.backend(order.setup, **order.texts.options)
    )
    recorder = Recorder.of(order.setup, None, type(strategy).__name__.lower())
    desk = TextServer(
        backend,
        strategy,
        listener,
        order.token,
        pulse,
        most_clients=order.most_clients,
        max_queue_rows=order.setup.max_queue_rows,
        recorder=recorder,
    )
    for change in order.changes:
        desk.change(change).result()
    return desk, backend, recorder


def _open_rows(spec: ModelSpec, order: ServerStart, listener: socket.socket, pulse: int) -> _Opened:
    from gpuinfer.models.open_model import open_on_devices

    opened = open_on_devices(spec, order.setup, order.options, order.roofline)
    answerer = BatchRunner(opened)
    strategy = _strategy(order)
    form = BlockForm(spec, opened.answer)
    recorder = Recorder.of(order.setup, opened.limits, type(strategy).__name__.lower())
    desk = RowServer(
        answerer,
        form,
        opened.limits,
        strategy,
        listener,
        order.token,
        pulse,
        most_clients=order.most_clients,
        max_queue_rows=order.setup.max_queue_rows,
        recorder=recorder,
    )
    return desk, opened, recorder


def _strategy(order: ServerStart) -> Strategy:
    return order.strategy(order.strategy_setup, **order.strategy_options)


def _told(error: Exception) -> dict[str, str]:
    if isinstance(error, GpuinferError):
        return error_to_wire(error)
    return error_to_wire(
        BackendError(f"the central server could not start: {error_text.full_message(error)}. See its last words above.")
    )


def _obeyed(line: Channel, desk: RowServer | TextServer, opened: Any, order: ServerStart) -> int:
    """The process's exit code. What nobody foresaw ends it: other threads would keep it there, and nobody answers."""
    try:
        _obey(line, desk, opened, order)
    except (OSError, EOFError):
        raise
    except Exception as error:  # noqa: BLE001 (whatever it is, the owner and all who wait must hear of it)
        fault = BackendDied(
            f"the central server failed: {error_text.full_message(error)}. Start it again, and report this."
        )
        desk.dismiss_all(fault)
        line.send({"error": error_to_wire(fault)})
        return 1
    return 0


def _obey(line: Channel, desk: RowServer | TextServer, opened: Any, order: ServerStart) -> None:
    """Do what the owner says, until it says close or is gone."""

    def give_up(error: WorkError) -> None:
        desk.fault = error

    watchdog = Watchdog(Patience.of(order.setup), give_up, name="the central server")
    watchdog.watch(partial(desk.held, watchdog.patience))
    pending = PendingChanges()
    while (
        os.getppid() == order.owner
    ):  # processes that the owner forked may hold its end of the line open after its death
        asked = line.poll(CHANGING_S if pending else LOOK_S)
        for told in pending.done():
            line.send(told)
        watchdog.check_again()
        if (fault := desk.fault or _overdue(desk, order.batch_timeout_s)) is not None:  # also while it is asked
            fault = _with_last_words(fault, order.texts)
            desk.dismiss_all(fault)
            line.send({"error": error_to_wire(fault)})
            return
        if not asked:
            continue
        wanted = line.receive()
        if "change" in wanted:
            pending.add(wanted["number"], _changing(desk, WeightsChange(**wanted["change"])))
            continue
        if closing := "close" in wanted:
            desk.close(DRAIN_S)
        line.send({"stats": _stats(desk, opened), "number": wanted["number"]})
        if closing:
            return


def _with_last_words(fault: WorkError, texts: OtherTextBackend | None) -> WorkError:
    """What its processes have printed of it, where that goes to a file."""
    if texts is None or texts.log is None or not isinstance(fault, BackendDied):
        return fault
    return BackendDied(f"{fault}{quoted_log_line(texts.log)}")


def _changing(desk: RowServer | TextServer, change: WeightsChange) -> Future[Sequence[str]]:
    if not isinstance(desk, RowServer):
        return desk.change(change)
    refused: Future[Sequence[str]] = Future()
    refused.set_exception(UsageError("a model of rows keeps its weights. End the run, and start another."))
    return refused


def _overdue(desk: RowServer | TextServer, batch_timeout_s: float) -> BackendDied | None:
    if desk.busy_s() <= batch_timeout_s:
        return None
    return BackendDied(
        f"the model has not answered a batch for {batch_timeout_s:g} s, and the server has given it up. "
        "Mend the model, or allow more with batch_timeout."
    )


def _stats(desk: RowServer | TextServer, opened: Any) -> dict[str, Any]:
    wire, (ran, waited) = desk.snapshot().to_wire(), machine.cpu_times()
    own = {"cpu_s": ran, "cpu_wait_s": waited, "rss_peak_mb": machine.rss_peak_mb()}
    return {**wire, **own, "device": dict(opened.device())}
