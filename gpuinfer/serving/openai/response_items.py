"""OpenAI's Responses API as far as it maps to chats: the body of a request as one for chat completions, and answers as
items of output, whole and as events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.generation import Completion, Generation
from gpuinfer.serving.openai.answer_splitter import AnswerDelta, AnswerForm, AnswerSplitter
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.schema import Some

KEEPS_NONE = "the server keeps no answers. Send the conversation so far as `input`"
NOT_HERE = {
    "previous_response_id": KEEPS_NONE,
    "conversation": KEEPS_NONE,
    "background": "answers are waited for. Ask with `stream`, or wait",
    "prompt": "there are no stored prompts. Write it as `input`",
    "include": "nothing else is told of an answer. Take it out",
    "max_tool_calls": "tools are called by the client, who may stop. Take it out",
    "top_logprobs": "log-probabilities are told by /v1/chat/completions. Ask there",
}
"""What the API has and this server has not → why, with the cure. Null, false and empty values ask for nothing."""


class ResponsesBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Some | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: str | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    include: Any = None
    max_tool_calls: Any = None
    top_logprobs: Any = None
    user: Any = None
    store: Any = None
    stream_options: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


def chat_body(asked: ResponsesBody) -> bytes:
    """The same as a request to /v1/chat/completions. Raises `BadRequest` for what does not map."""
    for name, why in NOT_HERE.items():
        if getattr(asked, name):
            raise BadRequest(f"`{name}` is not to be had here: {why}.", name)
    if asked.truncation not in (None, "disabled"):
        raise BadRequest(
            "`truncation` is not disabled, and nothing of a conversation is dropped. Take it out.", "truncation"
        )
    body: dict[str, Any] = {"messages": _messages(asked)}
    named = {"max_tokens": asked.max_output_tokens, "tool_choice": asked.tool_choice}
    same = ("temperature", "top_p", "seed", "top_k", "parallel_tool_calls", "chat_template_kwargs", "stream")
    named |= {name: getattr(asked, name) for name in same}
    body |= {name: value for name, value in named.items() if value is not None}
    if asked.tools:
        body["tools"] = [_tool(one, f"tools[{number}]") for number, one in enumerate(asked.tools)]
    if (effort := (asked.reasoning or {}).get("effort")) is not None:
        body["reasoning_effort"] = effort
    if (form := (asked.text or {}).get("format")) is not None:
        body["response_format"] = _format(form)
    return msgspec.json.encode(body)


def _tool(given: Mapping[str, Any], place: str) -> dict[str, Any]:
    if given.get("type") != "function":
        why = "is not function, and no other tools are called here. Leave it out"
        raise BadRequest(f"`{place}.type` {why}.", f"{place}.type")
    return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}


def _format(given: Any) -> dict[str, Any]:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema" or not isinstance(given.get("schema"), Mapping):
        raise BadRequest("`text.format` is none of text, json_object, and json_schema with a `schema`.", "text.format")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _messages(asked: ResponsesBody) -> list[dict[str, Any]]:
    """Raises `BadRequest`, with the path of an item that is no part of a chat of texts."""
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    items = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    for number, item in enumerate(items):
        place, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise BadRequest(f"`{place}.role` is none of user, assistant, system, developer.", f"{place}.role")
            content = _text(item.get("content"), f"{place}.content")
            messages.append({"role": "system" if role == "developer" else role, "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            answered = _text(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": answered})
        elif kind != "reasoning":  # earlier thoughts are left out, as templates do
            raise BadRequest(
                f"`{place}.type` is '{str(kind)[:60]}', which does not map to a chat. Choose from message, "
                "function_call, function_call_output.",
                f"{place}.type",
            )
    return messages


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
            at = f"{place}[{number}]"
            raise BadRequest(f"`{at}` is of type '{str(kind)[:60]}', and texts alone are read. Leave it out.", at)
        texts.append(part["text"])
    return "\n".join(texts)


Event = dict[str, Any]


class ResponseItems:
    """One response as it grows: its items of output, and the events that tell of them."""

    def __init__(self, id: str, model: str, created: int, form: AnswerForm | None, asked: ResponsesBody) -> None:
        self._id, self._form = id, form
        self._splitter = AnswerSplitter(None, None) if form is None else form.splitter()
        self._output: list[dict[str, Any]] = []
        self._open: tuple[str, int] | None = None  # what the last item is: reasoning, message or a call's number
        self.number = self._characters = 0  # of the next event; of the text that has come
        self._body: dict[str, Any] = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": model,
            "output": self._output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (asked.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": asked.metadata or {},
        }

    def begin(self) -> list[Event]:
        return [
            self._event(f"response.{name}", response=dict(self._body, output=[])) for name in ("created", "in_progress")
        ]

    def feed(self, text: str) -> list[Event]:
        self._characters += len(text)
        return self._of(self._splitter.feed(text))

    def finish(self, found: Completion, answers: Generation) -> list[Event]:
        """What is left of the answer, and the end."""
        events = [*self.feed(found.text[self._characters :]), *self._of(self._splitter.finish())]
        if not self._output:  # nothing was said
            events += self._enter("message", 0)
        whole = found.finish_reason == "stop"
        events += self._leave("completed" if whole else "incomplete")
        thought = [one for one in self._output if one["type"] == "reasoning"]
        tokens = len(found.tokens)
        self._body |= {
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": answers.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answers.cached_tokens},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": tokens if thought and len(self._output) == 1 else 0},
                "total_tokens": answers.prompt_tokens + tokens,
            },
        }
        return [*events, self._event(f"response.{self._body['status']}", response=self._body)]

    @property
    def body(self) -> dict[str, Any]:
        return self._body

    def failed(self, code: str | None, message: str) -> Event:
        return self._event("error", code=code, message=message, param=None)

    def _event(self, kind: str, **fields: Any) -> Event:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **fields}

    def _of(self, delta: AnswerDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._enter("reasoning", 0)
            events.append(self._grown("content", "text", "response.reasoning_text.delta", delta.reasoning))
        if delta.content:
            events += self._enter("message", 0)
            events.append(self._grown("content", "text", "response.output_text.delta", delta.content))
        for part in delta.calls:
            events += self._enter("function_call", part.index, part.name)
            if part.arguments:
                events.append(self._grown("", "arguments", "response.function_call_arguments.delta", part.arguments))
        return events

    def _grown(self, inside: str, name: str, kind: str, text: str) -> Event:
        item = self._output[-1]
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if inside:
            item[inside][0][name] += text
            more = {"content_index": 0, **({"logprobs": []} if "output_text" in kind else {})}
        else:
            item[name] += text
            more = {}
        return self._event(kind, **place, **more, delta=text)

    def _enter(self, kind: str, number: int, name: str | None = None) -> list[Event]:
        """Begin an item of this kind, unless the last one is it."""
        if self._open == (kind, number):
            return []
        events = self._leave("completed")
        index = len(self._output)
        item: dict[str, Any] = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            call = self._form.call_id(0, number) if self._form is not None else ""
            item |= {"id": f"fc_{self._id}_{index}", "call_id": call, "name": name or "", "arguments": ""}
        elif kind == "message":
            item |= {"id": f"msg_{self._id}_{index}", "role": "assistant", "content": []}
        else:
            item |= {"id": f"rs_{self._id}_{index}", "summary": [], "content": []}
        self._output.append(item)
        self._open = kind, number
        events.append(self._event("response.output_item.added", output_index=index, item=_copy(item)))
        if kind != "function_call":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part if kind == "message" else {"type": "reasoning_text", "text": ""})
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events.append(self._event("response.content_part.added", **place, part=_copy(item["content"][0])))
        return events

    def _leave(self, status: str) -> list[Event]:
        """End the last item."""
        if self._open is None:
            return []
        kind, index, item = self._open[0], len(self._output) - 1, self._output[-1]
        self._open, item["status"] = None, status
        place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        events: list[Event] = []
        if kind == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **place, **told))
        else:
            part, name = item["content"][0], "output_text" if kind == "message" else "reasoning_text"
            place["content_index"] = 0
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(self._event(f"response.{name}.done", **place, **more, text=part["text"]))
            events.append(self._event("response.content_part.done", **place, part=_copy(part)))
        return [*events, self._event("response.output_item.done", output_index=index, item=_copy(item))]


def _copy(value: Any) -> Any:
    """As it is now: it may grow before it is sent."""
    return msgspec.json.decode(msgspec.json.encode(value))
