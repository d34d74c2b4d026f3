"""`serve`: a model over HTTP from this very process, by the server of `gpuinfer serve` in a thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from gpuinfer.api import Backend, ModelSpec, Strategy
from gpuinfer.config.setup_file import ServerSetup
from gpuinfer.errors import Closed, UsageError
from gpuinfer.library.choices import (
    backend_of,
    checked_seed,
    checked_types,
    in_python_words,
    seconds_of,
    setup_from,
    strategy_name,
    strategy_of,
)
from gpuinfer.library.measured import SessionClock, SessionFigures
from gpuinfer.models.row_layout import Ragged, layout_of_row, named_spec
from gpuinfer.serving.replica import ListenOptions, ReplicaServer
from gpuinfer.serving.serve_options import HERE, ServeOptions, is_of_rows, served_spec
from gpuinfer.stats import Snapshot

log = logging.getLogger("gpuinfer")

MOST_PORT = 65_535
FACTS_S = 10.0  # for the server's loop to say its counters
ENDING_S = 15.0  # for connections and the model to close, once requests are answered


def serve(
    model: Any,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    example: Any = None,
    name: str | None = None,
    strategy: Strategy | str = "dynamic",
    backend: str = "inprocess",
    devices: Any = "auto",
    dtype: Any = None,
    arguments: Mapping[str, Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
    check: bool = True,
    deterministic: bool = False,
    seed: int = 0,
    ragged: Ragged = None,
    pad_value: float = 0,
    max_queue_rows: int | None = None,
    api_key_file: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    drain_timeout: float | str = 30.0,
    **options: Any,
) -> ModelServer:
    """Serve a model over HTTP from threads of this process, and return once it answers.

    `model`: what `Batcher` takes, with an `example` of one row; or a checkpoint's folder, which is a model of text.

        with gpuinfer.serve(model, example=torch.zeros(3, 32, 32)) as server:
            requests.post(server.url + "/v1/evaluate", json={"rows": images.tolist()}).json()["outputs"]

        with gpuinfer.serve("folder") as server:            # OpenAI's API
            requests.post(server.url + "/v1/completions", json={"prompt": "The sea", "max_tokens": 16})

    Rows are nested lists in the form of the example, the rows along the first dimension of each array:
    {"rows": [[…], …]}, of a dict {"rows": {"ids": [[…], …], "mask": [[…], …]}}, of a tuple {"rows": [[…], […]]}; or one
    row, {"x": …}. A body of safetensors has a tensor for each array, named `rows`, or by its name in the dict, or its
    place in the tuple, and the Content-Type application/x-safetensors. The answer comes in the form of the question.
    `/health`, `/stats`, `/metrics` and `/v1/models` say how it is.

    `ragged`: how rows whose first dimensions differ share batches, as of `Batcher`: "pad" (rows of one request may have
    several lengths; `pad_value` fills them up) or "group" (rows of one request have one length). `port`: 0 for one that
    is free. `host`: an address that others reach needs an `api_key_file`, or `insecure=True`. `name`: by which clients
    may call the model. `drain_timeout`: seconds that requests have to finish at the end. The
    other arguments are those of `Batcher`. Raises `UsageError` for what cannot be served, with the cure.
    """
    checked_types(
        host=(host, str, 'Give an address, such as "127.0.0.1".'),
        name=(name, str | None, "Give a text, by which clients may call the model."),
        check=(check, bool, "Give True or False."),
        pad_value=(pad_value, int | float, "Give a number."),
    )
    checked_seed(seed)
    if type(port) is not int or not 0 <= port <= MOST_PORT:
        raise UsageError(
            f"port={port!r:.60} is no port. Give a number from 1 to {MOST_PORT}, or 0 for one that is free."
        )
    if host not in HERE and api_key_file is None and not insecure:
        raise UsageError(
            f'host="{host}" lets others in. Give api_key_file= with keys, one a line, or insecure=True if everybody '
            "may."
        )
    weights = None if weights is None else os.fspath(weights)
    if ragged not in (None, "pad", "group"):
        raise UsageError(f"ragged={ragged!r} is no choice. Give one of None, 'pad', 'group'.")
    if ragged == "group" and backend != "inprocess":
        raise UsageError(
            f'ragged="group" and backend="{backend}": to other processes all rows travel in one shape. Give '
            'ragged="pad" and the longest row as the example, or use backend="inprocess".'
        )
    if ragged and example is None:
        raise UsageError(f"ragged={ragged!r} is of models of rows. Give an example of one, or leave it out.")
    spec, half = _spec_of(model, example, backend, arguments, weights, check)
    if spec.layout is not None and ragged:
        spec = replace(spec, layout=replace(spec.layout, ragged=ragged, pad_value=pad_value))
    setup = setup_from(
        devices=devices,
        dtype=dtype or half,
        seed=seed,
        deterministic=deterministic,
        max_queue_rows=max_queue_rows,
        model=spec,
    )
    made = backend_of(backend, setup, options)
    described = ServerSetup(setup=setup, backend=backend, served_model_name=name)
    from gpuinfer.http.access import Keys

    place = ListenOptions(
        host=host,
        port=port,
        api=None if api_key_file is None else Keys.read(os.fspath(api_key_file)),
        drain_s=seconds_of("drain_timeout", drain_timeout) or 0.0,
    )
    return ModelServer(described, made, strategy_of(strategy, setup=setup), place)


def _spec_of(
    model: Any,
    example: Any,
    backend: str,
    arguments: Mapping[str, Any] | None,
    weights: str | None,
    check: bool,
) -> tuple[ModelSpec, str | None]:
    """The model, and its dtype where all of it has 16 bits."""
    if isinstance(model, str) and (not is_of_rows(model) or (example is None and ":" not in model)):
        if example is not None or arguments:
            raise UsageError(
                f"example and arguments are of models of rows, and '{model}' is one of text. Leave them out."
            )
        with in_python_words():
            return served_spec(ServeOptions.model_validate({"model": model, "weights": weights})), None
    if isinstance(model, os.PathLike):
        return _spec_of(os.fspath(model), example, backend, arguments, weights, check)
    if example is None:
        raise UsageError(
            "serve needs to know what a row looks like. Give example= one row: a tensor, an array, or a tuple or dict "
            "of them, such as example=torch.zeros(3, 32, 32)."
        )
    given = layout_of_row(example)
    if isinstance(model, str):
        return named_spec(model, replace(given, kind="numpy", check=check), weights, arguments), None
    if weights is not None:
        raise UsageError(
            "weights go with a model's name, and this one is an object. Load them into it first: "
            "model.load_state_dict(safetensors.torch.load_file(weights))."
        )
    from gpuinfer.models.model_object import LocalModel, object_spec

    local = LocalModel(model, arguments)
    spec = object_spec(local, given, check=check, elsewhere=backend != "inprocess")
    return replace(spec, layout=replace(spec.layout, kind="numpy")), local.half_dtype  # answers become JSON


class ModelServer(SessionFigures):
    """A model that is served over HTTP, until `close` or the end of the `with` block. Made by `gpuinfer.serve`."""

    def __init__(self, described: ServerSetup, backend: Backend, strategy: Strategy, place: ListenOptions) -> None:
        """Returns once it serves. Raises what the model raises, and `UsageError` for an address that cannot be had."""
        self._described, self._backend, self._strategy, self._place = described, backend, strategy, place
        named = strategy_name(strategy)
        options = {
            "backends": {described.backend: backend.options.model_dump(mode="json")},
            "strategies": {named: strategy.options.model_dump(mode="json")},
        }
        self._clock = SessionClock("serve", described.backend, named, described.setup, options)
        self._process = os.getpid()
        self._ready: Future[int] = Future()
        self._replica: ReplicaServer | None = None
        self._final: Snapshot | None = None
        self._failure: BaseException | None = None  # why it has ended by itself
        self._thread = threading.Thread(target=self._work, name="gpuinfer server", daemon=True)
        self._thread.start()
        with in_python_words():
            self.port = self._ready.result()
        if self._replica is not None:  # what loading the model took is no work
            asyncio.run_coroutine_threadsafe(self._replica.session.mark(), self._loop).result(FACTS_S)
        self._clock.begin()
        closing = weakref.WeakMethod(self.close)

        def close_at_exit() -> None:
            if (close := closing()) is not None:
                close()

        threading._register_atexit(close_at_exit)  # type: ignore[attr-defined]  # `atexit` is too late: threads are over

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._final is not None else f"at {self.url}"
        return f"<gpuinfer server of {self._described.name} {state}>"

    @property
    def url(self) -> str:
        """Where it is asked, such as http://127.0.0.1:41234."""
        host = self._place.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is closed by another thread, or for so many seconds; Ctrl-C ends the wait. Raises the error of
        a server that has failed.
        """
        self._thread.join(timeout)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Finish the requests under way, for `drain_timeout` seconds at most, then stop."""
        if self._process != os.getpid():  # a forked child: the server is its parent's
            return
        if (replica := self._replica) is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(replica.stop.set)
        self._thread.join(self._place.drain_s + ENDING_S)

    def _work(self) -> None:
        from gpuinfer.http import network

        try:
            network.run_loop(self._serve())
        except BaseException as error:  # noqa: BLE001 (the caller's, or of a server that has failed)
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                self._failure = error
                log.error("the server at %s has ended: %s", self.url, error)
        finally:
            if not self._ready.done():
                self._ready.set_exception(Closed("the server was closed while it started. Make another."))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        replica = self._replica = ReplicaServer(self._described, self._backend, self._strategy, self._place)
        try:
            await replica.run(lambda host, port: self._ready.set_result(port))
        finally:
            self._final = replica.session.snapshot()
            self._clock.end()

    def _snapshot(self) -> Snapshot:
        replica = self._replica
        if self._final is not None or replica is None:
            return self._final or Snapshot()

        async def look() -> Snapshot:
            await replica.session.refresh()
            return replica.session.snapshot()

        return asyncio.run_coroutine_threadsafe(look(), self._loop).result(FACTS_S)
