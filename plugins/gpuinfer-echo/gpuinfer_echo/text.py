"""A backend of text that writes no text of its own: it says the prompt again, a word for each token."""

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable, Sequence

from pydantic import Field

from gpuinfer import api
from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Completion, Generation, Part, Prompt

Tell = Callable[[api.Event], None]


class Starling(api.Backend):
    """Answers each prompt with its own words, over and over, as slowly as a model of that speed would. With a
    temperature it draws them. A token is a word's place in the prompt.
    """

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
        self._under_way: dict[api.Request, asyncio.Task[None]] = {}

    async def infer(self, batch: Sequence[api.Request]) -> Sequence[api.Result]:
        raise NotImplementedError  # answers come through stream

    async def stream(self, batch: Sequence[api.Request]) -> AsyncIterator[api.Event]:
        """Called as often as slots are free, with others under way: whoever is done first is answered first."""
        events: asyncio.Queue[api.Event] = asyncio.Queue()
        for request in batch:
            task = self._under_way[request] = asyncio.create_task(self._answer(request, events.put_nowait))
            task.add_done_callback(functools.partial(_unless_ended, request, events.put_nowait))
        left = len(batch)
        try:
            while left:
                event = await events.get()
                left -= event.last
                yield event
        finally:
            for request in batch:
                self.cancel(request)

    def cancel(self, request: api.Request) -> None:
        """Its slots are free at once: the next step is without it."""
        if (task := self._under_way.pop(request, None)) is not None:
            task.cancel()

    async def _answer(self, request: api.Request, tell: Tell) -> None:
        try:
            tell(api.Event(request, await self._say(request, tell)))
        except BadPrompt as error:
            tell(api.Event(request, error=error))

    async def _say(self, request: api.Request, tell: Tell) -> Generation:
        prompt: Prompt = request.payload
        words = (prompt.text or "").split()
        if not words:
            raise BadPrompt("a starling needs words. Give the prompt as `text`.")
        if prompt.adapter is not None:
            raise BadPrompt("a starling has no adapters. Leave `adapter` out.")
        told = prompt.sampling
        if told.stop or told.stop_token_ids:
            raise BadPrompt("a starling does not listen for stops. Leave `stop` and `stop_token_ids` out.")
        wanted, said = told.max_tokens, list[str]()
        draw = random.Random(f"{told.seed} {prompt.key}")
        tokens = tuple(
            draw.randrange(len(words)) if told.temperature else number % len(words) for number in range(wanted)
        )
        if any(had != tokens[: len(had)] for had in prompt.begun):
            raise BadPrompt("a starling would not have begun with these tokens. Leave `begun` out.")
        begun = [len(tokens) for tokens in prompt.begun] or [0] * prompt.samples  # said elsewhere: no need to wait
        for number in range(wanted):
            if number >= min(begun):
                await asyncio.sleep(self.options.seconds)
                self._stepped(request.rows, self.options.seconds)
            said.append((" " if number else "") + words[tokens[number]])
            if request.parts:  # someone reads along
                for sample in range(prompt.samples):
                    ends, known = "length" if number + 1 == wanted else None, number < begun[sample]
                    if known and ends is None:
                        continue
                    text, new = ("", ()) if known else (said[-1], tokens[number : number + 1])
                    part = Part(sample=sample, text=text, tokens=new, finish_reason=ends)
                    tell(api.Event(request, part, last=False))
        completion = Completion(text="".join(said), tokens=tokens, finish_reason="length")
        return Generation(
            completions=(completion,) * prompt.samples,
            prompt_tokens=len(words),
            first_token_s=self.options.seconds,
            seconds=wanted * self.options.seconds,
        )


def _unless_ended(request: api.Request, tell: Tell, task: asyncio.Task[None]) -> None:
    """The stream ends for this request too when its answer was cancelled."""
    if task.cancelled():
        tell(api.Event(request, error=BackendError("this answer was cancelled. Ask again.")))
