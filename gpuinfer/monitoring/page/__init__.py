"""The files of the live page, as a browser is given them, and the headers that keep it to itself; the dashboard."""

from __future__ import annotations

from functools import cache
from importlib import resources

from gpuinfer.http.exchange import Exchange

FILES = {
    "/": ("page/page.html", "text/html; charset=utf-8"),
    "/page.js": ("page/page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page/page.css", "text/css; charset=utf-8"),
    "/dashboard.json": ("dashboard.json", "application/json"),
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


@cache
def asset(path: str) -> tuple[bytes, str, tuple[tuple[str, str], ...]] | None:
    """The bytes, content type and headers of one of these files by its path on the server; None for another path.

    They hold nothing that is secret: serve them without a key, since the page itself asks for one.
    """
    if path not in FILES:
        return None
    name, kind = FILES[path]
    return resources.files("gpuinfer.monitoring").joinpath(name).read_bytes(), kind, HEADERS


async def send_file(exchange: Exchange) -> None:
    """The handler of each of these paths."""
    found = asset(exchange.path)
    if found is None:
        exchange.refuse(404, f"there is nothing at {exchange.path}.")
        return
    body, content_type, headers = found
    exchange.respond(200, body, content_type, headers)
