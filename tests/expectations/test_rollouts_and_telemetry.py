"""What users of rollouts and of servers behind a router asked for and did not get: metrics and logs over OTLP, one
trace for a request whatever became of its replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet.fleet_programs import ADMIN_KEY, Program, fleet
from fleet.fleet_programs import until as until_in_time
from forking import Forked, own_environment
from otlp_receiver import Received, plain, receiving
from prometheus_client.parser import text_string_to_metric_families
from router.run_router import Answering, Resumable, Upstream, routing, saying, until
from serving.replica_servers import Server, serving
from serving.replica_servers import until as until_served

from gpuinfer.errors import UsageError
from gpuinfer.fleet.router.request_trace import TraceSampling
from gpuinfer.host import otlp
from gpuinfer.runtime.tracking import Tracking
from gpuinfer.trackers import open_tracker

QUICK = {"OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_BLRP_SCHEDULE_DELAY": "50"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
SERVER, CLIENT = 2, 3  # kinds of spans
ERROR = 2  # a span's status
LIMIT_S = 120


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Received]]:
    """A server that reports to a collector, named by OpenTelemetry's own variables alone."""
    with receiving() as received:
        variables = {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": received.url, "OTEL_SERVICE_NAME": "games"}
        variables |= {"OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=diplomacy", "OTEL_RESOURCE_ATTRIBUTES": "team=rl"}
        folder = tmp_path_factory.mktemp("collected")
        with serving("--model", "tiny", folder=folder, environment=variables) as server:
            yield server, received


def samples_of(metric: Any) -> dict[frozenset[tuple[str, str]], Any]:
    """The points of one metric by their attributes."""
    kind = metric.WhichOneof("data")
    return {frozenset(plain(one.attributes).items()): one for one in getattr(metric, kind).data_points}


def test_all_that_slash_metrics_has_is_exported_over_otlp_at_an_interval(collected):
    server, received = collected
    assert server.ask("/v1/completions", ASKED).status == 200
    normal = frozenset({("class", "normal")})

    def counted() -> bool:
        found = received.latest().get("gpuinfer_requests")
        return found is not None and samples_of(found)[normal].as_double >= 1

    until_served(counted)
    page = server.ask("/metrics").body.decode()
    exported = received.latest()
    families = {one.name: one for one in text_string_to_metric_families(page)}
    assert exported.keys() == families.keys()
    for name, family in families.items():
        kind = {"counter": "sum", "gauge": "gauge", "histogram": "histogram", "summary": "histogram"}[family.type]
        assert (exported[name].WhichOneof("data"), exported[name].description) == (kind, family.documentation)
        told = {frozenset((key, value) for key, value in one.labels.items() if key != "le") for one in family.samples}
        assert samples_of(exported[name]).keys() == told, name
    assert exported["gpuinfer_requests"].sum.is_monotonic
    took = exported["gpuinfer_request_duration_seconds"]
    point = samples_of(took)[normal]
    assert took.unit == "s"
    assert point.count == sum(point.bucket_counts) >= 1
    bounds = [
        one.labels["le"]
        for one in families[took.name].samples
        if one.labels.get("class") == "normal" and "le" in one.labels
    ]
    assert [*map(float, bounds[:-1])] == list(point.explicit_bounds)


def test_a_log_record_of_a_request_has_the_ids_of_its_trace_and_span(collected):
    server, received = collected
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "logged"}
    assert server.ask("/v1/completions", ASKED, headers).status == 200

    def record() -> Any:
        found = [one for _, one in list(received.logs) if plain(one.attributes).get("gpuinfer.request_id") == "logged"]
        return found[0] if found else None

    until_served(lambda: record() and TRACE in received.traces())
    (span,), logged = received.traces()[TRACE], record()
    assert (logged.trace_id, logged.span_id) == (span.trace_id, span.span_id)
    assert span.parent_span_id.hex() == PARENT
    attributes = plain(logged.attributes)
    assert (logged.severity_text, attributes["http.response.status_code"]) == ("INFO", 200)
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert "POST" not in server.log, "what is exported is not shown to people, who have not asked for it"
    for about, _ in [*received.logs, *received.spans, *received.metrics]:
        assert (about["service.name"], about["team"]) == ("games", "rl")
    assert {one.get("X-Tenant", one.get("x-tenant")) for one in received.headers} == {"diplomacy"}


