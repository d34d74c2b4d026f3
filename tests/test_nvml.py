"""Who else is on a device, told by a driver's library that is made up here."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gpuinfer.models import device as nvml
from gpuinfer.models.device import Gauge
from gpuinfer.stats import DEVICE

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
GIB, OWN, PARENT, STRANGER = 1 << 30, os.getpid(), os.getppid(), 2**30


def listed(*held):
    return lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held]


@pytest.fixture
def driver(monkeypatch):
    """A module pynvml, on which this process has 1 GiB and others have more."""
    module = ModuleType("pynvml")
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=50)
    module.nvmlDeviceGetComputeRunningProcesses = listed((OWN, GIB), (PARENT, 2 * GIB), (STRANGER, 3 * GIB))
    module.nvmlDeviceGetGraphicsRunningProcesses = listed((STRANGER + 1, None))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    return module


def test_others_are_named_the_largest_first_and_a_cpu_has_none(driver):
    found = nvml.other_processes(CUDA)
    assert [(one.pid, one.mb) for one in found] == [(STRANGER, 3072.0), (PARENT, 2048.0), (STRANGER + 1, None)]
    assert (found[0].name, bool(found[1].name)) == ("", True)  # no such process here
    assert nvml.other_processes(CPU) == []


def test_where_this_process_has_another_number_nobody_is_taken_for_a_stranger(driver, monkeypatch):
    driver.nvmlDeviceGetComputeRunningProcesses = listed((STRANGER, 3 * GIB))
    assert [one.pid for one in nvml.other_processes(CUDA)] == [STRANGER, STRANGER + 1]  # it holds nothing there
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    assert nvml.other_processes(CUDA) == []


@pytest.mark.parametrize("trouble", ["absent", "no rights"])
def test_without_a_working_driver_nobody_is_seen(trouble, driver, monkeypatch):
    def refuse(handle):
        raise PermissionError

    if trouble == "absent":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    driver.nvmlDeviceGetComputeRunningProcesses = refuse
    assert nvml.other_processes(CUDA) == []


def test_a_gauge_tells_them_and_which_process_it_is_itself(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 << 20)
    reading = Gauge(CUDA).read()
    assert (reading["allocated_mb"], reading["reserved_mb"], reading["utilisation"]) == (3.0, 4.0, 0.5)
    assert [one["pid"] for one in reading["others"]] == [STRANGER, PARENT, STRANGER + 1]
    assert reading["pids"] == [OWN]


def test_readings_are_added_up_and_workers_of_one_run_are_no_strangers_to_one_another():
    def reading(own, **held):
        return {
            "reserved_mb": 1.0,
            "pids": [own],
            "others": [{"pid": int(pid[1:]), "name": "a", "mb": mb} for pid, mb in held.items()],
        }

    found = nvml.merged_processes([reading(7, p1=1.0, p2=None), reading(7, p1=2.0, p2=4.0), reading(7, p3=None)])
    assert ({one["pid"]: one["mb"] for one in found["others"]}, found["pids"]) == ({1: 3.0, 2: 4.0, 3: None}, [7])
    assert nvml.merged_processes([{"name": "a CPU"}]) == {}
    added = DEVICE.add([reading(1, p2=1.0, p9=1.0), reading(2, p1=1.0, p9=1.0)])
    assert ([one["pid"] for one in added["others"]], added["pids"]) == ([9], [1, 2])
    assert [one["pid"] for one in DEVICE.add([added, reading(3, p1=1.0, p2=1.0, p9=1.0)])["others"]] == [9]
