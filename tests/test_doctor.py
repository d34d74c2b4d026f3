"""The doctor finds what is there, and survives what is broken."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from packages import install

from gpuinfer.cli import doctor
from gpuinfer.config import registry

WORKS = {"cuda": None, "gpus": [], "cpu": "AVX2"}
H200 = {"name": "H200", "capability": [9, 0], "free": 140e9, "total": 150e9}
GPU = {
    "cuda": "13.0",
    "gpus": [H200],
    "cpu": "AVX2",
    "triton": True,
    "triton_lacks": "",
    "kernels_for": ["sm_80", "sm_90", "compute_120"],
    "attention": ["flash", "memory-efficient", "plain"],
    "driver": "580.1",
    "driver_cuda": "13.0",
    "registers": True,
}
T4 = {"name": "T4", "capability": [7, 5], "free": 15e9, "total": 16e9}
BUSY = {"name": "H200", "capability": [9, 0], "total": 150e9, "trouble": "CUDA error: device is busy"}
BROKEN = {"error": "ImportError: libfoo. Reinstall torch (pip install --force-reinstall torch)."}


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """The plugins that are installed: with the cache of all tests for their kernels, not with one of those below."""
    for record in registry.listing():
        registry.inspect(record)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.setenv(registry.DISABLED, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def examined(monkeypatch, torch=WORKS, *, plugins_here: bool = True) -> dict[str, doctor.Fact]:
    """What is found. Plugins are tried in this process, which has loaded what they need."""
    monkeypatch.setattr(doctor, "probe_torch", lambda: torch)
    if plugins_here:
        monkeypatch.setattr(doctor, "inspect_all", lambda records: [registry.inspect(record) for record in records])
    return {finding.name: finding for _, findings in doctor.examine_machine() for finding in findings}


@pytest.mark.parametrize(
    ("torch", "name", "ok", "said"),
    [
        (GPU, "cuda:0", True, "compute capability 9.0, 140"),
        (GPU, "driver", True, "580.1 for CUDA 13.0 and before"),
        (GPU, "layers of text", True, "our own kernels, in Triton"),
        (GPU, "attention", True, "our own kernel"),
        (GPU, "shared memory", True, "read by the device"),
        ({**GPU, "gpus": [T4]}, "cuda:0", False, "no kernels for it, only for sm_80"),
        ({**GPU, "gpus": [T4]}, "cuda:0", False, "take --dtype float16"),
        ({**GPU, "gpus": [{**H200, "free": 10e9}]}, "cuda:0", False, "other programs have most of its memory"),
        ({**GPU, "gpus": [BUSY]}, "cuda:0", False, "cannot be used: CUDA error: device is busy"),
        ({**GPU, "nvml": "ModuleNotFoundError: pynvml"}, "driver", False, "pip install 'gpuinfer[nvml]'"),
        ({**GPU, "triton": False}, "layers of text", False, "pip install triton"),
        ({**GPU, "triton_lacks": "a C compiler"}, "layers of text", False, "lacks a C compiler, and decoding is "
         "slower: install gcc"),
        ({**GPU, "triton": False}, "attention", False, "torch's: flash or memory-efficient or plain rows are padded"),
        ({**GPU, "triton": False, "gpus": [T4]}, "attention", False, "torch's: memory-efficient or plain"),
        ({**GPU, "triton": False, "attention": ["plain"]}, "attention", False, "scores of all positions"),
        ({**GPU, "registers": False}, "shared memory", False, "ulimit"),
        (WORKS, "selfplay --device cuda", False, "the NVIDIA driver reports no GPU"),
        (BROKEN, "torch", False, "libfoo"),
        (BROKEN, "selfplay --device cpu", False, "torch does not work"),
    ],
)  # fmt: skip
def test_what_there_is_and_would_run_is_told_with_the_cure(monkeypatch, torch, name, ok, said):
    monkeypatch.setattr(doctor, "nvidia_smi", lambda: "")
    monkeypatch.setattr(registry, "inspect", lambda record: replace(record, ok=True))
    finding = examined(monkeypatch, torch)[name]
    assert finding.ok is ok
    assert said in f"{finding.value} {finding.remark}"
    assert ok or finding.serious is (torch is BROKEN)


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((9, 0), ["sm_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((10, 3), ["sm_90"], False),
        ((10, 3), ["sm_100"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_100f"], False),
        ((9, 4), ["gfx90a", "gfx942"], True),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((7, 5), ["compute_80"], False),
    ],
)
def test_which_devices_run_what_was_compiled(capability, kernels, runs):
    assert doctor.runs_on(*capability, kernels) is runs


TORCH = """
from types import SimpleNamespace as Made

