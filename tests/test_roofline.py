"""The roofline: the search for the best arrangement, and the process of its own that it runs in."""

import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from gpuinfer.api import ModelSpec
from gpuinfer.errors import BackendError, UsageError
from gpuinfer.models.bare import Arrangement, Candidate, climb, cpu_arrangements, cpu_rate, measure, search
from gpuinfer.models.roofline import measure_in_child

ONE, TWO = Arrangement(1, 2), Arrangement(2, 1)
SIZES = (64, 128, 256, 512, 1024, 2048)
RUN = {"device": "cpu", "dtype": "float32", "seed": 0, "cores": 1, "budget_s": 0.1}


def spec(name="blobnet-small"):
    return ModelSpec(name, inputs=16, arguments={"actions": 5, "seats": 2})


# The search, with rates from a table


def peaked(best_rows, height):
    """A machine whose rate grows up to `best_rows` and falls beyond."""

    def rate(arrangement, rows, seconds):
        return height[arrangement] * min(rows, best_rows) / max(rows, best_rows) ** 0.5

    return rate


@pytest.mark.parametrize(
    ("best_rows", "height", "expected"),
    [
        pytest.param(256, {ONE: 1, TWO: 2}, (TWO, 256), id="several forwards are faster"),
        pytest.param(512, {ONE: 3, TWO: 2}, (ONE, 512), id="one forward is faster"),
        pytest.param(64, {ONE: 1, TWO: 3}, (TWO, 64), id="the smallest batch is best"),
        pytest.param(2048, {ONE: 1, TWO: 3}, (TWO, 2048), id="the largest batch is best"),
    ],
)
def test_the_search_finds_the_peak(best_rows, height, expected):
    found = search(peaked(best_rows, height), [ONE, TWO], SIZES, budget_s=1.0)
    assert (found.arrangement, found.rows) == expected
    assert found.rate == peaked(best_rows, height)(found.arrangement, found.rows, 1.0)


def test_the_search_keeps_to_its_budget():
    spent = []

    def rate(arrangement, rows, seconds):
        spent.append(seconds)
        return float(rows)

    search(rate, [ONE, TWO], SIZES, budget_s=2.0)
    assert sum(spent) <= 2.0 + 1e-9
    assert max(spent) > 2 * min(spent), "the best are measured for longer"


def test_of_batches_that_are_as_good_the_smallest_is_named():
    def rate(arrangement, rows, seconds):
        return 100.0 + rows / 2048 if rows >= 256 else 50.0

    found = search(rate, [ONE, TWO], SIZES, budget_s=1.0)
    assert found.rows == 256
    assert found.rate == max(rate(ONE, rows, 1.0) for rows in (256, 512, 1024))


def test_the_climb_ends_when_two_doublings_gain_nothing():
    asked = []

    def rate(arrangement, rows, seconds):
        asked.append(rows)
        return min(rows, 128)

    assert [candidate.rows for candidate in climb(rate, ONE, SIZES, 0.1)] == asked == [64, 128, 256, 512]


def test_a_batch_that_does_not_fit_ends_the_climb_and_is_not_chosen():
    def rate(arrangement, rows, seconds):
        return float(rows) if rows <= 128 else 0.0

    assert search(rate, [ONE], SIZES, 1.0) == Candidate(ONE, 128, 128.0)


@pytest.mark.parametrize(
    ("cores", "single_threaded", "names"),
    [
        pytest.param(1, False, ["1 forward × 1 thread"], id="one core"),
        pytest.param(2, False, ["2 forwards × 1 thread", "1 forward × 2 threads"], id="two cores"),
        pytest.param(2, True, ["2 forwards × 1 thread"], id="deterministic"),
        pytest.param(
            16,
            False,
            ["16 forwards × 1 thread", "1 forward × 16 threads", "4 forwards × 4 threads"],
            id="many cores",
        ),
    ],
)
def test_arrangements_use_all_cores(cores, single_threaded, names):
    assert [str(arrangement) for arrangement in cpu_arrangements(cores, single_threaded)] == names


# Measuring for real


def test_the_rate_counts_the_rows_of_all_forwards():
    class Slow(nn.Module):
        def forward(self, x):
            time.sleep(0.01)
            return x

    rate = cpu_rate(Slow(), torch.ones(10, 3), Arrangement(3, 1), 0.05)
    assert 0 < rate <= 3 * 10 / 0.01


def test_a_forward_that_raises_ends_the_measurement():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        cpu_rate(nn.Linear(4, 4), torch.ones(2, 3), Arrangement(2, 1), 0.1)


def test_a_roofline_of_a_real_model():
    found = measure(spec(), **RUN)
    assert found.rows_per_s > 0
    assert found.at_rows in (*SIZES, 4096)
    assert found.arrangement == "1 forward × 1 thread"


# In a process of its own


def test_the_child_measures():
    assert measure_in_child(spec(), **RUN).arrangement == "1 forward × 1 thread"


def test_the_parent_needs_no_torch():
    code = "import sys, gpuinfer.models.roofline; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


FACTORIES = """
import os, signal, time
def dies(): os.kill(os.getpid(), signal.SIGKILL)
def hangs(): time.sleep(600)
def raises(): raise ValueError("no such layer")
"""


@pytest.mark.parametrize(
    ("name", "timeout_s", "error", "said"),
    [
        pytest.param("blobnett", 120, UsageError, "Did you mean 'blobnet'", id="an unknown model"),
        pytest.param("a_bad_model:raises", 120, UsageError, "no such layer", id="a factory that raises"),
        pytest.param(
            "a_bad_model:dies", 120, BackendError, "exit code -9 .* --no-roofline", id="a child that is killed"
        ),
        pytest.param("a_bad_model:hangs", 0.5, BackendError, "longer than 0.5 s", id="a child that hangs"),
    ],
)
def test_what_goes_wrong_in_the_child_is_told(name, timeout_s, error, said, tmp_path, monkeypatch):
    (tmp_path / "a_bad_model.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        measure_in_child(spec(name), **RUN, timeout_s=timeout_s)
