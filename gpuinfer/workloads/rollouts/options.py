"""The options of `rollouts`, which are its flags, and the roles that they speak of: the policy, an adapter, or another
model beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic.config import JsonDict

from gpuinfer import api
from gpuinfer.errors import UsageError
from gpuinfer.generation import MOST_TEMPERATURE
from gpuinfer.rollouts.agent import POLICY
from gpuinfer.rollouts.steps import StepRecord
from gpuinfer.rollouts.trainer_server import TrainerServerPlan
from gpuinfer.rollouts.training import TrainingPlan
from gpuinfer.serving.openai.model_options import (
    REPEATABLE,
    ModelOptions,
    SamplingOptions,
    adapter_digests,
    adapter_folders,
    pairs_of,
)

MOST_GROUPS = 10**9
MOST_SAMPLES = 4096  # of a group
WITH_REFERENCE: JsonDict = {"only_with": {"reference": ["inline", "deferred"]}}


class GameOptions(api.Options):
    """What is played."""

    env: str | None = Field(
        None, description="the environment: its name, or module:factory", json_schema_extra={"kind": "environments"}
    )
    env_option: list[str] = Field(
        [], max_length=256, description="an option of it, as key=value; repeatable", json_schema_extra=REPEATABLE
    )
    groups: int = Field(8, ge=1, le=MOST_GROUPS, description="groups to play, each from a start of its own")
    samples_per_group: int = Field(8, ge=1, le=MOST_SAMPLES, description="games from the same start")
    groups_in_flight: int | None = Field(
        None, ge=1, le=1 << 20, description="groups at once [as many as keep the model busy]"
    )
    horizon: int | None = Field(
        None, ge=1, le=1 << 30, description="where a game ends early: in the environment's own units, or in steps"
    )
    max_turns: int = Field(
        1000, ge=1, le=1 << 20, description="steps of a game: one that goes on for longer is an error"
    )
    step_seconds: float = Field(
        300.0, gt=0, le=1e6, description="for one call of the environment, before it is an error"
    )
    attempts: int = Field(3, ge=1, le=1000, description="at a game that ends in an error, before its start is given up")
    constrain: bool = Field(True, description="keep answers to what the environment says is legal")
    plain: bool = Field(False, description="write chats as lines `role: text`, whatever template the model has")


class PartyOptions(api.Options):
    """Who plays."""

    role_temperature: list[str] = Field(
        [], max_length=64, description="temperature of a role, as role=T; repeatable", json_schema_extra=REPEATABLE
    )
    opponent: list[str] = Field(
        [],
        max_length=64,
        description="who else plays a role, as role=MODEL or role=adapter:NAME; repeatable",
        json_schema_extra=REPEATABLE,
    )
    adapter: list[str] = Field(
        [],
        max_length=64,
        description="a LoRA adapter, as NAME=DIR; the one called policy is who learns; repeatable",
        json_schema_extra=REPEATABLE,
    )
    reference: Literal["none", "inline", "deferred"] = Field(
        "none", description="log-probabilities of the reference: before a group gives its place up, or beside play"
    )
    ref_model: str | None = Field(None, description="the reference, a model [the base, under an adapter]")


class TrainingOptions(api.Options):
    """The trainer at the other end, real or simulated."""

    trainer_seconds: float | None = Field(
        None, ge=0, le=1e6, description="a simulated trainer that takes so long for a step"
    )
    listen: str | None = Field(None, description="HOST:PORT where a trainer takes groups and tells of its weights")
    batch_groups: int = Field(1, ge=1, le=1 << 16, description="groups of a training step")
    buffer_depth: int = Field(2, ge=1, le=1 << 20, description="groups that wait for the trainer, at most")
    prefill: int = Field(0, ge=0, le=1 << 20, description="groups in the buffer before the trainer gets the first")
    max_staleness: int | None = Field(
        None,
        ge=0,
        le=1 << 20,
        description="versions by which a group may be older than the trainer's [batches that the buffer holds]",
    )
    steps: Path | None = Field(None, description="write one line of JSON for each training step to this file")
    kl_target: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="adapt the KL coefficient towards this divergence",
        json_schema_extra=WITH_REFERENCE,
    )
    kl_coef: float = Field(
        0.1,
        ge=0,
        le=1e6,
        description="of KL between policy and reference; where it starts",
        json_schema_extra=WITH_REFERENCE,
    )
    kl_horizon: float = Field(
        10_000.0, gt=0, le=1e12, description="games over which the coefficient adapts", json_schema_extra=WITH_REFERENCE
    )
    api_key_file: Path | None = Field(None, description="with --listen: the keys of trainers, one a line")
    admin_key_file: Path | None = Field(None, description="with --listen: the keys of those who may hand over weights")
    insecure: bool = Field(False, description="let anyone in, at an address that others reach")
    trainer_patience: float = Field(
        3600.0, gt=0, le=1e9, description="with --listen: seconds without a word from a trainer, before the run fails"
    )


class RolloutsOptions(TrainingOptions, PartyOptions, SamplingOptions, ModelOptions, GameOptions):
    """What `gpuinfer rollouts` takes; `[rollouts]` of gpuinfer.toml too."""

    temperature: float = Field(1.0, ge=0, le=MOST_TEMPERATURE, description="0 takes the likeliest token")
    batch_size: int | None = Field(None, ge=1, le=1 << 20, description="rows at once [as memory allows]")
    out: Path | None = Field(None, description="write the record to this folder")
    format: Literal["jsonl", "parquet"] = Field("jsonl", description="of the record")
    resume: bool = Field(False, description="go on with the record in --out: what is done is not played again")


ADAPTER = "adapter:"
START = "v0"  # the version of adapters that are there from the start


@dataclass(frozen=True)
class RoleOpponent:
    """Who plays a role that does not learn. Exactly one is set."""

    model: str | None = None
    adapter: str | None = None

    @property
    def name(self) -> str:
        return self.model or str(self.adapter)


@dataclass(frozen=True)
class Roles:
    """What the flags say of who plays."""

    opponents: Mapping[str, RoleOpponent]  # by role
    temperatures: Mapping[str, float]  # likewise
    adapters: Mapping[str, Path]  # by name

    @classmethod
    def of(cls, opponents: Sequence[str], temperatures: Sequence[str], adapters: Sequence[str]) -> Roles:
        """Raises `UsageError` for what is not of the flags' form, or names what is not there."""
        found, others, warmths = adapter_folders(adapters), {}, {}
        for role, text in pairs_of("--opponent", opponents, "role=MODEL").items():
            name = text.removeprefix(ADAPTER)
            if name != text and name not in found:
                raise UsageError(f"--opponent {role}={text}: no such adapter. Add --adapter {name}=DIR.")
            others[role] = RoleOpponent(model=text) if name == text else RoleOpponent(adapter=name)
        for role, text in pairs_of("--role-temperature", temperatures, "role=0.7").items():
            try:
                warmths[role] = float(text)
            except ValueError:
                warmths[role] = -1.0
            if not 0 <= warmths[role] <= MOST_TEMPERATURE:
                raise UsageError(
                    f"--role-temperature {role}={text}: no temperature. Give a number from 0 to {MOST_TEMPERATURE:g}."
                )
        return cls(others, warmths, found)

    @property
    def policy(self) -> str | None:
        """The adapter of those who learn; None: the model itself."""
        return POLICY if POLICY in self.adapters else None

    def deciding(self) -> dict[str, Any]:
        """What a record depends on, as plain values. Reads the adapters' files."""
        return {
            "opponents": {role: one.name for role, one in self.opponents.items()},
            "temperatures": dict(self.temperatures),
            "adapters": adapter_digests(self.adapters),
        }


def check_training(own: TrainingOptions) -> None:
    """Raises `UsageError` for flags that do not go together, before anything is started."""
    if own.listen is not None and own.trainer_seconds is not None:
        raise UsageError("--listen waits for a trainer and --trainer-seconds stands in for one. Give one of them.")
    training_plan(own).check()
    server_plan(own)


def training_plan(own: TrainingOptions, before: StepRecord | None = None) -> TrainingPlan:
    """`before`: the last step of an earlier run that this one goes on with."""
    return TrainingPlan(
        depth=own.buffer_depth,
        batch=own.batch_groups,
        prefill=own.prefill,
        max_staleness=own.max_staleness,
        version=before.version_after if before else 0,
        step=before.step + 1 if before else 0,
        kl_target=own.kl_target,
        kl_coefficient=own.kl_coef if before is None or before.kl_coefficient is None else before.kl_coefficient,
        kl_horizon=own.kl_horizon,
    )


def server_plan(own: TrainingOptions) -> TrainerServerPlan | None:
    """Raises `UsageError`."""
    if own.listen is None:
        return None
    return TrainerServerPlan.of(own.listen, own.api_key_file, own.admin_key_file, own.insecure, own.trainer_patience)
