"""How blocks of rows go through a module on the CPU, and the parts of the CUDA way that need no GPU."""

import contextlib
import logging

import numpy as np
import pytest
import torch
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpuinfer import api
from gpuinfer.api import ModelSpec
from gpuinfer.engine.results import find_fault
from gpuinfer.errors import BackendError
from gpuinfer.models import pinned_memory
from gpuinfer.models.forward_cpu import CpuForward
from gpuinfer.models.forward_cuda import bucket_for, buckets_up_to
from gpuinfer.models.load import build
from gpuinfer.models.pinned_memory import copy_plan, deliver, unstage
from gpuinfer.models.row_blocks import RowBlocks, sound_rows, table_of, unpacked

FEATURES, ACTIONS, SEATS = 40, 12, 3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
NETWORKS = ["blobnet", "blobnet-small"]
SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def network(name, dtype=torch.float32):
    spec = ModelSpec(name, inputs=FEATURES, arguments={"actions": ACTIONS, "seats": SEATS})
    return build(spec, device=torch.device("cpu"), dtype=dtype, seed=3)


def positions(rows, seed=0, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, 2, (rows, FEATURES)).astype(dtype)


class Sums(nn.Module):
    """Adds each row up, in as many ways as a module may answer, and remembers the batches that it saw."""

    def __init__(self, shape="alone", most=10**9):
        super().__init__()
        self.shape, self.most, self.batches = shape, most, []

    def forward(self, x):
        self.batches.append(len(x))
        if len(x) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        total = x.float().sum(1, keepdim=True)
        return {"alone": total, "a tuple": (total, -total), "a dict": {"sum": total, "minus": -total}}[self.shape]


def sums(blocks):
    return [block.astype(np.float32).sum(1, keepdims=True) for block in blocks]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# What comes back


@given(SIZES, st.integers(1, 12), st.sampled_from([np.uint8, np.int8, np.float32]), st.booleans())
def test_every_block_gets_its_own_rows_back_in_order(sizes, chunk, dtype, fixed_shape):
    blocks = [positions(rows, seed, dtype) for seed, rows in enumerate(sizes)]
    assert_equal(CpuForward(Sums(), torch.float32, chunk, fixed_shape)(blocks), sums(blocks))


@pytest.mark.parametrize("chunk", [64, 2], ids=["one chunk", "several chunks"])
@pytest.mark.parametrize("shape", ["alone", "a tuple", "a dict"])
@DTYPES
def test_results_have_the_modules_structure_as_float32_arrays(shape, chunk, dtype):
    block = positions(5)
    (found,), (total,) = CpuForward(Sums(shape), dtype, chunk)([block]), sums([block])
    parts = [found] if shape == "alone" else list(found.values()) if shape == "a dict" else list(found)
    assert isinstance(found, {"alone": np.ndarray, "a tuple": tuple, "a dict": dict}[shape])
    assert_equal(parts, [total] if shape == "alone" else [total, -total])
    assert all(part.dtype == np.float32 and part.flags.c_contiguous for part in parts)


def read_only(block):
    block = block.copy()
    block.flags.writeable = False
    return block


@pytest.mark.parametrize("view", [lambda block: block[::-1], read_only, lambda block: np.repeat(block, 2, axis=0)[::2]])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_any_view_is_taken_and_left_as_it_is_and_a_result_is_not_changed_by_the_next_batch(view, dtype):
    block = view(positions(4, dtype=dtype))
    before = block.copy()
    assert_equal(CpuForward(Sums(), torch.float32)([block]), sums([before]))
    forward = CpuForward(nn.Identity(), torch.float32, 4)
    (kept,) = forward([block])
    forward([positions(4, 2, dtype)])
    assert_equal([kept, block], [before, before])


def test_a_block_of_the_right_dtype_is_not_copied_and_the_ledger_hears_of_transfer_and_forward():
    seen, stations = [], []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(x.data_ptr())
            return x.sum(1, keepdim=True)

    class Lane:
        def enter(self, station):
            stations.append(station)

    block = positions(6, dtype=np.float32)
    token = api.forward_lane.set(Lane())
    try:
        CpuForward(Look(), torch.float32, 4)([block])
    finally:
        api.forward_lane.reset(token)
    assert seen == [block.ctypes.data, block[4:].ctypes.data]
    assert stations == ["transfer", "forward", "transfer", "forward", "transfer"]


# Features that arrive as bits


