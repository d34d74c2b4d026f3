"""How many rows of text there are at once, in how many pages, and how long: options that several backends have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Slots = Annotated[
    Annotated[int, Field(ge=1, le=65_536)] | None,
    Field(description="of text: rows generated at once; default 64 on a CPU"),
]
Pages = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="of text: pages of 32 tokens for keys and values; default what all rows need, or memory allows"),
]
Context = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="of text: most tokens of prompt and answer; default 4096"),
]
StepTokens = Annotated[
    Annotated[int, Field(ge=1)] | None, Field(description="of text: most tokens that go through at once")
]
