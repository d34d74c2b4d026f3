"""What is raised about a request that cannot be taken as it is."""

from __future__ import annotations


class Malformed(Exception):
    """The request is answered with `status` and `message`; where its bytes are at fault, the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
