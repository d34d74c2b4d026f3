"""The command, but with a model that answers at once in the place of `inprocess`: what surrounds the model is tried.

An answer is the prompt turned round, a word for each sample. `slow` in a prompt delays it, `bad` and `broken` fail it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import random
import tempfile

from gpuinfer import api
from gpuinfer.api import Backend, BackendContext, Limits
from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Prompt


class Instant(Backend):
    """Answers prompts without a model."""

    serves = ("text",)

    class Options(api.Options):
        slots: int = 64
        max_rows: int = 64
        delay: float = 0.0  # seconds at most; drawn for each batch

    def __init__(self, setup=None, /, **options):
        super().__init__(setup, **options)
        spec = self.setup.model
        slots = (spec and spec.arguments.get("slots")) or self.options.slots
        self.limits = Limits(min(slots, self.options.max_rows), in_flight=4, slots=slots)
        self._dice = random.Random(5)

    async def start(self, context: BackendContext) -> None:
        self._stepped = context.stepped

    async def infer(self, batch):
        held_up = os.environ.get("SLUGGISH") if any(one.payload.text == "sluggish" for one in batch) else None
        if held_up is not None:  # until somebody writes to this pipe
            await asyncio.to_thread(lambda: open(held_up).close())
        if self.options.delay:
            await asyncio.sleep(self._dice.random() * self.options.delay)
        self._stepped(sum(request.rows for request in batch), self.options.delay)
        return [answer(request.payload) for request in batch]


def answer(prompt: Prompt) -> Generation | Exception:
    text = prompt.text if prompt.text is not None else repr(prompt.tokens or prompt.messages)
    if "bad" in text:
        return BadPrompt("the prompt is bad. Give a better one.")
    if "broken" in text and not os.environ.get("MENDED"):
        return BackendError("the model broke. Mend it.")
    drawn = range(prompt.first_sample, prompt.first_sample + prompt.samples)
    return Generation(
        completions=tuple(completion(prompt, text, number) for number in drawn), prompt_tokens=len(text.encode())
    )


def completion(prompt: Prompt, text: str, number: int) -> Completion:
    tokens = tuple(hashlib.sha256(f"{prompt.key} {number}".encode()).digest()[: min(prompt.sampling.max_tokens, 4)])
    chosen = tuple(Logprob(Candidate(token, -1.5, 1), (Candidate(token, -1.5, 1),)) for token in tokens)
    return Completion(
        text=f"{text[::-1]} {number} {tokens[0]}",
        tokens=tokens,
        finish_reason="length",
        logprobs=None if prompt.sampling.logprobs is None else chosen,
    )


def prepare() -> None:
    import gpuinfer.text.language  # noqa: F401  what a form of answers is checked with

    patch()
    try_out()


def patch() -> None:
    """Put the instant model in the place of the real one, fingerprint and all."""
    from gpuinfer.backends import inprocess
    from gpuinfer.workloads.generate import workload

    inprocess.InProcess = Instant
    workload.model_fingerprint = lambda spec: os.environ.get("FINGERPRINT", "abc")


def try_out() -> None:
    """One run, so that all is imported that a run needs."""
    from gpuinfer.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        source, target = os.path.join(folder, "in.jsonl"), os.path.join(folder, "out.jsonl")
        with open(source, "w") as file:
            file.write('"a"\n')
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main(["generate", "--no-roofline", "--model", "tiny", "--input", source, "--output", target])
