"""Put a load on a server, any of OpenAI's kind or our own, and say how fast it answers, at what latencies."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import flags, output
from gpuinfer.cli.concluding import exit_code, own_flag, report_folder, show, write_report
from gpuinfer.cli.serve_load import Options, calls_for, load_of, said
from gpuinfer.cli.serve_ways import Server, expand, spelled
from gpuinfer.config.options import Given, check
from gpuinfer.errors import UsageError, WorkError

if TYPE_CHECKING:
    from gpuinfer.bench.series import Course
    from gpuinfer.bench.serve.ways import Plan, Turns

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
    common = {name: one for name, one in flags.common().items() if name in COMMON}
    ours = {"url": url, **flags.of(Options, NAME), **_own_flags(), **common}
    parameters = {**ours, **{name: one for name, one in theirs.items() if name not in ours}}

    def call(**values: Any) -> None:
        raise typer.Exit(execute(values, [name for name in theirs if name not in ours]))

    return typer.main.get_command(flags.app(NAME, parameters, TEXT, call))


def _own_flags() -> flags.Parameters:
    return {
        "compare": own_flag("compare", list[str] | None, "KEY=A,B", "Ways to compare, or URLs; repeatable."),
        "repeats": own_flag(
            "repeats", int, "N", f"Runs of each, in turn. [default: {REPEATS}]", default=REPEATS, min=1
        ),
        "fail_under": own_flag(
            "fail_under",
            float | None,
            "RATIO",
            "Exit 4 when one is not so many times as good as the first; of replicas, not so efficient.",
        ),
        "report": own_flag("report", Path | None, "DIR", "Write JSON, Markdown, a page and its plots to this folder."),
    }


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
    from gpuinfer.bench.series import Course
    from gpuinfer.bench.serve.ways import Turns
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people

    merged = merge(NAME, {name: values[name] for name in COMMON})
    common = merged.common
    if (least := values["fail_under"]) is not None and not 0 < least < float("inf"):
        raise UsageError(f"--fail-under {least}: nothing could fail that. Give a ratio such as 0.95.")
    own = _options(values)
    plan = _plan(own, values, theirs)
    if (
        all(way.url is None and not _has_model(way.words) for way in plan.ways)
        and not merged.table(NAME).keys() & MODELS
    ):
        raise UsageError("which server? Give the URL of one, or --model (blobnet, tiny, a folder) for one of our own.")
    destination, folder = output.Destination(common.report), report_folder(values["report"])
    log_to_people(common.verbose)
    longest = max((way.load.seconds for way in plan.ways if way.load.seconds is not None), default=None)
    course = Course(values["repeats"], longest, own.warmup, common.seed, roofline=False, parity=False)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="gpuinfer-bench-") as scratch:
        turns = Turns(plan, course, _logs(folder, Path(scratch)), _say(common.quiet))
        _run(turns)
        document = _document(turns, plan, course, own, began)
    show("bench serve", document, on_stderr=destination.stdout)
    destination.write(document)
    write_report(folder, document)
    return exit_code(document, least)


def _has_model(words: Sequence[str]) -> bool:
    return any(flags.flag(name) in words for name in MODELS)


def _options(values: Mapping[str, Any], changes: Mapping[str, str] | None = None) -> Options:
    """The load's flags, with some changed. Raises `UsageError`."""
    given = {
        name: Given(values[name], flags.flag(name))
        for name in Options.model_fields
        if values.get(name) is not None and values[name] != []
    }
    given |= {name: Given(value, f"--compare {name}") for name, value in (changes or {}).items()}
    return Options(**check(Options, given, NAME))


def _plan(own: Options, values: Mapping[str, Any], theirs: Sequence[str]) -> Plan:
    """Everything checked that can be before a server is asked. Raises `UsageError`."""
    from gpuinfer.bench.serve.goodput import promises
    from gpuinfer.bench.serve.ways import Plan
    from gpuinfer.http.access import read_keys

    url, compare = values["url"], values["compare"] or []
    written = {name: one.default.param_decls[0].split("/")[0] for name, one in _parameters_of_serve().items()}
    given = {name: _words(name, values[name], written[name]) for name in theirs if values[name] not in (None, [])}
    elsewhere = url is not None or any(word.startswith(("http", "url=")) for word in compare)
    server = Server(written, given)
    ways = expand(
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
    return Plan(
        ways=ways,
        calls=calls_for(own, named, int(features) if features else None),
        model=named,
        promised=promises(own.goodput) if own.goodput else {},
        key=key,
        calibrate=own.prompts is None,
    )


def _words(name: str, value: Any, flag: str) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flags.flag(f"no_{name}")]
    several = value if isinstance(value, list) else [value]
    return [word for one in several for word in (flag, str(one))]


def _spelled(url: str | None, values: Mapping[str, Any], written: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """The command line that runs one way alone."""
    words: list[str] = []
    for name in (*Options.model_fields, *written, "seed"):
        if values.get(name) in (None, [], 0) or name in chosen:
            continue
        words += _words(name, values[name], written.get(name, flags.flag(name)))
    for name, value in chosen.items():
        kind, _, key = name.partition(".")
        if name != "url":
            words += [f"-{kind}", f"{key}={value}"] if key else [written.get(name, flags.flag(name)), value]
    return spelled(chosen.get("url", url), words)


def _run(turns: Turns) -> None:
    """Until all is done, or the user stops it: what has been measured stays."""
    from gpuinfer.host import machine
    from gpuinfer.http import loop

    machine.descriptors()  # as many as it may have: each request under way has a connection
    try:
        loop.run(_heeding(turns))
    except (KeyboardInterrupt, asyncio.CancelledError):
        turns.outcome.stopped = True
    _show_status("")


async def _heeding(turns: Turns) -> None:
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


async def _watch(turns: Turns) -> None:
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


def _say(quiet: bool) -> Any:
    def say(line: str) -> None:
        _show_status("")
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def _logs(folder: Path | None, scratch: Path) -> Path:
    """Where the servers' logs go: they stay beside a report."""
    logs = (folder or scratch) / "logs"
    logs.mkdir(exist_ok=True, mode=0o700)
    return logs


def _document(turns: Turns, plan: Plan, course: Course, own: Options, began: str) -> dict[str, Any]:
    """Raises `UsageError` when none of the ways could run, with the reasons."""
    from gpuinfer.bench.serve import shown
    from gpuinfer.cli.concluding import concluded

    if len(plan.ways) == 1 and turns.outcome.skipped:
        raise WorkError(next(iter(turns.outcome.skipped.values())))
    document = concluded(NAME, turns.outcome, course, began)
    left = [one.variant for one in turns.outcome.runs]
    load = {**own.model_dump(mode="json"), "said": said(own, turns.calls)}
    document["serve"] = shown.section(load, turns.summaries, left, {way.name: way.replicas for way in plan.ways})
    document["serve"]["scaling"] = shown.scaling(document)
    document["why"] = ""
    document["verdict"] = shown.verdict(document) or document["verdict"]
    return document
