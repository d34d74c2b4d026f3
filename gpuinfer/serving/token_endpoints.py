"""The endpoints /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gpuinfer.generation import Candidate, Logprob, Prompt, Rendering
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.serving.model_language import ModelLanguage
from gpuinfer.serving.openai.requests import BadRequest, text_or_tokens, unreadable
from gpuinfer.serving.openai.responses import named_token
from gpuinfer.serving.openai.schema import TokenId
from gpuinfer.serving.request import RequestContext, check_request, encode, plain_headers
from gpuinfer.serving.service import ModelService, Work

MOST_TOKENS_READ = 1 << 22  # of one request


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /tokenize`: a prompt or a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[TokenId], Meta(max_length=MOST_TOKENS_READ)]
    model: str | None = None


def tokenizations(service: ModelService) -> Work:
    """The work of /tokenize."""
    decoder = msgspec.json.Decoder(TokenizeBody)

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        try:
            asked = await service.decoded(decoder.decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, TokenizeBody, exchange.body, "request") from error
        service.adapter_of(asked.model or exchange.query.get("model"))
        prompt = _prompt_to_count(asked)
        check_request(prompt, service.widest)
        await service.language.opened()
        told = await asyncio.to_thread(_told, service.language, prompt, bool(asked.return_token_strs))
        told["max_model_len"] = service.model.get("context")
        exchange.respond(200, encode(told), headers=plain_headers(asking.id))

    return work


def _prompt_to_count(asked: TokenizeBody) -> Prompt:
    """Raises `BadRequest`."""
    if asked.messages is None and asked.prompt is None:
        raise BadRequest("neither `prompt` nor `messages` is there. Give one.", "prompt")
    text_or_tokens(asked.prompt, None, asked.messages)
    if asked.messages is None:
        return Prompt(text=asked.prompt, special_tokens=asked.add_special_tokens is not False)
    goes_on = bool(asked.continue_final_message)
    begins = asked.add_generation_prompt
    rendering = Rendering(
        tools=tuple(asked.tools) if asked.tools else None,
        variables=asked.chat_template_kwargs or {},
        add_generation_prompt=not goes_on if begins is None else begins,
        continue_final_message=goes_on,
    )
    return Prompt(messages=tuple(asked.messages), rendering=rendering)


def _told(language: ModelLanguage, prompt: Prompt, with_texts: bool) -> dict[str, Any]:
    (tokens,) = language.tokens_of(prompt)
    texts = None
    if with_texts:
        spell = language.get().spell_out
        texts = [named_token(spell(Logprob(Candidate(token, 0.0, 0)), special_tokens=True).chosen) for token in tokens]
    return {"count": len(tokens), "tokens": tokens, "token_strs": texts}


def detokenizations(service: ModelService) -> Work:
    """The work of /detokenize. Special tokens are part of the text, as vLLM has it."""
    decoder = msgspec.json.Decoder(DetokenizeBody)

    async def work(exchange: Exchange, asking: RequestContext) -> None:
        try:
            asked = await service.decoded(decoder.decode, exchange.body)
        except (ValueError, RecursionError) as error:
            raise unreadable(error, DetokenizeBody, exchange.body, "request") from error
        service.adapter_of(asked.model or exchange.query.get("model"))
        language = await service.language.opened()
        if (highest := max(asked.tokens, default=0)) >= language.vocabulary:
            why = f"token {highest} is not in the model's vocabulary. Use tokens from 0 to {language.vocabulary - 1}."
            raise BadRequest(why, "tokens")
        text = await asyncio.to_thread(language.decode, asked.tokens, True)
        exchange.respond(200, encode({"prompt": text}), headers=plain_headers(asking.id))

    return work
