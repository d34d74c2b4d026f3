"""A vLLM server that runs already, asked over HTTP as the engine of our own process is asked: token ids in and out.

What its API does not tell is reported as such: a drawn token that is not among the likeliest asked for has rank 0, and
no steps are told at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from gpuinfer.api import Event, Limits, Request, Setup
from gpuinfer.backends.vllm_engine.async_llm import VllmCounters
from gpuinfer.backends.vllm_engine.lora_versions import VllmAdapter, VllmAdapters
from gpuinfer.backends.vllm_engine.vllm_requests import PromptPreparer, VllmModel, VllmRequest
from gpuinfer.errors import BackendDied, BackendError, BadPrompt, QueueFull, UsageError
from gpuinfer.http.client import ClientError, ConnectionBroken, HttpClient, RequestTimedOut, Unreachable
from gpuinfer.stats import Snapshot
from gpuinfer.text.text_options import FIRST_VERSION

ANSWER_S = 3600.0  # for one answer
ASK_S = 30.0  # for what is asked beside prompts
PAUSE_S = 0.5  # before a server that is gone is asked again
METRICS = {  # vLLM's names → ours
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:kv_cache_usage_perc": "cache_usage",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
}


class VllmEndpoint:
    """`Engine`'s place for a server. `rows` may be asked at once; one that is gone is asked again for `retry_s`."""

    def __init__(self, url: str, key: str | None, rows: int, retry_s: float) -> None:
        bearer = [("Authorization", f"Bearer {key}")] if key else []
        self._client = HttpClient(url, connections=rows + 2, timeout_s=ANSWER_S, headers=bearer)
        self.url, self.rows, self._retry_s = url, rows, retry_s
        self.counting = VllmCounters()
        self.dead: BackendDied | None = None
        self.name, self.length = "", 0
        self.others: tuple[str, ...] = ()  # adapters that it has had from its start

    async def open(self, name: str | None) -> None:
        """Look what it serves. Raises `UsageError` for nobody, a wrong key, another kind of server, no such model."""
        try:
            answer = await self._client.request("GET", "/v1/models", timeout_s=ASK_S)
        except ClientError as error:
            raise UsageError(f"{error} Start one (`vllm serve`), or correct -B endpoint.") from None
        if answer.status in (401, 403):
            raise UsageError(f"{self.url} wants a key, and not this one. Give -B key_file=FILE.")
        try:
            found = json.loads(answer.body)["data"]
            if any(one.get("owned_by") == "gpuinfer" for one in found):
                raise UsageError(f"{self.url} is a server of gpuinfer's. Ask it with --backend fleet.")
            bases = {one["id"]: int(one["max_model_len"]) for one in found if not one.get("parent")}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(
                f"{self.url} is no server of vLLM's: its /v1/models says nothing of max_model_len. Correct -B "
                "endpoint, or ask a server of gpuinfer's with --backend fleet."
            ) from None
        wanted = name if name is not None else next(iter(bases), "")
        if wanted not in bases:
            raise UsageError(f"{self.url} serves {', '.join(bases) or 'nothing'}, not '{wanted}'. Give -B model=NAME.")
        self.name, self.length = wanted, bases[wanted]
        self.others = tuple(one["id"] for one in found if one.get("parent"))

    async def generate(self, request: VllmRequest) -> AsyncIterator[Any]:
        """As `VllmEngine.generate`. Raises `BadPrompt`, `BackendError`, `BackendDied` for a server that stays away."""
        data = json.dumps(body_of(self.name, request)).encode()
        most = int(request.fields.get("logprobs", 0))
        until = asyncio.get_running_loop().time() + self._retry_s
        while True:
            begun = False
            try:
                if request.growing:
                    async for output in self._growing(data, most):
                        begun = True
                        yield output
                else:
                    answer = await self._client.request("POST", "/v1/completions", data, JSON)
                    refuse(answer.status, answer.body)
                    yield output_of(json.loads(answer.body), most)
                return
            except (Unreachable, ConnectionBroken) as error:
                if begun or asyncio.get_running_loop().time() > until:
                    raise BackendDied(f"{error} Ask again when it is back.") from None
                await asyncio.sleep(PAUSE_S)
            except RequestTimedOut as error:
                raise BackendError(str(error)) from None

    async def _growing(self, data: bytes, most: int) -> AsyncIterator[Any]:
        async with self._client.stream("POST", "/v1/completions", data, JSON) as answer:
            if answer.status != 200:
                refuse(answer.status, await answer.read())
            rest = b""
            async for piece in answer:
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    told = event.removeprefix(b"data: ")
                    if told.startswith(b"{"):
                        chunk = json.loads(told)
                        if "error" in chunk:
                            raise BackendError(f"the vLLM server failed: {chunk['error']}. See its log.")
                        if chunk["choices"]:
                            yield output_of(chunk, most)

    async def load(self, one: VllmAdapter) -> None:
        """Raises `UsageError` for an adapter, or a server, that will not have it."""
        await self._post("/v1/load_lora_adapter", {"lora_name": one.called, "lora_path": one.folder})

    async def unload(self, one: VllmAdapter) -> None:
        if one.folder:  # else it was there before us
            await self._post("/v1/unload_lora_adapter", {"lora_name": one.called})

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            answer = await self._client.request("POST", path, json.dumps(body).encode(), JSON, timeout_s=ASK_S)
        except ClientError as error:
            raise UsageError(f"{error} Update it again when it answers.") from None
        if answer.status == 404:
            raise UsageError(
                f"{self.url} changes no adapters while it runs. Start it with --enable-lora, and in its environment "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
            )
        if answer.status != 200:
            raise UsageError(f"{self.url} refuses the adapter: {words(answer.body)} Correct it.")

    async def measure(self) -> None:
        """Those of its metrics that we know become counters, summed over engines."""
        try:
            answer = await self._client.request("GET", "/metrics", timeout_s=ASK_S)
        except ClientError:
            return
        found: dict[str, float] = {}
        for line in answer.body.decode("utf-8", "replace").splitlines():
            name, _, rest = line.partition("{")
            if (ours := METRICS.get(name)) is not None:
                found[ours] = found.get(ours, 0.0) + float(rest.rpartition(" ")[2])
        for name, value in found.items():
            setattr(self.counting, name, value if name == "cache_usage" else int(value))

    async def end(self) -> None:
        await self._client.close()

    def close(self) -> None:
        """There are no processes of ours to end."""


