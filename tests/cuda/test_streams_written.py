"""Answers that a CUDA device writes where they belong, before anybody reads them, and the faults that it finds in them:
on the device of `recording.py`, whose tensors have values.
"""

from __future__ import annotations

import mmap
import re

import numpy as np
import pytest
import torch
from streamed import FEATURES, FIRST, SPECS, blocks_of, check, forward_of_rows, found, in_threads
from test_streams_planted import plant
from torch import nn

from gpuinfer.api import ModelSpec
from gpuinfer.central.blocks import Block, BlockForm
from gpuinfer.engine.results import find_fault
from gpuinfer.models.forward_cuda import CudaForward
from gpuinfer.models.pinned_memory import register
from gpuinfer.models.row_format import AnswerLayout

FORM = BlockForm(SPECS["bytes"], AnswerLayout("dict", ((3,), (1,)), ("policy", "sum")))


@pytest.fixture
def cuda(recorded, monkeypatch):
    monkeypatch.setattr("gpuinfer.models.pinned_memory.WORTH_A_COPY", 100)
    return recorded


def shared(rows):
    """A block of a client's, pinned for the device as the server does it, with these rows in it."""
    block = Block(0, len(rows), mmap.mmap(-1, FORM.size(len(rows))), FORM)
    block.rows[:] = rows
    block.pin = register(block.memory, FIRST)
    assert block.pin.pinned
    return block


def write(forward, blocks):
    return forward.write([block.rows for block in blocks], [block.answers for block in blocks])


def read(block):
    """Its answers, read by the host."""
    parts = [torch.from_numpy(part).clone().numpy() for part in block.answers]
    return dict(zip(FORM.answer.names, parts, strict=True))


@pytest.mark.parametrize("options", [{}, {"graphs": False}, {"fixed_shape": True}], ids=["graphs", "eager", "fixed"])
def test_several_threads_have_answers_written_into_blocks_of_clients(cuda, options):
    forward = forward_of_rows(**options)

    def ask(number):
        """Of a client that is gone once it is answered: a block that is copied to, between two by way of staging."""
        given, rows = blocks_of("bytes", [2, 60, 3], number)
        blocks = [*map(shared, given)]
        assert write(forward, blocks) == [True] * 3
        check([*map(read, blocks)], rows)
        for block in blocks:
            block.let_go()

    in_threads(3, ask)
    assert found(cuda) == []


class Marked(nn.Module):
    """The first feature of a row says what is among its answers, the second where."""

    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.tensor([0.5, torch.nan, torch.inf, -torch.inf]))

    def forward(self, rows):
        value = self.values[rows[:, 0].long()]
        places = torch.arange(4, device=rows.device)
        marked = torch.where(places[None] == rows[:, 1:2], value[:, None], torch.full_like(rows[:, :4], -2.0))
        return marked[:, :3], marked[:, 3], rows[:, :0]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_device_finds_what_the_host_would(cuda, graphs):
    dice = np.random.default_rng(0)
    blocks = [np.zeros((rows, FEATURES), np.uint8) for rows in (1, 1, 1, 1, 7, 30, 55, 2, 3) * 2]
    for block in blocks[4:]:
        row, block[:, 1] = dice.integers(0, len(block)), dice.integers(0, 4, len(block))
        block[row, 0] = dice.integers(0, 4)
    for number, block in enumerate(blocks[:4]):
        block[0, :2] = number, number
    spec = ModelSpec("a-model", inputs=FEATURES, input_dtype="uint8")
    forward = CudaForward(Marked().to(FIRST), spec, device=FIRST, dtype=torch.float32, chunk_rows=40, graphs=graphs)
    targets = [[np.empty((len(block), *shape), np.float32) for shape in ((3,), (), (0,))] for block in blocks]
    sound = forward.write(blocks, targets)
    assert sound == [find_fault(parts, len(block)) is None for parts, block in zip(targets, blocks, strict=True)]
    assert sound[:4] == [True, False, False, True]
    for parts, answers in zip(targets, forward(blocks), strict=True):
        for part, answer in zip(parts, answers, strict=True):
            np.testing.assert_array_equal(part, answer)
    assert found(cuda) == []


def into_blocks(monkeypatch):
    forward, block = forward_of_rows(), shared(*blocks_of("bytes", [60])[0])
    write(forward, [block])
    read(block)


def into_blocks_let_go(monkeypatch):
    forward, block = forward_of_rows(), shared(*blocks_of("bytes", [60])[0])
    write(forward, [block])
    block.let_go()


def by_staging(monkeypatch):
    forward = forward_of_rows()
    for number in range(2):
        blocks = [*map(shared, blocks_of("bytes", [3] * 9, number)[0])]
        write(forward, blocks)


def failing(monkeypatch):
    """A batch that fails behind its rows, of a client that is gone then."""
    forward, block = forward_of_rows(), shared(*blocks_of("bytes", [60])[0])

    def raises(*given):
        raise ValueError("this batch cannot be answered")

    monkeypatch.setattr(CudaForward, "_launch", raises)
    with pytest.raises(ValueError, match="cannot be answered"):
        write(forward, [block])
    block.let_go()


DONE, STOPPED = "slot.done.synchronize()", "slot.stream.synchronize()"
PLANTS = {
    "answers in a client's block are read before they are there": (into_blocks, DONE, "memory of others .* reading"),
    "a client's block is let go while the device writes to it": (into_blocks_let_go, DONE, "unpinned writing"),
    "answers are staged further before they are there": (by_staging, DONE, r"pinned memory \(32, 3\) .* reading"),
    "faults are read before the device has looked for them": (by_staging, DONE, r"pinned memory \(40,\) .* reading"),
    "a client's block is let go while a batch that failed reads it": (failing, STOPPED, "unpinned writing"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTS.values(), ids=PLANTS)
def test_a_race_that_is_planted_is_found(cuda, monkeypatch, planted):
    scenario, wait, words = planted
    plant(monkeypatch, CudaForward, "_attempt", wait, "pass")
    scenario(monkeypatch)
    assert any(re.search(words, one) for one in found(cuda)), found(cuda)


@pytest.mark.parametrize("scenario", [into_blocks, into_blocks_let_go, by_staging, failing])
def test_where_they_are_planted_there_is_none(cuda, monkeypatch, scenario):
    scenario(monkeypatch)
    assert found(cuda) == []
