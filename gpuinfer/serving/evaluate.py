"""POST /v1/evaluate: rows in, the model's answers out, for models of rows."""

from __future__ import annotations

import asyncio
from functools import cached_property

from gpuinfer.http.exchange import Exchange
from gpuinfer.models.bodies import MEDIA_TYPE
from gpuinfer.serving.answers import plain_headers
from gpuinfer.serving.asking import Asking
from gpuinfer.serving.rows import AnswerWriter, RowReader, body_of
from gpuinfer.serving.service import LARGE, Service

MANY = 1024  # rows of an answer that is not written out as JSON on the event loop


class Evaluate:
    """The route of one service, once its limits are known."""

    def __init__(self, service: Service) -> None:
        self._service, self._session = service, service.session
        self._writer, self.body = AnswerWriter(service.spec), body_of(service.spec)

    @cached_property
    def _reader(self) -> RowReader:
        """Once the backend has started and its limits are known."""
        return RowReader(self._service.spec, self.body, self._service.widest)

    async def __call__(self, exchange: Exchange, asking: Asking) -> None:
        """In JSON or safetensors; the answer in the form of the question, unless `Accept` names the other."""
        kind, wanted = exchange.headers.get("content-type", ""), exchange.headers.get("accept", "")
        binary, alone, body, name = kind.startswith(MEDIA_TYPE), False, exchange.body, None
        if binary:
            block = self._reader.from_tensors(body)
        elif len(body) <= LARGE:
            block, alone, name = self._reader.from_json(body)
        else:
            block, alone, name = await self._service.decoded(self._reader.from_json, body)
        self._service.adapter_of(name or exchange.query.get("model"))  # of rows there are none
        result = await self._session(
            block, rows=len(block), priority=asking.priority, timeout=asking.timeout_s, client=asking.client
        )
        if wanted.startswith(MEDIA_TYPE) or (binary and not wanted.startswith("application/json")):
            exchange.respond(200, self._writer.to_tensors(result), MEDIA_TYPE, plain_headers(asking.id))
            return
        if len(block) <= MANY:
            said = self._writer.to_json(result, alone)
        else:
            said = await asyncio.to_thread(self._writer.to_json, result, alone)
        exchange.respond(200, said, headers=plain_headers(asking.id))