JSON = (("Content-Type", "application/json"),)


def body_of(model: str, request: VllmRequest) -> dict[str, Any]:
    """What `/v1/completions` is asked. Raises `BadPrompt` for what it cannot be."""
    fields = request.fields
    if request.grammar is not None or "extra_args" in fields:
        raise BadPrompt(
            "a constraint is wanted, and a vLLM server may read it otherwise than we do, or has no processor of ours. "
            "Leave it out, or use --backend vllm without -B endpoint."
        )
    if "prompt_logprobs" in fields and request.growing:
        raise BadPrompt("a vLLM server tells no prompt_logprobs in a stream. Read the answer when it is whole.")
    body = {name: value for name, value in fields.items() if name not in ("detokenize", "skip_clone")}
    if "logprobs" in fields:
        body["return_tokens_as_token_ids"] = True
    if "logit_bias" in fields:
        body["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    called = model if request.adapter is None else request.adapter.called
    body |= {"model": called, "prompt": list(request.tokens), "request_id": request.number}
    return {**body, "return_token_ids": True, "stream": request.growing}


def output_of(told: Mapping[str, Any], most: int) -> Any:
    """One response, or one chunk of a stream, as AsyncLLM's output. `most`: so many of the likeliest were asked for."""
    (choice,) = told["choices"]
    tokens, logprobs, echo = choice.get("token_ids") or [], choice.get("logprobs"), None
    each = None if logprobs is None else _logprobs(tokens, logprobs, most)
    if (prompt := choice.get("prompt_logprobs")) is not None:
        echo = [
            one
            and {int(token): SimpleNamespace(logprob=of["logprob"], rank=of["rank"] or 0) for token, of in one.items()}
            for one in prompt
        ]
    details = (told.get("usage") or {}).get("prompt_tokens_details") or {}
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=tokens, logprobs=each, weight_versions=None)],
        prompt_logprobs=echo,
        num_cached_tokens=details.get("cached_tokens") or 0,
        metrics=None,
    )


