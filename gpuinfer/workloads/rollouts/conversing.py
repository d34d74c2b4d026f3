"""Token in, token out: what was said stays as the tokens that said it, and only what is new is written out.

A chat template writes whole chats. What it writes after an answer (the answer's end, the new messages, the beginning of
the next answer) is found by a mark that stands in the answer's place; the tokens of that, and of nothing else, are
added. For a template whose text of a chat is the beginning of its text of a longer one, and a tokenizer that begins
anew at its end token, the tokens are those of the whole chat, written out at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Completion, Prompt, Rendering
from gpuinfer.rollouts.environment import Observation

if TYPE_CHECKING:
    from gpuinfer.text.language import Language

MARK = "[[what-was-answered-here]]"
ASSISTANT = "assistant"
AS_IT_IS = Rendering()


class Conversation:
    """What one agent has been shown and has said. `tokens`: all of it as the model sees it."""

    __slots__ = ("end", "messages", "place", "tokens")

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.messages: list[Mapping[str, Any]] = []
        self.place: int | None = None  # of the last answer among the messages
        self.end: int | None = None  # the last token of it

    def show(self, observation: Observation) -> None:
        """What is new goes to the chat."""
        if observation.anew:
            self.tokens, self.messages, self.place, self.end = (), [], None, None
        self.messages += observation.messages

    def say(self, prompt: Sequence[int], answer: Completion) -> None:
        """This answer was drawn after these tokens were added."""
        self.tokens = (*self.tokens, *prompt, *answer.tokens)
        self.place = len(self.messages)
        self.messages.append({"role": ASSISTANT, "content": answer.text})
        self.end = answer.tokens[-1] if answer.tokens else None


class Conversing:
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

    async def added(self, conversation: Conversation, observation: Observation) -> tuple[int, ...]:
        """The tokens that the observation adds, up to where the answer begins. Raises `BadPrompt`."""
        conversation.show(observation)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._added, conversation)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _added(self, conversation: Conversation) -> tuple[int, ...]:
        if conversation.place is None:
            return self._tokens(self._written(conversation.messages))
        text, end = self._after_answer(conversation.messages, conversation.place), conversation.end
        if end not in self._ends or not (literal := self._language.decode([end], special_tokens=True)):
            return self._tokens(text)
        tokens = self._tokens(literal + text.removeprefix(literal))  # as a tokenizer writes what stands after it
        return tokens[1:] if tokens[:1] == (end,) else self._tokens(text.removeprefix(literal))

    def _after_answer(self, messages: list[Mapping[str, Any]], place: int) -> str:
        """What the template writes after the answer that is message `place`."""
        marked = [*messages[:place], {"role": ASSISTANT, "content": MARK}, *messages[place + 1 :]]
        _, mark, after = self._written(marked).rpartition(MARK)
        if not mark:
            raise BadPrompt(
                "the model's chat template leaves out an answer that is not the last message, so that a chat cannot be "
                "gone on with. Let the environment say `anew` with the whole chat, or add --plain."
            )
        return after

    def _written(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self._plain:
            return "".join(f"{one['role']}: {one.get('content') or ''}\n" for one in messages) + f"{ASSISTANT}: "
        return self._language.written(messages, self._rendering)

    def _tokens(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        (found,) = self._language.encode([Prompt(text=text, special_tokens=False)])
        if isinstance(found, BadPrompt):
            raise found
        return tuple(found.tolist())
