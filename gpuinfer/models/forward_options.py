"""How a model is run, as a user says it: options that several backends have. No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MaxRows = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(description="rows in one batch; default 4096 on a CPU, more on CUDA"),
]
ChunkRows = Annotated[Annotated[int, Field(ge=1)] | None, Field(description="rows that go through the model at once")]
Compile = Annotated[bool, Field(description="compile the model with torch.compile")]
Graphs = Annotated[bool, Field(description="on CUDA, launch each batch as one captured graph")]
