"""The weights that a model begins with, as a file: so that runs with other seeds begin with the same."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save

from gpuinfer.api import ModelSpec
from gpuinfer.errors import WorkError
from gpuinfer.host.files import put_whole
from gpuinfer.models.load import trainable
from gpuinfer.models.networks import load_weights


def write_weights(spec: ModelSpec, seed: int, path: Path) -> None:
    """Those of the spec, or drawn from `seed` where it names none, as safetensors in float32.

    Raises `UsageError` when the model cannot be had, `WorkError` when the file cannot be written.
    """
    module = trainable(spec, seed)
    if spec.weights is not None:
        load_weights(module, spec.weights, spec.name)
    content = save({name: tensor.contiguous() for name, tensor in module.state_dict().items()})
    try:
        put_whole(path, lambda file: file.write(content))
    except OSError as error:
        raise WorkError(
            f"{path} cannot be written: {error.strerror}. Make room there, or give another --out."
        ) from error
