"""The file of steps: a line for each, whole, and gone on with after a crash."""

import json

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.steps import StepRecord, StepsFile, read_steps


def record(step):
    return StepRecord(step=step, version=step, at_s=float(step), wall_s=1.0, numbers=(step,), metrics={"loss": 0.5})


def test_each_step_can_be_read_as_soon_as_it_is_written(tmp_path):
    file = StepsFile(tmp_path / "steps.jsonl")
    for step in range(3):
        file.add(record(step))
        assert [one.step for one in read_steps(file.path)] == list(range(step + 1))
    file.close()
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert lines[2]["step"] == 2
    assert lines[2]["verdict"] is None
    assert list(read_steps(file.path)) == [record(step) for step in range(3)]


def test_a_line_that_a_crash_left_half_written_is_cut_off(tmp_path):
    path = tmp_path / "steps.jsonl"
    first = StepsFile(path)
    first.add(record(0))
    first.close()
    with path.open("ab") as torn:
        torn.write(b'{"step":1,"ver')
    again = StepsFile(path, resume=True)
    assert again.before == [record(0)]
    again.add(record(1))
    again.close()
    assert list(read_steps(path)) == [record(0), record(1)]


def test_a_file_is_written_anew_unless_it_is_gone_on_with(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("something else\n")
    with pytest.raises(UsageError, match=r"line 1 of .* is no step"):
        StepsFile(path, resume=True)
    StepsFile(path).close()
    assert path.read_bytes() == b""


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--steps .* cannot be written"):
        StepsFile(tmp_path / "nowhere" / "steps.jsonl")
