"""What makes a request like others, for a policy that sends like requests to one replica. JSON is not parsed for it."""

from __future__ import annotations

import hashlib
import re

from gpuinfer.fleet.router.request_head import RequestHead

PREFIX = 1024  # bytes of the prompt
EDGE = 4096  # bytes of a body, from its start and from its end, in which its user is looked for

# Within a string of JSON a quotation mark follows a backslash, so that `"user":` is a key wherever it stands.
_USER = re.compile(rb'"user"\s*:\s*"([^"\\]{1,256})"')
_PROMPT = re.compile(rb'"(?:messages|prompt|input)"\s*:\s*')


def affinity(head: RequestHead, body: bytes) -> bytes | None:
    """The session that the header names; else the user that the body names; else a hash of how its prompt begins."""
    if head.session:
        return head.session
    user = _USER.search(body, 0, EDGE) or (_USER.search(body, len(body) - EDGE) if len(body) > EDGE else None)
    if user is not None:
        return user[1]
    prompt = _PROMPT.search(body, 0, EDGE) or _PROMPT.search(body)
    if prompt is None:
        return None
    return hashlib.blake2b(body[prompt.end() : prompt.end() + PREFIX], digest_size=8).digest()
