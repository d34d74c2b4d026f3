"""Where a run's figures can be tracked (`--track`): TensorBoard, Weights & Biases, MLflow, OpenTelemetry.

A tracker lives in a process of its own (`runtime/tracking.py`), so that no run waits for one, and none can harm a run.
Another one is a class here, with its name in `TRACKERS`.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host import otlp
from gpuinfer.host.extras import require_extra

NOTHING = "none"  # a target: nothing is tracked, whatever the environment or a file says
Summary = Mapping[str, str | float]


class Tracker(ABC):
    """One place that figures go to. `target` stands behind the `=` of `--track`; "": nothing does.

    Methods are called one after the other from one thread. What they raise ends the tracking and is shown to the user
    once; the run goes on.
    """

    def __init__(self, target: str) -> None:
        self.target = target

    def check(self) -> None:
        """Raise `UsageError` for a target that cannot be. Imports nothing heavy, and touches nothing."""
        return

    @abstractmethod
    def start(self, run: str, settings: Mapping[str, Any]) -> str:
        """Begin a run of this name with these settings, plain values in nested tables. Returns where it is to be seen,
        for people.
        """

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures by name, such as `train/loss`. Steps count what the workload counts; each name has its own, which
        never fall, unless a run goes on with an earlier one.
        """

    @abstractmethod
    def finish(self, status: str, summary: Summary) -> None:
        """The run is over: `done`, `partial`, `failed`, or `killed`, of which nothing more is known."""

    def lost(self) -> str:
        """What is known to have been lost so far, with the cure, for people; "" for nothing. It is shown when there is
        something for the first time, and at the end.
        """
        return ""


def open_tracker(word: str) -> Tracker:
    """The tracker that `--track WORD` names, such as `tensorboard=runs`. Raises `UsageError` for one that is not known,
    not installed, or has no such target.
    """
    name, equals, target = word.partition("=")
    if name not in TRACKERS:
        raise UnknownName("tracker", name, [*TRACKERS, NOTHING], label="Trackers")
    if equals and not target:
        raise UsageError(f"--track {word}: nothing stands behind the '='. Give --track {USUAL[name]}.")
    tracker = TRACKERS[name](target)
    require_extra(name, f"--track {word}")
    tracker.check()
    return tracker


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Nested settings as `backends.inprocess.max_rows` → value, without what is not set. Lists become text."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            found[prefix + name] = ", ".join(map(str, value))
        elif value is not None:
            found[prefix + name] = value if isinstance(value, str | int | float | bool) else str(value)
    return found


