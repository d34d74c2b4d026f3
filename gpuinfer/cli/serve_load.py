"""What `gpuinfer bench serve` asks of a server, and when: its flags as typed options, and the load that they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from gpuinfer import api
from gpuinfer.errors import UsageError

if TYPE_CHECKING:
    from gpuinfer.bench.serve.calls import Calls, Length
    from gpuinfer.bench.serve.sender import Load
    from gpuinfer.bench.serve.target import Target
    from gpuinfer.load.arrivals import Arrivals

CONCURRENCY, DURATION_S, WARM_UP_S = 16, 10.0, 1.0
INPUT_TOKENS, OUTPUT_TOKENS = "128", "64"
FEATURES = 256


class Options(api.Options):
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
    users: int = Field(0, ge=0, le=10**6, description="of whom each request names one; 0: nobody says who asks")
    rows: int = Field(1, ge=1, le=1 << 20, description="of one request to evaluate")
    binary: bool = Field(False, description="rows and answers as safetensors, not JSON")
    goodput: str | None = Field(None, description="times that are promised: ttft:200ms,tpot:20ms,e2e:1s")


def load_of(own: Options, replicas: int = 1) -> Load:
    """When requests are sent. Raises `UsageError` for flags that contradict one another."""
    from gpuinfer.bench.serve.sender import Load

    named = [name for name in ("concurrency", "rate", "replay") if getattr(own, name) is not None]
    if len(named) > 1:
        raise UsageError(f"--{named[0]} and --{named[1]} each say what the load is. Give one of them.")
    times = replicas if own.per_replica else 1
    if own.per_replica and own.replay is not None:
        raise UsageError("--per-replica is for --concurrency and --rate: a trace is as it is. Leave one of them out.")
    arrivals = _arrivals(own, times)
    ends = own.requests is not None or (arrivals is not None and arrivals.count is not None)
    seconds = own.duration if own.duration is not None or ends else DURATION_S
    return Load(
        concurrency=(own.concurrency or CONCURRENCY) * times,
        arrivals=arrivals,
        seconds=seconds,
        requests=own.requests,
        warmup_s=0.0 if own.replay is not None else own.warmup,
        timeout_s=own.timeout,
    )


def _arrivals(own: Options, times: int) -> Arrivals | None:
    from gpuinfer.load.arrivals import Mix
    from gpuinfer.load.options import drawn
    from gpuinfer.simulate.fitting import replayed

    if own.replay is not None:
        return replayed(own.replay)
    if own.rate is None:
        return None
    kind = "constant" if own.arrivals == "uniform" else own.arrivals
    return drawn(kind, own.rate * times, Mix(), own.burst, own.burst_s)


def said(own: Options, calls: Calls | None) -> str:
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


def calls_for(own: Options, model: str | None, features: int | None) -> Any:
    """The function from a target and a seed to its requests. Raises `UsageError` at once for what no target takes."""
    given, asked = _length("input_tokens", own.input_tokens), _length("output_tokens", own.output_tokens)
    if own.prompts is not None:
        from gpuinfer.bench.serve.calls import prompts_of

        prompts_of(own.prompts, own.endpoint or "completions")

    def calls(target: Target, seed: str) -> Calls:
        from gpuinfer.bench.serve.calls import RowCalls, TextCalls, prompts_of

        endpoint = own.endpoint or ("evaluate" if target.kind == "rows" else "completions")
        if target.ours and (endpoint == "evaluate") != (target.kind == "rows"):
            other = "evaluate" if target.kind == "rows" else "completions or chat"
            raise UsageError(f"--endpoint {endpoint}: this server's model is one of {target.kind}. Give {other}.")
        if endpoint == "evaluate":
            width = features or target.features or FEATURES
            named = target.model if target.several else None
            return RowCalls(rows=own.rows, features=width, binary=own.binary, seed=seed, model=named)
        ignore = target.ours if own.ignore_eos is None else own.ignore_eos
        return TextCalls(
            endpoint=endpoint,
            model=target.model if target.ours or model is None else model,
            stream=own.stream,
            seed=seed,
            input_tokens=given,
            output_tokens=asked,
            given=prompts_of(own.prompts, endpoint) if own.prompts else (),
            users=own.users,
            more={"ignore_eos": True} if ignore else {},
        )

    return calls


def _length(name: str, text: str) -> Length:
    from gpuinfer.bench.serve.calls import Length

    least, _, most = text.partition("-")
    try:
        found = int(least), int(most or least)
    except ValueError:
        found = (0, 0)
    flag = f"--{name.replace('_', '-')}"
    if not 1 <= found[0] <= found[1] <= 1 << 20:
        raise UsageError(f"{flag} {text}: cannot be. Give a number of tokens such as 128, or a range such as 64-256.")
    return Length(*found)
