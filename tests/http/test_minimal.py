from gpuinfer.http.access import Access
from gpuinfer.http.client import Client
from gpuinfer.http.exchange import Exchange
from gpuinfer.http.loop import run
from gpuinfer.http.paths import Paths, Route
from gpuinfer.http.server import HttpServer


async def echo(exchange: Exchange) -> None:
    exchange.respond(200, exchange.body or b"nothing", "text/plain")


async def slowly(exchange: Exchange) -> None:
    exchange.begin(200, "text/event-stream")
    for number in range(3):
        await exchange.write(b"data: %d\n\n" % number)
    exchange.end()


def health(exchange: Exchange) -> None:
    exchange.respond(200, b"{}")


async def never(exchange: Exchange) -> None:
    raise AssertionError


ROUTES = [
    Route("GET", "/health", never, "open", "Health", immediate=health),
    Route("POST", "/echo", echo, "api", "Echo"),
    Route("GET", "/stream", slowly, "api", "Stream"),
    Route("GET", "/workers/{id}", echo, "admin", "Worker"),
]


def test_a_request_is_answered():
    async def main() -> None:
        paths = Paths(ROUTES, Access())
        server = HttpServer(paths, quick=paths.quick)
        port = await server.listen("127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{port}")
        for _ in range(2):
            assert (await client.request("GET", "/health")).body == b"{}"
            assert (await client.request("POST", "/echo", b"x" * 300_000)).body == b"x" * 300_000
            assert (await client.request("GET", "/workers/3")).status == 403
            assert (await client.request("GET", "/nowhere")).status == 404
            assert (await client.request("PUT", "/echo")).headers["allow"] == "POST"
            async with client.stream("GET", "/stream") as response:
                assert await response.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert server.counts["accepted"] < 4
        await client.close()
        assert await server.drain(5)
        await server.close()

    run(main())
