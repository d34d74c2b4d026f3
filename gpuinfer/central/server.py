"""`CentralServer`: starts the server process, watches it, hands out clients, and brings it back if it was asked to."""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing.connection
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, Self

from gpuinfer.api import Limits, ModelSpec, Roofline, Setup, Strategy
from gpuinfer.central import protocol
from gpuinfer.central.client import CentralClient
from gpuinfer.central.protocol import WeightsChange, changes_to_replay
from gpuinfer.central.server_process import CHANGING_S, OtherTextBackend, ServerStart, server_main
from gpuinfer.config import import_paths, registry
from gpuinfer.errors import BackendDied, Closed, GpuinferError, UnknownName, UsageError
from gpuinfer.host import children, machine, shared_memory
from gpuinfer.host.child import (
    HEARTBEAT_SIZE,
    LATE_S,
    Channel,
    ChannelClosed,
    Child,
    HeartbeatWatch,
    cannot_start,
    how_it_ended,
)
from gpuinfer.host.children import quoted_log_line
from gpuinfer.host.error_text import error_from_wire
from gpuinfer.models.row_layout import ITEM_BYTES, Leaf, RowLayout, layout_of_row, named_spec
from gpuinfer.stats import Snapshot, mean_size, merge_in_turn, percentile, summarise
from gpuinfer.text.text_options import TorchModelOptions

log = logging.getLogger(__name__)

START_S = 300.0  # for the model to be loaded
START_TEXT_S = 3600.0  # of text: hundreds of gigabytes, perhaps over a network
BACK_S = 60.0  # for a server that died to be there again
LOOK_S = 0.5
STATS_S = 2.0
CLOSE_S = 10.0
TRIES = 3  # deaths in a row, each within `BACK_S` of its start, after which it is not started again


