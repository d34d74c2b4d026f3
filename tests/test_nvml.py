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
GIB = 1 << 30


def listed(*held):
    return lambda handle: [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in held]


@pytest.fixture
def driver(monkeypatch):
    """A module pynvml, on which this process has 1 GiB and others have more."""
    module = ModuleType("pynvml")
    module.nvmlInit = lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=50)
    module.nvmlDeviceGetComputeRunningProcesses = listed((os.getpid(), GIB), (os.getppid(), 2 * GIB), (2**30, 3 * GIB))
    module.nvmlDeviceGetGraphicsRunningProcesses = listed((2**30 + 1, None))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    return module


def test_others_are_named_the_largest_first(driver):
    first, second, third = nvml.other_processes(CUDA)
    assert (first.pid, first.name, first.mb) == (2**30, "", 3072.0)  # no such process here
    assert (second.pid, second.mb) == (os.getppid(), 2048.0)
    assert second.name
    assert (third.pid, third.mb) == (2**30 + 1, None)  # the driver keeps it to itself


def test_where_this_process_has_another_number_nobody_is_taken_for_a_stranger(driver, monkeypatch):
    driver.nvmlDeviceGetComputeRunningProcesses = listed((2**30, 3 * GIB))
    assert [one.pid for one in nvml.other_processes(CUDA)] == [2**30, 2**30 + 1]  # it holds nothing there
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    assert nvml.other_processes(CUDA) == []


def test_a_cpu_has_none(driver):
    assert nvml.other_processes(CPU) == []


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
    assert [one["pid"] for one in reading["others"]] == [2**30, os.getppid(), 2**30 + 1]
    assert reading["pids"] == [os.getpid()]


def test_what_a_process_holds_on_several_devices_is_added_up():
    def reading(**held):
        return {"pids": [7], "others": [{"pid": int(pid[1:]), "name": "a", "mb": mb} for pid, mb in held.items()]}

    found = nvml.merged_processes([reading(p1=1.0, p2=None), reading(p1=2.0, p2=4.0), reading(p3=None)])
    assert {one["pid"]: one["mb"] for one in found["others"]} == {1: 3.0, 2: 4.0, 3: None}
    assert found["pids"] == [7]
    assert nvml.merged_processes([{"name": "a CPU"}]) == {}


def test_workers_of_one_run_are_no_strangers_to_one_another():
    def seen(own, *others):
        return {"reserved_mb": 1.0, "pids": [own], "others": [{"pid": pid, "name": "", "mb": 1.0} for pid in others]}

    added = DEVICE.add([seen(1, 2, 9), seen(2, 1, 9)])
    assert [one["pid"] for one in added["others"]] == [9]
    assert added["pids"] == [1, 2]
    assert [one["pid"] for one in DEVICE.add([added, seen(3, 1, 2, 9)])["others"]] == [9]
