"""One agent of a game: observations become tokens, the tokens that the model draws become an answer and a turn.

Token in, token out: answers stay as the tokens that were drawn, and only new messages are encoded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from gpuinfer.api import Infer
from gpuinfer.engine.stream import retry_when_full
from gpuinfer.errors import BadPrompt, BadResult, UsageError
from gpuinfer.generation import Completion, Generation, Prompt, Rendering, Sampling
from gpuinfer.rollouts.environment import Observation
from gpuinfer.rollouts.record import Span, Timing, Trajectory, Turn

if TYPE_CHECKING:
    from gpuinfer.text.language import Language

MARK = "[[what-was-answered-here]]"
ASSISTANT = "assistant"
AS_IT_IS = Rendering()


class TokenConversation:
    """The messages and answers of one agent. `tokens`: all of them as the model sees them."""

    __slots__ = ("end", "messages", "place", "tokens")

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.messages: list[Mapping[str, Any]] = []
        self.place: int | None = None  # of the last answer among the messages
        self.end: int | None = None  # the last token of it

    def add_answer(self, prompt: Sequence[int], answer: Completion) -> None:
        self.tokens = (*self.tokens, *prompt, *answer.tokens)
        self.place = len(self.messages)
        self.messages.append({"role": ASSISTANT, "content": answer.text})
        self.end = answer.tokens[-1] if answer.tokens else None


class ChatEncoder:
    """Writes chats out in the words of one model. Its methods belong to one event loop; the work is done beside it."""

    def __init__(self, language: Language, rendering: Rendering = AS_IT_IS, *, plain: bool = False) -> None:
        self._language, self._rendering, self._plain = language, rendering, plain
        self._ends = frozenset(language.end_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpuinfer-chats")
        if not (plain or language.has_chat_template):
            raise UsageError(
                "the model has no chat template, and environments speak in chats. Give a chat model, or add --plain, "
                "which writes a line `role: text` for each message."
            )

    async def added(self, conversation: TokenConversation, observation: Observation) -> tuple[int, ...]:
        """The tokens that the observation adds, up to where the answer begins. Raises `BadPrompt`."""
        if observation.anew:
            conversation.tokens, conversation.messages = (), []
            conversation.place = conversation.end = None
        conversation.messages += observation.messages
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._added, conversation)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _added(self, conversation: TokenConversation) -> tuple[int, ...]:
        if conversation.place is None:
            return self._tokens(self._written(conversation.messages))
        messages, place, end = conversation.messages, conversation.place, conversation.end
        marked = [*messages[:place], {"role": ASSISTANT, "content": MARK}, *messages[place + 1 :]]
        _, mark, text = self._written(marked).rpartition(MARK)  # what the template writes after the answer
        if not mark:
            raise BadPrompt(
                "the model's chat template leaves out an answer that is not the last message, so that a chat cannot be "
                "gone on with. Let the environment say `anew` with the whole chat, or add --plain."
            )
        if end not in self._ends or not (literal := self._language.decode([end], special_tokens=True)):
            return self._tokens(text)
        tokens = self._tokens(literal + text.removeprefix(literal))  # as a tokenizer writes what stands after it
        return tokens[1:] if tokens[:1] == (end,) else self._tokens(text.removeprefix(literal))

    def _written(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self._plain:
            return "".join(f"{one['role']}: {one.get('content') or ''}\n" for one in messages) + f"{ASSISTANT}: "
        return self._language.render_chat(messages, self._rendering)

    def _tokens(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        (found,) = self._language.encode([Prompt(text=text, special_tokens=False)])
        if isinstance(found, BadPrompt):
            raise found
        return tuple(found.tolist())


log = logging.getLogger(__name__)

TRIES = 12_000  # at a queue that is full

NO_CHANGE = ("max_tokens", "seed", "stop", "stop_token_ids", "skip_special_tokens", "logprobs", "processed_logprobs")
"""What of a sampling leaves the model's distribution as it is."""

POLICY = "policy"  # the role of those who learn


@dataclass(frozen=True)
class Speaker:
    """Who speaks for a role."""

    infer: Infer
    chat: ChatEncoder
    sampling: Sampling
    model: str  # a name for the record
    adapter: str | None = None
    trainable: bool = True


@dataclass
class RolloutCounts:
    """What has been asked and answered, all agents of a run together."""

    begun: int = 0  # answers that were asked for
    asked: int = 0  # of them those that are under way, or wait for room
    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    again: int = 0  # calls of agents that had answered before, and of their earlier messages:
    carried_tokens: int = 0  # the tokens with which their prompts began
    kept_tokens: int = 0  # those of them that were cached
    steps: int = 0  # of games in which an agent was asked
    inference_s: float = 0.0  # the sum over all answers, from the admission to the last token
    environment_s: float = 0.0  # the sum over all games, waiting included
    blocked_s: float = 0.0  # the sum over all games, that they kept the event loop
    blocked_said: bool = False
    raw: bool = False  # the backend knows no log-probabilities but the model's own
    complained: bool = False  # of an environment that cannot be closed
    remarked: bool = False  # what an environment finds amiss
    changed: Callable[[], None] = field(default=lambda: None)  # called when `asked` has become less

    def ask(self, answers: int) -> None:
        self.begun += answers
        self.asked += answers
        self.steps += bool(answers)

    def answered(self, _: object) -> None:
        """One of them has come, or will not come."""
        self.asked -= 1
        self.changed()

    @property
    def width(self) -> float:
        """Answers that a game asks for at once, on average; one, before any did."""
        return self.begun / self.steps if self.steps else 1.0

    def answer(self, generation: Generation, carried: int) -> None:
        """`carried`: with so many tokens the prompt began that were there when the agent spoke before."""
        self.calls += 1
        if carried:
            self.again += 1
            self.carried_tokens += carried
            self.kept_tokens += min(carried, generation.cached_tokens)
        self.input_tokens += generation.prompt_tokens
        self.cached_tokens += generation.cached_tokens
        self.output_tokens += sum(len(one.tokens) for one in generation.completions)
        self.inference_s += generation.seconds


