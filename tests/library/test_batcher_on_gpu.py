"""`gpuinfer.Batcher` on a CUDA device."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import gpuinfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 5)), torch.randn(600, 3, 16, 16)


def test_threads_ask_for_images_on_streams_of_several_lanes():
    """Rows on the host and on the device in the same batches, whose answers are kept until the end."""
    model, rows = images()
    with torch.no_grad():
        expected = model.eval()(rows)
    model.train()
    there = rows.cuda()
    torch.cuda.synchronize()
    with gpuinfer.Batcher(model, devices="cuda", example=rows[0], max_rows=64) as batcher:

        def ask(number):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                kept = []
                for place in range(number, len(rows), 20):
                    moved = (there[place] + 1) - 1 if place % 3 else rows[place]
                    kept.append((place, batcher.predict(moved) * 2))
                stream.synchronize()
                return kept

        with ThreadPoolExecutor(20) as threads:
            answers = [one for kept in threads.map(ask, range(20)) for one in kept]
        joined = batcher.predict_batch(there)
    assert model.training
    assert joined.device == there.device
    torch.testing.assert_close(joined.cpu(), expected, rtol=1e-2, atol=1e-3)  # TF32 in convolutions
    for place, answer in answers:
        assert answer.is_cuda is bool(place % 3)
        torch.testing.assert_close(answer.cpu() / 2, expected[place], rtol=1e-2, atol=1e-3)


def test_a_compiled_module_is_given_few_sizes_and_a_function_of_arrays_stays_on_the_host():
    sizes = set()

    class Sizes(nn.Module):
        def forward(self, rows):
            sizes.add(len(rows))
            return rows * 2

    compiled = torch.compile(Sizes(), backend="eager", dynamic=False).cuda()
    with gpuinfer.Batcher(compiled, devices="cuda", example=torch.zeros(4), max_rows=64) as batcher:
        for rows in (3, 17, 20, 40):
            assert batcher.predict_batch(torch.ones(rows, 4)).tolist() == [[2.0] * 4] * rows
    assert sizes <= {16, 32, 64}
    with gpuinfer.Batcher(lambda rows: rows[:, ::-1].copy(), devices="cuda") as batcher:
        assert batcher.predict(torch.arange(3.0).numpy()).tolist() == [2.0, 1.0, 0.0]
