"""Put a load on a server, any of OpenAI's kind or our own, and say how fast it answers, at what latencies."""

from __future__ import annotations

import asyncio
import inspect
import shlex
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from pydantic import Field

from gpuinfer import api
from gpuinfer.cli import flags, output
from gpuinfer.cli.comparison_end import (
    check_ratio,
    comparison_exit_code,
    logs_folder,
    printer,
    report_folder,
    show_comparison,
    usual_flags,
    write_report,
)
from gpuinfer.cli.grid import parts, points, split_axis
from gpuinfer.config import registry
from gpuinfer.config.options import GivenValue, check
from gpuinfer.errors import UnknownName, UsageError, WorkError

if TYPE_CHECKING:
    from gpuinfer.engine.arrivals import Arrivals
    from gpuinfer.lab.serve_bench.load_generator import OfferedLoad
    from gpuinfer.lab.serve_bench.load_series import LoadSeries, ServerVariant
    from gpuinfer.lab.serve_bench.requests import LengthRange, RequestSource
    from gpuinfer.lab.serve_bench.target_server import TargetServer

CONCURRENCY, DURATION_S, WARM_UP_S = 16, 10.0, 1.0
INPUT_TOKENS, OUTPUT_TOKENS = "128", "64"
FEATURES = 256


class LoadOptions(api.Options):
    """The flags of the load."""

    endpoint: Literal["completions", "chat", "evaluate"] | None = Field(
        None, description="what is asked; default: evaluate of a network of rows, else completions"
    )
    concurrency: int | None = Field(
        None, ge=1, le=9_000, description="clients that each ask, wait for the answer, and ask again; default: 16"
    )
    rate: float | None = Field(None, gt=0, le=1e6, description="requests per second, whatever becomes of them")
    arrivals: Literal["poisson", "bursty", "uniform"] = Field("poisson", description="how those of a rate come")
    burst: float = Field(5.0, gt=1, le=1e6, description="rate in a burst, in mean rates; silence between bursts")
    burst_s: float = Field(0.1, gt=0, le=1e6, description="mean length of a burst, as 100ms")
    replay: Path | None = Field(None, description="a trace, whose requests are sent at the times at which they came")
    per_replica: bool = Field(False, description="so many clients, or such a rate, for each replica")
    requests: int | None = Field(None, ge=1, le=10**7, description="of one run; default: as many as come")
    duration: float | None = Field(None, gt=0, le=1e6, allow_inf_nan=False, description="of one run; default: 10s")
    warmup: float = Field(WARM_UP_S, ge=0, le=1e6, allow_inf_nan=False, description="of the same load, before a run")
    timeout: float = Field(300.0, gt=0, le=1e6, description="that a request may take")
    prompts: Path | None = Field(None, description="prompts, one a line: JSON with prompt or messages, or text")
    input_tokens: str = Field(INPUT_TOKENS, description="of a drawn prompt, as the server counts: 128, or 64-256")
    output_tokens: str = Field(OUTPUT_TOKENS, description="that an answer may have: 64, or 16-128")
    ignore_eos: bool | None = Field(
        None, description="answers end at their length alone; default: where the server is ours"
    )
    stream: bool = Field(True, description="answers as events, token by token")
    users: int = Field(0, ge=0, le=10**6, description="of whom each request names one; 0: requests name no user")
    rows: int = Field(1, ge=1, le=1 << 20, description="of one request to evaluate")
    binary: bool = Field(False, description="rows and answers as safetensors, not JSON")
    goodput: str | None = Field(None, description="times that are promised: ttft:200ms,tpot:20ms,e2e:1s")


def load_of(own: LoadOptions, replicas: int = 1) -> OfferedLoad:
    """When requests are sent. Raises `UsageError` for flags that contradict one another."""
    from gpuinfer.lab.serve_bench.load_generator import OfferedLoad

    named = [name for name in ("concurrency", "rate", "replay") if getattr(own, name) is not None]
    if len(named) > 1:
        raise UsageError(f"--{named[0]} and --{named[1]} each say what the load is. Give one of them.")
    times = replicas if own.per_replica else 1
    if own.per_replica and own.replay is not None:
        raise UsageError("--per-replica is for --concurrency and --rate: a trace is as it is. Leave one of them out.")
    from gpuinfer.engine.arrivals import Mix, open_arrivals
    from gpuinfer.lab.simulate.fitting import replayed

    arrivals: Arrivals | None = None
    if own.replay is not None:
        arrivals = replayed(own.replay)
    elif own.rate is not None:
        kind = "constant" if own.arrivals == "uniform" else own.arrivals
        arrivals = open_arrivals(kind, own.rate * times, Mix(), own.burst, own.burst_s)
    ends = own.requests is not None or (arrivals is not None and arrivals.count is not None)
    seconds = own.duration if own.duration is not None or ends else DURATION_S
    return OfferedLoad(
        concurrency=(own.concurrency or CONCURRENCY) * times,
        arrivals=arrivals,
        seconds=seconds,
        requests=own.requests,
        warmup_s=0.0 if own.replay is not None else own.warmup,
        timeout_s=own.timeout,
    )