class Agent:
    """One agent of one game. `id` is group/sample/agent; `key` likewise, and another one for each attempt."""

    def __init__(
        self, id: str, key: str, agent: str, role: str, speaker: Speaker, counts: RolloutCounts, began: float
    ) -> None:
        self._id, self._key, self._agent, self._role, self._speaker = id, key, agent, role, speaker
        self._counts, self._began = counts, began
        self._conversation = TokenConversation()
        self._turns: list[Turn] = []
        self._reward = 0.0

    async def answer(self, step: int, observation: Observation, constrain: bool) -> str:
        """Raises what `infer` raises: `BadPrompt` for a conversation that has become too long, say."""
        asked = time.monotonic()
        anew = observation.anew or not self._turns
        added = await self._speaker.chat.added(self._conversation, observation)
        sampling = self._speaker.sampling
        if constrain and observation.constraint is not None:
            sampling = msgspec.structs.replace(sampling, constraint=observation.constraint)
        if self._counts.raw and sampling.logprobs is None:
            sampling = msgspec.structs.replace(sampling, logprobs=0)
        if observation.max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=observation.max_tokens)
        prompt = Prompt(
            tokens=self._conversation.tokens + added,
            sampling=sampling,
            key=f"{self._key}/{len(self._turns)}",
            adapter=self._speaker.adapter,
        )
        carried = len(self._conversation.tokens)
        generation = await self._request(prompt, carried)
        (drawn,) = generation.completions
        if sampling.logprobs is None and drawn.processed is None:  # a backend that has only the model's own
            if not (self._counts.raw or is_plain_sampling(sampling)):
                log.warning(
                    "the backend does not tell log-probabilities under temperature, filters and constraints, and the "
                    "record has none of such answers. Choose another backend, or draw without them."
                )
            self._counts.raw = True
            again = msgspec.structs.replace(prompt, sampling=msgspec.structs.replace(sampling, logprobs=0))
            generation = await self._request(again, carried)  # which draws the same
            (drawn,) = generation.completions
        seconds = time.monotonic() - asked
        timing = Timing(
            asked=asked - self._began,
            queued=max(0.0, seconds - generation.seconds),
            first_token=generation.first_token_s,
            seconds=generation.seconds,
        )
        self._conversation.add_answer(added, drawn)
        raw = tuple(one.chosen.logprob for one in drawn.logprobs or ())
        if drawn.processed is not None and len(drawn.processed) == len(drawn.tokens):
            logprobs = drawn.processed
        else:  # none where the backend does not tell those of the distribution that was drawn from
            logprobs = raw if is_plain_sampling(sampling) else ()
        turn = Turn(
            step=step,
            messages=tuple(dict(message) for message in observation.messages),
            anew=anew,
            prompt_tokens=added,
            completion_tokens=drawn.tokens,
            text=drawn.text,
            finish_reason=drawn.finish_reason,
            logprobs=logprobs,
            policy_logprobs=raw if drawn.logprobs is not None else None,
            spans=tuple(Span(start, version) for start, version in drawn.versions),
            nodes=drawn.nodes,
            cached_tokens=generation.cached_tokens,
            temperature=sampling.temperature,
            timing=timing,
        )
        self._turns.append(turn)
        return drawn.text

    def reward(self, step: int, amount: float) -> None:
        """Add the reward of this step, with or without an answer."""
        self._reward += amount
        if self._turns and self._turns[-1].step == step:
            self._turns[-1] = msgspec.structs.replace(self._turns[-1], reward=amount)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            id=self._id,
            agent=self._agent,
            role=self._role,
            trainable=self._speaker.trainable,
            model=self._speaker.model,
            turns=tuple(self._turns),
            reward=self._reward,
        )

    async def _request(self, prompt: Prompt, carried: int) -> Generation:
        """A queue that is full is tried again: others may ask the same backend."""
        found = await retry_when_full(lambda: self._speaker.infer(prompt), TRIES)
        if type(found) is not Generation or len(found.completions) != 1:
            raise BadResult(f"the backend answered a prompt with {found!r:.80}. Use another backend.")
        self._counts.answer(found, carried)
        return found


def is_plain_sampling(sampling: Sampling) -> bool:
    """Whether the sampling draws from the model's own distribution."""
    return sampling == Sampling(**{name: getattr(sampling, name) for name in NO_CHANGE})