class TensorBoard(Tracker):
    """Event files in a folder of the run's own, below the one that is named."""

    def check(self) -> None:
        if not self.target:
            raise UsageError("--track tensorboard needs a folder for its files. Give --track tensorboard=runs.")
        above = next(path for path in (Path(self.target), *Path(self.target).absolute().parents) if path.exists())
        if not above.is_dir():
            raise UsageError(f"--track tensorboard={self.target}: {above} is a file. Name a folder.")

    def start(self, run: str, settings: Mapping[str, Any]) -> str:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self.target, run)
        self._writer = EventFileWriter(str(folder))
        chosen = flat(settings)
        table = "".join(f"| {name} | {_cell(value)} |\n" for name, value in chosen.items())
        self._add(hparams_pb(chosen, trial_id=run))
        self._add(_text_pb("settings", f"| setting | value |\n|---|---|\n{table}"))
        self._writer.flush()
        return f"{folder} (tensorboard --logdir {self.target})"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(Summary(value=values), step)
        self._writer.flush()  # what was logged is in the file, whatever becomes of the run

    def finish(self, status: str, summary: Summary) -> None:
        lines = "".join(f"| {name} | {_cell(value)} |\n" for name, value in {"status": status, **summary}.items())
        self._add(_text_pb("result", f"| | |\n|---|---|\n{lines}"))
        self._writer.close()

    def _add(self, summary: Any, step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _text_pb(tag: str, text: str) -> Any:
    """A page of Markdown, as TensorBoard's text plugin reads it."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    one = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=one)
    metadata = create_summary_metadata(display_name=tag, description="")
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


class WeightsAndBiases(Tracker):
    """A run of the project that is named, as PROJECT or ENTITY/PROJECT; where and whether it is sent is wandb's own
    business (`wandb login`, `WANDB_MODE=offline`).
    """

    def start(self, run: str, settings: Mapping[str, Any]) -> str:
        import wandb

        entity, _, project = self.target.rpartition("/")
        self._run = wandb.init(
            entity=entity or None,
            project=project or "gpuinfer",
            name=run,
            config=dict(settings),
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")  # wandb's own steps may not fall, and ours have several units
        return str(self._run.url or self._run.dir)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def finish(self, status: str, summary: Summary) -> None:
        self._run.summary.update({"status": status, **summary})
        self._run.finish(exit_code=0 if status == "done" else 1)


class MLflow(Tracker):
    """A run of the experiment that is named, on the server that `MLFLOW_TRACKING_URI` names."""

    _statuses: ClassVar[Mapping[str, str]] = {"done": "FINISHED", "failed": "FAILED"}
    _at_once = 100  # params; a server takes no more
    _longest = 500  # characters of a param: older servers take no more
    _no_name = re.compile(r"[^\w\-. :/]")

    def start(self, run: str, settings: Mapping[str, Any]) -> str:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        experiment = self.target or "gpuinfer"
        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self._run = self._client.create_run(number, run_name=run).info.run_id
        params = [Param(self._name(key), str(value)[: self._longest]) for key, value in flat(settings).items()]
        for begin in range(0, len(params), self._at_once):
            self._client.log_batch(self._run, params=params[begin : begin + self._at_once])
        return f"experiment {experiment}, run {self._run} ({self._client.tracking_uri})"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(self._name(name), value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, status: str, summary: Summary) -> None:
        from mlflow.entities import RunTag

        tags = [RunTag(self._name(name), str(value)) for name, value in {"status": status, **summary}.items()]
        self._client.log_batch(self._run, tags=tags)
        self._client.set_terminated(self._run, self._statuses.get(status, "KILLED"))

    def _name(self, name: str) -> str:
        return self._no_name.sub("_", name)


class OpenTelemetry(Tracker):
    """Gauges at an OpenTelemetry collector, over OTLP (HTTP with protobuf), and log records with the settings and the
    result. `target`: its address; without one that of OpenTelemetry's own variables, or http://localhost:4318.
    """

    _no_name = re.compile(r"[^A-Za-z0-9_.-]")  # of an instrument: stations are called as plugins please
    _longest = 200  # characters, of 255 that OpenTelemetry allows

    def check(self) -> None:
        self._urls()

    def _urls(self) -> Mapping[otlp.Signal, str | None]:
        nearest: Mapping[otlp.Signal, str | None] = {"metrics": None, "logs": None}
        return otlp.destinations("--track otel", self.target or None, ("metrics", "logs")) or nearest

    def start(self, run: str, settings: Mapping[str, Any]) -> str:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk._logs import LoggerProvider
        from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        urls, resource = self._urls(), otlp.resource({"gpuinfer.run": run})
        self._not_taken: Counter[str] = Counter()  # figures and log records that the collector has not taken
        readers = []
        if "metrics" in urls:
            metrics = self._counting(OTLPMetricExporter(urls["metrics"]), "figures", _points)
            readers.append(PeriodicExportingMetricReader(metrics))
        self._meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        self._logs = LoggerProvider(resource, shutdown_on_exit=False)
        if "logs" in urls:
            logs = self._counting(OTLPLogExporter(urls["logs"]), "log records", len)
            self._logs.add_log_record_processor(BatchLogRecordProcessor(logs))
        self._meter, self._gauges = self._meters.get_meter("gpuinfer.runs"), dict[str, Any]()
        self._record(f"{run}: started", flat(settings))
        return f"gpuinfer.run {run} at {self.target or 'the collector of the OTEL_ variables'}"

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in {**figures, "step": float(step)}.items():
            if name not in self._gauges:
                plain = self._no_name.sub("_", name.replace("/", "."))[: self._longest]
                self._gauges[name] = self._meter.create_gauge(f"gpuinfer.{plain}")
            self._gauges[name].set(value)

    def finish(self, status: str, summary: Summary) -> None:
        self._record(f"{status}: {summary.get('why', '')}".rstrip(": "), {"status": status, **summary})
        ends = [threading.Thread(target=one.shutdown) for one in (self._meters, self._logs)]
        for end in ends:  # at once, since each tries a collector that does not answer for seconds
            end.start()
        for end in ends:
            end.join()

    def lost(self) -> str:
        if not self._not_taken:
            return ""
        counted = " and ".join(f"{count:,} {what}" for what, count in sorted(self._not_taken.items()))
        return f"{counted} did not reach the collector, and are lost. Check that it runs, and its address."

    def _counting(self, exporter: Any, what: str, size: Callable[[Any], int]) -> Any:
        """The exporter, with what it could not send counted: the SDK only logs it."""
        send = exporter.export

        def export(batch: Any, *args: Any, **named: Any) -> Any:
            result = send(batch, *args, **named)
            if result.name != "SUCCESS":
                self._not_taken[what] += size(batch)
            return result

        exporter.export = export
        return exporter

    def _record(self, body: str, facts: Mapping[str, Any]) -> None:
        from opentelemetry._logs import LogRecord, SeverityNumber

        attributes = {f"gpuinfer.{name}": value for name, value in facts.items()}
        record = LogRecord(
            timestamp=time.time_ns(),
            severity_text="INFO",
            severity_number=SeverityNumber.INFO,
            body=body,
            attributes=attributes,
        )
        self._logs.get_logger("gpuinfer.runs").emit(record)


def _points(metrics: Any) -> int:
    """Figures in what a metric exporter sends at once."""
    scopes = [scope for resource in metrics.resource_metrics for scope in resource.scope_metrics]
    return sum(len(metric.data.data_points) for scope in scopes for metric in scope.metrics)


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "otel": OpenTelemetry,
}
USUAL = {
    "tensorboard": "tensorboard=runs",
    "wandb": "wandb=PROJECT",
    "mlflow": "mlflow=EXPERIMENT",
    "otel": "otel=http://host:4318",
}
