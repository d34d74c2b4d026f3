"""A network of images for `gpuinfer serve --model image_network:network --features 3x32x32`."""

from __future__ import annotations

from typing import Any

CLASSES = 10


def network(features: tuple[int, int, int]) -> Any:
    """The model: images float32 [rows, channels, height, width] to scores [rows, 10]. `features`: an image's shape."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(features[0], 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )
