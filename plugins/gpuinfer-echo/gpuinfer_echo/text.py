"""A backend of text that writes no text of its own: it says the prompt again, a word for each token."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from pydantic import Field

from gpuinfer import api
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Completion, Generation, Prompt


class Starling(api.Backend):
    """Answers each prompt with its own words, over and over, as slowly as a model of that speed would."""

    serves = ("text",)

    class Options(api.Options):
        seconds: float = Field(0.001, ge=0, description="what one forward step takes, which gives each row a token")
        slots: int = Field(16, ge=1, description="rows that are answered at once")

    async def start(self, context: api.BackendContext) -> None:
        self._stepped = context.stepped  # tells the run's batches: each forward step, with its rows
        slots = self.options.slots
        spec = self.setup.model
        if spec is not None:  # what the workload wants of its model: see docs/plugins.md
            slots = min(slots, spec.arguments.get("slots", slots))
        self.limits = api.Limits(max_rows=slots, in_flight=slots, slots=slots)

    async def infer(self, batch: Sequence[api.Request]) -> Sequence[api.Result]:
        raise NotImplementedError  # answers come through stream

    async def stream(self, batch: Sequence[api.Request]) -> AsyncIterator[api.Event]:
        """Called as often as slots are free, with others under way: whoever is done first is answered first."""
        for asked in asyncio.as_completed([self._answer(request) for request in batch]):
            yield await asked

    async def _answer(self, request: api.Request) -> api.Event:
        prompt: Prompt = request.payload
        words = (prompt.text or "").split()
        if not words:
            return api.Event(request, error=BadPrompt("a starling needs words. Give the prompt as `text`."))
        if prompt.adapter is not None:
            return api.Event(request, error=BadPrompt("a starling has no adapters. Leave `adapter` out."))
        said = [words[number % len(words)] for number in range(prompt.sampling.max_tokens)]
        for _ in said:
            await asyncio.sleep(self.options.seconds)
            self._stepped(request.rows, self.options.seconds)
        completion = Completion(text=" ".join(said), tokens=tuple(range(len(said))), finish_reason="length")
        return api.Event(request, Generation(completions=(completion,) * prompt.samples, prompt_tokens=len(words)))
