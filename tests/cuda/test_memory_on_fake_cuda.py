"""What models take of a CUDA device's memory: looked at and tried there, and bounded."""

from __future__ import annotations

import pytest

from gpuinfer.lab.memory import batch_trials, rows_memory
from gpuinfer.lab.memory.probe_child import examine_memory
from gpuinfer.models import footprint
from gpuinfer.models.footprint import CudaMemoryMeter, memory_meter_of

pytestmark = pytest.mark.usefixtures("text", "stages_inline")
ROWS = dict.fromkeys(("max_rows", "in_flight", "chunk_rows", "threads", "split_points", "layers"))
ROWS |= {"compile": False, "graphs": True, "compute": "auto", "micro_batch_rows": 64}
METER = "models/footprint.py CudaMemoryMeter."


@pytest.fixture(autouse=True)
def probe(monkeypatch):
    """Of what is tried one batch; batches in flight one after the other."""
    monkeypatch.setattr(batch_trials, "_series", lambda top: [top])
    monkeypatch.setattr(rows_memory, "at_once", lambda calls: max(call() for call in calls))
    monkeypatch.setattr(footprint, "_place", id)  # fake tensors have no address


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [{"parallel": "data"}, {"parallel": "pipeline", "stages": 2}], ids=str)
@pytest.mark.parametrize("kind", ["rows", "text"])
def test_a_model_is_described_and_tried_on_the_device(cuda, kind, parallel):
    sizes = {"actions": 8, "seats": 3} if kind == "rows" else {}
    name = "blobnet-small" if kind == "rows" else "tiny"
    options = ROWS if kind == "rows" else {"step_tokens": 16, "graphs": False}
    asked = {
        "spec": {"name": name, "inputs": 44 if sizes else 0, "arguments": sizes, "kind": kind},
        "devices": ("cuda:0",),
        "dtype": "bfloat16",
        "seed": 0,
        "options": options | parallel,
        "batch_size": [4],
        "free": None,
        "context": 64,
        "probe": True,
    }
    *_, told = examine_memory(asked)
    (found,) = told["devices"]
    assert (found["device"], found["not_tried"]) == ("cuda:0", None)
    assert found["batch"]["estimated_bytes"] > found["batch"]["weights_bytes"] > 0
    assert len(found["stages"]) == parallel.get("stages", 0)
    assert found["tried"]
    assert "at most 0.900 of the memory" in cuda.log


def test_a_meter_reads_the_devices_allocator_once_the_device_is_done(cuda):
    meter = memory_meter_of(cuda.device)
    assert isinstance(meter, CudaMemoryMeter)
    cuda.allocated = 8 << 30
    with cuda.waiting_only_in(METER + "forget", METER + "peak"):
        meter.forget()
        assert (meter.held(), meter.peak(), meter.free()) == (8 << 30, 8 << 30, 72 << 30)
    meter.bound(32 << 30)
    assert cuda.log[-1] == "at most 0.500 of the memory"
