"""Stand-ins for what surrounds a plugin: an Infer that answers from a function, a backend, tiny models, and asyncio on
a virtual clock, where a wait takes no time.
"""

from __future__ import annotations

import asyncio
import json
import math
import selectors
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from gpuinfer.api import Backend, Infer, Lane, Limits, ModelSpec, Priority, Request, Result, Stream, Workers
from gpuinfer.engine.results import OnPart
from gpuinfer.engine.stream import PartStream
from gpuinfer.errors import UsageError
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part, Prompt
from gpuinfer.stats import Lane as LedgerLane

END = "<|end|>"  # the token that ends an answer of the tiny model
SHORT = 16  # tokens of a made-up answer, at most


class FakeInfer(Infer):
    """Answers each request with `answer(request)`, at once, and keeps it in `requests`. It starts no processes.

    The parts of a streamed `Generation` are its tokens one by one (`parts_of`).
    """

    def __init__(self, answer: Callable[[Request], Result], limits: Limits | None = None) -> None:
        self.limits = limits or Limits(max_rows=4096)
        self.stopping = asyncio.Event()
        self.requests: list[Request] = []
        self.live: set[Hashable] = set()
        self.lanes: list[LedgerLane] = []
        self._answer = answer

    async def __call__(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
    ) -> Result:
        now = asyncio.get_running_loop().time()
        request = Request(payload, rows, now, priority, now + timeout, group, client)
        self.requests.append(request)
        await asyncio.sleep(0)
        return self._answer(request)

    def stream(self, payload: Any, **options: Any) -> Stream:
        async def ask(on_part: OnPart) -> Result:
            result = await self(payload, **options)
            begun = payload.begun if isinstance(payload, Prompt) else ()
            for part in parts_of_answer(result, begun) if isinstance(result, Generation) else ():
                on_part(part)
                await asyncio.sleep(0)
            return result

        return PartStream(ask)

    @contextmanager
    def client(self) -> Iterator[Hashable]:
        me = object()
        self.live.add(me)
        try:
            yield me
        finally:
            self.live.remove(me)

    def lane(self, name: str) -> Lane:
        lane = LedgerLane(name)
        self.lanes.append(lane)
        return lane

    def workers(self, target: str, arguments: Sequence[Mapping[str, Any]]) -> AbstractAsyncContextManager[Workers]:
        raise UsageError(f"FakeInfer starts no processes, so not '{target}'. Try it with `gpuinfer` itself.")


class Answerer(Backend):
    """Answers prompts with made-up text as long as they want it, and anything else with itself. It holds no model."""

    serves = ("rows", "text")
    limits = Limits(max_rows=256, in_flight=4)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return [made_up(one.payload) if isinstance(one.payload, Prompt) else one.payload for one in batch]


def made_up(prompt: Prompt) -> Generation:
    """An answer that depends on the prompt's key and sample alone: the tokens 1, 2, 3, … and a word for each."""
    wanted = prompt.sampling
    tokens = tuple(range(1, min(wanted.max_tokens, SHORT) + 1))
    chosen = tuple(Logprob(Candidate(token, -1.0, 1), (Candidate(token, -1.0, 1),)) for token in tokens)
    numbers = range(prompt.first_sample, prompt.first_sample + prompt.samples)
    return Generation(
        completions=tuple(
            Completion(
                text=" ".join(f"{prompt.key}.{number}.{token}" for token in tokens),
                tokens=tokens,
                finish_reason="length" if len(tokens) == wanted.max_tokens else "stop",
                logprobs=None if wanted.logprobs is None else chosen,
            )
            for number in numbers
        ),
        prompt_tokens=8,
    )


def parts_of_answer(generation: Generation, begun: Sequence[Sequence[int]] = ()) -> Iterator[Part]:
    """A made-up answer token by token, the samples in turn; the text is cut evenly. Of samples that have `begun` what
    follows; of one that is whole its finish.
    """
    for sample, answer in enumerate(generation.completions):
        count, had = max(1, len(answer.tokens)), len(begun[sample]) if begun else 0
        if had == count:
            yield Part(sample=sample, text="", tokens=(), finish_reason=answer.finish_reason)
        for at in range(had, count):
            ends = at + 1 == count
            yield Part(
                sample=sample,
                text=answer.text[len(answer.text) * at // count : len(answer.text) * (at + 1) // count],
                tokens=answer.tokens[at : at + 1],
                logprobs=None if answer.logprobs is None else answer.logprobs[at : at + 1],
                finish_reason=answer.finish_reason if ends else None,
                stop_reason=answer.stop_reason if ends else None,
            )


def tiny_folder(folder: Path) -> Path:
    """Write a checkpoint of text, as transformers would: config, random weights, tokenizer."""
    from gpuinfer.text.checkpoint import open_checkpoint, save_folder

    checkpoint = open_checkpoint(ModelSpec("tiny", kind="text"))
    save_folder(checkpoint, folder)
    end = checkpoint.shape.end_tokens[0]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelt = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    ending = {"id": end, "content": END, "special": True}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [ending | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)],
                "pre_tokenizer": by_bytes,
                "decoder": by_bytes,
                "model": {
                    "type": "BPE",
                    "vocab": {spelt[byte]: byte for byte in range(256)} | {END: end},
                    "merges": [],
                },
            }
        )
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tiny_model(inputs: int = 8) -> Any:
    """A linear torch model from features [rows, inputs] to [rows, 3], for backends that need some model."""
    import torch

    return torch.nn.Linear(inputs, 3)


T = TypeVar("T")

THREAD_WAIT_S = 10.0  # real seconds that a thread may take when nothing else is left to wait for


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer. Raises `RuntimeError` when all that is left would wait for ever."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(_JumpingSelector(self.clock))

    def time(self) -> float:
        now = self.clock()
        # What asyncio takes for the same moment: its nanosecond would join timers that are not, and less than a float
        # can add would have it wait for a timer that is due.
        self._clock_resolution = math.ulp(now)
        return now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is not None:
            self._clock.advance(timeout)
            return []
        events = super().select(THREAD_WAIT_S)
        if not events:
            raise RuntimeError("everything waits, and nothing is left that could end it. Give each wait an owner.")
        return events


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on a virtual clock: `asyncio.get_running_loop().time` reads it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