def bits_and_bytes(rows, features, seed=0):
    """The same features twice: packed, with noise in the bits that stand for none, and a byte each."""
    packed = np.random.default_rng(seed).integers(0, 256, (rows, -(-features // 8)), dtype=np.uint8)
    return packed, np.unpackbits(packed, axis=1, bitorder="little")[:, :features]


@given(
    SIZES,
    st.integers(1, 40),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_bits_become_the_features_that_they_stand_for_on_the_host_and_on_a_device(sizes, features, chunk, fixed, dtype):
    packed, expected = zip(*(bits_and_bytes(rows, features, seed) for seed, rows in enumerate(sizes)), strict=True)
    assert_equal(CpuForward(nn.Identity(), dtype, chunk, fixed, bits=features)(packed), expected)
    found = unpacked(torch.from_numpy(np.concatenate(packed)), features, table_of(dtype))
    assert found.dtype == dtype
    assert found.is_contiguous()
    np.testing.assert_array_equal(found.float().numpy(), np.concatenate(expected))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_answers_bits_as_it_answers_bytes(name):
    packed, expected = bits_and_bytes(70, FEATURES)
    from_bits = CpuForward(network(name), torch.float32, bits=FEATURES)([packed[:1], packed[1:]])
    from_bytes = CpuForward(network(name), torch.float32)([expected[:1], expected[1:]])
    for ours, theirs in zip(from_bits, from_bytes, strict=True):
        assert_equal(ours, theirs)


# Faults in answers, as a device looks for them


@given(
    rows=st.integers(1, 6),
    shapes=st.lists(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_device_finds_the_faults_that_the_host_finds(rows, shapes, data):
    parts = []
    for shape in shapes:
        count = rows * int(np.prod(shape))
        drawn = st.sampled_from([0.0, -1.5, 3e38, -np.inf, np.inf, np.nan])
        values = data.draw(st.lists(drawn, min_size=count, max_size=count))
        parts.append(np.array(values, np.float32).reshape(rows, *shape))
    sound = sound_rows([torch.from_numpy(part) for part in parts], rows)
    assert (sound.dtype, sound.shape) == (torch.bool, (rows,))
    faults = [find_fault(tuple(part[row : row + 1] for part in parts), 1) for row in range(rows)]
    assert sound.tolist() == [fault is None for fault in faults]


# The same answer whatever the company


@pytest.mark.parametrize("name", NETWORKS)
def test_batched_answers_are_those_of_rows_asked_one_by_one(name):
    forward, block = CpuForward(network(name), torch.float32), positions(70)
    (policy, values), alone = forward([block])[0], forward([block[row : row + 1] for row in range(70)])
    apart = [forward([block[row : row + 1]])[0] for row in range(70)]
    for singly in (alone, apart):
        np.testing.assert_allclose(policy, np.concatenate([p for p, _ in singly]), atol=1e-5)
        np.testing.assert_allclose(values, np.concatenate([v for _, v in singly]), atol=1e-5)


@pytest.mark.parametrize("name", [*NETWORKS, "plain"])
@DTYPES
def test_with_a_fixed_shape_a_rows_answer_is_the_same_bits_in_any_company(name, dtype):
    """`plain` is a module of ordinary linear layers, as a user writes them."""

    def flat(results):
        return np.concatenate([np.concatenate(r, axis=1) if isinstance(r, tuple) else r for r in results])

    layers = nn.Linear(FEATURES, 96), nn.ReLU(), nn.Linear(96, 17)
    module = nn.Sequential(*layers).to(dtype) if name == "plain" else network(name, dtype)
    forward, everything = CpuForward(module, dtype, 64, fixed_shape=True), positions(150)
    reference = flat(forward([everything]))

    @settings(max_examples=examples(25), deadline=None)
    @given(rows=st.lists(st.integers(0, 149), min_size=1, max_size=150), cuts=st.lists(st.integers(0, 150), max_size=4))
    def check(rows, cuts):
        blocks = [part for part in np.split(everything[rows], sorted(min(cut, len(rows)) for cut in cuts)) if len(part)]
        assert flat(forward(blocks)).tobytes() == reference[rows].tobytes()

    check()


# Memory


@pytest.mark.parametrize("fixed_shape", [False, True])
def test_out_of_memory_halves_the_step_says_so_once_and_goes_on(fixed_shape, caplog):
    module, blocks = Sums(most=5), [positions(13), positions(20, 1)]
    forward = CpuForward(module, torch.float32, 16, fixed_shape)
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        for _ in range(2):
            assert_equal(forward(blocks), sums(blocks))
    assert module.batches[:3] == [16, 8, 4]
    assert max(module.batches[3:]) == 4
    (said,) = caplog.messages
    assert said.startswith("out of memory at 16 rows: going on with at most 4 at a time. Set chunk_rows=4")


def test_a_row_that_does_not_fit_alone_is_an_error_with_a_cure():
    with pytest.raises(BackendError, match=r"single row: .*can't allocate memory.*smaller model, dtype bfloat16"):
        CpuForward(Sums(most=0), torch.float32, 4)([positions(3)])


# Staging and buckets


@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=5), data=st.data())
def test_pieces_are_the_rows_asked_for(sizes, data):
    blocks = [positions(rows, seed) for seed, rows in enumerate(sizes)]
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    pieces = RowBlocks(blocks).pieces(start, stop)
    assert all(any(np.shares_memory(piece, block) for block in blocks) for piece in pieces)
    np.testing.assert_array_equal(np.concatenate([positions(0), *pieces]), np.concatenate(blocks)[start:stop])


@given(most=st.integers(1, 70_000), data=st.data())
def test_a_batch_goes_in_the_least_bucket_that_holds_it(most, data):
    buckets, rows = buckets_up_to(most), data.draw(st.integers(1, most))
    found = bucket_for(rows, buckets)
    assert buckets == sorted(set(buckets))
    assert buckets[-1] == most
    assert found >= rows
    assert all(bucket < rows for bucket in buckets if bucket < found)
    assert rows <= 16 or rows > found / 2


# What a CUDA device fetches from where it lies, and writes where it belongs

BLOCKS = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=8)


@given(BLOCKS)
def test_pinned_blocks_go_to_the_device_as_they_lie_and_the_others_together_by_staging(batch):
    blocks = [positions(rows, seed) for seed, (rows, _) in enumerate(batch)]
    lying = {id(block): lies_so for block, (_, lies_so) in zip(blocks, batch, strict=True)}
    staging, device = torch.empty(100, FEATURES, dtype=torch.uint8), np.empty((100, FEATURES), np.uint8)
    parts = list(copy_plan(blocks, staging, lambda block: lying[id(block)]))
    for at, part in parts:
        device[at : at + len(part)] = part
    straight = [block for block in blocks if lying[id(block)]]
    staged = [part for _, part in parts if np.shares_memory(part.numpy(), staging.numpy())]
    np.testing.assert_array_equal(device[: sum(map(len, blocks))], np.concatenate(blocks))
    assert len(parts) == len(straight) + len(staged)
    assert all(any(np.shares_memory(part.numpy(), block) for _, part in parts) for block in straight)
    assert len(staged) <= len(straight) + 1


@given(BLOCKS)
def test_answers_to_pinned_blocks_are_written_there_and_those_to_others_by_staging(batch):
    targets = [np.zeros((rows, 3), np.float32) for rows, _ in batch]
    lying = {id(target): lies_so for target, (_, lies_so) in zip(targets, batch, strict=True)}
    answers, taken = torch.rand(sum(map(len, targets)), 3), []

    def room(rows):
        taken.append(rows)
        return torch.full((rows + 2, 3), torch.nan)

    later = deliver(answers, targets, room, lambda target: lying[id(target)])
    staged = [target for target in targets if not lying[id(target)]]
    assert taken == ([sum(map(len, staged))] if staged else [])
    assert not any(target.any() for target in staged)
    assert [id(target) for run, _ in later for target in run] == [id(target) for target in staged]
    assert len(later) <= len(targets) - len(staged) + 1
    unstage(later)
    np.testing.assert_array_equal(np.concatenate(targets), answers.numpy())


@pytest.mark.parametrize("error", [0, 2], ids=["pins", "refuses"])
def test_pages_are_pinned_for_cuda_until_closed_and_a_refusal_is_told(error, monkeypatch, caplog):
    pages = {}

    class Driver:
        """Stands for CUDA's library."""

        def cudaHostRegister(self, address, size, flags):
            pages.update({} if error else {address: size})
            return error

        def cudaHostUnregister(self, address):
            del pages[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(pinned_memory, "forget", lambda: None)
    block = positions(4)
    assert not pinned_memory.register(block, torch.device("cpu")).pinned
    registration = pinned_memory.register(block, torch.device("cuda", 0))
    assert pages == ({} if error else {block.ctypes.data: block.nbytes})
    assert registration.pinned is not bool(error)
    assert ("ulimit -l" in caplog.text) is bool(error)
    for _ in range(2):
        registration.close()
    assert pages == {}
    assert not registration.pinned
