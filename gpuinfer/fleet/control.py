"""The fleet's control application, on a Unix socket behind the router: health, counters, metrics, members, and the live
page.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from gpuinfer import __version__
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.fleet.router.protocol import CONTROL_KEY_HEADER
from gpuinfer.http.access import Access
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.route_table import Route, RouteTable
from gpuinfer.http.server import HttpServer
from gpuinfer.serving.kserve_health import health_routes
from gpuinfer.serving.monitoring.live_page import FILES, LiveEvents, LiveState, send_file
from gpuinfer.serving.monitoring.metrics import CONTENT_TYPE, Floor, exposition
from gpuinfer.serving.openai.schema import CHANGES, FreeBody, LoadBody, UpdateBody
from gpuinfer.serving.profile_endpoint import PATH as PROFILE
from gpuinfer.serving.profile_endpoint import SUMMARY as PROFILE_SUMMARY
from gpuinfer.serving.profile_endpoint import profile_body

if TYPE_CHECKING:
    from gpuinfer.fleet.supervisor import Fleet


encode = msgspec.json.Encoder().encode
OF_REPLICAS = ("/v1/completions and the other routes of models (GET /openapi.json)",)


class NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /workers`. Without a URL a replica is started."""

    url: str | None = None
    key: str | None = None  # the bearer token that the server at this URL asks for


