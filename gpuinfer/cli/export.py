"""Write a network of rows as an ONNX file, and compare its answers in ONNX Runtime with those in torch."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import ModelSpec, Setup
from gpuinfer.cli import flags
from gpuinfer.cli.problems import CHECK_FAILED
from gpuinfer.config import blame, registry
from gpuinfer.config.foreign_names import HUB_NAME
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.files import no_folder
from gpuinfer.serving.openai.model_options import TEXT_MODELS

if TYPE_CHECKING:
    from gpuinfer.models.positions import Symmetries

NAME = "export"
COMMON = ("seed", "json", "quiet", "verbose", "config")
SCHEMA = "gpuinfer.export/1"
OF_GAME = ("players", "cards", "trump", "scoring", "game_options")  # that self-play gives to the game
SIZES = ("features", "actions", "seats")
NO_NETWORK = ("uniform", "rollout")
ROWS = 4096  # positions to compare with, at most
SIMULATIONS = 4  # of each search of a game that is played for its positions
MOST_GAMES = 50
TEXT = """Write a network of rows as an ONNX file, and compare its answers in ONNX Runtime with those in torch.

The rows to compare with are positions of --records that self-play has left, or of
games that are played for it (--game); where only the sizes are known (--features,
--actions, --seats), random ones. Batches of several sizes are compared.

