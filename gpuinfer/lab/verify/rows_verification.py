"""A network of rows in several ways: the module alone with one row at a time is the reference; then rows in one
batch, and by the ways of a run: in the process itself, through the central server and through a fleet.

The page is a table: the largest difference of each output (policy and value of a network for a game), and how many rows
have the same best entry.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Channel, Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.config import registry
from gpuinfer.errors import GpuinferError, UsageError, WorkerDied
from gpuinfer.lab.bench import parity
from gpuinfer.lab.presenter import Page, Table
from gpuinfer.lab.verify.module_answers import POLICY, ModuleAnswers, Outputs, answers_of_module
from gpuinfer.lab.verify.verify_setup import VerifyOptions, check_batch_sizes
from gpuinfer.models.row_format import row_dtype
from gpuinfer.report.report import environment
from gpuinfer.runtime.run import run
from gpuinfer.units import whole

SCHEMA = "gpuinfer.verify/1"
ALONE, BATCHED = "alone", "in one batch"  # of the module itself
MOST_ROWS = 4096  # of a file or of records
STRATEGY, INPROCESS, FLEET = "dynamic", "inprocess", "fleet"


@dataclass
class RowsRoute:
    """One way to the model, and what came of it."""

    name: str
    backend: str | None = None  # None: the module itself
    sizes: tuple[int, ...] = ()  # rows of the requests, which are all under way at once
    status: str = "skipped"
    why: str = ""
    answers: Outputs = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        compared = len(next(iter(self.answers.values()), ()))
        outputs = [{**one, "largest_difference": _finite(one["largest_difference"])} for one in self.outputs]
        worst = max((one["largest_difference"] for one in self.outputs), default=0.0)
        return {
            "name": self.name,
            "status": self.status,
            "why": self.why,
            "compared": compared,
            "unit": "rows",
            "largest_difference": _finite(worst),
            "outputs": outputs,
            "seconds": self.seconds,
        }


def _words(difference: float) -> str:
    return f"{difference:.2g}" if math.isfinite(difference) else "of another shape, or NaN"


def _finite(difference: float) -> float | None:
    """None for answers of another shape, or NaN: JSON knows no infinity."""
    return difference if math.isfinite(difference) else None


@dataclass
class RowsVerification:
    """A verification under way. `routes` have their results once they were tried; `finished` once all are."""

    options: VerifyOptions
    setup: Setup
    spec: ModelSpec
    say: Callable[[str], None] = lambda line: None
    backend_options: Mapping[str, Any] = field(default_factory=dict)  # of `inprocess`
    routes: list[RowsRoute] = field(default_factory=list)
    finished: bool = False
    _began: str = ""
    _from: float = 0.0
    _rows: int = 0
    _features: int = 0

    @property
    def findings(self) -> Sequence[RowsRoute]:
        return self.routes

    @property
    def holds(self) -> bool:
        return all(route.status != "fails" for route in self.routes)

    @property
    def tolerance(self) -> float:
        """Of an output's number, times its size where that is over 1."""
        return self.options.tolerance or parity.TOLERANCES[self.setup.dtype]

    def run(self) -> None:
        """Load the model and try all ways. Raises `UsageError` before, `WorkError` when the model itself fails."""
        self._began, self._from = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
        check_batch_sizes(self.options.batch_sizes)
        check_through(self.options.through)
        registry.load("backends", INPROCESS)(replace(self.setup, model=self.spec), **self.backend_options)
        rows = rows_to_verify(self.options, self.spec, self.setup.seed)
        self._rows, self._features = rows.shape
        self.say(f"the model alone, {whole(len(rows))} rows one at a time …")
        began = time.perf_counter()
        module = answers_of_module(self.spec, self.setup, rows)
        in_one_batch = RowsRoute(BATCHED, answers=module.batched or {}, seconds=time.perf_counter() - began)
        if module.batched is None:
            in_one_batch.status, in_one_batch.why = "fails", module.failure
            self.routes.append(in_one_batch)
        else:
            self._compared(in_one_batch, module)
        first: RowsRoute | None = None  # of a run: with --deterministic all ways of a run give its bits
        for backend, routes in planned(self.options, len(rows)).items():
            self.routes.extend(route for route in routes if not route.sizes)
            routes = [route for route in routes if route.sizes]
            if not routes:
                continue
            self.say(f"through {backend} …")
            began = time.perf_counter()
            try:
                more = self._options_of(backend)
                sizes = [route.sizes for route in routes]
                found = answers_through(backend, self.spec, self.setup, rows, sizes, more)
            except GpuinferError as error:
                for route in routes:
                    route.status, route.why = "fails", str(error)
                    self.routes.append(route)
                continue
            for route, outputs in zip(routes, found, strict=True):
                route.answers = dict(zip(module.alone, outputs, strict=True))
                route.seconds = (time.perf_counter() - began) / len(routes)
                self._compared(route, module, first if self.options.deterministic else None)
                first = first or route
        self.finished = True

    def _options_of(self, backend: str) -> Mapping[str, Any]:
        if backend == FLEET:
            return {"replicas": self.options.replicas}
        return self.backend_options if backend == INPROCESS else {}

    def _compared(self, route: RowsRoute, module: ModuleAnswers, bits_of: RowsRoute | None = None) -> None:
        alone = module.alone
        route.outputs = [_output(name, route.answers[name], right) for name, right in alone.items()]
        far = [one for one in route.outputs if one["largest_difference"] > self.tolerance]
        route.status = "fails" if far else "holds"
        if far:
            apart = ", ".join(f"{one['name']} {_words(one['largest_difference'])}" for one in far)
            route.why = f"further from the model alone than {self.tolerance:g}: {apart}"
            if cause := module.cause(self.tolerance):
                route.why += f". {cause}"
            elif route.backend is None:
                cause = module.in_training or "its rows depend on one another (batch statistics, a mean?)"
                route.why += f". That is the module itself: {cause}"
        elif bits_of is not None and any(
            route.answers[name].tobytes() != bits_of.answers[name].tobytes() for name in alone
        ):
            route.status, route.why = "fails", f"its bits are not those of '{bits_of.name}', as --deterministic wants"
        self.routes.append(route)

    def document(self) -> dict[str, Any]:
        """The report, `gpuinfer.verify/1`."""
        return {
            "schema": SCHEMA,
            "model": self.spec.name,
            "kind": "rows",
            "rows": self._rows,
            "features": self._features,
            "started_at": self._began,
            "wall_s": time.perf_counter() - self._from,
            "status": "partial" if not self.finished else "done",
            "holds": self.holds and self.finished,
            "tolerance": self.tolerance,
            "settings": self.options.model_dump(mode="json"),
            "environment": environment(self.setup, {}),
            "checks": [route.document() for route in self.routes],
        }


