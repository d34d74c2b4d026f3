"""The live page: three files that a browser is given as they are, and the headers that keep it to itself."""

from __future__ import annotations

from functools import cache
from importlib import resources

FILES = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
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
    """The bytes, content type and headers of one of the page's files by its path on the server; None for another path.

    They hold nothing that is secret: serve them without a key, since the page itself asks for it.
    """
    if path not in FILES:
        return None
    name, kind = FILES[path]
    return resources.files(__package__).joinpath(name).read_bytes(), f"{kind}; charset=utf-8", HEADERS