def load_said(own: LoadOptions, calls: RequestSource | None) -> str:
    """The load in words."""
    each = " a replica" if own.per_replica else ""
    if own.replay is not None:
        when = f"the requests of {own.replay.name}"
    elif own.rate is not None:
        when = f"{own.rate:g} requests/s{each}, {own.arrivals}"
    else:
        when = f"{own.concurrency or CONCURRENCY} clients{each}"
    if calls is None:
        return when
    if calls.endpoint == "evaluate":
        kind = "safetensors" if own.binary else "JSON"
        return f"{when}, {own.rows} row{'s' if own.rows > 1 else ''} each as {kind}"
    prompts = f"prompts of {own.prompts.name}" if own.prompts else f"{own.input_tokens} tokens in"
    return f"{when}, {prompts}, {own.output_tokens} out{', streamed' if calls.stream else ''}"


def calls_for(own: LoadOptions, model: str | None, features: str | None) -> Any:
    """The function from a target and a seed to its requests. Raises `UsageError` at once for what no target takes."""
    given, asked = _length("input_tokens", own.input_tokens), _length("output_tokens", own.output_tokens)
    if own.prompts is not None:
        from gpuinfer.lab.serve_bench.requests import read_prompts

        read_prompts(own.prompts, own.endpoint or "completions")

    def calls(target: TargetServer, seed: str) -> RequestSource:
        from gpuinfer.lab.serve_bench.requests import RowRequests, TextRequests, read_prompts

        endpoint = own.endpoint or ("evaluate" if target.kind == "rows" else "completions")
        if target.ours and (endpoint == "evaluate") != (target.kind == "rows"):
            other = "evaluate" if target.kind == "rows" else "completions or chat"
            raise UsageError(f"--endpoint {endpoint}: this server's model is one of {target.kind}. Give {other}.")
        if endpoint == "evaluate":
            from gpuinfer.models.row_layout import Leaf, RowLayout, parsed_shape

            shape = () if features is None else parsed_shape(features)
            layout = target.row
            if layout is None and len(shape) > 1:
                layout = RowLayout(None, (Leaf((), shape, "float32"),), "numpy")
            width = shape[0] if shape else target.features or FEATURES
            named = target.model if target.several else None
            return RowRequests(rows=own.rows, features=width, layout=layout, binary=own.binary, seed=seed, model=named)
        ignore = target.ours if own.ignore_eos is None else own.ignore_eos
        return TextRequests(
            endpoint=endpoint,
            model=target.model if target.ours or model is None else model,
            stream=own.stream,
            seed=seed,
            input_tokens=given,
            output_tokens=asked,
            given=read_prompts(own.prompts, endpoint) if own.prompts else (),
            users=own.users,
            more={"ignore_eos": True} if ignore else {},
        )

    return calls


def _length(name: str, text: str) -> LengthRange:
    from gpuinfer.lab.serve_bench.requests import LengthRange

    least, _, most = text.partition("-")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    flag = f"--{name.replace('_', '-')}"
    if not 1 <= found[0] <= found[1] <= 1 << 20:
        raise UsageError(f"{flag} {text}: cannot be. Give a number of tokens such as 128, or a range such as 64-256.")
    return LengthRange(*found)


URL = "url"
PLUGINS = {"S": ("-S", "strategy"), "B": ("-B", "backend")}  # `S.max_wait=0,5ms`: -S max_wait=0, -S max_wait=5ms
OF_ANY = ("model", "features", "api_key_file")  # of a server at a URL too: what it is asked for, and with which key
LOADS = ("concurrency", "rate", "input_tokens", "output_tokens")
EXAMPLES = "replicas=1,2,4, routing=least-loaded,sticky, strategy=dynamic,adaptive, S.max_wait=0,5ms, or URLs"