class ServerProcess:
    """A model in a process of its own: started, watched, and brought back when it dies, with `restart`.

    `texts`: the backend that answers prompts there, where that is not our own model of text.
    """

    def __init__(
        self,
        setup: Setup,
        options: TorchModelOptions,
        strategy: Strategy,
        *,
        roofline: Roofline | None = None,
        max_clients: int = 256,
        batch_timeout: float = 300.0,
        restart: bool = False,
        texts: OtherTextBackend | None = None,
    ) -> None:
        self.limits: Limits  # once it has started
        self.adapters: tuple[str, ...] = ()  # that prompts may ask for
        self._at_start: frozenset[str] | None = None  # the adapters that each start brings back
        self._changes: list[WeightsChange] = []  # of the weights since the start, that one started again is told
        self._changed: dict[int, Any] = {}  # what has come of questions for such
        self._setup, self._options, self._strategy, self._texts = setup, options, strategy, texts
        self._roofline, self._max_clients = roofline, max_clients
        self._batch_timeout, self._restart = batch_timeout, restart
        self._called = "the central server" if texts is None else texts.called
        self._owner = os.getpid()
        self._child: Child | None = None
        self._watcher: threading.Thread | None = None  # once it has served
        self._address: protocol.ServerAddress | None = None
        self._line_lock = threading.Lock()  # one question to the process at a time
        self._questions = 0  # asked so far: an answer that comes too late is not taken for the next one's
        self._error: GpuinferError | None = None  # why it is not there
        self.lost = False  # its process died, and is not started again
        self._at_exit: Finalize | None = None
        self._before: list[Snapshot] = []  # what processes that died had counted, as far as known
        self._latest = Snapshot()
        self._closing = threading.Event()
        self._final: Snapshot | None = None

    # Starting

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process and wait until it serves. Raises `UsageError` for a model that cannot be had."""
        if self._address is not None:
            raise UsageError("this server has been started before. Make another.")
        if self._owner != os.getpid():
            raise UsageError("this server came here by fork. Start it where it was made, or make another here.")
        self._listener, self._address = protocol.listen()
        descriptor, mapping = shared_memory.create(HEARTBEAT_SIZE)
        self._heartbeat, self._pulse = shared_memory.Descriptor(descriptor), HeartbeatWatch(mapping)
        self._at_exit = Finalize(None, self.close, kwargs={"quiet": True}, exitpriority=0)  # else it would be joined
        try:
            self._spawn()
            self._watcher = threading.Thread(target=self._watch, name="gpuinfer-server-watch", daemon=True)
            self._watcher.start()
            self._refuse_when_closed()
        except BaseException as error:
            self._lose(error if isinstance(error, GpuinferError) else Closed("the server did not start. Make another."))
            raise
        _RUNNING.add(self)

    def _spawn(self) -> None:
        """One process, up to the moment when it serves."""
        children.refuse_while_imported("a server")
        try:
            with children.threads_per_process(1) if self._texts is None else contextlib.nullcontext():
                self._child = Child(
                    server_main,
                    self._listener,
                    self._heartbeat,
                    self._order(),
                    name="gpuinfer server",
                    group=self._texts is not None,
                )
        except Exception as error:
            raise cannot_start("the server process", error) from error
        self._started_at = time.monotonic()
        channel = Channel(self._child.end)
        ready = self._first_message(channel)
        self._channel = channel  # not before: others ask on it, and would take the first message
        self.limits = Limits(ready["max_rows"], ready["in_flight"], ready["slots"])
        self.adapters = tuple(ready["adapters"])
        if self._at_start is None:
            self._at_start = frozenset(self.adapters)
        self._pulse.late_s()  # from here on it counts

    def _first_message(self, channel: Channel) -> dict[str, Any]:
        seconds = self._start_s
        until = time.monotonic() + seconds
        while not channel.poll(LOOK_S):
            if time.monotonic() > until or self._closing.is_set():
                self._kill()
                self._refuse_when_closed()
                raise BackendDied(
                    f"{self._called} did not come up within {seconds:g} s.{self._words} Try a smaller model."
                )
        try:
            message = channel.receive()
        except ChannelClosed:
            self._refuse_when_closed()
            words = self._words or " See its last words above."
            code = None if self._child is None else self._child.exit_code()
            if code == children.UNGUARDED:
                raise UsageError(children.UNGUARDED_SAID.format("a server")) from None
            raise BackendDied(f"{self._called} {how_it_ended(code)} before it served anybody.{words}") from None
        if "error" in message:
            self._kill()
            error = error_from_wire(message["error"])
            raise BackendDied(f"{error}{self._words}") if isinstance(error, BackendDied) else error
        return dict(message["ready"])

    def _refuse_when_closed(self) -> None:
        if self._closing.is_set():
            raise Closed("the server was closed while it started. Make another.")

    def _order(self) -> ServerStart:
        assert self._address is not None
        strategy, options = self._strategy, self._options
        if not (self._is_text or machine.wants_cuda(self._setup.devices)):
            # on a CPU several single-threaded forwards at once beat one that has all threads
            cores = max(1, machine.cores() // len(self._setup.devices))  # of each stand-in device
            threads = options.threads or max(1, cores // (options.in_flight or cores))
            in_flight = options.in_flight or max(1, cores // threads)
            options = options.model_copy(update={"threads": threads, "in_flight": in_flight})
        return ServerStart(
            setup=replace(self._setup, processes=1),
            options=options,
            roofline=self._roofline,
            strategy=type(strategy),
            strategy_setup=strategy.setup,
            strategy_options=strategy.options.model_dump(),
            token=self._address.token,
            most_clients=self._max_clients,
            batch_timeout_s=self._batch_timeout,
            owner=self._owner,
            texts=self._texts,
            changes=tuple(self._changes),
        )

    # Serving

    def client(self) -> CentralClient:
        """A way in for one process: hand it over, and use it there.

        Raises `Closed` unless the server runs, and why it died when it will not come back.
        """
        if self.lost and self._error is not None and self._final is None:
            raise self._error
        if self._address is None or self._final is not None:
            raise Closed("this server does not run. Use it as `with CentralServer(…) as server:`.")
        return CentralClient(self._address, self.restarts_within_s)

    @property
    def address(self) -> protocol.ServerAddress:
        if self._address is None:
            raise Closed("this server has not been started. Call start() first.")
        return self._address

    @property
    def restarts_within_s(self) -> float:
        if not self._restart:
            return 0.0
        return self._start_s if self._is_text else BACK_S

    @property
    def _start_s(self) -> float:
        if self._texts is not None:
            return self._texts.start_s
        return START_TEXT_S if self._is_text else START_S

    @property
    def _is_text(self) -> bool:
        return self._setup.model is not None and self._setup.model.kind == "text"

    def stats(self) -> Snapshot:
        """What the server has counted until now, over all its restarts; the latest known if it does not say."""
        if self._final is not None:
            return self._final
        if self._address is None:
            return Snapshot()
        self._ask({"stats": True})
        with self._line_lock:
            return merge_in_turn([*self._before, self._latest])

    def _ask(self, question: Mapping[str, Any], seconds: float = STATS_S) -> bool:
        """Put a question to the process; its answer is the latest snapshot. Whether it came."""
        with self._line_lock, contextlib.suppress(ChannelClosed):
            self._questions += 1
            self._channel.send({**question, "number": self._questions})
            until = time.monotonic() + seconds
            while self._channel.poll(max(0.0, until - time.monotonic())):
                if self._take_in() == self._questions:
                    return True
        return False

    def change(self, change: WeightsChange) -> None:
        """Have a model of text change its weights or adapters; a process that is brought back does so again. Blocks.

        Raises what the model raises, `BackendDied` when the process ends meanwhile, and `Closed`.
        """
        with self._line_lock:
            if self._final is not None or self._address is None:
                raise Closed("this server does not run. Start another.")
            child = self._child
            self._questions += 1
            number = self._questions
            with contextlib.suppress(ChannelClosed):
                self._channel.send({"change": change, "number": number})
        while number not in self._changed:
            with self._line_lock, contextlib.suppress(ChannelClosed):
                while self._child is child and self._channel.poll(0):
                    self._take_in()
            if number not in self._changed and (self._child is not child or self.lost or self._closing.is_set()):
                raise BackendDied(f"{self._called} ended before its update had. Update it again when it is back.")
            time.sleep(CHANGING_S)
        outcome = self._changed.pop(number)
        if "refused" in outcome:
            raise error_from_wire(outcome["refused"])
        self.adapters = tuple(outcome["adapters"])
        self._changes = changes_to_replay(self._changes, change, self._at_start or ())

    def _take_in(self) -> int:
        """One message of the process: the number of the question that it answers, 0 for last words."""
        message = self._channel.receive()
        if "error" in message:
            self._error = error_from_wire(message["error"])
            return 0
        if "changed" in message:
            self._changed[message["changed"]] = message
            return 0
        self._latest = Snapshot.from_wire(message["stats"])
        return int(message["number"])

    # Watching

    def _watch(self) -> None:
        """Until it is closed: notice that the process died or stopped, and bring it back if that was asked for."""
        deaths = 0
        while not self._closing.is_set():
            child = self._child
            if child is None:
                return
            gone = multiprocessing.connection.wait([child.process.sentinel], LOOK_S)
            if self._closing.is_set():
                return
            if not gone and not self._pulse.stopped:
                continue
            deaths = deaths + 1 if time.monotonic() - self._started_at < BACK_S else 1
            error = self._cause_of_end(stopped=not gone)
            again = self._restart and deaths < TRIES
            after = f" {deaths} deaths in a row are enough: it is not started again." if self._restart else ""
            log.warning("%s%s", error, " It is started again." if again else after)
            if again:
                with self._line_lock:
                    self._channel.close()
                try:
                    self._spawn()
                    self._error = None
                    continue
                except GpuinferError as late:
                    if not self._closing.is_set():
                        log.warning("%s cannot be brought back: %s", self._called, late)
                    self._error = late
            self._lose(self._error or error)
            return

    def _cause_of_end(self, *, stopped: bool) -> GpuinferError:
        """Why it died: in its own last words, or as it looks from here."""
        with self._line_lock, contextlib.suppress(ChannelClosed):
            while self._error is None and self._channel.poll(0):
                self._take_in()
        code = None if stopped or self._child is None else self._child.exit_code()
        self._kill()
        why = f"gave no sign of life for {LATE_S:g} s" if stopped else how_it_ended(code)
        cure = "" if self._words else " See its last words, if any."
        cure += "" if self._restart else " With the option restart it comes back."
        error = self._error = self._error or BackendDied(f"{self._called} {why}.{self._words}{cure}")
        with self._line_lock:
            self._before.append(self._latest)
            self._latest = Snapshot()
        return error

    @property
    def _words(self) -> str:
        """What it printed last, where that goes to a file."""
        path = None if self._texts is None else self._texts.log
        return "" if path is None else quoted_log_line(path)

    # Closing

    def close(self, quiet: bool = False) -> Snapshot:
        """End the process; requests that wait fail. Returns its statistics, and prints them unless `quiet`."""
        if self._final is not None:
            return self._final
        if self._owner != os.getpid():  # a forked child that unwinds its stack: the server is its parent's
            return merge_in_turn([*self._before, self._latest])
        self._closing.set()
        if self._watcher is not None:
            child = self._child
            if child is not None and child.alive and self._ask({"close": True}, CLOSE_S):
                child.exit_code(CLOSE_S)
            self._kill()
            self._watcher.join(CLOSE_S)  # it may have been about to start another process
            self._let_go()
            with self._line_lock:
                self._channel.close()
        elif self._address is not None:  # another thread is about to start it
            self._kill()
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._final = merge_in_turn([*self._before, self._latest])
        if not quiet:
            print(summary(self._final), file=sys.stderr)
        return self._final

    def _lose(self, error: GpuinferError) -> None:
        """It is not there, and will not be."""
        self._error, self.lost = error, True
        self._let_go()

    def _let_go(self) -> None:
        self._kill()
        with contextlib.suppress(OSError):
            self._listener.close()  # clients that wait for a new server learn that none will come
        self._heartbeat.close()
        if self._address is not None:
            protocol.remove_address(self._address)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.kill(CLOSE_S)


class CentralServer(ServerProcess):
    """A model in a process of its own, for any number of client processes.

    ```
    with CentralServer("my_models:net", inputs=256) as server:
        Process(target=work, args=(server.client(),)).start()
    ```

    with CentralServer(ConvNet(), example=torch.zeros(3, 32, 32)) as server:
        server.client().evaluate(images)                       # float32 [rows, 3, 32, 32]
    ```

    `model` is `module:factory`, such a function itself, or a `ModelSpec`; or a `torch.nn.Module`, or its class, which
    is imported from its file over there. A row is flat, of `inputs` features; or as the `example`, a tensor, an array,
    a number, or a tuple or dict of these, which models take as of a `Batcher`. With an `example` a function is one of
    a batch.

    `strategy` is a name or an object. On a CPU there are as many single-threaded forwards at once as cores, unless
    `in_flight` and `threads` say otherwise. With `restart` a server that died comes back, and its clients ask again for
    what they had outstanding.
    """

    def __init__(
        self,
        model: Any,
        *,
        example: Any = None,
        inputs: int | tuple[int, ...] = 0,
        input_dtype: str = "float32",
        weights: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        device: str = "auto",
        dtype: str = "float32",
        seed: int = 0,
        deterministic: bool = False,
        strategy: str | Strategy = "dynamic",
        max_rows: int | None = None,
        chunk_rows: int | None = None,
        in_flight: int | None = None,
        threads: int | None = None,
        max_clients: int = 256,
        max_queue_rows: int | None = None,
        batch_timeout: float = 300.0,
        restart: bool = False,
        **unknown: Any,
    ) -> None:
        """Nothing is started yet. Raises `UsageError`, also for an option that it does not have, with the nearest."""
        for name in unknown:
            known = sorted({*inspect.signature(CentralServer).parameters} - {"self", "model", "unknown"})
            raise UnknownName("option of CentralServer", name, known, label="Options")
        sizes = inputs if isinstance(inputs, tuple | list) else (inputs,)
        if not sizes or not all(isinstance(size, int) and size >= (sizes is inputs) for size in sizes):
            raise UsageError(f"inputs is {inputs!r}. Give the number of features of a row, or its shape.")
        counts = {"max_rows": max_rows, "chunk_rows": chunk_rows, "in_flight": in_flight, "threads": threads}
        counts |= {"max_clients": max_clients, "max_queue_rows": max_queue_rows}
        for name, count in counts.items():
            if count is not None and not (isinstance(count, int) and count >= 1):
                raise UsageError(f"{name} is {count!r}. Give a whole number, at least 1, or leave it out.")
        if not batch_timeout > 0:
            raise UsageError(f"batch_timeout is {batch_timeout}. Give seconds, more than 0.")
        spec = _spec(model, example, inputs, input_dtype, weights, arguments or {})
        setup = Setup(
            spec, tuple(device.split(",")), dtype, seed, deterministic=deterministic, max_queue_rows=max_queue_rows
        )
        options = TorchModelOptions(max_rows=max_rows, in_flight=in_flight, threads=threads, chunk_rows=chunk_rows)
        chosen = registry.load("strategies", strategy)(setup) if isinstance(strategy, str) else strategy
        super().__init__(setup, options, chosen, max_clients=max_clients, batch_timeout=batch_timeout, restart=restart)


_RUNNING: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


def _disown_all() -> None:
    """In a forked child: hold nothing open that would seem to others to be our parent's."""
    for server in tuple(_RUNNING):
        server._line_lock = threading.Lock()  # another thread may have held it
        with contextlib.suppress(OSError):
            server._listener.close()
            server._channel.close()
        server._heartbeat.close()


os.register_at_fork(after_in_child=_disown_all)


def _spec(
    model: Any,
    example: Any,
    inputs: int | tuple[int, ...],
    input_dtype: str,
    weights: str | None,
    arguments: Mapping[str, Any],
) -> ModelSpec:
    if not (isinstance(model, str | ModelSpec) or callable(model)):
        raise UsageError(
            f"model is {model!r}. Give a module, a function, its name as 'module:function', or a ModelSpec."
        )
    if isinstance(model, ModelSpec):
        if model.kind == "text":
            raise UsageError("a CentralServer of your own takes rows. For text: `gpuinfer generate --backend central`.")
        if example is not None:
            raise UsageError(
                "example goes with a module, a function or a name; a ModelSpec has a layout. Leave it out."
            )
        return _with_inputs(model)
    is_module = hasattr(model, "state_dict") and not isinstance(model, type)
    layout = _layout_of(example, inputs, input_dtype, is_module)
    if layout is None:
        name = model if isinstance(model, str) else import_paths.import_path_of(model)
        import_paths.refuse_without_file(name)
        return _with_inputs(ModelSpec(name, weights, int(inputs), input_dtype, arguments, strict=True))  # type: ignore[arg-type]
    if isinstance(model, str) or not (is_module or example is not None):
        name = model if isinstance(model, str) else import_paths.import_path_of(model)
        import_paths.refuse_without_file(name)
        return named_spec(name, layout, weights, arguments)
    if weights is not None:
        raise UsageError(
            "weights go with a model's name, and this one is an object. Load them into it first: "
            "model.load_state_dict(safetensors.torch.load_file(weights))."
        )
    from gpuinfer.models.model_object import LocalModel, object_spec

    return object_spec(LocalModel(model, arguments), layout, elsewhere=True)


def _layout_of(example: Any, inputs: int | tuple[int, ...], input_dtype: str, is_module: bool) -> RowLayout | None:
    """What a row looks like; None for flat features of a model that its server makes."""
    if example is not None:
        if inputs:
            raise UsageError("example and inputs both say what a row looks like. Leave inputs out.")
        return layout_of_row(example)
    if is_module and not inputs:
        raise UsageError(
            "what does a row look like? Say CentralServer(model, example=…) with one row, such as "
            "example=torch.zeros(3, 32, 32), or inputs=N for N features."
        )
    if not is_module and isinstance(inputs, int):
        return None
    if input_dtype not in ITEM_BYTES:
        raise UsageError(f"input_dtype={input_dtype!r} is none of {', '.join(ITEM_BYTES)}. Give one of them.")
    shape = (inputs,) if isinstance(inputs, int) else tuple(inputs)
    return RowLayout(None, (Leaf((), shape, input_dtype),), "numpy")


def _with_inputs(spec: ModelSpec) -> ModelSpec:
    import_paths.refuse_without_file(spec.name)
    if spec.inputs < 1:
        raise UsageError(
            "what does a row look like? Say CentralServer(…, inputs=N) for N features, or example=… with one row."
        )
    return spec


def summary(stats: Snapshot) -> str:
    """The statistics of a server for people, in three lines."""
    batches = sum(stats.batches.values())
    lines = [f"gpuinfer server: {stats.requests:,} requests, {stats.rows:,} rows in {batches:,} batches"]
    if batches:
        sizes = [percentile(stats.batches, share) for share in (0.5, 0.95)]
        mean = mean_size(stats.batches)
        lines.append(
            f"  rows a batch: mean {mean:,.1f}, p50 {sizes[0]:,}, p95 {sizes[1]:,}, max {max(stats.batches):,}"
        )
        reasons = ", ".join(f"{name} {count:,}" for name, count in sorted(stats.reasons.items()) if count)
        waits = summarise(stats.queue_wait)
        lines.append(f"  cut: {reasons}; queue wait p50 {waits['p50'] * 1e3:.3g} ms, p99 {waits['p99'] * 1e3:.3g} ms")
    lines += [f"  {notice}" for notice in stats.notices]
    return "\n".join(lines)
