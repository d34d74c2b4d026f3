"""Nodes that are started by others, by hand, by a script or by Kubernetes, and dial the coordinator."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gpuinfer.errors import UsageError
from gpuinfer.launchers import base
from gpuinfer.launchers.base import Launcher, ProcessPlan


class ExternalLauncher(Launcher):
    """Starts nothing: nodes are started by others, with `gpuinfer node`, and may come and go at any time."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        bind: str = Field(
            "127.0.0.1", description="the address at which nodes are awaited; 0.0.0.0: all of this machine"
        )
        key_file: Path | None = Field(None, description="a file with the key that nodes show [a new key]")

        @field_validator("bind")
        @classmethod
        def _is_address(cls, value: str) -> str:
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError("no IP address. Write one of this machine, or 0.0.0.0 for all of them") from None
            return value

    name = "external"
    starts = False
    options: Options

    def __init__(self, options: BaseModel | None = None) -> None:
        super().__init__(options)
        self.bind, self.key_file = self.options.bind, self.options.key_file

    def reached_at(self) -> str:
        return base.own_address() if ipaddress.ip_address(self.bind).is_unspecified else self.bind

    async def launch(self, plan: ProcessPlan) -> NoReturn:
        raise UsageError(
            f"--launcher {self.name} starts nothing, and {plan.name} has to be started here. Choose another launcher: "
            "`gpuinfer plugins list` names them."
        )
