"""The file of steps: a line for each, whole, and gone on with after a crash."""

import json

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.steps import StepRecord, StepsFile, read_steps


def record(step):
    return StepRecord(step=step, version=step, at_s=float(step), wall_s=1.0, numbers=(step,), metrics={"loss": 0.5})


def test_each_step_can_be_read_at_once_and_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "steps.jsonl"
    file = StepsFile(path)
    for step in range(3):
        file.add(record(step))
        assert list(read_steps(path)) == [record(one) for one in range(step + 1)]
    file.close()
    line = json.loads(path.read_text().splitlines()[2])
    assert (line["step"], line["verdict"]) == (2, None)
    with path.open("ab") as torn:
        torn.write(b'{"step":3,"ver')
    again = StepsFile(path, resume=True)
    assert again.before == [record(step) for step in range(3)]
    again.add(record(3))
    again.close()
    assert list(read_steps(path)) == [record(step) for step in range(4)]


def test_what_cannot_be_gone_on_with_or_written_is_named(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text("something else\n")
    with pytest.raises(UsageError, match=r"line 1 of .* is no step"):
        StepsFile(path, resume=True)
    StepsFile(path).close()
    assert path.read_bytes() == b""
    with pytest.raises(UsageError, match=r"--steps .* cannot be written"):
        StepsFile(tmp_path / "nowhere" / "steps.jsonl")
