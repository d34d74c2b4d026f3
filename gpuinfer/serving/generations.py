"""POST /v1/generations: a prompt and its answer in our own form, for other processes of ours (`text.frames`)."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from gpuinfer.errors import BackendError, GpuinferError
from gpuinfer.generation import Generation
from gpuinfer.http.exchange import ClientGone, Exchange
from gpuinfer.serving.answers import SAID, plain_headers
from gpuinfer.serving.asking import Asking
from gpuinfer.serving.bounds import check_request
from gpuinfer.serving.growing import growing
from gpuinfer.serving.service import Service, tokens_of, ways
from gpuinfer.text.frames import FRAMES_TYPE, prompt_from_body, to_frame


class Generations:
    """The route of one service. With the query `parts=0` the answer comes as one frame."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, exchange: Exchange, asking: Asking) -> None:
        adapter = self._service.adapter_of(exchange.query.get("model"))
        prompt = await self._service.decoded(prompt_from_body, exchange.body)
        if adapter is not None and not prompt.adapter:
            prompt = msgspec.structs.replace(prompt, adapter=adapter)
        check_request(prompt, self._service.widest)
        if exchange.query.get("parts") == "0":
            found = await self._service.session(prompt, rows=prompt.samples, **ways(asking))
            self._service.spent(exchange, *tokens_of(found))
            exchange.respond(200, to_frame(found), FRAMES_TYPE, plain_headers(asking.id))
            return
        try:
            async with contextlib.aclosing(growing(self._service.session, [prompt], ways(asking))) as answers:
                async for news in answers:
                    if not exchange.begun:
                        exchange.begin(200, FRAMES_TYPE, plain_headers(asking.id))
                    if isinstance(news, Generation):
                        self._service.spent(exchange, *tokens_of(news))
                    await exchange.write(to_frame(news))
            exchange.end()
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:
            if not exchange.begun:
                raise
            self._service.refused(error, asking.id)  # which logs what is internal
            await exchange.write(to_frame(_for_clients(error, asking.id)))
            exchange.end()


def _for_clients(error: Exception, request_id: str) -> GpuinferError:
    if isinstance(error, SAID):
        return error
    return BackendError(f"the model failed at this request. The server's log says why, under its id {request_id}.")