@dataclass(frozen=True)
class ComparedServer:
    """The flags of `gpuinfer serve` as it knows them: which there are, and those that were given, as words."""

    known: Mapping[str, str]  # name → the flag that is written
    given: Mapping[str, Sequence[str]]  # name → words

    def words(self, chosen: Mapping[str, str]) -> list[str]:
        """The command line, with these values in place of those that were given."""
        words = [word for name, given in self.given.items() if name not in chosen for word in given]
        for name, value in chosen.items():
            kind, _, key = name.partition(".")
            words += [PLUGINS[kind][0], f"{key}={value}"] if kind in PLUGINS and key else [self.known[name], value]
        return words

    def value(self, name: str) -> str | None:
        words = self.given.get(name)
        return words[-1] if words else None


def server_variants(
    compare: Sequence[str],
    url: str | None,
    server: ComparedServer,
    load_of: Callable[[Mapping[str, str], int], OfferedLoad],
    command: Callable[[Mapping[str, str]], str],
) -> list[ServerVariant]:
    """All combinations in the order in which they are named, the last axis fastest. Raises `UsageError`.

    `load_of(changes, replicas)`: the load with some of its flags changed; `command`: what runs one way by itself.
    """
    from gpuinfer.lab.serve_bench.load_series import ServerVariant

    axes: dict[str, list[str]] = {}
    for word in compare:
        key, values = _split(word, server)
        axes[key] = list(dict.fromkeys([*axes.get(key, []), *values]))
    if url is not None and URL in axes:
        raise UsageError("the URL and --compare both say who is asked. Leave one of them out.")
    ours = [name for name in axes if name != URL and name not in LOADS]
    ours_alone = [words[0] for name, words in server.given.items() if name not in OF_ANY]
    if (url is not None or URL in axes) and (ours or ours_alone):
        flag = flags.flag(ours[0]) if ours else ours_alone[0]
        raise UsageError(f"{flag} is said of a server that is started here, and a URL has one already. Leave one out.")
    found = []
    for chosen in points(axes):
        there = chosen.get(URL, url)
        own = {name: value for name, value in chosen.items() if name != URL and name not in LOADS}
        replicas = _count(own.get("replicas") or server.value("replicas"))
        alone = (URL, "strategy", "routing", "backend")
        shown = {key: value.removeprefix("http://") if key == URL else value for key, value in chosen.items()}
        found.append(
            ServerVariant(
                name=", ".join(value if key in alone else f"{key}={value}" for key, value in shown.items())
                or (there or "serve").removeprefix("http://"),
                load=load_of({name: value for name, value in chosen.items() if name in LOADS}, replicas),
                settings=chosen,
                url=None if there is None else base(there),
                words=() if there is not None else server.words(own),
                replicas=replicas,
                command=command(chosen),
            )
        )
    return found


def base(url: str) -> str:
    """The address without the path that OpenAI's clients are given. Raises `UsageError` for what is none."""
    found = url.strip().rstrip("/").removesuffix("/v1")
    if not found.startswith("http://"):
        cure = "Give http://HOST:PORT" + (
            ", before the proxy that speaks TLS." if found.startswith("https://") else "."
        )
        raise UsageError(f"'{url}' is no address that is asked here. {cure}")
    return found


def _split(word: str, server: ComparedServer) -> tuple[str, list[str]]:
    found = parts(word)
    if found and all(one.startswith(("http://", "https://")) for one in found):
        return URL, found
    key, values = split_axis(word)
    if key:
        return _key(key, server), values
    for kind, known in {
        "strategy": registry.names("strategies"),
        "routing": registry.names("routing"),
        "backend": registry.names("backends"),
    }.items():
        if found and all(name in known for name in found):
            return _key(kind, server), found
    raise UsageError(f"--compare {word}: what is that? Give {EXAMPLES}.")


def _key(key: str, server: ComparedServer) -> str:
    kind, dot, option = key.partition(".")
    kind = {"strategy": "S", "backend": "B"}.get(kind, kind) if dot else kind
    if dot and option and kind in PLUGINS:
        return f"{kind}.{option}"
    name = key.replace("-", "_")
    if name in server.known or name in LOADS or name == URL:
        return name
    raise UnknownName("setting to compare", key, {*server.known, *LOADS, URL}, label="Settings")


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else 1


def spelled_bench(url: str | None, words: Sequence[str]) -> str:
    return shlex.join(["gpuinfer", "bench", "serve", *([url] if url else []), *words])