A file whose answers differ by more than --tolerance is not kept, and the exit
code is 4. Needs pip install 'gpuinfer[onnx]'.
"""


class ExportOptions(api.Options):
    """The flags of `gpuinfer export`."""

    model: str = Field(
        description="blobnet, blobnet-small or module:factory",
        json_schema_extra={"names": ["blobnet", "blobnet-small"]},
    )
    weights: Path | None = Field(None, description="safetensors, or a torch file of plain tensors")
    out: Path = Field(description="the file to write, as net.onnx, which must not be there")
    records: list[Path] | None = Field(None, description="folders that selfplay --out wrote, of the network's game")
    game: str | None = Field(
        None, description="the network's game, or module:Class, instead", json_schema_extra={"kind": "games"}
    )
    players: int | None = Field(None, description="players at the table, as in selfplay")
    cards: int | None = Field(None, description="cards dealt to each player, as in selfplay")
    trump: str | None = Field(None, description="turned, none, or a suit, as in selfplay")
    scoring: str | None = Field(None, description="blob or oh-hell, as in selfplay")
    game_options: str | None = Field(None, description="options of another game, as key=value,key=value")
    features: int | None = Field(None, ge=1, le=1 << 24, description="of a row, where there is no game")
    actions: int | None = Field(None, ge=1, le=1 << 24, description="policy logits of a row, likewise")
    seats: int | None = Field(None, ge=1, le=1 << 16, description="values of a row, likewise")
    tolerance: float = Field(
        1e-4, gt=0, description="the largest difference: absolute of answers up to 1, relative of larger ones"
    )


@dataclass(frozen=True, slots=True)
class ExportSubject:
    """What the network is of. `rows` gives features, float32 [positions, features], and may take a while."""

    spec: ModelSpec
    rows: Callable[[], Any]
    of: str  # what the positions are, for people
    game: Mapping[str, Any] | None = None  # its name and options
    symmetries: Symmetries | None = None


class Apart(WorkError):
    """The two answers differ by more than was allowed."""

    exit_code = CHECK_FAILED


def execute(values: Mapping[str, Any]) -> int:
    """Export, compare, show. Raises `Apart` when the file is not kept."""
    from gpuinfer.cli.building import setup_of
    from gpuinfer.cli.workload import begin_run, progress_lines

    merged, destination, options = begin_run(NAME, ExportOptions, values)
    common = merged.common
    say = progress_lines(NAME, common.quiet)
    name = options.model
    if name in NO_NETWORK:
        raise UsageError(f"'{name}' is no network: there is nothing to export. Give --model blobnet.")
    if name in TEXT_MODELS or Path(name).exists() or HUB_NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' is a model of text, and export writes networks of rows. Serve it (gpuinfer serve --model "
            f"{name}), or have ONNX made of it by Hugging Face's optimum (optimum-cli export onnx)."
        )
    if options.weights is not None and not options.weights.is_file():
        raise UsageError(f"--weights: no file '{options.weights}'. Give the file that holds the weights.")
    if options.out.exists():
        raise UsageError(f"{options.out} exists already. Give another --out.")
    if not options.out.parent.is_dir():
        raise no_folder("--out", options.out)
    ways = [name for name in ("records", "game", "features") if getattr(options, name)]
    if len(ways) > 1:
        raise UsageError(f"--{ways[0]} says how large a row is, and --{ways[1]} too. Leave one of them out.")
    if not ways:
        raise UsageError(
            f"how large the rows of '{name}' are is not known. Give --records DIR that it learnt from, --game NAME, or "
            "--features N (and --actions N --seats N)."
        )
    allowed = {"game": OF_GAME, "features": SIZES}.get(ways[0], ())
    if odd := [one for one in (*OF_GAME, *SIZES) if getattr(options, one) is not None and one not in allowed]:
        raise UsageError(f"--{odd[0].replace('_', '-')} does not go with --{ways[0]}. Leave it out.")
    subject = _subject(options, setup_of(common))

    from gpuinfer.host.extras import require_extra
    from gpuinfer.host.files import put_whole
    from gpuinfer.models import onnx_export

    require_extra("onnx", "an export to ONNX")
    if options.weights is None and ":" not in options.model:
        say(f"no --weights: those of '{options.model}' are drawn from --seed {common.seed}")
    network = onnx_export.open_exportable(subject.spec, common.seed)
    say(f"positions of {subject.of}")
    rows = subject.rows()
    say(f"writing '{options.model}' to {options.out}")
    import torch

    from gpuinfer import __version__

    spec = subject.spec
    plain: dict[str, Any] = {
        "version": __version__,
        "torch": torch.__version__,
        "model": spec.name,
        "digest": network.digest(),
        "features": spec.inputs,
        **spec.arguments,
        **(subject.game or {}),
    }
    if spec.weights is not None:
        plain["weights_sha256"] = hashlib.sha256(Path(spec.weights).read_bytes()).hexdigest()
    if subject.symmetries is not None:
        plain["symmetries"] = subject.symmetries.plain()
    metadata = {f"gpuinfer.{key}": one if isinstance(one, str) else json.dumps(one) for key, one in plain.items()}
    content = onnx_export.content(network, metadata)
    found: list[tuple[int, dict[str, float]]] = []

    def write(file: Any) -> None:
        file.write(content)
        file.flush()
        found.extend(onnx_export.largest_differences(Path(file.name), network, rows))
        if (worst := _worst(found)) > options.tolerance:
            raise Apart(
                f"ONNX Runtime's answers differ from torch's by {worst:.2g}, and {options.tolerance:g} is allowed: "
                f"{options.out} is not kept. Take randomness out of the network's forward, or allow more with "
                "--tolerance."
            )

    try:
        put_whole(options.out, write)
    except OSError as error:
        raise WorkError(f"{options.out} cannot be written: {error.strerror}. Give another --out.") from error
    finally:
        if found:
            furthest, shapes = _worst(found), zip(network.outputs, network.layout.shapes, strict=True)
            document = {
                "schema": SCHEMA,
                "file": str(options.out),
                "bytes": len(content),
                "kept": furthest <= options.tolerance,
                "opset": onnx_export.OPSET,
                "inputs": {onnx_export.INPUT: [onnx_export.BATCH, subject.spec.inputs]},
                "outputs": {name: [onnx_export.BATCH, *shape] for name, shape in shapes},
                "metadata": metadata,
                "positions": subject.of,
                "tolerance": options.tolerance,
                "difference": furthest,
                "batches": [{"rows": rows, **each} for rows, each in found],
            }
            _show(document, on_stderr=destination.stdout)
            if (failed := sys.exception()) is None:
                destination.write(document)
            else:
                destination.write_failed(document, failed)
    return 0


def _subject(options: ExportOptions, setup: Setup) -> ExportSubject:
    if folders := options.records:
        from gpuinfer.models.positions import PositionsFolder, positions_of, sizes_of, symmetries_of

        sizes = sizes_of(folders)
        arguments = {"actions": sizes.actions, "seats": sizes.seats}
        spec = ModelSpec(options.model, _text(options.weights), sizes.features, sizes.dtype, arguments)
        settings = (PositionsFolder(folders[-1]).manifest() or {}).get("settings", {})
        game = {name: settings[name] for name in ("game", "game_options") if name in settings}

        def rows() -> Any:
            return positions_of(folders, ROWS).observation.astype("float32")

        return ExportSubject(spec, rows, ", ".join(map(str, folders)), game, symmetries_of(folders))
    return _of_game(options, setup) if options.game is not None else _of_sizes(options, setup.seed)


def _of_game(options: ExportOptions, setup: Setup) -> ExportSubject:
    from gpuinfer.models.positions import checked

    given = {name: value for name in OF_GAME if (value := getattr(options, name)) is not None}
    told = {**given, "game": options.game, "model": options.model, "weights": options.weights}
    selfplay = blame.make(registry.load("workloads", "selfplay"), setup, {**told, "simulations": SIMULATIONS})
    game, spec = selfplay.game, selfplay.model()
    assert isinstance(spec, ModelSpec)

    def rows() -> Any:
        import numpy as np

        game = selfplay.game
        found: list[Any] = []
        dice = np.random.default_rng(selfplay.setup.seed)

        def ask(rows: Any) -> Any:
            found.extend(np.array(rows, np.float32))
            return np.zeros((len(rows), game.actions), np.float32), np.zeros((len(rows), game.seats), np.float32)

        for number in range(MOST_GAMES):
            try:
                table = selfplay.table(number)
            except UsageError as error:  # it is made for people, and a game may be unable to show itself to them
                raise UsageError(f"{error} Or give --records DIR of its games instead of --game.") from error
            while table.mover is not None and len(found) < ROWS:
                table.think(ask)
                table.play(int(dice.choice(table.legal)))
            if len(found) >= ROWS:
                break
        return np.stack(found[:ROWS])

    return ExportSubject(
        spec,
        rows,
        f"games of {options.game}, played for this",
        {"game": options.game, "game_options": game.options.model_dump()},
        checked(game.symmetries(), game.features, game.actions, f"game '{options.game}'"),
    )


def _of_sizes(options: ExportOptions, seed: int) -> ExportSubject:
    sizes = {name: value for name in ("actions", "seats") if (value := getattr(options, name)) is not None}
    features = options.features or 0
    spec = ModelSpec(options.model, _text(options.weights), features, "float32", sizes)

    def rows() -> Any:
        """Where there are actions, the first features are a mask of legal ones, at least one of them."""
        import numpy as np

        dice = np.random.default_rng(seed)
        drawn = dice.standard_normal((min(ROWS, 1024), features), np.float32)
        if 0 < (actions := sizes.get("actions", 0)) <= features:
            drawn[:, :actions] = drawn[:, :actions] > 0
            drawn[np.arange(len(drawn)), dice.integers(actions, size=len(drawn))] = 1
        return drawn

    return ExportSubject(spec, rows, "no game: random ones")


def _worst(found: Sequence[tuple[int, Mapping[str, float]]]) -> float:
    return max(one for _, each in found for one in each.values())


def _show(document: Mapping[str, Any], on_stderr: bool) -> None:
    from gpuinfer.cli.screen.display import comparison
    from gpuinfer.units import memory

    outputs = document["outputs"]
    rows = [(f"{one['rows']}", *(f"{one[name]:.1e}" for name in outputs)) for one in document["batches"]]
    notes = [
        ("input", _shaped(document["inputs"])),
        ("outputs", _shaped(outputs)),
        ("positions", document["positions"]),
        ("difference", f"{document['difference']:.1e} at most, and {document['tolerance']:g} is allowed"),
    ]
    heading = f"export · {document['file']} · opset {document['opset']}, {memory(document['bytes'])}"
    comparison(heading, ("rows at once", *outputs), rows, notes, on_stderr=on_stderr)


def _shaped(tensors: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{name} float32 [{', '.join(map(str, shape))}]" for name, shape in tensors.items())


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


app = flags.command(NAME, flags.of(ExportOptions, NAME), COMMON, TEXT, execute)