def test_a_collector_that_answers_nothing_keeps_no_request_waiting_and_not_the_end(tmp_path):
    with receiving(silent=True) as received:
        variables = {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": received.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "100000"}
        with serving("--model", "tiny", folder=tmp_path, environment=variables) as server:
            until_served(lambda: {"/v1/metrics", "/v1/logs"} <= {*received.paths})  # each of which waits for its answer
            for _ in range(8):
                assert server.ask("/v1/completions", ASKED).status == 200
            assert server.end() == 0


EVERYWHERE = {"traces": None, "metrics": None, "logs": None}
HOST = "http://host:4318"


@pytest.mark.parametrize(
    ("flag", "variables", "found"),
    [
        pytest.param(None, {}, {}, id="nothing"),
        pytest.param(HOST, {}, {one: f"{HOST}/v1/{one}" for one in EVERYWHERE}, id="the flag is for all"),
        pytest.param(f"{HOST}/v1/traces", {}, {"traces": f"{HOST}/v1/traces"}, id="a flag with a signal's path"),
        pytest.param(None, {"EXPORTER_OTLP_ENDPOINT": HOST}, EVERYWHERE, id="the endpoint of all"),
        pytest.param(None, {"EXPORTER_OTLP_METRICS_ENDPOINT": HOST}, {"metrics": None}, id="the endpoint of one"),
        pytest.param(None, {"METRICS_EXPORTER": "otlp"}, {"metrics": None}, id="an exporter, at its usual endpoint"),
        pytest.param(
            HOST,
            {"LOGS_EXPORTER": "none", "METRICS_EXPORTER": "prometheus"},
            {"traces": f"{HOST}/v1/traces"},
            id="an exporter that is none, and one that is not supported",
        ),
        pytest.param(HOST, {"SDK_DISABLED": "true"}, {}, id="all of it switched off"),
        pytest.param(HOST, {"EXPORTER_OTLP_PROTOCOL": "grpc"}, {}, id="a protocol that is not supported"),
    ],
)
def test_opentelemetrys_own_variables_say_what_is_exported(monkeypatch, flag, variables, found):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert otlp.destinations("--otlp-endpoint", flag) == found
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "host:4318")
    if found:
        with pytest.raises(UsageError, match="Give http://host:4318"):
            otlp.destinations("--otlp-endpoint", None)


def test_figures_of_any_name_are_gauges():
    """Such as the station `first touch`, which only some runs have."""
    with receiving() as received:
        tracker = open_tracker(f"otel={received.url}")
        tracker.start("train-1", {"nested": {"seed": 3}})
        tracker.log(1, {"time/first touch": 0.5, "x" * 300: 1.0, "rollouts/metric_größe": 2.0})
        tracker.finish("done", {"bottleneck": "the model"})
    assert {"gpuinfer.step", "gpuinfer.time.first_touch", "gpuinfer.rollouts.metric_gr__e"} < received.latest().keys()


