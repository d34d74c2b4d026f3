"""What a model's answers in chats are made of: calls of tools in its format, kept to by a grammar; and thoughts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec

from gpuinfer.config.setup_file import ToolFormatName
from gpuinfer.errors import BadPrompt, UsageError
from gpuinfer.generation import Constraint, Prompt, Rendering
from gpuinfer.serving.model_language import ModelLanguage
from gpuinfer.serving.openai.answer_splitter import THINK, THOUGHT, AnswerForm
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.tool_formats import (
    TOOL_FORMATS,
    ToolFormat,
    detected_format,
    parameters_by_tool,
    tools_grammar,
    tools_in_words,
    written_calls,
)
from gpuinfer.serving.openai.tool_parameters import ToolParameters
from gpuinfer.serving.openai.tool_schemas import ToolChoice, check_tool_grammars, chosen_tools

log = logging.getLogger(__name__)

Reasoning = Literal["auto", "none"]
MOST_CHARACTERS = 64 << 10  # of all tools' schemas: what one grammar may have
PROBE = ({"role": "user", "content": "probe"},)


@dataclass
class AnswerForms:
    """Of one model. `tool_format` and `reasoning` are the server's flags."""

    language: ModelLanguage
    tool_format: ToolFormatName = "auto"
    reasoning: Reasoning = "auto"

    async def of(
        self, prompt: Prompt, choice: Any = None, parallel: Any = None, salt: str = ""
    ) -> tuple[Prompt, AnswerForm | None]:
        """The chat as it is to be asked, and how its answers are split; None: they are texts. Raises `BadRequest`."""
        if not self._concerned(prompt, choice):
            return prompt, None
        return await asyncio.to_thread(self.plan, prompt, choice, parallel, salt)

    def _concerned(self, prompt: Prompt, choice: Any) -> bool:
        """Whether anything but a text may come; a model that does not think is known after its first chat."""
        if prompt.messages is None:
            return False
        tools = bool(prompt.rendering.tools) or choice not in (None, "auto", "none")
        return tools or self.__dict__.get("_may_think", True)

    @cached_property
    def _may_think(self) -> bool:
        """Whether the chat template knows of thoughts."""
        if self.reasoning == "none":
            return False
        try:
            source = self.language.get().template_source
        except (UsageError, BadPrompt):  # only the backend can read the model: it says what there is to say
            return False
        return THINK in source or THOUGHT in source

    def plan(self, prompt: Prompt, choice: Any, parallel: Any, salt: str) -> tuple[Prompt, AnswerForm | None]:
        """As `of`. It may take seconds: not for an event loop."""
        tools = prompt.rendering.tools
        chosen = chosen_tools(tools, choice, parallel)
        form: ToolFormat | None = None
        parameters: Mapping[str, ToolParameters] = {}
        if tools and chosen is None:  # nothing may be called: the model does not hear of it
            prompt = _rendered(prompt, None)
        thinks = self._thinks(prompt) if self._may_think else None
        if chosen is not None:
            form = self._format()
            parameters = parameters_by_tool(form, chosen)
            prompt = self._constrained(self._told(prompt, form), form, chosen, thinks)
        if form is None and thinks is None:
            return prompt, None
        return prompt, AnswerForm(form, thinks, salt, parameters)

    def _thinks(self, prompt: Prompt) -> str | None:
        """Whether the answer begins in a thought ("inside"), may open one, or has none before it."""
        rendering = prompt.rendering
        if rendering.continue_final_message or prompt.sampling.constraint is not None:
            return None
        plain = Rendering(variables=rendering.variables, add_generation_prompt=rendering.add_generation_prompt)
        try:
            end = self.language.get().render_chat(PROBE, plain).rstrip()
        except BadPrompt:  # which its own messages may not be
            return "opens"
        if end.endswith(THINK):
            return "inside"
        return None if end.endswith(THOUGHT) else "opens"

    def _format(self) -> ToolFormat:
        """Raises `BadRequest` where no format is known."""
        if self.tool_format != "auto":
            return TOOL_FORMATS[self.tool_format]
        language = self._language()
        found = detected_format(language.template_source)
        if found is not None:
            return found
        if not language.reads_tools:
            raise BadRequest(
                "the model's chat template does not read `tools`, so the model would not hear of them. Take them out, "
                "use a model that was trained with tools, or say --tool-format hermes: then a system message describes "
                "them.",
                "tools",
            )
        names = ", ".join(TOOL_FORMATS)
        raise BadRequest(
            f"how this model writes calls of tools is not known here ({names} are). Name one of them with "
            "--tool-format, or take `tools` out.",
            "tools",
        )

    def _language(self) -> Any:
        try:
            return self.language.get()
        except UsageError as error:
            raise BadRequest(f"tools cannot be called here: {error}", "tools") from error

    def _told(self, prompt: Prompt, form: ToolFormat) -> Prompt:
        """A chat whose template knows of no tools hears of them in its messages."""
        if self._language().reads_tools or not prompt.rendering.tools or prompt.messages is None:
            return prompt
        messages = [_in_words(one, form) for one in prompt.messages]
        words = tools_in_words(form, prompt.rendering.tools)
        if messages[0].get("role") == "system":
            messages[0] = {**messages[0], "content": f"{_text_of(messages[0].get('content'))}\n\n{words}"}
        else:
            messages.insert(0, {"role": "system", "content": words})
        return _rendered(msgspec.structs.replace(prompt, messages=tuple(messages)), None)

    def _constrained(self, prompt: Prompt, form: ToolFormat, chosen: ToolChoice, thinks: str | None) -> Prompt:
        given, schema = prompt.sampling.constraint, None
        if given is not None:
            schema = given.json_schema
            if schema is None or not form.begin:
                why = "another form of the answer is asked for beside `tools`. Keep one of them"
                raise BadRequest(f'{why}, or say "tool_choice": "none".', "tools")
        found = {mark: self._language().special_token(mark) for mark in form.special}
        special = {mark: token for mark, token in found.items() if token is not None}
        try:
            grammar = tools_grammar(form, chosen, special=special, answer_schema=schema, thinks=thinks)
        except RecursionError:
            raise BadRequest("the schemas of `tools` are nested too deep. Make them flatter.", "tools") from None
        if len(grammar) > MOST_CHARACTERS:
            what = f"the schemas of `tools` come to {len(grammar):,} characters, and {MOST_CHARACTERS:,} are the most"
            raise BadRequest(f"{what}. Shorten them, or leave tools out.", "tools")
        check_tool_grammars(chosen.tools)
        sampling = msgspec.structs.replace(prompt.sampling, constraint=Constraint(grammar=grammar))
        if special:  # what begins calls is then no part of the text, unless special tokens are
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        return msgspec.structs.replace(prompt, sampling=sampling)

    async def replayed(self, prompt: Prompt, tokens: Sequence[int]) -> str:
        """The text of these first tokens of an answer as its parts have given it out. Raises `BadPrompt`."""
        language, sampling = await self.language.opened(), prompt.sampling
        growing = language.detokenizer(sampling.stop, not sampling.skip_special_tokens)
        characters = growing.begin(tokens)
        return growing.text[:characters]


def _rendered(prompt: Prompt, tools: tuple[Mapping[str, Any], ...] | None) -> Prompt:
    return msgspec.structs.replace(prompt, rendering=msgspec.structs.replace(prompt.rendering, tools=tools))


def _in_words(message: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    """A message for a template that knows neither calls nor what tools answer."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text_of(message.get('content'))}\n</tool_response>"}
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return dict(message)
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        try:
            given = function["arguments"] if isinstance(function, Mapping) else None
            found.append((str(function["name"]), json.loads(given) if isinstance(given, str) else given))  # type: ignore[index]
        except (LookupError, TypeError, ValueError, RecursionError):
            place = f"tool_calls[{number}]"
            raise BadRequest(f"`{place}` of a message is no call. Send those of the answer.", "messages") from None
    said = _text_of(message.get("content"))
    return {"role": "assistant", "content": (f"{said}\n" if said else "") + written_calls(form, found)}


def _text_of(content: Any) -> str:
    """Of a text, or of parts of text."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
