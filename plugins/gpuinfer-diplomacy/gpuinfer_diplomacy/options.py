"""What can be set, with `--env-option name=value`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from gpuinfer import api

POWERS = ("AUSTRIA", "ENGLAND", "FRANCE", "GERMANY", "ITALY", "RUSSIA", "TURKEY")


def _listed(value: Any) -> Any:
    return [name.strip().upper() for name in value.split(",")] if isinstance(value, str) else value


class Options(api.Options):
    horizon: int = Field(3, ge=1, le=100, description="game years; the last phase is the winter of the last of them")
    opening: int = Field(0, ge=0, le=100, description="phases of random legal orders before the agents play")
    policy: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        POWERS, min_length=1, description="the powers whose role is policy, with commas; the others are opponents"
    )
    memory: Literal["phase", "game"] = Field(
        "phase", description="whether a power is shown each phase anew, or remembers what was said before"
    )
    detail: Literal["brief", "moves", "orders"] = Field(
        "moves", description="of a power's own units: where they are, where they can move, or all legal orders"
    )
    results: bool = Field(True, description="show what was ordered in the phase before, and what came of it")
    begin: str = Field(
        "<orders>",
        max_length=64,
        description="what an answer says before its orders, after free text; empty: no free text",
    )
    score: Literal["share", "squares"] = Field(
        "share", description="a power's share of the centres that are owned, or of the sum of their squares"
    )
    rewards: Literal["end", "year"] = Field("end", description="the score at the end, or what each year changes in it")

    @field_validator("policy")
    @classmethod
    def _powers(cls, named: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(named) - set(POWERS)):
            raise ValueError(f"no power {unknown[0]!r}. There are {', '.join(POWERS)}")
        return named
