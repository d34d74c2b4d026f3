"""`gpuinfer.LLM`: a model of text in a program."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack, get_args, overload

from msgspec import structs

from gpuinfer.api import Backend, Limits, Priority, Progress, Strategy
from gpuinfer.config import registry
from gpuinfer.config.foreign_names import option_hint
from gpuinfer.config.options import GivenValue, check
from gpuinfer.config.setup_file import ToolFormatName
from gpuinfer.errors import Closed, GpuinferError, UsageError
from gpuinfer.host import children
from gpuinfer.library.chat_answers import ChatAnswer, chat_answer
from gpuinfer.library.choices import (
    backend_of,
    checked_seed,
    in_python_words,
    priority_of,
    seconds_of,
    setup_from,
    strategy_of,
)
from gpuinfer.library.llm_session import OpenedLLM
from gpuinfer.library.measured import SessionClock, SessionFigures
from gpuinfer.library.text_answers import Errors, TextAnswer, TextAnswers
from gpuinfer.library.text_embeddings import Pooling, embedding_prompts, embeddings_of
from gpuinfer.library.text_prompts import AnswerKeywords, OnePrompt, PromptReader, Prompts, prompt_defaults
from gpuinfer.library.text_scores import ContinuationScore, ScoringPrompts, scores_of
from gpuinfer.library.text_stream import PendingText, TextStream
from gpuinfer.runtime.background_session import BackgroundSession
from gpuinfer.serving.answer_forms import AnswerForms
from gpuinfer.serving.model_language import ModelLanguage
from gpuinfer.serving.openai.model_options import (
    TEXT_MODELS,
    ModelOptions,
    adapter_folders,
    check_model,
    text_model,
)
from gpuinfer.serving.openai.requests import PromptDefaults
from gpuinfer.stats import Snapshot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ELSEWHERE = ("fleet",)  # backends whose model may lie on another machine


class LLM(SessionFigures):
    """A model of text: answers, conversations, streams, scores.

    A folder as Hugging Face has it, or a built-in toy (`tiny`), which needs no files:

        import gpuinfer

        llm = gpuinfer.LLM("tiny")
        for answer in llm.generate(["Once upon a time", "The sea was"], max_new_tokens=16):
            print(answer.text)
        llm.close()

    **Prompts** are texts, token ids, chats (lists of messages) or a mix of them; a list, an iterator, which is read
    only as far ahead as the model needs, or a file as `gpuinfer generate --input` reads it. Answers come in the order
    of their prompts, or as they are finished (`ordered=False`). All prompts that are under way share batches, whichever
    call, thread or coroutine has asked. An answer depends on its prompt, the seed and the options, never on what else
    is asked: the same call gives the same answers, and those that `gpuinfer generate` gives.

        answers = list(llm.generate(prompts, n=4, temperature=0.8, seed=1))
        answers[0].texts                               # of all four; .text: of the first

    **Streams** give an answer while it grows:

        for part in llm.stream("The sea was"):
            print(part.text, end="")

    **Coroutines** use the same methods: `async for` in place of `for`, and `await llm.answer(prompt)` for one answer.
    Hundreds may wait at once, on any event loop.

        async with gpuinfer.LLM("folder") as llm:
            answer = await llm.answer("Once", timeout=10)
            async for part in llm.stream("The sea was"):
                ...

    **Chats** go through the model's own template; **scores** say how likely a continuation is:

        llm.chat([{"role": "user", "content": "Name a river."}]).text
        [score] = llm.score("The capital of France is", [" Paris"])
        score.logprob

    **Embeddings** of texts are float32 [texts, hidden]:

        vectors = llm.embed(["A river", "A sea"])
        similarities = vectors @ vectors.T

    **Options of an answer** are the flags of `gpuinfer generate` with underscores: `max_new_tokens`, `temperature`,
    `top_p`, `stop`, `n`, `seed`, `logprobs`, `json_schema`, `regex`, `choice`, `grammar` and others (`AnswerKeywords`).

    **Where the time went** is known at any moment: `stats()`, `report()`, `verdict()`, and `with llm.live(): ...`.

    It opens with the first request, with `start()` or `with`, and computes in threads of its own: in a notebook or
    beside a running event loop too. `close()`, or the end of a `with`, waits for what was asked.

    `model`: a folder, or a built-in model. `backend`: "inprocess", "central" (a process of its own), "fleet" (several,
    or a server that runs: endpoint="http://host:8000") or "vllm". `strategy`: a name, or such as
    `gpuinfer.Adaptive(latency_target="50ms")`. `devices`: "auto", "cpu", "cuda:1", a list of them. `dtype`: "float32",
    "bfloat16", "float16". `seed`: of all answers that name none. `context`: tokens of prompt and answer. `batch_size`:
    prompts generated at once. `deterministic`: the same bits for a prompt in any company. `adapters`: folders of LoRA
    adapters by name; the first is used where a call names none. Other keyword arguments are the model's (`checkpoint`,
    `meta`, `dcp_path`, `base_model`, `mask_token_id`, `trust_remote_code`) and the backend's own options (`pages=512`).

    Raises `UsageError` for what cannot be.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        backend: str = "inprocess",
        strategy: Strategy | str = "dynamic",
        devices: str | Sequence[Any] | None = None,
        dtype: Any = None,
        seed: int = 0,
        context: int | None = None,
        batch_size: int | None = None,
        deterministic: bool = False,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        max_queue_rows: int | None = None,
        patience: float | str | None = None,
        give_up: float | str | None = None,
        **options: Any,
    ) -> None:
        if model is not None and not isinstance(model, str | os.PathLike):
            raise UsageError(
                f"an LLM is a folder of a model of text, and this is a {type(model).__name__}. Give the folder's path; "
                "for a torch.nn.Module there is gpuinfer.Batcher."
            )
        place = None if model is None else os.path.expanduser(os.fspath(model))
        given = {"model": place, "context": context, "deterministic": deterministic}
        given |= {name: options.pop(name) for name in ModelOptions.model_fields if name in options}
        with in_python_words():
            values = {name: value for name, value in given.items() if value is not None}
            named = {name: GivenValue(value, f"{name}={value!r}") for name, value in values.items()}
            own = ModelOptions(**check(ModelOptions, named, "LLM"))
            check_model(own, "LLM")
            if not isinstance(adapters, Mapping | None):
                raise UsageError(
                    f'adapters={adapters!r:.60} is no mapping. Give folders by name: adapters={{"policy": "folder"}}.'
                )
            folders = adapter_folders([f"{name}={os.fspath(folder)}" for name, folder in (adapters or {}).items()])
            if batch_size is not None and (type(batch_size) is not int or not 1 <= batch_size <= 1 << 20):
                raise UsageError(f"batch_size={batch_size!r} is no number of prompts. Give one from 1 on.")
            checked_seed(seed)
            self._spec = text_model(own, batch_size, folders)
        self._adapter = next(iter(folders), None)
        self._setup = replace(
            setup_from(
                devices=devices,
                dtype=dtype,
                seed=seed,
                max_queue_rows=max_queue_rows,
                patience=seconds_of("patience", patience),
                give_up=seconds_of("give_up", give_up),
            ),
            model=self._spec,
            deterministic=deterministic,
        )
        self._options, self._backend_name, self._strategy = options, backend, strategy
        self._refuse_unknown()
        self._backend, self._used_strategy = self._made()
        if own.trust_remote_code and not type(self._backend).remote_code:
            raise UsageError("trust_remote_code: code that comes with a checkpoint is never run here. Leave it out.")
        absent = place is not None and place not in TEXT_MODELS and not os.path.exists(place)
        if absent and backend not in ELSEWHERE and not type(self._backend).finds_models:
            from gpuinfer.text.checkpoint import open_checkpoint  # it says what to do

            with in_python_words():
                open_checkpoint(self._spec)
        name = type(self._used_strategy).__name__.lower() if isinstance(strategy, Strategy) else strategy
        self._clock = SessionClock(
            "generate",
            backend,
            name,
            self._setup,
            {
                "generate": {**own.model_dump(mode="json"), "batch_size": batch_size},
                "backends": {backend: self._backend.options.model_dump(mode="json")},
                "strategies": {name: self._used_strategy.options.model_dump(mode="json")},
            },
        )
        self._lock = threading.RLock()
        self._opened: OpenedLLM | None = None
        self._closed = False
        self._last = Snapshot()
        language = ModelLanguage(self._spec)
        self._scoring, self._forms = ScoringPrompts(language), AnswerForms(language)

    def _refuse_unknown(self) -> None:
        with in_python_words():
            own = registry.load("backends", self._backend_name).Options if isinstance(self._backend_name, str) else None
        known = [*ModelOptions.model_fields, *inspect.signature(LLM).parameters, *(own.model_fields if own else ())]
        for name, value in self._options.items():
            if name not in known:
                hint = option_hint(name, known)
                between = f" {hint}" if hint else ""
                raise UsageError(
                    f"{name}={value!r:.60}: LLM has no option '{name}' on the backend '{self._backend_name}'.{between} "
                    f"Options: {', '.join(sorted({*known} - {'model', 'options'}))}."
                )

    def _made(self) -> tuple[Backend, Strategy]:
        backend = backend_of(self._backend_name, self._setup, self._options)
        return backend, strategy_of(self._strategy, setup=self._setup)

    # Opening and closing

    @property
    def is_open(self) -> bool:
        """Whether the model is loaded, and may be asked."""
        return self._opened is not None and not self._closed

    def start(self) -> Self:
        """Load the model now, if that has not been done. Raises `UsageError` for one that cannot be loaded."""
        self.opened()
        return self

    def opened(self) -> OpenedLLM:
        """What stands behind it, opened now where it is not. Raises `Closed`, and `UsageError` in a fork."""
        if self._opened is not None:
            self._opened.refuse_fork()
        with self._lock:
            if self._closed:
                raise Closed("this LLM is closed. Make another one: gpuinfer.LLM(…).")
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _open(self) -> OpenedLLM:
        if self._backend.remote:
            children.refuse_while_imported("a server")
        session = BackgroundSession(self._backend, self._used_strategy)
        with in_python_words(), contextlib.ExitStack() as if_refused:
            session.__enter__()
            if_refused.callback(self._anew)
            if_refused.push(session)
            session.call(session.session.check())
            limits = session.ready()
            if_refused.pop_all()
        self._clock.begin()
        _close_at_exit(self)
        return OpenedLLM(session, limits)

    def _anew(self) -> None:
        """What could not be started cannot be started again."""
        self._backend, self._used_strategy = self._made()

    def close(self, *, drain: bool = True) -> None:
        """Wait for what was asked, or cancel it (`drain=False`), and give the model's memory and processes back."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            opened = self._opened
        if was_closed or opened is None or opened.forked:
            return
        opened.shut()
        session = opened.session
        try:
            with contextlib.suppress(RuntimeError):  # the session's loop has ended
                session.call(opened.settle(drain))
                self._last = session.call(_counted(session))
        finally:
            self._clock.end()
            session.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close, drain=kind is None)

    def __del__(self) -> None:
        opened = getattr(self, "_opened", None)
        if opened is not None and not self._closed and not opened.forked:
            opened.session.close_soon()  # nobody waits: this may be any thread

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an LLM cannot be sent to another process. Make one there; or serve the model once (`gpuinfer serve`), and "
            'ask it from each: gpuinfer.LLM(…, backend="fleet", endpoint="http://127.0.0.1:8000").'
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._opened is not None else "not open yet"
        return f"<gpuinfer.LLM {self._spec.name} on {self._clock.backend}, {state}>"

    # Asking

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        ordered: bool = ...,
        errors: Literal["raise"] = ...,
        timeout: float | str | None = ...,
        priority: Priority | str = ...,
        progress: bool = ...,
        prompt_column: str | None = ...,
        **options: Unpack[AnswerKeywords],
    ) -> TextAnswers[TextAnswer]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        ordered: bool = ...,
        errors: Literal["return"],
        timeout: float | str | None = ...,
        priority: Priority | str = ...,
        progress: bool = ...,
        prompt_column: str | None = ...,
        **options: Unpack[AnswerKeywords],
    ) -> TextAnswers[TextAnswer | GpuinferError]: ...

    def generate(
        self,
        prompts: Prompts,
        *,
        ordered: bool = True,
        errors: Errors = "raise",
        timeout: float | str | None = None,
        priority: Priority | str = "normal",
        progress: bool = False,
        prompt_column: str | None = None,
        **options: Unpack[AnswerKeywords],
    ) -> TextAnswers[Any]:
        """Answer prompts: an iterator, for `for` and `async for`, of a `TextAnswer` for each.

        `prompts`: a text, token ids, a chat (messages), a row as `{"prompt": "Once", "id": 7}`; a list, an array or an
        iterator of these, or a file (`Path("prompts.jsonl")`, JSON, CSV, Parquet; of a .txt each line that is not blank
        is a prompt), a pattern (`Path("data/*.parquet")`) or a list of files. `prompt_column`: the column of a table
        that holds them, else `prompt`, `messages` or `text`. `ordered`: in the order of the prompts, or as they are
        finished. `errors`: "raise" raises a prompt's error in its place, with its `index`, which counts prompts and not
        lines (those are in `answer.line`); "return" gives the error in place of the answer, and goes on. `timeout`:
        seconds for each prompt, from when the model is asked. `priority`: "high", "normal", "low" among all that wait.
        `progress`: draw a bar.

        Leaving the loop early, or an error, cancels what is under way.

        `options`, each as the flag of `gpuinfer generate`: lengths (`max_new_tokens=128`, `min_tokens`), drawing
        (`temperature=1.0`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`,
        `seed`, and `n` answers to each prompt), ends (`stop`, `stop_token_ids`, `ignore_eos`), forms (`json_schema`: a
        dict, a model of pydantic or a `Path`; `regex`, `choice`, `grammar`), what is told (`logprobs`,
        `prompt_logprobs`, `skip_special_tokens`), `truncate`, `adapter`, `chat_template_kwargs`; and of diffusion
        models `decoder`, `steps`, `block_length`, `threshold`, `cfg_scale`, `cache`, `decoder_options`.
        """
        if errors not in ("raise", "return"):
            raise UsageError(f'errors={errors!r} is no way to treat them. Give "raise" or "return".')
        bar = None
        if progress:
            from gpuinfer.cli.screen.display import progress_bar

            def bar(total: int | None) -> contextlib.AbstractContextManager[Callable[[int], None]]:
                return progress_bar("prompts", total)

        seconds, request = self._request(timeout, priority)
        rows = PromptReader(prompts, self._defaults(options), prompt_column)
        return TextAnswers(self, rows, ordered=ordered, errors=errors, timeout=seconds, request=request, bar=bar)

    def answer(
        self,
        prompt: OnePrompt,
        *,
        timeout: float | str | None = None,
        priority: Priority | str = "normal",
        **options: Unpack[AnswerKeywords],
    ) -> PendingText:
        """Ask one prompt: `answer = await llm.answer("Once")` in a coroutine, or `llm.answer("Once").result()`.

        Arguments as of `generate`. The same prompt has the same answer each time: ask for `n=4`, or give another
        `seed`, for others.
        """
        row = self._one(prompt, options)
        seconds, request = self._request(timeout, priority)
        return PendingText(self.opened(), row, seconds, request)

    def stream(
        self,
        prompt: OnePrompt,
        *,
        timeout: float | str | None = None,
        priority: Priority | str = "normal",
        **options: Unpack[AnswerKeywords],
    ) -> TextStream:
        """Answer one prompt while it grows: an iterator, for `for` and `async for`, of parts with a `text` each; then
        `stream.result` is the whole answer. Arguments as of `generate`.
        """
        seconds, request = self._request(timeout, priority)
        return TextStream(self, self._one(prompt, options), seconds, request)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        tool_format: ToolFormatName = "auto",
        timeout: float | str | None = None,
        priority: Priority | str = "normal",
        **options: Unpack[AnswerKeywords],
    ) -> ChatAnswer:
        """The answer to a conversation, `[{"role": "user", "content": "Hi"}]`, or to one message of the user.

        It goes through the model's chat template. `tools`, `tool_choice` and `parallel_tool_calls` are those of
        OpenAI's API: functions with JSON schemas of their parameters, which the model may call, and whether it must.
        The answer's `tool_calls` are parsed, and follow their schemas; `answer.message` goes into the conversation,
        and what a function gives behind it: `{"role": "tool", "tool_call_id": call.id, "content": …}`. `tool_format`:
        how this model writes calls ("hermes", "llama3", "mistral" …), as its chat template shows by itself. What the
        model thinks between <think> and </think> is in `answer.reasoning`.

        In a coroutine, `await llm.answer(messages)`; many conversations, `llm.generate([messages, …])`: there thoughts
        and calls stay in the text.
        """
        if not isinstance(messages, str | Sequence) or not all(isinstance(one, str | Mapping) for one in messages):
            raise UsageError(
                f'messages={messages!r:.60} are none. Give a text, or a list: [{{"role": "user", "content": "Hi"}}].'
            )
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        asked: dict[str, Any] = {"messages": said} | ({"tools": list(tools)} if tools else {})
        row = self._one(asked, options)
        seconds, request = self._request(timeout, priority)
        opened, form = self.opened(), None
        if row.error is None:
            if tool_format not in (known := get_args(ToolFormatName)):
                raise UsageError(f"tool_format={tool_format!r:.60} is none. Choose from {', '.join(known)}.")
            forms = replace(self._forms, tool_format=tool_format)
            with in_python_words():
                prompt, form = forms.plan(row.prompt, tool_choice, parallel_tool_calls, f"{row.id}")
            row = structs.replace(row, prompt=prompt)
        pending = PendingText(opened, row, seconds, request)
        try:
            return chat_answer(pending.result(), form)
        except BaseException:
            pending.cancel()
            raise

    def score(
        self,
        prompts: Any,
        continuations: Any,
        *,
        timeout: float | str | None = None,
        priority: Priority | str = "normal",
        adapter: str | None = None,
    ) -> list[ContinuationScore]:
        """How likely each prompt goes on with its continuation: log-probabilities, nothing is drawn.

        Two lists of one length, or one prompt and several continuations. Each is a text or token ids. Texts are
        tokenized together: what scores is what follows the tokens that prompt and whole begin with alike.
        """
        seconds, request = self._request(timeout, priority)
        opened = self.opened()
        rows = self._scoring.pairs(prompts, continuations, self._adapter if adapter is None else adapter or None)
        return opened.wait_for(lambda: scores_of(opened, rows, seconds, request))

    def embed(
        self,
        texts: Any,
        *,
        pooling: Pooling = "model",
        dimensions: int | None = None,
        timeout: float | str | None = None,
        priority: Priority | str = "normal",
        adapter: str | None = None,
    ) -> NDArray[np.float32]:
        """Embeddings of texts, or of lists of token ids: float32 [texts, dimensions], each of length 1. Of one text
        alone there is one row.

        `pooling` of the states of a text's tokens: "mean", "last", "first", or "model": as the model's folder has it
        (sentence-transformers' `1_Pooling/config.json`), else "last". `dimensions`: the first so many values alone.
        """
        seconds, request = self._request(timeout, priority)
        opened = self.opened()
        rows = embedding_prompts(texts, pooling, self._adapter if adapter is None else adapter or None)
        return opened.wait_for(lambda: embeddings_of(opened, rows, dimensions, seconds, request))

    def update(
        self,
        version: str | int,
        weights: str | os.PathLike[str],
        *,
        adapter: str | None = None,
        drain: bool = True,
    ) -> None:
        """Compute with other weights from now on, or with those of an adapter, under the name `version`.

        `weights`: a folder or a safetensors file with the same tensors. `drain`: what is under way is finished with the
        old weights first; else it goes on with the new ones (`answer.generation.versions` tells). Raises `UsageError`
        for weights that do not fit, and then nothing has changed.
        """
        session = self.opened().session
        with in_python_words():
            session.call(session.session.update(str(version), os.fspath(weights), adapter=adapter, drain=drain))

    @property
    def limits(self) -> Limits:
        """What the model takes at once: `slots` are prompts. It opens the model."""
        return self.opened().limits

    @property
    def adapters(self) -> Sequence[str]:
        """The names that `adapter=` may have."""
        return self.opened().session.session.adapters

    def _defaults(self, options: Mapping[str, Any]) -> PromptDefaults:
        if self._closed:
            raise Closed("this LLM is closed. Make another one: gpuinfer.LLM(…).")
        return prompt_defaults(options, self._adapter)

    def _one(self, prompt: Any, options: Mapping[str, Any]) -> Any:
        reader = PromptReader(prompt, self._defaults(options))
        if reader.total != 1:
            raise UsageError("this asks one prompt, and these may be several. Use `generate`, or give one of them.")
        return next(reader)

    def _request(self, timeout: float | str | None, priority: Priority | str) -> tuple[float | None, dict[str, Any]]:
        seconds = seconds_of("timeout", timeout)
        request: dict[str, Any] = {"priority": priority_of(priority)}
        return seconds, request if seconds is None else {**request, "timeout": seconds}

    # Figures

    def _snapshot(self) -> Snapshot:
        opened = self._opened
        if opened is not None and not self._closed and not opened.forked:
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._last = opened.session.call(_counted(opened.session), 5.0)
        return self._last

    def _progress(self, snapshot: Snapshot) -> Progress:
        opened = self._opened
        if opened is None:
            return Progress(0)
        counts = {name: getattr(opened, name) for name in ("input_tokens", "output_tokens", "cached_tokens")}
        return Progress(
            opened.done,
            counts=counts,
            facts={"rows_outstanding": opened.rows},
            failed=opened.failed,
            failure=opened.first_failure,
        )


async def _counted(session: BackgroundSession) -> Snapshot:
    await session.session.refresh()
    return session.session.snapshot()


_open_ones: weakref.WeakSet[LLM] = weakref.WeakSet()


def _close_at_exit(llm: LLM) -> None:
    """Close it when the interpreter ends, before threads can no longer be started; `atexit` would be too late."""
    _open_ones.add(llm)
    _await_exit()


@functools.cache
def _await_exit() -> None:
    def close_all() -> None:
        for one in list(_open_ones):
            with contextlib.suppress(Exception):
                one.close(drain=False)

    threading._register_atexit(close_all)  # type: ignore[attr-defined]
