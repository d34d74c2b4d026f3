"""Triton compiles each kernel to machine code for devices that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CAPABILITIES = (80, 90)
SHARED = 99 << 10  # bytes that a block may have on the least of the devices from Ampere on


def test_every_kernel_is_compiled_for_devices_that_are_not_there(tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_ahead.py")
    command = [sys.executable, "-W", "ignore", str(script), ",".join(map(str, CAPABILITIES))]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=840)
    assert done.returncode == 0, done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = Counter(one["kernel"] for one in built)
    assert set(kernels) == {"attend", "attend_shared", "join", "norm", "place", "activate", "weigh", "pick"}
    assert {one["capability"] for one in built} == set(CAPABILITIES)
    assert all(one["bytes"] > 1000 and one["shared"] <= SHARED for one in built), built
