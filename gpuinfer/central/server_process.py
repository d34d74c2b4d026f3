"""The server process: opens the model, serves clients, and does what its owner asks on their channel.

The main thread never runs the model: it answers the owner at once, whatever the forward threads are doing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Backend, Roofline, Setup, Strategy
from gpuinfer.central.blocks import BlockForm
from gpuinfer.central.protocol import WeightsChange
from gpuinfer.central.row_server import BatchRunner, RowServer
from gpuinfer.engine.profiler import ProfileWindow
from gpuinfer.engine.trace_recorder import Recorder
from gpuinfer.engine.watchdog import Patience, Watchdog
from gpuinfer.errors import BackendDied, BackendError, GpuinferError, UsageError, WorkError
from gpuinfer.host import children, error_text, machine, process
from gpuinfer.host.child import Channel, ChannelClosed, Heartbeat
from gpuinfer.host.children import quoted_log_line
from gpuinfer.host.error_text import error_to_wire
from gpuinfer.host.shared_memory import Descriptor
from gpuinfer.models.row_format import ANSWER_DTYPES
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
    changes: tuple[WeightsChange, ...] = ()  # of the weights, since the first start


def server_main(end: socket.socket, listener: socket.socket, heartbeat: Descriptor, order: ServerStart) -> None:
    """The life of the process, which beats in the memory of `heartbeat`."""
    if order.texts is not None and order.texts.log is not None:
        with open(order.texts.log, "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    children.set_up_child(group=order.texts is not None)
    machine.descriptors()  # as many as it may have: each client takes one, and before Python 3.13 each of its blocks
    Heartbeat(heartbeat)
    owner, code = Channel(end), 0
    with contextlib.suppress(OSError, ChannelClosed):  # the owner has gone
        try:
            server, opened, recorder = _open(order, listener, heartbeat.number)
        except Exception as error:  # noqa: BLE001 (whatever it is, the owner must hear of it)
            if not isinstance(error, GpuinferError):
                why = error_text.full_message(error)
                error = BackendError(f"the central server could not start: {why}. See its last words above.")
            owner.send({"error": error_to_wire(error)})
            return _leave(1, order)
        process.shorten_collections()
        server.start()
        limits = server.limits
        ready = {
            "max_rows": limits.max_rows,
            "in_flight": limits.in_flight,
            "slots": limits.slots,
            "adapters": [] if isinstance(server, RowServer) else list(server.adapters),
        }
        with contextlib.nullcontext() if recorder is None else contextlib.closing(recorder):
            owner.send({"ready": ready})
            try:
                _obey(owner, server, opened, order)
            except (OSError, EOFError):
                raise
            except Exception as error:  # noqa: BLE001 (other threads would keep the process alive, unanswering)
                why = f"the central server failed: {error_text.full_message(error)}. Start it again, and report this."
                server.dismiss_all(fault := BackendDied(why))
                owner.send({"error": error_to_wire(fault)})
                code = 1
    return _leave(code, order)  # when the trace is whole: it ends the process at once


def _leave(code: int, order: ServerStart) -> None:
    if order.texts is not None:
        children.kill_descendants()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking torch apart first would cost up to a second


def _open(order: ServerStart, listener: socket.socket, pulse: int) -> _Opened:
    spec, strategy = order.setup.model, order.strategy(order.strategy_setup, **order.strategy_options)
    if spec is None:
        raise UsageError("the central server serves a model, and none was named. Name one.")
    name = type(strategy).__name__.lower()
    common: dict[str, Any] = {"most_clients": order.most_clients, "max_queue_rows": order.setup.max_queue_rows}
    if spec.kind != "text":
        from gpuinfer.models.open_model import open_on_devices

        if order.changes:  # since its first start
            spec = replace(spec, weights=order.changes[-1].weights)
        opened = open_on_devices(spec, order.setup, order.options, order.roofline)
        if odd := next((one for one in opened.answer.dtypes if one not in ANSWER_DTYPES), None):
            raise UsageError(
                f"model '{spec.name}' answers with {odd}, which does not go to other processes. Let it answer with one "
                f"of {', '.join(ANSWER_DTYPES)}, or compute in this process."
            )
        form, recorder = BlockForm(spec, opened.answer), Recorder.of(order.setup, opened.limits, name)
        answerer, common["recorder"] = BatchRunner(opened), recorder
        rows = RowServer(answerer, form, opened.limits, strategy, listener, order.token, pulse, **common)
        return rows, answerer, recorder
    from gpuinfer.central.text_server import OwnTextBackend, TextServer

    backend: Backend
    if order.texts is None:
        backend = OwnTextBackend(spec, order.setup, order.options)
    else:
        backend = order.texts.backend(order.setup, **order.texts.options)
    recorder = common["recorder"] = Recorder.of(order.setup, None, name)
    server = TextServer(backend, strategy, listener, order.token, pulse, **common)
    for change in order.changes:
        server.change(change).result()
    return server, backend, recorder


def _change_weights(change: WeightsChange, answerer: BatchRunner, order: ServerStart) -> Sequence[str]:
    """Of a model of rows: load it with the other weights, and have it answer. Raises `UsageError`."""
    from gpuinfer.models.open_model import open_with_weights

    if change.weights is None or change.adapter is not None:
        raise UsageError(f"a model of rows has no adapter '{change.adapter}'. Give other weights of the whole model.")
    answerer.take_over(open_with_weights(answerer.opened, change.weights, order.setup, order.options, order.roofline))
    return ()


def _started(work: Callable[[], Sequence[str]]) -> Future[Sequence[str]]:
    """`work` in a thread of its own, which ends with it."""
    executor = ThreadPoolExecutor(1, "gpuinfer-weights")
    try:
        return executor.submit(work)
    finally:
        executor.shutdown(wait=False)


def _obey(owner: Channel, server: RowServer | TextServer, opened: Any, order: ServerStart) -> None:
    """Do what the owner says, until it says close or is gone."""

    def give_up(error: WorkError) -> None:
        server.fault = error

    watchdog = Watchdog(Patience.of(order.setup), give_up, name="the central server")
    watchdog.watch(partial(server.held, watchdog.patience))
    window = ProfileWindow.of(order.setup, "server")
    pending: dict[int, Future[Sequence[str]]] = {}  # changes of weights that are under way
    while os.getppid() == order.owner:  # forked children of a dead owner may hold its end of the channel open
        asked = owner.poll(CHANGING_S if pending else LOOK_S)
        for number in [number for number, change in pending.items() if change.done()]:
            try:
                outcome: dict[str, Any] = {"adapters": list(pending.pop(number).result())}
            except GpuinferError as error:
                outcome = {"refused": error_to_wire(error)}
            except BaseException as error:  # noqa: BLE001 (whatever it is, the owner must hear of it)
                why = f"the weights could not be changed: {error_text.full_message(error)}. Report this."
                outcome = {"refused": error_to_wire(BackendError(why))}
            owner.send({"changed": number, **outcome})
        watchdog.check_again()
        if window is not None:
            window.look()
        fault = server.fault
        if fault is None and server.busy_s() > order.batch_timeout_s:  # also while it is asked
            fault = BackendDied(
                f"the model has not answered a batch for {order.batch_timeout_s:g} s, and the server has given it up. "
                "Mend the model, or allow more with batch_timeout."
            )
        if fault is not None:
            if order.texts is not None and order.texts.log is not None and isinstance(fault, BackendDied):
                fault = BackendDied(f"{fault}{quoted_log_line(order.texts.log)}")  # what its processes printed of it
            server.dismiss_all(fault)
            owner.send({"error": error_to_wire(fault)})
            return
        if not asked:
            continue
        wanted = owner.receive()
        if "change" in wanted:
            change = WeightsChange(**wanted["change"])
            if isinstance(server, RowServer):
                pending[wanted["number"]] = _started(partial(_change_weights, change, opened, order))
            else:
                pending[wanted["number"]] = server.change(change)
            continue
        if closing := "close" in wanted:
            server.close(DRAIN_S)
            if window is not None:
                window.end()
                window.join()
        ran, waited = machine.cpu_times()
        own = {
            "cpu_s": ran,
            "cpu_wait_s": waited,
            "rss_peak_mb": machine.rss_peak_mb(),
            "device": dict(opened.device()),
        }
        owner.send({"stats": {**server.snapshot().to_wire(), **own}, "number": wanted["number"]})
        if closing:
            return