def _logprobs(tokens: Sequence[int], told: Mapping[str, Any], most: int) -> list[dict[int, Any]]:
    found = []
    likeliest = told.get("top_logprobs") or [{}] * len(tokens)
    for token, logprob, top in zip(tokens, told["token_logprobs"], likeliest, strict=True):
        known = {int(name.removeprefix("token_id:")): value for name, value in (top or {}).items()}
        ranked = sorted(known, key=lambda one: -known[one])
        position = {one: SimpleNamespace(logprob=known[one], rank=place) for place, one in enumerate(ranked, 1)}
        chosen = position.get(token)
        if chosen is None or chosen.rank > most:  # told beside them, and nobody says how likely it was among the others
            position[token] = SimpleNamespace(logprob=logprob, rank=0)
        found.append(position)
    return found


def refuse(status: int, body: bytes) -> None:
    """Raises what the status means."""
    if status == 200:
        return
    said = words(body)
    if status in (400, 404, 422):
        raise BadPrompt(f"the vLLM server refuses this prompt: {said} Correct it.")
    if status in (429, 503):
        raise QueueFull(f"the vLLM server is full: {said} Ask later.")
    raise BackendError(f"the vLLM server answered {status}: {said} See its log.")


def words(body: bytes) -> str:
    try:
        told = json.loads(body)
        text = str((told.get("error") or told).get("message", told))
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    text = " ".join(text.split())[:300] or "nothing."
    return text if text.endswith(".") else f"{text}."


class EndpointModel:
    """One server, asked from this process."""

    def __init__(self, endpoint: VllmEndpoint, text: Any, adapters: VllmAdapters, facts: Mapping[str, Any]) -> None:
        self._endpoint, self._text, self._adapters, self._facts = endpoint, text, adapters, facts
        self.limits = Limits(endpoint.rows, in_flight=endpoint.rows, slots=endpoint.rows)

    @classmethod
    async def open(
        cls,
        setup: Setup,
        endpoint: VllmEndpoint,
        name: str | None,
        folders: Mapping[str, str],
        most: int,
        processed: bool,
        stepped: Callable[[int, float], None],
    ) -> EndpointModel:
        """Raises `UsageError` for a server, or a model, that it cannot be."""
        spec = setup.model
        if spec is None or spec.kind != "text":
            raise UsageError("the backend 'vllm' serves models of text, and this run has none. Use another --backend.")
        from gpuinfer.backends.vllm_engine.vllm_driver import VllmDriver
        from gpuinfer.text.language.transformers_tokenizer import open_model_language
        from gpuinfer.text.model import TextModel

        await endpoint.open(name)
        language = await asyncio.to_thread(open_model_language, spec)
        length = endpoint.length - 1
        facts = {"model": endpoint.name, "endpoint": endpoint.url, "slots": endpoint.rows, "context": length}
        model = VllmModel(endpoint.name, language.vocabulary, endpoint.length)
        prompts = PromptPreparer(language, model, endpoint.rows, length, facts, processed)
        adapters = VllmAdapters(endpoint.load, endpoint.unload, most)
        for other in endpoint.others:
            adapters.found(other)
        driver = VllmDriver(cast(Any, endpoint), prompts, adapters, seed=setup.seed, processed=processed)
        text = TextModel(cast(Any, driver), stepped, dict)
        for adapter, folder in folders.items():
            await adapters.add(adapter, FIRST_VERSION, folder)
        return cls(endpoint, text, adapters, facts)

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        async for event in self._text.stream(batch):
            yield event

    def cancel(self, request: Request) -> None:
        self._text.cancel(request)

    async def update(self, version: str, weights: str, *, adapter: str | None) -> None:
        if adapter is None:
            raise UsageError(
                "a vLLM server changes all of its weights only by its own ways of transfer. Give an adapter's, or "
                "start the engine here: --backend vllm without -B endpoint."
            )
        await self._adapters.add(adapter, version, weights)

    async def unload(self, adapter: str) -> None:
        await self._adapters.remove(adapter)

    @property
    def adapters(self) -> Sequence[str]:
        return self._adapters.names

    async def stats(self) -> Mapping[str, Any]:
        """What it tells of itself: of all its clients, since its start."""
        await self._endpoint.measure()
        counted = self._endpoint.counting
        told = {
            "model": dict(self._facts),
            "tokens": {"input": counted.prompt_tokens, "output": counted.output_tokens},
            "engine": counted.engine(),
            "adapters": list(self.adapters),
        }
        return Snapshot(device=told, slots=self._endpoint.rows).to_wire()

    async def close(self) -> None:
        await self._text.close()
        await self._endpoint.end()
