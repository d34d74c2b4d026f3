"""On a CUDA device: the same promises as on the CPU, and what only a CUDA device has."""

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from one_batch import answered
from torch import nn

from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.profiler import Profile
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.models.copy_overlap import WINDOW, CopyOverlap
from gpuinfer.models.device import resolve_device
from gpuinfer.models.forward_cpu import CpuForward
from gpuinfer.models.forward_cuda import CudaForward
from gpuinfer.models.load import build
from gpuinfer.models.pinned_memory import lies_pinned, register
from gpuinfer.models.roofline_measurement import measure
from gpuinfer.stats import Lane
from gpuinfer.strategies.dynamic import Dynamic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FEATURES, ACTIONS, SEATS = 64, 20, 4
NETWORKS = ["blobnet", "blobnet-small"]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def spec(name):
    return ModelSpec(name, None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})


def on_cuda(module, dtype=torch.float32, chunk_rows=512, **changes):
    changes = {"spec": spec("blobnet"), **changes}
    return CudaForward(module, device=CUDA, dtype=dtype, chunk_rows=chunk_rows, **changes)


def network(name, dtype=torch.float32, device=CUDA):
    return build(spec(name), device=device, dtype=dtype, seed=3)


def positions(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 2, (rows, FEATURES), dtype=np.uint8)


def assert_alike(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        for output, wanted in zip(ours, theirs, strict=True):
            assert output.dtype == np.float32
            np.testing.assert_allclose(output, wanted, atol=tolerance, rtol=0)


GRAPHS = pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])


