"""How many rows of text there are at once, and how long, as a user says it: options that several backends have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Slots = Annotated[
    Annotated[int, Field(ge=1, le=65_536)] | None,
    Field(description="of text: rows generated at once; default 64 on a CPU"),
]
Context = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="of text: most tokens of prompt and answer; default 4096"),
]
StepTokens = Annotated[
    Annotated[int, Field(ge=1)] | None, Field(description="of text: most tokens that go through at once")
]
