"""The options that name a network of rows and say how large its rows are, for commands that take one without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import ModelSpec, Setup
from gpuinfer.config import registry
from gpuinfer.errors import UsageError

NETWORKS = ("blobnet", "blobnet-small")
NO_NETWORK = ("uniform", "rollout")  # evaluators of self-play that hold nothing
GAMES = "selfplay"  # the workload that knows of games
GAME, SIZES = ("game", "players", "cards"), ("features", "actions", "seats")


class NetworkOptions(api.Options):
    """Flags of a command that takes a model, of rows or of text."""

    model: str | None = Field(None, description="blobnet, blobnet-small or module:factory")
    weights: Path | None = Field(None, description="of a network of rows: safetensors, or a torch file")
    game: str | None = Field(None, description="a network of rows has this game's sizes [blob; of a factory none]")
    players: int | None = Field(None, description="at its table")
    cards: int | None = Field(None, description="dealt to each")
    features: int | None = Field(None, ge=1, le=1 << 24, description="of a row, instead of a game's")
    actions: int | None = Field(None, ge=1, le=1 << 24, description="policy logits of a row, likewise")
    seats: int | None = Field(None, ge=1, le=1 << 16, description="values of a row, likewise")


OF_NETWORKS = tuple(name for name in NetworkOptions.model_fields if name != "model")


def is_network(name: str | None) -> bool:
    """Whether this --model is a network of rows: no folder, and no name of a model of text."""
    return name is not None and not Path(name).exists() and (name in (*NETWORKS, *NO_NETWORK) or ":" in name)


def refuse_of_networks(options: NetworkOptions, called: object) -> None:
    """Raises `UsageError` for options of a network that were passed with the model of text `called`."""
    if unheard := [one for one in OF_NETWORKS if getattr(options, one) is not None]:
        raise UsageError(
            f"--{unheard[0]} belongs to a network of rows, and '{called}' is a model of text. Leave it out."
        )


@contextmanager
def sizes_named(spec: ModelSpec) -> Iterator[None]:
    """Where a factory wants to know sizes of rows, raises `UsageError` that names the flags."""
    from gpuinfer.models.load import FactoryWants, title

    try:
        yield
    except FactoryWants as error:
        if not set(error.names) <= set(SIZES):
            raise
        cure = " and ".join(f"--{name} N" for name in error.names)
        wanted = " and ".join(error.names)
        raise UsageError(f"{title(spec.name)}: the factory needs {wanted}. Give {cure}.") from error


def network_spec(options: NetworkOptions, setup: Setup) -> ModelSpec:
    """The network, whose rows are those of a game as a run of self-play would ask for it, or as large as the options
    say. Raises `UsageError`.
    """
    name = str(options.model)
    if name in NO_NETWORK:
        raise UsageError(f"'{name}' is no network: it answers by itself, and holds nothing. Give --model blobnet.")
    sizes = {one: value for one in SIZES if (value := getattr(options, one)) is not None}
    game = {one: value for one in GAME if (value := getattr(options, one)) is not None}
    weights = None if options.weights is None else str(options.weights)
    if "features" in sizes:
        if game:
            raise UsageError(
                f"--features says how large a row is, and --{next(iter(game))} too. Leave one of them out."
            )
        inputs = sizes.pop("features")
        return ModelSpec(name, weights, inputs, "float32", arguments=sizes)
    if name in NETWORKS or options.game is not None:
        spec = registry.load("workloads", GAMES)(setup, model=name, **game).model()
        assert isinstance(spec, ModelSpec)
        return replace(spec, weights=weights, arguments={**spec.arguments, **sizes})
    raise UsageError(
        f"model '{name}' is made by a factory, and how large its rows are is not known. Give --game NAME, or "
        "--features N (and --actions N --seats N where the factory takes them)."
    )