def test_a_run_has_its_figures_settings_and_result_at_the_collector(tmp_path):
    words = ["rollouts", "--env", "arithmetic", "--model", "tiny", "--groups", "2", "--samples-per-group", "2"]
    words += ["--max-new-tokens", "4", "--quiet", "--no-roofline", "-B", "threads=1"]
    with receiving() as received:
        command = ["gpuinfer", *words, "--track", f"otel={received.url}"]
        run = Forked(command, tmp_path, own_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, said
        assert received.metrics, said
    (about, _), *_ = received.metrics
    assert about["gpuinfer.run"].startswith("rollouts-")
    found = {name: metric.gauge.data_points[-1].as_double for name, metric in received.latest().items()}
    assert found["gpuinfer.step"] == 2
    assert 0 <= found["gpuinfer.rollouts.reward"] <= 1
    assert found["gpuinfer.throughput.output_tokens_per_s"] > 0
    started, ended = (plain(record.attributes) for _, record in received.logs)
    assert started["gpuinfer.rollouts.env"] == "arithmetic"
    assert (ended["gpuinfer.status"], "gpuinfer.why" in ended) == ("done", True)


def test_a_collector_that_is_not_there_is_warned_of_with_what_is_lost(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with Tracking(["otel=http://127.0.0.1:1"], "train", {"seed": 3}) as tracking:
        tracking.log(1, {"train/loss": 0.5})
        tracking.finish("done", {})
    (warning,) = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
    assert "2 figures and 2 log records did not reach the collector" in warning
    assert "Check that it runs" in warning


# One trace through the router


@contextlib.asynccontextmanager
async def tracing(*answering: Answering, **changes: Any) -> AsyncIterator[tuple[Any, list[Any], list[Upstream]]]:
    """A router that traces, its finished spans, and the replicas behind it."""
    upstreams = [Upstream(one) for one in answering]
    async with routing(*upstreams, tracing=TraceSampling(), **changes) as router:
        yield router, router.listener.tracer.finished, upstreams


def child_of(parent: Any, spans: Any) -> list[Any]:
    return [one for one in spans if one.parent_id == parent.span_id]


async def test_a_stream_that_another_replica_takes_up_is_one_trace_of_one_span_and_an_attempt_a_replica():
    stream = Resumable(6, breaks=[3])
    async with tracing(stream, stream) as (router, finished, upstreams):
        answer = await router.post(b'{"stream": true}', headers=f"traceparent: 00-{TRACE}-{PARENT}-01\r\n")
        assert answer.body.endswith(b"data: [DONE]\n\n")
        await until(lambda: len(finished) == 3)
        own = next(one for one in finished if one.kind == "server")
        lost, whole = child_of(own, finished)
        assert {one.trace_id.hex() for one in finished} == {TRACE}
        assert own.parent_id.hex() == PARENT
        assert (own.error, own.attributes["gpuinfer.attempts"]) == ("", 2)
        assert (lost.error, lost.attributes["error.type"]) == ("reset", "reset")
        assert "gpuinfer.resumed" not in lost.attributes
        assert (whole.error, whole.attributes["gpuinfer.resumed"]) == ("", "true")
        assert whole.attributes["http.request.resend_count"] == 1
        replicas = [one.attributes["gpuinfer.replica"] for one in (lost, whole)]
        assert sorted(replicas) == [0, 1]
        assert own.attributes["gpuinfer.replica"] == replicas[1]
        for attempt, replica in zip((lost, whole), replicas, strict=True):
            (asked,) = upstreams[replica].asked
            assert asked.headers["traceparent"] == f"00-{TRACE}-{attempt.span_id.hex()}-01", "what its span is below"


async def test_a_request_that_is_not_sampled_is_not_recorded_and_its_replica_learns_so():
    ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    async with tracing(saying(ok)) as (router, finished, (upstream,)):
        await router.post(headers=f"traceparent: 00-{TRACE}-{PARENT}-00\r\n")
        (asked,) = upstream.asked
        assert asked.headers["traceparent"].startswith(f"00-{TRACE}-")
        assert asked.headers["traceparent"].endswith("-00")
        assert not finished


@pytest.mark.parametrize(
    ("sampler", "argument", "taken"),
    [
        pytest.param("", "", 1.0, id="all where nothing is said"),
        pytest.param("always_off", "", 0.0, id="none"),
        pytest.param("parentbased_traceidratio", "0.25", 0.25, id="a share of those that begin here"),
    ],
)
def test_samplers_have_the_names_that_opentelemetry_gives_them(sampler, argument, taken):
    made = TraceSampling.named(sampler, argument)
    traces = [number * ((1 << 64) // 1000) for number in range(1000)]
    assert sum(map(made.takes, traces)) == pytest.approx(1000 * taken, abs=1)
    with pytest.raises(ValueError, match="jaeger_remote"):
        TraceSampling.named("jaeger_remote", "")


async def busy(it: Program) -> dict[str, Any]:
    """A replica that has a request, as soon as there is one."""

    async def found() -> dict[str, Any] | None:
        return next((one for one in await it.workers() if one["in_flight"]), None)

    return await until_in_time(found, "a request at a replica")


async def test_a_request_whose_replica_is_killed_is_one_trace_with_both_replicas(tmp_path, monkeypatch):
    with receiving() as received:
        for name, value in {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": received.url}.items():
            monkeypatch.setenv(name, value)
        async with fleet(tmp_path, replicas=2, standin={"answer_s": 1.0}) as it:
            await until_in_time(lambda: it.whole(2), "both replicas")
            asked = {"prompt": "question", "seed": 1, "max_tokens": 4}
            asking = asyncio.create_task(it.ask("POST", "/v1/completions", asked, [("X-Request-Id", "killed")]))
            killed = await busy(it)
            os.kill(killed["pid"], signal.SIGKILL)
            assert (await asking).status == 200

            def traced() -> list[Any]:
                whole = [one for one in received.traces().values() if len(one) == 3]
                return whole[0] if whole else []

            spans = await until_in_time(traced, "the trace")
            await until_in_time(lambda: "gpuinfer_router_requests" in received.latest(), "the fleet's metrics")
            await until_in_time(
                lambda: (
                    any(record.span_id == own.span_id for _, record in list(received.logs))
                    if (own := next(one for one in spans if one.kind == SERVER))
                    else None
                ),
                "the request's log record",
            )
    own = next(one for one in spans if one.kind == SERVER)
    attempts = sorted((one for one in spans if one.kind == CLIENT), key=lambda one: one.start_time_unix_nano)
    assert [one.parent_span_id for one in attempts] == [own.span_id] * 2
    assert [one.status.code for one in (own, *attempts)] == [0, ERROR, 0]
    assert plain(own.attributes)["gpuinfer.request_id"] == "killed"
    replicas = [plain(one.attributes)["gpuinfer.replica"] for one in attempts]
    assert replicas == [killed["id"], 1 - killed["id"]]
    assert own.start_time_unix_nano <= attempts[0].start_time_unix_nano
    assert attempts[1].end_time_unix_nano <= own.end_time_unix_nano


@pytest.mark.thorough
async def test_spans_of_replicas_are_below_the_routers_attempts_also_of_those_that_were_killed(tmp_path, monkeypatch):
    """Of the command itself with the model `tiny`, while one of two replicas is killed under load."""
    command = [sys.executable, "-m", "gpuinfer", "serve", "--model", "tiny", "--port", "0", "--replicas", "2"]
    command += ["--ready-file", str(tmp_path / "ready.json"), "-B", "slots=8", "-B", "threads=1", *admin_key(tmp_path)]
    with receiving() as received:
        for name, value in {**QUICK, "OTEL_EXPORTER_OTLP_ENDPOINT": received.url}.items():
            monkeypatch.setenv(name, value)
        async with fleet(tmp_path, command=command) as it:
            await until_in_time(lambda: it.whole(2), "both replicas")
            asked = {"prompt": "Hello", "max_tokens": 96, "ignore_eos": True, "seed": 1}
            asking = [asyncio.create_task(said_by(it, {**asked, "stream": number % 2 == 0})) for number in range(32)]
            killed = await busy(it)
            os.kill(killed["pid"], signal.SIGKILL)
            assert len(set(await asyncio.gather(*asking))) == 1, "all answers are the same, whoever gave them"
            it.process.send_signal(signal.SIGTERM)
            await until_in_time(lambda: it.process.poll() is not None, "the end, when all is exported")
    own = [span for _, span in received.spans if plain(span.attributes).get("gpuinfer.attempts")]
    traces = received.traces()
    paths = {plain(record.attributes).get("url.path") for _, record in received.logs}
    assert paths <= {None, "/v1/completions"}, "what the supervisor asks of replicas is no request of anybody"
    logged = [plain(record.attributes).get("gpuinfer.request_id") for _, record in received.logs]
    logged = [one for one in logged if one is not None]
    assert len(set(logged)) == len(logged) == len(asking), "a record a request, from the router"
    assert len({one.trace_id for one in own}) == len(own) == len(traces) == len(asking)
    repeated = resumed = 0
    for one in own:
        spans = traces[one.trace_id.hex()]
        attempts = [span for span in spans if span.kind == CLIENT]
        assert {span.parent_span_id for span in attempts} == {one.span_id}
        assert len(attempts) == plain(one.attributes)["gpuinfer.attempts"]
        last = max(attempts, key=lambda span: span.start_time_unix_nano)
        assert [span.kind for span in spans if span.parent_span_id == last.span_id] == [SERVER]
        repeated += len(attempts) > 1
        resumed += plain(last.attributes).get("gpuinfer.resumed") == "true"
    assert repeated


def admin_key(folder: Path) -> list[str]:
    (key := folder / "admin.key").touch(0o600)
    key.write_text(f"{ADMIN_KEY}\n")
    return ["--admin-key-file", str(key)]


async def said_by(it: Program, asked: dict[str, Any]) -> str:
    """The text of an answer, streamed or in one piece."""
    if not asked["stream"]:
        return str(json.loads((await it.ask("POST", "/v1/completions", asked)).body)["choices"][0]["text"])
    assert it.client is not None
    async with it.client.stream("POST", "/v1/completions", json.dumps(asked).encode()) as response:
        events = b"".join([part async for part in response]).decode().splitlines()
    told = [line.removeprefix("data: ") for line in events if line.startswith("data: {")]
    return "".join(choice["text"] for one in told for choice in json.loads(one)["choices"])


# The experiments that were left open


@pytest.fixture(scope="module")
def experiments() -> Iterator[Any]:
    """`benchmarks/rollouts_experiments.py`, whose folder is on the path meanwhile: the environment is found there."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("rollouts_experiments")
    finally:
        sys.path.remove(folder)


PAGE = (Path(__file__).parents[2] / "docs/experiments.md").read_text()


def test_the_published_tokens_of_a_game_by_phase_are_those_of_the_recorded_games(experiments, tmp_path):
    written = experiments.tokens_table(tmp_path, experiments.SHAPES)
    assert written.partition("\n\n")[0] in PAGE
    assert (tmp_path / "rollouts-tokens.svg").read_bytes().startswith(b"<?xml")


def test_more_engines_give_as_much_more_until_games_wait_for_their_slowest_power(experiments):
    few = {"groups": 4, "groups_in_flight": 2}
    one, eight = (experiments.play(experiments.SHAPES, count, **few).tokens_per_s for count in (1, 8))
    two = experiments.play(experiments.SHAPES, 2, groups=6).tokens_per_s
    assert two / one == pytest.approx(2, rel=0.1)
    assert 3 < eight / one < 5, "12 games do not fill eight engines"


def test_a_deeper_buffer_ends_the_trainers_wait_where_engines_have_room_as_the_formula_says(experiments):
    rollout_s = experiments.play(experiments.SHAPES, 8, groups=2, groups_in_flight=1).group_s
    train_s = rollout_s / 2.5
    ways = {"groups": 10, "groups_in_flight": 6, "batch_groups": 1, "trainer_seconds": train_s}
    shallow, deep = (experiments.play(experiments.SHAPES, 8, buffer_depth=depth, **ways) for depth in (1, 4))
    assert shallow.step_s == pytest.approx(experiments.expected_step_s(rollout_s, train_s, 1), rel=0.2)
    assert deep.waited < 0.05 < 0.3 < shallow.waited
    assert shallow.staleness < deep.staleness


@pytest.mark.thorough
def test_all_published_tables_of_the_virtual_clock_come_out_again_to_the_last_digit(experiments, tmp_path):
    for written in (
        experiments.scaling(tmp_path, "engines", experiments.engines_experiment(experiments.SHAPES), "tokens/s"),
        experiments.buffer_table(tmp_path, experiments.buffer_experiment(experiments.SHAPES)),
        experiments.reference_table(tmp_path, experiments.reference_experiment(experiments.SHAPES)),
    ):
        for line in written.splitlines()[2:]:
            assert line in PAGE


def test_a_full_engine_is_named_as_what_keeps_the_trainer_whatever_the_depth(experiments):
    ways = {"groups": 8, "groups_in_flight": 6, "batch_groups": 1, "trainer_seconds": 4.0, "buffer_depth": 4}
    played = experiments.play(experiments.SHAPES, 1, **ways)
    named = [step.verdict["kind"] for step in played.settled()]
    assert named
    assert {*named} == {"engine saturated"}
