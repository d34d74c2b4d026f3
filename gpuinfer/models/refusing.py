"""What would keep a model from being loaded, found before any other is: names, settings, headers and sizes."""

from __future__ import annotations

from gpuinfer.api import ModelSpec
from gpuinfer.models.load import find_factory, trainable
from gpuinfer.models.networks import NETWORKS, load_weights


def refuse_unloadable(spec: ModelSpec) -> None:
    """Raises `UsageError` for a network of rows that is not there, or whose weights do not fit it.

    Ours are built for that, which takes milliseconds; of others only the factory is looked up.
    """
    if spec.name in NETWORKS or ":" not in spec.name:
        module = trainable(spec, 0)
        if spec.weights is not None:
            load_weights(module, spec.weights, spec.name)
    else:
        find_factory(spec.name)