def check_through(backends: Sequence[str]) -> None:
    """Raises `UsageError` for a backend that does not serve models of rows."""
    for name in backends:
        if "rows" not in registry.load("backends", name).serves:
            raise UsageError(f"--through {name}: it serves no models of rows. Leave it out, or name another.")


def planned(options: VerifyOptions, rows: int) -> dict[str, list[RowsRoute]]:
    """The ways of a run, by backend: in this process by batch size, else with requests of many sizes at once."""
    found: dict[str, list[RowsRoute]] = {}
    for name in dict.fromkeys((INPROCESS, *options.through)):
        if name == INPROCESS:
            found[name] = [_of_size(size, rows) for size in dict.fromkeys(options.batch_sizes)]
        else:
            called = f"{name} of {options.replicas}" if name == FLEET and options.replicas > 1 else name
            found[name] = [RowsRoute(called, name, in_pieces(rows, parity.BLOCKS))]
    return found


def _of_size(size: int, rows: int) -> RowsRoute:
    route = RowsRoute(f"{INPROCESS}, {size} a request", INPROCESS)
    if size > rows:
        route.why = f"there are {rows:,} rows. Give more rows, or a higher --limit"
    else:
        route.sizes = in_pieces(rows, [size])
    return route


def in_pieces(rows: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The rows in requests of these sizes, again and again; the last one has what is left."""
    found: list[int] = []
    while (left := rows - sum(found)) > 0:
        found.append(min(left, sizes[len(found) % len(sizes)]))
    return tuple(found)


def rows_to_verify(options: VerifyOptions, spec: ModelSpec, seed: int) -> NDArray[Any]:
    """The rows for the model, [rows, features]: of --rows the first, else zeros and ones that are drawn, enough for the
    largest batch.

    Raises `UsageError` for a file of other rows than the model's.
    """
    if options.rows is None:
        count = max(sum(parity.BLOCKS), *options.batch_sizes)
        return parity.sample(spec, seed, options.limit if "limit" in options.model_fields_set else count)
    path, most = options.rows, options.limit if "limit" in options.model_fields_set else MOST_ROWS
    if path.is_dir():
        from gpuinfer.models.positions import positions_of

        rows = positions_of([path], most).observation
    else:
        try:
            rows = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--rows {path} cannot be read: {error}. Give a .npy file [rows, features], or records of self-play."
            ) from error
    if rows.ndim != 2 or rows.shape[1] != spec.inputs or not len(rows):
        shape = " × ".join(map(str, rows.shape))
        raise UsageError(
            f"--rows {path} is of {shape}, and the model takes [rows, {spec.inputs}]. Give rows like that."
        )
    taken: NDArray[Any] = rows[:most].astype(row_dtype(spec))
    return taken


def _output(name: str, found: NDArray[np.float32], right: NDArray[np.float32]) -> dict[str, Any]:
    """How far one output of all rows is from the reference; `same_best`: the share of rows with the same largest entry,
    None of an output with one entry a row.
    """
    flat = found.reshape(len(found), -1), right.reshape(len(right), -1)
    same = None
    if flat[0].shape == flat[1].shape and flat[0].shape[1] > 1:
        same = float(np.mean(flat[0].argmax(axis=1) == flat[1].argmax(axis=1)))
    return {"name": name, "largest_difference": parity.difference([found], [right]), "same_best": same}


def answers_through(
    backend: str,
    spec: ModelSpec,
    setup: Setup,
    rows: NDArray[Any],
    sizes: Sequence[Sequence[int]],
    options: Mapping[str, Any],
) -> list[list[NDArray[np.float32]]]:
    """The outputs of all rows for each of `sizes`, as a worker process of a run gets them from this backend, which has
    these `options`.
    """
    setup = replace(setup, model=spec)
    requests = RowsRequests(setup, spec, rows, sizes)
    kind, strategy = registry.load("backends", backend), registry.load("strategies", STRATEGY)
    report = run(requests, kind(setup, **options), strategy(setup), roofline=False)
    if report["status"] != "done":
        raise KeyboardInterrupt
    if len(requests.answers) != len(sizes):
        raise WorkerDied("the process that requested them was killed (out of memory?). Try a smaller model.")
    return requests.answers


class RowsRequests(Workload):
    """Requests the rows in a worker process, once for each of `sizes`, and keeps the answers."""

    def __init__(self, setup: Setup, spec: ModelSpec, rows: NDArray[Any], sizes: Sequence[Sequence[int]]) -> None:
        super().__init__(setup)
        self.answers: list[list[NDArray[np.float32]]] = []
        self._sizes = sizes
        self._arguments = {
            "spec": {**asdict(spec), "arguments": dict(spec.arguments)},
            "rows": rows.tobytes(),
            "features": rows.shape[1],
            "sizes": [list(one) for one in sizes],
        }

    @property
    def deterministic(self) -> bool:
        return self.setup.deterministic

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        yield Progress(0, len(self._sizes), "ways", setup=True)
        async with infer.workers(f"{__name__}:request_rows", [self._arguments]) as workers:
            async for _, message in workers:
                if message is not None:
                    parts = zip(message["answers"], message["shapes"], strict=True)
                    self.answers.append([np.frombuffer(data, np.float32).reshape(shape) for data, shape in parts])
                    yield Progress(len(self.answers), len(self._sizes), "ways")


async def request_rows(infer: Infer, channel: Channel, arguments: Mapping[str, Any]) -> None:
    """The worker: a message for each of the `sizes`, with the outputs of all rows."""
    spec = ModelSpec(**arguments["spec"])
    limits = await infer.ready()
    rows = np.frombuffer(arguments["rows"], row_dtype(spec)).reshape(-1, arguments["features"])
    for sizes in arguments["sizes"]:
        pieces = parity.cut(sizes, limits.max_rows)
        parts = np.split(parity.packed(rows, spec), np.cumsum(pieces)[:-1])
        pending = [infer(part, rows=len(part)) for part in parity.some_in_place(infer, parts)]
        answers = [list(map(np.copy, parity.arrays(answer))) for answer in await asyncio.gather(*pending)]
        outputs = [np.concatenate(column) for column in zip(*answers, strict=True)]
        shapes = [list(output.shape) for output in outputs]
        await channel.send({"answers": [output.tobytes() for output in outputs], "shapes": shapes})


def rows_page(document: Mapping[str, Any]) -> Page:
    """A row for each way: how far each output is from the model alone, the same best entries, and the verdict."""
    tried = [check for check in document["checks"] if check["outputs"]]
    names = [one["name"] for one in tried[0]["outputs"]] if tried else []
    with_best = [one["name"] for one in tried[0]["outputs"] if one["same_best"] is not None] if tried else []
    with_best = [POLICY] if POLICY in with_best else with_best
    columns = ("", *names, *(f"best {name}" for name in with_best), "result")
    first = (ALONE, *["0"] * len(names), *["all"] * len(with_best), "reference")
    rows = [first, *(_row(check, names, with_best) for check in document["checks"])]
    verdict = _verdict(document)
    environment_of = document["environment"]
    about = (
        f"the largest difference of {whole(document['rows'])} rows, divided by the right number's size where that is "
        f"over 1; {document['tolerance']:g} is allowed"
    )
    notes = [(check["name"], check["why"]) for check in document["checks"] if check["why"]]
    return Page(
        f"verify · {document['model']} · {environment_of['device']}, {environment_of['dtype']}",
        verdict,
        None,
        Table(columns, rows),
        about,
        notes=[*notes, ("verdict", verdict)],
    )


def _row(check: Mapping[str, Any], names: Sequence[str], with_best: Sequence[str]) -> tuple[str, ...]:
    outputs = {one["name"]: one for one in check["outputs"]}
    result = "FAILS" if check["status"] == "fails" else check["status"]
    if not outputs:
        return (check["name"], *[""] * (len(names) + len(with_best)), result)
    differences = (outputs[name]["largest_difference"] for name in names)
    apart = ("not alike" if one is None else f"{one:.1e}" for one in differences)
    shares = (outputs[name]["same_best"] for name in with_best)
    best = ("" if share is None else "all" if share == 1 else f"{share:.2%}" for share in shares)
    return (check["name"], *apart, *best, result)


def _verdict(document: Mapping[str, Any]) -> str:
    named: Iterator[str] = (check["name"] for check in document["checks"] if check["status"] == "fails")
    if failing := list(named):
        return (
            f"{len(failing)} of {len(document['checks'])} ways do not answer as the model does: {', '.join(failing)}."
        )
    if document["status"] == "partial":
        return "Stopped before all ways were tried; those that were tried answer as the model does."
    held = sum(check["status"] == "holds" for check in document["checks"])
    tried = " that were tried" if held < len(document["checks"]) else ""
    return f"All {held} ways{tried} answer as the model does with one row at a time."
