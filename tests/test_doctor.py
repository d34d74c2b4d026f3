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


def test_what_is_fast_or_slow_on_a_gpu_is_told(monkeypatch):
    found = examined(monkeypatch, GPU)
    assert "compute capability 9.0, 140" in found["cuda:0"].remark
    assert (found["driver"].value, found["driver"].remark) == ("580.1", "for CUDA 13.0 and before")
    assert found["layers of text"].value == "our own kernels, in Triton"
    assert found["attention"].value == "our own kernel"
    assert all(found[name].ok for name in ("cuda:0", "driver", "layers of text", "attention", "shared memory"))
    old = {"name": "T4", "capability": [7, 5], "free": 15e9, "total": 16e9}
    lacking = {**GPU, "gpus": [old], "triton": False, "nvml": "ModuleNotFoundError: pynvml", "registers": False}
    found = examined(monkeypatch, lacking)
    wanted = {
        "cuda:0": "float16",
        "driver": "nvidia-ml-py",
        "layers of text": "pip install triton",
        "attention": "padded",
        "shared memory": "ulimit",
    }
    for name, cure in wanted.items():
        assert not found[name].ok
        assert not found[name].serious
        assert cure in found[name].remark


def test_without_what_triton_needs_torchs_kernels_compute(monkeypatch):
    found = examined(monkeypatch, {**GPU, "triton_lacks": "a C compiler"})
    assert "lacks a C compiler" in found["layers of text"].remark
    assert "install gcc" in found["layers of text"].remark
    assert found["attention"].value == "torch's: flash or memory-efficient or plain"
    old = {**GPU, "triton": False, "gpus": [{**H200, "capability": [7, 5]}]}
    assert examined(monkeypatch, old)["attention"].value == "torch's: memory-efficient or plain"
    plain = examined(monkeypatch, {**GPU, "triton": False, "attention": ["plain"]})["attention"]
    assert "scores of all positions" in plain.remark


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"free": 10e9}, "other programs have most of its memory", id="others have its memory"),
        pytest.param({"capability": [7, 5]}, "no kernels for it, only for sm_80", id="torch was built for others"),
        pytest.param({"capability": [7, 5]}, "take --dtype float16", id="no bfloat16"),
    ],
)
def test_a_device_that_will_be_slow_is_told_why(monkeypatch, changes, said):
    found = examined(monkeypatch, {**GPU, "gpus": [{**H200, **changes}]})["cuda:0"]
    assert (found.ok, found.serious) == (False, False)
    assert said in found.remark


def test_a_device_that_cannot_be_used_is_told_why(monkeypatch):
    gpu = {"name": "H200", "capability": [9, 0], "total": 150e9, "trouble": "CUDA error: device is busy"}
    found = examined(monkeypatch, {**GPU, "gpus": [gpu]})["cuda:0"]
    assert (found.ok, found.remark) == (False, "cannot be used: CUDA error: device is busy")


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
    with monkeypatch.context() as without:
        without.setenv("CC", str(tmp_path / "none"))
        without.setenv("PATH", str(tmp_path))
        assert doctor.probe_torch()["triton_lacks"] == "a C compiler"
    shown = examined(monkeypatch, found)
    assert shown["shared memory"].ok is (registered == 0)
    assert shown["cuda:0"].ok


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param("raise ImportError('no libfoo')", "no libfoo", id="raises"),
        pytest.param("import os; os.kill(os.getpid(), 11)", "ended with -11", id="crashes"),
        pytest.param("print('garbage')", "garbage", id="answers nonsense"),
        pytest.param("pass", "no answer", id="says nothing"),
    ],
)
def test_a_torch_that_breaks_its_process_breaks_only_that(code, said):
    assert said in doctor.probe_torch(code)["error"]


def test_a_torch_that_hangs_is_given_up():
    assert "took over" in doctor.probe_torch("import time; time.sleep(60)", limit_s=0.5)["error"]


@pytest.mark.parametrize(
    ("torch", "name", "ok", "remark"),
    [
        pytest.param(WORKS, "selfplay --device cuda", False, "the NVIDIA driver reports no GPU", id="no GPU"),
        pytest.param(GPU, "cuda:0", True, "", id="a GPU"),
        pytest.param(BROKEN, "torch", False, "libfoo", id="torch is broken"),
        pytest.param(BROKEN, "selfplay --device cpu", False, "torch does not work", id="nothing runs without torch"),
    ],
)
def test_what_would_run_is_said_with_its_reason(monkeypatch, torch, name, ok, remark):
    monkeypatch.setattr(doctor, "nvidia_smi", lambda: "")
    monkeypatch.setattr(registry, "inspect", lambda record: replace(record, ok=True))
    finding = examined(monkeypatch, torch)[name]
    assert finding.ok is ok
    assert remark in finding.remark


def test_broken_settings_are_found_and_the_rest_still_examined(monkeypatch, tmp_path):
    (tmp_path / "gpuinfer.toml").write_text("devise = 1")
    found = examined(monkeypatch)
    assert "Did you mean 'device'" in found["settings"].remark
    assert "strategy dynamic" in found


def test_a_broken_plugin_is_named_with_its_reason(monkeypatch, tmp_path):
    install(tmp_path, "bad", {"backends": {"bad": "bad_module:X"}}, {"bad_module": "raise OSError('no such luck')"})
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = examined(monkeypatch, plugins_here=False)["backend bad"]
    assert (finding.ok, finding.serious, finding.remark) == (False, True, "OSError: no such luck")