@GRAPHS
@pytest.mark.parametrize("name", NETWORKS)
def test_answers_are_those_of_the_cpu(name, graphs):
    """Of one row, a bucket, just over one, several blocks, the largest bucket, and more than that."""
    forward, cpu = on_cuda(network(name), graphs=graphs), CpuForward(network(name, device=CPU), torch.float32)
    assert forward.graphs is graphs
    for sizes in ([1], [16], [17], [5, 0, 100, 3], [512], [700, 900]):
        blocks = [positions(rows, seed) for seed, rows in enumerate(sizes)]
        assert_alike(forward(blocks), cpu(blocks), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_half_precision_answers_are_near_those_of_full_precision(name, dtype):
    blocks = [positions(200)]
    assert_alike(on_cuda(network(name, dtype), dtype)(blocks), on_cuda(network(name))(blocks), 0.1)


@GRAPHS
@pytest.mark.parametrize("features", [FEATURES, 61])
def test_bits_are_unpacked_on_the_device(graphs, features):
    blocks = [positions(rows, seed)[:, :features] for seed, rows in enumerate((1, 100, 33))]
    packed = [np.packbits(block, axis=1, bitorder="little") for block in blocks]
    rows_of_bits = ModelSpec("bits", inputs=features, input_dtype="bits")
    found = on_cuda(nn.Identity(), torch.bfloat16, spec=rows_of_bits, graphs=graphs)(packed)
    for ours, theirs in zip(found, blocks, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_blocks_in_pinned_memory_are_fetched_from_there():
    forward, memory = on_cuda(network("blobnet-small"), chunk_rows=4096), positions(6000)
    expected = forward([memory[:3000], memory[3000:3004], memory[3004:]])
    registration = register(memory, CUDA)
    assert registration.pinned
    assert lies_pinned(memory[:3000])
    try:
        found = forward([memory[:3000], memory[3000:3004], memory[3004:]])
    finally:
        registration.close()
    assert_alike(found, expected, 0)
    assert not lies_pinned(memory[:3000])


class Marks(nn.Module):
    """Answers NaN, +inf or -inf to rows whose first feature is 1, 2 or 3."""

    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.tensor([0.0, torch.nan, torch.inf, -torch.inf], device=CUDA))

    def forward(self, x):
        return x.cumsum(1), self.values[x[:, 0].long()]


@GRAPHS
def test_answers_are_written_into_pinned_memory_and_faults_found_on_the_device(graphs):
    forward, sizes = on_cuda(Marks(), chunk_rows=4096, graphs=graphs), (3000, 5, 2500, 300, 1, 7)
    blocks = [positions(rows, seed) for seed, rows in enumerate(sizes)]
    for block, mark in zip(blocks, (0, 1, 2, 3, 0, 0), strict=True):
        block[:, 0] = 0
        block[-1, 0] = mark
    memory, at, targets = np.full(sum(sizes) * (FEATURES + 3), 7.0, np.float32), 0, []
    for rows in sizes:  # with as many numbers between two of them as there are rows
        targets.append(
            [memory[at : at + rows * FEATURES].reshape(rows, FEATURES), memory[at + rows * FEATURES :][:rows]]
        )
        at += rows * (FEATURES + 3)
    registration = register(memory, CUDA)
    assert registration.pinned
    assert lies_pinned(targets[0][0])
    try:
        for _ in range(3):
            assert forward.write(blocks, targets) == [True, False, False, True, True, True]
    finally:
        registration.close()
    at = 0
    for rows, parts, answers in zip(sizes, targets, forward(blocks), strict=True):
        for part, answer in zip(parts, answers, strict=True):
            np.testing.assert_array_equal(part, answer)
        assert (memory[at + rows * (FEATURES + 1) : at + rows * (FEATURES + 3)] == 7.0).all()
        at += rows * (FEATURES + 3)


def test_memory_that_cannot_be_pinned_does_no_harm(caplog):
    memory = positions(6000)
    first = register(memory, CUDA)
    again = register(memory, CUDA)  # the same pages twice: CUDA refuses
    assert not again.pinned
    assert "cannot pin" in caplog.text
    assert float(torch.ones(3, device=CUDA).sum()) == 3.0, "the refusal was handed to the next launch"
    again.close()
    first.close()


def test_batches_in_flight_do_not_mix_and_results_are_not_changed_by_later_ones():
    forward = on_cuda(network("blobnet-small"), slots=2)
    expected = [forward([positions(300, seed)]) for seed in range(4)]
    copies = [[tuple(output.copy() for output in one) for one in result] for result in expected]

    def ask(number):
        for _ in range(50):
            assert_alike(forward([positions(300, number)]), copies[number], 1e-5)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4), timeout=120))
    for result, copy in zip(expected, copies, strict=True):
        assert_alike(result, copy, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_with_a_fixed_shape_a_rows_answer_is_the_same_bits_in_any_company(name, dtype):
    forward, everything = on_cuda(network(name, dtype), dtype, 128, fixed_shape=True), positions(300)
    reference = np.concatenate(forward([everything])[0], axis=1)
    numbers = np.random.default_rng(7)
    for _ in range(20):
        rows = numbers.integers(0, 300, numbers.integers(1, 300))
        assert np.concatenate(forward([everything[rows]])[0], axis=1).tobytes() == reference[rows].tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_large_batch_in_another_order_has_the_same_bits_row_by_row(name, dtype):
    rows = 2048
    forward, everything = on_cuda(network(name, dtype), dtype, rows, fixed_shape=True), positions(rows)
    reference = np.concatenate(forward([everything])[0], axis=1)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(rows)
        found = np.concatenate(forward([everything[order]])[0], axis=1)
        different = (found != reference[order]).any(axis=1)
        assert found.tobytes() == reference[order].tobytes(), f"{different.sum()} rows of {rows} differ"


class Greedy(nn.Module):
    """Wants more memory than there is for more than `most` rows."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        if len(x) > self.most:
            torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
        return (x.sum(1, keepdim=True),)


def sums(*blocks):
    return [(block.sum(1, keepdims=True, dtype=np.float32),) for block in blocks]


@GRAPHS
def test_out_of_memory_halves_the_step_and_goes_on(graphs, caplog):
    module, blocks = Greedy(most=100), [positions(250), positions(33)]
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        forward = on_cuda(module, chunk_rows=400, graphs=graphs)
    assert_alike(forward(blocks), sums(*blocks), 0)
    assert forward.step.rows == 100
    assert len([record for record in caplog.records if "out of memory" in record.message]) == 1
    if not graphs:  # later, too
        module.most = 60
        assert_alike(forward(blocks), sums(*blocks), 0)
        assert forward.step.rows <= 60
    with pytest.raises(BackendError, match="single row"):
        on_cuda(Greedy(most=0), chunk_rows=4)


class Asks(nn.Module):
    """Looks at a number on the host, which no graph can."""

    def forward(self, x):
        return (x.sum(1, keepdim=True) if x.sum().item() >= 0 else x,)


def test_a_model_that_cannot_be_captured_runs_without_graphs_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "gpuinfer"):
        forward = on_cuda(Asks(), chunk_rows=32)
    block = positions(20)
    assert_alike(forward([block]), sums(block), 0)
    assert "cannot be captured" in caplog.text


@pytest.mark.parametrize("deterministic", [False, True])
async def test_the_backend_serves_from_the_device(deterministic):
    setup = Setup(spec("blobnet"), devices=("cuda",), dtype="bfloat16", deterministic=deterministic)
    backend = InProcess(setup, max_rows=1024)
    await backend.start(BackendContext())
    ((policy, values),) = await backend.infer([Request(positions(77), 77)])
    device = backend.device()
    await backend.close()
    assert (policy.shape, values.shape) == ((77, ACTIONS), (77, SEATS))
    assert device["name"] == torch.cuda.get_device_name(0)
    assert device["allocated_mb"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": "layers", "stages": 2},
        {"parallel": "pipeline", "stages": 3},
        {"parallel": "pipeline", "stages": 2, "micro_batch_rows": 7},
        {"parallel": "pipeline", "stages": 2, "graphs": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", NETWORKS)
async def test_stages_that_share_a_device_answer_as_the_cpu_does(name, options):
    batch = [Request(positions(rows, seed), rows) for seed, rows in enumerate((300, 1, 40))]
    expected = await answered(InProcess(Setup(spec(name), ("cpu",))), batch)
    assert_alike(await answered(InProcess(Setup(spec(name), ("cuda",)), **options), batch), expected, 1e-4)


@pytest.mark.parametrize("gate", [True, False], ids=["sharing the device", "each as if alone"])
async def test_two_models_at_once_do_not_mix(gate):
    backends = [InProcess(Setup(spec(name), ("cuda",)), gate=gate, max_rows=512) for name in NETWORKS]
    batches = [[Request(positions(rows, seed), rows)] for seed, rows in enumerate((500, 17, 300, 64))]
    expected = [
        [await answered(InProcess(Setup(spec(name), ("cpu",))), batch) for batch in batches] for name in NETWORKS
    ]
    for backend in backends:
        await backend.start(BackendContext())
    try:
        for _ in range(5):
            asked = [backend.infer(batch) for backend in backends for batch in batches]
            found = await asyncio.wait_for(asyncio.gather(*asked), 120)
            for ours, theirs in zip(found, [one for of in expected for one in of], strict=True):
                assert_alike(ours, theirs, 1e-4)
    finally:
        for backend in backends:
            await backend.close()


def test_the_roofline_is_measured_on_the_device_and_one_beyond_the_last_is_refused():
    found = measure(spec("blobnet-small"), devices=["cuda:0"], dtype="float32", seed=0, cores=2, budget_s=0.5)
    assert found.rows_per_s > 0
    assert "CUDA graph" in found.arrangement
    with pytest.raises(UsageError, match=r"this machine has cuda:0 \("):
        resolve_device(f"cuda:{torch.cuda.device_count()}")


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
async def test_two_devices_answer_as_one_does():
    rows = np.random.default_rng(1).integers(0, 2, (4096, 32), dtype=np.uint8)
    model = ModelSpec("blobnet-small", None, 32, "uint8", {"actions": 9, "seats": 4})
    found = []
    for names in (("cuda:0",), ("cuda:0", "cuda:1")):
        backend = InProcess(Setup(model, names))
        engine = Engine(backend, Dynamic())
        await engine.start()
        parts = await asyncio.gather(*(engine.submit(rows[at : at + 256], rows=256) for at in range(0, 4096, 256)))
        devices = backend.device().get("devices", {})
        await engine.close()
        found.append(np.concatenate([values for _, values in parts]))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert set(devices) == {"cuda:0", "cuda:1"}


def test_copies_of_one_lane_are_hidden_behind_the_compute_of_another():
    """With two lanes at work some of them are; with one lane none can be."""
    shares = {}
    for lanes in (1, 2):
        copies = CopyOverlap(lanes)
        forward = on_cuda(network("blobnet"), chunk_rows=4096, slots=lanes, copies=copies)
        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(lambda seed, ask=forward: ask([positions(4096, seed)]), range(2 * WINDOW)))
        found = copies.read()["transfers"]
        assert found["batches"] == WINDOW
        assert 0 <= found["hidden_s"] <= found["copied_s"]
        assert found["copied_s"] > 0
        shares[lanes] = found["hidden_s"] / found["copied_s"]
    assert shares[1] < 0.01
    assert shares[2] > shares[1]


def test_a_profile_has_the_devices_kernels_and_the_stations(tmp_path):
    forward, lane = on_cuda(network("blobnet-small"), graphs=False), Lane("forward 0")
    profile = Profile()
    profile.start()
    lane.enter("forward")
    forward([positions(100)])
    lane.enter("idle")
    profile.stop()
    profile.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"kernel", "cpu_op", "station"} <= {event.get("cat") for event in events}
