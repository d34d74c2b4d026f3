"""A model of a folder, asked through the generator that `gpuinfer generate` uses; and the same through transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.generation import Completion, Generation, Prompt, Sampling
from gpuinfer.text.generator import Driver, open_generator
from gpuinfer.text.text_options import TorchModelOptions

SLOTS, CONTEXT = 32, 2048
ANSWER_S = 120.0  # for all prompts of a test, on a machine that stalls
TIE = 1e-3
"""Logits that lie so close are equal but for rounding, which another order of the same sums may turn round."""


class Answerer:
    """Our own generator, opened once."""

    def __init__(
        self, folder: Path, dtype: str = "float32", threads: int | None = None, deterministic: bool = False, **own: Any
    ) -> None:
        spec = ModelSpec(str(folder), kind="text")
        setup = Setup(model=spec, devices=("cpu",), dtype=dtype, deterministic=deterministic)
        options = {"slots": SLOTS, "context": CONTEXT, "threads": threads, **own}
        self.generator = open_generator(spec, setup, TorchModelOptions(**options))
        self._driver = Driver(self.generator)

    def __enter__(self) -> Answerer:
        return self

    def __exit__(self, *error: object) -> None:
        self._driver.close()

    def counters(self) -> dict[str, float]:
        """Totals of its steps: `generator.driver.DriverCounters`."""
        return self._driver.counters()

    def tokens_of(self, prompt: Prompt) -> list[int]:
        [prepared] = self.generator.prepare([prompt])
        if isinstance(prepared, Exception):
            raise prepared
        return [int(token) for token in prepared.tokens]

    def answer(self, prompts: Sequence[Prompt]) -> list[Generation]:
        """All at once, as many as there are slots under way."""
        return [future.result(ANSWER_S) for future in [self._asked(prompt) for prompt in prompts]]

    def completions(self, prompt: Prompt) -> Sequence[Completion]:
        return self.answer([prompt])[0].completions

    def _asked(self, prompt: Prompt) -> Future[Generation]:
        [prepared] = self.generator.prepare([prompt])
        if isinstance(prepared, Exception):
            raise prepared
        future: Future[Generation] = Future()

        def done(outcome: Generation | Exception) -> None:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self._driver.submit(prepared, done)
        return future


class Reference:
    """transformers, in float32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(os.cpu_count() or 1)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def logits(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Of each row of tokens float32 [tokens, vocabulary]: what comes after each of them. What fills shorter rows up
        stands behind them, where no token of theirs looks.
        """
        given = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for place, row in enumerate(rows):
            given[place, : len(row)] = torch.tensor(list(row))
        with torch.inference_mode():
            found = self.model(given).logits
        return [found[place, : len(row)] for place, row in enumerate(rows)]

    def greedy(self, tokens: Sequence[int], new: int) -> list[int]:
        given = torch.tensor([list(tokens)])
        with torch.inference_mode():
            whole = self.model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False, pad_token_id=2
            )
        answer: list[int] = whole[0, len(tokens) :].tolist()
        return answer


def greedy(new: int, **fields: Any) -> Sampling:
    return Sampling(max_tokens=new, temperature=0, **fields)


def agreed(logits: Tensor, answer: Sequence[int]) -> tuple[int, bool]:
    """How many tokens of an answer are the likeliest by these logits [tokens, vocabulary], row by row; and whether the
    first that is not ties with the likeliest.
    """
    best = logits.argmax(-1).tolist()
    for place, token in enumerate(answer):
        if token != best[place]:
            gap = logits[place].max() - logits[place, token]
            return place, float(gap) <= TIE
    return len(answer), False
