"""`gpuinfer memory` on a CUDA device: what its child measures there."""

from __future__ import annotations

import json

import pytest
import torch

from gpuinfer.cli.app import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("model", ["blobnet", "tiny", "tiny-llada"])
def test_memory_is_near_what_is_estimated(model, capsys):
    assert run(["memory", "--model", model, "--device", "cuda", "--json", "-"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["not_tried"] is None
    assert device["tried"]
    ratios = {one["batch"]: one["ratio"] for one in device["tried"]}
    assert all(0.7 < ratio < 1.4 for ratio in ratios.values()), ratios