class ControlServer:
    """Listens from `start` to `close`."""

    def __init__(self, fleet: Fleet, access: Access, key: str, socket: str) -> None:
        self._fleet, self._key, self._socket = fleet, key, socket
        self._events = LiveEvents(self._see)
        self._floor: Floor = {}
        self.paths = RouteTable(self._routes(), access, elsewhere=OF_REPLICAS)
        self._server: HttpServer | None = None
        self._began = time.monotonic()

    async def start(self) -> None:
        self._server = HttpServer(self.paths, quick=self._quick)
        await self._server.listen_unix(self._socket)

    def end_streams(self) -> None:
        """End the streams of `/events`, which have no end."""
        self._events.close()

    async def close(self) -> None:
        self.end_streams()
        if self._server is not None:
            await self._server.close()

    def _quick(self, exchange: Exchange) -> bool:
        """Refuse requests that do not come from the router."""
        given = exchange.headers.get(CONTROL_KEY_HEADER.lower(), "")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            exchange.refuse(403, "only the fleet's router may ask here. Ask it.")
            return True
        return self.paths.quick(exchange)

    def _routes(self) -> list[Route]:
        workers = "/workers"
        return [
            Route("GET", "/health", self._health, "open", "Whether a worker takes requests"),
            *health_routes(lambda: True, lambda: self._fleet.status == "ready"),
            Route("GET", "/stats", self._stats, "api", "What the fleet has counted"),
            Route("GET", "/metrics", self._metrics, "api", "The same for Prometheus"),
            Route("GET", "/openapi.json", self._openapi, "api", "This document"),
            Route("GET", workers, self._list, "admin", "All workers"),
            Route("POST", workers, self._add, "admin", "Add a worker by its URL, or start a replica"),
            Route("DELETE", f"{workers}/{{id}}", self._remove, "admin", "Let a worker drain and leave"),
            *(
                Route("POST", path, functools.partial(self._change, body), "admin", summary)
                for path, (body, summary) in CHANGES.items()
            ),
            Route("POST", PROFILE, self._profile, "admin", PROFILE_SUMMARY),
            # the files hold nothing of the fleet's, and need no key; the events do
            *(Route("GET", path, send_file, "open", "The live page") for path in FILES),
            Route("GET", "/events", self._events, "api", "Views of the fleet, one a second (server-sent events)"),
        ]

    async def _see(self) -> LiveState:
        about = {"version": __version__, "up_s": time.monotonic() - self._began, **self._fleet.about()}
        return LiveState(await self._fleet.snapshot(), self._fleet.workers(), about)

    async def _health(self, exchange: Exchange) -> None:
        workers = self._fleet.workers()
        status = self._fleet.status
        ready = status == "ready"
        told = {
            "server": "gpuinfer",
            "status": status,
            "alive": True,
            "ready": ready,
            "total_workers": len(workers),
            "healthy_workers": sum(worker["healthy"] for worker in workers),
            "in_flight": sum(worker["in_flight"] for worker in workers),
            "waiting_rows": sum(worker["waiting_rows"] for worker in workers),
            "queued": self._fleet.queue()["waiting"],
        }
        exchange.respond(200 if ready else 503, encode(told), headers=() if ready else [("Retry-After", "1")])

    async def _stats(self, exchange: Exchange) -> None:
        """With `?form=wire` the counters of all replicas as msgpack, as a replica tells its own."""
        if exchange.query.get("form") == "wire":
            counted = (await self._fleet.snapshot(0.0)).to_wire()  # the end of a run counts to the last batch
            exchange.respond(200, msgspec.msgpack.encode(counted), "application/msgpack")
            return
        exchange.respond(200, encode(await self._fleet.stats()))

    async def _metrics(self, exchange: Exchange) -> None:
        families = await self._fleet.families(self._floor)
        exchange.respond(200, await asyncio.to_thread(exposition, families), CONTENT_TYPE)

    async def _openapi(self, exchange: Exchange) -> None:
        body = await self._fleet.ask_replica("/openapi.json")
        if body is None:
            exchange.refuse(503, "no replica is up yet. Ask again in a moment.", [("Retry-After", "1")])
            return
        document = msgspec.json.decode(body)
        document["paths"] = {**document.get("paths", {}), **_described(self.paths.routes)}
        exchange.respond(200, encode(document))

    async def _list(self, exchange: Exchange) -> None:
        exchange.respond(200, encode({"workers": self._fleet.workers()}))

    async def _add(self, exchange: Exchange) -> None:
        try:
            adding = msgspec.json.decode(exchange.body or b"{}", type=NewWorker)
            worker = await self._fleet.add(adding.url, adding.key)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            exchange.refuse(400, f'{error}. Send {{"url": "http://HOST:PORT"}}, or {{}} to start a replica.')
        except UsageError as error:
            exchange.refuse(400, str(error))
        except WorkError as error:
            exchange.refuse(409, str(error))
        else:
            exchange.respond(201, encode(worker.told()))

    async def _change(self, form: type[msgspec.Struct], exchange: Exchange) -> None:
        """Other weights or adapters for all replicas, or memory that all are to give back."""
        try:
            body: Any = msgspec.json.decode(exchange.body or b"{}", type=form)
            if isinstance(body, FreeBody):
                exchange.respond(200, encode(await self._fleet.free_memory(msgspec.to_builtins(body))))
                return
            if isinstance(body, LoadBody):
                version = body.version or self._fleet.changes.next_version()
                body = UpdateBody(version=version, weights=body.lora_path, adapter=body.lora_name, model=body.model)
            if isinstance(body, UpdateBody):
                await self._fleet.update(msgspec.to_builtins(body))
            else:
                await self._fleet.unload(body.lora_name, body.model)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            exchange.refuse(400, f"{error}. Correct it.")
        except UsageError as error:
            exchange.refuse(400, str(error))
        except WorkError as error:
            exchange.refuse(503, str(error), [("Retry-After", "1")])
        else:
            exchange.respond(200, encode({"adapters": list(self._fleet.changes.adapters)}))

    async def _profile(self, exchange: Exchange) -> None:
        """Of one replica, whose answer it is."""
        try:
            options = profile_body(exchange.body)
            response = await self._fleet.profile(options.seconds, options.worker)
        except UsageError as error:
            exchange.refuse(400, str(error))
        except WorkError as error:
            exchange.refuse(503, str(error), [("Retry-After", "1")])
        else:
            passed = ("content-disposition", "retry-after")
            headers = [(name, response.headers[name]) for name in passed if name in response.headers]
            exchange.respond(response.status, response.body, headers=headers)

    async def _remove(self, exchange: Exchange) -> None:
        text = exchange.parameters["id"]
        worker = await self._fleet.remove(int(text)) if text.isascii() and text.isdecimal() and len(text) < 10 else None
        if worker is None:
            exchange.refuse(404, f"there is no worker '{text[:20]}'. GET /workers lists them.")
        else:
            exchange.respond(202, encode(worker.told()))


def _described(routes: tuple[Route, ...]) -> Mapping[str, Any]:
    """The fleet's own routes as OpenAPI has them."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        responses = {"default": {"description": "An error in OpenAI's shape, or the answer."}}
        told: dict[str, Any] = {"summary": route.summary, "responses": responses, **route.openapi}
        told.pop("error", None)
        if "{id}" in route.path:
            told["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}]
        paths.setdefault(route.path, {})[route.method.lower()] = told
    return paths