NAME = "serve"
COMMON = ("seed", "json", "quiet", "verbose", "config")
MODELS = ("model", "checkpoint", "dcp_path")  # what a server of ours may serve
NOT_THEIRS = (
    *("leave_with_parent", "host", "port", "ready_file", "behind_router", "setup_file", "help"),
    *("tls_cert", "tls_key"),  # the load goes to a server on this machine, over plain HTTP
)
PANEL = "The server, where no URL is given"
REPEATS, LOOK_S = 1, 0.5
TEXT = """Put a load on a server, and say how fast it answers, at what latencies.

`gpuinfer bench serve http://127.0.0.1:8000` asks a server that runs. Without a
URL `gpuinfer serve` is started with its own flags, `--model DIR`, and ended.

`--compare replicas=1,2,4` (or strategies, routing policies, URLs) runs the
same requests at the same times in each way, in turn.
"""


def command() -> Any:
    """`gpuinfer bench serve`, with the flags of the server that it may start."""
    theirs = _parameters_of_serve()
    url = inspect.Parameter(
        "url",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Argument(None, metavar="[URL]", help="A server that runs.", show_default=False),
        annotation=str | None,
    )
    common = {name: one for name, one in flags.common_flags().items() if name in COMMON}
    ours = {
        "url": url,
        **flags.of(LoadOptions, NAME),
        **usual_flags(
            ("KEY=A,B", "Ways to compare, or URLs; repeatable."),
            REPEATS,
            "Exit 4 when one is not so many times as good as the first; of replicas, not so efficient.",
        ),
        **common,
    }
    parameters = {**ours, **{name: one for name, one in theirs.items() if name not in ours}}

    def call(**values: Any) -> None:
        raise typer.Exit(execute(values, [name for name in theirs if name not in ours]))

    return typer.main.get_command(flags.app(NAME, parameters, TEXT, call))


def _parameters_of_serve() -> flags.Parameters:
    """Those of `gpuinfer serve`, as it describes them itself."""
    from gpuinfer.cli.serve import app

    found: flags.Parameters = {}
    for one in typer.main.get_command(app).params:
        if one.name is None or one.name in NOT_THEIRS or one.name in COMMON:
            continue
        kind: Any = bool | None if getattr(one, "is_flag", False) else list[str] | None if one.multiple else str | None  # type: ignore[attr-defined]
        words = ["/".join([*one.opts, *one.secondary_opts])] if one.secondary_opts else list(one.opts)
        option = typer.Option(
            None,
            *words,
            help=getattr(one, "help", None),
            metavar=getattr(one, "metavar", None),
            show_default=False,
            rich_help_panel=PANEL,
        )
        found[one.name] = inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)
    return found


