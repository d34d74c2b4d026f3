"""Answers to chats: what was said, what was thought, and calls of tools, told apart as the server tells them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from gpuinfer.library.text_answers import TextAnswer
from gpuinfer.serving.openai.answer_splitter import AnswerForm
from gpuinfer.serving.openai.responses import message_of


class ToolCall(Struct, frozen=True, kw_only=True):
    """One call of a tool. `arguments`: their JSON, which is whole unless `max_new_tokens` has cut the answer short."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments. Raises `ValueError` for a call that was cut short."""
        found: dict[str, Any] = json.loads(self.arguments)
        return found


class ChatAnswer(TextAnswer, frozen=True, kw_only=True):
    """The answer to a conversation. `text` is what was said, without thoughts and calls; all that the model wrote is in
    `samples`.
    """

    messages: tuple[Mapping[str, Any], ...]  # of each sample, as OpenAI has it: to go on with in the conversation
    whole_calls: int = 0  # of the first sample

    @property
    def message(self) -> Mapping[str, Any]:
        """The first sample's: role, content, perhaps `tool_calls` and `reasoning_content`."""
        return self.messages[0]

    @property
    def text(self) -> str:
        return self.message["content"] or ""

    @property
    def texts(self) -> list[str]:
        return [one["content"] or "" for one in self.messages]

    @property
    def reasoning(self) -> str:
        """What the first sample thought before it answered; "" where the model does not think."""
        return self.message.get("reasoning_content") or ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Of the first sample."""
        calls = self.message.get("tool_calls", ())
        return [ToolCall(id=one["id"], **one["function"]) for one in calls]

    @property
    def finish_reason(self) -> str:
        """`tool_calls` where the model waits for what its calls give; else `stop` or `length`."""
        reason = self.samples[0].finish_reason
        return "tool_calls" if reason == "stop" and self.whole_calls else reason


def chat_answer(answer: TextAnswer, form: AnswerForm | None) -> ChatAnswer:
    """`form`: how its samples are split; None: they are texts."""
    found: list[tuple[Mapping[str, Any], int]] = [
        ({"role": "assistant", "content": one.text}, 0) if form is None else message_of(form, number, one.text)
        for number, one in enumerate(answer.samples)
    ]
    return ChatAnswer(
        index=answer.index,
        id=answer.id,
        prompt=answer.prompt,
        generation=answer.generation,
        metadata=answer.metadata,
        line=answer.line,
        messages=tuple(message for message, _ in found),
        whole_calls=found[0][1],
    )