uint8 = None
version = Made(cuda="13.0")

def frombuffer(buffer, dtype):
    return Made(data_ptr=lambda: 4096, numel=lambda: len(buffer))

def mem_get_info(index):
    if index == 1:
        raise RuntimeError("CUDA error: device is busy\\nand more")
    return 100, 200

def cudaHostRegister(address, size, flags):
    assert (address, size, flags) == (4096, 1 << 20, 1)
    return REGISTERED

cuda = Made(
    is_available=lambda: True,
    device_count=lambda: 2,
    get_device_properties=lambda index: Made(name=f"H{index}", major=9, minor=0, total_memory=200),
    mem_get_info=mem_get_info,
    get_arch_list=lambda: ["sm_90"],
    init=lambda: None,
    cudart=lambda: Made(cudaHostRegister=cudaHostRegister),
)
enabled = {f"{kind}_sdp_enabled": lambda kind=kind: kind != "math" for kind in ("flash", "mem_efficient", "math")}
backends = Made(cpu=Made(get_cpu_capability=lambda: "AVX2"), cuda=Made(**enabled))
"""
PYNVML = """
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return b"580.1"
def nvmlSystemGetCudaDriverVersion(): return 13010
"""


@pytest.mark.parametrize("registered", [0, 2])
def test_what_a_torch_with_cuda_is_asked(monkeypatch, tmp_path, registered):
    """A made-up one, which the child imports."""
    (tmp_path / "torch.py").write_text(TORCH.replace("REGISTERED", str(registered)))
    (tmp_path / "pynvml.py").write_text(PYNVML)
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CC", sys.executable)
    found = doctor.probe_torch()
    assert found["gpus"] == [
        {"name": "H0", "capability": [9, 0], "total": 200, "free": 100},
        {"name": "H1", "capability": [9, 0], "total": 200, "trouble": "CUDA error: device is busy"},
    ]
    assert (found["driver"], found["driver_cuda"], found["registers"]) == ("580.1", "13.1", registered == 0)
    assert (found["triton"], found["attention"]) == (True, ["flash", "memory-efficient"])
    assert found["triton_lacks"] in ("", "Python's headers")
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.probe_torch()["triton_lacks"] == "a C compiler"


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("raise ImportError('no libfoo')", 60.0, "no libfoo"),
        ("import os; os.kill(os.getpid(), 11)", 60.0, "ended with -11"),
        ("print('garbage')", 60.0, "garbage"),
        ("pass", 60.0, "no answer"),
        ("import time; time.sleep(60)", 0.5, "took over"),
    ],
)
def test_a_torch_that_breaks_its_process_breaks_only_that(code, limit_s, said):
    assert said in doctor.probe_torch(code, limit_s)["error"]


def test_broken_settings_and_plugins_are_found_and_the_rest_still_examined(monkeypatch, tmp_path):
    (tmp_path / "gpuinfer.toml").write_text("devise = 1")
    install(tmp_path, "bad", {"backends": {"bad": "bad_module:X"}}, {"bad_module": "raise OSError('no such luck')"})
    monkeypatch.syspath_prepend(str(tmp_path))
    found = examined(monkeypatch, plugins_here=False)
    assert "Did you mean 'device'" in found["settings"].remark
    assert found["strategy dynamic"].ok
    bad = found["backend bad"]
    assert (bad.ok, bad.serious, bad.remark) == (False, True, "OSError: no such luck")