def execute(values: Mapping[str, Any], theirs: Sequence[str]) -> int:
    """Compare, show, write. The exit code."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.lab.bench.series import SeriesPlan
    from gpuinfer.lab.serve_bench.load_series import LoadSeries

    merged = merge(NAME, {name: values[name] for name in COMMON})
    common = merged.common
    check_ratio(least := values["fail_under"])
    own = _options(values)
    from gpuinfer.http.access import read_keys
    from gpuinfer.lab.serve_bench.load_series import LoadPlan
    from gpuinfer.lab.serve_bench.load_summary import promises

    url, compare = values["url"], values["compare"] or []
    written = {name: one.default.param_decls[0].split("/")[0] for name, one in _parameters_of_serve().items()}
    given = {name: _words(name, values[name], written[name]) for name in theirs if values[name] not in (None, [])}
    elsewhere = url is not None or any(word.startswith(("http", "url=")) for word in compare)
    server = ComparedServer(written, given)
    ways = server_variants(
        compare,
        url,
        server,
        lambda changes, replicas: load_of(_options(values, changes), replicas),
        lambda chosen: _spelled(url, values, written, chosen),
    )
    key = None
    if (file := server.value("api_key_file")) is not None:
        key = read_keys(file)[0]
    features = server.value("features")
    named = server.value("model") if elsewhere else None
    plan = LoadPlan(
        ways=ways,
        calls=calls_for(own, named, str(features) if features else None),
        model=named,
        promised=promises(own.goodput) if own.goodput else {},
        key=key,
        calibrate=own.prompts is None,
    )
    if (
        all(way.url is None and not any(flags.flag(name) in way.words for name in MODELS) for way in plan.ways)
        and not merged.table(NAME).keys() & MODELS
    ):
        raise UsageError("which server? Give the URL of one, or --model (blobnet, tiny, a folder) for one of our own.")
    destination, folder = output.Destination(common.report), report_folder(values["report"])
    log_to_people(common.verbose)
    longest = max((way.load.seconds for way in plan.ways if way.load.seconds is not None), default=None)
    series_plan = SeriesPlan(values["repeats"], longest, own.warmup, common.seed, roofline=False, parity=False)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="gpuinfer-bench-") as scratch:
        turns = LoadSeries(plan, series_plan, logs_folder(folder, Path(scratch)), printer(common.quiet, _show_status))
        _run(turns)
        from gpuinfer.cli.comparison_end import concluded
        from gpuinfer.lab.serve_bench import load_tables

        if len(plan.ways) == 1 and turns.outcome.skipped:
            raise WorkError(next(iter(turns.outcome.skipped.values())))
        document = concluded(NAME, turns.outcome, series_plan, began)
        left = [one.variant for one in turns.outcome.runs]
        load = {**own.model_dump(mode="json"), "said": load_said(own, turns.calls)}
        document["serve"] = load_tables.load_section(
            load, turns.summaries, left, {way.name: way.replicas for way in plan.ways}
        )
        document["serve"]["scaling"] = load_tables.scaling(document)
        document["why"] = ""
        document["verdict"] = load_tables.load_verdict(document) or document["verdict"]
    show_comparison("bench serve", document, on_stderr=destination.stdout)
    destination.write(document)
    write_report(folder, document)
    return comparison_exit_code(document, least)


def _options(values: Mapping[str, Any], changes: Mapping[str, str] | None = None) -> LoadOptions:
    """The load's flags, with some changed. Raises `UsageError`."""
    given = {
        name: GivenValue(values[name], flags.flag(name))
        for name in LoadOptions.model_fields
        if values.get(name) is not None and values[name] != []
    }
    given |= {name: GivenValue(value, f"--compare {name}") for name, value in (changes or {}).items()}
    return LoadOptions(**check(LoadOptions, given, NAME))


def _words(name: str, value: Any, flag: str) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flags.flag(f"no_{name}")]
    several = value if isinstance(value, list) else [value]
    return [word for one in several for word in (flag, str(one))]


def _spelled(url: str | None, values: Mapping[str, Any], written: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """The command line that runs one way alone."""
    words: list[str] = []
    for name in (*LoadOptions.model_fields, *written, "seed"):
        if values.get(name) in (None, [], 0) or name in chosen:
            continue
        words += _words(name, values[name], written.get(name, flags.flag(name)))
    for name, value in chosen.items():
        kind, _, key = name.partition(".")
        if name != "url":
            words += [f"-{kind}", f"{key}={value}"] if key else [written.get(name, flags.flag(name)), value]
    return spelled_bench(chosen.get("url", url), words)


def _run(turns: LoadSeries) -> None:
    """Until all is done, or the user stops it: what has been measured stays."""
    from gpuinfer.host import machine
    from gpuinfer.http import network

    machine.descriptors()  # as many as it may have: each request under way has a connection
    try:
        network.run_loop(_heeding(turns))
    except (KeyboardInterrupt, asyncio.CancelledError):
        turns.outcome.stopped = True
    _show_status("")


async def _heeding(turns: LoadSeries) -> None:
    """Ctrl-C and SIGTERM let a run that sends end with what it has; once more, or at any other time, they end it all,
    and the server with it.
    """
    running, watching = asyncio.ensure_future(turns.run()), asyncio.ensure_future(_watch(turns))

    def stop() -> None:
        if turns.sender is None or turns.sender.stopping:
            running.cancel()
        else:
            turns.sender.stop()

    events = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        events.add_signal_handler(number, stop)
    try:
        await running
    finally:
        watching.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            events.remove_signal_handler(number)


async def _watch(turns: LoadSeries) -> None:
    """A line that says how a run goes, where there is a terminal."""
    while True:
        await asyncio.sleep(LOOK_S)
        if (sender := turns.sender) is not None:
            doing = "stopping (Ctrl-C ends it at once)" if sender.stopping else turns.doing
            _show_status(f"{doing} · {sender.counted:,} answered, {sender.under_way:,} under way")
        elif turns.doing:
            _show_status(turns.doing)


def _show_status(text: str) -> None:
    from gpuinfer.host.terminal import show_status

    show_status(text)
