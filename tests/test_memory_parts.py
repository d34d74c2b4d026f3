"""What a batch is estimated to take, and the search for the largest batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.lab.memory.batch_trials import largest_batch
from gpuinfer.lab.memory.memory_options import MemoryOptions, memory_model
from gpuinfer.models.footprint import HELD, activations, weight_bytes
from gpuinfer.models.networks import PackedAffine
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.memory_estimate import page_bytes, working
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder, cpu_available
from gpuinfer.units import memory, size


def test_a_trace_of_two_small_batches_tells_what_a_large_one_takes():
    module = nn.Linear(64, 256, bias=False).requires_grad_(False)

    def call(rows):
        return module(torch.ones(rows, 64))

    found = activations(call, 16, 48)
    assert found.resident_bytes(1_000_000) == pytest.approx(HELD * 1_000_000 * 4 * (64 + 256), rel=0.01)
    assert weight_bytes(module) == 64 * 256 * 4


def test_what_a_layer_has_packed_counts():
    layer = PackedAffine(torch.ones(32, 64), torch.ones(32))
    assert weight_bytes(layer) >= 2 * 32 * 64 * 4


# The search


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_the_largest_batch_is_the_last_that_fits(bound, most):
    assert largest_batch(lambda rows: rows <= bound, most) == min(bound, most)


def test_a_dip_above_what_does_not_fit_is_found():
    assert largest_batch(lambda rows: rows <= 100 or 1000 <= rows <= 1500, 1 << 20) == 1500


# Text


@pytest.mark.skipif(not cpu_available(torch.float32), reason="no kernels of ours for this processor")
@pytest.mark.parametrize("name", ["tiny", "tiny-llada"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_cache_of_our_own_kernels_is_as_estimated(name, threads):
    checkpoint = open_checkpoint(ModelSpec(name, kind="text"))
    shape, weights = checkpoint.shape, checkpoint.weights(torch.float32)
    decoder = CpuDecoder(shape, weights, torch.float32, slots=3, pages=5, length=50, threads=threads)
    assert decoder.cache_bytes() == 5 * page_bytes(shape, torch.float32, own=True)
    decoder.empty()
    decoder.close()


def test_torch_needs_copies_that_our_kernels_do_not():
    shape = open_checkpoint(ModelSpec("tiny", kind="text")).shape
    ours, torchs = (working(shape, 64, 64, 256, torch.float32, own) for own in (True, False))
    assert ours.activations == torchs.activations
    assert ours.copies == 64 * shape.vocabulary * 4 < torchs.copies
    assert ours.total == ours.activations + ours.copies


# What is asked


def asked(**options):
    return memory_model(MemoryOptions(**options), Setup())


def test_a_built_in_network_has_the_sizes_of_a_game():
    blob, four = asked(model="blobnet"), asked(model="blobnet-small", game="connect-four")
    assert (blob.kind, blob.arguments["seats"]) == ("rows", 4)
    assert (four.inputs, four.arguments["actions"]) != (blob.inputs, blob.arguments["actions"])
    assert asked(model="blobnet", seats=2).arguments["seats"] == 2


def test_a_factory_has_the_sizes_that_are_given():
    spec = asked(model="nets:make", features=12, actions=3)
    assert (spec.name, spec.inputs, dict(spec.arguments)) == ("nets:make", 12, {"actions": 3})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({}, "one model, and got none.*--model blobnet", id="no model"),
        pytest.param({"model": "tiny", "checkpoint": "a.pt"}, "got --model and --checkpoint", id="two"),
        pytest.param({"model": "blobnt"}, "Did you mean 'blobnet'", id="almost a name"),
        pytest.param({"model": "tiny-lada"}, "Did you mean 'tiny-llada'", id="almost a name of text"),
        pytest.param(
            {"model": "nosuch"}, "blobnet, blobnet-small, tiny, .*module:factory, or a folder", id="nothing like a name"
        ),
        pytest.param({"model": "nets:make"}, "--game NAME, or --features N", id="a factory without sizes"),
        pytest.param({"model": "rollout"}, "is no network", id="no network"),
        pytest.param({"model": "blobnet", "context": 12}, "--context belongs to a model of text", id="rows"),
        pytest.param({"model": "tiny", "game": "blob"}, "--game belongs to a network of rows", id="text"),
        pytest.param({"model": "nets:make", "features": 3, "game": "blob"}, "--game too", id="sizes twice"),
        pytest.param({"model": "blobnet", "game": "chess"}, "chess", id="no such game"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_flag(options, words):
    with pytest.raises(UsageError, match=words):
        asked(**options)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("1024", 1024), (" 2 ki ", 2048)],
)
def test_amounts_of_memory_are_read(text, count):
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "many", "-1GB", "1 gibibyte", "1e9"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(ValueError, match="8GiB"):
        size(text)


@pytest.mark.parametrize(("count", "text"), [(512, "512 B"), (3.4 * (1 << 20), "3.4 MiB"), (300 << 30, "300 GiB")])
def test_amounts_of_memory_are_written(count, text):
    assert memory(count) == text
